"""Where time goes in which nothing computes: the bubbles of a Timeline by cause, as in Optimus section 2.2, Table 1.

A rank is busy while a span on its compute stream runs that is no communication. Of all other time until the last span
of any rank has ended, what the rank then does tells the cause, the first that applies:

- tp: tensor-parallel communication of a pass;
- exchange: encoder outputs or their gradients move (an all-to-all);
- dp_gather, dp_reduce: collectives of parameters, of gradients;
- norm: the sum of the gradient's norm and of the loss over all ranks;
- straggler: it does nothing until one of those collectives starts, which needs other ranks too. Where a Timeline was
  measured this is part of the collective, which runs while it waits;
- pp_warmup, pp_cooldown: it has not begun its first pass, or has ended its last;
- pp_other: it waits between two passes, for its neighbours or for a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import BoolArray, Float64Array, IndexArray, Int32Array
from motet.core.timeline import COMPUTE_STREAM, Timeline
from motet.schedule.program import COMPUTE_KINDS as PASSES_AND_STEP
from motet.schedule.program import Kind
from motet.simulate.engine.spans import Labels

BUBBLE_KINDS = ("tp", "exchange", "dp_gather", "dp_reduce", "norm", "straggler", "pp_warmup", "pp_cooldown", "pp_other")
_TP, _EXCHANGE, _GATHER, _REDUCE, _NORM, _STRAGGLER, _WARMUP, _COOLDOWN, _OTHER = range(len(BUBBLE_KINDS))
_BUSY = -1
_NOTHING = len(BUBBLE_KINDS)
_CAUSES = {
    Kind.EXCHANGE_F: _EXCHANGE,
    Kind.EXCHANGE_B: _EXCHANGE,
    Kind.GATHER: _GATHER,
    Kind.GATHER_B: _GATHER,
    Kind.REDUCE: _REDUCE,
    Kind.NORM: _NORM,
}
_COMMUNICATION = frozenset(Kind) - PASSES_AND_STEP
_BLOCK_SPANS = 1 << 16
"""Ranks are looked at together until they have so many spans: columns of millions leave the caches again and again."""
_BY_PRIORITY = (_BUSY, _TP, _EXCHANGE, _GATHER, _REDUCE, _NORM)


@dataclass(frozen=True, eq=False)
class Bubbles:
    """step_s: how long the step is. busy_s: [num_ranks]. idle_s: [num_ranks, len(BUBBLE_KINDS)], by cause.

    busy_s and the sum of idle_s over its causes add up to step_s on every rank.
    """

    step_s: float
    busy_s: Float64Array
    idle_s: Float64Array

    @property
    def mean_s(self) -> dict[str, float]:
        """Seconds of each kind of bubble, mean over ranks."""
        return dict(zip(BUBBLE_KINDS, (self.idle_s.sum(axis=0) / max(len(self.idle_s), 1)).tolist()))

    @property
    def share(self) -> dict[str, float]:
        """The same as shares of the step."""
        return {kind: seconds / self.step_s if self.step_s else 0.0 for kind, seconds in self.mean_s.items()}

    @property
    def total_share(self) -> float:
        """The share of the step in which nothing computes, mean over ranks."""
        return sum(self.share.values())


def bubbles(timeline: Timeline) -> Bubbles:
    """The bubbles of a Timeline of one step, simulated or measured. O(spans log spans), once a Timeline."""
    if (found := _known.get(timeline)) is None:
        found = _known[timeline] = _counted(timeline)
    return found


_known: WeakKeyDictionary[Timeline, Bubbles] = WeakKeyDictionary()
"""Tables and pictures of a Timeline ask for the same."""


def _counted(timeline: Timeline) -> Bubbles:
    if not len(timeline):
        return Bubbles(0.0, np.zeros(timeline.num_ranks), np.zeros((timeline.num_ranks, len(BUBBLE_KINDS))))
    begin_s, end_s = float(timeline.start_s.min()), float(timeline.end_s.max())
    cause, passes = _causes(timeline)
    known = np.flatnonzero(cause != _NOTHING)
    known = known[np.argsort(timeline.rank[known], kind="stable")]
    spans = _Spans(timeline.rank, timeline.start_s, timeline.end_s, cause, passes).at(known)
    seconds = np.zeros((timeline.num_ranks, len(BUBBLE_KINDS) + 1))
    num_blocks = max(min(len(known) // _BLOCK_SPANS, timeline.num_ranks), 1)
    stops = np.linspace(0, timeline.num_ranks, num_blocks + 1).astype(np.int64)
    at = np.searchsorted(spans.rank, stops)
    for place, (first, stop) in enumerate(pairwise(stops.tolist())):
        own = spans.at(slice(at[place], at[place + 1]))
        seconds[first:stop] = _seconds(own._replace(rank=own.rank - first), stop - first, begin_s, end_s)
    return Bubbles(end_s - begin_s, seconds[:, 0], seconds[:, 1:])


class _Spans(NamedTuple):
    """Those that tell a cause, rank by rank. is_pass: computes, and is no optimizer step."""

    rank: Int32Array
    start_s: Float64Array
    end_s: Float64Array
    cause: NDArray[np.int8]
    is_pass: BoolArray

    def at(self, place: IndexArray | slice) -> _Spans:
        columns = self.start_s[place], self.end_s[place], self.cause[place], self.is_pass[place]
        return _Spans(self.rank[place], *columns)


def _seconds(spans: _Spans, num_ranks: int, begin_s: float, end_s: float) -> Float64Array:
    """[num_ranks, 1 + len(BUBBLE_KINDS)], busy and by cause, from begin_s to end_s."""
    passes = spans.is_pass
    rank, start_s, stop_s, doing = _segments(spans, num_ranks, begin_s, end_s)
    first_s, last_s = np.full(num_ranks, end_s), np.full(num_ranks, begin_s)
    of_rank = np.flatnonzero(np.diff(spans.rank[passes], prepend=-1))
    if len(of_rank):
        with_passes = spans.rank[passes][of_rank]
        first_s[with_passes] = np.minimum.reduceat(spans.start_s[passes], of_rank)
        last_s[with_passes] = np.maximum.reduceat(spans.end_s[passes], of_rank)
    then = np.full(len(doing), _NOTHING, dtype=np.int8)
    then[:-1] = np.where(rank[1:] == rank[:-1], doing[1:], then[1:])
    waits = doing == _NOTHING
    why = np.full(len(doing), _OTHER, dtype=np.int8)
    why[start_s >= last_s[rank]] = _COOLDOWN
    why[stop_s <= first_s[rank]] = _WARMUP
    why[(then >= _EXCHANGE) & (then <= _NORM)] = _STRAGGLER
    doing = np.where(waits, why, doing)
    num_kinds = len(BUBBLE_KINDS) + 1
    cell = rank * num_kinds + doing - _BUSY
    seconds: Float64Array = np.bincount(cell, stop_s - start_s, num_ranks * num_kinds).astype(np.float64)
    return seconds.reshape(num_ranks, num_kinds)


def _causes(timeline: Timeline) -> tuple[NDArray[np.int8], BoolArray]:
    """What each span counts as, and which are passes."""
    stream, kind = Labels.of(timeline.stream), Labels.of(timeline.kind)
    cause = np.array([[_cause(one, other) for other in kind.names] for one in stream.names], dtype=np.int8)
    step = np.array([name == Kind.STEP for name in kind.names])
    found = cause[stream.number, kind.number]
    return found, (found == _BUSY) & ~step[kind.number]


def _cause(stream: str, kind: str) -> int:
    if stream == "tensor":
        return _TP
    if stream == COMPUTE_STREAM and kind not in _COMMUNICATION:
        return _BUSY
    return next((cause for of, cause in _CAUSES.items() if of == kind), _NOTHING)


def _segments(
    spans: _Spans, num_ranks: int, begin_s: float, end_s: float
) -> tuple[Int32Array, Float64Array, Float64Array, NDArray[np.int8]]:
    """rank, start, end and what it does, of pieces of time in which no span of the rank starts or ends, in order."""
    every = np.arange(num_ranks, dtype=np.int32)
    rank = np.concatenate([spans.rank, spans.rank, every, every])
    at_s = np.concatenate([spans.start_s, spans.end_s, np.full(num_ranks, begin_s), np.full(num_ranks, end_s)])
    change = np.repeat(np.array([1, -1, 0], dtype=np.int8), [len(spans.rank), len(spans.rank), 2 * num_ranks])
    of = np.concatenate([spans.cause, spans.cause, np.full(2 * num_ranks, _NOTHING, dtype=np.int8)])
    # As lexsort orders them, and faster: runs are in order of time already, and numpy sorts short integers by radix.
    order = np.argsort(at_s, kind="stable")
    short = rank.astype(np.uint16) if num_ranks <= 1 << 16 else rank
    order = order[np.argsort(short[order], kind="stable")]
    rank, at_s, change, of = rank[order], at_s[order], change[order], of[order]
    doing = np.full(len(order), _NOTHING, dtype=np.int8)
    for one in reversed(_BY_PRIORITY):
        doing[np.cumsum(np.where(of == one, change, 0), dtype=np.int32) > 0] = one
    pieces = np.flatnonzero((rank[1:] == rank[:-1]) & (at_s[1:] > at_s[:-1]))
    return rank[pieces], at_s[pieces], at_s[pieces + 1], doing[pieces]
