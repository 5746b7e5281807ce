"""Seconds as a function of work, from measured points: a fit with few coefficients, and piecewise-linear surfaces.

The fit is what balancing needs: constant + linear * tokens + quadratic * tokens^2 (OrchMLLM equation 2, whose
coefficients are thus measured and not assumed). The surface is what prediction needs: linear interpolation of profiled
times (MMScale/DistTrain section 3), along rows, and between batches whose rows attend to more or fewer others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import Float64Array
from motet.core.errors import ArgumentError

_NS_PER_S = 1e9
_ALIKE = 1.2
"""Numbers of rows that are taken for one, by their ratio."""


@dataclass(frozen=True)
class Curve:
    """constant_ns + linear_ns * amount + quadratic_ns * square: nanoseconds, none of the coefficients below 0."""

    constant_ns: float
    linear_ns: float
    quadratic_ns: float = 0.0

    def seconds(self, amount: ArrayLike, square: ArrayLike = 0.0) -> Float64Array:
        """amount, square: float64 [n], e.g. sums of lengths and of squared lengths."""
        total = self.constant_ns + self.linear_ns * np.asarray(amount) + self.quadratic_ns * np.asarray(square)
        return np.asarray(total / _NS_PER_S, dtype=np.float64)


def fit_curve(seconds: ArrayLike, amount: ArrayLike, square: ArrayLike | None = None) -> Curve:
    """The non-negative coefficients with the least sum of squared *relative* errors, so that short counts like long.

    seconds: float64 [n], what was measured; points of 0 seconds are left out. amount, square: float64 [n].
    Raises ArgumentError for columns of unequal length. O(n).
    """
    # Late: it takes longer to import than to find many a plan, and published figures need no fit.
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
    # Of one order of magnitude: squares of long lengths are 10^8 times as large as the constant's column.
    scale = np.maximum(matrix.max(axis=0), np.finfo(np.float64).tiny)
    coefficients = nnls(matrix / scale, np.ones(len(matrix)))[0] / scale * _NS_PER_S
    return Curve(*coefficients.tolist())


@dataclass(frozen=True)
class RelativeError:
    """|predicted - measured| over some points. mean, worst: relative to what was measured at each point.
    overall: all of it relative to all that was measured, which points of next to nothing do not spoil.
    num_points: that were compared; without any, the errors are 0.
    """

    mean: float
    worst: float
    overall: float
    num_points: int


def relative_error(predicted: ArrayLike, measured: ArrayLike) -> RelativeError:
    """float64 [n] each; points of 0 measured seconds are left out, and without any other the error is 0."""
    true = np.asarray(measured, dtype=np.float64)
    known = true > 0
    if not known.any():
        return RelativeError(0.0, 0.0, 0.0, 0)
    off = np.abs(np.asarray(predicted, dtype=np.float64) - true)[known]
    errors = off / true[known]
    return RelativeError(float(errors.mean()), float(errors.max()), float(off.sum() / true.sum()), int(known.sum()))


class Surface:
    """Seconds over rows and pairs, through all measured points; those of about as many rows are averaged.

    Points whose rows attend to equally many rows each (pairs / rows) make a line over rows, interpolated linearly;
    between two such lines the seconds of equally many rows are interpolated linearly in pairs / rows. So at a given
    number of rows seconds are piecewise linear in pairs. Beyond the grid a line goes on as over its last half, and from
    line to line the last slope goes on, but never downwards; below its fewest rows a line runs to its intercept, which
    is at least 0. Without rows nothing is computed: 0 s.
    """

    def __init__(self, rows: Sequence[float], pairs: Sequence[float], seconds: Sequence[float]) -> None:
        """rows, pairs, seconds: [num_points]. Raises ArgumentError where no point has any rows."""
        known = np.asarray(rows) > 0
        if not known.any():
            raise ArgumentError("a surface of seconds needs a point that has rows.")
        at, measured = np.asarray(rows, dtype=np.float64)[known], np.asarray(seconds, dtype=np.float64)[known]
        keys = np.round(np.asarray(pairs)[known] / at, 6)
        self._keys = np.unique(keys)
        self._lines = [_line(at[keys == key], measured[keys == key]) for key in self._keys]

    def __call__(self, rows: Float64Array, pairs: Float64Array) -> Float64Array:
        """rows, pairs: float64 [n] -> seconds, float64 [n]. O(n * lines)."""
        values = np.stack([_along(line, rows) for line in self._lines])
        if len(values) == 1:
            return np.where(rows > 0, values[0], 0.0)
        keys = pairs / np.maximum(rows, 1e-9)
        low = np.clip(np.searchsorted(self._keys, keys) - 1, 0, len(values) - 2)
        column = np.arange(len(rows))
        below, above = values[low, column], values[low + 1, column]
        share = (keys - self._keys[low]) / (self._keys[low + 1] - self._keys[low])
        rise = np.where(share > 1, np.maximum(above - below, 0), above - below)
        found = np.where(share > 1, above + (share - 1) * rise, below + share * rise)
        return np.where(rows > 0, np.maximum(found, 0.0), 0.0)


def _line(rows: Float64Array, seconds: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Corners of a line, ascending, from 0 rows on; points of about as many rows are averaged: what noise there is
    between two of them would be a slope of any size.
    """
    order = np.argsort(rows, kind="stable")
    ascending, groups, first = rows[order], [], 0
    while first < len(order):
        stop = int(np.searchsorted(ascending, ascending[first] * _ALIKE, side="right"))
        groups.append(order[first:stop])
        first = stop
    at, mean = (np.array([column[group].mean() for group in groups]) for column in (rows, seconds))
    intercept = 0.0
    if len(at) > 1:
        intercept = max(0.0, float(mean[0] - at[0] * (mean[1] - mean[0]) / (at[1] - at[0])))
    return np.concatenate([[0.0], at]), np.concatenate([[min(intercept, float(mean[0]))], mean])


def _along(line: tuple[Float64Array, Float64Array], rows: Float64Array) -> Float64Array:
    """Beyond the last corner as steep as over the last half, or what reaches farther back."""
    at, seconds = line
    back = int(np.searchsorted(at, at[-1] / 2, side="right")) - 1
    slope = max(0.0, float((seconds[-1] - seconds[back]) / (at[-1] - at[back])))
    return np.asarray(np.interp(rows, at, seconds) + np.maximum(rows - at[-1], 0.0) * slope)
