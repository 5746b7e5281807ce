"""Prediction: a simulated step of a Plan, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.timeline import Timeline
from motet.cost.model import Beyond
from motet.schedule import Presence, Program
from motet.simulate.bubbles import Bubbles, bubble_shares, bubbles


@dataclass(frozen=True, eq=False)
class Prediction:
    """A simulated step.

    timeline:       the Timeline of the program ranks of the slowest island.
    ranks:          int64 [num_ranks], the ranks of the cluster that the Plan uses.
    num_examples:   examples of the step, over all ranks.
    num_tokens:     tokens of the whole sequences of these examples, media included.
    model_flops:    operations that the model needs.
    hardware_flops: operations that ranks do, with recomputation and padding.
    peak_flops:     operations a second of all num_ranks devices together.
    memory_bytes:   by part ("parameters", "activations", ...), int64 [num_ranks], when the sum of parts is largest.
    capacity_bytes: memory of one rank's device.
    present:        what each microbatch has, under "data_parallel" (`schedule.executed_program`).
    program:        what the ranks of the Timeline do, where each step fills bubbles by itself; None: as the Plan says.
    beyond:         by module, how far its microbatches are beyond what a profile has measured.

    Example:
        >>> from motet.schedule import one_f_one_b
        >>> from motet.simulate import simulate, stage_times
        >>> timeline = simulate(one_f_one_b(2, num_microbatches=3), stage_times([1.0, 1.0], [2.0, 2.0]))
        >>> step = Prediction(timeline, np.arange(2), 24, 9600, 10**15, 12 * 10**14, 5e14, {}, 80 * 10**9)
        >>> f"{step.step_s} s, {step.examples_per_s} examples/s, MFU {step.mfu:.1%}, HFU {step.hfu:.1%}"
        '12.0 s, 2.0 examples/s, MFU 16.7%, HFU 20.0%'
    """

    timeline: Timeline
    ranks: Int64Array
    num_examples: int
    num_tokens: int
    model_flops: int
    hardware_flops: int
    peak_flops: float
    memory_bytes: Mapping[str, Int64Array]
    capacity_bytes: int
    present: tuple[Presence, ...] = ()
    program: Program | None = None
    beyond: Mapping[str, Beyond] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the Plan uses."""
        return len(self.ranks)

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.timeline.makespan_s

    @property
    def examples_per_s(self) -> float:
        """Examples a second, over all ranks."""
        return self.num_examples / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, over all ranks."""
        return self.num_tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: model_flops / step_s / peak_flops."""
        return self.model_flops / self.step_s / self.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: hardware_flops / step_s / peak_flops. Optimus calls it MFU."""
        return self.hardware_flops / self.step_s / self.peak_flops

    @property
    def bubbles(self) -> Bubbles:
        """Bubbles of the Timeline, by cause."""
        return bubbles(self.timeline)

    @cached_property
    def bubble_share(self) -> float:
        """The share of the step in which nothing computes, mean over the ranks of the cluster."""
        return float(np.average(bubble_shares(self.timeline), weights=self.timeline.rank_counts or None))

    @cached_property
    def peak_bytes(self) -> Int64Array:
        """Bytes of all parts together, int64 [num_ranks]."""
        summed: Int64Array = np.stack(list(self.memory_bytes.values())).sum(axis=0)
        return summed
