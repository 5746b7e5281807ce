"""The order in which a pipeline computes microbatches of uneven length.

The order changes neither loss nor gradients, only how long ranks wait. `assign` balances sizes within a microbatch
(DistTrain's intra-microbatch reordering is LPT with equal counts).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers
from motet.balance.step_graph import StepGraph, one_f_one_b_graph
from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import ArgumentError

NUM_VISITS = 1 << 20
"""Operations that swaps compute at most: 2 to 3 ms in the native core."""
_NS_PER_S = 1_000_000_000
NO_LIMIT = 2**62
"""Nanoseconds that no step takes."""


def order_islands(
    graph: StepGraph,
    durations: Int64Array,
    groups: Int64Array,
    given: Int64Array | None = None,
    *,
    limit: int = NO_LIMIT,
    num_visits: int = NUM_VISITS,
    backend: Backend = "native",
) -> tuple[Int64Array, Int64Array]:
    """The orders of microbatches that make the slowest of several pipelines short, and the makespans.

    durations: nanoseconds of each group, the content of a microbatch: int64 [num_groups, graph.num_rows], >= 0, with
               sums that fit int64.
    groups:    the groups of each island in the given order, int64 [num_islands, num_microbatches].
    given:     the makespans in the given order, if they are known.
    limit:     nanoseconds; stop as soon as the slowest island cannot be made faster than that.
    num_visits: operations that swaps may compute; 0 is no swaps.
    Returns the groups of each island in another order, and int64 [num_islands]. No island gets slower than in the given
    order. MMScale/DistTrain section 5.2 with corrections and swaps, in any schedule (reference/reordering.py).
    """
    arrays = (np.ascontiguousarray(durations), np.ascontiguousarray(groups))
    if given is None:
        given = island_makespans(graph, durations, groups, backend=backend)
    core, limits = algorithms(backend), (np.ascontiguousarray(given), limit, num_visits)
    ordered, makespans = core.order_islands(*_columns(graph), graph.num_last, *arrays, *limits)
    return np.asarray(ordered).reshape(groups.shape), np.asarray(makespans)


def island_makespans(
    graph: StepGraph, durations: Int64Array, groups: Int64Array, *, backend: Backend = "native"
) -> Int64Array:
    """Nanoseconds of each island's step, int64 [num_islands]. Arguments as of `order_islands`."""
    arrays = (np.ascontiguousarray(durations), np.ascontiguousarray(groups))
    return np.asarray(algorithms(backend).island_makespans(*_columns(graph), *arrays))


def order_microbatches(
    forward_s: ArrayLike, backward_s: ArrayLike, num_stages: int, *, backend: Backend = "native"
) -> Int64Array:
    """The order of microbatches, a permutation int64 [num_microbatches], that makes a 1F1B step short.

    forward_s, backward_s: seconds of each microbatch on each stage, float [num_stages, num_microbatches], >= 0; or
        [num_microbatches] if all stages take the same. They are rounded to nanoseconds, so that all ranks agree.

    The step is never longer than in the given order. O(num_microbatches (num_microbatches + num_stages)), plus a
    limited number of swaps.
    Raises ArgumentError for num_stages < 1, for shapes that differ, for values that are negative or not finite, and for
    sums of 292 years or more.
    """
    durations = _durations_ns(forward_s, backward_s, num_stages)
    graph, given = one_f_one_b_graph(num_stages, len(durations)), np.arange(len(durations))
    ordered, _ = order_islands(graph, durations, given[None], backend=backend)
    order: Int64Array = ordered[0]
    return order


def pipeline_makespan(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    num_stages: int,
    order: ArrayLike | None = None,
    *,
    backend: Backend = "native",
) -> float:
    """Seconds from the first forward to the last backward of a 1F1B step, without communication.

    order: int [num_microbatches], a permutation; None keeps the given order. Other arguments and errors as in
    `order_microbatches`. O(num_stages * num_microbatches).
    """
    durations = _durations_ns(forward_s, backward_s, num_stages)
    count = len(durations)
    checked = np.arange(count) if order is None else checked_integers(order, "order")
    if not np.array_equal(np.sort(checked), np.arange(count)):
        raise ArgumentError(f"order is {checked.tolist()}; it must be a permutation of 0 .. {count - 1}.")
    graph = one_f_one_b_graph(num_stages, count)
    return int(island_makespans(graph, durations, checked[None], backend=backend)[0]) / _NS_PER_S


def _columns(graph: StepGraph) -> tuple[np.ndarray, ...]:
    return graph.row, graph.position, graph.offsets, graph.needs, graph.gaps


def _durations_ns(forward_s: ArrayLike, backward_s: ArrayLike, num_stages: int) -> Int64Array:
    """Nanoseconds of forward, then of backward, int64 [num_microbatches, 2 * num_stages]; raises ArgumentError."""
    if num_stages < 1:
        raise ArgumentError(f"num_stages is {num_stages}; it must be at least 1.")
    forward = _checked_seconds(forward_s, "forward_s", num_stages)
    backward = _checked_seconds(backward_s, "backward_s", num_stages)
    if forward.shape != backward.shape:
        raise ArgumentError(f"backward_s has {backward.shape[1]} microbatches; forward_s has {forward.shape[1]}.")
    total_ns = _NS_PER_S * (forward.sum() + backward.sum())
    if total_ns >= 2.0**63:
        raise ArgumentError(f"forward_s and backward_s add up to {total_ns / _NS_PER_S} s; it must be below 292 years.")
    durations: Int64Array = np.rint(np.concatenate([forward, backward]).T * _NS_PER_S).astype(np.int64)
    return durations


def _checked_seconds(seconds: ArrayLike, name: str, num_stages: int) -> Float64Array:
    """Seconds as float64 [num_stages, num_microbatches]; raises ArgumentError for wrong ones."""
    array = np.asarray(seconds, dtype=np.float64)
    if array.ndim == 1:
        array = np.broadcast_to(array, (num_stages, len(array)))
    if array.ndim != 2 or len(array) != num_stages:
        raise ArgumentError(f"{name} has shape {array.shape}; it must be [num_microbatches] or [{num_stages}, ...].")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        raise ArgumentError(f"{name} holds {array[wrong][0]}; it must hold seconds of 0 or more.")
    return array
