"""Where a file can be written."""

import os
from pathlib import Path

import pytest

from motet.core.errors import UserError
from motet.core.files import check_output, check_outputs


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
