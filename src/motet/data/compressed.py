"""Files that are compressed as a whole, by their endings: gzip, bzip2, xz, zstd."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from motet.core.files import open_regular
from motet.data.remote_manifest import RemoteFile


class _Zstandard(io.RawIOBase):
    """A zstd file as it is decompressed, by Arrow, which datasets need in any case. Going back begins anew."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file, self._stream, self._position = file, self._opened(file), 0

    @staticmethod
    def _opened(file: IO[bytes]) -> Any:
        import pyarrow

        file.seek(0)
        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the end of a compressed file is not known before it is read")
        target = offset + (self._position if whence == io.SEEK_CUR else 0)
        if target < self._position:
            self._stream, self._position = self._opened(self._file), 0
        while self._position < target and (data := self._stream.read(min(target - self._position, 1 << 20))):
            self._position += len(data)
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _open_zstandard(file: IO[bytes], mode: str) -> IO[bytes]:
    return io.BufferedReader(_Zstandard(file))


_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst")
"""What may stand behind the ending of a format."""
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises, or one that is cut off."""


def is_compressed(path: Path | RemoteFile) -> bool:
    """Whether a file is compressed, by its ending."""
    return path.suffix.lower() in _OPENERS


def open_file(path: Path | RemoteFile) -> IO[bytes]:
    """The bytes of a file; of a remote one those of its local copy. Raises OSError, and as `Copies.open`."""
    return path.open_copy() if isinstance(path, RemoteFile) else open_regular(path)


def open_decompressed(path: Path | RemoteFile) -> IO[bytes]:
    """The contents of a file, decompressed if its ending says so. Raises OSError. Reading backward starts anew."""
    file = open_file(path)
    opener = _OPENERS.get(path.suffix.lower())
    opened: IO[bytes] = file if opener is None else opener(file, "rb")
    return opened
