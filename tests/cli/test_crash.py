"""What nobody has thought of ends all ranks with one sentence, and its traceback is in the file that this names."""

import re
import sys
import threading
from pathlib import Path

import pytest

from cli.meddling import Meddling, motet
from cli.on_ranks import motet_under_agent
from cli.test_stop import STEP, arguments
from cli.tiny_job import losses
from motet.core.errors import JointUserError, RankFailure, UserError, is_out_of_memory, note_origin, originating
from motet.core.own_file import import_file
from motet.crash import PATIENCE_S, _report, _report_thread, _sentence, _write_traceback

SHORT = ("data.heldout=[]", "run.steps=4")


def traceback_of(sentence):
    return Path(re.search(r"The traceback is in (\S+\.txt)", sentence)[1]).read_text()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "motet train: failed with ZeroDivisionError at step 2: division by zero. There is no ch"),
        (
            "raise MemoryError('no room for 3 GiB')",
            "motet train: ran out of memory at step 2 (no room for 3 GiB). Raise",
        ),
        (
            "raise RuntimeError('CUDA out of memory. Tried')",
            "motet train: ran out of memory at step 2 (CUDA out of memory. Trie",
        ),
        (
            "raise OSError(28, 'No space left on device', '/x/y')",
            "motet train: cannot go on at step 2: /x/y: No space left on d",
        ),
        (
            "import sys; sys.exit(0)",
            "motet train: failed with RuntimeError at step 2: sys.exit(0) was called before the end. There is n",
        ),
        (
            "raise RuntimeError()",
            "motet train: failed with RuntimeError at step 2: no message. There is no checkpoint. The traceback is in",
        ),
    ],
)
def test_an_error_in_a_step_is_one_sentence_and_a_file_in_the_run_folder(job, tmp_path, code, said):
    done = motet(*arguments(job, tmp_path, *SHORT), meddling=Meddling(STEP, 2, 0, code))
    assert done.returncode == 3
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert traceback_of(done.stderr).startswith("Traceback")
    assert "in run\n" in traceback_of(done.stderr)
    assert str(tmp_path / "crash-") in done.stderr


def test_of_ranks_that_fail_only_the_first_speaks(job, tmp_path):
    code = "print('Listens on', *sorted(set(listening()))); raise KeyError('x')"
    done = motet_under_agent(2, *arguments(job, tmp_path, *SHORT), meddling=Meddling(STEP, 2, 1, code))
    assert done.returncode == 3
    said = [line for line in done.stderr.splitlines() if line.startswith("motet train")]
    assert len(said) == 1
    assert said[0].startswith("motet train, rank 1: failed with KeyError at step 2: 'x'. There is no checkpoint.")
    assert "KeyError" in traceback_of(said[0])
    assert "Listens on 0100007F\n" in done.stdout, "on this machine alone, as all ranks are on it"
    # What the other rank met as a consequence is kept, and not printed.
    assert all(re.search(r"crash-\d+-\d+-rank[01]-", path.name) for path in tmp_path.glob("crash-*"))


@pytest.mark.parametrize("where", [STEP, "motet.train.input.feed:Feed._joined"])
def test_a_rank_that_ends_by_itself_is_named_and_ends_all(job, tmp_path, where):
    """As in code of the user's own; its own code would say that all is done."""
    done = motet_under_agent(2, *arguments(job, tmp_path, *SHORT), meddling=Meddling(where, 2, 1, "exit()"))
    assert done.returncode == 3
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("motet train")]
    assert re.match(
        r"motet train, rank 1: failed with RuntimeError at (the loading of )?step 2: sys.exit\(\) was called before "
        "the end. There is no checkpoint. The tr",
        said,
    )
    assert "; it ends in code of your own, Meddling.begin" in said


def test_a_rank_that_finds_itself_alone_says_so(job, tmp_path):
    lost = "raise RuntimeError('[pair.cc:547] Connection closed by peer [127.0.0.1]:1')"
    done = motet(*arguments(job, tmp_path, *SHORT), meddling=Meddling(STEP, 2, 0, lost))
    assert "lost another rank, which died without a word at step 2; the system may have had no memory" in done.stderr


def test_any_command_ends_so(job, tmp_path):
    broken = Meddling("motet.analyze.command:analyze", 1, 0, "raise LookupError('a\\nb')")
    done = motet("analyze", "none.jsonl", meddling=broken, environment={"TMPDIR": str(tmp_path)})
    assert done.returncode == 3
    assert "motet analyze: failed with LookupError: a. The traceback is in" in done.stderr
    assert "LookupError: a\nb" in traceback_of(done.stderr)


def test_where_no_file_can_be_written_the_traceback_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    assert _write_traceback("Traceback", tmp_path / "absent") is None
    assert capsys.readouterr().err == "Traceback\n"


@pytest.mark.parametrize("gone", ["/dev/full", "pipe"])
def test_training_needs_no_terminal(job, tmp_path, gone):
    if gone == "pipe":
        code = "r, w = os.pipe(); os.close(r); os.dup2(w, 1)"
        done = motet(*arguments(job, tmp_path, *SHORT), meddling=Meddling("motet.train.trainer:train", 1, 0, code))
    else:
        done = motet(*arguments(job, tmp_path, *SHORT), stdout=gone)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(losses(tmp_path)) == 4
    assert (tmp_path / "report.html").exists()


def test_results_that_cannot_be_printed_are_no_success():
    done = motet("recipe-of-nothing", stdout="/dev/full")
    assert done.returncode == 2
    done = motet("--version", stdout="/dev/full")
    assert done.returncode == 3
    assert "motet: cannot go on: No space left on device. The traceback is in" in done.stderr


@pytest.mark.parametrize("rank", [0, 8])
def test_before_ranks_meet_the_first_of_each_machine_says_what_is_wrong(rank):
    done = motet("train", "absent.toml", environment={"RANK": str(rank), "LOCAL_RANK": "0"})
    assert done.returncode == 2
    assert done.stderr == "Cannot read the recipe absent.toml: No such file or directory.\n"


def test_before_ranks_meet_the_others_wait_to_be_ended_and_speak_if_they_are_not(monkeypatch, capsys):
    # torchrun ends all ranks with the first that has ended: were it another one, the first might not have spoken yet.
    waited = []
    monkeypatch.setattr("time.sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _report(UserError("This is wrong."), "motet train") == 2
    assert waited == [(PATIENCE_S, "")]
    assert capsys.readouterr().err == "rank 9: This is wrong.\n"


@pytest.mark.parametrize(
    ("error", "rank", "said"),
    [
        (UserError("This is wrong."), 3, "rank 3: This is wrong.\n"),
        (UserError("This is wrong."), 0, "This is wrong.\n"),
        (JointUserError("This is wrong."), 0, "This is wrong.\n"),
        (JointUserError("This is wrong."), 3, ""),
        (RankFailure("rank 1 failed"), 3, ""),
    ],
)
def test_who_says_what_after_ranks_have_met(error, rank, said, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    note_origin(error, rank=rank)
    assert _report(error, "motet train") == (3 if isinstance(error, RankFailure) else 2)
    assert capsys.readouterr().err == said


def test_a_thread_that_dies_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError:
        _report_thread(threading.ExceptHookArgs((*sys.exc_info(), threading.Thread(name="writer"))))
    said = capsys.readouterr().err
    assert said.startswith("The thread 'writer' ended with ZeroDivisionError: division by zero. The traceback is in")
    assert "Traceback" in next(tmp_path.iterdir()).read_text()


def test_what_is_lack_of_memory():
    import numpy as np
    import torch

    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    for allocate in (lambda: torch.empty(1 << 60), lambda: np.empty(1 << 59)):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            allocate()
        assert is_out_of_memory(raised.value)
    assert not is_out_of_memory(ValueError("out of memory"))


def test_an_error_in_code_of_ones_own_names_its_line(tmp_path, capsys):
    (tmp_path / "own.py").write_text("import json\nclass Mine:\n    def forward(self):\n        json.loads('{')\n")
    mine = import_file("model.encoders.image.module", str(tmp_path / "own.py")).Mine()
    with pytest.raises(ValueError) as error:
        mine.forward()
    assert _report(error.value, "motet train") == 3
    said = capsys.readouterr().err
    assert f"; it ends in code of your own, Mine.forward in {tmp_path}/own.py, line 4.\n" in said
    assert "please report" not in said


@pytest.mark.parametrize(("action", "where"), [("", "step 3"), ("0RECV_B0<1 of step 3", "0RECV_B0<1 of step 3")])
def test_a_rank_that_is_lost_outside_of_an_action_is_lost_at_a_step(action, where):
    """As where its end is noticed while examples are loaded, or before the first message is waited for."""
    error = RuntimeError("Connection closed by peer [127.0.0.1]")
    note_origin(error, action=action, others="rank 1")
    with pytest.raises(RuntimeError) as lost, originating(action="step 3"):
        raise error
    assert f"lost rank 1, which died without a word at {where}; the sys" in _sentence(lost.value, "motet train", None)
