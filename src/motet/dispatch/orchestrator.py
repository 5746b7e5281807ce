"""Decides a microbatch: one Assignment a phase, from lengths alone (OrchMLLM, arXiv:2503.23830, sections 5.1 and 6).

The backbone is balanced on the length of the whole interleaved sequence, each encoder on its own lengths. All costs are
integers and nothing else is read, so every rank that sees the same lengths comes to the same decision by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from motet.balance import Cost, Packed, Padded, assign, score
from motet.core.assignment import Assignment
from motet.core.errors import UserError
from motet.core.workload import BACKBONE, BatchLengths


class PackedCostConfig(BaseModel):
    """Cost of an item of length l in a phase that packs: linear * l + quadratic * l**2, in any integer unit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    linear: int = Field(default=1, ge=0)
    quadratic: int = Field(default=0, ge=0)


class BalanceConfig(BaseModel):
    """Which phases are balanced, how items reach their ranks, and what an item costs.

    phases: "off", "backbone", "all", or the names of the phases that are balanced.
    mode:   "index" (lengths are known before loading), "exchange" (items are moved after loading), "auto" (index where
            the data has one).
    costs:  per phase, integer coefficients in place of the default cost, which is the length.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    phases: Literal["off", "backbone", "all"] | tuple[str, ...] = "all"
    mode: Literal["auto", "index", "exchange"] = "auto"
    costs: dict[str, PackedCostConfig] = Field(default_factory=dict)

    def balanced(self, encoders: Iterable[str]) -> frozenset[str]:
        """The names of the phases to balance; raises UserError for a name that is no phase of the model."""
        known = [BACKBONE, *encoders]
        if self.phases == "off":
            return frozenset()
        if self.phases == "backbone":
            return frozenset([BACKBONE])
        if self.phases == "all":
            return frozenset(known)
        for name in self.phases:
            if name not in known:
                raise UserError(f"balance.phases: there is no phase {name!r}; the model has {', '.join(known)}.")
        return frozenset(self.phases)

    def phase_costs(self, kinds: Mapping[str, str]) -> dict[str, Cost]:
        """The cost of each phase. kinds: encoder name -> "packed" or "padded"; the backbone is always packed.

        Raises UserError for coefficients of an unknown phase, or of a padded one, which costs count times longest.
        """
        kinds = {BACKBONE: "packed", **kinds}
        for name in self.costs:
            if name not in kinds:
                raise UserError(f"balance.costs: there is no phase {name!r}; the model has {', '.join(kinds)}.")
            if kinds[name] == "padded":
                raise UserError(
                    f"balance.costs.{name}: phase {name!r} is computed with padding, so it costs its number of items "
                    "times the longest; remove the coefficients."
                )
        costs: dict[str, Cost] = {}
        for name, kind in kinds.items():
            given = self.costs.get(name, PackedCostConfig())
            costs[name] = Padded() if kind == "padded" else Packed(linear=given.linear, quadratic=given.quadratic)
        return costs


@dataclass(frozen=True, eq=False)
class Decision:
    """What an Orchestrator decided for one microbatch; the same on all ranks but for `decide_s`.

    assignments: per phase, the placement that is used.
    before:      per phase, the placement that there would be without balancing: everything on its example's home rank.
    costs:       per phase, the cost of which both report the loads.
    decide_s:    seconds that the decision took on this rank.
    """

    assignments: dict[str, Assignment]
    before: dict[str, Assignment]
    costs: dict[str, Cost]
    decide_s: float

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
    """

    def __init__(self, costs: Mapping[str, Cost], num_ranks: int, balanced: Iterable[str]) -> None:
        if BACKBONE not in costs:
            raise ValueError(f"costs need an entry for {BACKBONE!r}")
        self.costs = dict(costs)
        self.num_ranks = num_ranks
        self.balanced = frozenset(balanced)
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
        backbone = self._balance(BACKBONE, lengths) if BACKBONE in self.balanced else before[BACKBONE]
        assignments = {BACKBONE: backbone}
        for phase in self.encoders:
            if phase in self.balanced:
                assignments[phase] = self._balance(phase, lengths)
            else:
                ranks, order = backbone.follow(lengths.items[phase].example)
                assignments[phase] = _placed(ranks, order, phase, lengths, self.num_ranks, self.costs)
        return Decision(assignments, before, self.costs, decide_s=time.perf_counter() - start_s)

    def _balance(self, phase: str, lengths: BatchLengths) -> Assignment:
        return assign(_column(phase, lengths), self.num_ranks, self.costs[phase])


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
