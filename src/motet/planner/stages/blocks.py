"""The blocks of one module, or of several in a row, as one tensor-parallel rank has them.

Seconds are those of `Job.block_costs`. Bytes are counted as by `cost.memory.stage_memory`, so that what fits here also
fits in the simulator. A pipeline is cut between blocks. At a cut, the output of the block is sent and, in a chain, also
the outputs of earlier encoders that a later module takes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.plan import Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.memory import StageMemory, stage_layers, stage_memory, state_bytes
from motet.planner.job import Job
from motet.simulate.predict.memory import MAX_LOGITS


@dataclass(frozen=True, eq=False)
class Blocks:
    """Costs of blocks, [num_blocks] each, for one microbatch: seconds and output_bytes of the mean one, others of the
    largest.

    names:        the modules. owner: int64, the index in `names` of the block's module.
    forward_s, backward_s, deferred_s, recompute_s, parameters, trainable: as in `BlockCosts`.
    output_bytes: bytes that are sent if a pipeline is cut after the block.
    state_bytes:  parameters, gradients, and the rank's share of the optimizer.
    kept_bytes:   activations kept for backward. saved_bytes: those of them that recomputing the block does not keep.
    working_bytes, recompute_working_bytes: transients while the block runs, without and with its recomputation.
    start_bytes:  activations that the block keeps beside these where a stage begins with it, recomputed or not: of what
                  has come to all tensor-parallel ranks, whole rows; and of rows of encoders that an earlier block has
                  taken in, and this one or a later one takes in again.
    apart_bytes:  state of weights that embedding and output layer share, beside that in state_bytes, where the first
                  and the last block of the backbone are in two stages: each of their ranks has it whole, once
                  (`simulate/predict/tied.py`).
    """

    names: tuple[str, ...]
    owner: Int64Array
    forward_s: Float64Array
    backward_s: Float64Array
    deferred_s: Float64Array
    recompute_s: Float64Array
    parameters: Float64Array
    trainable: Float64Array
    output_bytes: Float64Array
    state_bytes: Float64Array
    kept_bytes: Float64Array
    saved_bytes: Float64Array
    working_bytes: Float64Array
    recompute_working_bytes: Float64Array
    start_bytes: Float64Array
    apart_bytes: Float64Array

    @property
    def num_blocks(self) -> int:
        """The blocks of all modules together."""
        return len(self.owner)

    @cached_property
    def seconds(self) -> Float64Array:
        """Forward and backward without recomputation. Backward depends on what is frozen (Cornstarch section 4.2)."""
        return self.forward_s + self.backward_s

    @cached_property
    def ends_of_backbone(self) -> tuple[int, int]:
        """The first and the last block of the backbone; twice the first of all where it is not among them."""
        of_backbone = [number for number, owner in enumerate(self.owner.tolist()) if self.names[owner] == BACKBONE]
        return (of_backbone[0], of_backbone[-1]) if of_backbone else (0, 0)

    @cached_property
    def can_recompute(self) -> BoolArray:
        """Whether recomputing the block saves anything."""
        return self.saved_bytes > 0


def blocks_of(job: Job, names: tuple[str, ...], num_examples: int, tp: int, dp: int) -> Blocks:
    """The blocks of these modules, in the order of the data, for microbatches of num_examples examples.

    dp: replicas, over which the optimizer's state is sharded (ZeRO 1). O(layers).
    """
    costs = [job.block_costs(name, num_examples, tp) for name in names]
    sizes = [_block_bytes(job, name, num_examples, tp, dp) for name in names]
    owner = np.repeat(np.arange(len(names)), [cost.num_blocks for cost in costs])
    output = np.concatenate([cost.output_bytes for cost in costs])
    carried = _carried_bytes(job, names, [float(cost.output_bytes[-1]) for cost in costs])
    return Blocks(
        names,
        owner,
        np.concatenate([cost.forward_s for cost in costs]),
        np.concatenate([cost.backward_s for cost in costs]),
        np.concatenate([cost.deferred_s for cost in costs]),
        np.concatenate([cost.recompute_s for cost in costs]),
        np.concatenate([cost.parameters for cost in costs]),
        np.concatenate([cost.trainable for cost in costs]),
        output + carried[owner],
        *np.concatenate(sizes, axis=1),
    )


def _carried_bytes(job: Job, names: tuple[str, ...], last_output: list[float]) -> Float64Array:
    """[num_modules]: outputs of earlier modules that every cut inside a module carries on to a later one.

    last_output: bytes of the output of each module.
    """
    index = {name: number for number, name in enumerate(names)}
    last_sink = [
        max((index[sink] for source, sink in job.model.edges if source == name and sink in index), default=-1)
        for name in names
    ]
    return np.array(
        [
            sum(last_output[earlier] for earlier in range(number) if last_sink[earlier] > number)
            for number in range(len(names))
        ],
        dtype=float,
    )


def join(parts: tuple[Blocks, ...]) -> Blocks:
    """The blocks of all parts in a row. Their output_bytes stay: no part carries an output of another."""
    names = tuple(name for part in parts for name in part.names)
    firsts = np.cumsum([0, *(len(part.names) for part in parts)])
    owner = np.concatenate([part.owner + first for part, first in zip(parts, firsts)])
    columns = [field.name for field in fields(Blocks)][2:]
    return Blocks(names, owner, *(np.concatenate([getattr(part, name) for part in parts]) for name in columns))


def _block_bytes(job: Job, name: str, num_examples: int, tp: int, dp: int) -> Float64Array:
    """[7, num_blocks]: state, kept, saved, working, recompute_working, start and apart bytes of each block. Cached."""
    key = "block bytes", name, num_examples, tp, dp
    if key not in job.of_any_cluster:
        job.of_any_cluster[key] = _counted_bytes(job, name, num_examples, tp, dp)
    columns: Float64Array = job.of_any_cluster[key]
    return columns


def _counted_bytes(job: Job, name: str, num_examples: int, tp: int, dp: int) -> Float64Array:
    num_blocks = len(job.model.module(name).blocks)
    kept_layers = list(stage_layers(job.model, {name: (0, num_blocks)}, {}))
    recomputed_layers = list(stage_layers(job.model, {name: (0, num_blocks)}, {name: num_blocks}))
    unit = Unit(name, ({name: num_blocks},), dp=dp, tp=tp, zero=1)
    precision = job.mixed_precision(pipeline=True)

    def rows(module: str, layer: Layer) -> float:
        most = float(job.work(module, layer, num_examples).rows.max())
        return min(most, MAX_LOGITS / layer.output_width) if layer.targets_only else most

    memory: dict[object, StageMemory] = {}
    columns = np.zeros((7, num_blocks))
    for number, block in enumerate(job.model.module(name).blocks):
        both = [tuple(layers[block.start : block.stop]) for layers in (kept_layers, recomputed_layers)]
        both.append(tuple(stage_layers(job.model, {name: (number, number + 1)}, {})))
        for layers in both:
            if layers not in memory:
                memory[layers] = stage_memory(unit, layers, rows, 1, precision)
        kept, recomputed, starting = (memory[layers] for layers in both)
        columns[:6, number] = (
            kept.parameters + kept.gradients + kept.optimizer,
            kept.activations,
            kept.activations - recomputed.activations,
            kept.transient,
            recomputed.transient,
            starting.activations - kept.activations,
        )
    for source, size_bytes in job.taken_bytes(num_examples).items() if name == BACKBONE else ():
        entries = job.model.entries(source, name)
        columns[1, entries[0]] += size_bytes
        columns[5, entries[0] + 1 : entries[-1] + 1] += size_bytes
    module = job.model.module(name)
    if module.tied_weights:
        number = -(-module.tied_weights // tp)
        updated = number if module.layers[0].trainable else 0
        whole, share = (
            sum(state_bytes(number, updated, precision=precision, zero=zero, shard_ranks=dp)) for zero in (0, 1)
        )
        columns[6, 0] += whole - share
        columns[6, -1] += whole
    return columns
