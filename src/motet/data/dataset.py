"""The examples that a job trains on: lengths of many at once; tokens and media files of one at a time.

Examples are numbered from 0 through all manifests. Unusable ones are left out: a bad file, a clip that the transform
refuses, a sequence longer than allowed. This follows from the indexes and the options alone, so all ranks agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from motet.core.alternating import alternating
from motet.core.arrays import BoolArray, IndexArray, Int32Array, Int64Array
from motet.core.errors import UserError
from motet.core.example import ItemText, TokenSequence, in_pieces, moved_turns
from motet.core.grid_positions import BEHIND_SIDE, GRID_DIM, NUM_AXES
from motet.core.item_segments import ItemSegments
from motet.core.modalities import IMAGE
from motet.core.modalities import modalities as all_modalities
from motet.core.readers import Combine, combine_error
from motet.core.words import counted_words
from motet.core.workload import BatchLengths, ItemLengths, home_ranks
from motet.data.conversation import Conversation, parse_conversation
from motet.data.copies import Copies
from motet.data.example_lengths import ExampleLengths
from motet.data.index import Index
from motet.data.index_build import open_index
from motet.data.index_entries import TextEncoder
from motet.data.index_lock import IndexProgress
from motet.data.left_out import MAX_NAMED, LeftOut, LeftOutExample, describe_left_out
from motet.data.media import IN_ANSWER, OF_SEVERAL, MediaRef
from motet.data.transforms import Transform, kinds_of
from motet.data.truncation import Truncated, num_kept_tokens, truncated

_SCAN_EXAMPLES = 1 << 16

LengthRule = Literal["drop", "truncate", "error"]
"""What becomes of an example that is longer than `max_sequence_length`."""


@dataclass(frozen=True)
class Modality:
    """The transform of a modality, and functions of the sizes of its items, int64 [n, size_dim] -> int64 [n].

    num_tokens: rows that each item takes in the backbone's sequence; of items that read a turn 0.
    lengths:    how much of each item the encoder computes on.
    segments:   the segments of each item; None: each item is one.
    is_made:    a generator learns to make its items, which are those of answers; encoders do not read them then.
    max_turn:   the most rows of the turn that such a generator is given of each item; 0: it is given no turn.
    grids:      frames, rows and columns of each item's rows in the sequence, int64 [n, 3], where the backbone's
                positions are those of a grid; None where they are not.
    behind:     how positions go on behind those rows (`core/grid_positions.py`).
    item_text:  key of an item -> what stands in its place, where its rows come in several pieces; None: they are one
                run, those of this item or of all. Keys are the transform's `text_keys(raw)`, or else sizes.
    """

    transform: Transform
    num_tokens: Callable[[Int64Array], Int64Array]
    lengths: Callable[[Int64Array], Int64Array]
    segments: Callable[[Int64Array], ItemSegments | None] | None = None
    is_made: bool = False
    max_turn: int = 0
    grids: Callable[[Int64Array], Int64Array] | None = None
    behind: int = BEHIND_SIDE
    item_text: Callable[[tuple[int, ...]], ItemText | None] | None = None

    def texts(self, raw: Int64Array) -> tuple[list[ItemText | None], Int64Array]:
        """The texts of items, those that are alike once; and which of them each item has, int64 [n]. raw: headers."""
        if self.item_text is None or not len(raw):
            return [None], np.zeros(len(raw), dtype=np.int64)
        keys = getattr(self.transform, "text_keys", self.transform.sizes)(raw)
        alike, which = np.unique(keys, axis=0, return_inverse=True)
        return [self.item_text(tuple(key)) for key in alike.tolist()], which.reshape(-1)

    def num_marks(self, raw: Int64Array) -> Int64Array:
        """Tokens that stand between the rows of each item, int64 [n]. raw: from headers."""
        texts, which = self.texts(raw)
        return np.array([text.num_marks if text else 0 for text in texts])[which]


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
        self._indexes, self._text, self._modalities = list(indexes), text, dict(modalities)
        self._makers = _readers({name: each for name, each in self._modalities.items() if each.is_made}, {})
        read = {name: each for name, each in self._modalities.items() if not each.is_made}
        self._readers, self._combine = _readers(read, combine), dict(combine)
        self._tells_several = any(getattr(each, "tells_several", False) for each in self.transforms.values())
        if self._tells_several and (len(self._readers.get(IMAGE, ())) > 1 or IMAGE in self._makers):
            raise ValueError("a transform that is told of several images must be the only one of images")
        self._starts = np.cumsum([0, *(len(index) for index in self._indexes)])
        for index in self._indexes:
            self._check_modalities(index)
        self._kept, self._truncated, self.left_out = self._select(max_sequence_length, too_long)
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
        return int(self._starts[-1])

    @property
    def num_by_manifest(self) -> Int64Array:
        """Examples of each manifest that can be trained on, int64 [num_manifests]; they are numbered in this order."""
        starts = self._starts if self._kept is None else np.searchsorted(self._kept, self._starts)
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
        items, sequence, _ = self._item_lengths(columns)
        return BatchLengths(sequence, columns.num_targets, home_ranks(len(numbers), num_ranks), items)

    def item_sizes(self, example_ids: Int64Array) -> dict[str, Int64Array]:
        """Phase -> sizes of its items, int64 [num_items, size_dim], as `batch_lengths` has them; from the indexes."""
        columns = self._columns(self._numbers(example_ids))
        return {
            name: np.asarray(modality.transform.sizes(columns.raw[self._of_phase(columns, modality)]), dtype=np.int64)
            for name, modality in self._modalities.items()
        }

    def tokens(self, example_id: int) -> TokenSequence:
        """The tokens of an example; `media` holds names of phases, one for each reader of each item."""
        index, example = self._locate(example_id)
        text, cut = index.tokens(example), self._cut(example_id)
        text = text if cut is None else truncated(text, int(self._truncated.num_tokens[cut]))
        # Who reads an item hangs on its turn only where something is made; then the row is read twice.
        read = self._with_phases(text, index.media_refs(example) if self._makers and text.media else ())
        return self._with_sizes(read, example_id)

    def media_refs(self, example_id: int) -> list[MediaRef]:
        """The items' files, in order of appearance; `modality` is a name of `core.modalities`."""
        index, example = self._locate(example_id)
        refs, cut = self._told(index.media_refs(example)), self._cut(example_id)
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
        return not any(ref.in_answer and ref.modality in self._makers for ref in in_answer)

    def prompt(self, example_id: int) -> tuple[TokenSequence, list[MediaRef], str]:
        """For evaluation: the tokens before the last answer, the media among them, and what is to be answered."""
        refs = self.media_refs(example_id)
        tokens, answer = self._text.encode_prompt(self.conversation(example_id), [ref.raw or (0, 0) for ref in refs])
        refs = refs[: len(tokens.media)]
        return self._with_sizes(self._with_phases(tokens, refs), example_id), refs, answer

    def _told(self, refs: list[MediaRef]) -> list[MediaRef]:
        """The same items, where images beside others say so if their transform is told."""
        if not self._tells_several or sum(ref.modality == IMAGE for ref in refs) < 2:
            return refs
        return [
            replace(ref, raw=(ref.raw[0], ref.raw[1] + OF_SEVERAL)) if ref.modality == IMAGE and ref.raw else ref
            for ref in refs
        ]

    def readers_of(self, ref: MediaRef) -> tuple[str, ...]:
        """The names of the phases that compute an item, in their order: of generators, if it is theirs to make."""
        return self._read_by(ref)

    def _read_by(self, ref: MediaRef) -> tuple[str, ...]:
        if ref.in_answer and (makers := self._makers.get(ref.modality)):
            return makers
        return self._readers[ref.modality]

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transform of each phase, as `Decoder` takes them."""
        return {phase: modality.transform for phase, modality in self._modalities.items()}

    def _with_phases(self, tokens: TokenSequence, refs: Sequence[MediaRef]) -> TokenSequence:
        """The same tokens with names of phases in place of modalities.

        refs: its items, or these and later ones; they are read if there are generators.

        Where several phases read an item, it has a placeholder for each, or one place for all whose rows are added.
        """
        if self._makers:
            phases = [self._read_by(ref) for ref in refs[: len(tokens.media)]]
        else:
            phases = [self._readers[modality] for modality in tokens.media]
        media = tuple(phase for of_item in phases for phase in of_item)
        turns = self._turns(tokens, phases)
        if len(media) == len(tokens.media):
            return TokenSequence(tokens.tokens, tokens.targets, media, tokens.media_positions, turns=turns)
        counts = np.array([len(of_item) for of_item in phases], dtype=np.int64)
        is_added = np.array([self.is_added(of_item[-1]) for of_item in phases])
        repeats = np.ones(len(tokens.tokens), dtype=np.int64)
        repeats[tokens.media_positions] = np.where(is_added, 1, counts)
        starts = np.cumsum(repeats) - repeats
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(starts[tokens.media_positions], counts) + np.where(np.repeat(is_added, counts), 0, number)
        return TokenSequence(
            np.repeat(tokens.tokens, repeats),
            np.repeat(tokens.targets, repeats),
            media,
            positions.astype(np.int64),
            turns=moved_turns(turns, repeats),
        )

    def _turns(self, tokens: TokenSequence, phases: Sequence[tuple[str, ...]]) -> Int64Array | None:
        """The turns that items of several phases read, int64 [num_items of all phases, 2]; None: there are none."""
        if tokens.turns is None or not any(modality.max_turn for modality in self._modalities.values()):
            return None
        reads = [self._modalities[phase].max_turn > 0 for of_item in phases for phase in of_item]
        of_items = np.repeat(tokens.turns, [len(of_item) for of_item in phases], axis=0)
        return np.where(np.array(reads, dtype=bool)[:, None], of_items, 0)

    def _with_sizes(self, tokens: TokenSequence, example_id: int) -> TokenSequence:
        """The same tokens with what follows from sizes of their items: their grids, or the pieces of their rows."""
        phases = [self._modalities[phase] for phase in tokens.media]
        if not any(modality.grids or modality.item_text for modality in phases):
            return tokens
        refs = [ref for ref in self.media_refs(example_id) for _ in self.readers_of(ref)]
        headers = [np.array([ref.raw], dtype=np.int64) for ref in refs]
        texts = [modality.texts(header)[0][0] for modality, header in zip(phases, headers)]
        if any(texts):
            tokens = in_pieces(tokens, texts)
        if not any(modality.grids for modality in phases):
            return tokens
        grids = np.zeros((len(tokens.media), GRID_DIM), dtype=np.int64)
        for number, (modality, header) in enumerate(zip(phases, headers)):
            assert modality.grids is not None, "a phase whose rows have no grid beside one whose rows have"
            steps = getattr(modality.transform, "time_steps", None)
            grids[number, :NUM_AXES] = modality.grids(modality.transform.sizes(header))[0]
            grids[number, NUM_AXES:] = 0 if steps is None else steps(header)[0], modality.behind
        sounds = [number for number, ref in enumerate(refs[: len(phases)]) if ref.is_sound_of_video]
        if sounds:
            chunk = getattr(phases[sounds[0] - 1].transform, "sound_chunk", None)
            assert chunk is not None, "the sound of a video is read, and how it alternates with frames is not said"
            return alternating(replace(tokens, grids=grids), [number - 1 for number in sounds], chunk)
        # Of an item in several pieces each has as many of its frames.
        grids[:, 0] //= tokens.num_pieces
        return replace(tokens, grids=np.repeat(grids, tokens.num_pieces, axis=0))

    def _numbers(self, example_ids: Int64Array) -> Int64Array:
        """Numbers through all manifests, left-out examples included."""
        example_ids = np.asarray(example_ids, dtype=np.int64)
        return example_ids if self._kept is None else self._kept[example_ids].astype(np.int64)

    def _columns(self, numbers: Int64Array) -> ExampleLengths:
        """The columns of examples as they are trained on. numbers: through all manifests."""
        return self._whole_columns(numbers).truncated(numbers, self._truncated)

    def _whole_columns(self, numbers: Int64Array) -> ExampleLengths:
        """The columns of whole examples. numbers: through all manifests."""
        return ExampleLengths.of(self._indexes, self._starts, numbers, tells_several=self._tells_several)

    def _cut(self, example_id: int) -> int | None:
        """The place of an example among those that are truncated; None if it is whole."""
        _, places = self._truncated.find(self._numbers(np.array([example_id])))
        return int(places[0]) if len(places) else None

    def _locate(self, example_id: int) -> tuple[Index, int]:
        if not 0 <= example_id < self.num_examples:
            raise IndexError(f"there is no example {example_id}; the dataset has {self.num_examples}")
        return self._at(int(self._numbers(np.array([example_id]))[0]))

    def _at(self, number: int) -> tuple[Index, int]:
        """The index that holds an example, and the example's number there. number: through all manifests."""
        i = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._indexes[i], number - int(self._starts[i])

    def _item_lengths(self, columns: ExampleLengths) -> tuple[dict[str, ItemLengths], Int64Array, Int64Array]:
        """The items of each phase, the length of each example's sequence, int64 [num_examples], and the rows that each
        item takes in it, marks between them included, int64 [num_items].
        """
        rows, items = np.zeros(len(columns.example), dtype=np.int64), {}
        for name, modality in self._modalities.items():
            of_phase = self._of_phase(columns, modality)
            length = num_tokens = np.zeros(0, dtype=np.int64)
            segments, marks = None, length
            if len(of_phase):
                sizes = modality.transform.sizes(columns.raw[of_phase])
                length = np.asarray(modality.lengths(sizes), dtype=np.int64)
                num_tokens = np.asarray(modality.num_tokens(sizes), dtype=np.int64)
                segments = modality.segments(sizes) if modality.segments else None
                marks = modality.num_marks(columns.raw[of_phase])
            items[name] = ItemLengths(columns.example[of_phase], length, num_tokens, segments)
            if not self.is_added(name):
                rows[of_phase] += num_tokens + marks
        for name, modality in self._modalities.items():
            if modality.max_turn:
                of_phase = self._of_phase(columns, modality)
                items[name] = replace(items[name], num_tokens=columns.turn_rows(rows)[of_phase])
        # The rows of its item replace each placeholder.
        sequence = columns.num_tokens - columns.num_items
        np.add.at(sequence, columns.example, rows)
        return items, sequence, rows

    def _of_phase(self, columns: ExampleLengths, modality: Modality) -> IndexArray:
        """The items that a modality reads, or makes, [n] indexes into the items of `columns`."""
        codes = []
        for kind in kinds_of(modality.transform):
            code = all_modalities().index(kind)
            codes += [] if modality.is_made else [code]
            codes += [code + IN_ANSWER] if modality.is_made or kind not in self._makers else []
        return np.flatnonzero(np.isin(columns.modality, codes))

    def is_added(self, phase: str) -> bool:
        """Whether the rows of a phase are added to those of the first phase that reads the same items."""
        modality = self._modalities[phase].transform.modality
        if self._modalities[phase].is_made:
            return False
        return self._combine.get(modality) == "sum" and self._readers[modality][0] != phase

    def takes_rows(self, phase: str) -> bool:
        """Whether items of a phase have rows of their own in the sequence."""
        return not (self.is_added(phase) or self._modalities[phase].max_turn)

    def has_items(self, phase: str) -> bool:
        """Whether any example of the manifests, also of those that are left out, has an item that a phase computes."""
        columns = (index.lengths for index in self._indexes)
        return any(len(self._of_phase(lengths, self._modalities[phase])) > 0 for lengths in columns)

    def sizes_of(self, phase: str) -> Int64Array:
        """The different sizes of images that a phase computes, of all examples of the manifests; int64 [n, 2]."""
        modality = self._modalities[phase]
        found = [
            np.stack(index.lengths.raw, axis=1)[self._of_phase(index.lengths, modality)] for index in self._indexes
        ]
        raw = np.concatenate(found)
        # Of what cannot be read no size is known.
        return np.unique(modality.transform.sizes(raw[(raw > 0).all(axis=1)]), axis=0)

    def _check_added(self, numbers: Int64Array) -> None:
        """Raise UserError for the first of some examples with an item whose rows are added and not equally many."""
        items, _, _ = self._item_lengths(self._whole_columns(numbers))
        for phase in filter(self.is_added, items):
            modality = self._modalities[phase].transform.modality
            first = self._readers[modality][0]
            if (unequal := np.flatnonzero(items[phase].num_tokens != items[first].num_tokens)).size:
                item = unequal[0]
                index, example = self._at(int(numbers[items[phase].example[item]]))
                counts = (
                    f"{counted_words(items[first].num_tokens[item], 'row')} and {phase} "
                    f"{items[phase].num_tokens[item]:,}"
                )
                raise UserError(
                    f'model.combine.{modality} = "sum" adds the rows of {first} and {phase}, but of an item of '
                    f"{index.where(example)} {first} makes {counts}; give them transforms and projectors that make as "
                    'many, or set it to "rows".'
                )

    def _check_some_left(self) -> None:
        """Raise UserError if no example can be trained on."""
        if not self.num_examples:
            raise UserError(
                f"no example of the manifests can be used: {describe_left_out(self.left_out, self.num_in_manifests)}; "
                f"the first: {self.left_out.first()}"
            )

    def _check_modalities(self, index: Index) -> None:
        for code, modality in enumerate(all_modalities()):
            codes = {code} if modality in self._makers else {code, code + IN_ANSWER}
            if modality not in self._readers and np.isin(index.lengths.modality, list(codes)).any():
                where = ", in turns that are not the assistant's" if modality in self._makers else ""
                reads = ", ".join(name for name in all_modalities() if name in self._readers) or "text alone"
                raise UserError(
                    f"{index.source} holds {modality} media{where}, but the model has no encoder for them (it reads "
                    f"{reads}); leave such examples out, or train a model that has one"
                )

    def _select(
        self, max_sequence_length: int | None, too_long: LengthRule
    ) -> tuple[Int32Array | Int64Array | None, Truncated, LeftOut]:
        """Numbers of the examples to train on (None: all), those that are truncated, and what is left out."""
        # 1. Examples whose files were bad when the index was built.
        usable = np.ones(self.num_in_manifests, dtype=bool)
        named: list[LeftOutExample] = []
        num_bad = 0
        for start, index in zip(self._starts, self._indexes):
            for bad in index.bad_examples():
                usable[int(start) + bad.example] = False
                num_bad += 1
                if num_bad <= MAX_NAMED:
                    named.append(LeftOutExample(index.where(bad.example), bad.path, bad.reason))
        # 2. Examples that a transform refuses, or that are too long; in parts, to bound the memory of the scan.
        refused, dropped = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        cuts = [np.zeros((0, 4), dtype=np.int64)]
        for start in range(0, len(usable), _SCAN_EXAMPLES):
            numbers = start + np.flatnonzero(usable[start : start + _SCAN_EXAMPLES])
            columns = self._whole_columns(numbers)
            is_refused = self._refused(columns)
            if "sum" in self._combine.values():
                self._check_added(numbers[~is_refused])
            if any(modality.max_turn for modality in self._modalities.values()):
                places = np.flatnonzero(~is_refused)
                of_rest = self._whole_columns(numbers[places])
                is_refused[places] = self._wrong_turns(of_rest)
            usable[numbers[is_refused]] = False
            refused.append(numbers[is_refused])
            if max_sequence_length is not None:
                _, sequence, rows = self._item_lengths(columns)
                is_too_long = ~is_refused & (sequence > max_sequence_length)
                if too_long == "truncate":
                    cuts.append(self._cuts(numbers, np.flatnonzero(is_too_long), columns, rows, max_sequence_length))
                    is_too_long &= ~np.isin(numbers, cuts[-1][:, 0])
                usable[numbers[is_too_long]] = False
                dropped.append(numbers[is_too_long])
        # 3. The first ones of each reason by name.
        all_refused, all_dropped = np.concatenate(refused), np.concatenate(dropped)
        named += [self._name_refused(number) for number in all_refused[:MAX_NAMED].tolist()]
        too_long_named = [
            self._name_too_long(number, max_sequence_length, too_long) for number in all_dropped[:MAX_NAMED]
        ]
        if too_long == "error" and too_long_named:
            raise UserError(
                f'{too_long_named[0]} (data.too_long = "error"; {len(all_dropped):,} of {len(usable):,} examples are '
                'too long): shorten them, raise the bound, or set data.too_long to "truncate" or "drop"'
            )
        all_cuts = np.concatenate(cuts)
        named += too_long_named
        left_out = LeftOut(num_bad, len(all_refused), len(all_dropped), len(all_cuts), tuple(named))
        kept: Int32Array | Int64Array | None = None
        if not usable.all():
            kept = np.flatnonzero(usable)
            kept = kept.astype(np.int32) if len(usable) <= np.iinfo(np.int32).max else kept
        return kept, Truncated(*all_cuts.T.copy()), left_out

    def _cuts(
        self, numbers: Int64Array, places: IndexArray, columns: ExampleLengths, rows: Int64Array, max_rows: int
    ) -> Int64Array:
        """What is left of examples that are too long: number, num_tokens, num_targets, num_items, int64 [n, 4].

        places: of the examples that are too long in `numbers`. Those of which nothing learned is left are not returned.
        O(tokens of these examples), which are read from the index.
        """
        first = np.cumsum(columns.num_items) - columns.num_items
        item_tokens: dict[str, frozenset[int]] = {}
        cuts = []
        for place in places.tolist():
            index, example = self._at(int(numbers[place]))
            text = index.tokens(example)
            for modality in set(text.media) - item_tokens.keys():
                item_tokens[modality] = self._text.item_tokens(modality)
            of_items = frozenset[int]().union(*(item_tokens[modality] for modality in text.media))
            own_rows = rows[first[place] : first[place] + columns.num_items[place]]
            if num_tokens := num_kept_tokens(text, own_rows, of_items, max_rows):
                left = truncated(text, num_tokens)
                cuts.append((int(numbers[place]), num_tokens, int(left.targets[1:].sum()), len(left.media)))
        return np.array(cuts, dtype=np.int64).reshape(-1, 4)

    def _name_refused(self, number: int) -> LeftOutExample:
        index, example = self._at(number)
        for ref in self._told(index.media_refs(example)):
            for transform in (self._modalities[phase].transform for phase in self._read_by(ref)):
                if ref.raw is not None and not transform.accepts(np.array([ref.raw], dtype=np.int64))[0]:
                    return LeftOutExample(index.where(example), ref.name, transform.refusal(ref.raw))
        columns = self._whole_columns(np.array([number]))
        for name, column in self._item_lengths(columns)[0].items():
            if most := self._modalities[name].max_turn:
                rows = int(column.num_tokens[_wrong_items(column, most)][0])
                reason = (
                    f"the turn before what {name} is to make has {counted_words(rows, 'row')}, more than "
                    f"model.generators.{name}.max_turn = {most:,}"
                    if rows
                    else f"no turn that the tokenizer's chat template tells apart is before what {name} is to make"
                )
                return LeftOutExample(index.where(example), "", reason)
        raise ValueError(f"no item of example {number} is refused")

    def _name_too_long(self, number: int, max_sequence_length: int | None, too_long: LengthRule) -> LeftOutExample:
        columns = self._whole_columns(np.array([number]))
        num_tokens = int(self._item_lengths(columns)[1][0])
        index, example = self._at(number)
        reason = f"takes {num_tokens:,} tokens, more than max_sequence_length = {max_sequence_length:,}"
        if too_long == "truncate":
            reason += ", and nothing that is learned is within it"
        return LeftOutExample(index.where(example), "", reason)

    def _wrong_turns(self, columns: ExampleLengths) -> BoolArray:
        """Which examples have an item that would be made of a turn that is too long, or of none, bool [num_examples].

        No item of theirs is refused by its transform.
        """
        wrong = np.zeros(len(columns.num_tokens), dtype=bool)
        for name, column in self._item_lengths(columns)[0].items():
            if most := self._modalities[name].max_turn:
                wrong[column.example[_wrong_items(column, most)]] = True
        return wrong

    def _refused(self, columns: ExampleLengths) -> BoolArray:
        """Which examples have an item that its transform refuses, bool [num_examples]."""
        refused = np.zeros(len(columns.num_tokens), dtype=bool)
        for modality in self._modalities.values():
            items = self._of_phase(columns, modality)
            if len(items):
                refused[columns.example[items[~modality.transform.accepts(columns.raw[items])]]] = True
        return refused


def _readers(modalities: Mapping[str, Modality], combine: Mapping[str, Combine]) -> dict[str, tuple[str, ...]]:
    readers: dict[str, tuple[str, ...]] = {}
    for name, modality in modalities.items():
        for kind in kinds_of(modality.transform):
            if kind not in all_modalities():
                held = " and ".join(all_modalities())
                raise UserError(f"encoder {name} reads '{kind}', but manifests hold only {held}")
            readers[kind] = (*readers.get(kind, ()), name)
    if wrong := combine_error(readers, combine):
        raise UserError(f"{wrong}.")
    return readers


def _wrong_items(items: ItemLengths, most: int) -> BoolArray:
    """Which items would be made of a turn of more than `most` rows, or of none, bool [num_items]."""
    wrong: BoolArray = (items.num_tokens == 0) | (items.num_tokens > most)
    return wrong
