"""Into which stages the layers of a chain are cut, so that the slowest stage is as fast as it can be.

From the seconds of each layer. Optimus appendix B: F(l, m), the slowest of the first m stages when they hold the first
l layers, is the least over j of max(F(j, m - 1), seconds of layers j + 1 ... l). As printed, the answer is degenerate
when there are nearly as many stages as layers: once one stage must be slow, any cut with stages as slow is as good. So
equal answers are told apart by the seconds of each device, over all of its stages: the slowest device first, then the
sum of squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
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


def slowest_stages(layer_s: Sequence[float], most: int) -> Float64Array:
    """Seconds of the slowest stage, the least that any cut gives, into 1, 2, ... `most` stages, or as many as there are
    layers. To 1e-9 of all layers. Raises ArgumentError as `partition` does. O(num_layers^2 * stages).
    """
    prefix = _prefix(layer_s, 1, 1)
    span = prefix[None, :] - prefix[:, None]
    span = np.where(np.tril(np.ones_like(span, dtype=np.bool_)), _NEVER, span)
    tables = _tables(span, min(most, len(layer_s)), np.maximum)
    unit = float(np.sum(layer_s)) / max(float(prefix[-1]), 1.0)
    return np.array([float(table[-1]) for table in tables]) * unit


def _prefix(layer_s: Sequence[float], num_stages: int, num_chunks: int) -> Int64Array:
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


def _tables(cost: Int64Array, num_stages: int, join: np.ufunc) -> list[Int64Array]:
    """Per number of stages 1, 2, ...: the least joined cost of the first l layers, int64 [num_layers + 1].

    cost: of a stage of the layers j ... l - 1, at [j, l].
    """
    tables = [cost[0]]
    for _ in range(num_stages - 1):
        tables.append(np.minimum(join(tables[-1][:, None], cost).min(axis=0), _NEVER))
    return tables


def _cut(tables: list[Int64Array], cost: Int64Array) -> list[int]:
    """Bounds of the stages of least sum: the last stage as short as can be, then the first, the second, ..."""
    bounds = [len(cost) - 1]
    for before, table in zip(tables[-2::-1], tables[:0:-1]):
        stop = bounds[-1]
        starts = np.flatnonzero(before + cost[:, stop] == table[stop])
        bounds.append(int(starts[-1 if len(bounds) == 1 else 0]))
    return [0, *reversed(bounds)]


def _even_devices(cut: list[int], prefix: Int64Array, num_stages: int, slowest: int, folded: bool) -> list[int]:
    """Move single layers between stages, always by the best move, while that evens the devices out.

    A move from one stage to another shifts every stage between them by a layer. No stage may exceed `slowest`.
    """
    bounds = np.array(cut)
    num = len(cut) - 1
    order = np.arange(num)
    chunk = order // num_stages
    on = np.where(folded & (chunk % 2 == 1), num_stages - 1 - order % num_stages, order % num_stages)
    first, last = (np.repeat(ends, 2) for ends in np.triu_indices(num, 1))
    down = np.tile([True, False], len(first) // 2)
    while True:
        found = _best_move(bounds, prefix, on, slowest, (first, last, down))
        if found < 0:
            return [int(bound) for bound in bounds]
        bounds[first[found] + 1 : last[found] + 1] += -1 if down[found] else 1


def _best_move(
    bounds: Int64Array,
    prefix: Int64Array,
    on: Int64Array,
    slowest: int,
    moves: tuple[Int64Array, Int64Array, BoolArray],
) -> int:
    """The number of the move after which the slowest device, then the sum of squares, is the least; -1 for none.

    moves: (first, last, down): stage `first` gives its last layer (down), or takes the next stage's first one, and so
    do the stages between it and `last`. O(moves * devices).
    """
    first, last, down = moves
    num = len(on)
    stage_s, counts, layer_s = np.diff(prefix[bounds]), np.diff(bounds), np.diff(prefix)
    device = np.bincount(on, stage_s, on.max() + 1).astype(np.int64)
    shifts = np.zeros((2, num, len(device)), dtype=np.int64)
    over = np.zeros((2, num + 1), dtype=np.int64)
    ends = np.zeros((2, 2, num), dtype=np.int64)
    for way, passed in enumerate((layer_s[bounds[1:-1]], layer_s[bounds[1:-1] - 1])):
        sign = -1 if way else 1
        place = np.arange(1, num)
        shifts[way, place, on[:-1]] += sign * passed
        shifts[way, place, on[1:]] -= sign * passed
        gained = sign * np.diff(passed)
        over[way, 2:num] = stage_s[1:-1] + gained > slowest
        ends[way, 0, :-1] = stage_s[:-1] + sign * passed
        ends[way, 1, 1:] = stage_s[1:] - sign * passed
    shifts, over = shifts.cumsum(axis=1), over.cumsum(axis=1)
    ways = down.astype(np.int64)
    giver = np.where(down, first, last)
    possible = (counts[giver] > 1) & (over[ways, last] == over[ways, first + 1])
    possible &= np.maximum(ends[ways, 0, first], ends[ways, 1, last]) <= slowest
    able = np.flatnonzero(possible)
    moved = device + shifts[ways[able], last[able]] - shifts[ways[able], first[able]]
    largest, square = moved.max(axis=1), (moved * moved).sum(axis=1)
    now = device.max(), (device * device).sum()
    better = (largest < now[0]) | ((largest == now[0]) & (square < now[1]))
    if not better.any():
        return -1
    return int(able[np.lexsort([square, largest])[0]])
