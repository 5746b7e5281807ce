"""What the ranks of colocated data parallelism compute and hold for a batch: by placement, module and recomputation.

Either of a batch that is placed, or, before it is, of what a perfect balance would give: the mean, or the longest item.
The memory is as `simulate.memory` counts it, so that what fits here fits there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.exchange import Moved
from motet.core.plan import Plan, Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.flops import work_of
from motet.cost.memory import StageLayer, activation_bytes, stage_layers, stage_memory
from motet.cost.model import Work, backward_seconds
from motet.planner.job import Job
from motet.planner.stages.recompute import Fit, RecomputeMode, StageBytes, least_recompute, stage_bytes

_MAX_ROUNDS = 32


class ModuleState(NamedTuple):
    """Of a module on a rank: parameters, gradients and optimizer; and the transients of gathering and reducing them."""

    held_bytes: int
    transient_bytes: int


@dataclass(frozen=True, eq=False)
class ModuleLoad:
    """What a module takes: tables [num_ranks, num_microbatches]; rounds of recomputation by kind of layer.

    forward_s, backward_s, kept_bytes: without recomputation.
    recompute_s, saved_bytes: [num_kinds, num_ranks, num_microbatches], of one layer that is recomputed.
    num_again: int64 [num_blocks + 1, num_kinds], layers of each kind that are recomputed with the first n blocks.
    moved_bytes: outputs that each rank sends and receives, [num_microbatches, 2, dp]; None where nothing moves.
    """

    forward_s: Float64Array
    backward_s: Float64Array
    kept_bytes: Float64Array
    recompute_s: Float64Array
    saved_bytes: Float64Array
    num_again: Int64Array
    moved_bytes: Moved | None

    def recomputed(self, table: Float64Array, num_blocks: int) -> Float64Array:
        """The sum of recompute_s or saved_bytes over the layers of the first num_blocks."""
        summed: Float64Array = np.tensordot(self.num_again[num_blocks].astype(np.float64), table, axes=1)
        return summed


@dataclass(frozen=True, eq=False)
class Load:
    """modules: by name, in the order in which they run. largest_rows: of each layer, on any rank. tp: of the ranks.
    methods: how each microbatch is balanced; none where it is not.
    """

    job: Job
    tp: int
    modules: Mapping[str, ModuleLoad]
    largest_rows: Mapping[tuple[str, Layer], float]
    methods: tuple[str, ...] = ()

    @cached_property
    def stages(self) -> Mapping[str, StageBytes]:
        """Each module with its largest rows, without state: `state_of` has that."""
        return {name: self._stage(name) for name in self.modules}

    def _stage(self, name: str) -> StageBytes:
        unit = Unit("all", ({},), tp=self.tp, zero=0)
        spans = {name: (0, len(self.job.model.module(name).blocks))}
        precision = self.job.mixed_precision(pipeline=False)
        return stage_bytes(self.job.model, unit, spans, lambda *key: self.largest_rows[key], 1, precision)

    def held_bytes(self, recompute: Mapping[str, int]) -> float:
        """Activations of the fullest rank."""
        kept = np.zeros((1, 1))
        for name, load in self.modules.items():
            kept = kept + load.kept_bytes - load.recomputed(load.saved_bytes, recompute.get(name, 0))
        return float(kept.max())

    def peak_bytes(self, recompute: Mapping[str, int], state: Mapping[str, ModuleState]) -> float:
        """Of the fullest rank: a module computes at a time, so the largest transients count once."""
        transients = [
            state[name].transient_bytes
            + max(stage.largest_bytes, stage.working_bytes[name][: recompute.get(name, 0)].max(initial=0.0))
            for name, stage in self.stages.items()
        ]
        held = sum(own.held_bytes for own in state.values())
        return float(held + self.held_bytes(recompute) + max(transients))

    def seconds(self, name: str, recompute: Mapping[str, int], *, backward: bool) -> Float64Array:
        """[num_ranks, num_microbatches] of one module and pass."""
        load = self.modules[name]
        again = load.recomputed(load.recompute_s, recompute.get(name, 0))
        return load.backward_s + again if backward else load.forward_s

    def busiest_s(self, recompute: Mapping[str, int]) -> float:
        """Computation of the rank that has most in all: a step takes no less."""
        passes = [self.seconds(name, recompute, backward=back) for name in self.modules for back in (False, True)]
        total: Float64Array = np.stack(passes).sum(axis=(0, 2))
        return float(total.max())

    def waiting_s(self, recompute: Mapping[str, int]) -> float:
        """The same where ranks wait for each other in every pass of every module."""
        passes = [self.seconds(name, recompute, backward=back) for name in self.modules for back in (False, True)]
        return float(np.stack(passes).max(axis=1).sum())


def state_of(job: Job, unit: Unit) -> dict[str, ModuleState]:
    """Per module of a unit that holds all of each."""
    precision = job.mixed_precision(pipeline=False)
    found = {}
    for name in unit.modules:
        layers = stage_layers(job.model, {name: (0, len(job.model.module(name).blocks))}, {})
        memory = stage_memory(unit, layers, lambda *_: 0.0, 0, precision)
        found[name] = ModuleState(memory.held_bytes, memory.transient)
    return found


def fit_recomputation(load: Load, state: Mapping[str, ModuleState], capacity_bytes: float, mode: RecomputeMode) -> Fit:
    """What is recomputed so that every rank fits; where it is the least, no block of any module less would do.

    Ranks that are not alike lack different bytes: the least is taken for those that the fullest lacks, and, as long as
    a rank still lacks some, for these as well.
    """
    every = {name: _num_recomputable(stage.saved_bytes[name]) for name, stage in load.stages.items()}
    none = dict.fromkeys(every, 0)

    def over(recompute: Mapping[str, int]) -> float:
        return load.peak_bytes(recompute, state) - capacity_bytes

    chosen: Mapping[str, int] = none
    if mode == "full" or (mode == "least" and over(none) > 0):
        chosen = every
    if mode == "least" and over(none) > 0 >= over(every):
        chosen = _trimmed(load, _least(load, state, over, every), over)
    lacks = over(chosen)
    return Fit((chosen,), lacks + capacity_bytes, max(lacks, 0.0))


def _num_recomputable(saved_bytes: Float64Array) -> int:
    """Blocks up to the last that spares anything."""
    return int(np.flatnonzero(saved_bytes)[-1]) + 1 if saved_bytes.any() else 0


def _least(
    load: Load, state: Mapping[str, ModuleState], over: Callable[[Mapping[str, int]], float], every: Mapping[str, int]
) -> Mapping[str, int]:
    stages = load.stages
    idle = max(state[name].transient_bytes + stage.largest_bytes for name, stage in stages.items())
    spared = {name: stage.saved_bytes[name] for name, stage in stages.items()}
    grown = {
        name: np.maximum(state[name].transient_bytes + stage.working_bytes[name] - idle, 0)
        for name, stage in stages.items()
    }
    recompute_s = {name: _per_block(load.modules[name]) for name in every}
    lacking = over(dict.fromkeys(every, 0))
    for _ in range(_MAX_ROUNDS):
        chosen = least_recompute(recompute_s, spared, lacking, grown)
        if chosen is None:
            return every
        if (more := over(chosen)) <= 0:
            return chosen
        lacking += more
    return every


def _per_block(load: ModuleLoad) -> Float64Array:
    """Seconds that each block adds, of the busiest rank: what ranks wait for."""
    layers = np.diff(load.num_again, axis=0).astype(np.float64)
    seconds: Float64Array = layers @ load.recompute_s.max(axis=1).sum(axis=1)
    return seconds


def _trimmed(load: Load, recompute: Mapping[str, int], over: Callable[[Mapping[str, int]], float]) -> Mapping[str, int]:
    """Without the blocks that are not needed, the dearest first."""
    chosen = dict(recompute)
    cost = {name: float(_per_block(load.modules[name]).max(initial=0.0)) for name in chosen}
    for name in sorted(chosen, key=lambda name: (-cost[name], name)):
        while chosen[name] and over({**chosen, name: chosen[name] - 1}) <= 0:
            chosen[name] -= 1
    return chosen


class EvenBatch:
    """A job's batch in perfect balance, and padding is nothing: no placement computes less, or keeps less on the
    fullest rank. It is that of a rank with the mean of each microbatch, and of one for each module with its longest
    item alone.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._alone = cache(self._items)

    def load(self, num_ranks: int, num_microbatches: int, tp: int) -> Load:
        """Over num_ranks groups of tp ranks, of which those that are said above are in the Load."""
        size, names = self.job.batch.num_examples // num_microbatches, list(self.job.model.input_gradients)

        def work(name: str, layer: Layer) -> Work:
            example, rows, pairs = self._alone(name, layer)
            first = np.searchsorted(example, size * np.arange(num_microbatches))
            columns = np.zeros((2, 1 + len(names), num_microbatches))
            for own, amount in zip(columns, (rows, pairs), strict=True):
                own[0] = _reduced(np.add, amount, first) / num_ranks
                own[1 + names.index(name)] = _reduced(np.maximum, amount, first)
            return Work(columns[0].ravel(), columns[1].ravel())

        shape = 1 + len(names), num_microbatches
        return _load(self.job, tp, work, shape, lambda _: None)

    def _items(self, name: str, layer: Layer) -> tuple[Int64Array, Float64Array, Float64Array]:
        """The example of each item of a module, ascending, and its rows and pairs."""
        batch = self.job.batch
        items = batch.of(name)
        targets = batch.num_targets if name == BACKBONE else None
        alone = work_of(layer, items.length, np.arange(items.num_items), items.num_items, num_targets=targets)
        return items.example, alone.rows, alone.pairs


def _reduced(join: np.ufunc, amount: Float64Array, first: Int64Array) -> Float64Array:
    """Of the microbatches that start at the items `first`; 0 where there is no item."""
    has_items = np.diff(np.append(first, len(amount))) > 0
    joined: Float64Array = np.where(has_items, join.reduceat(np.append(amount, 0.0), first), 0.0)
    return joined


def assigned_load(job: Job, plan: Plan) -> Load:
    """Of a Plan's batch, the first examples of the job's, assigned as the simulator does."""
    assignment = job.assignment(plan)
    unit = plan.unit_of(BACKBONE)
    shape = unit.dp, assignment.num_microbatches

    def work(name: str, layer: Layer) -> Work:
        items = assignment.modules[name]
        batch_index = items.batch_index(shape[1])
        targets = None
        if name == BACKBONE:
            targets = np.bincount(batch_index, assignment.batch.num_targets, shape[0] * shape[1]).astype(np.int64)
        padded = job.model.module(name).padded
        return work_of(layer, items.length, batch_index, shape[0] * shape[1], padded=padded, num_targets=targets)

    load = _load(job, unit.tp, work, shape, lambda name: _moved_bytes(job, name, assignment, unit))
    return replace(load, methods=assignment.methods)


def _moved_bytes(job: Job, name: str, assignment: StepAssignment, unit: Unit) -> Moved | None:
    if name == BACKBONE:
        return None
    node = np.array([job.cluster.node_of(rank) for rank in unit.ranks[:: unit.tp]])
    rows = assignment.moved_rows(name, node)
    row_bytes = job.model.module(name).layers[-1].output_width * job.mixed_precision(pipeline=False).compute
    return rows.in_bytes(row_bytes, unit.tp) if rows.busiest.any() else None


def _load(
    job: Job,
    tp: int,
    work: Callable[[str, Layer], Work],
    shape: tuple[int, int],
    moved_bytes: Callable[[str], Moved | None],
) -> Load:
    names = [module.name for module in job.model.modules if module.name != BACKBONE] + [BACKBONE]
    largest: dict[tuple[str, Layer], float] = {}
    modules = {}
    for name in names:
        blocks = job.model.module(name).blocks
        whole = list(stage_layers(job.model, {name: (0, len(blocks))}, {name: len(blocks)}))
        kinds = list(dict.fromkeys(whole))
        priced = np.zeros((5, len(kinds), *shape))
        for number, placed in enumerate(kinds):
            own = work(name, placed.layer)
            largest[name, placed.layer] = float(own.rows.max(initial=0.0))
            priced[:, number] = _priced(job, placed, own, tp).reshape(5, *shape)
        of_kind = np.array([[placed == kind for kind in kinds] for placed in whole]).reshape(len(whole), -1)
        again = of_kind * np.array([kind.recomputed for kind in kinds])
        per_block = np.add.reduceat(again.astype(np.int64), [block.start for block in blocks], axis=0)
        num_again = np.concatenate([np.zeros((1, len(kinds)), dtype=np.int64), per_block.cumsum(axis=0)])
        forward, backward, kept = np.tensordot(of_kind.sum(axis=0).astype(np.float64), priced[:3], axes=(0, 1))
        modules[name] = ModuleLoad(forward, backward, kept, priced[3], priced[4], num_again, moved_bytes(name))
    return Load(job, tp, modules, largest)


def _priced(job: Job, placed: StageLayer, work: Work, tp: int) -> Float64Array:
    """Of one layer: forward, backward, bytes kept, and, where it is recomputed, seconds added and bytes spared."""
    layer, element_bytes = placed.layer, job.mixed_precision(pipeline=False).compute
    seconds = job.cost.layer_seconds(placed.module, layer, work, tp)
    tensor_s = job.cost.tensor_seconds(layer, work, range(tp)) if tp > 1 else np.zeros_like(work.rows)
    does = float(placed.has_backward)
    forward = seconds.forward_s + tensor_s
    row_bytes = activation_bytes(layer, 1.0, element_bytes=element_bytes, tp=tp)
    input_bytes = activation_bytes(layer, 1.0, element_bytes=element_bytes, tp=tp, recomputed=True)
    return np.stack(
        [
            forward,
            backward_seconds(seconds, layer, placed.needs_input) + does * tensor_s,
            does * work.rows * row_bytes,
            placed.recomputed * forward,
            placed.recomputed * work.rows * (row_bytes - input_bytes),
        ]
    )
