"""Where the media of a record are: files beside the manifest, members of its shard, or bytes that the record holds.

Bytes are held as a data URL (`data:image/png;base64,...`), which is also what columns of bytes in Parquet and Arrow
files are read as. They are copied into the index, where they are read in place like the members of a shard.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from motet.core.errors import UserError
from motet.core.modalities import VIDEO
from motet.data.conversation import Conversation, match_media, media_names
from motet.data.copies import Copies
from motet.data.listed_frames import held_frames
from motet.data.manifest import Entry
from motet.data.media import IN_RECORD, LISTED, MediaRef
from motet.data.media_names import DATA_URL, FrameNames
from motet.data.remote import is_url, located
from motet.data.shards import Member, find_members, look_up

_HEAD = re.compile(r"data:[^,;]*(?:;[^,;]*)*?(;base64)?,", re.IGNORECASE)
_MAX_HELD_TEXT = 64


def find_media(
    entry: Entry, record: dict[str, Any], conversation: Conversation, folder: Path | str, copies: Copies | None = None
) -> list[MediaRef]:
    """The items of a record, in order of appearance. folder: paths are relative to it; perhaps a URL.

    copies: where remote items are copied to; None: there may be none.

    Raises UserError, naming the record, unless each placeholder has one item and each item one placeholder.
    """
    names = media_names(record, entry.where)
    members: Mapping[str, Member] = {}
    listed = [name for name in (*conversation.names, *(names.get(VIDEO) or ())) if isinstance(name, FrameNames)]
    if listed and entry.members is not None:
        raise UserError(
            f"{entry.where}: lists the frames of a video, which are read beside a manifest, and not from a shard; "
            "write them as one video"
        )
    if entry.members is None:
        files = {modality: of_modality or [] for modality, of_modality in names.items()}
    else:
        # A modality whose parts name their own media takes no others.
        own = {modality for modality, name in zip(conversation.placeholders, conversation.names) if name is not None}
        names = {modality: [] if modality in own and names[modality] is None else names[modality] for modality in names}
        files, members = find_members(names, entry.members, entry.where)
    refs: list[MediaRef] = []
    for number, (modality, name) in enumerate(match_media(conversation, files, entry.where), start=1):
        held_name = f"{modality} {number}{IN_RECORD}"
        if entry.members is None:
            name = _below(entry, name)
        if isinstance(name, FrameNames):
            where = f"{entry.where}: {modality} {number}"
            refs.append(held_frames(folder, name, f"{modality} {number}{LISTED}", where))
        elif name.startswith(DATA_URL):
            refs.append(
                MediaRef(modality, "", held_name, data=_held_bytes(name, f"{entry.where}: {modality} {number}"))
            )
        elif entry.members is None:
            refs.append(_file(modality, folder, name, f"{entry.where}: {modality} {number}", copies))
        else:
            member = members[look_up(name, list(members), entry.where)]
            if member.data is not None:
                refs.append(MediaRef(modality, "", held_name, data=member.data))
            else:
                at = copies if is_url(member.shard) else None
                refs.append(MediaRef(modality, member.shard, member.name, member.offset, member.num_bytes, copies=at))
    return refs


def without_held(value: Any) -> Any:
    """A record without the bytes that it holds: of each data URL only the head is left."""
    if isinstance(value, dict):
        return {name: without_held(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_held(entry) for entry in value]
    if isinstance(value, str) and len(value) > _MAX_HELD_TEXT and (head := _HEAD.match(value)) and head.group(1):
        return head.group()
    return value


def _below(entry: Entry, name: str) -> str:
    """What a record names, as the manifest's folder has it."""
    if not entry.below or name.startswith(DATA_URL) or is_url(name):
        return name
    if isinstance(name, FrameNames):
        return name.below(entry.below)
    return os.path.join(entry.below, name)


def _file(modality: str, folder: Path | str, name: str, where: str, copies: Copies | None) -> MediaRef:
    """An item that is a file of its own. Raises UserError naming `where` if it is remote, and nothing may be copied."""
    try:
        path = located(folder, name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not is_url(path):
        return MediaRef(modality, path)
    if copies is None:
        raise UserError(
            f"{where} is the URL '{path[:60]}', and nothing is downloaded without a folder for local copies; set "
            "data.cache_folder, or save the file and name that"
        )
    return MediaRef(modality, path, copies=copies)


def _held_bytes(url: str, where: str) -> bytes:
    """The bytes of a data URL (RFC 2397). Raises UserError naming `where`."""
    head = _HEAD.match(url)
    if head is None:
        raise UserError(f"{where} is {url[:40]!r}, but a data URL must be 'data:TYPE;base64,...'")
    try:
        text = url[head.end() :]
        data = base64.b64decode(text, validate=True) if head.group(1) else unquote_to_bytes(text)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{where} is a data URL whose base64 is damaged ({error})") from None
    if not data:
        raise UserError(f"{where} is a data URL without a byte")
    return data
