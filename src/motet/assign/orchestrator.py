"""Decides a microbatch: one Assignment a phase, from lengths alone (OrchMLLM, arXiv:2503.23830, sections 5.1 and 6).

The backbone is balanced on what whole interleaved sequences are to it, each encoder on what its items are to it: their
operations, say, or their lengths (`balance.ItemWork`). Where all phases are balanced, the fastest way to balance them
together is chosen. Nothing but lengths and constants is read, and times are compared as integers, so every rank that
sees the same lengths comes to the same decision by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from motet.balance import (
    METHODS,
    Cost,
    ItemWork,
    LengthWork,
    Method,
    PhaseCosts,
    StepCosts,
    StepTimes,
    assign,
    assign_apart,
    choose,
    score,
)
from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.assignment import Assignment
from motet.core.workload import BACKBONE, BatchLengths

PhaseWork = Mapping[str, Int64Array]
_LENGTHS = LengthWork()


@dataclass(frozen=True, eq=False)
class Decision:
    """What an Orchestrator decided for one microbatch; the same on all ranks but for `decide_s`.

    assignments: per phase, the placement that is used.
    before:      per phase, the placement that there would be without balancing: everything on its example's home rank.
    costs, work: the costs, and per phase the work of each item, int64 [num_items], that both report the loads of.
    decide_s:    seconds that the decision took on this rank.
    method:      "joint", "mixed" or "per_phase" (see `motet.balance.choose`); where not all phases are balanced, "some"
                 or "off".
    why:         why this method, in a sentence with figures. predicted_s: seconds of the microbatch by method. Both
                 empty where nothing was predicted.
    """

    assignments: dict[str, Assignment]
    before: dict[str, Assignment]
    costs: PhaseCosts
    work: PhaseWork
    decide_s: float
    method: str
    why: str = ""
    predicted_s: dict[str, float] = field(default_factory=dict)

    @property
    def backbone(self) -> Assignment:
        return self.assignments[BACKBONE]

    def keep(self, kept: BoolArray, lengths: BatchLengths) -> Decision:
        """The decision without the examples that could not be loaded; all else stays on its rank and in its order.

        kept: bool [num_examples], the same on all ranks. lengths: those that the decision was made from, complete.
        """
        if kept.all():
            return self
        stay = {phase: kept[lengths.of(phase).example] for phase in self.work}
        work = {phase: self.work[phase][stays] for phase, stays in stay.items()}

        def without(phase: str, assignment: Assignment) -> Assignment:
            stays = stay[phase]
            renumbered = np.cumsum(stays) - 1
            order = renumbered[assignment.items[stays[assignment.items]]]
            return _placed(assignment.ranks[stays], order, work[phase], assignment.num_ranks, self.costs.costs[phase])

        return replace(
            self,
            assignments={phase: without(phase, assignment) for phase, assignment in self.assignments.items()},
            before={phase: without(phase, assignment) for phase, assignment in self.before.items()},
            work=work,
        )


class Orchestrator:
    """Turns the lengths of a microbatch into a Decision.

    costs:    per phase, backbone included, how the work of the items on a rank makes up its load.
    work:     what an item is; by default its length. `motet.cost.operations.Operations` counts what a model does.
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
        work: ItemWork = _LENGTHS,
        times: StepTimes | None = None,
        methods: Sequence[Method] = METHODS,
    ) -> None:
        if BACKBONE not in costs:
            raise ValueError(f"costs need an entry for {BACKBONE!r}")
        self.costs = PhaseCosts(dict(costs), work) if times is None else StepCosts(dict(costs), work, times)
        self.num_ranks = num_ranks
        self.balanced = frozenset(balanced)
        self.methods = tuple(methods)
        if unknown := self.balanced - costs.keys():
            raise ValueError(f"balanced phases without a cost: {sorted(unknown)}")

    @property
    def encoders(self) -> tuple[str, ...]:
        """Names of the encoder phases, in the order in which costs were given."""
        return self.costs.names[1:]

    def decide(self, lengths: BatchLengths) -> Decision:
        """One Assignment a phase. Every encoder phase needs its column in `lengths.items`, if an empty one."""
        start_s = time.perf_counter()
        if missing := set(self.encoders) ^ lengths.items.keys():
            raise ValueError(f"phases of costs and of lengths differ in {sorted(missing)}")
        costs, work = self.costs.costs, self.costs.work(lengths)
        before = {
            phase: score(_home(phase, lengths), work[phase], self.num_ranks, cost) for phase, cost in costs.items()
        }
        why, predicted_s = "", {}
        if isinstance(self.costs, StepCosts) and self.balanced == costs.keys():
            phases, link = self.costs.phases(lengths, work), self.costs.times.link
            choice = choose(phases, self.num_ranks, link, methods=self.methods, home=lengths.home)
            assignments = dict(zip(self.costs.names, choice.assignments, strict=True))
            method, why, predicted_s = str(choice.method), choice.why, choice.predicted_s
        else:
            assignments = self._balance_each(lengths, work, before[BACKBONE])
            method = "per_phase" if self.balanced == costs.keys() else "some" if self.balanced else "off"
        decide_s = time.perf_counter() - start_s
        return Decision(assignments, before, self.costs, work, decide_s, method, why, predicted_s)

    def _balance_each(self, lengths: BatchLengths, work: PhaseWork, backbone: Assignment) -> dict[str, Assignment]:
        """backbone: where it is not balanced."""
        costs = self.costs.costs
        if BACKBONE in self.balanced:
            backbone = assign(work[BACKBONE], self.num_ranks, costs[BACKBONE])
        assignments = {BACKBONE: backbone}
        for phase in self.encoders:
            example, cost = lengths.items[phase].example, costs[phase]
            if phase in self.balanced:
                assignments[phase] = assign_apart(work[phase], cost, example, backbone)
            else:
                ranks, order = backbone.follow(example)
                assignments[phase] = _placed(ranks, order, work[phase], self.num_ranks, cost)
        return assignments


def _home(phase: str, lengths: BatchLengths) -> Int32Array:
    return lengths.home[lengths.of(phase).example]


def _placed(ranks: Int32Array, order: Int64Array, work: Int64Array, num_ranks: int, cost: Cost) -> Assignment:
    """A given placement in a given order; loads do not depend on the order."""
    return replace(score(ranks, work, num_ranks, cost), items=order)
