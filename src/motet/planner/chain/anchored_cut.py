"""How OmniBal cuts a chain (section 4.2), and how others do without seconds.

A greedy cut is the anchor; candidates move each of its cuts by up to `radius` layers; they are ranked by how far stages
are apart and by what they send, and the best few are run. The paper adds the variance of stages in milliseconds to
megabytes: here both are seconds of one microbatch, the standard deviation (which its Table 4 shows, as "VAR") and what
sending takes. Its seconds are of forward passes; here they are what one is given, forward and backward.

There are (2 radius + 1)^(stages - 1) candidates. Cut by cut, the best `width` beginnings that end at a place are kept:
as long as there are no more, all candidates are ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.planner.stages.blocks import Blocks
from motet.planner.stages.partition import partition
from motet.planner.stages.stage_costs import stage_numbers

Counts = tuple[int, ...]
"""Blocks of each stage, in order."""

Cut = TypeVar("Cut")


def greedy_cut(block_s: Float64Array, num_stages: int) -> Counts:
    """Greedy: each stage takes blocks while that brings its end nearer to an equal share of all that is left."""
    left, place, counts = float(block_s.sum()), 0, []
    for stage in range(num_stages - 1):
        last = len(block_s) - (num_stages - 1 - stage)
        share = left / (num_stages - stage)
        taken, stop = float(block_s[place]), place + 1
        while stop < last and abs(taken + block_s[stop] - share) < abs(taken - share):
            taken += float(block_s[stop])
            stop += 1
        counts.append(stop - place)
        left, place = left - taken, stop
    return (*counts, len(block_s) - place)


def cuts_near(
    block_s: Float64Array, send_s: Float64Array, start: Counts, *, radius: int = 1, num: int = 12, width: int = 64
) -> list[Counts]:
    """The best `num` cuts within `radius` of `start`, best first.

    block_s: [num_blocks]. send_s: [num_stages - 1, num_blocks], seconds of the message at each cut after each block.
    O(stages * radius^2 * width).
    """
    prefix = np.concatenate([[0.0], np.cumsum(block_s)])
    mean = prefix[-1] / len(start)
    ends = np.cumsum(start)[:-1]
    cuts = np.zeros((1, 1), dtype=np.int64)
    square, sent = np.zeros(1), np.zeros(1)
    for number, end in enumerate(ends):
        places = np.arange(max(end - radius, 1), min(end + radius, len(block_s) - 1) + 1)
        source, place = np.nonzero(places[None, :] > cuts[:, -1][:, None])
        stop = places[place]
        square = square[source] + (prefix[stop] - prefix[cuts[source, -1]] - mean) ** 2
        sent = sent[source] + send_s[number, stop - 1]
        cuts = np.column_stack([cuts[source], stop])
        kept = _best_by_place(cuts, np.sqrt(square / len(start)) + sent, width)
        cuts, square, sent = cuts[kept], square[kept], sent[kept]
    square = square + (prefix[-1] - prefix[cuts[:, -1]] - mean) ** 2
    order = np.lexsort((*cuts.T[::-1], np.sqrt(square / len(start)) + sent))[:num]
    bounds = np.column_stack([cuts[order], np.full(len(order), len(block_s))])
    return [tuple(row) for row in np.diff(bounds, axis=1).tolist()]


def _best_by_place(cuts: Int64Array, metric: Float64Array, width: int) -> Int64Array:
    """Numbers of the best beginnings for each place of the last cut."""
    order = np.lexsort((metric, cuts[:, -1]))
    last = cuts[order, -1]
    first = np.searchsorted(last, last)
    kept: Int64Array = order[np.arange(len(order)) - first < width]
    return kept


def fastest_cut(cuts: Sequence[Cut], step_s: Callable[[Cut], float]) -> Cut:
    """The one that takes the least seconds, the first of equals. cuts: counts, or Plans of them.

    step_s: a simulated step, or the mean of a few that were measured (section 5.2: of 3).
    """
    return min(cuts, key=step_s)


def by_layers(blocks: Blocks, num_stages: int) -> Int64Array:
    """Stage of each block: equally many on each, to within one (OmniBal Table 4, "layer-based")."""
    return stage_numbers(partition([1.0] * blocks.num_blocks, num_stages))


def by_parameters(blocks: Blocks, num_stages: int) -> Int64Array:
    """Stage of each block: as equal in parameters as can be (OmniBal Table 4, "parameter-based")."""
    return stage_numbers(partition(blocks.parameters.tolist(), num_stages))
