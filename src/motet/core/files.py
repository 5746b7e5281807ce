"""The files that a user names: regular ones are read, so that nothing waits for a pipe or reads a device; written is
where a file can be.
"""

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
    """What a path names is there, but is no regular file; `strerror` says what it is."""


def printable(path: str) -> str:
    """A path for a message: bytes in it that are no UTF-8 as question marks, which a terminal can show."""
    return path.encode("utf-8", "replace").decode()


def irregular_kind(path: str | Path) -> str | None:
    """What stands at `path` in the place of a regular file ("a pipe"), links followed; None for a regular file.

    Raises OSError if there is nothing, or no permission to look.
    """
    return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))


def open_regular(path: str | Path) -> IO[bytes]:
    """A regular file, opened for reading. Raises OSError, and never waits: IrregularFile for what is none."""
    if kind := irregular_kind(path):
        raise IrregularFile(errno.EINVAL, f"is {kind}, not a regular file", str(path))
    # Not blocking: should it become a pipe after all, opening does not wait for a writer.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def check_output(path: Path) -> None:
    """Raises UserError where no file can be written, as far as is known before anything is computed for it."""
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}.")
    try:
        kind = irregular_kind(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    # Who writes into a pipe waits for its reader. A device takes what it is given, as /dev/null does.
    if kind not in (None, "a device"):
        raise UserError(f"{path} cannot be written: it is {kind.replace('directory', 'folder')}; name a file.")
