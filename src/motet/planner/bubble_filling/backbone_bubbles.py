"""The bubbles that a backbone's pipeline leaves, read off its simulated or measured Timeline: what encoders can be
placed in (Optimus section 4.2, Figure 8: one large before, one after, many small ones between).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.errors import ArgumentError
from motet.core.timeline import COMPUTE_STREAM, Timeline
from motet.schedule.program import Kind

_ROUNDING = 1e-9
"""Of a slice, by which it may be longer than a bubble."""


class Slices(NamedTuple):
    """num slices of a pass, one after the other, of slice_s seconds each."""

    slice_s: float
    num: int


@dataclass(frozen=True)
class RankPasses:
    """Passes of one rank, or parts of passes, in order. names, starts_s: of all of them. busy_s: [2, num], starts and
    ends of those that hold the compute stream; the others are tensor-parallel communication.
    """

    names: tuple[str, ...]
    starts_s: tuple[float, ...]
    busy_s: Float64Array

    @property
    def computing_s(self) -> float:
        return float((self.busy_s[1] - self.busy_s[0]).sum())


@dataclass(frozen=True, eq=False)
class BackbonePipeline:
    """One pipeline of the backbone alone. Seconds from the start of its step.

    needed_s: per microbatch, when its first pass starts: F_i of section 4.3.
    ready_s:  per microbatch, when its last pass ends: B_i; inf where it has no backward pass.
    done_s:   per rank, when its passes are over, and its gradients reduced.
    """

    rows: tuple[RankPasses, ...]
    needed_s: Float64Array
    ready_s: Float64Array
    done_s: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_microbatches(self) -> int:
        return len(self.needed_s)

    @property
    def end_s(self) -> float:
        """Of the step, but for the optimizer."""
        return max(self.done_s)


def backbone_of(timeline: Timeline, num_microbatches: int, *, sink: int = 0) -> BackbonePipeline:
    """Of a Timeline without encoders. sink: the stage that takes in what they give. O(spans log spans).

    Raises ArgumentError for a Timeline in which that stage has not a forward pass of every microbatch.
    """
    kind = np.array(timeline.kind, dtype=object)
    is_pass = np.isin(kind, [Kind.F, Kind.B, Kind.I, Kind.W, Kind.R])
    on_compute = np.array([stream == COMPUTE_STREAM for stream in timeline.stream], dtype=np.bool_)
    needed_s, ready_s = np.full(num_microbatches, np.inf), np.full(num_microbatches, -np.inf)
    names = (f"{sink}F", f"{sink}B", f"{sink}I")
    of_sink = np.array([action.startswith(names) for action in timeline.action], dtype=np.bool_)
    forward = is_pass & of_sink & (kind == Kind.F)
    backward = is_pass & of_sink & ~forward
    np.minimum.at(needed_s, timeline.microbatch[forward], timeline.start_s[forward])
    np.maximum.at(ready_s, timeline.microbatch[backward], timeline.end_s[backward])
    if not np.isfinite(needed_s).all():
        raise ArgumentError(f"stage {sink} has no forward pass of microbatch {int(np.argmax(needed_s))}.")
    rows, done_s = [], []
    for rank in range(timeline.num_ranks):
        own = timeline.rank == rank
        passes = np.flatnonzero(own & is_pass)
        passes = passes[np.lexsort((timeline.end_s[passes], timeline.start_s[passes]))]
        held = passes[on_compute[passes]]
        actions = tuple(timeline.action[span] for span in passes.tolist())
        busy_s = np.stack([timeline.start_s[held], timeline.end_s[held]])
        rows.append(RankPasses(actions, tuple(timeline.start_s[passes].tolist()), busy_s))
        done_s.append(float(timeline.end_s[own & (kind != Kind.STEP)].max(initial=0.0)))
    return BackbonePipeline(tuple(rows), needed_s, np.where(np.isneginf(ready_s), np.inf, ready_s), tuple(done_s))


class BubbleRoom:
    """Bubbles of a rank, in order of time, or of time run backwards. The last one must hold all that is asked for."""

    def __init__(self, start_s: Float64Array, stop_s: Float64Array) -> None:
        self._start_s, self._stop_s = start_s, stop_s
        self._tables: dict[float, tuple[list[float], list[float], list[int]]] = {}

    def end(self, at_s: float, slices: Sequence[Slices]) -> float:
        """When slices end that run in order from at_s on, each as soon as a bubble has room for all of it.

        O(len(slices) * log bubbles).
        """
        for slice_s, num in slices:
            if num and slice_s:
                at_s = self._end(at_s, slice_s, num)
        return at_s

    def _end(self, at_s: float, slice_s: float, num: int) -> float:
        starts, stops, held = self._tables.get(slice_s) or self._table(slice_s)
        bubble = bisect_right(starts, at_s) - 1
        if bubble >= 0:
            fits = int((stops[bubble] - at_s) / slice_s + _ROUNDING)
            if fits >= num:
                return at_s + num * slice_s
            num -= max(fits, 0)
        reached = held[bubble + 1] + num
        bubble = bisect_left(held, reached) - 1
        return starts[bubble] + (reached - held[bubble]) * slice_s

    def _table(self, slice_s: float) -> tuple[list[float], list[float], list[int]]:
        """Of the bubbles that hold a slice: starts, ends, and how many slices the first 0, 1, ... of them hold."""
        fits = ((self._stop_s - self._start_s) / slice_s + _ROUNDING).astype(np.int64)
        kept = fits > 0
        held = [0, *accumulate(fits[kept].tolist())]
        table = self._tables[slice_s] = self._start_s[kept].tolist(), self._stop_s[kept].tolist(), held
        return table
