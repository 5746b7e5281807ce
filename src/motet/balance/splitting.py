"""Items that dominate: which to cut into fragments, where, and which rank computes each fragment or whole item.

One long item bounds every placement of whole items. A cut item is computed by several ranks at the same time: a long
sequence by a context-parallel group, a video between its frames. A fragment costs more than its share, so that only
as many items are cut as bring the ranks near the ideal: none, if whole items do; else those too heavy for any rank,
in equal parts; else also those that no rank has room for (reference/splitting.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_costs, checked_integers, checked_num_ranks
from motet.balance.fragments import MILLION, Overhead, Split, fragment_costs
from motet.balance.joint import assign_jointly
from motet.balance.placement import assign
from motet.balance.scoring import scored
from motet.core.arrays import Int32Array, Int64Array
from motet.core.assignment import max_sum
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX

FIRST_RELAXATION = 5_000
"""Millionths of the ideal: by how much the target is relaxed, doubled each time, where it is out of reach."""

NUM_REFINEMENTS = 3
"""How often the gap between a limit that was too low and one that was not is halved."""


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
    """Cut as few items as bring the largest load, summed over phases, to at most `target` times the ideal.

    The ideal is the sum of the costs over num_ranks, without overhead. Where the target is out of reach, the result is
    the best that was found, never above the placement of whole items.

    costs: int [num_items], or [num_items, num_phases] in one unit; a fragment then has the same share of every phase.
    divisible: bool [num_items], whether an item can be cut (anywhere); or int [num_items], >= 1, the equal units
        (tokens, frames) between which it can; None: all anywhere.
    max_parts: the most fragments of an item (the largest context-parallel group); None: num_ranks.
    target: kept in millionths; with one phase and no overhead every target is reached that whole units allow.

    Raises ArgumentError for bad costs and counts, and where costs with all possible overheads do not fit int64.
    O(num_fragments * num_ranks * num_phases) for each limit that is tried: one, or a few where the target is too low.
    """
    problem = _checked_problem(costs, num_ranks, overhead, divisible, max_parts, target, backend)
    best: _Candidate | None = None
    for candidate in _fewest_cuts_first(problem):
        if best is None or candidate.max_sum < best.max_sum:
            best = candidate
        if best.max_sum <= problem.allowed:
            break
    assert best is not None
    return _result(problem, best)


@dataclass(frozen=True, eq=False)
class _Problem:
    """What `split` was given, clean: costs and overheads int64 [num_items, num_phases], units and parts [num_items]."""

    costs: Int64Array
    overheads: Int64Array
    units: Int64Array
    parts: Int64Array
    num_ranks: int
    target: int
    one_phase: bool
    backend: Backend

    @cached_property
    def totals(self) -> list[int]:
        return [int(total) for total in self.costs.sum(axis=0)]

    @property
    def allowed(self) -> int:
        """What the largest loads may add up to: the target, or what it rounds up to in whole units of cost."""
        target = sum(self.totals) * self.target // (self.num_ranks * MILLION)
        rounded: int = sum(self.limits(0).tolist())
        return max(target, rounded)

    def limits(self, relaxation: int, equal_quarters: int = 4) -> Int64Array:
        """The load of a rank in each phase: its mean, and a part of what the target leaves beyond the ideal.

        relaxation: millionths of the ideal, beyond the target.
        equal_quarters: how much of the slack goes to the phases in equal parts; the rest goes in proportion to their
            costs. Equal parts need the fewest cuts, as small phases then have wide limits; but what overhead adds is
            in proportion to the costs, and may exceed the equal part of a large phase.
        """
        num_phases = max(sum(total > 0 for total in self.totals), 1)
        scale = 4 * num_phases * MILLION
        slack = self.target - MILLION + relaxation
        limits = self.unavoidable.copy()
        for phase, total in enumerate(self.totals):
            parts = equal_quarters * sum(self.totals) + (4 - equal_quarters) * num_phases * total
            beyond = (total * scale + slack * parts) // (self.num_ranks * scale)
            limits[phase] = max(int(limits[phase]), -(-total // self.num_ranks), min(total, beyond))
        return limits

    @cached_property
    def unavoidable(self) -> Int64Array:
        """What some rank has in each phase, into however many parts the items are cut, int64 [num_phases]."""
        least = np.zeros(self.costs.shape[1], dtype=np.int64)
        heaviest = np.flatnonzero((self.costs > self.costs.sum(axis=0) // self.num_ranks).any(axis=1))
        for item in heaviest.tolist():
            least = np.maximum(least, np.minimum(self.costs[item], self.heaviest_part(item, int(self.parts[item]))))
        return least

    def heaviest_part(self, item: int, num_parts: int) -> Int64Array:
        """The cost of the heaviest of equal parts of an item, with overhead, int64 [num_phases]."""
        most_units = -(-int(self.units[item]) // num_parts)
        heaviest = [-(-cost * most_units // int(self.units[item])) for cost in self.costs[item].tolist()]
        with_overhead: Int64Array = heaviest + self.overheads[item] * (num_parts > 1)
        return with_overhead


@dataclass(frozen=True, eq=False)
class _Candidate:
    """Fragments, as the fields of Split say, their ranks, and the sum over phases of the largest load."""

    item: Int64Array
    begin: Int64Array
    end: Int64Array
    costs: Int64Array
    ranks: Int32Array
    loads: Int64Array

    @property
    def max_sum(self) -> int:
        return max_sum(self.loads)


def _fewest_cuts_first(problem: _Problem) -> Iterator[_Candidate]:
    """Placements to choose from; the first that reaches the target will do.

    Whole items come first unless the mean or the longest item alone is beyond the target; then last, for comparison.
    """
    means = -(-problem.costs.sum(axis=0) // problem.num_ranks)
    longest = problem.costs.max(axis=0, initial=0)
    hopeless = sum(np.maximum(means, longest).tolist()) > problem.allowed
    whole = np.ones(len(problem.costs), dtype=np.int64)
    if not hopeless:
        yield _equal_parts(problem, whole)
    limits = problem.limits(0)
    num_parts = _parts_under(problem, limits)
    if (num_parts > 1).any():
        candidate = _equal_parts(problem, num_parts)
        if _on_different_ranks(candidate):
            yield candidate
    yield from _poured(problem)
    if hopeless:
        yield _equal_parts(problem, whole)


def _parts_under(problem: _Problem, limits: Int64Array) -> Int64Array:
    """Into how many equal parts each item must be cut to be under the limits; 1 for those that cannot be."""
    num_parts = np.ones(len(problem.costs), dtype=np.int64)
    for item in np.flatnonzero((problem.costs > limits).any(axis=1)).tolist():
        for count in range(2, int(problem.parts[item]) + 1):
            if (problem.heaviest_part(item, count) <= limits).all():
                num_parts[item] = count
                break
    return num_parts


def _equal_parts(problem: _Problem, num_parts: Int64Array) -> _Candidate:
    """Cut into the given numbers of parts and placed by the balancers of whole items."""
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
    places = candidate.item * len(candidate.loads) + candidate.ranks
    return len(np.unique(places)) == len(places)


def _poured(problem: _Problem) -> Iterator[_Candidate]:
    """The placement under the target's limits or, where there is none, ever better ones under relaxed limits."""
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


def _pour(problem: _Problem, relaxation: int) -> _Candidate | None:
    """The placement under these limits; None where some items found no room."""
    for equal_quarters in (4,) if problem.one_phase else (4, 2, 1):
        item, begin, end, ranks = algorithms(problem.backend).pour(
            problem.costs,
            problem.overheads,
            problem.units,
            problem.parts,
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
    """When the items of each phase are placed, and which phase an item belongs to; both int64 [num_items].

    Phases with cost in fewer items go first, and an item belongs to the first of them that it has cost in. So items
    with cost in the commonest phase only come last, and fill what the others have left there.
    """
    rarest_first = np.argsort((costs > 0).sum(axis=0), kind="stable")
    turns = (costs[:, rarest_first] > 0).argmax(axis=1)
    return turns, rarest_first[turns]


def _result(problem: _Problem, chosen: _Candidate) -> Split:
    num_parts = np.bincount(chosen.item, minlength=len(problem.costs))
    part = np.arange(len(chosen.item)) - (np.cumsum(num_parts) - num_parts)[chosen.item]
    costs = chosen.costs[:, 0] if problem.one_phase else chosen.costs
    assignment = scored(chosen.ranks, costs, problem.num_ranks)
    return Split(chosen.item, part, num_parts[chosen.item], chosen.begin, chosen.end, problem.units, costs, assignment)


def _checked_problem(
    costs: ArrayLike,
    num_ranks: int,
    overhead: Overhead,
    divisible: ArrayLike | None,
    max_parts: int | None,
    target: float,
    backend: Backend,
) -> _Problem:
    checked = checked_costs(costs)
    one_phase = checked.ndim == 1
    rows = checked[:, None] if one_phase else checked
    num_ranks = checked_num_ranks(num_ranks)
    if max_parts is not None and max_parts < 1:
        raise ArgumentError(f"max_parts is {max_parts}; it must be at least 1.")
    if not isfinite(target) or not 1 <= target <= 1000:
        raise ArgumentError(f"target is {target}; it must be from 1 to 1000 times the ideal.")
    units = _checked_units(divisible, rows)
    parts = np.minimum(units, min(num_ranks, max_parts or num_ranks))
    overheads = overhead.of(rows)
    _check_fits(rows, overheads * (parts > 1)[:, None], parts)
    return _Problem(rows, overheads, units, parts, num_ranks, round(target * MILLION), one_phase, backend)


def _checked_units(divisible: ArrayLike | None, costs: Int64Array) -> Int64Array:
    """The units of each item, int64 [num_items]: the cost of its heaviest phase for those that are cut anywhere."""
    anywhere: Int64Array = np.maximum(costs.max(axis=1, initial=0), 1)
    if divisible is None:
        return anywhere
    given = np.asarray(divisible)
    if given.shape != (len(costs),):
        raise ArgumentError(f"divisible has shape {given.shape}; it must be one value for each of {len(costs)} items.")
    if given.dtype == np.bool_:
        anywhere[~given] = 1
        return anywhere
    units = checked_integers(given, "divisible")
    if (units == 0).any():
        item = int((units == 0).argmax())
        raise ArgumentError(f"divisible[{item}] is 0; an item has at least 1 unit (it then stays whole).")
    return units


def _check_fits(costs: Int64Array, overheads: Int64Array, parts: Int64Array) -> None:
    """Raises ArgumentError where a phase's costs, with the overhead of all parts, may not fit int64."""
    estimate = (costs.astype(float) + overheads.astype(float) * parts[:, None]).sum()
    if estimate < INT64_MAX / 2:
        return
    most_parts = [int(count) for count in parts]
    for phase in range(costs.shape[1]):
        rows = zip(costs[:, phase].tolist(), overheads[:, phase].tolist(), most_parts, strict=True)
        exact = sum(cost + overhead * count for cost, overhead, count in rows)
        if exact > INT64_MAX:
            raise ArgumentError(
                f"costs add up to {exact} in phase {phase} with the overhead of all parts, past 2^63 - 1."
            )
