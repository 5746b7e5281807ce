"""Which rank computes which item of a phase, decided from the items' lengths alone.

`assign` is the one way in: it balances a cost (`Packed`: a sum over items; `Padded`: count times longest) over ranks
and gives an Assignment with each rank's load and a proven lower bound. `score` gives the same for a placement made
elsewhere. Every result is a pure function of its arguments, the same on every rank.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from motet.balance import reference
from motet.balance.costs import Cost, Packed, Padded
from motet.core.assignment import Assignment, csr_from_ranks
from motet.core.errors import UserError

try:
    from motet.balance import _native
except ImportError as error:
    raise ImportError("The native core of motet.balance is not built for this Python: run `make venv`.") from error

__all__ = ["Backend", "Cost", "Packed", "Padded", "assign", "lower_bound", "score"]

Backend = Literal["native", "reference"]

_DEFAULT_COST = Packed()


def assign(
    lengths: ArrayLike, num_ranks: int, cost: Cost = _DEFAULT_COST, *, backend: Backend = "native"
) -> Assignment:
    """Place items of the given lengths, int [num_items], >= 0, on ranks so that the largest load is small.

    Packed: LPT and swaps, at the bound or near it. Padded: the optimum. The items of a rank are in item order.
    Raises UserError for lengths that are negative or not integers, num_ranks < 1, and costs that do not fit int64.
    """
    weights = cost.weights(_checked(lengths, num_ranks))
    match backend, cost:
        case "native", Packed():
            return Assignment(*_native.packed(weights, num_ranks))
        case "native", Padded():
            return Assignment(*_native.padded(weights, num_ranks))
        case "reference", Packed():
            return reference.packed(weights, num_ranks)
        case "reference", Padded():
            return reference.padded(weights, num_ranks)
    raise UserError(f"assign(backend={backend!r}): the backend must be 'native' or 'reference'.")


def score(ranks: ArrayLike, lengths: ArrayLike, num_ranks: int, cost: Cost = _DEFAULT_COST) -> Assignment:
    """Any placement, ranks int [num_items], as an Assignment with its loads and the bound; items in item order.

    Raises UserError as `assign` does, and for ranks outside 0 .. num_ranks - 1 or not one for each item.
    """
    weights = cost.weights(_checked(lengths, num_ranks))
    ranks = np.asarray(ranks, dtype=np.int32)
    if ranks.shape != weights.shape:
        raise UserError(f"score: {ranks.shape} ranks for {weights.shape} lengths; it must be one rank for each item.")
    if len(ranks) and not 0 <= ranks.min() <= ranks.max() < num_ranks:
        raise UserError(f"score: ranks {ranks.min()} to {ranks.max()} are not all within 0 and {num_ranks - 1}.")
    items, offsets = csr_from_ranks(ranks, num_ranks)
    if isinstance(cost, Packed):
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weights[items])])
        loads = before[offsets[1:]] - before[offsets[:-1]]
    else:
        longest = np.zeros(num_ranks, dtype=np.int64)
        np.maximum.at(longest, ranks, weights)
        loads = longest * np.diff(offsets)
    return Assignment(ranks, items, offsets, loads, _bound(weights, num_ranks, cost))


def lower_bound(lengths: ArrayLike, num_ranks: int, cost: Cost = _DEFAULT_COST) -> int:
    """A maximum load that no placement of whole items undercuts; for Padded, one that the best placement reaches.

    Packed: the largest of the mean, the longest item and the pigeonhole bound (see reference/bound.py).
    """
    return _bound(cost.weights(_checked(lengths, num_ranks)), num_ranks, cost)


def _bound(weights: NDArray[np.int64], num_ranks: int, cost: Cost) -> int:
    native = _native.packed_bound if isinstance(cost, Packed) else _native.padded_bound
    return native(weights, num_ranks)


def _checked(lengths: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    if num_ranks < 1:
        raise UserError(f"num_ranks is {num_ranks}; it must be at least 1.")
    given = np.asarray(lengths)
    if given.ndim != 1:
        raise UserError(f"lengths have {given.ndim} dimensions; they must have one, an entry for each item.")
    if len(given) and given.dtype.kind not in "iu":
        raise UserError(f"lengths are of type {given.dtype}; they must be integers (quantise them first).")
    checked = np.ascontiguousarray(given, dtype=np.int64)
    if len(checked) and checked.min() < 0:
        item = int(checked.argmin())
        raise UserError(f"item {item} has length {given[item]}; a length must be from 0 to 2^63 - 1.")
    return checked
