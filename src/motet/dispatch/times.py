"""What the phases of a microbatch and their exchanges are predicted to take: the seconds that `choose` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from motet.balance import Cost, Link, Phase
from motet.core.workload import BACKBONE, BatchLengths


@dataclass(frozen=True)
class StepTimes:
    """Constants that are the same on all ranks, nothing measured while training.

    flops:       operations of each phase for a microbatch, forward and backward, over all ranks: integers.
    flops_per_s: operations that a rank does in a second.
    link:        what an exchange takes.
    token_bytes: of one row of an encoder's output.
    frozen:      encoders that get no gradient back, as nothing in them trains.
    """

    flops: Callable[[BatchLengths], Mapping[str, int]]
    flops_per_s: float
    link: Link
    token_bytes: int
    frozen: frozenset[str] = frozenset()

    def phases(self, lengths: BatchLengths, costs: Mapping[str, Cost]) -> list[Phase]:
        """The phases of a microbatch, backbone first.

        A unit of a phase's cost takes what it does on average over the microbatch: the cost may leave out what the
        count of operations knows of (attention, an output layer), and is balanced as it is.
        """
        flops = self.flops(lengths)

        def phase(name: str) -> Phase:
            items = None if name == BACKBONE else lengths.items[name]
            column = lengths.sequence if items is None else items.length
            total = int(costs[name].alone(column).sum())
            return Phase(
                name,
                column,
                costs[name],
                np.arange(lengths.num_examples) if items is None else items.example,
                flops[name] / total / self.flops_per_s if total else 0.0,
                None if items is None else items.num_tokens * self.token_bytes,
                num_exchanges=1 if name in self.frozen else 2,
            )

        return [phase(BACKBONE), *(phase(name) for name in costs if name != BACKBONE)]
