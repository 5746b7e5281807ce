"""Into which stages the layers of a chain are cut, so that the slowest stage is as fast as it can be.

From the seconds of each layer. Optimus appendix B: F(l, m), the slowest of the first m stages when they hold the first
l layers, is the least over j of max(F(j, m - 1), seconds of layers j + 1 ... l). As printed, the answer is degenerate
when there are nearly as many stages as layers: once one stage must be slow, any cut with stages as slow is as good. So
equal answers are told apart by the seconds of each device, over all of its stages: the slowest device first, then the
sum of squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from motet.core.errors import ArgumentError

_TOTAL_BITS = 30
"""Above all layers together, in the whole units that seconds become: equal cuts then compare as equal, everywhere."""

_NEVER = 1 << 61
"""More than the sum of squares of any cut; twice it still fits into 64 bits."""


def partition(
    layer_s: Sequence[float], num_stages: int, *, num_chunks: int = 1, folded: bool = False
) -> tuple[int, ...]:
    """How many layers each stage takes: num_stages * num_chunks counts, in order, each at least 1.

    layer_s:    seconds (or operations) of each layer, in the order in which they run.
    num_stages: devices in the pipeline.
    num_chunks: stages of each device; stage s is on device s % num_stages.
    folded:     every other chunk goes back over the devices, from the last one to the first (ZB-V).

    The slowest stage is the least that any cut gives (seconds are told apart to 1e-9 of all layers). Among the cuts
    that give it, with one chunk, the sum of squares of the stages is the least; then the last stage has the fewest
    layers, as it computes the loss as well; then the first, the second ..., as they hold the most microbatches. With
    more chunks, the slowest device and then the sum of squares of the devices are brought down by moving single layers
    from stage to stage until no move helps: not always the least.
    Raises ArgumentError for fewer layers than stages, and for what is negative or not finite. O(num_layers^2 * stages);
    with chunks, every round of moves O(stages^3) in addition.
    """
    prefix = _prefix(layer_s, num_stages, num_chunks)
    span = prefix[None, :] - prefix[:, None]
    empty = np.tril(np.ones_like(span, dtype=np.bool_))
    slowest = _tables(np.where(empty, _NEVER, span), num_stages * num_chunks, np.maximum)[-1][-1]
    square = np.where(empty | (span > slowest), _NEVER, span * span)
    cut = _cut(_tables(square, num_stages * num_chunks, np.add), square)
    if num_chunks > 1:
        cut = _even_devices(cut, prefix, num_stages, int(slowest), folded)
    return tuple(stop - start for start, stop in pairwise(cut))


def _prefix(layer_s: Sequence[float], num_stages: int, num_chunks: int) -> NDArray[np.int64]:
    """Whole units of the first 0, 1, ... layers; int64 [num_layers + 1]."""
    seconds = np.asarray(layer_s, dtype=np.float64)
    if num_stages < 1 or num_chunks < 1:
        raise ArgumentError(f"num_stages is {num_stages} and num_chunks {num_chunks}; both must be at least 1.")
    if seconds.ndim != 1 or not np.isfinite(seconds).all() or (seconds < 0).any():
        raise ArgumentError("layer_s must be one number a layer, finite and not negative.")
    if len(seconds) < num_stages * num_chunks:
        raise ArgumentError(
            f"There are {len(seconds)} layers for {num_stages * num_chunks} stages ({num_chunks} on each of "
            f"{num_stages} devices); every stage must get at least one."
        )
    # A power of two as the unit, so that whole numbers stay what they are.
    units = np.rint(np.ldexp(seconds, _TOTAL_BITS - np.frexp(seconds.sum())[1])).astype(np.int64)
    return np.concatenate([np.zeros(1, dtype=np.int64), units.cumsum()])


def _tables(cost: NDArray[np.int64], num_stages: int, join: np.ufunc) -> list[NDArray[np.int64]]:
    """Per number of stages 1, 2, ...: the least joined cost of the first l layers, int64 [num_layers + 1].

    cost: of a stage of the layers j ... l - 1, at [j, l].
    """
    tables = [cost[0]]
    for _ in range(num_stages - 1):
        tables.append(np.minimum(join(tables[-1][:, None], cost).min(axis=0), _NEVER))
    return tables


def _cut(tables: list[NDArray[np.int64]], cost: NDArray[np.int64]) -> list[int]:
    """Bounds of the stages of least sum: the last stage as short as can be, then the first, the second, ..."""
    bounds = [len(cost) - 1]
    for before, table in zip(tables[-2::-1], tables[:0:-1]):
        stop = bounds[-1]
        starts = np.flatnonzero(before + cost[:, stop] == table[stop])
        bounds.append(int(starts[-1 if len(bounds) == 1 else 0]))
    return [0, *reversed(bounds)]


def _even_devices(
    cut: list[int], prefix: NDArray[np.int64], num_stages: int, slowest: int, folded: bool
) -> list[int]:
    """Move single layers between stages, always by the best move, while that evens the devices out.

    A move from one stage to another shifts every stage between them by a layer. No stage may exceed `slowest`.
    """
    bounds = np.array(cut)
    num_bounds = len(cut)
    moves = np.array(
        [
            np.where((np.arange(num_bounds) > first) & (np.arange(num_bounds) <= last), shift, 0)
            for first, last in combinations(range(num_bounds - 1), 2)
            for shift in (-1, 1)
        ]
    )
    while True:
        moved = np.concatenate([bounds[None], bounds + moves])
        moved = moved[(np.diff(moved) >= 1).all(axis=1)]
        moved = moved[(np.diff(prefix[moved]) <= slowest).all(axis=1)]
        chunks = np.diff(prefix[moved]).reshape(len(moved), -1, num_stages)
        if folded:
            chunks[:, 1::2] = chunks[:, 1::2, ::-1].copy()
        device = chunks.sum(axis=1)
        best = int(np.lexsort([(device * device).sum(axis=1), device.max(axis=1)])[0])
        if best == 0:
            return [int(bound) for bound in bounds]
        bounds = moved[best]
