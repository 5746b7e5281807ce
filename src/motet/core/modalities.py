"""The modalities that manifests may hold: images, clips, videos, and those of the user's own.

An own modality is a Python file with four things (docs/media.md):

    ROW_DIM           the width of a row
    read_header(file) the rows of an item, from as little of its file as that takes
    load(file)        the item, float [rows, ROW_DIM]
    SUFFIXES          endings of its files' names, by which members of tar shards are found; optional

A recipe names the file (`[modalities.NAME]`). A process then knows the modality until it ends: one that is read from a
pickle, in a worker process, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from motet.core.errors import UserError
from motet.core.own_file import import_file

IMAGE, AUDIO, VIDEO = "image", "audio", "video"
MAX_KINDS = 63
"""An index stores positions among the modalities in 6 bits."""


@dataclass(frozen=True, eq=False)
class OwnModality:
    """A modality of the user's own.

    name:        its placeholder is <name>, and records name its files in fields `name` or `names`.
    file:        the Python file that defines it.
    row_dim:     the width of its items' rows.
    suffixes:    endings of its files' names, in lower case: (".ply",).
    digest:      of the file's text.
    read_header: an open file -> the number of the item's rows.
    load:        an open file -> the item's rows, [num_rows, row_dim].

    Example: `own_modality("points", "points.py").read_header(file)`
    """

    name: str
    file: Path
    row_dim: int
    suffixes: tuple[str, ...]
    digest: str
    read_header: Callable[[IO[bytes]], int]
    load: Callable[[IO[bytes]], Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_same, (self.name, str(self.file), self.digest)


_OWN: dict[str, OwnModality] = {}


def own_modalities() -> tuple[OwnModality, ...]:
    """The modalities of the user's own that this process knows, in the order in which they came."""
    return tuple(_OWN.values())


def modalities() -> tuple[str, ...]:
    """The names of all modalities; a modality keeps its position."""
    return (IMAGE, AUDIO, VIDEO, *_OWN)


def find_own(name: str) -> OwnModality | None:
    """The modality of the user's own of this name; None for another."""
    return _OWN.get(name)


def own_modality(name: str, file: str | Path) -> OwnModality:
    """The modality that a Python file defines, which this process then knows by its name.

    Raises UserError for a file that is missing, ends in an error or lacks a part, and for a name that is taken.
    """
    path = Path(file).resolve()
    if known := _OWN.get(name):
        if known.file != path:
            raise UserError(
                f"modalities.{name}: {path} defines a modality of the name that {known.file} has taken; give it another"
            )
        return known
    if len(modalities()) == MAX_KINDS:
        raise UserError(f"modalities.{name}: there are {MAX_KINDS} modalities already, and no room for more")
    module = import_file(f"modalities.{name}.file", path)
    made = OwnModality(
        name,
        path,
        _row_dim(module, f"{path}, the file of modalities.{name}"),
        _suffixes(module, f"{path}, the file of modalities.{name}"),
        hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest(),
        *(_function(module, function, path, name) for function in ("read_header", "load")),
    )
    _OWN[name] = made
    return made


def _the_same(name: str, file: str, digest: str) -> OwnModality:
    """As `own_modality`, in another process. Raises UserError if the file has another text there."""
    found = own_modality(name, file)
    if found.digest != digest:
        raise UserError(
            f"modalities.{name}: {file} is not the file that the run began with, so items could come out otherwise: "
            "give all machines the same, and leave it as it is while a run starts"
        )
    return found


def _row_dim(module: Any, where: str) -> int:
    row_dim = getattr(module, "ROW_DIM", None)
    if isinstance(row_dim, bool) or not isinstance(row_dim, int) or row_dim < 1:
        raise UserError(f"{where}: ROW_DIM is {row_dim!r}; set it to the width of a row, a whole number of at least 1")
    return row_dim


def _suffixes(module: Any, where: str) -> tuple[str, ...]:
    suffixes = getattr(module, "SUFFIXES", ())
    if isinstance(suffixes, str) or not all(isinstance(each, str) and each[:1] == "." for each in suffixes):
        raise UserError(f'{where}: SUFFIXES is {suffixes!r}; it must be endings of file names, as (".ply",)')
    return tuple(each.lower() for each in suffixes)


def _function(module: Any, function: str, path: Path, name: str) -> Callable[..., Any]:
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(
            f"{path}, the file of modalities.{name}, has no function {function}(file); it must have read_header(file), "
            "the number of an item's rows, and load(file), these rows"
        )
    return found  # type: ignore[no-any-return]
