"""WebDataset tar shards, read in place: a sample is the files of one key, its record the `.json` among them.

The key of a member is its path up to the first dot of the file name. Media are found at their offsets, never extracted,
so a shard must not be compressed. Media named by the record are looked up by file name or by what follows the key; if
the record names none, they are taken in the order in which they stand in the shard.
"""

from __future__ import annotations

import glob
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from motet.core.errors import UserError
from motet.data.media import MODALITIES, modality_of

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class Member:
    """One media file inside a shard: its name, and where its bytes are."""

    shard: str
    name: str
    offset: int
    num_bytes: int


def expand_shards(spec: str | Path) -> list[Path]:
    """The shards that a directory or a pattern names, in order of name; of braces, in the order of the braces."""
    if Path(spec).is_dir():
        return sorted(Path(spec).glob("*.tar"))
    expanded = _expand_braces(str(spec))
    if len(expanded) > 1:
        missing = [path for path in expanded if not glob.has_magic(path) and not Path(path).is_file()]
        if missing:
            raise UserError(f"manifest {spec}: shard {missing[0]} is missing ({len(missing)} of {len(expanded)} are)")
    paths = [
        path for pattern in expanded for path in (sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern])
    ]
    return [Path(path) for path in paths if path.endswith(".tar") and Path(path).is_file()]


def read_shard(shard: Path) -> Iterator[tuple[str, bytes, tuple[Member, ...]]]:
    """Key, record and media of each sample. Raises UserError naming shard and key."""
    try:
        with tarfile.open(shard, "r:") as tar:
            files = (member for member in tar if member.isfile())
            for key, group in groupby(files, key=lambda member: _split(member.name)[0]):
                members = list(group)
                records = [member for member in members if _split(member.name)[1].lower() == "json"]
                if len(records) != 1:
                    raise UserError(
                        f"{shard}, key {key}: has {len(records)} .json files, but needs just one with its record"
                    )
                text = tar.extractfile(records[0]).read()  # type: ignore[union-attr]
                media = tuple(
                    Member(str(shard), member.name, member.offset_data, member.size)
                    for member in members
                    if modality_of(member.name)
                )
                yield key, text, media
    except tarfile.TarError as error:
        raise UserError(f"{shard}: is no whole, uncompressed tar file ({error})") from None


def find_members(
    names: dict[str, list[str] | None], members: tuple[Member, ...], where: str
) -> tuple[dict[str, list[str]], dict[str, Member]]:
    """Member names of each modality, and the members by name.

    Raises UserError if the record names one that is not there.
    """
    by_name = {member.name: member for member in members}
    found: dict[str, list[str]] = {}
    for modality in MODALITIES:
        of_modality = [member.name for member in members if modality_of(member.name) == modality]
        named = names[modality]
        found[modality] = of_modality if named is None else [_look_up(name, of_modality, where) for name in named]
    return found, by_name


def _look_up(name: str, members: list[str], where: str) -> str:
    for member in members:
        if name in (member, Path(member).name, _split(member)[1]):
            return member
    raise UserError(f"{where}: names '{name}', but its sample holds only {', '.join(members) or 'no such media'}")


def _split(name: str) -> tuple[str, str]:
    """Key and ending: 'a/000.left.png' is ('a/000', 'left.png')."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending


def _expand_braces(pattern: str) -> list[str]:
    match = _BRACES.search(pattern)
    if not match:
        return [pattern]
    if bounds := _RANGE.fullmatch(match.group(1)):
        first, last = bounds.groups()
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        choices = match.group(1).split(",")
    return [
        path
        for choice in choices
        for path in _expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]
