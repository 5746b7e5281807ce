"""Which encoder pipeline takes which microbatch of a step.

Three choices are placed, and the one with the shortest step is taken:

1. each microbatch in turn to the pipeline with the least work so far, which keeps the order that the backbone needs;
2. even work: longest first, then swaps (`balance.assign`);
3. the Plan's own.

400 random moves and swaps from there gain 0 to 2 % of a step (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from motet.balance import assign
from motet.core.arrays import Int64Array
from motet.simulate.filling.placement import ChosenPipelines, Placement, StepEncoder


def shortest(placement: Placement, own: ChosenPipelines) -> tuple[ChosenPipelines, int]:
    """The pipeline of each microbatch, for each encoder, and the ticks of the step. own: the Plan's choice."""
    taken, _, best = min((placement.taken(each), number, each) for number, each in enumerate(_choices(placement, own)))
    return best, taken


def _choices(placement: Placement, own: ChosenPipelines) -> Iterator[ChosenPipelines]:
    """No pipeline is left without a microbatch, as its collectives would be missing then."""
    work = [_work(encoder) for encoder in placement.encoders]
    yield [_in_turn(each.tolist(), len(encoder.ranks)) for each, encoder in zip(work, placement.encoders)]
    yield [assign(each, len(encoder.ranks)).ranks.tolist() for each, encoder in zip(work, placement.encoders)]
    yield own


def _work(encoder: StepEncoder) -> Int64Array:
    """Ticks of the passes of each microbatch, over all stages of an encoder's first pipeline, int64."""
    passes = [*encoder.forward[0], *encoder.backward[0]]
    work: Int64Array = np.sum([num * np.array(ticks) for num, ticks in passes if num], axis=0)
    return work


def _in_turn(work: list[int], num_pipelines: int) -> list[int]:
    loads, counts, chosen = [0] * num_pipelines, [0] * num_pipelines, []
    for microbatch, own in enumerate(work):
        empty = [number for number, count in enumerate(counts) if not count]
        # The last microbatches are for pipelines that have none yet.
        among = empty if len(empty) >= len(work) - microbatch else range(num_pipelines)
        pipeline = min(among, key=lambda number: (loads[number], number))
        chosen.append(pipeline)
        loads[pipeline] += own
        counts[pipeline] += 1
    return chosen
