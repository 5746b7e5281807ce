"""OmniBal's cut of a chain (section 4.2), and the cuts by layers and parameters that others use.

1. Greedy: `greedy_cut` gives the anchor.
2. Candidates: each cut of the anchor moves by up to `radius` layers.
3. Rank: standard deviation of the stages' seconds + seconds of all messages. (The paper adds the variance in ms^2 to
   MB. Its Table 4 shows the standard deviation, as "VAR". Its seconds are of forward; here, callers choose.)
4. Run the best few, and take the fastest (`fastest_cut`).

There are (2 radius + 1)^(stages - 1) candidates. `cuts_near` builds them cut by cut, and for each position of the last
cut keeps the best `width` beginnings. While there are no more than that, all candidates are ranked.
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
"""The number of blocks of each stage, in order."""

Cut = TypeVar("Cut")


def greedy_cut(block_s: Float64Array, num_stages: int) -> Counts:
    """Each stage takes blocks as long as that brings it nearer to an equal share of what is left.

    Example:
        >>> greedy_cut(np.array([1.0, 1.0, 1.0, 1.0, 4.0]), num_stages=2)
        (4, 1)
    """
    left_s, start, counts = float(block_s.sum()), 0, []
    for stage in range(num_stages - 1):
        last = len(block_s) - (num_stages - 1 - stage)
        share_s = left_s / (num_stages - stage)
        taken_s, stop = float(block_s[start]), start + 1
        while stop < last and abs(taken_s + block_s[stop] - share_s) < abs(taken_s - share_s):
            taken_s += float(block_s[stop])
            stop += 1
        counts.append(stop - start)
        left_s, start = left_s - taken_s, stop
    return (*counts, len(block_s) - start)


def cuts_near(
    block_s: Float64Array, send_s: Float64Array, anchor: Counts, *, radius: int = 1, num: int = 12, width: int = 64
) -> list[Counts]:
    """The best `num` cuts within `radius` of the anchor, best first.

    block_s: [num_blocks]. send_s: [num_stages - 1, num_blocks], seconds of the message at each cut after each block.
    O(stages * radius^2 * width).
    """
    num_stages = len(anchor)
    prefix = np.concatenate([[0.0], np.cumsum(block_s)])
    mean_s = prefix[-1] / num_stages

    def metric(square: Float64Array, sent_s: Float64Array) -> Float64Array:
        ranked: Float64Array = np.sqrt(square / num_stages) + sent_s
        return ranked

    # Beginnings of cuts: their bounds [num_beginnings, stages so far + 1], squared deviations and messages.
    bounds = np.zeros((1, 1), dtype=np.int64)
    square, sent_s = np.zeros(1), np.zeros(1)
    for edge, end in enumerate(np.cumsum(anchor)[:-1]):
        # 1. Extend each beginning by each position of the next cut.
        positions = np.arange(max(end - radius, 1), min(end + radius, len(block_s) - 1) + 1)
        beginning, choice = np.nonzero(positions[None, :] > bounds[:, -1][:, None])
        stop = positions[choice]
        square = square[beginning] + (prefix[stop] - prefix[bounds[beginning, -1]] - mean_s) ** 2
        sent_s = sent_s[beginning] + send_s[edge, stop - 1]
        bounds = np.column_stack([bounds[beginning], stop])
        # 2. Keep the best for each position.
        kept = _best_by_position(bounds, metric(square, sent_s), width)
        bounds, square, sent_s = bounds[kept], square[kept], sent_s[kept]
    square = square + (prefix[-1] - prefix[bounds[:, -1]] - mean_s) ** 2
    order = np.lexsort((*bounds.T[::-1], metric(square, sent_s)))[:num]
    bounds = np.column_stack([bounds[order], np.full(len(order), len(block_s))])
    return [tuple(row) for row in np.diff(bounds, axis=1).tolist()]


def _best_by_position(bounds: Int64Array, metric: Float64Array, width: int) -> Int64Array:
    """Indices of the best `width` beginnings for each position of the last cut."""
    order = np.lexsort((metric, bounds[:, -1]))
    last = bounds[order, -1]
    first = np.searchsorted(last, last)
    kept: Int64Array = order[np.arange(len(order)) - first < width]
    return kept


def fastest_cut(cuts: Sequence[Cut], step_s: Callable[[Cut], float]) -> Cut:
    """The cut with the fewest seconds; of equals, the first. cuts: counts, or Plans of them.

    step_s: seconds of a simulated step, or the mean of a few measured ones (section 5.2: of 3).
    """
    return min(cuts, key=step_s)


def by_layers(blocks: Blocks, num_stages: int) -> Int64Array:
    """The stage of each block: equally many blocks on each stage, to within one (OmniBal Table 4, "layer-based")."""
    return stage_numbers(partition([1.0] * blocks.num_blocks, num_stages))


def by_parameters(blocks: Blocks, num_stages: int) -> Int64Array:
    """The stage of each block: stages as equal in parameters as can be (OmniBal Table 4, "parameter-based")."""
    return stage_numbers(partition(blocks.parameters.tolist(), num_stages))
