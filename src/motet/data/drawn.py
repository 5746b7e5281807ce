"""Examples that are drawn from a mixture of tasks (`core/sampler.py`), without files: random contents of drawn lengths.

Example n is a pure function of (seed, n): of any number of ranks and after a resume it is the same. It has the items of
its task first, in the order of the phases, and its text behind them, of which the end is the answer. Items of
generators stand behind the text, so that what they are made by has seen all of it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.errors import UserError
from motet.core.example import Media, Pixels, TokenSequence
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, Workload, home_ranks
from motet.data.left_out import LeftOut, LeftOutExample
from motet.data.media import MediaRef
from motet.data.modality import Modality
from motet.data.transforms import Transform

_BYTES = Pixels(mean=np.float32([0.5]), std=np.float32([0.5]))
"""A byte as a value from -1 to 1."""

_NO_ITEMS = ItemLengths(*np.zeros((3, 0), dtype=np.int64))


@dataclass(frozen=True)
class DrawnVocabulary:
    """Token ids that stand for no text, in place of a tokenizer.

    Example:
        >>> DrawnVocabulary(vocabulary_size=32000).vocabulary_size
        32000
    """

    vocabulary_size: int


@dataclass(frozen=True)
class DrawnTransform:
    """Makes the rows of an item, or those that are to be made: uniform values from -1 to 1. Its `raw` is (length,
    number) of the item.

    modality:  the name of the phase that computes the items.
    row_dim:   values of a row.
    is_pixels: values are bytes, as those of images, so that less is sent.

    Example:
        >>> transform = DrawnTransform("image", row_dim=12, is_pixels=True, seed=0)
        >>> media = transform.load(MediaRef("image", "", raw=(5, 31)))
        >>> media.values.shape, media.size.tolist()
        ((5, 12), [5])
    """

    modality: str
    row_dim: int
    is_pixels: bool
    seed: int = 0

    def sizes(self, raw: Int64Array) -> Int64Array:
        """The lengths of items, int64 [n, 1]."""
        return raw[:, :1]

    def accepts(self, raw: Int64Array) -> BoolArray:
        """All: a workload with an item that its encoder does not take is refused as a whole."""
        return np.ones(len(raw), dtype=bool)

    def refusal(self, raw: tuple[int, int]) -> str:
        """Never asked for."""
        raise ValueError(f"a drawn item {raw} is never refused")

    def load(self, ref: MediaRef) -> Media:
        """The rows of an item."""
        assert ref.raw is not None
        length, number = ref.raw
        rng = _generator(self.seed, self.modality, number)
        size = np.array([length], dtype=np.int64)
        if self.is_pixels:
            patches = np.frombuffer(rng.bytes(length * self.row_dim), np.uint8).reshape(length, self.row_dim)
            return Media(_BYTES.rows(patches), size, _BYTES, patches)
        return Media(rng.random((length, self.row_dim), dtype=np.float32) * 2 - 1, size)


class DrawnDataset:
    """The drawn examples of a workload, as `Examples`.

    Example:
        >>> from motet.core.sampler import Sampler
        >>> tasks = Sampler.model_validate({"task": [{"name": "text", "text": {"value": 6}}]})
        >>> drawn = DrawnDataset(tasks.workload(), {}, vocabulary_size=100)
        >>> drawn.num_examples, len(drawn.tokens(3).tokens)
        (65536, 6)
    """

    def __init__(
        self,
        workload: Workload,
        modalities: Mapping[str, Modality],
        *,
        vocabulary_size: int,
        seed: int = 0,
        max_sequence_length: int | None = None,
    ) -> None:
        """modalities: by name of phase.

        Raises UserError for items that an encoder cannot take, and if nothing is left.
        """
        self._modalities, self._vocabulary_size, self._seed = dict(modalities), vocabulary_size, seed
        self._made = [name for name, modality in modalities.items() if modality.is_made]
        self._of_turns = {name for name, modality in modalities.items() if modality.max_turn}
        self.num_in_manifests = workload.examples.num_examples
        kept = np.ones(self.num_in_manifests, dtype=bool)
        if max_sequence_length is not None:
            kept = workload.examples.sequence <= max_sequence_length
        if not kept.any():
            raise UserError(
                f"data.max_sequence_length = {max_sequence_length:,} leaves no example: the shortest that is drawn has "
                f"{workload.examples.sequence.min():,} tokens."
            )
        examples = workload.examples.keep(kept)
        # The first token of a sequence is never predicted, nor are the queries behind the text.
        queries = [name for name in self._made if name not in self._of_turns]
        made = sum((self._rows_of(examples, name) for name in queries), np.zeros(examples.num_examples, np.int64))
        num_targets = np.minimum(examples.num_targets, np.maximum(examples.sequence - made - 1, 0))
        # Also of an encoder that no task has items for.
        items = {name: examples.items.get(name, _NO_ITEMS) for name in self._modalities}
        self._take(replace(examples, num_targets=num_targets, items=items))
        self.left_out = _left_out(workload.examples.sequence, kept, max_sequence_length)
        self._check()

    @staticmethod
    def _rows_of(examples: BatchLengths, name: str) -> Int64Array:
        """The rows of the items of a phase in each example, int64 [num_examples]."""
        items = examples.items.get(name, _NO_ITEMS)
        return np.bincount(items.example, items.num_tokens, examples.num_examples).astype(np.int64)

    def _take(self, examples: BatchLengths) -> None:
        """Have these examples."""
        self._examples = examples
        self._first = {
            name: np.searchsorted(column.example, np.arange(self.num_examples + 1))
            for name, column in examples.items.items()
        }

    @property
    def num_examples(self) -> int:
        """Examples that can be trained on."""
        return self._examples.num_examples

    @property
    def fingerprint(self) -> str:
        """Equal for two datasets only if each number means the same example in both."""
        digest = hashlib.blake2b(digest_size=16)
        rows = [(name, each.transform) for name, each in sorted(self._modalities.items())]
        digest.update(repr((self._seed, self._vocabulary_size, rows)).encode())
        columns = [self._examples.sequence, self._examples.num_targets]
        for _, items in sorted(self._examples.items.items()):
            columns += [items.example, items.length, items.num_tokens]
        for column in columns:
            digest.update(column.tobytes())
        return digest.hexdigest()

    def batch_lengths(self, example_ids: Int64Array, num_ranks: int) -> BatchLengths:
        """The lengths of a microbatch; each rank is home to an equal share, in order. O(examples + items)."""
        return replace(self._examples.take(example_ids), home=home_ranks(len(example_ids), num_ranks))

    def item_sizes(self, example_ids: Int64Array) -> dict[str, Int64Array]:
        """As `Dataset.item_sizes`: the lengths of the items, int64 [num_items, 1]."""
        items = self._examples.take(example_ids).items
        return {name: self._modalities[name].transform.sizes(each.length[:, None]) for name, each in items.items()}

    def home(self, example_ids: Int64Array, num_ranks: int) -> Int32Array:
        """The rank of each example if nothing is balanced, int32 [n]: equal shares, in order."""
        return home_ranks(len(example_ids), num_ranks)

    def tokens(self, example_id: int) -> TokenSequence:
        """The tokens of an example: a placeholder for each item, then the text, then those of items to make.

        Those that are made of a turn are given the text before the answer.
        """
        items = {name: self._items_of(name, example_id) for name in self._phases}
        media = tuple(name for name, places in items.items() for _ in places)
        num_made = sum(len(items[name]) for name in self._made)
        rows = sum(
            int(self._examples.items[name].num_tokens[places].sum())
            for name, places in items.items()
            if name not in self._of_turns
        )
        num_tokens = len(media) + int(self._examples.sequence[example_id]) - rows
        rng = _generator(self._seed, BACKBONE, example_id)
        tokens = rng.integers(0, self._vocabulary_size, num_tokens)
        end, num_read = num_tokens - num_made, len(media) - num_made
        targets = np.zeros(num_tokens, dtype=bool)
        answer = end - int(self._examples.num_targets[example_id])
        targets[answer:end] = True
        turns = None
        if self._of_turns:
            turns = np.array([(num_read, answer) if name in self._of_turns else (0, 0) for name in media], np.int64)
            turns = turns.reshape(-1, 2)
        positions = np.r_[np.arange(num_read), np.arange(end, num_tokens)]
        return TokenSequence(tokens, targets, media, positions, turns=turns)

    def media_refs(self, example_id: int) -> list[MediaRef]:
        """The items of an example, in the order of their placeholders."""
        where = self.where(example_id)
        return [
            MediaRef(name, where, member=f"{name} {place}", raw=(int(self._examples.items[name].length[place]), place))
            for name in self._phases
            for place in self._items_of(name, example_id)
        ]

    def where(self, example_id: int) -> str:
        """The example, for messages."""
        return f"drawn example {example_id}"

    def leave_out(self, example_ids: Int64Array, reason: Callable[[int], str]) -> None:
        """As of `Examples`, of which one is named."""
        named = [LeftOutExample(self.where(example), "", reason(0)) for example in example_ids[:1].tolist()]
        if len(example_ids) == self.num_examples:
            raise UserError(f"No example that is drawn can be used: {named[0]}.")
        kept = np.ones(self.num_examples, dtype=bool)
        kept[example_ids] = False
        self._take(self._examples.keep(kept))
        self.left_out = self.left_out.with_too_large(named, len(example_ids))

    def readers_of(self, ref: MediaRef) -> tuple[str, ...]:
        """The name of the phase that computes an item."""
        return (ref.modality,)

    def takes_rows(self, phase: str) -> bool:
        """Whether items take rows of the sequence: each has one reader."""
        return phase not in self._of_turns

    @property
    def transforms(self) -> dict[str, Transform]:
        """The transform of each phase, as `Decoder` takes them."""
        return {name: modality.transform for name, modality in self._modalities.items()}

    @property
    def _phases(self) -> list[str]:
        """Those of encoders, then those of generators, each in their order."""
        return [*(name for name in self._modalities if name not in self._made), *self._made]

    def _items_of(self, name: str, example_id: int) -> range:
        """The places of an example's items among all items of a phase."""
        return range(*self._first[name][example_id : example_id + 2].tolist())

    def _check(self) -> None:
        """Raise UserError for an example without tokens, and for an item that its encoder does not take."""
        if not self._examples.sequence.all():
            raise UserError("[workload] draws examples without a token; let their text have one at least.")
        for name, column in self._examples.items.items():
            if not column.length.all():
                raise UserError(f"[workload] draws items of {name!r} of length 0; let their lengths begin at 1.")
            try:
                self._modalities[name].num_tokens(np.unique(column.length)[:, None])
            except UserError as error:
                raise UserError(
                    f"[workload] draws items of {name!r} that their module does not take: {str(error).rstrip('.')}."
                ) from error


def _generator(seed: int, phase: str, number: int) -> np.random.Generator:
    """Of an item of a phase, or of the text of an example."""
    return np.random.default_rng((seed, zlib.crc32(phase.encode()), number))


def _left_out(sequence: Int64Array, kept: BoolArray, max_sequence_length: int | None) -> LeftOut:
    """The examples that are too long, of which one is named: there is nothing to mend in any."""
    too_long = np.flatnonzero(~kept)
    named = tuple(
        LeftOutExample(
            f"drawn example {number}",
            "",
            f"takes {sequence[number]:,} tokens, more than max_sequence_length = {max_sequence_length:,}",
        )
        for number in too_long[:1].tolist()
    )
    return LeftOut(num_too_long=len(too_long), named=named)
