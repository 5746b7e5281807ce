"""A run's folder: whatever else stands in it, or keeps it from being written, is one sentence; one run owns it."""

import fcntl
import json
import os
import subprocess
import sys

import pytest

from cli.meddling import Meddling, motet
from cli.test_stop import STEP, arguments
from cli.tiny_job import losses
from motet.core.errors import UserError
from motet.train.run_folder import FILES, FOLDERS, LOCK, locked_run_folder, writing

SHORT = ("data.heldout=[]", "run.steps=4")


def claim(folder):
    with locked_run_folder(folder, print):
        return "claimed"


OBSTACLES = {
    "folder": lambda path: path.mkdir(),
    "file": lambda path: path.write_text("of another program\n"),
    "fifo": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/full"),
}


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
@pytest.mark.parametrize("what", OBSTACLES)
def test_what_stands_where_training_writes_is_named_and_stays(tmp_path, name, what):
    is_of_a_run = name == LOCK and what == "file"
    OBSTACLES[what](tmp_path / name)
    before = sorted(tmp_path.iterdir())
    if is_of_a_run:
        assert claim(tmp_path) == "claimed"
        return
    with pytest.raises(UserError, match=f"^run.dir: .*{name}.* move it away"):
        claim(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_in_a_folder_of_a_run_too(tmp_path, name):
    claim(tmp_path)
    if name == LOCK:
        (tmp_path / LOCK).unlink()
    OBSTACLES["file" if name in FOLDERS else "folder"](tmp_path / name)
    with pytest.raises(UserError, match=f"{name} is no .* move it away"):
        claim(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "loop", "/proc/none"):
        with pytest.raises(UserError, match=r"^run.dir = .* cannot be written: "):
            claim(type(tmp_path)(path))


def test_a_second_run_is_refused_and_told_whose_the_folder_is(tmp_path):
    program = "import sys; from pathlib import Path\nfrom motet.train.run_folder import locked_run_folder\n"
    program += "with locked_run_folder(Path(sys.argv[1]), print):\n    print('mine', flush=True)\n    sys.stdin.read()"
    # A process that it has started, and that outlives it, does not keep the lock.
    program += "\n    import subprocess; subprocess.Popen(['sleep', '100'], stdout=2)\n    import os; os._exit(0)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], **pipes) as first:
        assert first.stdout.readline() == "mine\n"
        with pytest.raises(
            UserError, match=rf"is in use by process {first.pid} on .*: wait for it, stop it, or set ano"
        ):
            claim(tmp_path)
        first.communicate("")
    assert claim(tmp_path) == "claimed"
    assert claim(tmp_path) == "claimed"


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, capsys):
    def refuse(descriptor, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert claim(tmp_path) == "claimed"
    assert "has no locks, so nothing keeps a second run out of it" in capsys.readouterr().out


def test_a_run_in_the_folder_of_another_is_refused_and_changes_nothing(job, tmp_path):
    with locked_run_folder(tmp_path, print):
        before = (tmp_path / LOCK).read_text()
        done = motet(*arguments(job, tmp_path, *SHORT))
        assert done.returncode == 2
        assert f"run.dir = {tmp_path} is in use by process {os.getpid()} on" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
        assert (tmp_path / LOCK).read_text() == before


def test_a_disk_that_fills_up_while_logging_stops_the_run_with_what_it_has(job, tmp_path):
    """Here the log's file may not grow, and others may."""
    fill = (
        "from motet.train.report.step_lines import Lines\ndef full(self): raise OSError(28, 'No space left on device')"
    )
    fill += "\nLines._write = full"
    done = motet(*arguments(job, tmp_path, *SHORT), meddling=Meddling(STEP, 2, 0, fill))
    assert done.returncode == 2
    assert done.stderr == (
        f"{tmp_path / 'metrics.jsonl'} cannot be written: No space left on device, so training stops; step 3 is saved, "
        "and the same command goes on from it.\n"
    )
    assert len(losses(tmp_path)) == 1
    done = motet(*arguments(job, tmp_path, *SHORT))
    assert "Resuming after step 3" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("put_back", [False, True])
def test_a_folder_that_is_removed_ends_the_run_and_is_not_made_anew(job, tmp_path, put_back):
    """Another run may have begun there meanwhile."""
    folder = tmp_path / "run"
    # One that is removed file by file may be written to meanwhile.
    removes = f"os.rename({str(folder)!r}, {str(tmp_path / 'gone')!r})"
    removes += f"; os.mkdir({str(folder)!r})" if put_back else ""
    meddling = Meddling(STEP, 3, 0, removes)
    done = motet(*arguments(job, folder, *SHORT, "checkpoint.every_steps=1", "run.steps=6"), meddling=meddling)
    assert (done.returncode, done.stderr) == (
        2,
        f"run.dir = {folder}, or run.lock in it, was removed or moved away while the run went on, so training stops; "
        "nothing is saved.\n",
    )
    if put_back:
        assert {path.name for path in folder.iterdir()} <= {"checkpoints"}
    else:
        assert not folder.exists()


def test_a_log_that_is_removed_stops_the_run_with_what_it_has(job, tmp_path):
    log = tmp_path / "metrics.jsonl"
    done = motet(*arguments(job, tmp_path, *SHORT), meddling=Meddling(STEP, 2, 0, f"os.unlink({str(log)!r})"))
    assert (done.returncode, done.stderr) == (
        2,
        f"{log} cannot be written: it was removed or moved away, so training stops; step 3 is saved, and the same "
        "command goes on from it.\n",
    )
    assert motet(*arguments(job, tmp_path, *SHORT)).returncode == 0
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [4]


@pytest.mark.parametrize("max_file_bytes", [300, 3_000, 30_000])
def test_a_full_disk_is_one_sentence(job, tmp_path, max_file_bytes):
    """Of files that may not grow further: the index is the first, then recipe.toml, metrics.jsonl, the checkpoint."""
    done = motet(*arguments(job, tmp_path, *SHORT, "checkpoint.every_steps=1"), max_file_bytes=max_file_bytes)
    assert done.returncode == 2
    assert "File too large" in done.stderr or "could not be written" in done.stderr
    assert "is saved" not in done.stderr and not list(tmp_path.glob("checkpoints/*"))
    assert done.stderr.count("\n") == 1
    if (tmp_path / "metrics.jsonl").exists():
        text = (tmp_path / "metrics.jsonl").read_text()
        assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(1, text.count("\n") + 1))


def test_a_recipe_that_is_refused_leaves_the_one_that_the_run_has(job, tmp_path):
    assert motet(*arguments(job, tmp_path, *SHORT)).returncode == 0
    before = (tmp_path / "recipe.toml").read_bytes()
    done = motet(*arguments(job, tmp_path, *SHORT, "data.seed=77"))
    assert (done.returncode, "data.seed" in done.stderr) == (2, True)
    assert (tmp_path / "recipe.toml").read_bytes() == before


@pytest.mark.slow
def test_what_is_written_at_the_end_cannot_be(job, tmp_path):
    for name in ("summary.json", "report.html", "trace.json"):
        folder = tmp_path / name
        block = f"os.mkdir({str(folder / name)!r})"
        last = Meddling("motet.train.trainer:_Run._write_trace", 1, 0, block)
        done = motet(*arguments(job, folder, *SHORT), "--trace", meddling=last)
        assert (done.returncode, done.stderr) == (2, f"{folder / name} cannot be written: Is a directory.\n")


def test_writing_names_the_path_that_the_system_names(tmp_path):
    with pytest.raises(UserError, match="absent/file cannot be written: No such file"), writing(tmp_path):
        (tmp_path / "absent" / "file").write_text("")


def test_what_stops_all_ranks_leaves_the_steps_that_are_done(job, tmp_path):
    """Here examples that cannot be used, and answers that cannot be written."""
    too_many = "from motet.core.errors import JointUserError; raise JointUserError('Too many examples are bad.')"
    in_feed = Meddling("motet.train.input.feed:Feed._check_bad_fraction", 4, 0, too_many)
    done = motet(*arguments(job, tmp_path / "a", "data.heldout=[]", "run.steps=9"), meddling=in_feed)
    assert (done.returncode, done.stderr) == (
        2,
        "Too many examples are bad; step 3 is saved, and the same command goes on from it.\n",
    )
    done = motet(
        *arguments(job, tmp_path / "a", "data.heldout=[]", "run.steps=9"), "--resume", "never", meddling=in_feed
    )
    assert "step 3 is saved, and the same command without --resume never goes on from it." in done.stderr
    folder = tmp_path / "b"
    block = Meddling("motet.train.evaluate:Evaluator.run", 1, 0, f"os.mkdir({str(folder / 'answers.json')!r})")
    done = motet(*arguments(job, folder, "evaluate.every_steps=2", "run.steps=9"), meddling=block)
    assert (done.returncode, done.stderr) == (
        2,
        f"{folder / 'answers.json'} cannot be written: Is a directory; step 2 is saved, and the same command goes on "
        "from it.\n",
    )
