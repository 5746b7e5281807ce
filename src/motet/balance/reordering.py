"""The order in which a pipeline computes microbatches of uneven length.

The order changes neither loss nor gradients, only how long the first stage waits. `assign` balances sizes within a
microbatch (DistTrain's intra-microbatch reordering is LPT with equal counts).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers
from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import ArgumentError

_NS_PER_S = 1_000_000_000


def order_microbatches(
    forward_s: ArrayLike, backward_s: ArrayLike, num_stages: int, *, backend: Backend = "native"
) -> Int64Array:
    """The order of microbatches, a permutation int64 [num_microbatches], that makes a 1F1B step short.

    forward_s, backward_s: seconds of each microbatch on each stage, float [num_stages, num_microbatches], >= 0; or
        [num_microbatches] if all stages take the same. They are rounded to nanoseconds, so that all ranks agree.

    The step is never longer than in the given order. MMScale/DistTrain Algorithm 3 with corrections and swaps
    (reference/reordering.py). O(num_microbatches (num_microbatches + num_stages)), plus a limited number of swaps.
    Raises ArgumentError for num_stages < 1, for shapes that differ, for values that are negative or not finite, and for
    sums of 292 years or more.
    """
    return np.asarray(algorithms(backend).order_microbatches(*_durations_ns(forward_s, backward_s, num_stages)))


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
    forward, backward = _durations_ns(forward_s, backward_s, num_stages)
    checked = np.arange(len(forward)) if order is None else checked_integers(order, "order")
    if not np.array_equal(np.sort(checked), np.arange(len(forward))):
        raise ArgumentError(f"order is {checked.tolist()}; it must be a permutation of 0 .. {len(forward) - 1}.")
    return int(algorithms(backend).pipeline_makespan(forward, backward, checked)) / _NS_PER_S


def _durations_ns(forward_s: ArrayLike, backward_s: ArrayLike, num_stages: int) -> tuple[Int64Array, Int64Array]:
    """Both durations in nanoseconds, int64 [num_microbatches, num_stages]; raises ArgumentError for wrong ones."""
    if num_stages < 1:
        raise ArgumentError(f"num_stages is {num_stages}; it must be at least 1.")
    forward = _checked_seconds(forward_s, "forward_s", num_stages)
    backward = _checked_seconds(backward_s, "backward_s", num_stages)
    if forward.shape != backward.shape:
        raise ArgumentError(f"backward_s has {len(backward)} microbatches; forward_s has {len(forward)}.")
    total_ns = _NS_PER_S * (forward.sum() + backward.sum())
    if total_ns >= 2.0**63:
        raise ArgumentError(f"forward_s and backward_s add up to {total_ns / _NS_PER_S} s; it must be below 292 years.")
    return np.rint(forward * _NS_PER_S).astype(np.int64), np.rint(backward * _NS_PER_S).astype(np.int64)


def _checked_seconds(seconds: ArrayLike, name: str, num_stages: int) -> Float64Array:
    """Seconds as float64 [num_microbatches, num_stages]; raises ArgumentError for wrong ones."""
    array = np.asarray(seconds, dtype=np.float64)
    if array.ndim == 1:
        array = np.broadcast_to(array, (num_stages, len(array)))
    if array.ndim != 2 or len(array) != num_stages:
        raise ArgumentError(f"{name} has shape {array.shape}; it must be [num_microbatches] or [{num_stages}, ...].")
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        raise ArgumentError(f"{name} holds {array[wrong][0]}; it must hold seconds of 0 or more.")
    return np.ascontiguousarray(array.T)
