"""The bubbles of a backbone's pipeline, read off its Timeline without encoders: the room in which these are placed.

Per rank there is one large bubble before its passes, one after, and many small ones between (Optimus section 4.2,
Figure 8).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, overload

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, IndexArray
from motet.core.errors import ArgumentError
from motet.core.timeline import COMPUTE_STREAM, Timeline
from motet.schedule.program import Kind
from motet.simulate.engine.spans import Labels

_ROUNDING = 1e-9
"""A slice may be longer than a bubble by this share of the slice."""


class Slices(NamedTuple):
    """num slices of a pass, one after the other, of slice_s seconds each."""

    slice_s: float
    num: int


@dataclass(frozen=True)
class RankPasses:
    """Passes of one rank, or parts of passes, in order of time.

    names, starts_s: of all of them. busy_s: [2, num], starts and ends of those that hold the compute stream; the others
    are tensor-parallel communication.
    """

    names: Sequence[str]
    starts_s: tuple[float, ...]
    busy_s: Float64Array

    @property
    def computing_s(self) -> float:
        """Seconds in which the compute stream is held."""
        return float((self.busy_s[1] - self.busy_s[0]).sum())


@dataclass(frozen=True, eq=False)
class BackbonePipeline:
    """One pipeline of the backbone without encoders. Seconds count from the start of its step.

    rows:     per rank, its passes.
    needed_s: per microbatch, when the encoders' output is needed, as the first stage starts: F_i of section 4.3.
    ready_s:  per microbatch, when the gradient for the encoders is ready, as the first stage's backward pass ends: B_i;
              inf where there is no backward pass.
    done_s:   per rank, when its passes are over and its gradients are reduced.
    """

    rows: tuple[RankPasses, ...]
    needed_s: Float64Array
    ready_s: Float64Array
    done_s: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline: PP."""
        return len(self.rows)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return len(self.needed_s)

    @property
    def end_s(self) -> float:
        """The end of the step without the optimizer."""
        return max(self.done_s)


def backbone_of(
    timeline: Timeline, num_microbatches: int, *, sink: int = 0, is_parted: bool = True
) -> BackbonePipeline:
    """The pipeline in a Timeline without encoders. sink: the stage that encoders feed. O(spans log spans).

    is_parted: whether tensor-parallel communication is in parts of its own; in whole passes it holds compute.
    Raises ArgumentError unless that stage has a forward pass of every microbatch.
    """
    is_pass = _among(timeline.kind, [Kind.F, Kind.B, Kind.I, Kind.W, Kind.R])
    is_held = _among(timeline.stream, [COMPUTE_STREAM]) if is_parted else is_pass
    # 1. When the sink starts and ends each microbatch.
    of_sink = is_pass & _of_stage(timeline, sink)
    forward = of_sink & _among(timeline.kind, [Kind.F])
    backward = of_sink & ~forward
    needed_s, ready_s = np.full(num_microbatches, np.inf), np.full(num_microbatches, -np.inf)
    np.minimum.at(needed_s, timeline.microbatch[forward], timeline.start_s[forward])
    np.maximum.at(ready_s, timeline.microbatch[backward], timeline.end_s[backward])
    if not np.isfinite(needed_s).all():
        raise ArgumentError(f"stage {sink} has no forward pass of microbatch {int(np.argmax(needed_s))}.")
    ready_s = np.where(np.isneginf(ready_s), np.inf, ready_s)
    # 2. The passes of each rank.
    rows, done_s, is_step = [], [], _among(timeline.kind, [Kind.STEP])
    for rank in range(timeline.num_ranks):
        on_rank = timeline.rank == rank
        passes = np.flatnonzero(on_rank & is_pass)
        passes = passes[np.lexsort((timeline.end_s[passes], timeline.start_s[passes]))]
        busy = passes[is_held[passes]]
        busy_s = np.stack([timeline.start_s[busy], timeline.end_s[busy]])
        rows.append(RankPasses(_Texts(timeline.action, passes), tuple(timeline.start_s[passes].tolist()), busy_s))
        done_s.append(float(timeline.end_s[on_rank & ~is_step].max(initial=0.0)))
    return BackbonePipeline(tuple(rows), needed_s, ready_s, tuple(done_s))


class _Texts(Sequence[str]):
    """Some of a Timeline's texts, which are made when they are read: few of 10^5 are."""

    def __init__(self, texts: Sequence[str], spans: IndexArray) -> None:
        self._texts, self._spans = texts, spans

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> _Texts: ...
    def __getitem__(self, index: int | slice) -> str | _Texts:
        if isinstance(index, slice):
            return _Texts(self._texts, self._spans[index])
        return self._texts[int(self._spans[index])]


def _among(texts: Sequence[str], chosen: Sequence[str]) -> BoolArray:
    """Whether each text is one of those that are chosen."""
    labels = Labels.of(texts)
    is_chosen: BoolArray = np.array([name in chosen for name in labels.names], dtype=np.bool_)[labels.number]
    return is_chosen


def _of_stage(timeline: Timeline, stage: int) -> BoolArray:
    """Whether a span is an F, B or I of a stage. Only the texts of the stage's rank are read."""
    prefixes = (f"{stage}F", f"{stage}B", f"{stage}I")
    is_own: BoolArray = np.zeros(len(timeline), dtype=np.bool_)
    first = next((span for span, action in enumerate(timeline.action) if action.startswith(prefixes)), None)
    if first is not None:
        on_rank = np.flatnonzero(timeline.rank == timeline.rank[first])
        is_own[on_rank] = [timeline.action[span].startswith(prefixes) for span in on_rank.tolist()]
    return is_own


class BubbleRoom:
    """The bubbles of a rank, in order of time, or of mirrored time. The last one must hold all that is asked for.

    Example:
        >>> room = BubbleRoom(np.array([0.0, 5.0]), np.array([3.0, 99.0]))
        >>> room.end(0.0, [Slices(slice_s=2.0, num=1)])
        2.0
        >>> room.end(0.0, [Slices(slice_s=2.0, num=2)])  # the second slice does not fit into the first bubble
        7.0
    """

    def __init__(self, start_s: Float64Array, stop_s: Float64Array) -> None:
        self._start_s, self._stop_s = start_s, stop_s
        self._tables: dict[float, tuple[list[float], list[float], list[int]]] = {}
        self._ends: dict[tuple[float, int], Callable[[float], float]] = {}

    def end(self, begin_s: float, slices: Sequence[Slices]) -> float:
        """When slices end that run in order from begin_s on, each as soon as a bubble has room for all of it.

        O(len(slices) * log bubbles).
        """
        return self.placed(slices)(begin_s)

    def placed(self, slices: Sequence[Slices]) -> Callable[[float], float]:
        """`end` of these slices, as a function of begin_s: for whoever asks it thousands of times."""
        ends = [self._placed(slice_s, num) for slice_s, num in slices if num and slice_s]
        if len(ends) == 1:
            return ends[0]

        def end(begin_s: float) -> float:
            for one in ends:
                begin_s = one(begin_s)
            return begin_s

        return end

    def tables(self, slices: Sequence[Slices]) -> list[tuple[list[float], list[float], list[int], float, int]]:
        """What `placed` reads, for each of the slices: starts and ends of the bubbles that hold one, how many the first
        0, 1, ... of them hold, and (slice_s, num) itself."""
        return [
            (*(self._tables.get(slice_s) or self._table(slice_s)), slice_s, num)
            for slice_s, num in slices
            if num and slice_s
        ]

    def _placed(self, slice_s: float, num: int) -> Callable[[float], float]:
        if (slice_s, num) not in self._ends:
            self._ends[slice_s, num] = self._end_of(slice_s, num)
        return self._ends[slice_s, num]

    def _end_of(self, slice_s: float, num: int) -> Callable[[float], float]:
        starts, stops, capacity = self._tables.get(slice_s) or self._table(slice_s)

        def end(begin_s: float) -> float:
            # 1. What is left of the bubble in which begin_s lies.
            left, bubble = num, bisect_right(starts, begin_s) - 1
            if bubble >= 0:
                num_fitting = int((stops[bubble] - begin_s) / slice_s + _ROUNDING)
                if num_fitting >= left:
                    return begin_s + left * slice_s
                if num_fitting > 0:
                    left -= num_fitting
            # 2. The bubble after it that holds the last slice.
            num_before = capacity[bubble + 1] + left
            bubble = bisect_left(capacity, num_before) - 1
            return starts[bubble] + (num_before - capacity[bubble]) * slice_s

        return end

    def _table(self, slice_s: float) -> tuple[list[float], list[float], list[int]]:
        """The bubbles that hold a slice: their starts, their ends, and how many slices the first 0, 1, ... hold."""
        num_fitting = ((self._stop_s - self._start_s) / slice_s + _ROUNDING).astype(np.int64)
        kept = num_fitting > 0
        capacity = [0, *accumulate(num_fitting[kept].tolist())]
        table = self._tables[slice_s] = self._start_s[kept].tolist(), self._stop_s[kept].tolist(), capacity
        return table
