"""Opening files that a user names. Only regular files are read, so that nothing waits for a pipe or reads a device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

from motet.core.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class IrregularFile(OSError):
    """A path that exists, but is no regular file. `strerror` says what it is."""


def printable(path: str) -> str:
    """The path as a terminal can show it: bytes that are not UTF-8 become question marks."""
    return path.encode("utf-8", "replace").decode()


def irregular_kind(path: str | Path) -> str | None:
    """The kind of file at `path` if it is not regular ("a pipe"); None for a regular file. Follows links.

    Raises OSError if there is no file, or no permission to look.
    """
    return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading, without ever waiting. Raises OSError: IrregularFile if it is not regular."""
    if kind := irregular_kind(path):
        raise IrregularFile(errno.EINVAL, f"is {kind}, not a regular file", str(path))
    # Without O_NONBLOCK, opening would wait for a writer if the file became a pipe meanwhile.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def check_output(path: Path) -> None:
    """Raise UserError if `path` cannot be written, as far as that is known before the output is computed."""
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}.")
    try:
        kind = irregular_kind(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    # Writing to a pipe waits for a reader. A device such as /dev/null takes any output.
    if kind not in (None, "a device"):
        raise UserError(f"{path} cannot be written: it is {kind.replace('directory', 'folder')}; name a file.")
