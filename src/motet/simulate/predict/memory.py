"""Peak bytes of each rank of the cluster in a step: state, activations in flight in the Program, transients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from motet.core.arrays import Int64Array
from motet.core.spec import Layer
from motet.cost.memory import StageMemory, stage_memory
from motet.schedule import PlannedStage, high_water
from motet.schedule.coordinates import first_ranks, ranks_a_program_rank
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.tied import TiedApart, tied_apart, untied

MAX_LOGITS = 1 << 28
"""Most logits that exist at a time: Motet's backbone computes the loss slice by slice."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "transient")


class MemoryOfRanks(Mapping[str, Int64Array]):
    """`memory_of` on some ranks, computed when it is first read: of most Plans of a search nobody reads it.

    ranks: int64 [num_ranks].
    """

    def __init__(self, pricing: Pricing, ranks: Int64Array) -> None:
        self._given: tuple[Pricing, Int64Array] | None = (pricing, ranks)

    def __getitem__(self, part: str) -> Int64Array:
        return self._bytes[part]

    def __iter__(self) -> Iterator[str]:
        return iter(PARTS)

    def __len__(self) -> int:
        return len(PARTS)

    @cached_property
    def _bytes(self) -> dict[str, Int64Array]:
        assert self._given is not None, "what was priced is kept until here"
        (pricing, ranks), self._given = self._given, None
        return {part: rows[ranks] for part, rows in memory_of(pricing).items()}


def memory_of(pricing: Pricing) -> dict[str, Int64Array]:
    """Bytes by part, int64 [num_ranks of the cluster] each; 0 on ranks that the Plan does not use.

    A rank with several stages holds the state of all and computes one at a time. Activations are those at their peak;
    the largest transient is added as if it came then. What ZeRO 2 and 3 make whole for a pass in parts is there beside
    the passes between these. O(islands * actions).
    """
    program, layout = pricing.planned.program, pricing.layout
    # 1. On every program rank: [num_program_ranks], but activations [num_islands, num_program_ranks].
    of_program = {part: np.zeros(program.num_ranks, dtype=np.int64) for part in PARTS}
    tied, in_parts = tied_apart(pricing.plan), np.zeros(program.num_ranks, dtype=np.int64)
    for kind in pricing.planned.kinds:
        memory = _stage_memory(pricing, kind.stage, tied)
        for part in ("parameters", "gradients", "optimizer"):
            np.add.at(of_program[part], kind.ranks, getattr(memory, part))
        shared = memory.shared if kind.stage.unit in layout.in_bubbles and kind.stage.num_parts > 1 else 0
        np.maximum.at(of_program["transient"], kind.ranks, memory.transient - shared)
        np.add.at(in_parts, kind.ranks, shared)
    of_program["transient"] += in_parts
    if tied is not None:
        for part, size_bytes in tied.state(pricing.precision)._asdict().items():
            of_program[part][tied.ranks(pricing.planned)] += size_bytes
    of_program["activations"] = high_water(program, pricing.held()).astype(np.int64)
    # 2. On the ranks that each stands for.
    first, counts = first_ranks(layout), ranks_a_program_rank(layout)
    program_rank = np.repeat(np.arange(program.num_ranks), counts)
    ranks = first[:, program_rank] + np.arange(len(program_rank)) - np.repeat(counts.cumsum() - counts, counts)
    bytes_of = {part: np.zeros(pricing.plan.cluster.num_ranks, dtype=np.int64) for part in PARTS}
    for part, column in of_program.items():
        bytes_of[part][ranks] = np.broadcast_to(column, first.shape)[:, program_rank]
    return bytes_of


def _stage_memory(pricing: Pricing, stage: PlannedStage, tied: TiedApart | None) -> StageMemory:
    def rows(module: str, layer: Layer) -> float:
        found = pricing.layer_pricing.largest_rows(module, layer)
        return min(found, MAX_LOGITS / layer.output_width) if layer.targets_only else found

    unit = replace(stage.unit, zero=stage.zero, shard_size=stage.shard_size)
    by_stage = pricing.plan.schedule != "data_parallel"
    layers, copies = untied(tied, stage, pricing.layers(stage)), pricing.layer_pricing.largest_copies
    return stage_memory(unit, layers, rows, 0, pricing.precision, by_stage=by_stage, copies=copies)
