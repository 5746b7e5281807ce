"""Which microbatch of a step computes each example: the given one, or one that collects the long examples.

An example may change its microbatch, because a step adds up the gradients of all microbatches. If each microbatch has a
long example, ranks wait in each. If one microbatch has all of them (deferring.py), ranks wait once. `choose` balances
each microbatch of both steps (choice.py), and the faster step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend
from motet.balance.checks import checked_integers, checked_ranks
from motet.balance.choice import METHODS, Choice, Method, choose, choose_given
from motet.balance.deferring import find_deferral
from motet.balance.phases import Phase, joint_costs
from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.cluster import Link
from motet.core.exchange import NS_PER_S, Network
from motet.core.words import shown_seconds

Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or one that works in threads."""

MIN_GAIN = 0.02
"""Deferring is tried where it could make the step shorter by this share, as it takes longer than balancing does."""


@dataclass(frozen=True, eq=False)
class StepChoice:
    """The faster of two steps, as predicted: "stay" (the given microbatches) and "defer".

    microbatch:  int32 [num_examples], the microbatch of each example of the step.
    choices:     one Choice for each microbatch, of its examples in ascending order.
    is_deferred: whether "defer" is the faster.
    predicted_s: predicted seconds of the step, by "stay" and "defer"; without "defer" if that needs more memory, and if
                 it was not tried, because the step as it comes is within MIN_GAIN of the least that any takes.
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
    home: ArrayLike | None = None,
    room_bytes: int | None = None,
    backend: Backend = "native",
    run: Run = map,
) -> StepChoice:
    """Choose the microbatches of a step, and the method of balancing in each.

    phases: those of all examples of the step, as `choose` takes them. If they say what items hold, "defer" keeps long
            examples apart: no rank holds more in a microbatch than the fullest rank with "stay", or than one example.
    microbatch: int [num_examples], the given microbatch of each example, from 0.
    home: int [num_examples], the rank of each example without balancing, as in `choose`. room_bytes: as there.
    run: maps a function over the microbatches, e.g. in threads.
    A tie goes to "stay". Raises ArgumentError as `choose` does, and for `microbatch` of another shape.
    """
    checked = checked_integers(microbatch, "microbatch")
    num_microbatches = int(checked.max(initial=0)) + 1
    given = checked_ranks(checked, "microbatch", len(phases[0].lengths), num_microbatches)
    homes = None if home is None else checked_ranks(home, "home", len(given), num_ranks)

    def parts_of(microbatches: Int32Array) -> list[_Part]:
        members = [microbatches == index for index in range(num_microbatches)]
        return [_Part(_phases_of(phases, own), None if homes is None else homes[own]) for own in members]

    def choose_one(part: _Part) -> Choice:
        return choose(
            part.phases, num_ranks, link, methods=methods, home=part.home, room_bytes=room_bytes, backend=backend
        )

    # 1. The step as it comes.
    parts = parts_of(given)
    stay = list(run(choose_one, parts))
    choices = {"stay": stay}
    stay_ns, lacks = sum(choice.predicted_ns for choice in stay), any(choice.lacking_bytes for choice in stay)
    costs, unit_s = joint_costs(phases)
    least_ns = round(float(costs.sum()) * unit_s * NS_PER_S / num_ranks)
    if stay_ns <= (1 + MIN_GAIN) * least_ns and not lacks:
        taken, least = (shown_seconds(nanoseconds / NS_PER_S) for nanoseconds in (stay_ns, least_ns))
        why = f"stay: {taken} predicted (no step takes less than {least})."
        return StepChoice(given, tuple(stay), False, {"stay": stay_ns / NS_PER_S}, why)
    # 2. Long examples deferred, in the memory of the first.
    sizes = _sizes(phases)
    capacity = None
    if sizes is not None:
        fullest = max(_fullest(part.phases, choice) for part, choice in zip(parts, stay, strict=True))
        capacity = max(fullest, int(sizes.max(initial=0)), 1)
    deferral = find_deferral(costs, num_ranks, num_microbatches, capacity=capacity, sizes=sizes, backend=backend)
    if deferral is not None:
        parts = parts_of(deferral.microbatch)
        deferred = list(run(choose_one, parts))
        for index, part in enumerate(parts):
            if capacity is not None and _fullest(part.phases, deferred[index]) > capacity:
                # The placement of the deferral itself, which keeps to the capacity.
                ranks = deferral.assignments[index].ranks
                deferred[index] = choose_given(
                    part.phases, ranks, num_ranks, link, home=part.home, room_bytes=room_bytes
                )
        if all(choice.method in methods for choice in deferred):
            choices["defer"] = deferred
    # 3. The faster of both, of those that fit.
    predicted_ns = {name: sum(choice.predicted_ns for choice in of_step) for name, of_step in choices.items()}
    lacking = {name: max(choice.lacking_bytes for choice in of_step) for name, of_step in choices.items()}
    name = min(predicted_ns, key=lambda name: (lacking[name], predicted_ns[name]))
    predicted_s = {other: nanoseconds / NS_PER_S for other, nanoseconds in predicted_ns.items()}
    others = "; ".join(f"{other} {shown_seconds(seconds)}" for other, seconds in predicted_s.items() if other != name)
    return StepChoice(
        microbatch=deferral.microbatch if deferral is not None and name == "defer" else given,
        choices=tuple(choices[name]),
        is_deferred=name == "defer",
        predicted_s=predicted_s,
        why=f"{name}: {shown_seconds(predicted_s[name])} predicted ({others or 'defer needs more memory'}).",
    )


class _Part(NamedTuple):
    """One microbatch of a step: the phases of its examples, and the rank of each without balancing."""

    phases: list[Phase]
    home: Int32Array | None


def _sizes(phases: Sequence[Phase]) -> Int64Array | None:
    """What each example holds, summed over phases, int64 [num_examples]; None if no phase says it."""
    columns = [(phase.owner, phase.held) for phase in phases if phase.held is not None]
    if not columns:
        return None
    held = np.zeros(len(phases[0].lengths), dtype=np.int64)
    for owner, of_items in columns:
        np.add.at(held, owner, of_items)
    return held


def _fullest(phases: Sequence[Phase], choice: Choice) -> int:
    """The most that a rank holds in a microbatch."""
    held = np.zeros(choice.assignments[0].num_ranks, dtype=np.int64)
    for phase, placed in zip(phases, choice.assignments, strict=True):
        if phase.held is None:
            continue
        if (cut := choice.fragments if phase is phases[0] else choice.cut_items.get(phase.name)) is not None:
            np.add.at(held, cut.assignment.ranks, phase.held[cut.item] * (cut.end - cut.begin) // cut.units[cut.item])
        else:
            np.add.at(held, placed.ranks, phase.held)
    return int(held.max())


def _phases_of(phases: Sequence[Phase], has_example: BoolArray) -> list[Phase]:
    """The phases of some of the examples, numbered anew in ascending order. has_example: bool [num_examples]."""
    new_number = np.cumsum(has_example) - 1
    return [
        phase.take(has_item, new_number[phase.owner[has_item]])
        for phase in phases
        for has_item in [has_example[phase.owner]]
    ]
