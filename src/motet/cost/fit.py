"""Seconds as a function of work, from measured points: a fit with few coefficients, and piecewise-linear surfaces.

Balancing uses the fit: constant + linear * tokens + quadratic * tokens^2 (OrchMLLM equation 2, with measured
coefficients). Prediction uses the surface: linear interpolation of profiled times (MMScale/DistTrain section 3) in two
variables, rows and keys that a row attends to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import ArgumentError
from motet.core.exchange import NS_PER_S

_SLOWER_PAIRS = 2
"""An operation of attention takes at most so many times as long as one of a product: it reaches half of the peak, where
products reach more (`cost/analytic.py`), and its softmax is not counted."""
_SAME_KEYS_RATIO = 1.02
_SAME_ROWS_RATIO = 1.2
"""Points whose numbers of rows differ by at most this ratio are averaged."""


@dataclass(frozen=True)
class Curve:
    """Nanoseconds: constant_ns + linear_ns * amount + quadratic_ns * square. No coefficient is negative."""

    constant_ns: float
    linear_ns: float
    quadratic_ns: float = 0.0

    def seconds(self, amount: ArrayLike, square: ArrayLike = 0.0) -> Float64Array:
        """Seconds, float64 [n]. amount, square: float64 [n], e.g. sums of lengths and of squared lengths."""
        total = self.constant_ns + self.linear_ns * np.asarray(amount) + self.quadratic_ns * np.asarray(square)
        return np.asarray(total / NS_PER_S, dtype=np.float64)


def fit_curve(seconds: ArrayLike, amount: ArrayLike, square: ArrayLike | None = None) -> Curve:
    """The non-negative coefficients with the least sum of squared relative errors: all points weigh the same.

    seconds: float64 [n], measured; points of 0 seconds are left out. amount, square: float64 [n].
    Raises ArgumentError for columns of unequal length. O(n).
    """
    # Imported here: the import takes longer than many a search for a plan, and the analytic model needs no fit.
    from scipy.optimize import nnls

    measured = np.asarray(seconds, dtype=np.float64)
    columns = [np.ones(len(measured)), np.asarray(amount, dtype=np.float64)]
    if square is not None:
        columns.append(np.asarray(square, dtype=np.float64))
    if any(len(column) != len(measured) for column in columns):
        raise ArgumentError(f"fit: {len(measured)} seconds, but {[len(column) for column in columns[1:]]} of work.")
    known = measured > 0
    if not known.any():
        return Curve(0.0, 0.0)
    matrix = np.stack(columns, axis=1)[known] / measured[known, None]
    # Scaled to one order of magnitude: squares of long lengths are 10^8 times as large as the constant's column.
    scale = np.maximum(matrix.max(axis=0), np.finfo(np.float64).tiny)
    coefficients = nnls(matrix / scale, np.ones(len(matrix)))[0] / scale * NS_PER_S
    return Curve(*coefficients.tolist())


@dataclass(frozen=True)
class RelativeError:
    """The errors |predicted - measured| of several points.

    mean, worst: of |predicted - measured| / measured over the points.
    overall:     sum of |predicted - measured| / sum of measured, in which tiny points weigh little.
    num_points:  the number of compared points; without any, the errors are 0.
    """

    mean: float
    worst: float
    overall: float
    num_points: int


def relative_error(predicted: ArrayLike, measured: ArrayLike) -> RelativeError:
    """Compare float64 [n] with float64 [n]. Points of 0 measured seconds are left out."""
    true = np.asarray(measured, dtype=np.float64)
    known = true > 0
    if not known.any():
        return RelativeError(0.0, 0.0, 0.0, 0)
    difference = np.abs(np.asarray(predicted, dtype=np.float64) - true)[known]
    errors = difference / true[known]
    overall = float(difference.sum() / true.sum())
    return RelativeError(float(errors.mean()), float(errors.max()), overall, int(known.sum()))


class PassOperations(NamedTuple):
    """Operations of a layer in a pass: of a row, and of a pair of a query and a key."""

    row: float
    pair: float = 0.0


class Surface:
    """Seconds over rows and pairs, through all measured points. Points of about the same number of rows are averaged.

    1. Points of about equal pairs / rows make a line over rows, interpolated linearly. Below its first point it runs
       to its intercept, which is at least 0. Beyond its last point it has the slope of its last half.
    2. Between two lines, seconds at a number of rows are interpolated linearly in pairs / rows. Beyond the last line
       the last slope continues, unless it falls.
    3. Where operations are given, they bound what is beyond the points. A row beyond the last point of a line takes no
       longer than the mean row up to there. Beyond the last line, seconds grow no faster than operations do, those of
       pairs counted _SLOWER_PAIRS times.
    So at a given number of rows, seconds are piecewise linear in pairs. 0 rows take 0 s.
    """

    def __init__(
        self,
        rows: Sequence[float],
        pairs: Sequence[float],
        seconds: Sequence[float],
        operations: PassOperations | None = None,
    ) -> None:
        """rows, pairs, seconds: [num_points]. Raises ArgumentError if no point has any rows."""
        known = np.asarray(rows) > 0
        if not known.any():
            raise ArgumentError("a surface of seconds needs a point that has rows.")
        known_rows, measured = np.asarray(rows, dtype=np.float64)[known], np.asarray(seconds, dtype=np.float64)[known]
        lines = list(_about_equal(np.asarray(pairs, dtype=np.float64)[known] / known_rows))
        self._keys_per_row = np.array([keys for keys, _ in lines])
        self._lines = [_line(known_rows[points], measured[points]) for _, points in lines]
        self._operations = operations

    def __call__(self, rows: Float64Array, pairs: Float64Array) -> Float64Array:
        """rows, pairs: float64 [n] -> seconds, float64 [n]. O(n * lines)."""
        on_lines = np.stack([_along(line, rows, self._operations is not None) for line in self._lines])
        keys_per_row = pairs / np.maximum(rows, 1e-9)
        if len(on_lines) == 1:
            return np.where(rows > 0, on_lines[0], 0.0)
        low = np.clip(np.searchsorted(self._keys_per_row, keys_per_row) - 1, 0, len(on_lines) - 2)
        column = np.arange(len(rows))
        below, above = on_lines[low, column], on_lines[low + 1, column]
        share = (keys_per_row - self._keys_per_row[low]) / (self._keys_per_row[low + 1] - self._keys_per_row[low])
        rise = np.where(share > 1, np.maximum(above - below, 0), above - below)
        seconds = np.where(share > 1, above + (share - 1) * rise, below + share * rise)
        seconds = self._bounded(seconds, on_lines[-1], keys_per_row)
        return np.where(rows > 0, np.maximum(seconds, 0.0), 0.0)

    def _bounded(self, seconds: Float64Array, last_s: Float64Array, keys_per_row: Float64Array) -> Float64Array:
        """seconds: as extrapolated. last_s: on the last line. All are [n]."""
        if self._operations is None:
            return seconds
        row, pair = self._operations.row, _SLOWER_PAIRS * self._operations.pair
        last = float(self._keys_per_row[-1])
        most_s = last_s * (row + pair * keys_per_row) / (row + pair * last)
        return np.where(keys_per_row > last, np.minimum(seconds, most_s), seconds)


def _about_equal(keys_per_row: Float64Array) -> Iterator[tuple[float, Int64Array]]:
    """(mean, indices) of values that differ by at most _SAME_KEYS_RATIO, ascending.

    Items in segments attend to about as many rows whatever their length: noise between two would be an arbitrary slope.
    """
    order = np.argsort(keys_per_row, kind="stable")
    ascending, first = keys_per_row[order], 0
    while first < len(order):
        stop = int(np.searchsorted(ascending, ascending[first] * _SAME_KEYS_RATIO + 1e-6, side="right"))
        yield float(np.round(ascending[first:stop].mean(), 6)), order[first:stop]
        first = stop


def _line(rows: Float64Array, seconds: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The corners of a line as (rows, seconds), ascending, the first at 0 rows.

    Points of about the same number of rows are averaged, as noise between two of them would be an arbitrary slope.
    """
    order = np.argsort(rows, kind="stable")
    ascending, groups, first = rows[order], [], 0
    while first < len(order):
        stop = int(np.searchsorted(ascending, ascending[first] * _SAME_ROWS_RATIO, side="right"))
        groups.append(order[first:stop])
        first = stop
    corner_rows, corner_s = (np.array([column[group].mean() for group in groups]) for column in (rows, seconds))
    intercept_s = 0.0
    if len(corner_rows) > 1:
        rise_s = corner_rows[0] * (corner_s[1] - corner_s[0]) / (corner_rows[1] - corner_rows[0])
        intercept_s = max(0.0, float(corner_s[0] - rise_s))
    first_s = min(intercept_s, float(corner_s[0]))
    return np.concatenate([[0.0], corner_rows]), np.concatenate([[first_s], corner_s])


def _along(line: tuple[Float64Array, Float64Array], rows: Float64Array, is_bounded: bool = False) -> Float64Array:
    """Seconds of a line at `rows`. The slope beyond the last corner is that from the last corner at or before half of
    its rows; if bounded, at most the mean of all rows."""
    corner_rows, corner_s = line
    back = int(np.searchsorted(corner_rows, corner_rows[-1] / 2, side="right")) - 1
    slope = max(0.0, float((corner_s[-1] - corner_s[back]) / (corner_rows[-1] - corner_rows[back])))
    if is_bounded:
        slope = min(slope, float(corner_s[-1] / corner_rows[-1]))
    return np.asarray(np.interp(rows, corner_rows, corner_s) + np.maximum(rows - corner_rows[-1], 0.0) * slope)


class RunSurface:
    """What a pair of attention takes more, or less, in runs of rows of items that ranks share than in whole items.

    1. Points of packs of one length make a line over rows of a run, interpolated linearly in their logarithm.
    2. Between two lines, seconds are interpolated linearly in the logarithm of keys that a row attends to.
    Beyond the points it is as at the nearest of them.
    """

    def __init__(self, length: ArrayLike, rows: ArrayLike, keys: ArrayLike, more_s: ArrayLike) -> None:
        """All are [num_points], one at least. more_s: seconds of a pair."""
        of_pack, sizes, seen, more = (np.asarray(column, dtype=np.float64) for column in (length, rows, keys, more_s))
        self._least_s = min(float(more.min()), 0.0)
        self._lines: list[tuple[float, Float64Array, Float64Array]] = []
        for each in np.unique(of_pack):
            on_line = np.flatnonzero(of_pack == each)
            on_line = on_line[np.argsort(sizes[on_line], kind="stable")]
            self._lines.append((float(np.log(seen[on_line].mean())), np.log(sizes[on_line]), more[on_line]))
        self._lines.sort(key=lambda line: line[0])

    def __call__(self, number: Float64Array, rows: Float64Array, pairs: Float64Array) -> Float64Array:
        """Seconds that runs take more, float64 [n]; arguments are columns of `cost.model.Runs`. O(n * lines)."""
        known = (number > 0) & (rows > 0) & (pairs > 0)
        of_run = np.log(np.where(known, rows / np.where(known, number, 1), 1.0))
        keys = np.log(np.where(known, pairs / np.where(known, rows, 1), 1.0))
        on_lines = np.stack([np.interp(of_run, sizes, more_s) for _, sizes, more_s in self._lines])
        at = np.array([line[0] for line in self._lines])
        place = np.interp(keys, at, np.arange(len(at), dtype=np.float64))
        low = np.minimum(place.astype(np.int64), max(len(at) - 2, 0))
        high, column = np.minimum(low + 1, len(at) - 1), np.arange(len(rows))
        more = on_lines[low, column] + (place - low) * (on_lines[high, column] - on_lines[low, column])
        return pairs * np.where(known, more, self._least_s)
