"""Whether the fills of a step fit memory: activations of encoders are kept where their microbatches go."""

from __future__ import annotations

import numpy as np

from motet.core.arrays import Float64Array
from motet.cost.memory import USABLE_MEMORY
from motet.schedule import PlannedProgram, high_water
from motet.schedule.coordinates import ranks_of
from motet.simulate.predict.memory import memory_of
from motet.simulate.predict.stage_pricing import Pricing


def fits(filled: PlannedProgram, pricing: Pricing, island: int) -> bool:
    """Whether no rank of an island is fuller than USABLE_MEMORY, or than the fullest is under the Plan's own fills.

    filled: the Program of a step's fills. pricing: of the step; its Program has the Plan's own fills.
    """
    own, parts = pricing.planned, memory_of(pricing)
    firsts = [ranks_of(pricing.layout, rank, island)[0] for rank in range(own.program.num_ranks)]
    bytes_of = {part: rows[firsts] for part, rows in parts.items()}
    own_bytes: Float64Array = np.sum(list(bytes_of.values()), axis=0)
    limit_bytes = max(USABLE_MEMORY * pricing.plan.cluster.device.memory_bytes, float(own_bytes.max()))
    held = np.stack([pricing.stage(stage, island).held for stage in own.stages])
    others = own_bytes - bytes_of["activations"]
    most: Float64Array = others + _kept(filled, held)
    if (most > limit_bytes).any():
        most = others + high_water(filled.program, held)
    return bool((most <= limit_bytes).all())


def _kept(filled: PlannedProgram, held: Float64Array) -> Float64Array:
    """Bytes of all activations of a step on each program rank: no more are kept at a time. held: of each stage."""
    kept = np.zeros(filled.program.num_ranks)
    for number, stage in enumerate(filled.stages):
        kept[stage.rank] += held[number, list(stage.microbatches)].sum()
    return kept
