"""The bubbles of a Timeline by cause (Optimus section 2.2, Table 1): time in which a rank computes nothing.

A rank is busy while its compute stream runs a span that is no communication. Every other moment, until the last span of
any rank ends, is a bubble. Its cause is the first of these that applies:

- tp: the rank runs tensor-parallel communication of a pass;
- exchange: it runs an all-to-all of encoder outputs or of their gradients;
- dp_gather, dp_reduce: it runs a collective of parameters, or of gradients;
- norm: it runs NORM;
- straggler: it does nothing until one of these collectives starts, which waits for other ranks. In a measured Timeline
  this wait is part of the collective's span;
- pp_warmup, pp_cooldown: it has not begun its first pass, or has ended its last one;
- pp_other: it waits between two passes, for its neighbours or for a transfer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
from motet.simulate.engine.alike import AlikeTimeline
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
"""Spans that are counted at a time. Columns of millions of spans would not fit the caches."""
_PART_SPANS = 1 << 20
"""Spans that are expanded at a time, of ranks that are alike. Columns of all of them take gigabytes."""
_BY_PRIORITY = (_BUSY, _TP, _EXCHANGE, _GATHER, _REDUCE, _NORM)


@dataclass(frozen=True, eq=False)
class Bubbles:
    """Busy and idle seconds of every rank: busy_s + sum of idle_s over causes = step_s.

    step_s: seconds of the step.
    busy_s: [num_ranks].
    idle_s: [num_ranks, len(BUBBLE_KINDS)], by cause.
    rank_counts: per rank, how many of a cluster it stands for, which means count; by default one.

    Example:
        >>> from motet.schedule import one_f_one_b
        >>> from motet.simulate import bubbles, simulate, stage_times
        >>> found = bubbles(simulate(one_f_one_b(2, num_microbatches=3), stage_times([1.0, 1.0], [2.0, 2.0])))
        >>> found.step_s, {kind: seconds for kind, seconds in found.mean_s.items() if seconds}
        (12.0, {'pp_warmup': 0.5, 'pp_cooldown': 1.0, 'pp_other': 1.5})
    """

    step_s: float
    busy_s: Float64Array
    idle_s: Float64Array
    rank_counts: Sequence[int] = ()

    @property
    def mean_s(self) -> dict[str, float]:
        """Seconds of each kind of bubble, mean over the ranks of the cluster."""
        counts = np.array(self.rank_counts or [1] * len(self.idle_s), dtype=np.float64)
        return dict(zip(BUBBLE_KINDS, (counts @ self.idle_s / max(counts.sum(), 1)).tolist()))

    @property
    def share(self) -> dict[str, float]:
        """Share of the step of each kind of bubble, mean over ranks."""
        return {kind: seconds / self.step_s if self.step_s else 0.0 for kind, seconds in self.mean_s.items()}

    @property
    def total_share(self) -> float:
        """The share of the step in which nothing computes, mean over ranks."""
        return sum(self.share.values())


def bubbles(timeline: Timeline) -> Bubbles:
    """The bubbles of a Timeline of one step, simulated or measured. O(spans log spans) for the first call of each."""
    if (counted := _cache.get(timeline)) is None:
        counted = _cache[timeline] = _counted(timeline)
    return counted


def bubble_shares(timeline: Timeline) -> Float64Array:
    """The share of the step in which each rank computes nothing, [num_ranks]. O(actions) for ranks that are alike."""
    if isinstance(timeline, AlikeTimeline):
        return 1 - timeline.busy_s / (timeline.makespan_s or 1.0)
    found = bubbles(timeline)
    shares: Float64Array = found.idle_s.sum(axis=1) / (found.step_s or 1.0)
    return shares


_cache: WeakKeyDictionary[Timeline, Bubbles] = WeakKeyDictionary()
"""Results of `bubbles`: the tables and pictures of a Timeline all need them."""


def _counted(timeline: Timeline) -> Bubbles:
    if not len(timeline):
        return Bubbles(0.0, np.zeros(timeline.num_ranks), np.zeros((timeline.num_ranks, len(BUBBLE_KINDS))))
    if isinstance(timeline, AlikeTimeline):
        num_parts = max(min(len(timeline) // _PART_SPANS, timeline.num_ranks), 1)
        parts = map(timeline.some, np.array_split(np.arange(timeline.num_ranks), num_parts))
        begin_s, end_s = 0.0, timeline.makespan_s  # Nothing precedes the first action of a rank.
        seconds = np.concatenate([_by_rank(part, begin_s, end_s) for part in parts])
    else:
        begin_s, end_s = float(timeline.start_s.min()), float(timeline.end_s.max())
        seconds = _by_rank(timeline, begin_s, end_s)
    return Bubbles(end_s - begin_s, seconds[:, 0], seconds[:, 1:], timeline.rank_counts)


def _by_rank(timeline: Timeline, begin_s: float, end_s: float) -> Float64Array:
    """`_seconds` of all spans of a Timeline, [num_ranks, 1 + len(BUBBLE_KINDS)]."""
    cause, passes = _causes(timeline)
    known = np.flatnonzero(cause != _NOTHING)
    known = known[np.argsort(timeline.rank[known], kind="stable")]
    spans = _Spans(timeline.rank, timeline.start_s, timeline.end_s, cause, passes).at(known)
    seconds = np.zeros((timeline.num_ranks, len(BUBBLE_KINDS) + 1))
    num_blocks = max(min(len(known) // _BLOCK_SPANS, timeline.num_ranks), 1)
    stops = np.linspace(0, timeline.num_ranks, num_blocks + 1).astype(np.int64)
    bounds = np.searchsorted(spans.rank, stops)
    for index, (first, stop) in enumerate(pairwise(stops.tolist())):
        block = spans.at(slice(bounds[index], bounds[index + 1]))
        seconds[first:stop] = _seconds(block._replace(rank=block.rank - first), stop - first, begin_s, end_s)
    return seconds


class _Spans(NamedTuple):
    """Spans that are busy or the cause of a bubble, rank by rank. is_pass: it computes and is no optimizer step."""

    rank: Int32Array
    start_s: Float64Array
    end_s: Float64Array
    cause: NDArray[np.int8]
    is_pass: BoolArray

    def at(self, rows: IndexArray | slice) -> _Spans:
        columns = self.start_s[rows], self.end_s[rows], self.cause[rows], self.is_pass[rows]
        return _Spans(self.rank[rows], *columns)


def _seconds(spans: _Spans, num_ranks: int, begin_s: float, end_s: float) -> Float64Array:
    """[num_ranks, 1 + len(BUBBLE_KINDS)]: busy seconds, then idle seconds by cause, from begin_s to end_s."""
    # 1. Pieces of time in which a rank does one thing, and the times of its first and last pass.
    rank, start_s, stop_s, cause = _segments(spans, num_ranks, begin_s, end_s)
    first_s, last_s = np.full(num_ranks, end_s), np.full(num_ranks, begin_s)
    passes = spans.is_pass
    rank_starts = np.flatnonzero(np.diff(spans.rank[passes], prepend=-1))
    if len(rank_starts):
        with_passes = spans.rank[passes][rank_starts]
        first_s[with_passes] = np.minimum.reduceat(spans.start_s[passes], rank_starts)
        last_s[with_passes] = np.maximum.reduceat(spans.end_s[passes], rank_starts)
    # 2. The cause of a piece in which the rank does nothing, by what it does next and by its passes.
    following = np.full(len(cause), _NOTHING, dtype=np.int8)
    following[:-1] = np.where(rank[1:] == rank[:-1], cause[1:], following[1:])
    wait_cause = np.full(len(cause), _OTHER, dtype=np.int8)
    wait_cause[start_s >= last_s[rank]] = _COOLDOWN
    wait_cause[stop_s <= first_s[rank]] = _WARMUP
    wait_cause[(following >= _EXCHANGE) & (following <= _NORM)] = _STRAGGLER
    cause = np.where(cause == _NOTHING, wait_cause, cause)
    # 3. The sum over pieces.
    num_kinds = len(BUBBLE_KINDS) + 1
    cell = rank * num_kinds + cause - _BUSY
    seconds: Float64Array = np.bincount(cell, stop_s - start_s, num_ranks * num_kinds).astype(np.float64)
    return seconds.reshape(num_ranks, num_kinds)


def _causes(timeline: Timeline) -> tuple[NDArray[np.int8], BoolArray]:
    """(cause, is_pass) of each span."""
    stream, kind = Labels.of(timeline.stream), Labels.of(timeline.kind)
    table = np.array([[_cause(one, other) for other in kind.names] for one in stream.names], dtype=np.int8)
    is_step = np.array([name == Kind.STEP for name in kind.names])
    cause = table[stream.number, kind.number]
    return cause, (cause == _BUSY) & ~is_step[kind.number]


def share_between_passes(timeline: Timeline, inside: Collection[str], around: Collection[str]) -> float:
    """The share of what some modules compute that lies between the first and the last pass of others on the same rank.

    inside, around: names of modules. A span of a stage with several modules is of the first that is named. 1 if the
    modules compute nothing.

    Example: an encoder's pass before the backbone's first, and one between two of them.
        >>> from motet.core.timeline import Span
        >>> kinds = [("image", 0.0, 1.0), ("backbone", 1.0, 2.0), ("image", 2.0, 5.0), ("backbone", 5.0, 6.0)]
        >>> spans = [Span(0, "F", 0, 0, start_s, end_s, "F", name) for name, start_s, end_s in kinds]
        >>> share_between_passes(Timeline.of(spans), ["image"], ["backbone"])
        0.75
    """
    module = Labels.of(timeline.module)
    first_named = [next((one for one in name.split("+") if one in (*inside, *around)), "") for name in module.names]
    is_pass = _causes(timeline)[1]
    is_inside, is_around = (
        is_pass & np.array([one in names for one in first_named], dtype=bool)[module.number]
        for names in (inside, around)
    )
    first_s, last_s = np.full(timeline.num_ranks, np.inf), np.full(timeline.num_ranks, -np.inf)
    np.minimum.at(first_s, timeline.rank[is_around], timeline.start_s[is_around])
    np.maximum.at(last_s, timeline.rank[is_around], timeline.end_s[is_around])
    took_s = np.where(is_inside, timeline.end_s - timeline.start_s, 0.0)
    between = is_inside & (timeline.start_s >= first_s[timeline.rank]) & (timeline.end_s <= last_s[timeline.rank])
    return float(took_s[between].sum() / total_s) if (total_s := took_s.sum()) else 1.0


def _cause(stream: str, kind: str) -> int:
    if stream == "tensor":
        return _TP
    if stream == COMPUTE_STREAM and kind not in _COMMUNICATION:
        return _BUSY
    return next((cause for known, cause in _CAUSES.items() if known == kind), _NOTHING)


def _segments(
    spans: _Spans, num_ranks: int, begin_s: float, end_s: float
) -> tuple[Int32Array, Float64Array, Float64Array, NDArray[np.int8]]:
    """(rank, start, end, cause) of pieces of time in which no span of the rank starts or ends, in order.

    cause: the first in _BY_PRIORITY of the spans that run, or _NOTHING.
    """
    # 1. Events: each span starts and ends, and each rank has the bounds of the step.
    all_ranks = np.arange(num_ranks, dtype=np.int32)
    rank = np.concatenate([spans.rank, spans.rank, all_ranks, all_ranks])
    at_s = np.concatenate([spans.start_s, spans.end_s, np.full(num_ranks, begin_s), np.full(num_ranks, end_s)])
    change = np.repeat(np.array([1, -1, 0], dtype=np.int8), [len(spans.rank), len(spans.rank), 2 * num_ranks])
    event_cause = np.concatenate([spans.cause, spans.cause, np.full(2 * num_ranks, _NOTHING, dtype=np.int8)])
    # 2. By rank, then time: as lexsort, but faster, because numpy sorts short integers by radix.
    order = np.argsort(at_s, kind="stable")
    short = rank.astype(np.uint16) if num_ranks <= 1 << 16 else rank
    order = order[np.argsort(short[order], kind="stable")]
    rank, at_s, change, event_cause = rank[order], at_s[order], change[order], event_cause[order]
    # 3. After each event, the number of running spans of each cause.
    cause = np.full(len(order), _NOTHING, dtype=np.int8)
    for one in reversed(_BY_PRIORITY):
        cause[np.cumsum(np.where(event_cause == one, change, 0), dtype=np.int32) > 0] = one
    pieces = np.flatnonzero((rank[1:] == rank[:-1]) & (at_s[1:] > at_s[:-1]))
    return rank[pieces], at_s[pieces], at_s[pieces + 1], cause[pieces]
