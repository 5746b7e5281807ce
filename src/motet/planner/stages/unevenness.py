"""How much longer the steady state of a pipeline is because microbatches differ.

The ranks of a pipeline work on neighbouring microbatches and wait for each other, so that the largest of some
neighbours counts, not the mean. Replicas wait for each other at the end of the step, so that the slowest counts. The
number of neighbours, as a share of the pipeline ranks, is fitted to simulations of mixtures of text, images and speech:
1F1B waits most; schedules that delay weight gradients wait least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import ScheduleKind
from motet.planner.job import Job

_NEIGHBOURS: Mapping[ScheduleKind, float] = {"1f1b": 0.6, "interleaved_1f1b": 0.35, "zb_h1": 0.35, "zb_v": 0.2}


def unevenness(job: Job, num_examples: int, tp: int, shape: tuple[ScheduleKind, int, int]) -> float:
    """Seconds of the steady state / seconds if all microbatches of num_examples examples were equal; at least 1.

    shape: schedule, pipeline ranks, replicas. O(microbatches * log(pipeline ranks)).
    """
    schedule, pp, dp = shape
    seconds = np.sum([job.microbatch_seconds(module.name, num_examples, tp) for module in job.model.modules], axis=0)
    by_replica = seconds.reshape(-1, dp)
    window = math.ceil(_NEIGHBOURS[schedule] * pp)
    slowest_s = running_max(by_replica, window).sum(axis=0).max()
    return float(slowest_s / by_replica.sum() * dp)


def running_max(rows: Float64Array, window: int) -> Float64Array:
    """By column, the maximum of each value and the `window` - 1 values before it, fewer at the start.

    rows: [num_rows, num_columns], none negative. O(values * log(window)): windows of 1, 2, 4, ... are joined.

    Example:
        >>> running_max(np.array([[1.0], [3.0], [2.0], [0.0]]), window=2).ravel().tolist()
        [1.0, 3.0, 3.0, 2.0]
    """
    maxima = np.concatenate([np.zeros((window - 1, rows.shape[1])), rows])
    width = 1
    while 2 * width <= window:
        maxima = np.maximum(maxima[:-width], maxima[width:])
        width *= 2
    rest = window - width
    return np.maximum(maxima[:-rest], maxima[rest:]) if rest else maxima
