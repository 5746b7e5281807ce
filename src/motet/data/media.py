"""Where the bytes of an image or a clip are, and how large it is by its header alone.

A source is a file, or a slice of a tar shard that is read in place. Headers are read lazily by Pillow (width, height)
and soundfile (frames, sampling rate); nothing is decoded.
"""

from __future__ import annotations

import io
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

IMAGE = "image"
AUDIO = "audio"
MODALITIES = (IMAGE, AUDIO)
"""What a manifest can hold. The place in this tuple is the code that an index stores: append only."""

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")
_EXIF_ORIENTATION = 0x0112
_UNKNOWN_RIFF_BYTES = 0x7FFFF000
# Orientations 5 to 8 of EXIF turn the picture by a quarter: the stored width is the height of what is seen.
_QUARTER_TURNS = frozenset((5, 6, 7, 8))


class BadMedia(Exception):
    """One file that cannot be used: which one, and why. Not the user's whole input, and never the end of a run."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


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
            return Path(self.path).open("rb")
        return io.BufferedReader(_Slice(Path(self.path).open("rb"), self.offset, self.num_bytes))


def modality_of(name: str) -> str | None:
    """The modality that a file name's ending tells, or None."""
    suffix = Path(name).suffix.lower()
    if suffix in _IMAGE_SUFFIXES:
        return IMAGE
    return AUDIO if suffix in _AUDIO_SUFFIXES else None


def read_header(ref: MediaRef) -> tuple[int, int]:
    """(width, height) of an image as it is seen, or (samples, sampling rate) of a clip. Raises BadMedia."""
    with _reasons(ref), ref.open() as file:
        raw = _image_header(file) if ref.modality == IMAGE else _audio_header(file)
    if min(raw) < 1:
        raise BadMedia(ref.name, "is empty: " + ("no pixels" if ref.modality == IMAGE else "no samples"))
    return raw


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; read from the header, and so only for JPEG, where cameras write it."""
    # Pillow would decode the whole of a PNG in search of EXIF.
    return int(image.getexif().get(_EXIF_ORIENTATION, 1)) if image.format in ("JPEG", "MPO") else 1


def _image_header(file: IO[bytes]) -> tuple[int, int]:
    from PIL import Image

    with Image.open(file) as image:
        width, height = image.size
        return (height, width) if orientation(image) in _QUARTER_TURNS else (width, height)


def _audio_header(file: IO[bytes]) -> tuple[int, int]:
    import soundfile

    _check_whole_riff(file)
    with soundfile.SoundFile(file) as clip:
        return clip.frames, clip.samplerate


def _check_whole_riff(file: IO[bytes]) -> None:
    """A WAV that was cut off says so in its header; soundfile would quietly read what is left."""
    magic, num_bytes = struct.unpack("<4sI", file.read(8).ljust(8, b"\0"))
    actual = file.seek(0, os.SEEK_END)
    file.seek(0)
    # Programs that write to a pipe do not know the size: they leave it 0, or as large as it goes. A last odd byte is
    # often not padded.
    if magic == b"RIFF" and 0 < num_bytes < _UNKNOWN_RIFF_BYTES and num_bytes + 8 > actual + 1:
        raise EOFError(f"cut off: it has {actual} of {num_bytes + 8} bytes")


class _reasons:
    """Turns whatever the libraries raise on a file into BadMedia with a reason that a person can act on."""

    def __init__(self, ref: MediaRef) -> None:
        self.ref = ref

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, BadMedia):
            return
        raise BadMedia(self.ref.name, explain(error)) from error


def explain(error: Exception) -> str:
    """Why a file could not be read, as a short clause."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "is a directory"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if type(error).__name__ == "UnidentifiedImageError":
        return "is no image that Pillow knows, or its header is damaged"
    if type(error).__name__ == "LibsndfileError":
        return f"is no audio that soundfile knows, or it is damaged ({getattr(error, 'error_string', error)})"
    if isinstance(error, EOFError):
        return f"is {error}"
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
