"""The index of a manifest: lengths, text and media locations of every example.

An index is two files in a folder beside the manifest:
    NAME.arrow    lengths, Arrow IPC, one row for each example; memory-mapped, so that all processes of a node share one
                  copy: 24 bytes for each example and 29 for each item
    NAME-*.rows   position in the manifest, record, media locations and tokens of each example, after the bytes of the
                  media that its record holds; a row is read when it is needed, and the file is never mapped
NAME is the tokenizer's fingerprint, so that indexes for several tokenizers can be in one folder. The Arrow file names
its rows file and is written last, by a rename: no process sees a half-written index. The lengths and each row have
checksums, so that damage is noticed.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from motet.core.arrays import Int32Array, Int64Array
from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.core.files import irregular_kind, printable
from motet.core.modalities import modalities
from motet.data.copies import Copies
from motet.data.media import IN_ANSWER, IN_RECORD, LISTED, MediaRef
from motet.data.remote import is_url, located

# Increment it when what is read of the same manifest changes: older indexes are then rebuilt.
FORMAT_VERSION = 10
SCHEMA = pa.schema(
    {
        "num_tokens": pa.int32(),
        "num_targets": pa.int32(),
        "row_start": pa.int64(),
        "row_bytes": pa.int32(),
        "items": pa.list_(
            pa.struct(
                {"modality": pa.int8(), "raw_0": pa.int64(), "raw_1": pa.int64()}
                | dict.fromkeys(("turn_tokens", "turn_first", "turn_items"), pa.int32())
            )
        ),
        "bad": pa.struct({"path": pa.string(), "reason": pa.string()}),
    }
)
# CRC-32 of all that follows; bytes of the position, of the record, and of the media locations; number of tokens.
_ROW_HEADER = struct.Struct("<IIIII")


@dataclass(frozen=True, eq=False)
class LengthColumns:
    """The lengths of all examples of a manifest; views of the mapped file.

    num_tokens:   int32 [num_examples], tokens of the text, placeholders included.
    num_targets:  int32 [num_examples], tokens that the loss counts.
    item_offsets: int32 [num_examples + 1]; the items of example i are [item_offsets[i], item_offsets[i + 1]).
    modality:     int8 [num_items], position in `modalities()`; plus IN_ANSWER in a turn of the assistant.
    raw:          two int64 [num_items]: widths and heights, or samples and sampling rates, or rows and 0; 0 if bad.
    turn:         three int32 [num_items]: tokens of the turn before that of the item, placeholders not counted, the
                  number in the example of the first item there, and how many there are; 0 of an item that is in no
                  turn of the assistant, or before which no turn is found.
    """

    num_tokens: Int32Array
    num_targets: Int32Array
    item_offsets: Int32Array
    modality: NDArray[np.int8]
    raw: tuple[Int64Array, Int64Array]
    turn: tuple[Int32Array, Int32Array, Int32Array]


@dataclass(frozen=True)
class BadExample:
    """An example with a file that could not be used when the index was built. example: its number in the manifest."""

    example: int
    path: str
    reason: str


class DamagedIndex(ValueError):
    """The file is no whole index of this version: it is damaged, or something else."""


@dataclass(frozen=True, eq=False)
class IndexRow:
    """One example in the rows file.

    where:     its position in the manifest, for messages: "train.jsonl, line 12".
    record:    its JSON.
    locations: (path, member, offset, num_bytes) of each item; paths are relative. Without a path the bytes are in the
               rows file, and the offset is from the row, so negative.
    """

    where: str
    record: bytes
    locations: Sequence[tuple[str, str, int, int]]
    text: TokenSequence

    def pack(self) -> bytes:
        """The bytes of the row in the file; `unpack` is the inverse."""
        # File names may not be UTF-8; Python keeps such bytes as lone surrogates.
        where = printable(self.where).encode()
        locations = json.dumps(self.locations, ensure_ascii=False).encode("utf-8", "surrogatepass")
        sizes = (len(where), len(self.record), len(locations), len(self.text.tokens))
        parts = (
            where,
            self.record,
            locations,
            self.text.tokens.astype("<i4").tobytes(),
            np.packbits(self.text.targets).tobytes(),
            self.text.media_positions.astype("<i4").tobytes(),
            np.empty(0, "<i4").tobytes() if self.text.turns is None else self.text.turns.astype("<i4").tobytes(),
        )
        data = b"".join((_ROW_HEADER.pack(0, *sizes), *parts))
        return zlib.crc32(data[4:]).to_bytes(4, "little") + data[4:]

    @classmethod
    def unpack(cls, data: bytes, media: tuple[str, ...]) -> IndexRow:
        """The row from its bytes. media: the modality of each item. Raises DamagedIndex."""
        if len(data) < _ROW_HEADER.size or zlib.crc32(memoryview(data)[4:]) != int.from_bytes(data[:4], "little"):
            raise DamagedIndex("a row does not have its checksum")
        _, num_where, num_record, num_locations, num_tokens = _ROW_HEADER.unpack_from(data)
        record_at = _ROW_HEADER.size + num_where
        locations_at = record_at + num_record
        tokens_at = locations_at + num_locations
        targets_at = tokens_at + 4 * num_tokens
        positions_at = targets_at + -(-num_tokens // 8)
        packed = np.frombuffer(data, np.uint8, positions_at - targets_at, targets_at)
        text = TokenSequence(
            tokens=np.frombuffer(data, "<i4", num_tokens, tokens_at).astype(np.int64),
            targets=np.unpackbits(packed, count=num_tokens).astype(bool),
            media=media,
            media_positions=np.frombuffer(data, "<i4", len(media), positions_at).astype(np.int64),
        )
        turns = np.frombuffer(data, "<i4", -1, positions_at + 4 * len(media)).astype(np.int64)
        text = replace(text, turns=turns.reshape(-1, 2) if len(turns) else None)
        where = data[_ROW_HEADER.size : record_at].decode()
        return cls(
            where,
            data[record_at:locations_at],
            json.loads(data[locations_at:tokens_at].decode("utf-8", "surrogatepass")),
            text,
        )


class Index:
    """A built index, opened for reading; any number of processes share its memory.

    folder: media paths are relative to it; perhaps a URL. copies: where remote media are copied to.
    All lengths are read once, for their checksum: 10 ms for a million examples. Raises DamagedIndex if `path` is no
    whole index of this version, OSError if it cannot be read.

    Example: with `index = open_index("train.jsonl", tokenizer)`, `index.lengths.num_tokens` has the tokens of every
    example, and `index.media_refs(0)` the files of the first one.
    """

    def __init__(self, path: Path, folder: Path | str, copies: Copies | None = None) -> None:
        self.path, self.folder = path, folder
        try:
            if kind := irregular_kind(path):
                raise DamagedIndex(f"{path} is {kind}")
            self._table = pa.ipc.open_file(pa.memory_map(os.fsencode(path))).read_all()
            # Before any value is read: a damaged length would read memory outside the file.
            self._table.validate()
            self.about: dict[str, Any] = json.loads((self._table.schema.metadata or {}).get(b"motet", b"{}"))
            # The version first: an older index is not damaged, and may have other columns.
            if self.about.get("format") != FORMAT_VERSION or self._table.schema != SCHEMA:
                raise DamagedIndex(f"{path} is an index of another version")
            if self.about.pop("checksum") != checksum(self.about, self._table):
                raise DamagedIndex(f"{path} does not have its checksum")
        except (ValueError, LookupError, AttributeError, pa.ArrowException) as error:
            raise DamagedIndex(f"{path} is no whole index: {error}") from error
        # An index that is built anew has copies of its own, so that no former content of a URL is read.
        self._copies = None if copies is None else copies.of_version(self.about["rows"])
        # O_NONBLOCK: opening a pipe under this name would block.
        self._rows = os.open(path.with_name(self.about["rows"]), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.fstat(self._rows).st_size != self._row_span(len(self) - 1)[1]:
            raise DamagedIndex(f"{path} does not fit its rows, {self.about['rows']}")

    def __del__(self) -> None:
        if hasattr(self, "_rows"):
            os.close(self._rows)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def source(self) -> str:
        """The manifest's name, for messages."""
        return self.path.parent.name.removesuffix(".motet-index")

    @property
    def identity(self) -> str:
        """Equal for two indexes only if they hold the same examples, in the same order, with the same lengths."""
        return str(self.about["identity"])

    @cached_property
    def lengths(self) -> LengthColumns:
        """The lengths as views of the mapped file; a value is read when it is used."""
        items = self._column("items")
        modality, *raw = (items.values.field(i).to_numpy(zero_copy_only=True) for i in range(6))
        return LengthColumns(
            num_tokens=self._column("num_tokens").to_numpy(zero_copy_only=True),
            num_targets=self._column("num_targets").to_numpy(zero_copy_only=True),
            item_offsets=items.offsets.to_numpy(zero_copy_only=True),
            modality=modality,
            raw=(raw[0], raw[1]),
            turn=(raw[2], raw[3], raw[4]),
        )

    def bad_examples(self) -> Iterator[BadExample]:
        """Examples that cannot be used, in order. O(1) if there are none."""
        for example, path, reason in _bad_rows(self._column("bad")):
            where = path if path.endswith((IN_RECORD, LISTED)) or is_url(path) else os.path.join(self.folder, path)
            yield BadExample(example, printable(where), reason)

    def where(self, example: int) -> str:
        """The position of an example in its manifest, for messages: "data/train.jsonl, line 12"."""
        return printable(os.path.join(self.folder, self._row(example).where))

    def record(self, example: int) -> dict[str, Any]:
        """The record of an example, as the manifest has it."""
        return dict(json.loads(self._row(example).record))

    def tokens(self, example: int) -> TokenSequence:
        """The tokens of an example; `media` holds modalities."""
        return self._row(example).text

    def media_refs(self, example: int) -> list[MediaRef]:
        """The items of an example in order of appearance."""
        start, end = self.lengths.item_offsets[example : example + 2].tolist()
        widths, heights = self.lengths.raw
        refs = []
        for item, (path, member, offset, num_bytes) in zip(range(start, end), self._row(example).locations):
            raw = (int(widths[item]), int(heights[item]))
            if path:
                where = located(self.folder, path)
            else:
                where = str(self.path.with_name(self.about["rows"]))
                offset += self._row_span(example)[0]
            in_answer, code = divmod(int(self.lengths.modality[item]), IN_ANSWER)
            at = self._copies if is_url(where) else None
            ref = MediaRef(
                modalities()[code], where, member, offset, num_bytes, raw, in_answer=bool(in_answer), copies=at
            )
            refs.append(replace(ref, folder=str(self.folder)) if ref.is_held_list else ref)
        return refs

    def _row(self, example: int) -> IndexRow:
        start, end = self.lengths.item_offsets[example : example + 2].tolist()
        media = tuple(modalities()[code % IN_ANSWER] for code in self.lengths.modality[start:end])
        first, last = self._row_span(example)
        # pread has no shared file position, so threads need no lock; and it maps no memory.
        try:
            return IndexRow.unpack(os.pread(self._rows, last - first, first), media)
        except DamagedIndex as error:
            raise UserError(
                f"the index {self.path.parent} is damaged ({self.about['rows']}, byte {first:,}: {error}); delete it, "
                "and it is built anew"
            ) from None

    def _row_span(self, example: int) -> tuple[int, int]:
        """The first byte of an example's row in the rows file, and the byte behind its last."""
        start = self._column("row_start")[example].as_py()
        return start, start + self._column("row_bytes")[example].as_py()

    def _column(self, name: str) -> pa.Array:
        return self._table.column(name).chunk(0)


def checksum(about: dict[str, Any], table: pa.Table | pa.RecordBatch) -> int:
    """CRC-32 of an index's metadata and of the values of all its columns, whatever their layout in the file."""
    columns = {
        name: column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        for name, column in zip(table.schema.names, table.columns)
    }
    bad, items = columns.pop("bad"), columns.pop("items")
    bad.validate(full=True)
    total = zlib.crc32(json.dumps([about, _bad_rows(bad)], sort_keys=True).encode())
    of_items = [items.values.field(i) for i in range(items.type.value_type.num_fields)]
    for column in (*columns.values(), items.offsets, *of_items):
        total = zlib.crc32(column.to_numpy(zero_copy_only=True), total)
    return total


def _bad_rows(bad: pa.StructArray) -> list[tuple[int, str, str]]:
    """(example, path, reason) of each bad example."""
    # The usual case first: reading single values loads a library of 10 MB into every process.
    if bad.null_count == len(bad):
        return []
    examples = np.flatnonzero(bad.is_valid().to_numpy(zero_copy_only=False)).tolist()
    return [(example, bad[example]["path"].as_py(), bad[example]["reason"].as_py()) for example in examples]
