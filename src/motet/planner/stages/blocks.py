"""The blocks of one module, or of several one after the other, as one tensor-parallel rank has them.

Seconds from `Job.block_costs`, bytes as `cost.memory.stage_memory` counts them, so that what is said to fit is what the
simulator finds to fit. A pipeline is cut between blocks; what is sent there is the output of the block, and of encoders
that are over before it and feed what comes after it: a chain carries them along.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.plan import Unit
from motet.core.spec import Layer
from motet.cost.memory import StageMemory, stage_layers, stage_memory
from motet.planner.job import Job
from motet.simulate.predict.memory import MAX_LOGITS


@dataclass(frozen=True, eq=False)
class Blocks:
    """[num_blocks] each, for one microbatch; seconds and output_bytes of a mean one, bytes held of the largest.

    names:        of the modules. owner: int64, place of a block's module in them.
    forward_s, backward_s, recompute_s, parameters, trained: as in `BlockCosts`.
    output_bytes: sent where a pipeline is cut after the block.
    state_bytes:  parameters, gradients, and the share of the optimizer's state. kept_bytes, saved_bytes: activations,
                  and how many of them recomputation does not keep.
    working_bytes, working_again_bytes: transients while the block runs, and if it is recomputed.
    """

    names: tuple[str, ...]
    owner: Int64Array
    forward_s: Float64Array
    backward_s: Float64Array
    recompute_s: Float64Array
    parameters: Float64Array
    trainable: Float64Array
    output_bytes: Float64Array
    state_bytes: Float64Array
    kept_bytes: Float64Array
    saved_bytes: Float64Array
    working_bytes: Float64Array
    working_again_bytes: Float64Array

    @property
    def num_blocks(self) -> int:
        return len(self.owner)

    @cached_property
    def seconds(self) -> Float64Array:
        """Forward and backward without recomputation: by what is frozen, and where (Cornstarch section 4.2)."""
        return self.forward_s + self.backward_s

    @cached_property
    def can_spare(self) -> BoolArray:
        """Of which recomputation spares anything."""
        return self.saved_bytes > 0


def blocks_of(job: Job, names: tuple[str, ...], num_examples: int, tp: int, dp: int) -> Blocks:
    """Of these modules, in the order of the data, for microbatches of num_examples examples.

    dp: replicas, over which the optimizer's state is sharded (ZeRO 1). O(layers).
    """
    costs = [job.block_costs(name, num_examples, tp) for name in names]
    sizes = [_block_bytes(job, name, num_examples, tp, dp) for name in names]
    own = np.concatenate([cost.output_bytes for cost in costs])
    owner = np.repeat(np.arange(len(names)), [cost.num_blocks for cost in costs])
    last = np.array([cost.output_bytes[-1] for cost in costs])
    begins = {name: place for place, name in enumerate(names)}
    wanted = [
        max((begins[sink] for source, sink in job.model.edges if source == name and sink in begins), default=-1)
        for name in names
    ]
    passed = np.array(
        [sum(last[done] for done in range(place) if wanted[done] > place) for place in range(len(names))], dtype=float
    )
    return Blocks(
        names,
        owner,
        np.concatenate([cost.forward_s for cost in costs]),
        np.concatenate([cost.backward_s for cost in costs]),
        np.concatenate([cost.recompute_s for cost in costs]),
        np.concatenate([cost.parameters for cost in costs]),
        np.concatenate([cost.trainable for cost in costs]),
        own + passed[owner],
        *np.concatenate(sizes, axis=1),
    )


def join(parts: tuple[Blocks, ...]) -> Blocks:
    """One after the other; what is sent at a cut is what each says itself."""
    names = tuple(name for part in parts for name in part.names)
    firsts = np.cumsum([0, *(len(part.names) for part in parts)])
    owner = np.concatenate([part.owner + first for part, first in zip(parts, firsts)])
    columns = [field.name for field in fields(Blocks)][2:]
    return Blocks(names, owner, *(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def _block_bytes(job: Job, name: str, num_examples: int, tp: int, dp: int) -> Float64Array:
    """state, kept, spared, working and working again, [5, num_blocks]."""
    num_blocks = len(job.model.module(name).blocks)
    layers = list(stage_layers(job.model, {name: (0, num_blocks)}, {}))
    again = list(stage_layers(job.model, {name: (0, num_blocks)}, {name: num_blocks}))
    unit = Unit(name, ({name: num_blocks},), dp=dp, tp=tp, zero=1)
    precision = job.mixed_precision(pipeline=True)

    def rows(module: str, layer: Layer) -> float:
        found = float(job.work(module, layer, num_examples).rows.max())
        return min(found, MAX_LOGITS / layer.output_width) if layer.targets_only else found

    priced: dict[object, StageMemory] = {}
    columns = np.zeros((5, num_blocks))
    for number, block in enumerate(job.model.module(name).blocks):
        kept, recomputed = (tuple(way[block.start : block.stop]) for way in (layers, again))
        for way in (kept, recomputed):
            if way not in priced:
                priced[way] = stage_memory(unit, way, rows, 1, precision)
        one, other = priced[kept], priced[recomputed]
        columns[:, number] = (
            one.parameters + one.gradients + one.optimizer,
            one.activations,
            one.activations - other.activations,
            one.transient,
            other.transient,
        )
    return columns
