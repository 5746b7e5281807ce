"""The fastest choice of one row for each unit, by branch and bound (`allocate.py`).

For every number of examples that are taken at a time, units are chosen one after the other, a chunk of combinations at
once, and what cannot win is dropped. It cannot if, for the units still to be chosen, their fastest pass and the slowest
stage that the ranks left allow would already be too long: of these units together, the fewest ranks with no stage
slower than t is a step function of t, which sorting the stages gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.planner.disaggregated.allocation import Allocation, Limits, Share, UnitOptions

_CHUNK = 1 << 16
"""Combinations that are looked at at once: few enough that the first bring a bound soon, many enough for numpy."""


def fastest(
    units: Sequence[UnitOptions],
    limits: Limits,
    allowed: Sequence[BoolArray],
    most_ranks: Sequence[int] | None = None,
) -> Allocation | None:
    """Of the allowed rows of each unit, on no more than most_ranks ranks each."""
    caps = most_ranks or [limits.num_ranks] * len(units)
    tables = [_Table.of(unit, mask) for unit, mask in zip(units, allowed)]
    fewest = sorted(range(len(units)), key=lambda unit: len(tables[unit].row))
    searches = []
    for taken in _taken(limits):
        rows: dict[int, _Rows] = {}
        for unit in fewest:
            rows[unit] = tables[unit].at(taken, limits, caps[unit])
            if not len(rows[unit].row):
                break
        else:
            searches.append(_Search(taken, limits, [rows[unit] for unit in range(len(units))]))
    best_s, best = np.inf, None
    for search in sorted(searches, key=lambda search: search.bound_s):
        found = search.below(best_s)
        if found is not None:
            best_s, best = found.time_s, (search, found)
    return None if best is None else best[0].allocation(units, best[1])


def _taken(limits: Limits) -> Sequence[int]:
    """How many examples may be taken at a time: divisors of the batch."""
    sizes = np.arange(1, limits.batch_size + 1) if not limits.num_taken else np.array([limits.num_taken])
    divisors: list[int] = sizes[limits.batch_size % sizes == 0].tolist()
    return divisors


class _Rows(NamedTuple):
    """Ways to run one unit at a number of examples, by slowest stage; room: microbatches in flight that fit."""

    side: int
    row: Int64Array
    ranks: Int64Array
    depth: Int64Array
    room: Float64Array
    pass_s: Float64Array
    stage_s: Float64Array
    once_s: Float64Array

    def take(self, kept: BoolArray | Int64Array) -> _Rows:
        """Those rows alone."""
        return _Rows(
            self.side,
            self.row[kept],
            self.ranks[kept],
            self.depth[kept],
            self.room[kept],
            self.pass_s[kept],
            self.stage_s[kept],
            self.once_s[kept],
        )


class _Table(NamedTuple):
    """The allowed rows of a unit, by slowest stage."""

    unit: UnitOptions
    row: Int64Array

    @classmethod
    def of(cls, unit: UnitOptions, allowed: BoolArray) -> _Table:
        row = np.flatnonzero(allowed)
        return cls(unit, row[np.argsort(unit.stage_s[row], kind="stable")])

    def at(self, taken: int, limits: Limits, most_ranks: int) -> _Rows:
        """Those that share out `taken` examples, on no more than most_ranks, in memory with at least one in flight."""
        unit = self.unit
        row = self.row[taken % unit.num_examples[self.row] == 0]
        dp = taken // unit.num_examples[row]
        ranks = unit.tp[row] * unit.pp[row] * dp
        row, dp, ranks = (column[ranks <= most_ranks] for column in (row, dp, ranks))
        free = limits.capacity_bytes - unit.fixed_bytes[row] - unit.sharded_bytes[row] / dp
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(unit.kept_bytes[row] > 0, np.floor(free / unit.kept_bytes[row]), np.inf)
        depth = unit.pp[row]
        fits = (free >= 0) & (room >= np.minimum(depth, limits.batch_size // taken))
        row, ranks, room, depth = (column[fits] for column in (row, ranks, room, depth))
        return _Rows(unit.side, row, ranks, depth, room, unit.pass_s[row], unit.stage_s[row], unit.once_s[row])


class _Partial(NamedTuple):
    """Choices of a row for some units, a combination each. rows: [num_units chosen]; pass_s: by side, -1, 0 and 1.

    depth: stages from the first of the sides chosen so far to the end, on the longest way.
    """

    rows: tuple[Int64Array, ...]
    ranks: Int64Array
    depth: Int64Array
    pass_s: tuple[Float64Array, Float64Array, Float64Array]
    stage_s: Float64Array
    once_s: Float64Array

    def take(self, kept: BoolArray | Int64Array | slice) -> _Partial:
        """Those choices alone."""
        return _Partial(
            tuple(row[kept] for row in self.rows),
            self.ranks[kept],
            self.depth[kept],
            (self.pass_s[0][kept], self.pass_s[1][kept], self.pass_s[2][kept]),
            self.stage_s[kept],
            self.once_s[kept],
        )


_NOTHING = _Partial((), np.zeros(1, np.int64), np.zeros(1, np.int64), (np.zeros(1),) * 3, np.zeros(1), np.zeros(1))


class _Rest:
    """What units not yet chosen take at least; the slowest of their stages, by how many ranks they may have."""

    def __init__(self, units: Sequence[_Rows]) -> None:
        self.pass_s = [
            max((unit.pass_s.min() for unit in units if unit.side == side), default=0.0) for side in (-1, 0, 1)
        ]
        self.once_s = max((unit.once_s.min() for unit in units), default=0.0)
        self.stage_s = np.unique(np.concatenate([unit.stage_s for unit in units] or [np.zeros(1)]))
        fewest = np.zeros(len(self.stage_s))
        for unit in units:
            ranks = np.concatenate([[np.inf], np.minimum.accumulate(unit.ranks)])
            fewest += ranks[np.searchsorted(unit.stage_s, self.stage_s, side="right")]
        self.stage_s = np.append(self.stage_s, np.inf)
        self.fewest = fewest

    def slowest_s(self, num_ranks: Int64Array) -> Float64Array:
        """Of the units on so many ranks together; inf where they cannot be."""
        return self.stage_s[np.searchsorted(-self.fewest, -num_ranks)]


class _Found(NamedTuple):
    time_s: float
    rows: tuple[int, ...]


class _Search:
    """All combinations in which `taken` examples are taken at a time. Units are chosen from the last side to the first,
    as what is in flight in a unit hangs on the stages after it.
    """

    def __init__(self, taken: int, limits: Limits, rows: Sequence[_Rows]) -> None:
        self.taken, self.limits = taken, limits
        self.num_microbatches = limits.batch_size // taken
        self.order = sorted(range(len(rows)), key=lambda unit: -rows[unit].side)
        self.rows = [rows[unit] for unit in self.order]
        self.bound_s = float(self._bound(_NOTHING, _Rest(self.rows))[0])

    def below(self, best_s: float) -> _Found | None:
        """The fastest combination that takes less than best_s."""
        if self.bound_s >= best_s:
            return None
        units = []
        for place, unit in enumerate(self.rows):
            alone = self._join(_NOTHING, unit)
            others = _Rest([*self.rows[:place], *self.rows[place + 1 :]])
            units.append(unit.take(self._bound(alone, others) < best_s))
        if not all(len(unit.row) for unit in units):
            return None
        rests = [_Rest(units[place:]) for place in range(len(units) + 1)]
        return self._extend(_NOTHING, units, rests, best_s)

    def allocation(self, units: Sequence[UnitOptions], found: _Found) -> Allocation:
        """With every unit on the fewest ranks that are as fast."""
        chosen = list(found.rows)
        changed = True
        while changed:
            changed = False
            for place in range(len(chosen)):
                joined = self._joined([None if other == place else row for other, row in enumerate(chosen)])
                joined = joined.take(self._bound(joined, _Rest([])) <= found.time_s)
                fewest = joined.rows[place][np.lexsort((joined.rows[place], joined.ranks))[0]]
                changed |= int(fewest) != chosen[place]
                chosen[place] = int(fewest)
        whole = self._joined(chosen)
        shares = {}
        for unit, row in zip((units[number] for number in self.order), chosen):
            size, tp, pp = (int(column[row]) for column in (unit.num_examples, unit.tp, unit.pp))
            shares[unit.name] = Share(unit.name, row, size, tp, self.taken // size, pp)
        return Allocation(
            tuple(shares[unit.name] for unit in units),
            self.num_microbatches,
            sum(float(side[0]) for side in whole.pass_s) / self.limits.num_chunks,
            float(whole.stage_s[0]) * (self.num_microbatches - 1),
            float(whole.once_s[0]),
        )

    def _extend(self, chosen: _Partial, units: Sequence[_Rows], rests: Sequence[_Rest], best_s: float) -> _Found | None:
        """The fastest below best_s of what the combinations of the first units can become."""
        place = len(chosen.rows)
        bounds = self._bound(chosen, rests[place])
        order = np.argsort(bounds, kind="stable")
        if place == len(units):
            first = int(order[0])
            return _Found(float(bounds[first]), tuple(int(row[first]) for row in chosen.rows))
        best, start, size = None, 0, 16
        while start < len(order) and bounds[order[start]] < best_s:
            joined = self._join(chosen.take(order[start : start + size]), units[place])
            joined = joined.take(self._bound(joined, rests[place + 1]) < best_s)
            found = self._extend(joined, units, rests, best_s) if len(joined.ranks) else None
            if found is not None:
                best, best_s = found, found.time_s
            start += size
            size = min(2 * size, max(_CHUNK // len(units[place].row), 1))
        return best

    def _joined(self, chosen: Sequence[int | None]) -> _Partial:
        """All combinations of the rows named; None: of every row of the unit."""
        joined = _NOTHING
        for unit, row in zip(self.rows, chosen):
            joined = self._join(joined, unit if row is None else unit.take(unit.row == row))
        return joined

    def _join(self, chosen: _Partial, unit: _Rows) -> _Partial:
        """Every combination with every row of one more unit, but for those that exceed ranks or memory."""
        left, right = np.divmod(np.arange(len(chosen.ranks) * len(unit.row)), len(unit.row))
        ranks = chosen.ranks[left] + unit.ranks[right]
        to_end = unit.depth[right] + (chosen.depth[left] if unit.side < 1 else 0)
        in_flight = np.minimum(to_end, self.num_microbatches)
        fits = np.flatnonzero((ranks <= self.limits.num_ranks) & (in_flight <= unit.room[right]))
        left, right, to_end = left[fits], right[fits], to_end[fits]
        depth = (chosen.depth[left], to_end, np.maximum(chosen.depth[left], to_end))[unit.side + 1]
        pass_s = [column[left] for column in chosen.pass_s]
        pass_s[unit.side + 1] = np.maximum(pass_s[unit.side + 1], unit.pass_s[right])
        return _Partial(
            (*(row[left] for row in chosen.rows), unit.row[right]),
            ranks[fits],
            depth,
            (pass_s[0], pass_s[1], pass_s[2]),
            np.maximum(chosen.stage_s[left], unit.stage_s[right]),
            np.maximum(chosen.once_s[left], unit.once_s[right]),
        )

    def _bound(self, chosen: _Partial, rest: _Rest) -> Float64Array:
        """What a step takes at least, with the best of the other units."""
        stage_s = np.maximum(chosen.stage_s, rest.slowest_s(self.limits.num_ranks - chosen.ranks))
        steady_s = (
            stage_s * (self.num_microbatches - 1)
            if self.num_microbatches > 1
            else np.where(np.isinf(stage_s), np.inf, 0.0)
        )
        warmup_s = sum(np.maximum(own, other) for own, other in zip(chosen.pass_s, rest.pass_s))
        return warmup_s / self.limits.num_chunks + steady_s + np.maximum(chosen.once_s, rest.once_s)
