"""Which items are cut into fragments, where, and which rank computes each fragment or whole item.

One long item limits every placement of whole items. Several ranks compute a cut item at the same time: a long sequence
as a context-parallel group, a video between its frames. A fragment has overhead, so as few items are cut as possible:

1. none, if a placement of whole items is near the ideal;
2. else the items that are too heavy for a rank, in equal parts;
3. else also items that fit on no rank when their turn comes (reference/splitting.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.fragments import Overhead, Split, fragment_costs
from motet.balance.joint import assign_jointly
from motet.balance.placement import assign
from motet.balance.scoring import scored
from motet.balance.split_problem import SplitProblem
from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import max_sum

FIRST_RELAXATION = 5_000
"""The first relaxation of a target that is out of reach, in millionths of the ideal; doubled until it suffices."""

NUM_REFINEMENTS = 3
"""Number of times that the gap between a relaxation that fails and one that suffices is halved."""


def split(
    costs: ArrayLike,
    num_ranks: int,
    overhead: Overhead,
    *,
    divisible: ArrayLike | None = None,
    max_parts: int | None = None,
    target: float = 1.02,
    backend: Backend = "native",
) -> Split:
    """Cut as few items as needed for largest loads, summed over phases, of at most `target` times the ideal.

    The ideal is sum(costs) / num_ranks, without overhead. If the target is out of reach, the result is the best
    that was found, and never above the placement of whole items.

    costs: int [num_items], or [num_items, num_phases] in one unit; a fragment then has the same share of every phase.
    divisible: bool [num_items], whether an item can be cut (anywhere); or int [num_items], >= 1, the number of equal
        units (tokens, frames) between which it can be cut. None: all items can be cut anywhere.
    max_parts: the most fragments of an item (the largest context-parallel group); None: num_ranks.
    target: kept in millionths. With one phase and no overhead, every target is reached that whole units allow.

    O(num_fragments * num_ranks * num_phases) for each limit that is tried: one, or a few if the target is out of reach.
    Raises ArgumentError for bad costs and counts, and where costs with all possible overheads do not fit int64.
    """
    problem = SplitProblem.of(costs, num_ranks, overhead, divisible, max_parts, target, backend)
    best: _Candidate | None = None
    for candidate in _fewest_cuts_first(problem):
        if best is None or candidate.max_sum < best.max_sum:
            best = candidate
        if best.max_sum <= problem.allowed:
            break
    assert best is not None
    return _result(problem, best)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A placement of fragments. item, begin, end, costs: as in Split; loads: int64 [num_ranks, num_phases]."""

    item: Int64Array
    begin: Int64Array
    end: Int64Array
    costs: Int64Array
    ranks: Int32Array
    loads: Int64Array

    @property
    def max_sum(self) -> int:
        """The sum over phases of the largest load."""
        return max_sum(self.loads)


def _fewest_cuts_first(problem: SplitProblem) -> Iterator[_Candidate]:
    """Placements in the order of their number of cuts; `split` takes the first that reaches the target.

    Whole items come first. If the mean or the longest item alone exceeds the target, they come last, for comparison.
    """
    means = -(-problem.costs.sum(axis=0) // problem.num_ranks)
    longest = problem.costs.max(axis=0, initial=0)
    whole_exceed = sum(np.maximum(means, longest).tolist()) > problem.allowed
    whole = np.ones(len(problem.costs), dtype=np.int64)
    if not whole_exceed:
        yield _equal_parts(problem, whole)
    limits = problem.limits(0)
    num_parts = _parts_under(problem, limits)
    if (num_parts > 1).any():
        candidate = _equal_parts(problem, num_parts)
        if _on_different_ranks(candidate):
            yield candidate
    yield from _poured(problem)
    if whole_exceed:
        yield _equal_parts(problem, whole)


def _parts_under(problem: SplitProblem, limits: Int64Array) -> Int64Array:
    """How many equal parts each item needs to be under the limits, int64 [num_items]; 1 if no number suffices."""
    num_parts = np.ones(len(problem.costs), dtype=np.int64)
    for item in np.flatnonzero((problem.costs > limits).any(axis=1)).tolist():
        for count in range(2, int(problem.max_parts[item]) + 1):
            if (problem.heaviest_part(item, count) <= limits).all():
                num_parts[item] = count
                break
    return num_parts


def _equal_parts(problem: SplitProblem, num_parts: Int64Array) -> _Candidate:
    """Items cut into `num_parts` equal parts, int64 [num_items], and placed by `assign` or `assign_jointly`."""
    item = np.repeat(np.arange(len(num_parts)), num_parts)
    part = np.arange(len(item)) - (np.cumsum(num_parts) - num_parts)[item]
    begin = _units_before(problem.units[item], part, num_parts[item])
    end = _units_before(problem.units[item], part + 1, num_parts[item])
    costs = fragment_costs(problem.costs, problem.overheads, problem.units, item, begin, end)
    if problem.one_phase:
        placed = assign(costs[:, 0], problem.num_ranks, backend=problem.backend)
    else:
        placed = assign_jointly(costs, problem.num_ranks, backend=problem.backend)
    loads = placed.loads.reshape(problem.num_ranks, -1)
    return _Candidate(item, begin, end, costs, placed.ranks, loads)


def _units_before(units: Int64Array, part: Int64Array, num_parts: Int64Array) -> Int64Array:
    """units * part // num_parts, without the product."""
    return units // num_parts * part + units % num_parts * part // num_parts


def _on_different_ranks(candidate: _Candidate) -> bool:
    """Whether the fragments of every item are on different ranks."""
    item_and_rank = candidate.item * len(candidate.loads) + candidate.ranks
    return len(np.unique(item_and_rank)) == len(item_and_rank)


def _poured(problem: SplitProblem) -> Iterator[_Candidate]:
    """The placement under the limits of the target; if it fails, placements under limits that are relaxed as needed."""
    candidate = _pour(problem, 0)
    if candidate is not None:
        yield candidate
        return
    too_low, relaxation = 0, FIRST_RELAXATION
    while (candidate := _pour(problem, relaxation)) is None:
        too_low, relaxation = relaxation, 2 * relaxation
    yield candidate
    for _ in range(NUM_REFINEMENTS):
        middle = (too_low + relaxation) // 2
        candidate = _pour(problem, middle)
        if candidate is None:
            too_low = middle
        else:
            relaxation = middle
            yield candidate


def _pour(problem: SplitProblem, relaxation: int) -> _Candidate | None:
    """The placement under the limits with this relaxation; None if some items do not fit."""
    for equal_quarters in (4,) if problem.one_phase else (4, 2, 1):
        item, begin, end, ranks = algorithms(problem.backend).pour(
            problem.costs,
            problem.overheads,
            problem.units,
            problem.max_parts,
            *turns_by_rarity(problem.costs),
            problem.limits(relaxation, equal_quarters),
            problem.num_ranks,
        )
        placed = np.zeros(len(problem.costs), dtype=np.int64)
        np.add.at(placed, item, end - begin)
        if (placed == problem.units).all():
            costs = fragment_costs(problem.costs, problem.overheads, problem.units, item, begin, end)
            loads = np.zeros((problem.num_ranks, costs.shape[1]), dtype=np.int64)
            np.add.at(loads, ranks, costs)
            return _Candidate(item, begin, end, costs, ranks, loads)
    return None


def turns_by_rarity(costs: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The turn of each item (lower ones are placed first) and the phase that it belongs to; both int64 [num_items].

    An item belongs to the rarest phase in which it has a cost; the rarest phase has the fewest items with a cost. The
    rarest phase is placed first. So items with a cost in the most common phase alone come last, and fill its gaps.
    """
    rarest_first = np.argsort((costs > 0).sum(axis=0), kind="stable")
    turns = (costs[:, rarest_first] > 0).argmax(axis=1)
    return turns, rarest_first[turns]


def _result(problem: SplitProblem, chosen: _Candidate) -> Split:
    """The candidate as a Split."""
    num_parts = np.bincount(chosen.item, minlength=len(problem.costs))
    part = np.arange(len(chosen.item)) - (np.cumsum(num_parts) - num_parts)[chosen.item]
    costs = chosen.costs[:, 0] if problem.one_phase else chosen.costs
    assignment = scored(chosen.ranks, costs, problem.num_ranks)
    return Split(chosen.item, part, num_parts[chosen.item], chosen.begin, chosen.end, problem.units, costs, assignment)
