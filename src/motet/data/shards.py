"""WebDataset tar shards, read in place: a sample is the files of one key; its record is the `.json` among them.

The key of a member is its path up to the first dot of the file name. Media are read at their offsets and never
extracted; those of a compressed shard are copied into the index. A record names media by file name or by the part
behind the key. If it names none, the media are taken in the order of the shard.

A sample of one media file and a `.txt` is a pair, as img2dataset writes it: a document of the item and its caption. A
`.json` beside them that is no record is what is known of the pair, and is kept as its `metadata`.
"""

from __future__ import annotations

import glob
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.core.files import irregular_kind
from motet.core.modalities import modalities
from motet.core.text_files import parse_json
from motet.data.alpaca import is_instruction
from motet.data.compressed import DECOMPRESSION_ERRORS, is_compressed, open_decompressed
from motet.data.media import modality_of
from motet.data.parts import TEXTS_FIELD
from motet.data.record_fields import RECORD_FIELDS, is_given
from motet.data.remote_manifest import RemoteFile
from motet.data.shard_names import TAR_ENDINGS, expand_braces

_SCAN_BYTES = 1 << 20
# The exceptions of tarfile, and those that it lets through for meaningless headers.
_TAR_ERRORS = (tarfile.TarError, *DECOMPRESSION_ERRORS, ValueError, ArithmeticError, LookupError, RecursionError)


@dataclass(frozen=True)
class Member:
    """One media file inside a shard: its name, and the slice of its bytes.

    data: the bytes themselves, of a compressed shard, in which there is nothing to read in place.
    """

    shard: str
    name: str
    offset: int
    num_bytes: int
    data: bytes | None = None


def expand_shards(spec: str | Path) -> list[Path]:
    """The tar shards of a directory, or the files that a pattern names, in order of name; braces give their own order.

    Raises UserError for a shard that is missing or no regular file, and for braces that name too many.
    """
    if Path(spec).is_dir():
        shards = sorted(path for path in Path(spec).iterdir() if path.name.lower().endswith(TAR_ENDINGS))
    else:
        expanded = list(expand_braces(str(spec)))
        missing = [path for path in expanded if not glob.has_magic(path) and not Path(path).exists()]
        if missing and len(expanded) > 1:
            raise UserError(f"manifest {spec}: shard {missing[0]} is missing ({len(missing)} of {len(expanded)} are)")
        matches = (sorted(glob.glob(path)) if glob.has_magic(path) else [path] for path in expanded)
        shards = [Path(path) for paths in matches for path in paths if path not in missing]
    for shard in shards:
        if kind := irregular_kind(shard):
            raise UserError(f"manifest {spec}: {shard} is {kind}, but must be a regular file")
    return shards


def read_shard(shard: Path | RemoteFile) -> Iterator[tuple[str, bytes, tuple[Member, ...]]]:
    """Key, record and media of each sample. Raises UserError naming shard and key.

    Damage of the shard may be found only behind its last sample, after all of them were yielded.
    """
    seen: set[str] = set()
    try:
        with open_decompressed(shard) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            files = _read(tar, _files(tar, shard), in_place=not is_compressed(shard))
            for key, group in groupby(files, key=lambda read: _split(read[0].name)[0]):
                read = list(group)
                if key in seen:
                    raise UserError(f"{shard}, key {key}: stands in two places; the files of a sample must be adjacent")
                seen.add(key)
                media = tuple(
                    Member(str(shard), member.name, member.offset_data, member.size, data)
                    for member, data in read
                    if modality_of(member.name)
                )
                yield key, _record(tar, read, media, f"{shard}, key {key}"), media
    except _TAR_ERRORS as error:
        kind = "compressed" if is_compressed(shard) else "uncompressed"
        raise UserError(f"{shard}: is no whole, {kind} tar file ({error})") from None


def _read(
    tar: tarfile.TarFile, members: Iterator[tarfile.TarInfo], *, in_place: bool
) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Each member with its bytes, if it is part of a sample and cannot be read in place, or later."""
    for member in members:
        # A compressed file must be read forward only.
        wanted = not in_place and _is_of_a_sample(member.name)
        yield member, tar.extractfile(member).read() if wanted else None  # type: ignore[union-attr]


def _files(tar: tarfile.TarFile, shard: Path | RemoteFile) -> Iterator[tarfile.TarInfo]:
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


def _check_end(tar: tarfile.TarFile, shard: Path | RemoteFile) -> None:
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


def _record(
    tar: tarfile.TarFile, read: list[tuple[tarfile.TarInfo, bytes | None]], media: tuple[Member, ...], where: str
) -> bytes:
    """The record of a sample as JSON. Raises UserError unless it has exactly one, or is a pair."""
    name, count = Counter(member.name for member, _ in read).most_common(1)[0]
    if count > 1:
        raise UserError(f"{where}: holds {name} {count} times; write the shard anew with each file once")
    texts: dict[str, list[bytes]] = {"json": [], "txt": []}
    for member, data in read:
        if (ending := _split(member.name)[1].lower()) in texts:
            texts[ending].append(tar.extractfile(member).read() if data is None else data)  # type: ignore[union-attr]
    records, captions = texts["json"], texts["txt"]
    if len(records) > 1 or not (records or captions):
        raise UserError(f"{where}: has {len(records)} .json files, but needs just one with its record")
    about = parse_json(records[0], where) if captions and records else None
    if not captions or (isinstance(about, dict) and _is_record(about)):
        return records[0]
    return _pair(captions, media, about, where)


def _is_record(about: dict[str, Any]) -> bool:
    """Whether what stands beside a caption is a record of its own."""
    return any(is_given(about.get(name)) for name in (*RECORD_FIELDS, TEXTS_FIELD)) or is_instruction(about)


def _pair(captions: list[bytes], media: tuple[Member, ...], about: object, where: str) -> bytes:
    """The record of a sample of one item and its caption. about: what is known of it."""
    if len(captions) != 1 or len(media) != 1:
        raise UserError(
            f"{where}: has {len(media)} media files and {len(captions)} .txt, but a pair is one of each; or give the "
            "sample a .json with its record"
        )
    try:
        caption = captions[0].decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: its .txt is not UTF-8 ({error.reason} at byte {error.start:,})") from None
    if not caption:
        raise UserError(f"{where}: its .txt is empty, so there is nothing to learn; leave the sample out")
    modality = modality_of(media[0].name)
    content = [{"type": modality, "path": media[0].name}, {"type": "text", "text": caption}]
    return json.dumps({"document": content, "metadata": about}, ensure_ascii=False).encode()


def _is_of_a_sample(name: str) -> bool:
    """Whether a member is a record, a caption or media: other members may be anything."""
    return modality_of(name) is not None or _split(name)[1].lower() in ("json", "txt")


def find_members(
    names: dict[str, list[str] | None], members: tuple[Member, ...], where: str
) -> tuple[dict[str, list[str]], dict[str, Member]]:
    """The member names of each modality, and the members by name.

    Raises UserError if the record names a member that its sample does not have.
    """
    by_name = {member.name: member for member in members}
    by_modality: dict[str, list[str]] = {}
    for modality in modalities():
        present, named = [member.name for member in members if modality_of(member.name) == modality], names[modality]
        by_modality[modality] = present if named is None else [look_up(name, present, where) for name in named]
    return by_modality, by_name


def look_up(name: str, members: list[str], where: str) -> str:
    """The member that a record means by a name. Raises UserError naming `where` if there is none."""
    for member in members:
        if name in (member, Path(member).name, _split(member)[1]):
            return member
    raise UserError(f"{where}: names '{name}', but its sample holds only {', '.join(members) or 'no such media'}")


def _split(name: str) -> tuple[str, str]:
    """Key and ending: 'a/000.left.png' is ('a/000', 'left.png')."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending
