"""Peak bytes of each rank of the cluster in a step: state, activations in flight in the Program, transients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.spec import Layer
from motet.cost.memory import StageMemory, stage_memory
from motet.schedule import PlannedStage, high_water
from motet.schedule.coordinates import ranks_of
from motet.simulate.predict.stage_pricing import Pricing

MAX_LOGITS = 1 << 28
"""Most logits that exist at a time: Motet's backbone computes the loss slice by slice."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "transient")


def memory_of(pricing: Pricing) -> dict[str, Int64Array]:
    """Bytes by part, int64 [num_ranks of the cluster] each; 0 on ranks that the Plan does not use.

    A rank with several stages holds the state of all and computes one at a time. Activations are those at their peak;
    the largest transient is added as if it came then. O(islands * actions).
    """
    program, stages = pricing.planned.program, pricing.planned.stages
    bytes_of = {part: np.zeros(pricing.plan.cluster.num_ranks, dtype=np.int64) for part in PARTS}
    memory_by_key: dict[tuple[object, ...], StageMemory] = {}
    held = np.stack([pricing.islands(stage).held for stage in stages], axis=1)
    for island, activations in enumerate(high_water(program, held).astype(np.int64)):
        for stage in stages:
            if stage.key not in memory_by_key:
                memory_by_key[stage.key] = _stage_memory(pricing, stage)
            stage_ranks, memory = ranks_of(pricing.layout, stage.rank, island), memory_by_key[stage.key]
            ranks = slice(stage_ranks.start, stage_ranks.stop)
            for part in ("parameters", "gradients", "optimizer"):
                bytes_of[part][ranks] += getattr(memory, part)
            bytes_of["activations"][ranks] = activations[stage.rank]
            bytes_of["transient"][ranks] = np.maximum(bytes_of["transient"][ranks], memory.transient)
    return bytes_of


def _stage_memory(pricing: Pricing, stage: PlannedStage) -> StageMemory:
    def rows(module: str, layer: Layer) -> float:
        found = pricing.largest_rows(module, layer) / stage.num_shares
        return min(found, MAX_LOGITS / layer.output_width) if layer.targets_only else found

    unit = replace(stage.unit, zero=stage.zero, shard_size=stage.shard_size)
    by_stage = pricing.plan.schedule != "data_parallel"
    return stage_memory(unit, pricing.layers(stage), rows, 0, pricing.precision, by_stage=by_stage)
