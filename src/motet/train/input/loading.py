"""From example ids of a microbatch to what this rank computes of them: the two ways of the balanced step.

Index: lengths are known before loading, so every rank decides by itself and loads only what it will compute.
Exchange: each rank loads its home examples; lengths are gathered, and items are sent to where the decision puts them.
Both are taken in three steps (start, bad, finish), between which ranks agree on the examples that could not be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from motet.core.arrays import BoolArray, Int64Array
from motet.core.example import Media, TokenSequence
from motet.core.workload import BatchLengths, home_ranks
from motet.data.dataset import Dataset
from motet.data.decode import Decoder
from motet.data.media import BadMedia, MediaRef
from motet.dispatch import Decision, ItemExchange, LoadedExample, Orchestrator, RankBatch, assemble


@dataclass(frozen=True)
class UnreadableExample:
    """place: position in the microbatch, the same on all ranks. where: the example's place in its manifest."""

    place: int
    where: str
    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.file}: {self.reason}"


@dataclass(frozen=True)
class Loaded:
    """A microbatch, and what its inputs cost to move between ranks (nothing where lengths come from the index)."""

    batch: RankBatch
    moved_bytes: int = 0
    crossing_bytes: int = 0


class Loading(Protocol):
    def start(self, ids: Int64Array) -> Pending:
        """Begin to load this rank's share of the examples `ids`."""

    def finish(self, pending: Pending, kept: BoolArray) -> Loaded:
        """The microbatch without the examples that are not kept; a collective in exchange mode."""


@dataclass
class Pending:
    """This rank's share of a microbatch, on its way from the disk.

    num_examples: of the whole microbatch. where: an example's place in its manifest, from its place in the microbatch.
    items: place of the example that each item belongs to, and the item itself.
    """

    num_examples: int
    where: Callable[[int], str]
    sequences: dict[int, TokenSequence] = field(default_factory=dict)
    items: list[tuple[int, Future[Media | BadMedia]]] = field(default_factory=list)
    lengths: BatchLengths | None = None
    decision: Decision | None = None

    def bad(self) -> list[UnreadableExample]:
        """Waits until all is loaded: the examples of this share that cannot be used."""
        found = []
        for place, future in self.items:
            media = future.result()
            if isinstance(media, BadMedia):
                found.append(UnreadableExample(place, self.where(place), media.path, media.reason))
        return found

    def media(self) -> list[tuple[int, Media]]:
        """Items that were loaded, each with the place of its example."""
        loaded = ((place, future.result()) for place, future in self.items)
        return [(place, media) for place, media in loaded if isinstance(media, Media)]


class IndexLoading:
    def __init__(
        self, dataset: Dataset, decoder: Decoder, orchestrator: Orchestrator, rank: int, ranks_per_node: int
    ) -> None:
        self._dataset, self._decoder, self._orchestrator = dataset, decoder, orchestrator
        self._rank, self._ranks_per_node = rank, ranks_per_node

    def start(self, ids: Int64Array) -> Pending:
        lengths = self._dataset.batch_lengths(ids, self._orchestrator.num_ranks)
        decision = self._orchestrator.decide(lengths)
        pending = Pending(len(ids), _places(self._dataset, ids), lengths=lengths, decision=decision)
        refs: list[tuple[int, MediaRef]] = []
        for phase in self._orchestrator.encoders:
            column = lengths.items[phase].example
            # By place: an example of many items is read, and its items sorted out, once and not for each of them.
            refs_of: dict[int, list[MediaRef]] = {}
            for item in decision.assignments[phase].on_rank(self._rank):
                place = int(column[item])
                if place not in refs_of:
                    refs_of[place] = [
                        ref for ref in self._dataset.media_refs(int(ids[place])) if self._dataset.phase_of(ref) == phase
                    ]
                refs.append((place, refs_of[place][int(item - np.searchsorted(column, place))]))
        # Media first: workers decode them while this thread reads the tokens.
        futures = self._decoder.submit([ref for _, ref in refs])
        pending.items = [(place, future) for (place, _), future in zip(refs, futures)]
        for place in decision.backbone.on_rank(self._rank).tolist():
            pending.sequences[place] = self._dataset.tokens(int(ids[place]))
        return pending

    def finish(self, pending: Pending, kept: BoolArray) -> Loaded:
        lengths, decision = pending.lengths, pending.decision
        assert lengths is not None
        assert decision is not None
        sequences = [
            pending.sequences[place] for place in decision.backbone.on_rank(self._rank).tolist() if kept[place]
        ]
        media: dict[str, list[Media]] = {}
        at = 0
        for phase in self._orchestrator.encoders:
            count = len(decision.assignments[phase].on_rank(self._rank))
            own = pending.items[at : at + count]
            media[phase] = [_media(future) for place, future in own if kept[place]]
            at += count
        batch = assemble(
            decision.keep(kept, lengths),
            lengths.keep(kept),
            self._rank,
            sequences,
            media,
            ranks_per_node=self._ranks_per_node,
        )
        return Loaded(batch)


class ExchangeLoading:
    def __init__(self, dataset: Dataset, decoder: Decoder, exchange: ItemExchange, ranks_per_node: int) -> None:
        self._dataset, self._decoder, self._exchange, self._ranks_per_node = dataset, decoder, exchange, ranks_per_node

    def start(self, ids: Int64Array) -> Pending:
        pending = Pending(len(ids), _places(self._dataset, ids))
        homes = home_ranks(len(ids), self._exchange.orchestrator.num_ranks)
        for place in np.flatnonzero(homes == self._exchange.rank).tolist():
            futures = self._decoder.submit(self._dataset.media_refs(int(ids[place])))
            pending.items += [(place, future) for future in futures]
            pending.sequences[place] = self._dataset.tokens(int(ids[place]))
        return pending

    def finish(self, pending: Pending, kept: BoolArray) -> Loaded:
        media: dict[int, list[Media]] = {place: [] for place in pending.sequences}
        for place, item in pending.media():
            media[place].append(item)
        examples = [
            LoadedExample(sequence, tuple(media[place])) if kept[place] else None
            for place, sequence in pending.sequences.items()
        ]
        return exchanged(self._exchange, examples, self._ranks_per_node)


def exchanged(exchange: ItemExchange, examples: Sequence[LoadedExample | None], ranks_per_node: int) -> Loaded:
    """The microbatch made of the examples that every rank has loaded; a collective."""
    items = exchange(examples)
    batch = assemble(
        items.decision, items.lengths, exchange.rank, items.sequences, items.media, ranks_per_node=ranks_per_node
    )
    return Loaded(batch, items.moved_bytes, items.crossing_bytes)


def _places(dataset: Dataset, ids: Int64Array) -> Callable[[int], str]:
    return lambda place: dataset.where(int(ids[place]))


def _media(future: Future[Media | BadMedia]) -> Media:
    media = future.result()
    assert isinstance(media, Media), "an example with an item that is bad is not kept"
    return media
