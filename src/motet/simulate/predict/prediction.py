"""What a step of a Plan is predicted to take: the facts, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.timeline import Timeline
from motet.schedule import Presence
from motet.simulate.bubbles import Bubbles, bubbles


@dataclass(frozen=True, eq=False)
class Prediction:
    """One step.

    timeline:       of the program ranks, each of which may stand for several ranks of the cluster.
    ranks:          int64 [num_ranks], those of the cluster that the plan uses.
    num_examples, num_tokens: over all ranks; tokens of whole sequences, media included.
    model_flops:    operations that the model needs; hardware_flops: that are done, with recomputation and padding.
    peak_flops:     operations a second, of all num_ranks together.
    memory_bytes:   int64 [num_ranks] of `ranks` by part ("parameters", "activations", ...), when their sum is largest.
    capacity_bytes: of one rank's device.
    present:        what each microbatch has, where the Program depends on it (`schedule.executed`).
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

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def step_s(self) -> float:
        return self.timeline.makespan_s

    @property
    def examples_per_s(self) -> float:
        return self.num_examples / self.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return self.model_flops / self.step_s / self.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation; what Optimus calls MFU."""
        return self.hardware_flops / self.step_s / self.peak_flops

    @property
    def bubbles(self) -> Bubbles:
        return bubbles(self.timeline)

    @cached_property
    def peak_bytes(self) -> Int64Array:
        """int64 [num_ranks], all parts together."""
        summed: Int64Array = np.stack(list(self.memory_bytes.values())).sum(axis=0)
        return summed
