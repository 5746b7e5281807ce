"""How much longer a pipeline's steady state is because microbatches differ.

Ranks work on different microbatches at a time and wait for each other, so that what counts is the largest of some
neighbouring microbatches, not the mean; and of replicas, which wait for each other at the end of the step, the slowest.
How many neighbours, as a share of the pipeline ranks, is fitted to simulations of mixtures of text, images and speech:
1F1B waits most, and schedules that put weight gradients off, least.
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
    """The steady state by that of equal microbatches of num_examples examples; at least 1.

    shape: schedule, pipeline ranks, replicas. O(microbatches * log(pipeline ranks)).
    """
    schedule, pp, dp = shape
    seconds = np.sum([job.microbatch_seconds(module.name, num_examples, tp) for module in job.model.modules], axis=0)
    by_replica = seconds.reshape(-1, dp)
    window = math.ceil(_NEIGHBOURS[schedule] * pp)
    largest = _largest(by_replica, window).sum(axis=0).max()
    return float(largest / by_replica.sum() * dp)


def _largest(rows: Float64Array, window: int) -> Float64Array:
    """Of each row and its neighbours, `window` of them, fewer at the start; by column."""
    padded = np.concatenate([np.zeros((window - 1, rows.shape[1])), rows])
    width = 1
    while 2 * width <= window:
        padded = np.maximum(padded[:-width], padded[width:])
        width *= 2
    rest = window - width
    return np.maximum(padded[:-rest], padded[rest:]) if rest else padded
