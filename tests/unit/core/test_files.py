"""Where a file can be written."""

import errno
import os
from pathlib import Path

import pytest

from motet.core.errors import UserError
from motet.core.files import check_output, check_outputs, write_whole


def test_a_file_may_be_written_where_there_is_a_folder_and_no_pipe(tmp_path):
    check_output(tmp_path / "new")
    (tmp_path / "old").touch()
    check_output(tmp_path / "old")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("a/b", "no folder"), ("old/b", "no folder"), ("pipe", "is a pipe"), (".", "is a folder")):
        with pytest.raises(UserError, match=said):
            check_output(tmp_path / name)


def test_no_output_overwrites_what_is_read_or_another_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("link.json").symlink_to("plan.json")
    check_outputs([Path("a"), None, Path("-"), Path("-"), Path(os.devnull), Path(os.devnull)], ["b", None, "s3://x/a"])
    for outputs, inputs, why in (
        (["b", "a", "a"], [], "another output of this command has that name"),
        (["plan.json"], [tmp_path / "plan.json"], "this command reads it"),
        (["link.json"], ["plan.json"], "this command reads it"),
    ):
        with pytest.raises(UserError, match=f"{outputs[-1]} cannot be written: {why}"):
            check_outputs(map(Path, outputs), inputs)


def test_a_file_has_its_former_content_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "recipe.toml"
    write_whole(path, b"former")

    def stops(path):
        assert path.read_bytes() == b"new", "on the disk before it gets its name"
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("motet.core.files.sync", stops)
        with pytest.raises(OSError, match="No space left") as failed:
            write_whole(path, b"new")
    assert failed.value.filename == str(path)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("recipe.toml", b"former")]
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
