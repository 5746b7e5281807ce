"""Loads a microbatch: example numbers -> the RankBatch that this rank computes. There are two ways.

Index:    lengths are known before loading. Every rank decides the whole step by itself, microbatches included, and
          loads only what it will compute.
Exchange: each rank loads its home examples. Lengths are gathered, and the decision says to which rank an item is sent.

Both have four steps (deal, start, bad, finish). Before the last, ranks agree on the examples that could not be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from motet.assign.whole_step import DecidedMicrobatch, DecidedStep, decide_step
from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.example import Media, TokenSequence
from motet.core.workload import BatchLengths, home_ranks
from motet.data.decode import Decoder, loaded_items
from motet.data.examples import Examples
from motet.data.media import BadMedia, MediaRef
from motet.data.order import StepExamples
from motet.data.splits import OwnSplits
from motet.dispatch import Decision, ItemExchange, LoadedExample, Orchestrator, RankBatch, assemble
from motet.dispatch.cut_batch import examples_to_read

MediaPlace: TypeAlias = tuple[int, int]
"""Index of an example in the microbatch, and number of an item among all of the example's."""


@dataclass(frozen=True)
class UnreadableExample:
    """An example with a file that cannot be used.

    index: in the microbatch, the same on all ranks. where: manifest and line of the example.
    """

    index: int
    where: str
    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.file}: {self.reason}"


@dataclass(frozen=True)
class Loaded:
    """A microbatch on this rank, the bytes that its inputs moved between ranks, and the seconds of deciding it then.

    These are 0 in index mode, where the step was decided before.
    """

    batch: RankBatch
    moved_bytes: int = 0
    crossing_bytes: int = 0
    decide_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Dealt:
    """One microbatch of a step: its examples, int64 [num_examples]; in index mode with what was decided for it.

    number: of the microbatch in the step; under a Plan.
    """

    ids: Int64Array
    decided: DecidedMicrobatch | None = None
    number: int = -1


@dataclass(frozen=True, eq=False)
class DealtStep:
    """The microbatches of a step, with what was decided for the step as a whole; None: nothing was."""

    microbatches: tuple[Dealt, ...]
    decided: DecidedStep | None = None


class Decodes(Protocol):
    """What loads items, as `Decoder` does."""

    def submit(self, refs: Sequence[MediaRef], readers: Sequence[Sequence[str]]) -> list[Future[Media | BadMedia]]:
        """Start to load items; a future for each item and each of its readers, in order."""


class Loading(Protocol):
    """A way to load microbatches: `IndexLoading` or `ExchangeLoading`."""

    def deal(self, examples: StepExamples, num_microbatches: int) -> DealtStep:
        """Give each example of a step a microbatch. Without groups, their number is a multiple of num_microbatches."""

    def start(self, dealt: Dealt) -> Pending:
        """Start to load this rank's share of a microbatch."""

    def finish(self, pending: Pending, kept: BoolArray) -> Loaded:
        """The microbatch of the examples with `kept`, bool [num_examples]. A collective in exchange mode."""


@dataclass
class Pending:
    """This rank's share of a microbatch while it is loaded. Examples have their index in the microbatch.

    num_examples: of the whole microbatch, over all ranks.
    where:        index -> manifest and line of the example.
    sequences:    index -> the example's tokens.
    items:        (index of the example, the item).
    ids:          under a Plan, the examples' numbers in the dataset.
    phases:       under a Plan, those whose items are loaded, in the order of `items`.
    """

    num_examples: int
    where: Callable[[int], str]
    sequences: dict[int, TokenSequence] = field(default_factory=dict)
    items: list[tuple[int, Future[Media | BadMedia]]] = field(default_factory=list)
    lengths: BatchLengths | None = None
    decision: Decision | None = None
    ids: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    phases: tuple[str, ...] = ()

    def bad(self) -> list[UnreadableExample]:
        """The examples of this share that cannot be used; waits until all items are loaded."""
        loaded = loaded_items((future, partial(self.where, index)) for index, future in self.items)
        return [
            UnreadableExample(index, self.where(index), media.path, media.reason)
            for (index, _), media in zip(self.items, loaded, strict=True)
            if isinstance(media, BadMedia)
        ]

    def media(self) -> list[tuple[int, Media]]:
        """(index of the example, item) for the items that could be loaded."""
        loaded = ((index, future.result()) for index, future in self.items)
        return [(index, media) for index, media in loaded if isinstance(media, Media)]


class IndexLoading:
    """Loads what the decision gives to this rank; lengths come from the dataset's index."""

    def __init__(self, dataset: Examples, decoder: Decoder, orchestrator: Orchestrator, rank: int) -> None:
        self._dataset, self._decoder, self._orchestrator, self._rank = dataset, decoder, orchestrator, rank

    def deal(self, examples: StepExamples, num_microbatches: int) -> DealtStep:
        """As `Loading.deal`, by the lengths of the index: which rank computes what is decided here."""
        step = decided_step(self._orchestrator, self._dataset, examples, num_microbatches)
        return DealtStep(tuple(Dealt(examples.ids[part.examples], part) for part in step.microbatches), step)

    def start(self, dealt: Dealt) -> Pending:
        """As `Loading.start`: media that this rank computes on are decoded by workers, tokens read at once."""
        ids, decided = dealt.ids, dealt.decided
        assert decided is not None, "index mode decides before loading"
        lengths, decision = decided.lengths, decided.decision
        pending = Pending(len(ids), where_in(self._dataset, ids), lengths=lengths, decision=decision)
        items = {phase: decision.items_on(phase, self._rank) for phase in self._orchestrator.encoders}
        # Media are submitted first: workers decode them while this thread reads the tokens.
        pending.items = submitted(self._dataset, self._decoder, ids, lengths, items)
        for index in examples_to_read(decision, self._rank):
            pending.sequences[index] = self._dataset.tokens(int(ids[index]))
        return pending

    def finish(self, pending: Pending, kept: BoolArray) -> Loaded:
        """As `Loading.finish`, without a message."""
        lengths, decision = pending.lengths, pending.decision
        assert lengths is not None
        assert decision is not None
        number = np.cumsum(kept) - 1
        sequences = {int(number[index]): pending.sequences[index] for index in pending.sequences if kept[index]}
        left, left_lengths = decision.keep(kept, lengths), lengths.keep(kept)
        media: dict[str, list[Media]] = {}
        start = 0
        for phase in self._orchestrator.encoders:
            end = start + len(decision.items_on(phase, self._rank))
            media[phase] = [usable_media(future) for index, future in pending.items[start:end] if kept[index]]
            start = end
        batch = assemble(
            left,
            left_lengths,
            self._rank,
            [sequences[index] for index in left.sequences_on(self._rank).tolist()],
            media,
            shared=sequences,
        )
        return Loaded(batch)


class ExchangeLoading:
    """Loads the home examples of this rank, then exchanges their items.

    Where examples are deferred, indexes that all ranks have say what each microbatch gets, before anything is loaded.
    Who computes what in a microbatch is decided when it is loaded, all the same: by then its bad examples are known.
    """

    def __init__(self, dataset: Examples | OwnSplits, decoder: Decoder, exchange: ItemExchange) -> None:
        self._dataset, self._decoder, self._exchange = dataset, decoder, exchange

    def deal(self, examples: StepExamples, num_microbatches: int) -> DealtStep:
        """As `Loading.deal`: in order, or by the indexes that all ranks have where examples are deferred."""
        assert examples.group is None, "a recipe that exchanges items has no groups"
        if num_microbatches > 1 and self._exchange.orchestrator.defers and not isinstance(self._dataset, OwnSplits):
            step = decided_step(self._exchange.orchestrator, self._dataset, examples, num_microbatches)
            return DealtStep(tuple(Dealt(examples.ids[part.examples]) for part in step.microbatches), step)
        # What is exchanged comes rank by rank, so the examples of a microbatch are in the order of their homes.
        ids = np.split(examples.ids, num_microbatches)
        parts = (part[np.argsort(self._home(part), kind="stable")] for part in ids)
        return DealtStep(tuple(Dealt(part) for part in parts))

    def start(self, dealt: Dealt) -> Pending:
        """As `Loading.start`: the examples whose home is this rank."""
        ids = dealt.ids
        pending = Pending(len(ids), where_in(self._dataset, ids))
        for index in np.flatnonzero(self._home(ids) == self._exchange.rank).tolist():
            refs = self._dataset.media_refs(int(ids[index]))
            futures = self._decoder.submit(refs, [self._dataset.readers_of(ref) for ref in refs])
            pending.items += [(index, future) for future in futures]
            pending.sequences[index] = self._dataset.tokens(int(ids[index]))
        return pending

    def finish(self, pending: Pending, kept: BoolArray) -> Loaded:
        """As `Loading.finish`: lengths are gathered, and items go to the ranks that compute on them. A collective."""
        media: dict[int, list[Media]] = {index: [] for index in pending.sequences}
        for index, item in pending.media():
            media[index].append(item)
        examples = [
            LoadedExample(sequence, tuple(media[index])) if kept[index] else None
            for index, sequence in pending.sequences.items()
        ]
        return exchanged(self._exchange, examples)

    def _home(self, ids: Int64Array) -> Int32Array:
        return self._dataset.home(ids, self._exchange.orchestrator.num_ranks)


def exchanged(exchange: ItemExchange, examples: Sequence[LoadedExample | None]) -> Loaded:
    """The microbatch of the examples that all ranks have loaded; None for one that is left out. A collective."""
    items = exchange(examples)
    batch = assemble(items.decision, items.lengths, exchange.rank, items.sequences, items.media)
    return Loaded(batch, items.moved_bytes, items.crossing_bytes, items.decision.decide_s)


def decided_step(
    orchestrator: Orchestrator, dataset: Examples, examples: StepExamples, num_microbatches: int
) -> DecidedStep:
    """What is decided for a step of a dataset whose lengths all ranks know. Each has an equal share, if no group."""
    ids, num_ranks = examples.ids, orchestrator.num_ranks
    lengths = replace(dataset.batch_lengths(ids, num_ranks), group=examples.group)
    if examples.group is None:
        home = np.tile(home_ranks(len(ids) // num_microbatches, num_ranks), num_microbatches)
        lengths = replace(lengths, home=home)
    return decide_step(orchestrator, lengths, num_microbatches)


def submitted(
    dataset: Examples, decoder: Decodes, ids: Int64Array, lengths: BatchLengths, items: Mapping[str, Int64Array]
) -> list[tuple[int, Future[Media | BadMedia]]]:
    """Start to load items: (index of the example, the item), phase by phase. ids, lengths: of a microbatch.

    items: phase -> int64 [n]. What several of these phases read is decoded once.
    """
    refs: dict[MediaPlace, MediaRef] = {}
    readers: dict[MediaPlace, list[str]] = {}
    places: list[tuple[str, MediaPlace]] = []
    for phase, chosen in items.items():
        for place, ref in refs_of_items(dataset, ids, lengths, phase, chosen):
            refs[place] = ref
            readers.setdefault(place, []).append(phase)
            places.append((phase, place))
    futures = decoder.submit([*refs.values()], [readers[place] for place in refs])
    loaded = dict(zip([(phase, place) for place in refs for phase in readers[place]], futures, strict=True))
    return [(place[0], loaded[phase, place]) for phase, place in places]


def refs_of_items(
    dataset: Examples, ids: Int64Array, lengths: BatchLengths, phase: str, items: Int64Array
) -> list[tuple[MediaPlace, MediaRef]]:
    """Place and file of items of a phase. ids, lengths: of a microbatch. items: int64 [n]."""
    example_of, found = lengths.items[phase].example, []
    # An example's record is read once, not once for each of its items.
    refs_of: dict[int, list[tuple[int, MediaRef]]] = {}
    for item in items:
        index = int(example_of[item])
        if index not in refs_of:
            everything = enumerate(dataset.media_refs(int(ids[index])))
            refs_of[index] = [each for each in everything if phase in dataset.readers_of(each[1])]
        number, ref = refs_of[index][int(item - np.searchsorted(example_of, index))]
        found.append(((index, number), ref))
    return found


def where_in(dataset: Examples | OwnSplits, ids: Int64Array) -> Callable[[int], str]:
    """Index in a microbatch -> manifest and line of the example."""
    return lambda index: dataset.where(int(ids[index]))


def usable_media(future: Future[Media | BadMedia]) -> Media:
    """A loaded item of an example that is kept."""
    media = future.result()
    assert isinstance(media, Media), "an example with an item that is bad is not kept"
    return media
