"""Decides a microbatch: one Assignment a phase, from lengths alone (OrchMLLM, arXiv:2503.23830, sections 5.1 and 6).

The backbone is balanced on the length of the whole interleaved sequence, each encoder on its own lengths; where all
phases are, the fastest way to balance them together is chosen. Nothing but lengths and constants is read, and times are
compared as integers, so every rank that sees the same lengths comes to the same decision by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from motet.balance import METHODS, Cost, Method, assign, assign_apart, choose, score
from motet.core.assignment import Assignment
from motet.core.workload import BACKBONE, BatchLengths
from motet.dispatch.times import StepTimes


@dataclass(frozen=True, eq=False)
class Decision:
    """What an Orchestrator decided for one microbatch; the same on all ranks but for `decide_s`.

    assignments: per phase, the placement that is used.
    before:      per phase, the placement that there would be without balancing: everything on its example's home rank.
    costs:       per phase, the cost of which both report the loads.
    decide_s:    seconds that the decision took on this rank.
    method:      "joint", "mixed" or "per_phase" (see `motet.balance.choose`); where not all phases are balanced, "some"
                 or "off".
    why:         why this method, in a sentence with figures. predicted_s: seconds of the microbatch by method. Both
                 empty where nothing was predicted.
    """

    assignments: dict[str, Assignment]
    before: dict[str, Assignment]
    costs: dict[str, Cost]
    decide_s: float
    method: str
    why: str = ""
    predicted_s: dict[str, float] = field(default_factory=dict)

    @property
    def backbone(self) -> Assignment:
        return self.assignments[BACKBONE]

    def keep(self, kept: NDArray[np.bool_], lengths: BatchLengths) -> Decision:
        """The decision without the examples that could not be loaded; all else stays on its rank and in its order.

        kept: bool [num_examples], the same on all ranks. lengths: those that the decision was made from, complete.
        """
        if kept.all():
            return self
        remaining = lengths.keep(kept)

        def without(phase: str, assignment: Assignment) -> Assignment:
            stays = kept if phase == BACKBONE else kept[lengths.items[phase].example]
            renumbered = np.cumsum(stays) - 1
            order = renumbered[assignment.items[stays[assignment.items]]]
            return _placed(assignment.ranks[stays], order, phase, remaining, assignment.num_ranks, self.costs)

        return replace(
            self,
            assignments={phase: without(phase, assignment) for phase, assignment in self.assignments.items()},
            before={phase: without(phase, assignment) for phase, assignment in self.before.items()},
        )


class Orchestrator:
    """Turns the lengths of a microbatch into a Decision.

    costs:    per phase, backbone included, what an item costs.
    balanced: names of the phases to balance. A backbone that is not balanced runs every example on its home rank; the
              items of an encoder that is not balanced are encoded on the rank that runs their example's sequence, so
              that its outputs need not move.
    times:    from which the seconds of each method are predicted where all phases are balanced. None places each
              phase's items by themselves.
    methods:  those to choose from if there are `times`; a single one is what is done.
    """

    def __init__(
        self,
        costs: Mapping[str, Cost],
        num_ranks: int,
        balanced: Iterable[str],
        *,
        times: StepTimes | None = None,
        methods: Sequence[Method] = METHODS,
    ) -> None:
        if BACKBONE not in costs:
            raise ValueError(f"costs need an entry for {BACKBONE!r}")
        self.costs = dict(costs)
        self.num_ranks = num_ranks
        self.balanced = frozenset(balanced)
        self.times = times
        self.methods = tuple(methods)
        if unknown := self.balanced - self.costs.keys():
            raise ValueError(f"balanced phases without a cost: {sorted(unknown)}")

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the encoder phases, in the order in which costs were given."""
        return tuple(name for name in self.costs if name != BACKBONE)

    def decide(self, lengths: BatchLengths) -> Decision:
        """One Assignment a phase. Every encoder phase needs its column in `lengths.items`, if an empty one."""
        start_s = time.perf_counter()
        if missing := set(self.encoders) ^ lengths.items.keys():
            raise ValueError(f"phases of costs and of lengths differ in {sorted(missing)}")
        before = {
            phase: _scored(_home(phase, lengths), phase, lengths, self.num_ranks, self.costs) for phase in self.costs
        }
        if self.times is not None and self.balanced == self.costs.keys():
            decision = self._balance_together(lengths, before, self.times)
        else:
            decision = self._balance_each(lengths, before)
        return replace(decision, decide_s=time.perf_counter() - start_s)

    def _balance_together(self, lengths: BatchLengths, before: dict[str, Assignment], times: StepTimes) -> Decision:
        phases = times.phases(lengths, self.costs)
        choice = choose(phases, self.num_ranks, times.link, methods=self.methods, home=lengths.home)
        assignments = {phase.name: placed for phase, placed in zip(phases, choice.assignments, strict=True)}
        return Decision(assignments, before, self.costs, 0.0, choice.method, choice.why, choice.predicted_s)

    def _balance_each(self, lengths: BatchLengths, before: dict[str, Assignment]) -> Decision:
        backbone = before[BACKBONE]
        if BACKBONE in self.balanced:
            backbone = assign(lengths.sequence, self.num_ranks, self.costs[BACKBONE])
        assignments = {BACKBONE: backbone}
        for phase in self.encoders:
            items = lengths.items[phase]
            if phase in self.balanced:
                cost = self.costs[phase]
                assignments[phase] = assign_apart(items.length, cost, items.example, backbone)
            else:
                ranks, order = backbone.follow(items.example)
                assignments[phase] = _placed(ranks, order, phase, lengths, self.num_ranks, self.costs)
        method = "per_phase" if self.balanced == self.costs.keys() else "some" if self.balanced else "off"
        return Decision(assignments, before, self.costs, 0.0, method)


def _column(phase: str, lengths: BatchLengths) -> NDArray[np.int64]:
    return lengths.sequence if phase == BACKBONE else lengths.items[phase].length


def _home(phase: str, lengths: BatchLengths) -> NDArray[np.int32]:
    return lengths.home if phase == BACKBONE else lengths.home[lengths.items[phase].example]


def _scored(
    ranks: NDArray[np.int32], phase: str, lengths: BatchLengths, num_ranks: int, costs: Mapping[str, Cost]
) -> Assignment:
    return score(ranks, _column(phase, lengths), num_ranks, costs[phase])


def _placed(
    ranks: NDArray[np.int32],
    order: NDArray[np.int64],
    phase: str,
    lengths: BatchLengths,
    num_ranks: int,
    costs: Mapping[str, Cost],
) -> Assignment:
    """A given placement in a given order; loads do not depend on the order."""
    return replace(_scored(ranks, phase, lengths, num_ranks, costs), items=order)
