"""Plans whose bubbles are filled by step, and steps of any lengths."""

from dataclasses import replace

import numpy as np

from motet.assign.plan import assign_step
from motet.core.plan import Unit
from motet.core.workload import BatchLengths, ItemLengths
from motet.schedule import coarse_fills, fillable, planned
from unit.schedule.plans import PLANS, VLM, cluster, plan

LLM = Unit("llm", ({"backbone": 2},) * 4, pp=4)
IMAGE, AUDIO = Unit("image", ({"image": 4},), dp=4), Unit("audio", ({"audio": 1},) * 2, dp=2, pp=2)
TWO, GATHERING = (
    (Unit("image", ({"image": 4},), dp=8), Unit("audio", ({"audio": 1},) * 2, dp=4, pp=2)),
    replace(LLM, dp=2, zero=3),
)
AUDIO_BESIDE = Unit("audio", ({"audio": 2},), first_rank=8)
BLOCKING = replace(cluster(4), device=replace(cluster(4).device, overlaps=False))


def in_blocks(given):
    """The plan with fills of blocks, all of them before and after the backbone's passes."""
    stages, fills = planned(given).stages, []
    unfilled, encoders = fillable(given)
    for fill in coarse_fills(unfilled.program, encoders):
        num = stages[int(fill.action.partition("F")[0].partition("B")[0])].num_layers
        fills += [replace(fill, action=f"{fill.action}.{part}" if num > 1 else fill.action) for part in range(num)]
    return replace(given, fills=tuple(fills))


def by_step(*units, num_ranks=4, batch_size=8, **options):
    """A plan in blocks."""
    return in_blocks(plan(VLM, *units, batch_size=batch_size, num_ranks=num_ranks, filling="by_step", **options))


FILLED = {
    "two encoders with pipelines of their own": by_step(LLM, IMAGE, AUDIO),
    "whole passes": plan(VLM, LLM, IMAGE, AUDIO, batch_size=8, num_ranks=4, filling="by_step"),
    "gpipe": by_step(LLM, IMAGE, AUDIO, schedule="gpipe"),
    "zero bubble": by_step(LLM, IMAGE, AUDIO, schedule="zb_h1"),
    "interleaved, replicas": replace(PLANS["filled"], filling="by_step"),
    "messages hold up compute": replace(by_step(LLM, IMAGE, AUDIO), cluster=BLOCKING),
    "in one unit": by_step(LLM, Unit("both", ({"image": 4, "audio": 1}, {"audio": 1}), pp=2, dp=2)),
    "an encoder beside": by_step(LLM, IMAGE, Unit("audio", ({"audio": 2},), first_rank=4), num_ranks=5),
    "replicas that gather in each pass": by_step(GATHERING, *TWO, num_ranks=8, batch_size=16),
    "replicas that gather in each pass, held up": replace(
        by_step(GATHERING, *TWO, num_ranks=8, batch_size=16), cluster=replace(BLOCKING, ranks_per_node=8)
    ),
    "replicas of one island that gather in each pass": by_step(
        GATHERING, TWO[0], AUDIO_BESIDE, num_ranks=9, batch_size=16
    ),
    "replicas of one island that reduce in each pass, held up": replace(
        by_step(replace(GATHERING, zero=2), TWO[0], AUDIO_BESIDE, num_ranks=9, batch_size=16),
        cluster=replace(BLOCKING, ranks_per_node=9),
    ),
    "encoders that are gathered in each pass": by_step(
        GATHERING, *(replace(unit, zero=3, shard_size=2) for unit in TWO), num_ranks=8, batch_size=16
    ),
    "copies that are gathered in each pass": by_step(
        replace(LLM, zero=3, replicated=("audio",)), IMAGE, schedule="gpipe"
    ),
    "recomputed": by_step(replace(LLM, recompute=({"backbone": 1},) * 4), IMAGE, AUDIO),
}
"""The audio encoder of VLM is frozen: it has no backward passes."""


def step_of(given, rng):
    """An assigned step: text of 1 to 4,000 tokens, and none to three items of each kind."""
    num, items = given.batch_size, {}
    sequence = rng.integers(1, 4000, num)
    for name in ("image", "audio"):
        example = np.repeat(np.arange(num), rng.integers(0, 4, num))
        length = rng.integers(1, 4000, len(example))
        items[name] = ItemLengths(example, length, length)
        sequence += np.bincount(example, length, num).astype(np.int64)
    return assign_step(given, BatchLengths(sequence, sequence - 1, np.zeros(num, np.int32), items))
