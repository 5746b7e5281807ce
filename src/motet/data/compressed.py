"""Files that are compressed as a whole, by their endings: gzip, bzip2, xz, zstd."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from motet.core.files import open_regular
from motet.data.remote_manifest import RemoteFile

_BLOCK_BYTES = 1 << 16


class _Streams:
    """The streams of a bzip2 or xz file, one behind the other, as parallel compressors write them.

    Python's own readers take a stream whose begin is damaged for the end of the file.
    """

    def __init__(self, file: IO[bytes], decompressor: Callable[[], Any]) -> None:
        self._file, self._new, self._current = file, decompressor, decompressor()

    def read(self, size: int) -> bytes:
        """At most `size` bytes; b"" at the end. Raises EOFError for a file that is cut off."""
        while True:
            block = b""
            if self._current.eof:
                # Zeros may stand between and behind streams.
                block = self._current.unused_data.lstrip(b"\0")
                while not block:
                    if not (read := self._file.read(_BLOCK_BYTES)):
                        return b""
                    block = read.lstrip(b"\0")
                self._current = self._new()
            elif self._current.needs_input and not (block := self._file.read(_BLOCK_BYTES)):
                raise EOFError("it ends within a stream")
            if data := self._current.decompress(block, size):
                return bytes(data)


class _Decompressed(io.RawIOBase):
    """A file as it is decompressed. stream: what reads it from its begin. Going back begins anew."""

    def __init__(self, file: IO[bytes], stream: Callable[[IO[bytes]], Any]) -> None:
        super().__init__()
        self._file, self._opened, self._stream, self._position = file, stream, stream(file), 0

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
            self._file.seek(0)
            self._stream, self._position = self._opened(self._file), 0
        while self._position < target and (data := self._stream.read(min(target - self._position, 1 << 20))):
            self._position += len(data)
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _zstandard(file: IO[bytes]) -> Any:
    """By Arrow, which datasets need in any case."""
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")


def _opener(stream: Callable[[IO[bytes]], Any]) -> Callable[..., IO[bytes]]:
    return lambda file, mode: io.BufferedReader(_Decompressed(file, stream))


_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": _opener(partial(_Streams, decompressor=bz2.BZ2Decompressor)),
    ".xz": _opener(partial(_Streams, decompressor=lzma.LZMADecompressor)),
    ".zst": _opener(_zstandard),
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
