"""The seconds and bytes of the ranks of colocated data parallelism for a batch: by module and recomputation.

`assigned_load` has those of a batch whose items are assigned to ranks; `EvenBatch` those of a perfect balance, which
needs no assignment. Bytes are counted as in `simulate.predict.memory`, so that what fits here fits there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from motet.assign.rows import num_given_rows
from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.exchange import Moved
from motet.core.plan import Plan, Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE, BatchLengths
from motet.cost.flops import like_layer, work_of_items
from motet.cost.memory import StageLayer, kept_bytes, stage_layers, stage_memory, taken_bytes
from motet.cost.model import Work, backward_seconds
from motet.planner.job import Job
from motet.planner.stages.recompute import StageBytes, stateless_bytes
from motet.simulate.predict.context_pricing import ContextPrice, ContextPricing
from motet.simulate.predict.layer_work import LayerWork

_NUM_SAMPLED_REPLICAS, _NUM_SAMPLED = 256, 512
"""The most replicas of a sample, and the most microbatches of all of them together."""


class ModuleState(NamedTuple):
    """Bytes of a module's state on a rank.

    held_bytes: parameters, gradients and optimizer. transient_bytes: of gathering parameters and reducing gradients.
    """

    held_bytes: int
    transient_bytes: int


@dataclass(frozen=True, eq=False)
class ModuleLoad:
    """Seconds and bytes of a module on each rank. Layers are alike within a kind.

    forward_s, backward_s, kept_bytes: [num_ranks, num_microbatches], without recomputation.
    recompute_s, saved_bytes: [num_kinds, num_ranks, num_microbatches], for one recomputed layer of each kind.
    num_recomputed: int64 [num_blocks + 1, num_kinds], recomputed layers of each kind if the first n blocks are.
    moved_bytes:    [num_microbatches, 2, dp], outputs that each rank sends and receives; None where nothing moves.
    """

    forward_s: Float64Array
    backward_s: Float64Array
    kept_bytes: Float64Array
    recompute_s: Float64Array
    saved_bytes: Float64Array
    num_recomputed: Int64Array
    moved_bytes: Moved | None

    def recomputed(self, table: Float64Array, num_blocks: int) -> Float64Array:
        """[num_ranks, num_microbatches]: the sum of a table by kind over the layers of the first num_blocks blocks."""
        if not num_blocks:
            return np.zeros(table.shape[1:])
        counts = self.num_recomputed[num_blocks].astype(np.float64)
        summed: Float64Array = (counts @ table.reshape(len(counts), -1)).reshape(table.shape[1:])
        return summed


@dataclass(frozen=True, eq=False)
class Load:
    """Seconds and bytes of all modules on each rank.

    tp:           tensor-parallel ranks that together are one rank here.
    modules:      by name, in the order in which they run.
    largest_rows: the most rows of each layer on any rank.
    methods:      the method by which each microbatch is balanced; () if none is.
    """

    job: Job
    tp: int
    modules: Mapping[str, ModuleLoad]
    largest_rows: Mapping[tuple[str, Layer], float]
    methods: tuple[str, ...] = ()

    @cached_property
    def stages(self) -> Mapping[str, StageBytes]:
        """Bytes of each module at its largest rows, without state, which `state_of` has."""
        return {name: self._stage(name) for name in self.modules}

    def _stage(self, name: str) -> StageBytes:
        unit = Unit("all", ({},), tp=self.tp, zero=0)
        spans = {name: (0, len(self.job.model.module(name).blocks))}
        precision = self.job.mixed_precision(pipeline=False)
        return stateless_bytes(self.job.model, unit, spans, lambda *key: self.largest_rows[key], 1, precision)

    def held_bytes(self, recompute: Mapping[str, int]) -> float:
        """Activations of the fullest rank.

        recompute: recomputed blocks by module, here and below.
        """
        kept = np.zeros((1, 1))
        for name, load in self.modules.items():
            kept = kept + load.kept_bytes - load.recomputed(load.saved_bytes, recompute.get(name, 0))
        return float(kept.max())

    def peak_bytes(self, recompute: Mapping[str, int], state: Mapping[str, ModuleState]) -> float:
        """Bytes of the fullest rank. One module computes at a time, so that only the largest transients count."""
        transients = [
            state[name].transient_bytes
            + max(stage.largest_bytes, stage.working_bytes[name][: recompute.get(name, 0)].max(initial=0.0))
            for name, stage in self.stages.items()
        ]
        state_bytes = sum(module.held_bytes for module in state.values())
        return float(state_bytes + self.held_bytes(recompute) + max(transients))

    def seconds(self, name: str, recompute: Mapping[str, int], *, backward: bool) -> Float64Array:
        """[num_ranks, num_microbatches]: seconds of one pass of a module."""
        load = self.modules[name]
        recompute_s = load.recomputed(load.recompute_s, recompute.get(name, 0))
        return load.backward_s + recompute_s if backward else load.forward_s

    def busiest_s(self, recompute: Mapping[str, int]) -> float:
        """Computation of the busiest rank: a lower bound of the step."""
        passes = [self.seconds(name, recompute, backward=back) for name in self.modules for back in (False, True)]
        total: Float64Array = np.stack(passes).sum(axis=(0, 2))
        return float(total.max())

    def waiting_s(self, recompute: Mapping[str, int]) -> float:
        """Computation if ranks wait for each other in every pass of every module."""
        passes = [self.seconds(name, recompute, backward=back) for name in self.modules for back in (False, True)]
        return float(np.stack(passes).max(axis=1).sum())


def state_of(job: Job, unit: Unit) -> dict[str, ModuleState]:
    """The state of each module of a unit that holds all blocks of its modules."""
    precision = job.mixed_precision(pipeline=False)
    state = {}
    for name in unit.modules:
        layers = stage_layers(job.model, {name: (0, len(job.model.module(name).blocks))}, {})
        memory = stage_memory(unit, layers, lambda *_: 0.0, 0, precision)
        state[name] = ModuleState(memory.held_bytes, memory.transient)
    return state


class EvenBatch:
    """A job's batch in perfect balance and without padding: a lower bound of every assignment.

    No assignment computes less, or keeps less on the fullest rank, than the maximum over these ranks: one with the mean
    of each microbatch, and one for each module that has its longest item alone.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._alone = cache(self._items)

    def load(self, num_ranks: int, num_microbatches: int, tp: int) -> Load:
        """The load of num_ranks groups of tp ranks; its rows are the ranks that are described above."""
        size, names = self.job.batch.num_examples // num_microbatches, list(self.job.model.input_gradients)

        @cache
        def work_like(name: str, layer: Layer) -> Work:
            example, rows, pairs = self._alone(name, layer)
            first = np.searchsorted(example, size * np.arange(num_microbatches))
            columns = np.zeros((2, 1 + len(names), num_microbatches))
            for own, amount in zip(columns, (rows, pairs), strict=True):
                own[0] = _reduced(np.add, amount, first) / num_ranks
                own[1 + names.index(name)] = _reduced(np.maximum, amount, first)
            return Work(columns[0].ravel(), columns[1].ravel())

        def work(name: str, layer: Layer) -> Work:
            return work_like(name, like_layer(layer))

        shape = 1 + len(names), num_microbatches

        def taken(name: str) -> Float64Array:
            items = self.job.batch.of(name)
            rows = np.zeros(shape)
            microbatch = np.minimum(items.example // size, num_microbatches - 1)
            rows[0] = np.bincount(microbatch, items.num_tokens, num_microbatches) / num_ranks
            return rows

        learning = {name: np.full(num_microbatches, self._learning(name)) for name in names}
        return _load(self.job, tp, work, shape, learning, lambda _: None, taken)

    def _learning(self, name: str) -> float:
        """The least share of a module's work in microbatches with a backward pass, whichever examples these have."""
        batch = self.job.batch
        if name != BACKBONE:
            return 1.0
        is_learnt = batch.has_any(self.job.model.learners(name))
        if is_learnt.all():
            return 1.0
        rows = batch.sequence.astype(np.float64)
        amounts = np.ones_like(rows), rows, rows**2, batch.num_targets
        return min(float(amount[is_learnt].sum()) / max(float(amount.sum()), 1.0) for amount in amounts)

    def forget(self) -> None:
        """Let go of what is kept of each item: as much as several batches. It is counted again if it is asked for."""
        self._alone = cache(self._items)

    def _items(self, name: str, layer: Layer) -> tuple[Int64Array, Float64Array, Float64Array]:
        """The example of each item of a module, ascending, and the item's rows and pairs in a layer."""
        batch = self.job.batch
        items = batch.of(name)
        targets = batch.num_targets if name == BACKBONE else None
        count = items.num_items
        alone = work_of_items(layer, items, np.arange(count), count, num_targets=targets)
        return items.example, alone.rows, alone.pairs


def _reduced(join: np.ufunc, amount: Float64Array, first: Int64Array) -> Float64Array:
    """[num_microbatches]: the sum or maximum of `amount` over the items of each microbatch; 0 where there are none.

    first: the first item of each microbatch. join: np.add or np.maximum.
    """
    has_items = np.diff(np.append(first, len(amount))) > 0
    joined: Float64Array = np.where(has_items, join.reduceat(np.append(amount, 0.0), first), 0.0)
    return joined


def assigned_load(job: Job, plan: Plan) -> Load:
    """The load of a Plan on the first examples of the job's batch, assigned as in the simulator."""
    return load_of(job, plan, job.assignment(plan))


def sample_of(plan: Plan) -> Plan:
    """The Plan for the first of its microbatches on the first of its replicas: enough to compare Plans.

    Examples are drawn alike, so that other microbatches and replicas are like these; and assigning takes longest.
    """
    (unit,) = plan.units
    a_node = max(plan.cluster.ranks_per_node // unit.tp, 1)
    replicas = min(unit.dp, -(-_NUM_SAMPLED_REPLICAS // a_node) * a_node)
    size = replicas * plan.microbatch_size
    num_microbatches = min(plan.batch_size // (unit.dp * plan.microbatch_size), -(-_NUM_SAMPLED // replicas))
    shard_size = unit.shard_size if replicas % (unit.shard_size or 1) == 0 else 0
    sampled = replace(unit, dp=replicas, shard_size=shard_size)
    return replace(plan, units=(sampled,), batch_size=size * num_microbatches)


def load_of(job: Job, plan: Plan, assignment: StepAssignment) -> Load:
    """The load of the ranks of a Plan's one unit, for items that are assigned to them."""
    unit, work = plan.unit_of(BACKBONE), LayerWork(plan, assignment)
    shape, are_shared = (unit.dp, assignment.num_microbatches), any(items.cuts for items in assignment.modules.values())

    # A microbatch has a backward pass through a module if it has items of what learns.
    learning = {name: assignment.has_any(job.model.learners(name)).astype(float) for name in assignment.modules}
    load = _load(
        job,
        unit.tp,
        work.of_replicas,
        shape,
        learning,
        lambda name: _moved_bytes(job, name, assignment, unit),
        lambda name: num_given_rows(assignment, name, None),
        ContextPricing(work, job.cost, job.exchange).price if are_shared else None,
    )
    return replace(load, methods=assignment.methods)


def load_alone(job: Job, lengths: BatchLengths, own: Mapping[str, Int64Array]) -> Load:
    """The load of one rank in one microbatch. own: numbers of the items of each module that are on the rank."""
    items = {name: lengths.of(name).take_items(chosen) for name, chosen in own.items()}
    sequences = own[BACKBONE]
    num_targets = int(lengths.num_targets[sequences].sum())

    def work(name: str, layer: Layer) -> Work:
        targets = num_targets if name == BACKBONE else None
        padded = job.model.module(name).padded
        return work_of_items(layer, items[name], padded=padded, num_targets=targets)

    def taken(name: str) -> Float64Array:
        of = lengths.of(name)
        return np.full((1, 1), float(of.num_tokens[np.isin(of.example, sequences)].sum()))

    return _load(job, 1, work, (1, 1), dict.fromkeys(items, np.ones(1)), lambda _: None, taken)


def _moved_bytes(job: Job, name: str, assignment: StepAssignment, unit: Unit) -> Moved | None:
    if name == BACKBONE:
        return None
    node = job.cluster.nodes_of(unit.ranks[:: unit.tp])
    rows = assignment.moved_rows(name, node, merges=job.model.merges)
    row_bytes = job.model.moved(name)[0].output_width * job.mixed_precision(pipeline=False).compute
    return rows.in_bytes(row_bytes, unit.tp) if rows.busiest.any() else None


def _load(
    job: Job,
    tp: int,
    work: Callable[[str, Layer], Work],
    shape: tuple[int, int],
    learning: Mapping[str, Float64Array],
    moved_bytes: Callable[[str], Moved | None],
    taken: Callable[[str], Float64Array | Int64Array],
    context: Callable[[str, Layer], ContextPrice] | None = None,
) -> Load:
    """work: of a layer on all ranks and microbatches; shape: (ranks, microbatches). learning: by module, the share of
    each microbatch that has a backward pass. taken: rows of an encoder that sequences take in, of the shape.
    context: of a layer, what ranks that share items exchange; None: none do."""
    names = [module.name for module in job.model.modules if module.name != BACKBONE] + [BACKBONE]
    largest: dict[tuple[str, Layer], float] = {}
    modules = {}
    for name in names:
        # 1. Price one layer of each kind.
        blocks = job.model.module(name).blocks
        layers = list(stage_layers(job.model, {name: (0, len(blocks))}, {name: len(blocks)}))
        kinds = list(dict.fromkeys(layers))
        priced = np.zeros((5, len(kinds), *shape))
        for number, kind in enumerate(kinds):
            layer_work = work(name, kind.layer)
            largest[name, kind.layer] = float(layer_work.rows.max(initial=0.0))
            shared = context and context(name, kind.layer)
            priced[:, number] = _priced(job, kind, layer_work, tp, shared).reshape(5, *shape)
        priced[[1, 3]] *= learning[name]
        # 2. Count layers by kind: in all, and recomputed with the first n blocks.
        is_kind = np.array([[layer == kind for kind in kinds] for layer in layers]).reshape(len(layers), -1)
        is_recomputed = is_kind * np.array([kind.recomputed for kind in kinds])
        per_block = np.add.reduceat(is_recomputed.astype(np.int64), [block.start for block in blocks], axis=0)
        num_recomputed = np.concatenate([np.zeros((1, len(kinds)), dtype=np.int64), per_block.cumsum(axis=0)])
        # 3. Add up.
        forward, backward, kept = np.tensordot(is_kind.sum(axis=0).astype(np.float64), priced[:3], axes=(0, 1))
        spans, element_bytes = {name: (0, len(blocks))}, job.mixed_precision(pipeline=False).compute
        for source, row_bytes in taken_bytes(job.model, spans, element_bytes, by_stage=False).items():
            kept = kept + row_bytes * taken(source)
        recompute_s, saved = priced[3].copy(), priced[4].copy()  # Views would keep all five.
        modules[name] = ModuleLoad(forward, backward, kept, recompute_s, saved, num_recomputed, moved_bytes(name))
    return Load(job, tp, modules, largest)


def _priced(job: Job, placed: StageLayer, work: Work, tp: int, context: ContextPrice | None) -> Float64Array:
    """[5, num_microbatches of all ranks] of one layer: forward, backward, kept bytes; and, if it is recomputed, seconds
    added and bytes saved."""
    layer, element_bytes = placed.layer, job.mixed_precision(pipeline=False).compute
    seconds = job.cost.unwrapped().layer_seconds(placed.module, layer, work, tp)  # Whole copies have no hooks.
    tensor_s = job.cost.tensor_seconds(layer, work, range(tp)) if tp > 1 else np.zeros_like(work.rows)
    given_s, copied = (np.zeros_like(work.rows),) * 2 if context is None else context[:2]
    has_backward = float(placed.has_backward)
    forward = seconds.forward_s + tensor_s + given_s
    row_bytes, input_bytes = kept_bytes(placed, 1.0, tp, element_bytes)
    return np.stack(
        [
            forward,
            backward_seconds(seconds, layer, placed.needs_input) + has_backward * (tensor_s + given_s),
            has_backward * (work.rows * row_bytes + copied),
            placed.recomputed * forward,
            placed.recomputed * (work.rows * (row_bytes - input_bytes) + copied),
        ]
    )
