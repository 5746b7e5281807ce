"""References to the bytes of images, clips and videos, and the reasons why one cannot be used.

The bytes are a file, or a slice of a tar shard that is read in place. Those that a record itself holds (base64, columns
of bytes, compressed shards) are copied into the index, and are slices of its file of rows.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from motet.core.errors import UserError, is_out_of_memory
from motet.core.files import FileSlice, IrregularFile, open_regular, printable
from motet.core.modalities import AUDIO, IMAGE, VIDEO, own_modalities
from motet.data.copies import Copies
from motet.data.remote import is_url, path_of

IN_ANSWER = 64
"""What an index adds to the position of the modality of an item in a turn of the assistant."""
OF_SEVERAL = 1 << 32
"""What a dataset adds to the height of an image beside others in its example, where its encoder takes it otherwise."""

# Of all formats that `headers` and `videos` read; .ts is TypeScript's as well.
_IMAGE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".gif", ".tif", ".tiff"),
    *(".bmp", ".dib", ".ppm", ".pgm", ".pbm", ".pnm"),
)
_AUDIO_SUFFIXES = (".wav", ".rf64", ".aiff", ".aif", ".flac", ".ogg", ".oga", ".opus", ".mp3")
_VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".m2ts", ".ogv", ".flv"),
    *(".wmv", ".asf", ".3gp", ".3g2"),
)


IN_RECORD = ", held by the record"
"""The end of the name of an item whose bytes its record holds: "image 1, held by the record"."""
LISTED = ", listed by the record"
"""The end of the name of a video whose frames its record lists: "video 1, listed by the record"."""
OF_VIDEO = ", the sound of it"
"""The end of the member's name of a clip that is the sound of a video, in the same file."""


class BadMedia(Exception):
    """A file that cannot be used, and the reason. It never ends a run, unlike a UserError."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = printable(path), printable(reason)
        super().__init__(self.path, self.reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Unusable(ValueError):
    """A file can be read but not used. The exception's text is the reason, as a clause."""


@dataclass(frozen=True)
class MediaRef:
    """One item of one example, with all that another process needs to load it.

    path:   the item's own file, or the tar shard that holds it; a path, or a URL.
    member: the name inside the shard; empty for an own file. Of the sound of a video it ends with OF_VIDEO.
    offset, num_bytes: the slice of the shard; num_bytes is -1 for an own file.
    data:   the bytes of an item that its record holds, until they are in the index.
    copies: where the local copy of a URL is; None for a path.
    raw:    (width, height) in pixels, (samples, sampling rate), `VideoHeader.raw`, or (rows, 0) of an own modality,
            from the header when the index was built; None if not known yet.
    in_answer: it stands in a turn of the assistant (not in a document), so that a generator can learn to make it.
    folder: of a video whose frames are listed: what their paths are relative to.
    """

    modality: str
    path: str
    member: str = ""
    offset: int = 0
    num_bytes: int = -1
    raw: tuple[int, int] | None = None
    data: bytes | None = field(default=None, repr=False)
    in_answer: bool = False
    copies: Copies | None = field(default=None, repr=False)
    folder: str = ""

    @property
    def is_held_list(self) -> bool:
        """Whether its bytes list the frames of a video (`data/listed_frames.py`)."""
        return self._own_member.endswith(LISTED)

    @property
    def is_sound_of_video(self) -> bool:
        """Whether it is a clip that lies in the file of a video (`data/video_sound.py`)."""
        return self.member.endswith(OF_VIDEO)

    @property
    def sound(self) -> MediaRef:
        """The sound of this video, an item beside it."""
        return replace(self, modality=AUDIO, member=f"{self.member}{OF_VIDEO}")

    @property
    def name(self) -> str:
        """The file for messages: "a.png", "shard.tar:a.png", or "image 1, held by the record"."""
        member = self._own_member
        return f"{self.path}:{member}" if member and not member.endswith((IN_RECORD, LISTED)) else member or self.path

    @property
    def _own_member(self) -> str:
        return self.member.removesuffix(OF_VIDEO)

    def open(self) -> IO[bytes]:
        """The bytes of this item as a file. Raises OSError, and as `Copies.open`."""
        if self.data is not None:
            return io.BytesIO(self.data)
        if self.copies is not None:
            return self.copies.open(self.path, self.offset, self.num_bytes)
        if self.num_bytes < 0:
            return open_regular(self.path)
        return io.BufferedReader(FileSlice(open_regular(self.path), self.offset, self.num_bytes))


def modality_of(name: str) -> str | None:
    """The modality of a file name by its ending, or None."""
    suffix = Path(name).suffix.lower()
    if suffix in _IMAGE_SUFFIXES:
        return IMAGE
    if suffix in _AUDIO_SUFFIXES:
        return AUDIO
    if suffix in _VIDEO_SUFFIXES:
        return VIDEO
    return next((own.name for own in own_modalities() if suffix in own.suffixes), None)


def check_unchanged(ref: MediaRef, raw: tuple[int, int], form: str) -> None:
    """Raise Unusable if a file's header differs from its header at indexing. form: of both, in words."""
    if ref.raw is not None and raw != ref.raw:
        raise Unusable(
            f"has {form.format(*raw)}, but its header at indexing promised {form.format(*ref.raw)}; put the former "
            "file back, or delete the index"
        )


def codec_of(ref: MediaRef) -> str:
    """What decodes an item, by the ending of its name: ".jpg"."""
    name = ref._own_member or ref.path
    suffix = (path_of(name) if is_url(name) else Path(name)).suffix.lower()
    return ".jpg" if suffix == ".jpeg" else suffix


@contextmanager
def raise_bad_media(ref: MediaRef) -> Iterator[None]:
    """Turn every exception on a file into BadMedia with a reason that the user can act on.

    But for a UserError, and for memory that the machine has not, which are no fault of the file: MemoryError names it.
    """
    try:
        yield
    except (BadMedia, UserError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryError(f"{ref.name}: {str(error) or 'none is left for what it holds'}") from error
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
    if type(error).__name__ == "UnidentifiedImageError":
        return "is no image that Pillow knows, or its header is damaged"
    if type(error).__name__ == "LibsndfileError":
        return f"is no audio that soundfile knows, or it is damaged ({getattr(error, 'error_string', error)})"
    return f"cannot be read ({type(error).__name__}: {error})"
