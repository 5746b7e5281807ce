"""The fastest choice of one row for each unit, by branch and bound (`allocate.py`).

For every global microbatch size:

1. A *combination* has a row for some of the units. Units are added one after the other, to many combinations at once.
2. A combination is dropped if its bound is not below the best step so far. The bound is a step in which every remaining
   unit has its fastest pass, and no stage is slower than the ranks that are left allow.
3. For that, the fewest ranks on which no stage of the remaining units is slower than t is a step function of t, which
   sorting their stages gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.planner.degrees import divisors
from motet.planner.disaggregated.allocation import Allocation, Limits, Share, UnitOptions

_CHUNK = 1 << 16
"""The most combinations that are extended at once: so few that the first ones soon bring a step to compare with, so
many that numpy is fast."""


def fastest(
    units: Sequence[UnitOptions],
    limits: Limits,
    allowed: Sequence[BoolArray],
    most_ranks: Sequence[int] | None = None,
) -> Allocation | None:
    """The fastest allocation, or None.

    allowed: per unit, a mask of its rows that may be chosen. most_ranks: per unit, the most ranks that it may have.
    """
    most_ranks = most_ranks or [limits.num_ranks] * len(units)
    tables = [_Table.of(unit, mask) for unit, mask in zip(units, allowed)]
    # Units with few rows come first: if one has no row that fits, the others need not be looked at.
    fewest_first = sorted(range(len(units)), key=lambda unit: len(tables[unit].row))
    searches = []
    for size in _global_microbatch_sizes(limits):
        rows: dict[int, _Rows] = {}
        for unit in fewest_first:
            rows[unit] = tables[unit].at(size, limits, most_ranks[unit])
            if not len(rows[unit].row):
                break
        else:
            searches.append(_Search(size, limits, [rows[unit] for unit in range(len(units))]))
    best_s, best = np.inf, None
    for search in sorted(searches, key=lambda search: search.bound_s):
        choice = search.below(best_s)
        if choice is not None:
            best_s, best = choice.time_s, (search, choice)
    return None if best is None else best[0].allocation(units, best[1])


def _global_microbatch_sizes(limits: Limits) -> Sequence[int]:
    """Divisors of the batch: all of them, or the one that is given."""
    fixed = limits.global_microbatch_size
    if fixed:
        return (fixed,) if limits.batch_size % fixed == 0 else ()
    return divisors(limits.batch_size)


class _Rows(NamedTuple):
    """The ways to run one unit at a global microbatch size that fit memory, ordered by slowest stage.

    row: index in `UnitOptions`. dp: replicas. depth: stages. max_in_flight: how many microbatches fit memory.
    """

    side: int
    row: Int64Array
    dp: Int64Array
    ranks: Int64Array
    depth: Int64Array
    max_in_flight: Float64Array
    pass_s: Float64Array
    stage_s: Float64Array
    once_s: Float64Array

    def take(self, kept: BoolArray | Int64Array) -> _Rows:
        """The rows of a mask or of indices."""
        return _Rows(
            self.side,
            self.row[kept],
            self.dp[kept],
            self.ranks[kept],
            self.depth[kept],
            self.max_in_flight[kept],
            self.pass_s[kept],
            self.stage_s[kept],
            self.once_s[kept],
        )


class _Table(NamedTuple):
    """The allowed rows of a unit, ordered by slowest stage."""

    unit: UnitOptions
    row: Int64Array

    @classmethod
    def of(cls, unit: UnitOptions, allowed: BoolArray) -> _Table:
        row = np.flatnonzero(allowed)
        return cls(unit, row[np.argsort(unit.stage_s[row], kind="stable")])

    def at(self, size: int, limits: Limits, most_ranks: int) -> _Rows:
        """The rows whose replicas share `size` examples, on at most most_ranks ranks, and that fit memory with the
        microbatches that the unit's own stages keep in flight."""
        unit = self.unit
        row, dp = self._shared(size, limits)
        ranks = unit.tp[row] * unit.pp[row] * dp
        row, dp, ranks = (column[ranks <= most_ranks] for column in (row, dp, ranks))
        free_bytes = limits.capacity_bytes - unit.fixed_bytes[row] - unit.sharded_bytes[row] / dp
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(unit.kept_bytes[row] > 0, np.floor(free_bytes / unit.kept_bytes[row]), np.inf)
        depth = unit.pp[row]
        fits = (free_bytes >= 0) & (most >= np.minimum(depth, limits.batch_size // size))
        row, dp, ranks, depth = (column[fits] for column in (row, dp, ranks, depth))
        most = most[fits]
        return _Rows(unit.side, row, dp, ranks, depth, most, unit.pass_s[row], unit.stage_s[row], unit.once_s[row])

    def _shared(self, size: int, limits: Limits) -> tuple[Int64Array, Int64Array]:
        """The rows whose replicas share `size` examples, and how many replicas that takes: evenly, or as many replicas
        as are asked for, whose rows then are those of the fewest examples that suffice for each."""
        num_examples = self.unit.num_examples[self.row]
        if self.unit.name not in limits.replicas:
            row = self.row[size % num_examples == 0]
            return row, size // self.unit.num_examples[row]
        replicas = limits.replicas[self.unit.name]
        enough = num_examples[num_examples * replicas >= size]
        fewest = min(enough.tolist(), default=0)
        is_even = fewest * replicas == size
        row = self.row[num_examples == fewest] if is_even or self.unit.side else self.row[:0]
        return row, np.full(len(row), replicas)


class _Combinations(NamedTuple):
    """Combinations of rows for the units that have been added. All columns are [num_combinations].

    rows:   per added unit, its row. ranks: of all added units.
    depth:  stages on the longest way from the earliest side that has been added to the end.
    pass_s: of the slowest unit of each side: -1, 0 and 1.
    """

    rows: tuple[Int64Array, ...]
    ranks: Int64Array
    depth: Int64Array
    pass_s: tuple[Float64Array, Float64Array, Float64Array]
    stage_s: Float64Array
    once_s: Float64Array

    def take(self, kept: BoolArray | Int64Array | slice) -> _Combinations:
        """The combinations of a mask, of indices or of a slice."""
        return _Combinations(
            tuple(row[kept] for row in self.rows),
            self.ranks[kept],
            self.depth[kept],
            (self.pass_s[0][kept], self.pass_s[1][kept], self.pass_s[2][kept]),
            self.stage_s[kept],
            self.once_s[kept],
        )


_NO_UNITS = _Combinations(
    (), np.zeros(1, np.int64), np.zeros(1, np.int64), (np.zeros(1),) * 3, np.zeros(1), np.zeros(1)
)


class _Remaining:
    """The least that the units take that are still to be added.

    pass_s: per side, -1, 0 and 1. fewest_ranks: [num_stage_s], on which no stage is slower than stage_s.
    """

    def __init__(self, units: Sequence[_Rows]) -> None:
        self.pass_s = [
            max((unit.pass_s.min() for unit in units if unit.side == side), default=0.0) for side in (-1, 0, 1)
        ]
        self.once_s = max((unit.once_s.min() for unit in units), default=0.0)
        self.stage_s = np.unique(np.concatenate([unit.stage_s for unit in units] or [np.zeros(1)]))
        self.fewest_ranks = np.zeros(len(self.stage_s))
        for unit in units:
            ranks = np.concatenate([[np.inf], np.minimum.accumulate(unit.ranks)])
            self.fewest_ranks += ranks[np.searchsorted(unit.stage_s, self.stage_s, side="right")]
        self.stage_s = np.append(self.stage_s, np.inf)

    def slowest_s(self, num_ranks: Int64Array) -> Float64Array:
        """The least time of the slowest stage, if the units have so many ranks together; inf if these are too few."""
        return self.stage_s[np.searchsorted(-self.fewest_ranks, -num_ranks)]


class _Choice(NamedTuple):
    """A row for every unit, in the order in which they are added."""

    time_s: float
    rows: tuple[int, ...]


class _Search:
    """The search at one global microbatch size.

    Units are added from the last side to the first, because what a unit has in flight depends on the stages after it.
    """

    def __init__(self, size: int, limits: Limits, rows: Sequence[_Rows]) -> None:
        self.size, self.limits = size, limits
        self.num_microbatches = limits.batch_size // size
        self.order = sorted(range(len(rows)), key=lambda unit: -rows[unit].side)
        self.rows = [rows[unit] for unit in self.order]
        self.bound_s = float(self._bound(_NO_UNITS, _Remaining(self.rows))[0])

    def below(self, best_s: float) -> _Choice | None:
        """The fastest choice that takes less than best_s; None if there is none."""
        if self.bound_s >= best_s:
            return None
        # 1. The rows of each unit that could be in such a choice.
        units = []
        for index, unit in enumerate(self.rows):
            alone = self._join(_NO_UNITS, unit)
            others = _Remaining([*self.rows[:index], *self.rows[index + 1 :]])
            units.append(unit.take(self._bound(alone, others) < best_s))
        if not all(len(unit.row) for unit in units):
            return None
        # 2. Their combinations.
        remaining = [_Remaining(units[index:]) for index in range(len(units) + 1)]
        return self._extend(_NO_UNITS, units, remaining, best_s)

    def allocation(self, units: Sequence[UnitOptions], choice: _Choice) -> Allocation:
        """The allocation of a choice, with every unit on the fewest ranks that are as fast."""
        rows = self._on_fewest_ranks(choice)
        whole = self._joined(rows)
        shares = {}
        for unit, own, row in zip((units[number] for number in self.order), self.rows, rows):
            num_examples, tp, pp = (int(column[row]) for column in (unit.num_examples, unit.tp, unit.pp))
            dp = int(own.dp[own.row == row][0])
            filled = self.size / (dp * num_examples)
            shares[unit.name] = Share(unit.name, row, num_examples, tp, dp, pp, filled)
        return Allocation(
            tuple(shares[unit.name] for unit in units),
            self.num_microbatches,
            sum(float(side[0]) for side in whole.pass_s) / self.limits.num_chunks,
            float(whole.stage_s[0]) * (self.num_microbatches - 1),
            float(whole.once_s[0]),
        )

    def _on_fewest_ranks(self, choice: _Choice) -> list[int]:
        """Rows with which the step takes as long, and no unit alone can do with fewer ranks."""
        rows = list(choice.rows)
        changed = True
        while changed:
            changed = False
            for index in range(len(rows)):
                others = [None if other == index else row for other, row in enumerate(rows)]
                joined = self._joined(others)
                joined = joined.take(self._bound(joined, _Remaining([])) <= choice.time_s)
                fewest = int(joined.rows[index][np.lexsort((joined.rows[index], joined.ranks))[0]])
                changed |= fewest != rows[index]
                rows[index] = fewest
        return rows

    def _extend(
        self, chosen: _Combinations, units: Sequence[_Rows], remaining: Sequence[_Remaining], best_s: float
    ) -> _Choice | None:
        """The fastest choice below best_s that combinations of the first units can become: depth first, the least
        bounds first.

        remaining: by number of units added, those that are not.
        """
        num_added = len(chosen.rows)
        bounds = self._bound(chosen, remaining[num_added])
        order = np.argsort(bounds, kind="stable")
        if num_added == len(units):
            first = int(order[0])
            return _Choice(float(bounds[first]), tuple(int(row[first]) for row in chosen.rows))
        best, start, count = None, 0, 16
        while start < len(order) and bounds[order[start]] < best_s:
            joined = self._join(chosen.take(order[start : start + count]), units[num_added])
            joined = joined.take(self._bound(joined, remaining[num_added + 1]) < best_s)
            choice = self._extend(joined, units, remaining, best_s) if len(joined.ranks) else None
            if choice is not None:
                best, best_s = choice, choice.time_s
            start += count
            count = min(2 * count, max(_CHUNK // len(units[num_added].row), 1))
        return best

    def _joined(self, chosen: Sequence[int | None]) -> _Combinations:
        """All combinations of these rows, one a unit; None stands for every row of the unit."""
        joined = _NO_UNITS
        for unit, row in zip(self.rows, chosen):
            joined = self._join(joined, unit if row is None else unit.take(unit.row == row))
        return joined

    def _join(self, chosen: _Combinations, unit: _Rows) -> _Combinations:
        """Every combination with every row of one more unit, without those that exceed ranks or memory."""
        # 1. The pairs that fit.
        left, right = np.divmod(np.arange(len(chosen.ranks) * len(unit.row)), len(unit.row))
        ranks = chosen.ranks[left] + unit.ranks[right]
        to_end = unit.depth[right] + (chosen.depth[left] if unit.side < 1 else 0)
        in_flight = np.minimum(to_end, self.num_microbatches)
        fits = np.flatnonzero((ranks <= self.limits.num_ranks) & (in_flight <= unit.max_in_flight[right]))
        left, right, to_end = left[fits], right[fits], to_end[fits]
        # 2. Their columns.
        depth = (chosen.depth[left], to_end, np.maximum(chosen.depth[left], to_end))[unit.side + 1]
        pass_s = [column[left] for column in chosen.pass_s]
        pass_s[unit.side + 1] = np.maximum(pass_s[unit.side + 1], unit.pass_s[right])
        return _Combinations(
            (*(row[left] for row in chosen.rows), unit.row[right]),
            ranks[fits],
            depth,
            (pass_s[0], pass_s[1], pass_s[2]),
            np.maximum(chosen.stage_s[left], unit.stage_s[right]),
            np.maximum(chosen.once_s[left], unit.once_s[right]),
        )

    def _bound(self, chosen: _Combinations, remaining: _Remaining) -> Float64Array:
        """What a step takes at least with each combination, whatever rows the remaining units have."""
        stage_s = np.maximum(chosen.stage_s, remaining.slowest_s(self.limits.num_ranks - chosen.ranks))
        steady_s = (
            stage_s * (self.num_microbatches - 1)
            if self.num_microbatches > 1
            else np.where(np.isinf(stage_s), np.inf, 0.0)
        )
        warmup_s = sum(np.maximum(own_s, other_s) for own_s, other_s in zip(chosen.pass_s, remaining.pass_s))
        return warmup_s / self.limits.num_chunks + steady_s + np.maximum(chosen.once_s, remaining.once_s)
