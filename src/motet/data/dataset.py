"""The examples that a job trains on: lengths of many at once; tokens and media files of one at a time.

Examples are numbered from 0 through all manifests. Unusable ones are left out: a bad file, a clip that the transform
refuses, a sequence longer than allowed. This follows from the indexes and the options alone, so all ranks agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from motet.core.arrays import Int32Array, Int64Array
from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.core.readers import Combine
from motet.core.workload import BatchLengths, home_ranks
from motet.data.conversation import Conversation, parse_conversation
from motet.data.copies import Copies
from motet.data.example_lengths import ExampleLengths
from motet.data.index import Index
from motet.data.index_build import open_index
from motet.data.index_entries import TextEncoder
from motet.data.index_lock import IndexProgress
from motet.data.indexes import Indexes
from motet.data.item_phases import ItemPhases
from motet.data.left_out import MAX_NAMED, LeftOutExample, describe_left_out
from motet.data.media import MediaRef
from motet.data.modality import Modality
from motet.data.selection import LengthRule, Selector
from motet.data.transforms import Transform
from motet.data.truncation import truncated


class Dataset:
    """The usable examples of all manifests, read on demand.

    Memory: the indexes' mapped files, one copy for each node; and 4 bytes for each example if any is left out.

    Example: `Dataset.open(["train.jsonl"], tokenizer, {"image": modality}).batch_lengths(np.arange(64), num_ranks=8)`
    has the lengths of the first 64 examples, from the index alone.
    """

    def __init__(
        self,
        indexes: Sequence[Index],
        text: TextEncoder,
        modalities: Mapping[str, Modality],
        *,
        combine: Mapping[str, Combine] = MappingProxyType({}),
        max_sequence_length: int | None = None,
        too_long: LengthRule = "drop",
    ) -> None:
        """modalities: by name of phase. combine: as `combine_error` checks it.

        Raises UserError for media that no modality reads, if nothing is left, if rows that are to be added are not
        equally many, and for an example that is too long where that is an error.
        """
        self._text, self._phases = text, ItemPhases(modalities, combine)
        self._indexes = Indexes(indexes, tells_several=self._phases.tells_several)
        for index in indexes:
            self._phases.check_reads(index)
        selector = Selector(self._indexes, self._phases, text, max_sequence_length, too_long)
        self._kept, self._truncated, self.left_out = selector.select()
        self._check_some_left()

    @classmethod
    def open(
        cls,
        manifests: Sequence[str | Path],
        text: TextEncoder,
        modalities: Mapping[str, Modality],
        *,
        combine: Mapping[str, Combine] = MappingProxyType({}),
        max_sequence_length: int | None = None,
        too_long: LengthRule = "drop",
        index_folder: str | Path | None = None,
        copies: Copies | None = None,
        num_workers: int = 0,
        progress: IndexProgress | None = None,
    ) -> Dataset:
        """The examples of all manifests, one after the other. Indexes that do not fit are built. Raises UserError.

        copies: where remote files are copied to; None: there may be none.
        """
        indexes = [
            open_index(
                manifest, text, index_folder=index_folder, copies=copies, num_workers=num_workers, progress=progress
            )
            for manifest in manifests
        ]
        return cls(
            indexes, text, modalities, combine=combine, max_sequence_length=max_sequence_length, too_long=too_long
        )

    @property
    def num_examples(self) -> int:
        """Examples that can be trained on."""
        return self.num_in_manifests if self._kept is None else len(self._kept)

    @property
    def num_in_manifests(self) -> int:
        """Examples of all manifests, left-out ones included."""
        return len(self._indexes)

    @property
    def num_by_manifest(self) -> Int64Array:
        """Examples of each manifest that can be trained on, int64 [num_manifests]; they are numbered in this order."""
        starts = self._indexes.starts if self._kept is None else np.searchsorted(self._kept, self._indexes.starts)
        return np.diff(starts).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        """Equal for two datasets only if each number means the same example of the same lengths in both."""
        digest = hashlib.blake2b(digest_size=16)
        for index in self._indexes:
            digest.update(index.identity.encode())
        if self._kept is not None:
            digest.update(self._kept.tobytes())
        if len(self._truncated.numbers):
            digest.update(self._truncated.numbers.tobytes())
            digest.update(self._truncated.num_tokens.tobytes())
        return digest.hexdigest()

    def home(self, example_ids: Int64Array, num_ranks: int) -> Int32Array:
        """The rank that loads each example of a microbatch, int32 [num_examples]; any rank can load any."""
        return home_ranks(len(example_ids), num_ranks)

    def batch_lengths(self, example_ids: Int64Array, num_ranks: int) -> BatchLengths:
        """The lengths of a microbatch, from the indexes alone; each rank is home to an equal share, in order.

        Vectorised: O(examples + items).
        """
        numbers = self._numbers(example_ids)
        columns = self._columns(numbers)
        items, sequence, _ = self._phases.item_lengths(columns)
        return BatchLengths(sequence, columns.num_targets, home_ranks(len(numbers), num_ranks), items)

    def item_sizes(self, example_ids: Int64Array) -> dict[str, Int64Array]:
        """Phase -> sizes of its items, int64 [num_items, size_dim], as `batch_lengths` has them; from the indexes."""
        columns = self._columns(self._numbers(example_ids))
        return {
            name: np.asarray(
                modality.transform.sizes(columns.raw[self._phases.items_of(columns, modality)]), dtype=np.int64
            )
            for name, modality in self._phases.modalities.items()
        }

    def tokens(self, example_id: int) -> TokenSequence:
        """The tokens of an example; `media` holds names of phases, one for each reader of each item."""
        index, example = self._locate(example_id)
        text, cut = index.tokens(example), self._cut(example_id)
        text = text if cut is None else truncated(text, int(self._truncated.num_tokens[cut]))
        # Who reads an item hangs on its turn only where something is made; then the row is read twice.
        read = self._phases.with_phases(text, index.media_refs(example) if self._phases.makers and text.media else ())
        return self._phases.with_sizes(read, lambda: self.media_refs(example_id))

    def media_refs(self, example_id: int) -> list[MediaRef]:
        """The items' files, in order of appearance; `modality` is a name of `core.modalities`."""
        index, example = self._locate(example_id)
        refs, cut = self._indexes.told(index.media_refs(example)), self._cut(example_id)
        return refs if cut is None else refs[: int(self._truncated.num_items[cut])]

    def where(self, example_id: int) -> str:
        """The position of an example in its manifest, for messages: "data/train.jsonl, line 12"."""
        index, example = self._locate(example_id)
        return index.where(example)

    def leave_out(self, example_ids: Int64Array, reason: Callable[[int], str]) -> None:
        """As of `Examples`."""
        named = [
            LeftOutExample(self.where(example), "", reason(number))
            for number, example in enumerate(example_ids[:MAX_NAMED].tolist())
        ]
        self.left_out = self.left_out.with_too_large(named, len(example_ids))
        if len(example_ids):
            every = np.arange(self.num_in_manifests) if self._kept is None else self._kept
            self._kept = np.delete(every, example_ids)
            self._check_some_left()

    def record(self, example_id: int) -> dict[str, Any]:
        """The record of an example, as its manifest has it."""
        index, example = self._locate(example_id)
        return index.record(example)

    def conversation(self, example_id: int) -> Conversation:
        """The turns of an example."""
        return parse_conversation(self.record(example_id), f"example {example_id}")

    def has_answer(self, example_id: int) -> bool:
        """Whether an example has an answer that could be compared.

        A document has none, a call is none, nor is an answer in which an item is made.
        """
        conversation = self.conversation(example_id)
        if not conversation.has_answer:
            return False
        num_before = len(conversation.without_last_answer()[0].placeholders)
        in_answer = self.media_refs(example_id)[num_before:]
        return not any(ref.in_answer and ref.modality in self._phases.makers for ref in in_answer)

    def prompt(self, example_id: int) -> tuple[TokenSequence, list[MediaRef], str]:
        """For evaluation: the tokens before the last answer, the media among them, and what is to be answered."""
        refs = self.media_refs(example_id)
        tokens, answer = self._text.encode_prompt(self.conversation(example_id), [ref.raw or (0, 0) for ref in refs])
        refs = refs[: len(tokens.media)]
        return self._phases.with_sizes(self._phases.with_phases(tokens, refs), lambda: refs), refs, answer

    def readers_of(self, ref: MediaRef) -> tuple[str, ...]:
        """The names of the phases that compute an item, in their order: of generators, if it is theirs to make."""
        return self._phases.of_item(ref)

    def takes_rows(self, phase: str) -> bool:
        """As of `Examples`."""
        return self._phases.takes_rows(phase)

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transform of each phase, as `Decoder` takes them."""
        return {phase: modality.transform for phase, modality in self._phases.modalities.items()}

    def _numbers(self, example_ids: Int64Array) -> Int64Array:
        """Numbers through all manifests, left-out examples included."""
        example_ids = np.asarray(example_ids, dtype=np.int64)
        return example_ids if self._kept is None else self._kept[example_ids].astype(np.int64)

    def _columns(self, numbers: Int64Array) -> ExampleLengths:
        """The columns of examples as they are trained on. numbers: through all manifests."""
        return self._indexes.columns(numbers).truncated(numbers, self._truncated)

    def _cut(self, example_id: int) -> int | None:
        """The place of an example among those that are truncated; None if it is whole."""
        _, places = self._truncated.find(self._numbers(np.array([example_id])))
        return int(places[0]) if len(places) else None

    def _locate(self, example_id: int) -> tuple[Index, int]:
        if not 0 <= example_id < self.num_examples:
            raise IndexError(f"there is no example {example_id}; the dataset has {self.num_examples}")
        return self._indexes.at(int(self._numbers(np.array([example_id]))[0]))

    def has_items(self, phase: str) -> bool:
        """Whether any example of the manifests, also of those that are left out, has an item that a phase computes."""
        columns = (index.lengths for index in self._indexes)
        return any(len(self._phases.items_of(lengths, self._phases.modalities[phase])) > 0 for lengths in columns)

    def sizes_of(self, phase: str) -> Int64Array:
        """The different sizes of images that a phase computes, of all examples of the manifests; int64 [n, 2]."""
        modality = self._phases.modalities[phase]
        found = [
            np.stack(index.lengths.raw, axis=1)[self._phases.items_of(index.lengths, modality)]
            for index in self._indexes
        ]
        raw = np.concatenate(found)
        # Of what cannot be read no size is known.
        return np.unique(modality.transform.sizes(raw[(raw > 0).all(axis=1)]), axis=0)

    def _check_some_left(self) -> None:
        """Raise UserError if no example can be trained on."""
        if not self.num_examples:
            raise UserError(
                f"no example of the manifests can be used: {describe_left_out(self.left_out, self.num_in_manifests)}; "
                f"the first: {self.left_out.first()}"
            )
