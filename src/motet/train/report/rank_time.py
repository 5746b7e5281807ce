"""What ranks do in a measured step: time in which they compute, and bubbles by kind.

Clocks of machines differ. So each rank counts its own spans, and the ranks are aligned at the moment at which all meet
in every step: the sum over ranks before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.timeline import Timeline
from motet.runtime.step import StepResult
from motet.simulate.bubbles import BUBBLE_KINDS, Bubbles, bubbles

_WARMUP, _COOLDOWN = BUBBLE_KINDS.index("pp_warmup"), BUBBLE_KINDS.index("pp_cooldown")


@dataclass(frozen=True)
class RankTime:
    """One rank's step. before_s, after_s: from its first action to the meeting of all ranks, and from there to its end.

    busy_s, idle_s: between its own first and last action; idle_s by BUBBLE_KINDS.
    """

    before_s: float
    after_s: float
    busy_s: float
    idle_s: tuple[float, ...]

    @staticmethod
    def of(result: StepResult) -> RankTime:
        """The time of this rank in a step."""
        own = result.timeline
        counted = bubbles(replace(own, rank=np.zeros_like(own.rank), num_ranks=1))
        before_s, after_s = result.met_s - own.start_s.min(), own.end_s.max() - result.met_s
        return RankTime(float(before_s), float(after_s), float(counted.busy_s[0]), tuple(map(float, counted.idle_s[0])))

    @property
    def row(self) -> list[float]:
        """As numbers, to be gathered; `joined_bubbles` takes the rows of all ranks."""
        before_s, after_s, busy_s, idle_s = astuple(self)
        return [before_s, after_s, busy_s, *idle_s]

    @staticmethod
    def num_columns() -> int:
        """Numbers of a row."""
        return 3 + len(BUBBLE_KINDS)


def joined_bubbles(rows: Float64Array) -> Bubbles:
    """The Bubbles of a measured step from the rows of all ranks, float64 [num_ranks, num_columns].

    A rank that begins after the first, or ends before the last, is idle in between: warm-up, or cool-down.
    """
    before_s, after_s = rows[:, 0], rows[:, 1]
    idle_s = rows[:, 3:].copy()
    idle_s[:, _WARMUP] += before_s.max() - before_s
    idle_s[:, _COOLDOWN] += after_s.max() - after_s
    return Bubbles(float(before_s.max() + after_s.max()), rows[:, 2], idle_s)


def busiest_bubbles(found: Bubbles) -> dict[str, float]:
    """Seconds of each kind of bubble on the rank that computes longest."""
    return dict(zip(BUBBLE_KINDS, found.idle_s[int(found.busy_s.argmax())].tolist()))


def aligned(timelines: Sequence[tuple[Timeline, float]]) -> Timeline:
    """One Timeline of all ranks, from (Timeline, when the ranks met) of each; it begins at 0."""
    spans = [
        replace(span, start_s=span.start_s - met_s, end_s=span.end_s - met_s)
        for timeline, met_s in timelines
        for span in timeline
    ]
    first_s = min(span.start_s for span in spans)
    return Timeline.of(replace(span, start_s=span.start_s - first_s, end_s=span.end_s - first_s) for span in spans)
