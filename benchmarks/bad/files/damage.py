"""Ways in which the bytes of a file are damaged, and what may stand in the place of a file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[bytes], bytes]
"""From the bytes of a whole file to those of a damaged one."""
Change = Callable[[Path], object]
"""Changes what stands at a path: a file, a folder, or a folder with the files of a case. It gives nothing back."""


def cut(share: float) -> Damage:
    """The first part of a file."""
    return lambda data: data[: int(len(data) * share)]


def flip(seed: int, count: int = 8, start: int = 0, end: int | None = None) -> Damage:
    """Turn over `count` bits at drawn places of the bytes from start to end."""

    def apply(data: bytes) -> bytes:
        rng, changed = random.Random(seed), bytearray(data)
        for _ in range(count):
            changed[rng.randrange(start, min(end or len(data), len(data)))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    return apply


def overwrite(at: int, value: bytes) -> Damage:
    """Other bytes from `at` on; from the end, if that is negative."""

    def apply(data: bytes) -> bytes:
        place = at if at >= 0 else len(data) + at
        return data[:place] + value + data[place + len(value) :]

    return apply


def zeros(data: bytes) -> bytes:
    """As many bytes, all zero: what a disk leaves of a file whose size was written and whose content was not."""
    return bytes(len(data))


def nothing_left(data: bytes) -> bytes:
    """An empty file."""
    return b""


def text(data: bytes) -> bytes:
    """The page that a server sends in the place of a file that it has not."""
    return b"<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>\n"


def replace(old: bytes, new: bytes, count: int = 1) -> Damage:
    """Other bytes in the place of some that must be there."""

    def apply(data: bytes) -> bytes:
        assert old in data, old
        return data.replace(old, new, count)

    return apply


def apply(path: Path, damage: Damage) -> None:
    """Damage a file."""
    path.write_bytes(damage(path.read_bytes()))


def damaged(name: str, damage: Damage) -> Change:
    """A file of a folder damaged."""
    return lambda folder: apply(folder / name, damage)


def placed(name: str, place: Change) -> Change:
    """Something else in the place of a file of a folder, as in PLACES."""
    return lambda folder: place(folder / name)


def _cleared(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def gone(path: Path) -> None:
    """Nothing at all."""
    _cleared(path)


def folder(path: Path) -> None:
    """A folder of that name."""
    _cleared(path).mkdir()


def pipe(path: Path) -> None:
    """A pipe that nobody writes to: opening it waits for ever."""
    os.mkfifo(_cleared(path))


def dangling(path: Path) -> None:
    """A link to what is not there."""
    _cleared(path).symlink_to("is-not-there")


def circular(path: Path) -> None:
    """A link to itself."""
    _cleared(path).symlink_to(path.name)


def device(path: Path) -> None:
    """A link to a device that never ends."""
    _cleared(path).symlink_to("/dev/zero")


def unreadable(path: Path) -> None:
    """A file without the permission to read it."""
    path.chmod(0)


PLACES: dict[str, Change] = {
    "gone": gone,
    "a folder": folder,
    "a pipe": pipe,
    "a dangling link": dangling,
    "a circular link": circular,
    "a device": device,
}
"""What may stand in the place of any file. Root reads what it has no permission to read."""
if os.getuid() != 0:
    PLACES["unreadable"] = unreadable
