"""Passes of encoders placed in the bubbles of one step of a backbone, which stay where they are (Optimus section 4).

As in `planner/bubble_filling/fill_times.py`, but with the seconds that each microbatch of the step takes by itself, and
several encoders with pipelines of different lengths:

1. Forward passes are placed as late as can be, the last microbatch first: each ends when the backbone takes its output
   in. What of them is left before the backbone starts is the *lead*.
2. From that lead on, forward passes run as early as bubbles allow, in the order of microbatches. Each ends no later
   than in 1, as both keep one order on every rank. Then backward passes run, each after the backbone's gradient.

A part of a pass goes into a bubble that holds all of it. So the backbone is delayed by the lead alone, and every pass
has a time after all that it waits for: whatever is placed can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FAR = 1 << 60
"""Ticks that no step takes."""


class PassParts(NamedTuple):
    """The parts of the passes of an encoder's stage. num: of each pass; 0 is no pass. ticks: of one, per microbatch."""

    num: int
    ticks: list[int]


@dataclass(frozen=True)
class StepEncoder:
    """One encoder beside one pipeline of the backbone, in one step.

    ranks:             per pipeline, the rank of each of its stages.
    forward, backward: per pipeline, the passes of each of its stages.
    needed:            per microbatch, when the backbone takes its output in.
    ready:             per microbatch, when the backbone has its gradient.
    """

    ranks: tuple[tuple[int, ...], ...]
    forward: tuple[tuple[PassParts, ...], ...]
    backward: tuple[tuple[PassParts, ...], ...]
    needed: list[int]
    ready: list[int]


class RankBubbles(NamedTuple):
    """The bubbles of one rank, in order of time: the first has no start, the last no end.

    before: for each, the index in the backbone's row of the action that follows it.
    """

    starts: list[int]
    ends: list[int]
    before: list[int]


class PlacedRun(NamedTuple):
    """Neighbouring parts of a pass: num of them, from `part` on, of one encoder's stage in one pipeline."""

    start: int
    bubble: int
    encoder: int
    stage: int
    microbatch: int
    is_backward: bool
    part: int
    num: int


ChosenPipelines = Sequence[Sequence[int]]
"""For each encoder, the pipeline of each microbatch."""


class Placement:
    """Places the encoders of a step for any choice of pipelines. end: of the backbone's own passes.

    Example:
        The backbone of rank 0 computes from 4 to 6; the encoder has two parts of 3 and feeds it.
        >>> bubbles = [RankBubbles([-FAR, 6], [4, FAR], [0, 1])]
        >>> encoder = StepEncoder(((0,),), ((PassParts(2, [3]),),), ((PassParts(1, [5]),),), needed=[4], ready=[6])
        >>> Placement(bubbles, [encoder], end=6).taken([[0]])  # 2 before the backbone starts, 5 behind its end
        13
    """

    def __init__(self, bubbles: Sequence[RankBubbles], encoders: Sequence[StepEncoder], end: int) -> None:
        self.bubbles, self.encoders, self.end = bubbles, encoders, end
        self._order = [
            (microbatch, number) for microbatch in range(len(encoders[0].needed)) for number in range(len(encoders))
        ]
        ready = [
            (encoder.ready[m], m, number)
            for number, encoder in enumerate(encoders)
            for m, _ in enumerate(encoder.ready)
        ]
        self._backward_order = [(m, number) for _, m, number in sorted(ready)]

    def taken(self, pipelines: ChosenPipelines) -> int:
        """Ticks of the step. O(passes + bubbles)."""
        return self._placed(pipelines, None)

    def runs(self, pipelines: ChosenPipelines) -> list[list[PlacedRun]]:
        """Per rank, where parts run, in order of time."""
        runs: list[list[PlacedRun]] = [[] for _ in self.bubbles]
        self._placed(pipelines, runs)
        return [sorted(of_rank) for of_rank in runs]

    def lead(self, pipelines: ChosenPipelines) -> int:
        """Ticks by which encoders start before the backbone."""
        bubbles = self.bubbles
        at = [len(each.starts) - 1 for each in bubbles]
        free = [FAR] * len(bubbles)
        for microbatch, number in reversed(self._order):
            encoder = self.encoders[number]
            pipeline, begin = pipelines[number][microbatch], encoder.needed[microbatch]
            for rank, (num, ticks) in zip(reversed(encoder.ranks[pipeline]), reversed(encoder.forward[pipeline])):
                part, limit = ticks[microbatch], min(free[rank], begin)
                starts, ends, _ = bubbles[rank]
                bubble = at[rank]
                while True:
                    end = min(ends[bubble], limit)
                    fitting = (end - starts[bubble]) // part
                    if fitting >= num:
                        break
                    if fitting > 0:
                        num -= fitting
                    bubble -= 1
                at[rank] = bubble
                begin = free[rank] = end - num * part
        return max(0, -min(free))

    def _placed(self, pipelines: ChosenPipelines, runs: list[list[PlacedRun]] | None) -> int:
        """Ticks of the step; where parts run is added to `runs`."""
        lead = self.lead(pipelines)
        at = [0] * len(self.bubbles)
        free = [-lead] * len(self.bubbles)
        for order, is_backward in ((self._order, False), (self._backward_order, True)):
            for microbatch, number in order:
                encoder = self.encoders[number]
                pipeline = pipelines[number][microbatch]
                ranks = encoder.ranks[pipeline]
                passes = (encoder.backward if is_backward else encoder.forward)[pipeline]
                stages = range(len(ranks))
                begin = encoder.ready[microbatch] if is_backward else -lead
                for stage in reversed(stages) if is_backward else stages:
                    num, ticks = passes[stage]
                    if not num:
                        continue
                    rank, part, first = ranks[stage], ticks[microbatch], 0
                    starts, ends, _ = self.bubbles[rank]
                    bubble, begin = at[rank], max(free[rank], begin)
                    while True:
                        start = max(starts[bubble], begin)
                        fitting = min((ends[bubble] - start) // part, num)
                        if fitting > 0:
                            if runs is not None:
                                runs[rank].append(
                                    PlacedRun(start, bubble, number, stage, microbatch, is_backward, first, fitting)
                                )
                            num -= fitting
                            first += fitting
                            if not num:
                                break
                        bubble += 1
                    at[rank] = bubble
                    begin = free[rank] = start + fitting * part
        return lead + max(self.end, *free)
