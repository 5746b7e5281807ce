"""Where the bytes of an image or a clip are, and what is said of one that cannot be used.

A source is a file, or a slice of a tar shard that is read in place.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from motet.core.files import IrregularFile, open_regular, printable

IMAGE = "image"
AUDIO = "audio"
MODALITIES = (IMAGE, AUDIO)
"""What a manifest can hold. The place in this tuple is the code that an index stores: append only."""

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")


class BadMedia(Exception):
    """One file that cannot be used: which one, and why. Not the user's whole input, and never the end of a run."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = printable(path), printable(reason)
        super().__init__(self.path, self.reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Unusable(ValueError):
    """A file that can be read and is of no use all the same. Its text is the reason, as a clause."""


@dataclass(frozen=True)
class MediaRef:
    """One item of one example: enough to load it in another process.

    path:      a file, or the tar shard that holds it.
    member:    name inside the shard; empty for a file of its own.
    offset, num_bytes: the slice of the shard; num_bytes is -1 for a file of its own.
    raw:       (width, height) in pixels, or (samples, sampling rate), as the header said when the index was built;
               None if not known yet.
    """

    modality: str
    path: str
    member: str = ""
    offset: int = 0
    num_bytes: int = -1
    raw: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.path}:{self.member}" if self.member else self.path

    def open(self) -> IO[bytes]:
        """The bytes of this item alone, as a file. Raises OSError."""
        if self.num_bytes < 0:
            return open_regular(self.path)
        return io.BufferedReader(_Slice(open_regular(self.path), self.offset, self.num_bytes))


def modality_of(name: str) -> str | None:
    """The modality that a file name's ending tells, or None."""
    suffix = Path(name).suffix.lower()
    if suffix in _IMAGE_SUFFIXES:
        return IMAGE
    return AUDIO if suffix in _AUDIO_SUFFIXES else None


@contextmanager
def raise_bad_media(ref: MediaRef) -> Iterator[None]:
    """Turns whatever the libraries raise on a file into BadMedia with a reason that a person can act on."""
    try:
        yield
    except BadMedia:
        raise
    except Exception as error:
        raise BadMedia(ref.name, failure_reason(error)) from error


def failure_reason(error: Exception) -> str:
    """Why a file could not be used, as a short clause."""
    if isinstance(error, Unusable):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IrregularFile):
        return str(error.strerror)
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, MemoryError):
        return "takes more memory than there is"
    if type(error).__name__ == "UnidentifiedImageError":
        return "is no image that Pillow knows, or its header is damaged"
    if type(error).__name__ == "LibsndfileError":
        return f"is no audio that soundfile knows, or it is damaged ({getattr(error, 'error_string', error)})"
    return f"cannot be read ({type(error).__name__}: {error})"


class _Slice(io.RawIOBase):
    """A part of an open file as a file of its own; closes the file with itself."""

    def __init__(self, file: IO[bytes], offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._num_bytes, self._at = file, offset, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._at, self._num_bytes)[whence]
        self._at = max(start + place, 0)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), max(self._num_bytes - self._at, 0))
        data = os.pread(self._file.fileno(), wanted, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()
