"""Where a file can be written."""

import os

import pytest

from motet.core.errors import UserError
from motet.core.files import check_output


def test_a_file_may_be_written_where_there_is_a_folder_and_no_pipe(tmp_path):
    check_output(tmp_path / "new")
    (tmp_path / "old").touch()
    check_output(tmp_path / "old")
    os.mkfifo(tmp_path / "pipe")
    for name, said in (("a/b", "no folder"), ("old/b", "no folder"), ("pipe", "is a pipe"), (".", "is a folder")):
        with pytest.raises(UserError, match=said):
            check_output(tmp_path / name)
