"""Opening files that a user names. Only regular files are read, so that nothing waits for a pipe or reads a device.
And writing one that is never seen in part.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable
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


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[str | Path | None]) -> None:
    """Raise UserError if a file that a command reads would be overwritten, or one output by another.

    outputs: None and "-", standard output, are no files; nor is a device, which takes any output. inputs: those of a
    name that no file has (URLs) do not count.
    """
    taken = {os.path.realpath(path): "this command reads it" for path in inputs if path is not None}
    for path in outputs:
        if path is None or path == Path("-") or path.is_char_device():
            continue
        if why := taken.get(os.path.realpath(path)):
            raise UserError(f"{path} cannot be written: {why}; name another file.")
        taken[os.path.realpath(path)] = "another output of this command has that name"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it has its former content or the new one, whenever this process or its machine ends.

    Raises OSError, of `path`.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        try:
            temporary.write_bytes(content)
            sync(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)
    except OSError as error:
        error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def names_open_file(path: Path, descriptor: int) -> bool:
    """Whether a path names the file that is open, which may have been removed, moved away, or replaced by another."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


class FileSlice(io.RawIOBase):
    """A part of an open file as a file; closing it closes the open file."""

    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._num_bytes, self._position = file, offset, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._position, self._num_bytes)[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        num_bytes = min(len(buffer), max(self._num_bytes - self._position, 0))
        data = os.pread(self._file.fileno(), num_bytes, self._offset + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
