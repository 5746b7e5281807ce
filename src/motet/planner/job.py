"""A job to plan: model, lengths, cluster and batch size; and the costs of its blocks.

All strategies read costs from here. They are costs of one batch, drawn once: strategies compare on the same data.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from motet.assign.balancing import Balancing, by_operations, recomputed_blocks
from motet.assign.plan import assign_step
from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.limits import check_size
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import ADAM_MOMENTS, BalancingMethod, Plan, Policy
from motet.core.spec import Layer, ModelSpec
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, Workload
from motet.cost.flops import like_layer, work_of, work_of_items
from motet.cost.memory import (
    USABLE_MEMORY,
    MixedPrecision,
    StageLayer,
    kept_bytes,
    mixed_precision,
    parameters_of_rank,
    stage_layers,
    taken_bytes,
    updated_of_rank,
)
from motet.cost.model import CostModel, Work, backward_seconds
from motet.schedule import PlannedProgram, planned
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Recomputes
from motet.simulate.predict.step_seconds import PricedSteps

MAX_COMPARED = 1 << 13
"""Plans are compared on several batches of up to so many examples; of larger ones, on parts."""
_NUM_PLANNED, _NUM_ASSIGNED = 4, 8


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Costs of each block (`Module.blocks`) of a module, for one microbatch on one tensor-parallel rank: [num_blocks].

    forward_s, backward_s: means over microbatches, tensor-parallel communication included. Backward depends on which
                           layers are trainable; it is without recomputation.
    deferred_s:            the part of backward_s that comes in W where backward is split (`Layer.defers_weights`).
    recompute_s:           what recomputing the block adds to backward.
    sums_s:                the part of forward_s and backward_s that are sums of an encoder's halves, if other work can
                           run beside them.
    kept_bytes:            activations of the largest microbatch that are kept for backward; rows of encoders are with
                           the first block that takes them in.
    saved_bytes:           the part of kept_bytes that recomputing the block saves.
    output_bytes:          output of a mean microbatch, which is sent if a pipeline is cut after the block.
    parameters, trainable: parameters that the rank holds, and those of them that are updated.
    """

    forward_s: Float64Array
    backward_s: Float64Array
    deferred_s: Float64Array
    recompute_s: Float64Array
    sums_s: Float64Array
    kept_bytes: Float64Array
    saved_bytes: Float64Array
    output_bytes: Float64Array
    parameters: Float64Array
    trainable: Float64Array

    @property
    def num_blocks(self) -> int:
        """The blocks of the module."""
        return len(self.forward_s)

    @cached_property
    def passes_s(self) -> float:
        """Forward and backward of a microbatch, without recomputation."""
        return float((self.forward_s + self.backward_s).sum())


class _KnownPlan(NamedTuple):
    """A Plan, its Program, and the seconds of its steps."""

    plan: Plan
    program: PlannedProgram
    seconds: PricedSteps


@dataclass(frozen=True, eq=False)
class Job:
    """A job to plan.

    batch_size: examples of a step, over all ranks.
    cost:       seconds and bytes of layers and messages on the cluster.
    balancing:  the weights by which training balances the phases of data parallelism.
    policy:     as in Plan, of its Plans of data parallelism.
    degrees:    those of single modules that the recipe states: `[parallel.NAME]`.
    recomputes: what its recipe recomputes in each microbatch, if it says "auto"; Plans have numbers.
    exchange:   how its recipe lets context-parallel ranks get rows of each other (`context.exchange`).
    moments:    as in Plan.
    Raises UserError if examples * ranks is more than the simulator takes.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    batch_size: int
    cost: CostModel
    precision: str = "bf16"
    seed: int = 0
    balancing: Balancing = by_operations
    policy: Mapping[str, Policy] = field(default_factory=dict)
    degrees: Mapping[str, ModuleDegrees] = field(default_factory=dict)
    recomputes: Recomputes | None = None
    exchange: str = "auto"
    moments: int = ADAM_MOMENTS

    def __post_init__(self) -> None:
        check_size(self.batch_size, self.cluster.num_ranks)
        object.__setattr__(self, "model", self.cost.as_measured(self.model))

    def on(self, cluster: Cluster) -> Job:
        """The same job on another cluster of the same devices, with the same batches."""
        other = replace(self, cluster=cluster, cost=self.cost.on(cluster))
        # What does not depend on the cluster; and on fewer of its nodes, what one of them decides.
        whole = replace(cluster, num_nodes=self.cluster.num_nodes)
        is_part = whole == self.cluster and cluster.num_nodes <= whole.num_nodes
        kept = ["_drawn", "_work", "_microbatch_seconds", "of_any_cluster"]
        if is_part:
            kept.append("_block_costs")
        other.__dict__.update((name, getattr(self, name)) for name in kept)
        return other

    @cached_property
    def of_any_cluster(self) -> dict[tuple[object, ...], Any]:
        """What else follows from the job, whatever its cluster, by what it is and its arguments."""
        return {}

    @cached_property
    def batch(self) -> BatchLengths:
        """The batch on which every candidate is simulated."""
        return self.drawn(0)

    def drawn(self, number: int) -> BatchLengths:
        """The batch drawn with seed + number; number 0 is the job's own. Cached."""
        batch: BatchLengths = self._drawn(number)
        return batch

    def drawn_once(self, number: int) -> BatchLengths:
        """As `drawn`. A batch of more than MAX_COMPARED examples is not kept: none but the first is simulated."""
        return self.drawn(number) if self.batch_size <= MAX_COMPARED else self._draw(number)

    @cached_property
    def _drawn(self):  # type: ignore[no-untyped-def]
        return cache(self._draw)

    def _draw(self, number: int) -> BatchLengths:
        return self.workload.draw(self.batch_size, np.random.default_rng(self.seed + number))

    def policy_under(self, balance: BalancingMethod) -> Mapping[str, Policy]:
        """The policy of a Plan that balances so: none where nothing is balanced."""
        return {} if balance == "off" else self.policy

    def assignment(self, plan: Plan, number: int = 0) -> StepAssignment:
        """The assignment of the first `plan.batch_size` examples of a drawn batch to a Plan of this job.

        Under "data_parallel", where deciding takes long, Plans that differ only in their sharding share it. The last
        ones of pipelines are kept, as refinement compares one Plan with its neighbours, and then simulates these.
        """
        this = id(plan), number
        if this in self._last_assigned:
            self._last_assigned[this] = known = self._last_assigned.pop(this)
            return known[1]
        batch = self.drawn(number)
        if plan.batch_size != batch.num_examples:
            batch = batch.take(np.arange(plan.batch_size))
        if plan.schedule != "data_parallel":
            assignment = assign_step(plan, batch, self.balancing, self._known(plan).seconds)
            if plan.batch_size <= MAX_COMPARED:
                self._last_assigned[this] = plan, assignment
                if len(self._last_assigned) > _NUM_ASSIGNED:
                    del self._last_assigned[next(iter(self._last_assigned))]
            return assignment
        if plan.order != "given" or plan.microbatch_caps:
            return assign_batch(plan, batch, self.cost, self.balancing)
        (unit,) = plan.units
        recompute = tuple(sorted(recomputed_blocks(plan).items()))
        sizes = (unit.dp, unit.tp, unit.first_rank, plan.batch_size, plan.microbatch_size)
        waits = plan.balance == "split" and unit.waits  # Of whole items predictions take ranks to wait.
        key = (number, *sizes, plan.balance, waits, tuple(sorted(plan.policy.items())), recompute)
        if plan.balance == "off":  # Decided at once, and as large as any.
            return assign_batch(plan, batch, self.cost, self.balancing)
        if key not in self._assignments:
            self._assignments[key] = assign_batch(plan, batch, self.cost, self.balancing)
        return self._assignments[key]

    def planned(self, plan: Plan) -> PlannedProgram:
        """The Program of a Plan of this job. Plans that differ only in who computes what share it. Raises as `planned`.

        The last ones are kept: a leader is simulated with several orders and balances.
        """
        return self._known(plan).program

    def _known(self, plan: Plan) -> _KnownPlan:
        """The Program of a Plan, and the seconds by which its examples are ordered."""
        alike = replace(plan, order="given", microbatch_caps={})
        if plan.schedule != "data_parallel" and plan.balance == "joint":
            alike = replace(alike, balance="off")
        found = next((known for known in self._planned if known.plan == alike), None)
        if found is None:
            program = planned(alike)
            found = _KnownPlan(alike, program, PricedSteps(alike, self.cost, program))
            self._planned.append(found)
        return found

    @cached_property
    def _planned(self) -> deque[_KnownPlan]:
        return deque(maxlen=_NUM_PLANNED)

    @cached_property
    def _last_assigned(self) -> dict[tuple[int, int], tuple[Plan, StepAssignment]]:
        """By the id of a Plan, which is kept beside its assignment, and the number of a batch; the last used last."""
        return {}

    @cached_property
    def _assignments(self) -> dict[object, StepAssignment]:
        return {}

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a Plan may fill on one device."""
        return int(self.cluster.device.memory_bytes * USABLE_MEMORY)

    def mixed_precision(self, *, pipeline: bool) -> MixedPrecision:
        """Bytes of a number of each kind: `cost.memory.mixed_precision` at the job's precision."""
        return mixed_precision(self.precision, pipeline=pipeline, moments=self.moments)

    def block_costs(self, name: str, num_examples: float, tp: int = 1) -> BlockCosts:
        """Costs of a module's blocks in microbatches of num_examples examples; a mean, so it may be below 1. Cached."""
        costs: BlockCosts = self._block_costs(name, num_examples, tp)
        return costs

    @cached_property
    def _block_costs(self):  # type: ignore[no-untyped-def]
        return cache(self._price)

    def work(self, name: str, layer: Layer, num_examples: int) -> Work:
        """Rows and pairs of a module's layer in each microbatch of num_examples examples. Cached."""
        work: Work = self._work(name, like_layer(layer), num_examples)
        return work

    @cached_property
    def _work(self):  # type: ignore[no-untyped-def]
        return cache(self._count)

    def _count(self, name: str, layer: Layer, num_examples: int) -> Work:
        items, microbatch, count, targets = self._microbatches(name, num_examples)
        padded = self.model.module(name).padded
        return work_of_items(layer, items, microbatch, count, padded=padded, num_targets=targets)

    def taken_rows(self, name: str, num_examples: int) -> float:
        """Rows of an encoder that the backbone takes in, in the largest microbatch of num_examples examples."""
        items, microbatch, count, _ = self._microbatches(name, num_examples)
        return float(np.bincount(microbatch, items.num_tokens, count).max())

    def taken_bytes(self, num_examples: int) -> dict[str, float]:
        """By encoder, what a stage of the backbone keeps of these rows."""
        spans = {BACKBONE: (0, self.model.num_blocks[BACKBONE])}
        row_bytes = taken_bytes(self.model, spans, self.mixed_precision(pipeline=True).compute, by_stage=True)
        return {name: size * self.taken_rows(name, num_examples) for name, size in row_bytes.items()}

    def why_unpriced(self, tp: int) -> str:
        """Why the cost model has no times at this tensor-parallel degree, as a sentence; "" if it has. Cached."""
        why: str = self._why_unpriced(tp)
        return why

    @cached_property
    def _why_unpriced(self):  # type: ignore[no-untyped-def]
        return cache(self._try)

    def _try(self, tp: int) -> str:
        try:
            for module in self.model.modules:
                for layer in dict.fromkeys(module.layers):
                    work = work_of(layer, np.ones(1, dtype=np.int64))
                    self.cost.layer_seconds(module.name, layer, work, tp)
                    self.cost.tensor_seconds(layer, work, range(tp))
        except UserError as error:
            return str(error)
        return ""

    def microbatch_seconds(self, name: str, num_examples: int, tp: int = 1) -> Float64Array:
        """[num_microbatches]: forward and backward of a module in each microbatch of num_examples examples.

        Without recomputation and tensor-parallel communication. Cached.
        """
        seconds: Float64Array = self._microbatch_seconds(name, num_examples, tp)
        return seconds

    @cached_property
    def _microbatch_seconds(self):  # type: ignore[no-untyped-def]
        return cache(self._time)

    def _time(self, name: str, num_examples: int, tp: int) -> Float64Array:
        layers = stage_layers(self.model, {name: (0, len(self.model.module(name).blocks))}, {})
        total: Float64Array = np.zeros(max(self.batch.num_examples // num_examples, 1))
        for placed, count in Counter(layers).items():
            work = self.work(name, placed.layer, num_examples)
            seconds = self.cost.unwrapped().layer_seconds(name, placed.layer, work, tp)
            total += count * (seconds.forward_s + backward_seconds(seconds, placed.layer, placed.needs_input))
        return total

    def forget_microbatches(self) -> None:
        """Let go of the rows, pairs and seconds of microbatches, which proposals alone ask for: of hundreds
        of thousands of examples, hundreds of megabytes. They are counted again if they are asked for.
        """
        for known in (self._work, self._microbatch_seconds):
            known.cache_clear()

    def unevenness(self, name: str, num_examples: int) -> Float64Array:
        """[num_microbatches]: `microbatch_seconds` / their mean, without tensor parallelism; 1 for a module without
        work."""
        seconds = self.microbatch_seconds(name, num_examples)
        return seconds / seconds.mean() if seconds.any() else np.ones_like(seconds)

    def _price(self, name: str, num_examples: float, tp: int) -> BlockCosts:
        module = self.model.module(name)
        starts = {block.start for block in module.blocks}
        fields = list(BlockCosts.__dataclass_fields__)
        output = fields.index("output_bytes")
        columns: Float64Array = np.zeros((len(fields), len(module.blocks)))
        priced: dict[StageLayer, Float64Array] = {}
        block = -1
        for index, placed in enumerate(stage_layers(self.model, {name: (0, len(module.blocks))}, {})):
            block += index in starts
            if placed not in priced:
                priced[placed] = self._price_layer(name, placed, num_examples, tp)
            columns[:, block] += priced[placed]
            columns[output, block] = priced[placed][output]  # The output of the block is that of its last layer.
        if name == BACKBONE:
            for source, size_bytes in self.taken_bytes(max(round(num_examples), 1)).items():
                columns[fields.index("kept_bytes"), self.model.entries(source, name)[0]] += size_bytes
        return BlockCosts(*columns)

    def _price_layer(self, name: str, placed: StageLayer, num_examples: float, tp: int) -> Float64Array:
        """The fields of `BlockCosts` for one layer."""
        layer, element_bytes = placed.layer, self.mixed_precision(pipeline=True).compute
        # Of fewer examples than microbatches, only this share of the microbatches has one.
        share = min(num_examples, 1.0)
        work = self.work(name, layer, max(round(num_examples), 1))
        mean_rows, most_rows = float(work.rows.mean()), float(work.rows.max())
        seconds = self.cost.unwrapped().layer_seconds(name, layer, work, tp)
        tensor_s = float(self.cost.tensor_seconds(layer, work, range(tp)).mean()) if tp > 1 else 0.0
        forward_s = float(seconds.forward_s.mean()) + tensor_s
        backward_s = float(backward_seconds(seconds, layer, placed.needs_input).mean())
        deferred_s = float(seconds.weight_s.mean()) if layer.trainable and layer.defers_weights else 0.0
        kept, input_bytes = kept_bytes(placed, most_rows, tp, element_bytes)
        has_backward = float(placed.has_backward)
        # Blocks with attention are recomputed; of a module without attention, all are.
        has_sums = name != BACKBONE and layer.in_block and layer.has_halves and self.cluster.runs_beside_sums
        no_blocks = not any(other.in_block for other in self.model.module(name).layers)
        can_recompute = has_backward * (layer.in_block or no_blocks)
        return np.array(
            [
                forward_s * share,
                (backward_s + has_backward * tensor_s) * share,
                deferred_s * share,
                can_recompute * forward_s * share,
                has_sums * (1 + has_backward) * tensor_s * share,
                has_backward * kept,
                can_recompute * (kept - input_bytes),
                mean_rows * layer.output_width * element_bytes * share,
                parameters_of_rank(layer, tp),
                updated_of_rank(layer, tp),
            ]
        )

    def _microbatches(self, name: str, num_examples: int) -> tuple[ItemLengths, Int64Array, int, Int64Array | None]:
        """A module's items, the microbatch of each item, the number of microbatches, and targets of each."""
        batch, items = self.batch, self.batch.of(name)
        count = max(batch.num_examples // num_examples, 1)
        microbatch = np.minimum(np.arange(batch.num_examples) // num_examples, count - 1)
        if name == BACKBONE:
            targets = np.bincount(microbatch, batch.num_targets, count).astype(np.int64)
            return items, microbatch, count, targets
        return items, microbatch[items.example], count, None
