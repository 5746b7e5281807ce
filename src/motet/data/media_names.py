"""What a record may name an item by: a path, a URL, a data URL, or a table of bytes and path as HF datasets have it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import isfinite

from motet.core.errors import UserError
from motet.core.modalities import IMAGE
from motet.data.media import modality_of
from motet.data.record_fields import kind_of
from motet.data.remote import LOCAL_URL, check_protocol, is_url
from motet.data.videos import RATES

DATA_URL = "data:"
"""How bytes begin that a record holds."""
DATA_URL_HEAD = f"{DATA_URL};base64,"
"""How bytes begin that are written in base64, of no stated type."""

_TABLE = {"bytes", "path"}
_RATE = 24.0
"""Frames a second of listed frames of which none are said, as in transformers."""


class FrameNames(str):
    """The names of the frames of a video, which a record lists in place of one name; as a text, the first of them.

    fps: frames a second.

    Example:
        >>> names = FrameNames.of(["0.png", "1.png"], 2, "line 1")
        >>> names.frames, names.fps
        (('0.png', '1.png'), 2.0)
    """

    __slots__ = ("fps", "frames")

    frames: tuple[str, ...]
    fps: float

    @classmethod
    def of(cls, listed: Sequence[object], fps: object, where: str) -> FrameNames:
        """fps: what the record says, None if nothing. Raises UserError naming `where` for what is no list of files."""
        if not listed:
            raise UserError(f"{where} is an empty list, but must name the frames of a video")
        names = [media_name(name, f"{where}: frame {number}") for number, name in enumerate(listed, start=1)]
        if any(name.startswith(DATA_URL) for name in names):
            raise UserError(f"{where} lists frames as bytes; save them as files, or as one video")
        found = cls(names[0])
        found.frames, found.fps = tuple(names), _rate(fps, where)
        return found

    def below(self, folder: str) -> FrameNames:
        """The same frames, of which paths were relative to a folder, and are to the one that it is in."""
        names = [name if is_url(name) else os.path.join(folder, name) for name in self.frames]
        found = FrameNames(names[0])
        found.frames, found.fps = tuple(names), self.fps
        return found


def video_names(value: object, fps: object, where: str) -> list[str]:
    """The videos of a field: a name, or a list of them, in which a list of names is the frames of one video.

    A list of names of images alone is the frames of one video, too. fps: of `FrameNames`. Raises UserError.
    """
    if not isinstance(value, list):
        return [media_name(value, where)]
    if value and all(isinstance(name, str) and modality_of(name) == IMAGE for name in value):
        return [FrameNames.of(value, fps, where)]
    return [FrameNames.of(name, fps, where) if isinstance(name, list) else media_name(name, where) for name in value]


def _rate(fps: object, where: str) -> float:
    """Frames a second; a number may be written as a text. Raises UserError naming `where`."""
    if fps is None:
        return _RATE
    try:
        rate = float(fps) if isinstance(fps, int | float | str) and not isinstance(fps, bool) else 0.0
    except ValueError:
        rate = 0.0
    if not isfinite(rate) or not RATES[0] <= rate <= RATES[1]:
        raise UserError(
            f"{where} lists frames, and 'fps' is {kind_of(fps)}, but must be the frames a second, from "
            f"{float(RATES[0]):g} to {RATES[1]}"
        )
    return rate


def media_name(value: object, where: str) -> str:
    """A path, or a URL that Motet reads. where: the record and its field. Raises UserError for anything else."""
    if isinstance(value, dict) and value.keys() <= _TABLE and value:
        # What a column of images or audio of HF datasets holds; the path is the name that the bytes once had.
        value = value.get("bytes") or value.get("path")
        if not value:
            raise UserError(f"{where} has neither bytes nor a path")
    if not isinstance(value, str) or not value:
        raise UserError(f"{where} is {kind_of(value)}, but must be a file name, or a data URL with its bytes")
    if is_url(value):
        check_protocol(value, f"{where} is the URL '{value[:60]}'")
    return value.removeprefix(LOCAL_URL)
