"""What the phases of a microbatch and their exchanges are predicted to take: the seconds that `choose` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from motet.balance import Cost, Link, Phase
from motet.core.workload import BACKBONE, BatchLengths


@dataclass(frozen=True)
class StepTimes:
    """Pure functions and constants that are the same on all ranks, nothing measured while training.

    seconds:     of a rank that did all of a phase of a microbatch by itself, forward and backward; from integers.
    link:        what an exchange takes.
    token_bytes: of one row of an encoder's output.
    frozen:      encoders that get no gradient back, as nothing in them trains.
    """

    seconds: Callable[[BatchLengths], Mapping[str, float]]
    link: Link
    token_bytes: int
    frozen: frozenset[str] = frozenset()

    def phases(self, lengths: BatchLengths, costs: Mapping[str, Cost]) -> list[Phase]:
        """The phases of a microbatch, backbone first.

        A unit of a phase's cost takes what it does on average over the microbatch: the cost may leave out what the
        seconds hold (attention, an output layer), and is balanced as it is.
        """
        seconds = self.seconds(lengths)

        def phase(name: str) -> Phase:
            items = None if name == BACKBONE else lengths.items[name]
            column = lengths.sequence if items is None else items.length
            total = int(costs[name].alone(column).sum())
            return Phase(
                name,
                column,
                costs[name],
                np.arange(lengths.num_examples) if items is None else items.example,
                seconds[name] / total if total else 0.0,
                None if items is None else items.num_tokens * self.token_bytes,
                num_exchanges=1 if name in self.frozen else 2,
            )

        return [phase(BACKBONE), *(phase(name) for name in costs if name != BACKBONE)]
