"""Consecutive records of a manifest as columns of an index: records are checked, text tokenised, headers read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from motet.core.arrays import Int32Array, Int64Array
from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.core.modalities import OwnModality, modalities
from motet.data.conversation import Conversation, parse_conversation, parse_record
from motet.data.copies import Copies
from motet.data.headers import read_header
from motet.data.index import SCHEMA, IndexRow
from motet.data.manifest import Entry
from motet.data.media import IN_ANSWER, IN_RECORD, LISTED, BadMedia, MediaRef
from motet.data.record_media import find_media, without_held
from motet.data.remote import is_url, relative

FATAL_HEADER = "its header ends the process that reads it"
"""The start of the reason for a file whose header killed a worker; it must only be opened in a worker process."""


_MAX_HELD_BYTES = 2**31 - 1


class TextEncoder(Protocol):
    """A function of conversations to tokens, such as a ChatTokenizer; picklable, importable in a worker process."""

    @property
    def fingerprint(self) -> str:
        """Equal for two encoders only if they give the same tokens."""

    def encode(self, conversation: Conversation, raws: Sequence[tuple[int, int]] = ()) -> TokenSequence:
        """The tokens of a conversation. raws: what the header of each of its items says. Raises UserError."""

    def encode_prompt(
        self, conversation: Conversation, raws: Sequence[tuple[int, int]] = ()
    ) -> tuple[TokenSequence, str]:
        """The tokens before the last answer, and what is to be answered."""

    def items_of(self, modality: str) -> tuple[str, ...]:
        """The modalities of the items that one file of a record becomes: (modality,), or with the sound of a video."""

    def item_tokens(self, modality: str) -> frozenset[int]:
        """The ids of the tokens of an item: the one that its rows replace, and the marks around it."""


@dataclass
class Columns:
    """The columns of consecutive examples, and their rows.

    row_bytes, num_tokens, num_targets, num_items: int [num_examples].
    held_bytes: int [num_examples], the bytes of media that records hold; they stand before each row.
    modality: int [num_items], as `index.LengthColumns` has them. raw: int [num_items, 2]. turn: int [num_items, 3].
    bad:      (example, path, reason); `example` counts from the first of these examples.
    rows:     packed `IndexRow`s.
    """

    row_bytes: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_targets: list[int] = field(default_factory=list)
    num_items: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    modality: list[int] = field(default_factory=list)
    raw: list[tuple[int, int]] = field(default_factory=list)
    turn: list[tuple[int, int, int]] = field(default_factory=list)
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)

    def packed(self) -> PackedColumns:
        """The same columns as arrays."""
        return PackedColumns(
            examples=np.array(
                [self.row_bytes, self.num_tokens, self.num_targets, self.num_items, self.held_bytes], dtype=np.int32
            ),
            modality=np.array(self.modality, dtype=np.int8),
            raw=np.array(self.raw, dtype=np.int64).reshape(-1, 2),
            turn=np.array(self.turn, dtype=np.int32).reshape(-1, 3),
            bad=self.bad,
            rows=b"".join(self.rows),
        )


@dataclass(frozen=True, eq=False)
class PackedColumns:
    """`Columns` as arrays.

    examples: int32 [5, num_examples], row_bytes, num_tokens, num_targets, num_items, held_bytes.
    """

    examples: Int32Array
    modality: NDArray[np.int8]
    raw: Int64Array
    turn: Int32Array
    bad: list[tuple[int, str, str]]
    rows: bytes

    @property
    def num_examples(self) -> int:
        """Examples of these columns."""
        return int(self.examples.shape[1])


class EntryReader:
    """Entries to columns; it runs in a worker process. folder, copies: as `find_media` takes them.

    own: modalities of the user's own, which a process knows once they have come to it.
    """

    def __init__(
        self, folder: Path | str, text: TextEncoder, copies: Copies | None = None, own: Sequence[OwnModality] = ()
    ) -> None:
        self._folder, self._text, self._copies = folder, text, copies

    def __call__(self, task: tuple[Sequence[Entry], str]) -> PackedColumns:
        """task: entries, and how a worker died that read the files of this one entry ("was killed by SIGSEGV"), or "".

        With such a death no headers are read. Raises UserError for the first wrong record, naming its position.
        """
        entries, death = task
        columns = Columns()
        for entry in entries:
            self._add(entry, death, columns)
        return columns.packed()

    def _add(self, entry: Entry, death: str, columns: Columns) -> None:
        record = parse_record(entry.text, entry.where)
        conversation = parse_conversation(record, entry.where)
        files = find_media(entry, record, conversation, self._folder, self._copies)
        num_items = [len(self._text.items_of(file.modality)) for file in files]
        refs = [ref for file, count in zip(files, num_items) for ref in (file, file.sound)[:count]]
        raws, bad = _skip_headers(refs, death, entry.where) if death else _read_headers(refs)
        try:
            text = self._text.encode(conversation, raws)
        except UserError as error:
            raise UserError(f"{entry.where}: {error}") from None
        if bad:
            columns.bad.append((len(columns.num_tokens), self._below_folder(bad.path), bad.reason))
        held = [file.data for file in files if file.data is not None]
        num_held = sum(map(len, held))
        if num_held > _MAX_HELD_BYTES:
            raise UserError(f"{entry.where}: holds {num_held:,} bytes of media, more than {_MAX_HELD_BYTES:,}")
        stored = json.dumps(without_held(record), ensure_ascii=False).encode() if held else entry.text
        row = IndexRow(self._below_folder(entry.where), stored, self._locations(refs, num_held), text).pack()
        columns.rows += [*held, row]
        columns.held_bytes.append(num_held)
        columns.row_bytes.append(len(row))
        columns.num_tokens.append(len(text.tokens))
        # Nothing predicts the first token.
        columns.num_targets.append(int(text.targets[1:].sum()))
        columns.num_items.append(len(refs))
        in_answers = np.repeat(conversation.in_answers, num_items).tolist()
        columns.modality += [
            modalities().index(ref.modality) + IN_ANSWER * in_answer
            for ref, in_answer in zip(refs, in_answers, strict=True)
        ]
        columns.raw += raws
        columns.turn += _turns(text)

    def _below_folder(self, path: str) -> str:
        """A path relative to the folder, so that an index stays right when the folder moves; absolute if not below it.

        Not by `..`: where a folder is a link, that is not the folder around the link.
        """
        below = path.removeprefix(f"{self._folder}{os.sep}")
        is_named = is_url(path) or path.endswith((IN_RECORD, LISTED)) or str(self._folder) == os.curdir
        return below if below != path or is_named else os.path.join(os.getcwd(), path)

    def _locations(self, refs: list[MediaRef], num_held: int) -> list[tuple[str, str, int, int]]:
        """The locations of an `IndexRow`. num_held: bytes before the row."""
        locations, offset = [], -num_held
        for ref in refs:
            if ref.is_sound_of_video:
                # It lies where its video does, which stands before it.
                path, _, *place = locations[-1]
                locations.append((path, ref.member, *place))
            elif ref.data is None:
                own = is_url(ref.path)
                path = relative(ref.path, self._folder) if own else self._below_folder(ref.path)
                locations.append((path, ref.member, ref.offset, ref.num_bytes))
            else:
                locations.append(("", ref.member, offset, len(ref.data)))
                offset += len(ref.data)
        return locations


def _turns(text: TokenSequence) -> list[tuple[int, int, int]]:
    """The columns `turn` of the items of an example."""
    found = []
    for start, stop in text.item_turns.tolist():
        first, behind = np.searchsorted(text.media_positions, [start, stop]).tolist()
        found.append((stop - start - (behind - first), first, behind - first) if stop > start else (0, 0, 0))
    return found


def _read_headers(refs: list[MediaRef]) -> tuple[list[tuple[int, int]], BadMedia | None]:
    """The raw lengths of each item, 0 for a bad file, and the first bad file."""
    raws, first_bad = [], None
    for ref in refs:
        try:
            raws.append(read_header(ref))
        except BadMedia as bad:
            first_bad = first_bad or bad
            raws.append((0, 0))
    return raws, first_bad


def _skip_headers(refs: list[MediaRef], death: str, where: str) -> tuple[list[tuple[int, int]], BadMedia]:
    """The result of `_read_headers` for an example whose headers must not be read again."""
    if not refs:
        raise UserError(f"{where}: a worker process {death} while it read this record")
    others = f", or that of another of its {len(refs)} files" if len(refs) > 1 else ""
    return [(0, 0)] * len(refs), BadMedia(refs[0].name, f"{FATAL_HEADER} ({death}{others})")


class HeaderCheck:
    """A check of headers; it runs in a worker process, which a header may kill. own: as of an EntryReader."""

    def __init__(self, own: Sequence[OwnModality] = ()) -> None:
        pass

    def __call__(self, refs: Sequence[MediaRef]) -> str:
        """The reason why the first bad file cannot be used; "" if all files can be used."""
        bad = _read_headers(list(refs))[1]
        return bad.reason if bad else ""


def join_columns(chunks: Sequence[PackedColumns]) -> pa.RecordBatch:
    """One batch in the index's schema. Raises UserError if a manifest is too large for its 32-bit offsets."""
    row_bytes, num_tokens, num_targets, num_items, held_bytes = np.concatenate(
        [chunk.examples for chunk in chunks], axis=1
    )
    row_ends = np.cumsum(row_bytes.astype(np.int64) + held_bytes)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_items, dtype=np.int64)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise UserError(
            f"a manifest with {offsets[-1]} media is too large for one index; split it into several manifests"
        )
    modality, raw, turn = (
        np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("modality", "raw", "turn")
    )
    items = pa.StructArray.from_arrays(
        [pa.array(modality), *(pa.array(column.copy()) for column in (*raw.T, *turn.T))],
        fields=list(SCHEMA.field("items").type.value_type),
    )
    bad_type = SCHEMA.field("bad").type
    bad = pa.nulls(len(row_bytes), bad_type)
    if bad_rows := _bad_rows(chunks):
        by_example: list[dict[str, str] | None] = [None] * len(row_bytes)
        for example, path, reason in bad_rows:
            by_example[example] = {"path": path, "reason": reason}
        bad = pa.array(by_example, bad_type)
    arrays = [
        pa.array(num_tokens),
        pa.array(num_targets),
        pa.array(row_ends - row_bytes),
        pa.array(row_bytes),
        pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), items),
        bad,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _bad_rows(chunks: Sequence[PackedColumns]) -> list[tuple[int, str, str]]:
    """(example, path, reason) of each bad example; `example` counts over all chunks."""
    starts = np.cumsum([0, *(chunk.num_examples for chunk in chunks)]).tolist()
    return [(start + i, path, reason) for start, chunk in zip(starts, chunks) for i, path, reason in chunk.bad]
