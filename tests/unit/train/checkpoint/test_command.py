"""`motet checkpoints` says of each checkpoint whether it is whole, changes nothing, and needs no torch."""

import json
import subprocess
import sys

import pytest

from motet.cli import main
from motet.core.errors import UserError
from motet.train.checkpoint.command import show_checkpoints
from motet.train.checkpoint.folder import set_aside
from unit.train.checkpoint import damages


def as_json(capsys, folder):
    show_checkpoints(folder, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_all_are_listed_with_what_is_wrong(run, capsys):
    (run / "step-00000012.tmp").mkdir()
    (run / "rank-00000.safetensors").write_text("no checkpoint")
    damages.flip(run / "step-00000008" / "rank-00000.safetensors", 0.5)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    told = as_json(capsys, run.parent)
    assert told["auto"] == "step-00000004"
    first, second, third = told["checkpoints"]
    assert (first["name"], first["whole"], first["problem"]) == ("step-00000004", True, "")
    assert (first["step"], first["position"], first["num_ranks"], first["motet"]) == (4, 24, 1, "0.1.0")
    assert first["size_bytes"] == sum(path.stat().st_size for path in (run / "step-00000004").iterdir())
    assert (second["name"], second["whole"], second["condition"]) == ("step-00000008", False, "damaged")
    assert second["problem"] == "rank-00000.safetensors is not as it was written, by its checksum."
    assert (third["name"], third["condition"]) == ("step-00000012.tmp", "unfinished")
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_auto_takes_neither_what_is_set_aside_nor_what_it_would_refuse(run, capsys):
    set_aside(run / "step-00000008", "superseded")
    told = as_json(capsys, run)
    assert told["auto"] == "step-00000004"
    assert [entry["whole"] for entry in told["checkpoints"]] == [True, True]
    damages.forge(run / "step-00000004", format=2)
    told = as_json(capsys, run)
    assert told["auto"] is None
    assert told["checkpoints"][0]["condition"] == "unreadable"


def test_one_checkpoint_can_be_named(newest, capsys):
    show_checkpoints(newest, as_json=False)
    said = capsys.readouterr().out.splitlines()
    assert said[1].split()[:2] == ["step-00000008", "48"]
    assert said[1].endswith("whole")


def test_the_table_says_what_is_wrong_and_what_is_taken(run, capsys, monkeypatch):
    (run / "step-00000008" / "state.json").unlink()
    monkeypatch.setattr(sys, "argv", ["motet", "checkpoints", str(run.parent)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert "step-00000008: state.json is missing." in said
    assert "--resume auto goes on from step-00000004." in said


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match="holds no checkpoints"):
            show_checkpoints(folder, as_json=False)


def test_a_folder_that_cannot_be_read_is_refused(run, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("motet.train.checkpoint.command.checkpoints", fail)
    with pytest.raises(UserError, match=f"{run} cannot be read: Permission denied"):
        show_checkpoints(run, as_json=False)


def test_it_runs_without_torch(run):
    script = "import sys; sys.modules['torch'] = None; from motet.cli import main; main()"
    command = [sys.executable, "-c", script, "checkpoints", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["auto"] == "step-00000008"


def test_those_at_a_url_are_copied_and_verified(run, capsys):
    (run / "latest.json").write_text(json.dumps({"line": ["step-00000004", "step-00000008"]}))
    here = as_json(capsys, run)
    there = as_json(capsys, f"file://{run}")
    assert there == here
    assert [one["name"] for one in as_json(capsys, f"file://{run}/step-00000004/")["checkpoints"]] == ["step-00000004"]
    # A run fetches the newest one alone, so that no other one helps.
    damages.flip(run / "step-00000008" / "rank-00000.safetensors", 0.5)
    there = as_json(capsys, f"file://{run}")
    assert there["auto"] is None
    assert [one["condition"] for one in there["checkpoints"]] == ["whole", "damaged"]
    (run / "step-00000008" / "manifest.json").unlink()
    assert as_json(capsys, f"file://{run}")["checkpoints"][1]["problem"].endswith("manifest.json is missing.")
    for url, said in ((f"file://{run}/none", "holds no checkpoints"), ("ftp://a/b", "URLs of 'ftp://' are not read")):
        with pytest.raises(UserError, match=said):
            show_checkpoints(url, as_json=False)
