"""Checks of arguments, shared by all functions of motet.balance: they return arrays, or raise ArgumentError."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX
from motet.core.nodes import RanksPerNode, node_sizes

EXACT_FLOAT = 2**53
"""From this number on, floats cannot represent every integer."""
MAX_TIME_BUDGET_S = 1_000_000


def checked_num_ranks(num_ranks: int) -> int:
    """num_ranks as int; raises ArgumentError if it is below 1, or no int32 number."""
    if not 1 <= num_ranks < 2**31:
        right = "at least 1" if num_ranks < 1 else "below 2^31"
        raise ArgumentError(f"num_ranks is {num_ranks}; it must be {right}.")
    return int(num_ranks)


def checked_node_sizes(ranks_per_node: RanksPerNode | None, num_ranks: int) -> Int32Array:
    """How many ranks each node has, int32 [num_nodes]; None makes each rank a node. Raises as `node_sizes`."""
    return node_sizes(1 if ranks_per_node is None else ranks_per_node, num_ranks).astype(np.int32)


def checked_integers(values: ArrayLike, name: str, num_axes: int = 1) -> Int64Array:
    """`values` as C-contiguous int64 with `num_axes` axes, all >= 0.

    Whole floats below 2^53 pass. Raises ArgumentError, with `name`, index and value, for NaN, fractions, negative
    numbers, floats from 2^53 on, integers from 2^63 on, and another number of axes.
    """
    array = np.asarray(values)
    if array.ndim != num_axes:
        raise ArgumentError(f"{name} has shape {array.shape}; it must have {num_axes} axes, not {array.ndim}.")
    if array.size == 0:
        return np.zeros(array.shape, dtype=np.int64)
    if array.dtype.kind not in "iuf":
        raise ArgumentError(f"{name} is of type {array.dtype}; it must hold integers (quantise them first).")
    if array.dtype.kind == "f":
        _check(array, ~(np.isfinite(array) & (array == np.floor(array))), name, "a whole number (quantise first)")
        _check(array, array >= EXACT_FLOAT, name, "below 2^53 as a float; give integers beyond that")
    _check(array, array < 0, name, "at least 0")
    if array.dtype.kind == "u":
        _check(array, array > np.uint64(INT64_MAX), name, "at most 2^63 - 1")
    return np.ascontiguousarray(array, dtype=np.int64)


def checked_costs(costs: ArrayLike) -> Int64Array:
    """Costs of items, int64 [num_items] or [num_items, num_phases], all >= 0.

    Raises ArgumentError as checked_integers does, and for num_phases = 0.
    """
    array = np.asarray(costs)
    checked = checked_integers(array, "costs", 1 if array.ndim == 1 else 2)
    if checked.ndim == 2 and checked.shape[1] == 0:
        raise ArgumentError(f"costs has shape {checked.shape}; it must have at least one phase.")
    return checked


def checked_ranks(ranks: ArrayLike, name: str, num_items: int, num_ranks: int) -> Int32Array:
    """The rank of each item, int32 [num_items]; raises ArgumentError for another shape and for ranks out of range."""
    checked = checked_integers(ranks, name)
    if checked.shape != (num_items,):
        raise ArgumentError(f"{name} has shape {checked.shape}; it must be one rank for each of {num_items} items.")
    _check(checked, checked >= num_ranks, name, f"below num_ranks, which is {num_ranks}")
    return checked.astype(np.int32)


def check_sum(values: Int64Array, name: str) -> None:
    """Raises ArgumentError if the values, >= 0, add up to more than 2^63 - 1."""
    if int(values.max(initial=0)) * values.size > INT64_MAX:
        total = sum(values.ravel().tolist())
        if total > INT64_MAX:
            raise ArgumentError(f"{name} add up to {total}, past 2^63 - 1.")


def steps_of_budget(time_budget_s: float | None, steps_per_s: int, default: int) -> int:
    """The number of steps of a time budget at a nominal rate, the same on every rank; `default` without a budget."""
    if time_budget_s is None:
        return default
    if not 0 <= time_budget_s <= MAX_TIME_BUDGET_S:
        raise ArgumentError(f"time_budget_s is {time_budget_s}; it must be from 0 to {MAX_TIME_BUDGET_S:_}.")
    return int(time_budget_s * steps_per_s)


def _check(array: NDArray[np.generic], wrong: BoolArray, name: str, right: str) -> None:
    """Raises ArgumentError for the first wrong element."""
    if wrong.any():
        index = tuple(int(axis[0]) for axis in np.nonzero(wrong))
        raise ArgumentError(f"{name}{list(index)} is {array[index]}; it must be {right}.")
