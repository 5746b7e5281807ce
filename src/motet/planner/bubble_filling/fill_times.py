"""What a step takes when each encoder pipeline encodes given microbatches: the timing that `fill_search.py` asks for.

Seconds count from the start of the backbone's step. The backbone's passes stay where they are; encoders may start
earlier, by the *lead*. Optimus (Algorithm 2) moves the forward passes of the critical pipeline one at a time from
before the backbone into bubbles. Where these moves end is computed at once, for one pipeline:

1. Forward passes are placed as late as can be, the last microbatch first: each ends when the backbone takes its output
   in (F_i, section 4.3). In *mirrored* time, which is negated, this is placement as early as can be.
2. The least lead is what of them is left before the backbone starts.
3. From that lead on, forward passes run as early as bubbles allow, and then backward passes: each after the backbone's
   gradient is there (B_i).

As printed, Algorithm 2 checks dependencies on the schedule before a move; here they hold for what is placed. Several
encoders are placed as if their slices were of one (section 4.4). A frozen encoder has no backward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.planner.bubble_filling.backbone_bubbles import BackbonePipeline, BubbleRoom
from motet.planner.bubble_filling.encoder_passes import Encoders, Passes
from motet.schedule.program import Kind

try:
    _native: ModuleType | None = import_module("motet.planner.bubble_filling._pass_ends")
except ModuleNotFoundError:  # Any other ImportError is a broken core, and must not be hidden.
    _native = None

Pipelines = tuple[tuple[int, ...], ...]
"""Per encoder pipeline, the microbatches that it encodes, ascending."""
Ends = tuple[float, ...]
"""Per rank of an encoder pipeline, when its last pass ends."""


class EncoderPass(NamedTuple):
    """The passes of all encoders for one microbatch on one rank: their slices lie between begin_s and end_s."""

    rank: int
    pp_rank: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineTimes:
    """One encoder pipeline in a step. lead_s: how long before the backbone it starts. end_s: per pp rank, when its
    last pass ends."""

    lead_s: float
    end_s: tuple[float, ...]


@dataclass(frozen=True)
class FilledStep:
    """A step whose encoder pipelines encode these microbatches.

    outside_s: estimate of the seconds of encoders, summed over ranks, that no bubble hides; it breaks ties.
    """

    pipelines: Pipelines
    times: tuple[PipelineTimes, ...]
    step_s: float
    outside_s: float

    @property
    def key(self) -> tuple[float, float]:
        """The better of two steps has the smaller key."""
        return self.step_s, self.outside_s


@dataclass(frozen=True, eq=False)
class Direction:
    """How microbatches pass through encoder pipelines: forward, backward, or forward in mirrored time.

    ranks:    per pipeline, (pp rank, rank of the backbone's pipeline) in the order in which a microbatch visits them.
    passes:   per pp rank. bubbles: per rank of the backbone's pipeline.
    ready_s:  per microbatch, when its first pass may begin.
    """

    ranks: tuple[tuple[tuple[int, int], ...], ...]
    passes: Passes
    bubbles: Sequence[BubbleRoom]
    ready_s: Sequence[float]
    send_s: float

    def place(self, pipeline: int, begin_s: float, free_s: Mapping[int, float]) -> list[EncoderPass]:
        """The passes of one microbatch that is ready at begin_s, each as early as can be.

        free_s: per rank, when its previous pass ends.
        """
        placed = []
        for pp_rank, rank in self.ranks[pipeline]:
            begin_s = max(begin_s, free_s[rank])
            end_s = self.bubbles[rank].end(begin_s, self.passes[pp_rank])
            placed.append(EncoderPass(rank, pp_rank, begin_s, end_s))
            begin_s = end_s + self.send_s
        return placed

    def advanced(self, pipeline: int, begin_s: float, free_s: Ends) -> Ends:
        """The ends of what `place` places, per rank in the order of `ranks`: the reference of the native core. Kept, as
        most are asked for again: a move leaves a pipeline's microbatches behind it, or before it, as they were.
        """
        key = pipeline, begin_s, free_s
        ends_s = self._known.get(key)
        if ends_s is None:
            placed = []
            for end, free in zip(self._ends[pipeline], free_s):
                end_s = end(begin_s if begin_s > free else free)
                placed.append(end_s)
                begin_s = end_s + self.send_s
            ends_s = self._known[key] = tuple(placed)
        return ends_s

    def through(self, pipeline: int, begins_s: Sequence[float], free_s: Ends) -> Ends:
        """`advanced` by microbatches that are ready at begins_s, one after the other: natively (csrc/bubbles/) where
        that is built.
        """
        if _native is not None:
            ends_s: Ends = self._natively[pipeline].through(begins_s, free_s)
            return ends_s
        for begin_s in begins_s:
            free_s = self.advanced(pipeline, begin_s, free_s)
        return free_s

    @cached_property
    def _natively(self) -> list[Any]:
        """Per pipeline, what of it the native core reads."""
        assert _native is not None
        ranks = [[self.bubbles[rank].tables(self.passes[pp_rank]) for pp_rank, rank in one] for one in self.ranks]
        return [_native.PassEnds(one, self.send_s) for one in ranks]

    @cached_property
    def _ends(self) -> list[list[Callable[[float], float]]]:
        """Per pipeline and rank, in the order of `ranks`: when its passes end that begin then."""
        return [[self.bubbles[rank].placed(self.passes[pp_rank]) for pp_rank, rank in one] for one in self.ranks]

    @cached_property
    def _known(self) -> dict[tuple[int, float, Ends], Ends]:
        """What `advanced` found."""
        return {}


class FillTimer:
    """Times a step for any assignment of microbatches to encoder pipelines.

    A pipeline is alone on its ranks, so its times depend on its microbatches only; they are computed once.
    fine: whether all bubbles are filled, or those before a rank's first pass and after its last alone (coarse).
    num_passes: how many passes were placed so far.
    """

    def __init__(self, backbone: BackbonePipeline, encoders: Encoders, *, fine: bool) -> None:
        self.backbone, self.encoders = backbone, encoders
        self.num_pipelines = backbone.num_ranks // encoders.pp
        self.max_microbatches = encoders.max_microbatches or backbone.num_microbatches
        self.num_passes = 0
        idle = [self._idle(row.busy_s, fine) for row in backbone.rows]
        bubbles = [BubbleRoom(start_s, stop_s) for start_s, stop_s in idle]
        # Forward passes are never as late as the bubble after the backbone's last pass, so that one is left out.
        mirrored = [BubbleRoom(-stop_s[-2::-1], -start_s[-2::-1]) for start_s, stop_s in idle]
        mirrored_passes = tuple(on_rank[::-1] for on_rank in encoders.forward)
        start_s = [-np.inf] * backbone.num_microbatches
        needed_s = (encoders.send_s - backbone.needed_s).tolist()
        gradient_s = (backbone.ready_s + encoders.send_s).tolist()
        self._forward = self._direction(encoders.forward, bubbles, start_s, step=1)
        self.mirrored = self._direction(mirrored_passes, mirrored, needed_s, step=-1)
        self.backward = self._direction(encoders.backward, bubbles, gradient_s, step=-1)
        by_pp_rank = np.array(backbone.done_s).reshape(encoders.pp, -1)
        self._done_s = by_pp_rank.max(axis=1).tolist()
        self._finish_s = encoders.finish_s or (0.0,) * encoders.pp
        self._times: dict[tuple[int, tuple[int, ...]], PipelineTimes] = {}

    @property
    def bubbles(self) -> Sequence[BubbleRoom]:
        """The bubbles that are filled, per rank of the backbone's pipeline."""
        return self._forward.bubbles

    def step(self, pipelines: Pipelines) -> FilledStep:
        """The step with these microbatches in each encoder pipeline.

        O(microbatches * ranks * log bubbles) at most, and less where pipelines were timed before.
        """
        encoders, backbone_s = self.encoders, self.backbone.end_s
        times = tuple(self._pipeline_times(number, microbatches) for number, microbatches in enumerate(pipelines))
        lead_s = max(one.lead_s for one in times)
        end_s = map(max, zip(*(one.end_s for one in times)))
        finished_s = max(map(sum, zip(map(max, end_s, self._done_s), self._finish_s)))
        before_s = encoders.pp * sum(one.lead_s for one in times)
        after_s = sum(max(0.0, end_s - backbone_s) for one in times for end_s in one.end_s)
        return FilledStep(pipelines, times, encoders.gather_s + lead_s + finished_s, before_s + after_s)

    def passes(
        self, pipeline: int, microbatches: tuple[int, ...], lead_s: float
    ) -> Iterator[tuple[EncoderPass, Kind, int]]:
        """(pass, F or B, microbatch): all passes of a pipeline as early as can be, from the lead on."""
        free_s = {rank: -lead_s for _, rank in self._forward.ranks[pipeline]}
        for microbatch in microbatches:
            for placed in self._forward.place(pipeline, -lead_s, free_s):
                free_s[placed.rank] = placed.end_s
                yield placed, Kind.F, microbatch
        for microbatch in microbatches if self.encoders.has_backward else ():
            for placed in self.backward.place(pipeline, self.backward.ready_s[microbatch], free_s):
                free_s[placed.rank] = placed.end_s
                yield placed, Kind.B, microbatch

    def _idle(self, busy_s: Float64Array, fine: bool) -> tuple[Float64Array, Float64Array]:
        """Starts and ends of the times in which a rank's compute stream is idle; the first and the last of them are
        long enough for all that encoders do."""
        sends_s = self.encoders.pp * self.encoders.send_s
        far_s = 2 * (self.backbone.end_s + self.backbone.num_microbatches * (self.encoders.microbatch_s + sends_s)) + 1
        start_s, stop_s = np.append(-far_s, busy_s[1]), np.append(busy_s[0], far_s)
        return (start_s, stop_s) if fine else (start_s[[0, -1]], stop_s[[0, -1]])

    def _direction(
        self, passes: Passes, bubbles: Sequence[BubbleRoom], ready_s: Sequence[float], *, step: int
    ) -> Direction:
        """step: 1 from the first pp rank to the last, -1 from the last to the first. Ranks without passes are left
        out."""
        num_ranks = self.backbone.num_ranks
        ranks = tuple(
            tuple(
                (pp_rank, rank)
                for pp_rank, rank in list(enumerate(range(pipeline, num_ranks, self.num_pipelines)))[::step]
                if any(slices.num for slices in passes[pp_rank])
            )
            for pipeline in range(self.num_pipelines)
        )
        return Direction(ranks, passes, bubbles, ready_s, self.encoders.send_s)

    def _pipeline_times(self, pipeline: int, microbatches: tuple[int, ...]) -> PipelineTimes:
        key = pipeline, microbatches
        if key not in self._times:
            self.num_passes += len(microbatches) * self.encoders.pp
            lead_s = self._least_lead_s(pipeline, microbatches)
            # As in `passes`, of which the ends are enough: a rank's last pass comes last.
            forward, backward = self._forward, self.backward
            begins_s = (-lead_s,) * len(microbatches)
            ends_s = forward.through(pipeline, begins_s, (-lead_s,) * len(forward.ranks[pipeline]))
            free_s = {rank: end_s for (_, rank), end_s in zip(forward.ranks[pipeline], ends_s)}
            if self.encoders.has_backward:
                ends_s = tuple(free_s[rank] for _, rank in backward.ranks[pipeline])
                begins_s = tuple(backward.ready_s[microbatch] for microbatch in microbatches)
                ends_s = backward.through(pipeline, begins_s, ends_s)
                free_s.update((rank, end_s) for (_, rank), end_s in zip(backward.ranks[pipeline], ends_s))
            ranks = range(pipeline, self.backbone.num_ranks, self.num_pipelines)
            self._times[key] = PipelineTimes(lead_s, tuple(free_s[rank] for rank in ranks))
        return self._times[key]

    def _least_lead_s(self, pipeline: int, microbatches: tuple[int, ...]) -> float:
        """The lead that remains if forward passes are as late as can be: in mirrored time, as early as can be."""
        mirrored = self.mirrored
        begins_s = tuple(mirrored.ready_s[microbatch] for microbatch in reversed(microbatches))
        return max([0.0, *mirrored.through(pipeline, begins_s, (-math.inf,) * len(mirrored.ranks[pipeline]))])
