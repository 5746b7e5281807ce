"""Index mode of a loop of one's own: lengths are known before loading, so each rank loads only what it will compute.

1. The sampler of each rank gives numbers of examples, which ranks gather.
2. All ranks look up the lengths of all these examples and make the same decision.
3. The workers of each rank's loader load the sequences and items that the rank will compute.

Steps 1 and 2 are as many microbatches ahead of step 3 as the workers of any rank load ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from motet.assign.orchestrator import Decision, Orchestrator
from motet.core.arrays import BoolArray, Int64Array
from motet.core.errors import UserError
from motet.core.example import Media, TokenSequence
from motet.core.workload import BatchLengths
from motet.dispatch.agreement import gather
from motet.dispatch.batch import RankBatch, assemble
from motet.dispatch.loop_source import LoopTurn, Skipping, Status, like, set_epoch


@runtime_checkable
class ExampleParts(Protocol):
    """A dataset whose lengths are known before loading, and whose sequences and items are loaded one by one.

    Example: for a dataset of text alone,
        >>> class Texts:
        ...     def lengths(self, numbers):
        ...         tokens, home = np.full(len(numbers), 3), np.zeros(len(numbers), np.int32)
        ...         return BatchLengths(tokens, tokens - 1, home, {})
        ...     def sequence(self, number):
        ...         return TokenSequence(np.arange(3), np.arange(3) > 0, (), np.array([], int))
        ...     def media(self, number, phase, item):
        ...         raise IndexError("no example has an item")
        >>> isinstance(Texts(), ExampleParts)
        True
    """

    def lengths(self, numbers: Int64Array) -> BatchLengths:
        """The lengths of these examples, the same on all ranks; `home` is ignored. Every phase has a column."""

    def sequence(self, number: int) -> TokenSequence | None:
        """The tokens of an example; None if it cannot be used."""

    def media(self, number: int, phase: str, item: int) -> Media | None:
        """An item by its index among the example's items of the phase; None if it cannot be used."""


def phases_of(loader: Any) -> tuple[str, ...]:
    """The encoder phases of a loader's dataset. Raises UserError if it is no `ExampleParts` or has no sampler."""
    if not isinstance(getattr(loader, "dataset", None), ExampleParts) or getattr(loader, "batch_sampler", None) is None:
        raise UserError(
            "prefetched was given no measures, and the loader is no DataLoader with a batch sampler over a dataset "
            "with lengths, sequence and media (motet.dispatch.ExampleParts): give measures, or such a loader."
        )
    return tuple(loader.dataset.lengths(np.empty(0, dtype=np.int64)).items)


@dataclass(frozen=True)
class _Request:
    """What a worker loads of one example.

    index:  of the example in the microbatch. number: in the dataset.
    items:  (phase, index among the example's items of the phase).
    """

    index: int
    number: int
    has_sequence: bool
    items: tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class _Planned:
    """A microbatch that was decided, or the status and error of this rank. examples: by index in the microbatch."""

    status: Status
    error: Exception | None = None
    examples: tuple[int, ...] = ()
    lengths: BatchLengths | None = None
    decision: Decision | None = None


_Part: TypeAlias = tuple[TokenSequence | None, list[Media | None]]
"""What was loaded of one example."""


class _Requests:
    """A batch sampler: the requests of the microbatches that were decided."""

    def __init__(self, decided: deque[list[_Request]]) -> None:
        self._decided = decided

    def __iter__(self) -> Iterator[list[_Request]]:
        while self._decided:
            yield self._decided.popleft()


class _Parts(Dataset):
    """Loads the parts of examples; runs in workers."""

    def __init__(self, dataset: ExampleParts) -> None:
        self._dataset = dataset

    def __getitem__(self, request: _Request) -> _Part:
        sequence = self._dataset.sequence(request.number) if request.has_sequence else None
        return sequence, [self._dataset.media(request.number, phase, item) for phase, item in request.items]


class IndexSource:
    """A LoopSource of the examples of a DataLoader over an `ExampleParts`."""

    def __init__(self, loader: DataLoader, orchestrator: Orchestrator, group: dist.ProcessGroup) -> None:
        self._given, self._orchestrator, self._group = loader, orchestrator, group
        self._rank, self._dataset = group.rank(), loader.dataset
        self.num_ahead = loader.num_workers * (loader.prefetch_factor or 0) + 1

    def begin(self, first_batch: int) -> None:
        """As `LoopSource.begin`."""
        self._numbers: Iterator | None = None
        self._batch_sampler = Skipping(self._given.batch_sampler, first_batch)
        self._planned: deque[_Planned] = deque()
        self._requests: deque[list[_Request]] = deque()
        self._loading: deque[list[_Request]] = deque()
        self._loader: Iterator | None = None
        self._have_all_ended = False

    def end(self) -> None:
        """As `LoopSource.end`."""
        self._loader = None

    def set_epoch(self, epoch: int) -> None:
        """As `LoopSource.set_epoch`."""
        set_epoch(self._given, epoch)

    def load_state(self, state: Any) -> None:
        """Nothing: such a loader keeps no state."""

    def turn(self, *, is_closing: bool) -> LoopTurn:
        """As `LoopSource.turn`: a microbatch that was decided from lengths before it was loaded. A collective."""
        while len(self._planned) <= self.num_ahead and not self._have_all_ended:
            self._plan()
        planned = self._planned.popleft()
        requests, parts, error = self._loading.popleft(), [], planned.error
        bad: list[int] = []
        try:
            if planned.decision is not None and not is_closing:
                parts = self._load()
                bad = _bad(requests, parts)
        except Exception as failure:
            error = error or failure
        status = Status.FAILED if error else Status.CLOSING if is_closing else planned.status
        everywhere = gather((int(status), bad), self._group)
        left_out = {index for _, indices in everywhere for index in indices}
        if planned.decision is None or max(status for status, _ in everywhere) >= Status.CLOSING:
            return LoopTurn(status, error=error)
        try:
            batch = self._assembled(planned, requests, parts, left_out)
        except Exception as failure:
            return LoopTurn(Status.FAILED, error=failure)
        return LoopTurn(status, batch, num_left_out=len(left_out))

    def _plan(self) -> None:
        """Decide the next microbatch. A collective."""
        numbers: list[int] = []
        status, error = Status.READY, None
        try:
            if self._numbers is None:
                self._numbers = iter(self._batch_sampler)
            following = next(self._numbers, None)
            status = Status.ENDED if following is None else Status.READY
            numbers = [] if following is None else [int(number) for number in following]
        except Exception as failure:
            status, error = Status.FAILED, failure
        everywhere = gather((int(status), numbers), self._group)
        worst, least = max(s for s, _ in everywhere), min(s for s, _ in everywhere)
        self._have_all_ended = least != Status.READY or worst == Status.FAILED
        planned = _Planned(status, error)
        requests: list[_Request] = []
        if not self._have_all_ended:
            try:
                examples = [number for _, of_rank in everywhere for number in of_rank]
                home = np.repeat(
                    np.arange(len(everywhere), dtype=np.int32), [len(of_rank) for _, of_rank in everywhere]
                )
                lengths = replace(self._dataset.lengths(np.array(examples, dtype=np.int64)), home=home)
                planned = _Planned(status, None, tuple(examples), lengths, self._orchestrator.decide(lengths))
                requests = self._requested(planned)
            except Exception as failure:
                planned = _Planned(Status.FAILED, failure)
        self._planned.append(planned)
        self._loading.append(requests)
        if planned.decision is not None:
            self._requests.append(requests)

    def _requested(self, planned: _Planned) -> list[_Request]:
        """What this rank loads, by example."""
        lengths, decision = planned.lengths, planned.decision
        assert lengths is not None
        assert decision is not None
        runs = set(decision.backbone.on_rank(self._rank).tolist())
        items: dict[int, list[tuple[str, int]]] = {index: [] for index in runs}
        for phase in self._orchestrator.encoders:
            example = lengths.items[phase].example
            for item in decision.assignments[phase].on_rank(self._rank).tolist():
                index = int(example[item])
                items.setdefault(index, []).append((phase, item - int(np.searchsorted(example, index))))
        return [
            _Request(index, planned.examples[index], index in runs, tuple(wanted))
            for index, wanted in sorted(items.items())
        ]

    def _load(self) -> list[_Part]:
        """The parts that the next requests ask for, in their order."""
        if self._loader is None:
            # Its workers may load ahead as many requests as have been planned.
            self._loader = iter(like(self._given, _Parts(self._dataset), _Requests(self._requests), list))
        return next(self._loader)

    def _assembled(
        self, planned: _Planned, requests: list[_Request], parts: list[_Part], left_out: set[int]
    ) -> RankBatch:
        """What this rank computes of a microbatch, without the examples that some rank could not load."""
        lengths, decision = planned.lengths, planned.decision
        assert lengths is not None
        assert decision is not None
        sequence_of = {request.index: sequence for request, (sequence, _) in zip(requests, parts, strict=True)}
        media_of = {
            (phase, request.index, item): media
            for request, (_, loaded) in zip(requests, parts, strict=True)
            for (phase, item), media in zip(request.items, loaded, strict=True)
        }
        kept: BoolArray = np.ones(lengths.num_examples, dtype=np.bool_)
        kept[list(left_out)] = False
        decision, lengths = decision.keep(kept, lengths), lengths.keep(kept)
        index_of = np.flatnonzero(kept)
        media: dict[str, list[Media]] = {}
        for phase in self._orchestrator.encoders:
            example = lengths.items[phase].example
            items = decision.assignments[phase].on_rank(self._rank)
            numbers = items - np.searchsorted(example, example[items])
            media[phase] = [
                media_of[phase, int(index), int(number)] for index, number in zip(index_of[example[items]], numbers)
            ]
        sequences = [sequence_of[int(index)] for index in index_of[decision.backbone.on_rank(self._rank)]]
        return assemble(decision, lengths, self._rank, sequences, media)


def _bad(requests: list[_Request], parts: list[_Part]) -> list[int]:
    """The examples of which a part that was asked for is None."""
    return [
        request.index
        for request, (sequence, media) in zip(requests, parts, strict=True)
        if (request.has_sequence and sequence is None) or any(each is None for each in media)
    ]
