"""What is planned: a model, its data, a cluster and a batch size; and what the blocks of its modules cost on them.

All strategies read costs from here, so that they compare alike: of one batch, drawn once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from motet.assign.balancing import Balancing, by_operations, recomputed_blocks
from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.limits import check_size
from motet.core.plan import Plan
from motet.core.spec import Layer, ModelSpec
from motet.core.workload import BACKBONE, BatchLengths, Workload
from motet.cost.flops import work_of
from motet.cost.memory import (
    MixedPrecision,
    activation_bytes,
    mixed_precision,
    stage_layers,
)
from motet.cost.model import CostModel, Work, backward_seconds
from motet.simulate.predict.predict import assign_batch

USABLE_MEMORY = 0.94
"""Of a device, before fragmentation and the buffers of communication libraries take the rest."""


@dataclass(frozen=True, eq=False)
class BlockCosts:
    """Of each block (`Module.blocks`) of a module, for one microbatch on one tensor-parallel rank: [num_blocks].

    forward_s, backward_s: mean over microbatches, tensor-parallel communication included; backward by what is trained
                           and where, without recomputation. recompute_s: what recomputing the block adds to backward.
    kept_bytes:            activations kept for backward, of the largest microbatch. saved_bytes: what recomputing
                           the block would not keep of them. output_bytes: sent where a pipeline is cut after it.
    parameters, trainable: held by one tensor-parallel rank, and those of them that are updated.
    """

    forward_s: Float64Array
    backward_s: Float64Array
    recompute_s: Float64Array
    kept_bytes: Float64Array
    saved_bytes: Float64Array
    output_bytes: Float64Array
    parameters: Float64Array
    trainable: Float64Array

    @property
    def num_blocks(self) -> int:
        return len(self.forward_s)


@dataclass(frozen=True, eq=False)
class Job:
    """batch_size: examples of a step, over all ranks. cost: says what layers and messages take on the cluster.
    balancing: by what training balances colocated phases. Raises UserError for more examples times ranks than
    are simulated.
    """

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    batch_size: int
    cost: CostModel
    precision: str = "bf16"
    seed: int = 0
    balancing: Balancing = by_operations

    def __post_init__(self) -> None:
        check_size(self.batch_size, self.cluster.num_ranks)

    @cached_property
    def batch(self) -> BatchLengths:
        """The batch that every candidate is simulated on."""
        return self.drawn(0)

    def drawn(self, number: int) -> BatchLengths:
        """Batches by the job's seed and the next ones; 0 is the job's own. Cached."""
        found: BatchLengths = self._drawn(number)
        return found

    @cached_property
    def _drawn(self):  # type: ignore[no-untyped-def]
        return cache(lambda number: self.workload.draw(self.batch_size, np.random.default_rng(self.seed + number)))

    def assignment(self, plan: Plan) -> StepAssignment:
        """Of the first `plan.batch_size` examples of the batch, on a Plan of this job. Kept where it takes long to
        decide, under "data_parallel", for Plans that differ in what is sharded alone."""
        batch = self.batch
        if plan.batch_size != batch.num_examples:
            batch = batch.take(np.arange(plan.batch_size))
        if plan.schedule != "data_parallel" or plan.order != "given" or plan.microbatch_caps:
            return assign_batch(plan, batch, self.cost, self.balancing)
        (unit,) = plan.units
        recompute = tuple(sorted(recomputed_blocks(plan).items()))
        key = (unit.dp, unit.tp, unit.first_rank, plan.batch_size, plan.microbatch_size, plan.balance, recompute)
        if key not in self._assignments:
            self._assignments[key] = assign_batch(plan, batch, self.cost, self.balancing)
        return self._assignments[key]

    @cached_property
    def _assignments(self) -> dict[object, StepAssignment]:
        return {}

    @property
    def capacity_bytes(self) -> int:
        """That a plan may fill of one device."""
        return int(self.cluster.device.memory_bytes * USABLE_MEMORY)

    def mixed_precision(self, *, pipeline: bool) -> MixedPrecision:
        """Bytes of a number, as `cost.memory.mixed_precision` has them."""
        return mixed_precision(self.precision, pipeline=pipeline)

    def block_costs(self, name: str, num_examples: float, tp: int = 1) -> BlockCosts:
        """For microbatches of num_examples examples (a fraction: less than one a microbatch, on average). Cached."""
        found: BlockCosts = self._block_costs(name, num_examples, tp)
        return found

    @cached_property
    def _block_costs(self):  # type: ignore[no-untyped-def]
        return cache(self._price)

    def work(self, name: str, layer: Layer, num_examples: int) -> Work:
        """What a layer of a module is given in each microbatch of num_examples examples. Cached."""
        found: Work = self._work(name, layer, num_examples)
        return found

    @cached_property
    def _work(self):  # type: ignore[no-untyped-def]
        return cache(self._count)

    def _count(self, name: str, layer: Layer, num_examples: int) -> Work:
        length, microbatch, count, targets = self._microbatches(name, num_examples)
        padded = self.model.module(name).padded
        return work_of(layer, length, microbatch, count, padded=padded, num_targets=targets)

    def why_unpriced(self, tp: int) -> str:
        """Why it is not known what the model takes with this tensor parallelism, as a profile may lack its times; "" if
        it is. Cached."""
        found: str = self._why_unpriced(tp)
        return found

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
        """Forward and backward of a module in each microbatch of num_examples examples, without recomputation and
        tensor-parallel communication, [num_microbatches]. Cached."""
        found: Float64Array = self._microbatch_seconds(name, num_examples, tp)
        return found

    @cached_property
    def _microbatch_seconds(self):  # type: ignore[no-untyped-def]
        return cache(self._time)

    def _time(self, name: str, num_examples: int, tp: int) -> Float64Array:
        layers = stage_layers(self.model, {name: (0, len(self.model.module(name).blocks))}, {})
        total: Float64Array = np.zeros(max(self.batch.num_examples // num_examples, 1))
        for placed, count in Counter(layers).items():
            seconds = self.cost.layer_seconds(name, placed.layer, self.work(name, placed.layer, num_examples), tp)
            total += count * (seconds.forward_s + backward_seconds(seconds, placed.layer, placed.needs_input))
        return total

    def unevenness(self, name: str, num_examples: int) -> Float64Array:
        """The same over their mean, without tensor parallelism; 1 where the module has nothing to do."""
        seconds = self.microbatch_seconds(name, num_examples)
        return seconds / seconds.mean() if seconds.any() else np.ones_like(seconds)

    def _price(self, name: str, num_examples: float, tp: int) -> BlockCosts:
        module, element_bytes = self.model.module(name), self.mixed_precision(pipeline=True).compute
        share = min(num_examples, 1.0) if num_examples < 1 else 1.0
        columns: dict[str, Float64Array] = {
            field: np.zeros(len(module.blocks)) for field in BlockCosts.__dataclass_fields__
        }
        priced: dict[object, tuple[float, ...]] = {}
        number = -1
        starts = {block.start for block in module.blocks}
        whole_blocks = all(layer.attention is None for layer in module.layers)
        for place, placed in enumerate(stage_layers(self.model, {name: (0, len(module.blocks))}, {})):
            number += place in starts
            layer = placed.layer
            if placed not in priced:
                work = self.work(name, layer, max(round(num_examples), 1))
                seconds = self.cost.layer_seconds(name, layer, work, tp)
                tensor_s = float(self.cost.tensor_seconds(layer, work, range(tp)).mean()) if tp > 1 else 0.0
                backward = backward_seconds(seconds, layer, placed.needs_input)
                rows, most = float(work.rows.mean()), float(work.rows.max())
                whole = activation_bytes(layer, most, element_bytes=element_bytes, tp=tp)
                input_bytes = activation_bytes(layer, most, element_bytes=element_bytes, tp=tp, recomputed=True)
                does = float(placed.has_backward)
                again = does * (layer.attention is not None or whole_blocks)
                forward_s = float(seconds.forward_s.mean()) + tensor_s
                priced[placed] = (
                    forward_s * share,
                    (float(backward.mean()) + does * tensor_s) * share,
                    again * forward_s * share,
                    does * whole,
                    again * (whole - input_bytes),
                    rows * layer.output_width * element_bytes / tp * share,
                    layer.parameters / tp,
                    layer.parameters / tp * layer.trainable,
                )
            for field, value in zip(BlockCosts.__dataclass_fields__, priced[placed], strict=True):
                if field == "output_bytes":
                    columns[field][number] = value
                else:
                    columns[field][number] += value
        return BlockCosts(**columns)

    def _microbatches(self, name: str, num_examples: int) -> tuple[Int64Array, Int64Array, int, Int64Array | None]:
        """Lengths of a module's items, their microbatches, how many of these, and targets of each."""
        batch = self.batch
        count = max(batch.num_examples // num_examples, 1)
        of_example = np.minimum(np.arange(batch.num_examples) // num_examples, count - 1)
        if name == BACKBONE:
            targets = np.bincount(of_example, batch.num_targets, count).astype(np.int64)
            return batch.sequence, of_example, count, targets
        items = batch.items[name]
        return items.length, of_example[items.example], count, None
