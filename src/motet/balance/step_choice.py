"""Whether the microbatches of a step stay as they are, or their examples are dealt out anew so that long ones meet.

Within a step, the microbatch of an example is free: gradients are summed over all of them. Where long examples are
spread over several microbatches, ranks wait in each; deferred into one (deferring.py), they wait for each other. How
each microbatch is placed is then chosen as ever (choice.py), and the faster of both steps is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend
from motet.balance.checks import checked_integers, checked_ranks
from motet.balance.choice import METHODS, Choice, Method, as_ms, choose
from motet.balance.deferring import defer
from motet.balance.fragments import Overhead
from motet.balance.phases import NS_PER_S, Phase, joint_costs
from motet.core.arrays import Int32Array
from motet.core.cluster import Link
from motet.core.exchange import Network


@dataclass(frozen=True, eq=False)
class StepChoice:
    """The faster of two steps, as predicted.

    microbatch:  int32 [num_examples], the microbatch of each example of the step.
    choices:     one a microbatch, of its examples in ascending order.
    is_deferred: whether any example changes its microbatch.
    predicted_s: seconds of the step by "stay" and "defer".
    why:         a sentence with the figures.
    """

    microbatch: Int32Array
    choices: tuple[Choice, ...]
    is_deferred: bool
    predicted_s: dict[str, float]
    why: str


def choose_step(
    phases: Sequence[Phase],
    microbatch: ArrayLike,
    num_ranks: int,
    link: Link | Network,
    *,
    methods: Sequence[Method] = METHODS,
    overhead: Overhead | None = None,
    capacity_s: float | None = None,
    backend: Backend = "native",
) -> StepChoice:
    """Choose for a whole step. phases: of all its examples, as `choose` takes them.

    microbatch: int [num_examples], the microbatch of each example, every one from 0 to the largest.
    capacity_s: the most seconds of work that a rank may get in a microbatch by deferring, over all phases; it keeps
                long examples from meeting on a rank that has no memory for them.
    Ties go to "stay". Raises ArgumentError as `choose` and `defer` do, and for microbatches of another shape.
    """
    checked = checked_integers(microbatch, "microbatch")
    num_microbatches = int(checked.max(initial=0)) + 1
    stay = checked_ranks(checked, "microbatch", len(phases[0].lengths), num_microbatches)
    costs, unit_s = joint_costs(phases)
    capacity = None if capacity_s is None else max(int(capacity_s / unit_s), 1)
    deferral = defer(costs, num_ranks, num_microbatches, capacity=capacity, backend=backend)
    placed = {
        name: tuple(
            choose(part, num_ranks, link, methods=methods, overhead=overhead, backend=backend)
            for part in _parts(phases, dealt, num_microbatches)
        )
        for name, dealt in (("stay", stay), ("defer", deferral.microbatch))
    }
    predicted_ns = {name: sum(choice.predicted_ns for choice in choices) for name, choices in placed.items()}
    name = "defer" if predicted_ns["defer"] < predicted_ns["stay"] else "stay"
    told = "; ".join(f"{other} {as_ms(predicted_ns[other])}" for other in predicted_ns if other != name)
    return StepChoice(
        microbatch=deferral.microbatch if name == "defer" else stay,
        choices=placed[name],
        is_deferred=name == "defer",
        predicted_s={name: nanoseconds / NS_PER_S for name, nanoseconds in predicted_ns.items()},
        why=f"{name}: {as_ms(predicted_ns[name])} predicted ({told}).",
    )


def _parts(phases: Sequence[Phase], microbatch: Int32Array, num_microbatches: int) -> Iterator[list[Phase]]:
    """The phases of each microbatch, whose examples are counted anew, in ascending order."""
    for number in range(num_microbatches):
        inside = microbatch == number
        renumbered = np.cumsum(inside) - 1
        part = []
        for phase in phases:
            stays = inside[phase.owner]
            output_bytes = None if phase.output_bytes is None else phase.output_bytes[stays]
            part.append(
                replace(
                    phase,
                    lengths=phase.lengths[stays],
                    owner=renumbered[phase.owner[stays]],
                    output_bytes=output_bytes,
                )
            )
        yield part
