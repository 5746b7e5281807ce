"""Whole examples on ranks so that all phases are balanced at once: LPT over vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.result import Placement, placement


def joint(costs: NDArray[np.int64], num_ranks: int) -> Placement:
    """Heaviest example first, each to the rank whose worst phase, in shares of the phase's mean, stays lowest."""
    shares = costs / np.maximum(costs.sum(axis=0), 1)
    loads = np.zeros((num_ranks, costs.shape[1]))
    ranks = np.zeros(len(costs), dtype=np.int32)
    for example in np.argsort(-shares.max(axis=1), kind="stable"):
        rank = int(np.argmin((loads + shares[example]).max(axis=1)))
        ranks[example] = rank
        loads[rank] += shares[example]
    exact = np.zeros((num_ranks, costs.shape[1]), dtype=np.int64)
    np.add.at(exact, ranks, costs)
    bound = np.array([packed_bound(column, num_ranks) for column in costs.T], dtype=np.int64)
    return placement(ranks, exact, bound)
