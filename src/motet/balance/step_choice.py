"""Which microbatch of a step computes each example: the given one, or one that collects the long examples.

An example may change its microbatch, because a step adds up the gradients of all microbatches. If each microbatch has a
long example, ranks wait in each. If one microbatch has all of them (deferring.py), ranks wait once. `choose` balances
each microbatch of both steps (choice.py), and the faster step is taken.
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
from motet.balance.phases import Phase, joint_costs
from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.cluster import Link
from motet.core.exchange import NS_PER_S, Network


@dataclass(frozen=True, eq=False)
class StepChoice:
    """The faster of two steps, as predicted: "stay" (the given microbatches) and "defer".

    microbatch:  int32 [num_examples], the microbatch of each example of the step.
    choices:     one Choice for each microbatch, of its examples in ascending order.
    is_deferred: whether "defer" is the faster.
    predicted_s: predicted seconds of the step, by "stay" and "defer".
    why:         one sentence with the figures.

    Example:
        >>> from motet.balance import Packed
        >>> tokens = np.array([8, 4, 8, 4])  # 2 microbatches, on 2 ranks
        >>> backbone = Phase("backbone", tokens, Packed(), np.arange(4), seconds_per_cost=0.001)
        >>> step = choose_step([backbone], [0, 0, 1, 1], num_ranks=2, link=Link(1e9, 0.0))
        >>> step.microbatch.tolist(), step.why
        ([0, 1, 0, 1], 'defer: 12 ms predicted (stay 16 ms).')
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
    """Choose the microbatches of a step, and the method of balancing in each.

    phases: those of all examples of the step, as `choose` takes them.
    microbatch: int [num_examples], the given microbatch of each example, from 0.
    capacity_s: the most seconds of work, summed over phases, that a rank may get in a microbatch by deferring. It keeps
                long examples apart where a rank has no memory for two.
    A tie goes to "stay". Raises ArgumentError as `choose` and `defer` do, and for `microbatch` of another shape.
    """
    checked = checked_integers(microbatch, "microbatch")
    num_microbatches = int(checked.max(initial=0)) + 1
    given = checked_ranks(checked, "microbatch", len(phases[0].lengths), num_microbatches)
    costs, unit_s = joint_costs(phases)
    capacity = None if capacity_s is None else max(int(capacity_s / unit_s), 1)
    deferral = defer(costs, num_ranks, num_microbatches, capacity=capacity, backend=backend)
    choices_of = {
        name: tuple(
            choose(inside, num_ranks, link, methods=methods, overhead=overhead, backend=backend)
            for inside in _phases_by_microbatch(phases, microbatches, num_microbatches)
        )
        for name, microbatches in (("stay", given), ("defer", deferral.microbatch))
    }
    predicted_ns = {name: sum(choice.predicted_ns for choice in choices) for name, choices in choices_of.items()}
    name = "defer" if predicted_ns["defer"] < predicted_ns["stay"] else "stay"
    other = "stay" if name == "defer" else "defer"
    return StepChoice(
        microbatch=deferral.microbatch if name == "defer" else given,
        choices=choices_of[name],
        is_deferred=name == "defer",
        predicted_s={name: nanoseconds / NS_PER_S for name, nanoseconds in predicted_ns.items()},
        why=f"{name}: {as_ms(predicted_ns[name])} predicted ({other} {as_ms(predicted_ns[other])}).",
    )


def _phases_by_microbatch(
    phases: Sequence[Phase], microbatch: Int32Array, num_microbatches: int
) -> Iterator[list[Phase]]:
    """The phases of one microbatch after the other; the examples of each are numbered from 0, in ascending order."""
    for index in range(num_microbatches):
        has_example = microbatch == index
        new_number = np.cumsum(has_example) - 1
        yield [_phase_of(phase, has_example[phase.owner], new_number) for phase in phases]


def _phase_of(phase: Phase, has_item: BoolArray, new_number: Int64Array) -> Phase:
    """The phase with some of its items. new_number: of each example."""
    return replace(
        phase,
        lengths=phase.lengths[has_item],
        owner=new_number[phase.owner[has_item]],
        output_bytes=None if phase.output_bytes is None else phase.output_bytes[has_item],
    )
