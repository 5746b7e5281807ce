"""The layers of a chain cut into stages, so that the slowest stage is as fast as it can be.

Optimus appendix B: let F(l, m) be the slowest of m stages that hold the first l layers. Then
F(l, m) = min over j of max(F(j, m - 1), seconds of layers j + 1 ... l).

As printed, the answer is degenerate when there are nearly as many stages as layers: once one stage must be slow, all
cuts whose other stages are no slower are equal. So equal cuts are ranked by the seconds of each device, over all of its
stages: first by the slowest device, then by the sum of squares.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.errors import ArgumentError
from motet.core.words import counted_words

try:
    _native: ModuleType | None = import_module("motet.planner.stages._cuts")
except ModuleNotFoundError:  # Any other ImportError is a broken core, and must not be hidden.
    _native = None

_TOTAL_BITS = 30
"""The bits of all layers' seconds together, as integers. Integers make equal cuts compare as equal on every machine."""

_NUM_KNOWN = 1024
"""Answers that are kept."""
_NEVER = 1 << 61
"""A cost above the sum of squares of any cut. Twice the cost still fits into 64 bits."""


def partition(
    layer_s: Sequence[float], num_stages: int, *, num_chunks: int = 1, folded: bool = False
) -> tuple[int, ...]:
    """The number of layers of each stage: num_stages * num_chunks counts, in order, each at least 1.

    layer_s:    seconds (or operations) of each layer, in the order in which they run.
    num_stages: devices in the pipeline.
    num_chunks: stages of each device; stage s is on device s % num_stages.
    folded:     every second chunk runs backwards over the devices, from the last one to the first (ZB-V).

    The slowest stage is the least that any cut gives (to 1e-9 of all layers). Cuts that are equal in this are ranked:

    - with one chunk, by the least sum of squares of the stages; then by the fewest layers in the last stage, which
      computes the loss as well; then in the first, the second ... stage, which hold the most microbatches;
    - with more chunks, by the slowest device and then the sum of squares of the devices. Moves of single layers between
      stages reduce them until no move helps, which is not always the least.

    Raises ArgumentError for fewer layers than stages, and for seconds that are negative or not finite.
    O(num_layers^2 * stages); with chunks, every round of moves takes O(stages^3) in addition.

    Example:
        >>> partition([1, 1, 1, 1, 4], num_stages=2)
        (4, 1)
        >>> partition([1, 2, 3, 1, 1, 2], num_stages=3)
        (2, 2, 2)
    """
    return _partition(tuple(_prefix(layer_s, num_stages, num_chunks).tolist()), num_stages, num_chunks, folded)


@lru_cache(_NUM_KNOWN)
def _partition(sums: tuple[int, ...], num_stages: int, num_chunks: int, folded: bool) -> tuple[int, ...]:
    """`partition`, of the sums of `_prefix`: a search cuts the same blocks again and again."""
    best = best_bounds if _native is None else _native.best_cut
    return tuple(stop - start for start, stop in pairwise(best(sums, num_stages, num_chunks, folded)))


def best_bounds(sums: Sequence[int], num_stages: int, num_chunks: int, folded: bool) -> list[int]:
    """The bounds of the stages of `partition`, [num_stages * num_chunks + 1], in numpy: the reference of the native
    core (csrc/planner/).

    sums: integer seconds of the first 0, 1, ... layers.

    Example:
        >>> best_bounds([0, 1, 3, 6, 7, 8, 10], 3, 1, False)
        [0, 2, 4, 6]
    """
    prefix = np.array(sums, dtype=np.int64)
    span = prefix[None, :] - prefix[:, None]
    empty = np.tril(np.ones_like(span, dtype=np.bool_))
    slowest = _slowest_of_best(sums, num_stages * num_chunks)
    square = np.where(empty | (span > slowest), _NEVER, span * span)
    bounds = _bounds(_least_sums(square, num_stages * num_chunks), square)
    return _even_devices(bounds, prefix, num_stages, slowest, folded) if num_chunks > 1 else bounds


def slowest_stages(layer_s: Sequence[float], most: int) -> Float64Array:
    """Seconds of the slowest stage in the best cut into 1, 2, ... `most` stages, or as many as there are layers.

    To 1e-9 of all layers. Raises ArgumentError as `partition` does. O(num_layers^2 * stages).

    Example:
        >>> slowest_stages([1, 1, 1, 1, 4], most=3).tolist()
        [8.0, 4.0, 4.0]
    """
    prefix = _prefix(layer_s, 1, 1)
    span = prefix[None, :] - prefix[:, None]
    span = np.where(np.tril(np.ones_like(span, dtype=np.bool_)), _NEVER, span)
    tables = [span[0]]
    for _ in range(min(most, len(layer_s)) - 1):
        tables.append(np.maximum(tables[-1][:, None], span).min(axis=0))
    tick_s = float(np.sum(layer_s)) / max(float(prefix[-1]), 1.0)
    return np.array([float(table[-1]) for table in tables]) * tick_s


def slowest_stage_s(block_s: Float64Array) -> Float64Array:
    """The slowest stage of the best cut into 1, 2, ..., num_blocks stages: [num_rows, num_blocks], unrounded.

    block_s: seconds of each block, [num_rows, num_blocks], not negative. O(rows * blocks^3).

    Example:
        >>> slowest_stage_s(np.array([[1.0, 2.0, 3.0]])).tolist()  # 1 + 2 + 3; 1 + 2 | 3; 1 | 2 | 3
        [[6.0, 3.0, 3.0]]
    """
    sums = np.concatenate([np.zeros((len(block_s), 1)), block_s.cumsum(axis=1)], axis=1)
    if _native is None:
        return slowest_by_sums(sums)
    slowest = np.empty(block_s.shape)
    _native.slowest_stages(sums, slowest)
    return slowest


def slowest_by_sums(sums: Float64Array) -> Float64Array:
    """`slowest_stage_s`, of the seconds of the first 0, 1, ... blocks, [num_rows, num_blocks + 1], in numpy: the
    reference of the native core.

    Example:
        >>> slowest_by_sums(np.array([[0.0, 1.0, 3.0, 6.0]])).tolist()
        [[6.0, 3.0, 3.0]]
    """
    num_blocks = sums.shape[1] - 1
    span = np.where(np.tri(num_blocks + 1, dtype=np.bool_), np.inf, sums[:, None, :] - sums[:, :, None])
    # best[stop]: the slowest stage of the best cut of the first `stop` blocks.
    best, slowest = span[:, 0], [span[:, 0, -1]]
    for _ in range(num_blocks - 1):
        best = np.maximum(best[:, :, None], span).min(axis=1)
        slowest.append(best[:, -1])
    return np.stack(slowest, axis=1)


def _prefix(layer_s: Sequence[float], num_stages: int, num_chunks: int) -> Int64Array:
    """Integer seconds of the first 0, 1, ... layers: int64 [num_layers + 1]."""
    seconds = np.asarray(layer_s, dtype=np.float64)
    if num_stages < 1 or num_chunks < 1:
        raise ArgumentError(f"num_stages is {num_stages} and num_chunks {num_chunks}; both must be at least 1.")
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(seconds.sum())
    if seconds.ndim != 1 or not is_finite or (seconds < 0).any():
        raise ArgumentError("layer_s must be one number a layer, not negative and with a finite sum.")
    if len(seconds) < num_stages * num_chunks:
        raise ArgumentError(
            f"{counted_words(len(seconds), 'layer')} for {counted_words(num_stages * num_chunks, 'stage')} "
            f"({num_chunks} on each of {num_stages} devices): every stage must get at least one."
        )
    # The scale is a power of two, so that whole numbers keep their ratios.
    ticks = np.rint(np.ldexp(seconds, _TOTAL_BITS - np.frexp(seconds.sum())[1])).astype(np.int64)
    return np.concatenate([np.zeros(1, dtype=np.int64), ticks.cumsum()])


def _slowest_of_best(sums: Sequence[int], num_stages: int) -> int:
    """The least limit such that num_stages stages, each filled up to it, hold all layers. sums: as of `_prefix`.

    Found by halving: a limit of the longest layer more than the mean always holds them.
    """
    longest = max(stop - start for start, stop in pairwise(sums))
    low = max(-(-sums[-1] // num_stages), longest)
    high = low + longest
    while low < high:
        limit, stop = (low + high) // 2, 0
        for _ in range(num_stages):
            stop = bisect_right(sums, sums[stop] + limit, stop) - 1
        low, high = (low, limit) if stop == len(sums) - 1 else (limit + 1, high)
    return low


def _least_sums(cost: Int64Array, num_stages: int) -> list[Int64Array]:
    """For 1, 2, ... num_stages stages: the least sum of costs of the first l layers, int64 [num_layers + 1].

    cost: at [j, l], the cost of a stage of the layers j ... l - 1; _NEVER where no stage may hold them. The last stage
    has at most as many layers as the longest one that may be.
    """
    num = len(cost)
    longest = int((cost < _NEVER).sum(axis=0).max())
    stop = np.arange(num)[:, None]
    start = stop - 1 - np.arange(longest)
    own = np.where(start >= 0, cost[start, stop], _NEVER)
    tables = [cost[0]]
    for _ in range(num_stages - 1):
        tables.append(np.minimum((tables[-1][start] + own).min(axis=1), _NEVER))
    return tables


def _bounds(tables: list[Int64Array], cost: Int64Array) -> list[int]:
    """Bounds of the stages with the least sum: the last stage as short as can be, then the first, the second, ..."""
    bounds = [len(cost) - 1]
    for before, table in zip(tables[-2::-1], tables[:0:-1]):
        stop = bounds[-1]
        starts = np.flatnonzero(before + cost[:, stop] == table[stop])
        bounds.append(int(starts[-1 if len(bounds) == 1 else 0]))
    return [0, *reversed(bounds)]


def _even_devices(cut: list[int], prefix: Int64Array, num_stages: int, slowest: int, folded: bool) -> list[int]:
    """Bounds of the stages after moves of single layers that make the devices more even, always the best move next.

    A move from one stage to another shifts all stages between them by a layer. No stage may exceed `slowest`.
    """
    bounds = np.array(cut)
    num = len(cut) - 1
    stage = np.arange(num)
    chunk = stage // num_stages
    device = np.where(folded & (chunk % 2 == 1), num_stages - 1 - stage % num_stages, stage % num_stages)
    first, last = (np.repeat(ends, 2) for ends in np.triu_indices(num, 1))
    forward = np.tile([True, False], len(first) // 2)
    while True:
        move = _best_move(bounds, prefix, device, slowest, (first, last, forward))
        if move is None:
            return [int(bound) for bound in bounds]
        bounds[first[move] + 1 : last[move] + 1] += -1 if forward[move] else 1


def _best_move(
    bounds: Int64Array,
    prefix: Int64Array,
    device: Int64Array,
    slowest: int,
    moves: tuple[Int64Array, Int64Array, BoolArray],
) -> int | None:
    """The index of the best move: the least slowest device, then the least sum of squares. None if no move helps.

    device: of each stage. moves: (first, last, forward), [num_moves] each. Forward, every stage from `first` to the one
    before `last` gives its last layer to the next stage; otherwise, every stage after `first` to `last` gives its first
    layer to the one before. O(moves * devices).
    """
    first, last, forward = moves
    num = len(device)
    stage_s, counts, layer_s = np.diff(prefix[bounds]), np.diff(bounds), np.diff(prefix)
    device_s = np.bincount(device, stage_s, device.max() + 1).astype(np.int64)
    # 1. Both directions, up to each stage: what devices gain, and how many inner stages would exceed `slowest`.
    gains = np.zeros((2, num, len(device_s)), dtype=np.int64)
    num_over = np.zeros((2, num + 1), dtype=np.int64)
    end_s = np.zeros((2, 2, num), dtype=np.int64)
    for forwards, passed in enumerate((layer_s[bounds[1:-1]], layer_s[bounds[1:-1] - 1])):
        sign = -1 if forwards else 1
        boundary = np.arange(1, num)
        gains[forwards, boundary, device[:-1]] += sign * passed
        gains[forwards, boundary, device[1:]] -= sign * passed
        inner_gain = sign * np.diff(passed)
        num_over[forwards, 2:num] = stage_s[1:-1] + inner_gain > slowest
        end_s[forwards, 0, :-1] = stage_s[:-1] + sign * passed
        end_s[forwards, 1, 1:] = stage_s[1:] - sign * passed
    gains, num_over = gains.cumsum(axis=1), num_over.cumsum(axis=1)
    # 2. The moves after which no stage is empty or exceeds `slowest`.
    direction = forward.astype(np.int64)
    giver = np.where(forward, first, last)
    possible = (counts[giver] > 1) & (num_over[direction, last] == num_over[direction, first + 1])
    possible &= np.maximum(end_s[direction, 0, first], end_s[direction, 1, last]) <= slowest
    able = np.flatnonzero(possible)
    # 3. The best of them.
    moved_s = device_s + gains[direction[able], last[able]] - gains[direction[able], first[able]]
    largest, square = moved_s.max(axis=1), (moved_s * moved_s).sum(axis=1)
    now = device_s.max(), (device_s * device_s).sum()
    better = (largest < now[0]) | ((largest == now[0]) & (square < now[1]))
    if not better.any():
        return None
    return int(able[np.lexsort([square, largest])[0]])
