"""WebDataset tar shards, read in place: a sample is the files of one key; its record is the `.json` among them.

The key of a member is its path up to the first dot of the file name. Media are read at their offsets and never
extracted, so a shard must not be compressed. A record names media by file name or by the part behind the key. If it
names none, the media are taken in the order of the shard.
"""

from __future__ import annotations

import glob
import math
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from motet.core.errors import UserError
from motet.core.files import irregular_kind, open_regular
from motet.data.media import MODALITIES, modality_of

_MAX_SHARDS = 100_000
"""The most shards that braces may name: 100 TB at a gigabyte each. More is a slip, and would fill the memory."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_NESTED = re.compile(r"\{[^}]*\{")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
_SCAN_BYTES = 1 << 20
# The exceptions of tarfile, and those that it lets through for meaningless headers.
_TAR_ERRORS = (tarfile.TarError, ValueError, OSError, ArithmeticError, LookupError, RecursionError)


@dataclass(frozen=True)
class Member:
    """One media file inside a shard: its name, and the slice of its bytes."""

    shard: str
    name: str
    offset: int
    num_bytes: int


def expand_shards(spec: str | Path) -> list[Path]:
    """The shards that a directory or a pattern names, in order of name; braces give their own order.

    Raises UserError for a file that is no shard, for a shard that is missing, and for braces that name too many.
    """
    if Path(spec).is_dir():
        shards = sorted(Path(spec).glob("*.tar"))
    else:
        expanded = list(_expand_braces(str(spec)))
        missing = [path for path in expanded if not glob.has_magic(path) and not Path(path).exists()]
        if missing and len(expanded) > 1:
            raise UserError(f"manifest {spec}: shard {missing[0]} is missing ({len(missing)} of {len(expanded)} are)")
        matches = (sorted(glob.glob(path)) if glob.has_magic(path) else [path] for path in expanded)
        shards = [Path(path) for paths in matches for path in paths if path not in missing]
    for shard in shards:
        if kind := irregular_kind(shard):
            raise UserError(f"manifest {spec}: {shard} is {kind}, but must be a regular file")
        if shard.suffix != ".tar":
            raise UserError(f"manifest {spec}: {shard} is among its files, but shards must end in .tar")
    return shards


def read_shard(shard: Path) -> Iterator[tuple[str, bytes, tuple[Member, ...]]]:
    """Key, record and media of each sample. Raises UserError naming shard and key.

    Damage of the shard may be found only behind its last sample, after all of them were yielded.
    """
    seen: set[str] = set()
    try:
        with open_regular(shard) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for key, group in groupby(_files(tar, shard), key=lambda member: _split(member.name)[0]):
                members = list(group)
                if key in seen:
                    raise UserError(f"{shard}, key {key}: stands in two places; the files of a sample must be adjacent")
                seen.add(key)
                record = _record(members, f"{shard}, key {key}")
                text = tar.extractfile(record).read()  # type: ignore[union-attr]
                media = tuple(
                    Member(str(shard), member.name, member.offset_data, member.size)
                    for member in members
                    if modality_of(member.name)
                )
                yield key, text, media
    except _TAR_ERRORS as error:
        raise UserError(f"{shard}: is no whole, uncompressed tar file ({error})") from None


def _files(tar: tarfile.TarFile, shard: Path) -> Iterator[tarfile.TarInfo]:
    """The regular files of a shard, in order. Raises UserError, at the end at the latest, if files are missing."""
    end = -1
    while (member := tar.next()) is not None:
        # tarfile would keep every member in memory.
        tar.members.clear()
        if tar.offset <= end:
            raise UserError(f"{shard}: is damaged at byte {end:,}: a member there ends before it begins")
        end = tar.offset
        if member.issparse() or not (member.isfile() or member.isdir()):
            if member.issparse() or _is_of_a_sample(member.name):
                kind = "stored sparse" if member.issparse() else "a link" if member.linkname else "no regular file"
                raise UserError(
                    f"{shard}: member {member.name} is {kind}, so its bytes are not in one place; write the shard with "
                    "regular files (tar --hard-dereference --dereference)"
                )
        elif member.isfile():
            yield member
    _check_end(tar, shard)


def _check_end(tar: tarfile.TarFile, shard: Path) -> None:
    """Raise UserError unless the shard ends with a block of zeros, and only zeros follow.

    For tarfile a damaged header is the end of the archive, and so is the end of a file that is cut off between two
    members. Of several joined archives it reads only the first.
    """
    file = tar.fileobj
    assert file is not None
    file.seek(tar.offset)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise UserError(
            f"{shard}: is cut off: it ends after {tar.offset + len(block):,} bytes without the empty blocks that end a "
            "tar file; write it anew"
        )
    if any(block):
        raise UserError(f"{shard}: is damaged at byte {tar.offset:,}, where a member must begin; write it anew")
    while chunk := file.read(_SCAN_BYTES):
        if chunk.count(0) < len(chunk):
            raise UserError(
                f"{shard}: holds more behind its end at byte {tar.offset:,}; several tar files that were joined must "
                "be several shards"
            )


def _record(members: list[tarfile.TarInfo], where: str) -> tarfile.TarInfo:
    """The member of a sample that is its record. Raises UserError unless there is exactly one."""
    name, count = Counter(member.name for member in members).most_common(1)[0]
    if count > 1:
        raise UserError(f"{where}: holds {name} {count} times; write the shard anew with each file once")
    records = [member for member in members if _split(member.name)[1].lower() == "json"]
    if len(records) != 1:
        raise UserError(f"{where}: has {len(records)} .json files, but needs just one with its record")
    return records[0]


def _is_of_a_sample(name: str) -> bool:
    """Whether a member is a record or media: other members may be anything."""
    return modality_of(name) is not None or _split(name)[1].lower() == "json"


def find_members(
    names: dict[str, list[str] | None], members: tuple[Member, ...], where: str
) -> tuple[dict[str, list[str]], dict[str, Member]]:
    """The member names of each modality, and the members by name.

    Raises UserError if the record names a member that its sample does not have.
    """
    by_name = {member.name: member for member in members}
    by_modality: dict[str, list[str]] = {}
    for modality in MODALITIES:
        present, named = [member.name for member in members if modality_of(member.name) == modality], names[modality]
        by_modality[modality] = present if named is None else [_look_up(name, present, where) for name in named]
    return by_modality, by_name


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


def _expand_braces(pattern: str) -> Iterator[str]:
    """Every name that a pattern stands for. Raises UserError if there are too many, before it makes any."""
    if _NESTED.search(pattern):
        raise UserError(f"manifest {pattern}: has braces within braces; name one list or range in each")
    count = math.prod(_num_choices(match.group(1)) for match in _BRACES.finditer(pattern))
    if count > _MAX_SHARDS:
        raise UserError(f"manifest {pattern}: its braces name {count:,} shards, more than {_MAX_SHARDS:,}")
    yield from _expand(pattern)


def _num_choices(choices: str) -> int:
    if bounds := _RANGE.fullmatch(choices):
        return max(int(bounds[2]) - int(bounds[1]) + 1, 0)
    return choices.count(",") + 1


def _expand(pattern: str) -> Iterator[str]:
    match = _BRACES.search(pattern)
    if not match:
        yield pattern
        return
    if bounds := _RANGE.fullmatch(match.group(1)):
        first, last = bounds.groups()
        choices = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    else:
        choices = match.group(1).split(",")
    for choice in choices:
        for rest in _expand(pattern[match.end() :]):
            yield pattern[: match.start()] + choice + rest
