"""The examples that a job trains on: their lengths by the batch, their tokens and the places of their media one by one.

Examples are numbered from 0 through all manifests, without those that cannot be used: a bad file, a clip that the
transform refuses, a sequence longer than allowed. Which ones these are follows from the indexes and the options alone,
and so is the same on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.core.workload import BatchLengths, ItemLengths, home_ranks
from motet.data.conversation import Conversation, parse_conversation
from motet.data.index import Index
from motet.data.index_build import open_index
from motet.data.index_entries import TextEncoder
from motet.data.index_lock import IndexProgress
from motet.data.media import MODALITIES, MediaRef
from motet.data.transforms import Transform

MAX_NAMED = 20
"""Examples of a kind that are named one by one, with the reason, where they are left out."""
_SCAN_EXAMPLES = 1 << 16


@dataclass(frozen=True)
class Modality:
    """How long the items of a modality are, before and after its encoder.

    num_tokens: rows that items take in the backbone's sequence, int64 [n], from sizes int64 [n, size_dim].
    lengths:    what the encoder's load is counted in, int64 [n], from the same.
    """

    transform: Transform
    num_tokens: Callable[[Int64Array], Int64Array]
    lengths: Callable[[Int64Array], Int64Array]


@dataclass(frozen=True)
class LeftOutExample:
    """An example that is not trained on. where: its place in its manifest; file: "" where none is to blame."""

    where: str
    file: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.file, self.reason)))


@dataclass(frozen=True)
class LeftOut:
    """Examples of the manifests that are not trained on, and why.

    num_bad: those with a file that could not be used when the index was built. num_refused: with an item that its
    transform refuses. num_too_long: with more tokens than allowed. named: the first MAX_NAMED of each kind.
    """

    num_bad: int = 0
    num_refused: int = 0
    num_too_long: int = 0
    named: tuple[LeftOutExample, ...] = ()

    def __len__(self) -> int:
        return self.num_bad + self.num_refused + self.num_too_long

    def first(self, count: int = 3) -> str:
        """The first few of them with their reasons, for a sentence."""
        return "; ".join(str(example) for example in self.named[:count])


class Dataset:
    """Reads only what it is asked for.

    Its memory is the indexes' mapped files, one copy a node, and 4 bytes an example if any is left out.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
        text: TextEncoder,
        modalities: Mapping[str, Modality],
        *,
        max_sequence_length: int | None = None,
    ) -> None:
        """modalities: by name of phase. Raises UserError for a manifest with media that no modality reads."""
        self._indexes, self._text, self._modalities = list(indexes), text, dict(modalities)
        self._phases = _phase_of_modality(self._modalities)
        self._starts = np.cumsum([0, *(len(index) for index in self._indexes)])
        for index in self._indexes:
            self._check_modalities(index)
        self._kept, self.left_out = self._select(max_sequence_length)
        if not self.num_examples:
            raise UserError(
                f"no example of the manifests can be used: {describe_left_out(self.left_out, self.num_in_manifests)}; "
                f"the first: {self.left_out.first()}"
            )

    @classmethod
    def open(
        cls,
        manifests: Sequence[str | Path],
        text: TextEncoder,
        modalities: Mapping[str, Modality],
        *,
        max_sequence_length: int | None = None,
        index_folder: str | Path | None = None,
        num_workers: int = 0,
        progress: IndexProgress | None = None,
    ) -> Dataset:
        """All manifests, one after the other; their indexes are built where needed. Raises UserError."""
        indexes = [
            open_index(manifest, text, index_folder=index_folder, num_workers=num_workers, progress=progress)
            for manifest in manifests
        ]
        return cls(indexes, text, modalities, max_sequence_length=max_sequence_length)

    @property
    def num_examples(self) -> int:
        """Examples that can be trained on."""
        return self.num_in_manifests if self._kept is None else len(self._kept)

    @property
    def num_in_manifests(self) -> int:
        return int(self._starts[-1])

    @property
    def fingerprint(self) -> str:
        """Equal for two datasets only if each number means the same example of the same lengths in both."""
        digest = hashlib.blake2b(digest_size=16)
        for index in self._indexes:
            digest.update(index.identity.encode())
        if self._kept is not None:
            digest.update(self._kept.tobytes())
        return digest.hexdigest()

    def batch_lengths(self, example_ids: Int64Array, num_ranks: int) -> BatchLengths:
        """The lengths of a batch, from the indexes alone; examples at home in equal consecutive shares. Vectorised."""
        numbers = self._numbers(example_ids)
        columns = _Gathered.of(self._indexes, self._starts, numbers)
        items, sequence = self._item_lengths(columns)
        return BatchLengths(sequence, columns.num_targets, home_ranks(len(numbers), num_ranks), items)

    def tokens(self, example_id: int) -> TokenSequence:
        """The text; `media` are names of phases."""
        index, example = self._locate(example_id)
        return self._named(index.tokens(example))

    def media_refs(self, example_id: int) -> list[MediaRef]:
        """Where the items are, in order of appearance; `modality` is "image" or "audio"."""
        index, example = self._locate(example_id)
        return index.media_refs(example)

    def where(self, example_id: int) -> str:
        """The place of an example in its manifest, for messages: "data/train.jsonl, line 12"."""
        index, example = self._locate(example_id)
        return index.where(example)

    def record(self, example_id: int) -> dict[str, Any]:
        """The record as it stands in its manifest."""
        index, example = self._locate(example_id)
        return index.record(example)

    def conversation(self, example_id: int) -> Conversation:
        return parse_conversation(self.record(example_id), f"example {example_id}")

    def prompt(self, example_id: int) -> tuple[TokenSequence, list[MediaRef], str]:
        """For evaluation: all before the last answer with the prompt for it, the media in it, and the answer."""
        tokens, answer = self._text.encode_prompt(self.conversation(example_id))
        return self._named(tokens), self.media_refs(example_id)[: len(tokens.media)], answer

    def phase_of(self, ref: MediaRef) -> str:
        """The name of the phase that an item goes to."""
        return self._phases[ref.modality]

    @property
    def transforms(self) -> dict[str, Transform]:
        """By modality: what a Decoder asks for."""
        return {modality: self._modalities[phase].transform for modality, phase in self._phases.items()}

    def _named(self, tokens: TokenSequence) -> TokenSequence:
        media = tuple(self._phases[modality] for modality in tokens.media)
        return TokenSequence(tokens.tokens, tokens.targets, media, tokens.media_positions)

    def _numbers(self, example_ids: Int64Array) -> Int64Array:
        """Numbers through all manifests, left-out examples included."""
        example_ids = np.asarray(example_ids, dtype=np.int64)
        return example_ids if self._kept is None else self._kept[example_ids].astype(np.int64)

    def _locate(self, example_id: int) -> tuple[Index, int]:
        if not 0 <= example_id < self.num_examples:
            raise IndexError(f"there is no example {example_id}; the dataset has {self.num_examples}")
        return self._at(int(self._numbers(np.array([example_id]))[0]))

    def _at(self, number: int) -> tuple[Index, int]:
        """The index that an example is in, and its number there, by its number through all manifests."""
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._indexes[place], number - int(self._starts[place])

    def _item_lengths(self, columns: _Gathered) -> tuple[dict[str, ItemLengths], Int64Array]:
        """Per phase the items, and the length of each example's whole sequence, int64 [num_examples]."""
        # Each placeholder token gives way to its item's rows.
        sequence = columns.num_tokens - columns.num_items
        items = {}
        for name, modality in self._modalities.items():
            chosen = np.flatnonzero(columns.modality == MODALITIES.index(modality.transform.modality))
            length = num_tokens = np.zeros(0, dtype=np.int64)
            if len(chosen):
                sizes = modality.transform.sizes(columns.raw[chosen])
                length = np.asarray(modality.lengths(sizes), dtype=np.int64)
                num_tokens = np.asarray(modality.num_tokens(sizes), dtype=np.int64)
            items[name] = ItemLengths(columns.example[chosen], length, num_tokens)
            np.add.at(sequence, columns.example[chosen], num_tokens)
        return items, sequence

    def _check_modalities(self, index: Index) -> None:
        for code, modality in enumerate(MODALITIES):
            if modality not in self._phases and (index.lengths.modality == code).any():
                raise UserError(
                    f"{index.source} holds {modality} media, but the model has no encoder for them; add one"
                )

    def _select(self, max_sequence_length: int | None) -> tuple[Int32Array | Int64Array | None, LeftOut]:
        """Numbers of the examples to train on (None: all), and what became of the others."""
        usable = np.ones(self.num_in_manifests, dtype=bool)
        named: list[LeftOutExample] = []
        num_bad = 0
        for start, index in zip(self._starts, self._indexes):
            for found in index.bad_examples():
                usable[int(start) + found.example] = False
                num_bad += 1
                if num_bad <= MAX_NAMED:
                    named.append(LeftOutExample(index.where(found.example), found.path, found.reason))
        refused, too_long = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        # A stretch at a time, so that the memory of the scan does not grow with the manifests.
        for start in range(0, len(usable), _SCAN_EXAMPLES):
            numbers = start + np.flatnonzero(usable[start : start + _SCAN_EXAMPLES])
            columns = _Gathered.of(self._indexes, self._starts, numbers)
            is_refused = self._refused(columns)
            is_too_long = np.zeros(len(numbers), dtype=bool)
            if max_sequence_length is not None:
                is_too_long = ~is_refused & (self._item_lengths(columns)[1] > max_sequence_length)
            usable[numbers[is_refused | is_too_long]] = False
            refused.append(numbers[is_refused])
            too_long.append(numbers[is_too_long])
        all_refused, all_too_long = np.concatenate(refused), np.concatenate(too_long)
        named += [self._name_refused(number) for number in all_refused[:MAX_NAMED].tolist()]
        named += [self._name_too_long(number, max_sequence_length) for number in all_too_long[:MAX_NAMED].tolist()]
        left_out = LeftOut(num_bad, len(all_refused), len(all_too_long), tuple(named))
        if usable.all():
            return None, left_out
        kept = np.flatnonzero(usable)
        return (kept.astype(np.int32) if len(usable) <= np.iinfo(np.int32).max else kept), left_out

    def _name_refused(self, number: int) -> LeftOutExample:
        index, example = self._at(number)
        for ref in index.media_refs(example):
            transform = self._modalities[self._phases[ref.modality]].transform
            if ref.raw is not None and not transform.accepts(np.array([ref.raw], dtype=np.int64))[0]:
                return LeftOutExample(index.where(example), ref.name, transform.refusal(ref.raw))
        raise ValueError(f"no item of example {number} is refused")

    def _name_too_long(self, number: int, max_sequence_length: int | None) -> LeftOutExample:
        columns = _Gathered.of(self._indexes, self._starts, np.array([number]))
        num_tokens = int(self._item_lengths(columns)[1][0])
        index, example = self._at(number)
        reason = f"takes {num_tokens:,} tokens, more than max_sequence_length = {max_sequence_length:,}"
        return LeftOutExample(index.where(example), "", reason)

    def _refused(self, columns: _Gathered) -> BoolArray:
        refused = np.zeros(len(columns.num_tokens), dtype=bool)
        for modality in self._modalities.values():
            chosen = np.flatnonzero(columns.modality == MODALITIES.index(modality.transform.modality))
            if len(chosen):
                refused[columns.example[chosen[~modality.transform.accepts(columns.raw[chosen])]]] = True
        return refused


def describe_left_out(left_out: LeftOut, num_in_manifests: int) -> str:
    """One line on what is left out, for the terminal."""
    parts = [
        (left_out.num_bad, "with files that cannot be used"),
        (left_out.num_refused, "with media that the transform refuses"),
        (left_out.num_too_long, "longer than max_sequence_length"),
    ]
    listed = ", ".join(f"{count} {why}" for count, why in parts if count)
    return f"{len(left_out)} of {num_in_manifests} examples left out" + (f": {listed}" if listed else "")


@dataclass(frozen=True, eq=False)
class _Gathered:
    """The indexes' columns of some examples; items by example, `example` [num_items] counts within these examples."""

    num_tokens: Int64Array
    num_targets: Int64Array
    num_items: Int64Array
    example: Int64Array
    modality: NDArray[np.int8]
    raw: Int64Array

    @classmethod
    def of(cls, indexes: list[Index], starts: Int64Array, numbers: Int64Array) -> _Gathered:
        place = np.searchsorted(starts, numbers, side="right") - 1
        num_tokens, num_targets, num_items = (np.zeros(len(numbers), dtype=np.int64) for _ in range(3))
        first_item = np.zeros(len(numbers), dtype=np.int64)
        chosen = [(index, np.flatnonzero(place == at), int(starts[at])) for at, index in enumerate(indexes)]
        for index, mine, start in chosen:
            rows = numbers[mine] - start
            columns = index.lengths
            num_tokens[mine], num_targets[mine] = columns.num_tokens[rows], columns.num_targets[rows]
            first_item[mine] = columns.item_offsets[rows]
            num_items[mine] = columns.item_offsets[rows + 1] - columns.item_offsets[rows]
        example = np.repeat(np.arange(len(numbers)), num_items)
        # Place of each item in its own index: where its example's items start, and its place among them.
        item = np.arange(len(example)) - np.repeat(np.cumsum(num_items) - num_items - first_item, num_items)
        modality, raw = np.zeros(len(item), dtype=np.int8), np.zeros((len(item), 2), dtype=np.int64)
        for at, (index, _, _) in enumerate(chosen):
            mine = np.flatnonzero(place[example] == at)
            modality[mine] = index.lengths.modality[item[mine]]
            raw[mine, 0], raw[mine, 1] = index.lengths.raw[0][item[mine]], index.lengths.raw[1][item[mine]]
        return cls(num_tokens, num_targets, num_items, example, modality, raw)


def _phase_of_modality(modalities: Mapping[str, Modality]) -> dict[str, str]:
    phases: dict[str, str] = {}
    for name, modality in modalities.items():
        kind = modality.transform.modality
        if kind not in MODALITIES:
            raise UserError(f"encoder {name} reads '{kind}', but manifests hold only {' and '.join(MODALITIES)}")
        if kind in phases:
            raise UserError(f"encoders {phases[kind]} and {name} both read {kind}; each modality has one encoder")
        phases[kind] = name
    return phases
