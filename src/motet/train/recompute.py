"""`[fsdp] recompute = "auto"`: the least recomputation that fits memory, in each microbatch anew (OmniBal section 4.3).

- A rank recomputes in a microbatch what memory lacks for the items that it computes there, by the memory model
  (`cost/memory.py`). Of all numbers of blocks that suffice, those win that take the fewest seconds again, which is
  most bytes saved per second (`planner/stages/recompute.py`). Seconds are those of operations at an assumed speed, not
  measured, so that all ranks, a resumed run and a simulation say the same. Ranks need not agree: recomputation changes
  no collective (`runtime/fsdp.py: recompute_first`).
- In training, measured peaks of the first steps correct the predicted ones (`recompute_measured.py`).
- Before the first step, the steps of the run that keep most are decided, as training will decide them. If one of them
  does not fit with everything recomputed, the run does not start. The numbers for the largest of them are those of the
  recipe's Plan, and weigh items in balancing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from motet.assign.orchestrator import joined_decisions
from motet.assign.step import StepAssignment
from motet.assign.whole_step import decide_step
from motet.balance import ASSUMED_SPEEDS, Link
from motet.core.arrays import Int64Array
from motet.core.cluster import Cluster, Device
from motet.core.errors import UserError
from motet.core.nodes import RanksPerNode
from motet.core.plan import BalancingMethod, Plan, Unit
from motet.core.spec import ModelSpec
from motet.core.words import size_words
from motet.core.workload import BACKBONE, BatchLengths, Workload, home_ranks
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.cost.memory import held_elements, stage_layers, with_measured_bytes
from motet.cost.profile import kept_shares, read_profile
from motet.data.order import ExampleOrder, StepExamples
from motet.dispatch import RankBatch
from motet.planner.data_parallel.loads import ModuleState, load_alone, load_of, state_of
from motet.planner.data_parallel.recomputation import fit_recomputation
from motet.planner.job import Job
from motet.planner.stages.recompute import Fit
from motet.train.balancing import profile_of, recipe_orchestrator
from motet.train.device import catalogued
from motet.train.input.largest import LengthsOf, largest_steps
from motet.train.recipe.recipe import Recipe
from motet.train.recompute_measured import RESIDENT_RESOLUTION_BYTES, PeakCorrection

_MAX_ROUNDS = 4
"""The most times that recomputation is chosen, as it weighs the items whose places it depends on."""
_BYTES_A_FLOP = 1 / 200
"""Memory bandwidth over operations that is assumed for a device: about that of current GPUs and CPU cores."""
_FIT_ADVICE = "raise run.microbatches, lower run.batch_size or data.max_sequence_length, or take more ranks."


@dataclass(frozen=True)
class RecomputeRanks:
    """The ranks for which recomputation is chosen.

    ranks_per_node: as of `Network`. memory_bytes: of one device. tensor_size: ranks that share products.
    expert_size: ranks that share experts.
    """

    num_ranks: int
    ranks_per_node: RanksPerNode
    device_type: str
    memory_bytes: int
    tensor_size: int = 1
    expert_size: int = 1


@dataclass(frozen=True, eq=False)
class Recomputation:
    """What a run recomputes.

    recipe: with numbers in place of "auto". spec: of its model. auto: None where the recipe states numbers.
    planned: the numbers of a Plan, of this rank's stages, in place of the recipe's.
    correction: of this rank's predicted bytes, by those that are measured; None: they are not corrected.
    """

    recipe: Recipe
    spec: ModelSpec
    auto: AutoRecompute | None = None
    planned: Mapping[str, int] | None = None
    correction: PeakCorrection | None = None

    @cached_property
    def num_blocks(self) -> Mapping[str, int]:
        """Recomputed blocks by module: those stated, or those of the largest microbatch."""
        return self.planned if self.planned is not None else recomputed_blocks_of(self.recipe, self.spec)

    def of_rank(self, batch: RankBatch, rank: int) -> RankBatch:
        """The microbatch with what a rank recomputes of it."""
        if self.auto is None:
            return replace(batch, recompute=self.num_blocks)
        return self.auto.of_rank(batch, rank, self.correction.limit_bytes if self.correction else None)

    def corrected(self, batch: RankBatch, rank: int) -> RankBatch:
        """The microbatch, which is decided anew if it was before the limit became lower, and no longer fits."""
        return self.of_rank(batch, rank) if self.lacking_bytes([batch]) else batch

    def lacking_bytes(self, batches: Sequence[RankBatch]) -> float:
        """What the fullest of a rank's microbatches takes above what the rank may fill, by prediction; 0 if it fits."""
        if self.correction is None:
            return float(max(batch.decision.lacking_bytes for batch in batches))
        return max(0.0, max(batch.predicted_bytes for batch in batches) - self.correction.limit_bytes)

    def lacking_words(self, step: int, lacking_bytes: float) -> str:
        """The warning about a step with a microbatch that does not fit. lacking_bytes: of the rank that lacks most."""
        if self.auto is None:
            return (
                f"balance.{self.recipe.balance.cut_by}: however its items are cut, a microbatch of step {step} lacks "
                f"{size_words(lacking_bytes)} of memory on a rank, by prediction, and a later one may too: "
                f"{_FIT_ADVICE}"
            )
        return (
            f'fsdp.recompute = "auto": with every block recomputed, a microbatch of step {step} lacks '
            f"{size_words(lacking_bytes)} of memory on a rank, by prediction, and a later one may too: {_FIT_ADVICE}"
        )

    def metrics(self, batches: Sequence[RankBatch]) -> dict[str, list[int]]:
        """By module, the recomputed blocks of each microbatch on this rank."""
        return {name: [dict(batch.recompute or {}).get(name, 0) for batch in batches] for name in self.spec.num_blocks}


@dataclass(frozen=True, eq=False)
class AutoRecompute:
    """The recomputation of a recipe with "auto".

    largest:    the numbers of blocks for the largest microbatch among the decided steps, and its bytes.
    num_steps:  of the run. num_decided: of them, the steps that were decided.
    """

    recipe: Recipe
    job: Job
    unit: Unit
    largest: Fit
    num_steps: int
    num_decided: int

    @property
    def num_blocks(self) -> dict[str, int]:
        """The recomputed blocks of each module in the largest microbatch; modules without any are left out."""
        return {name: count for name, count in self.largest.recompute[0].items() if count}

    @property
    def resolved(self) -> Recipe:
        """The recipe with these numbers in place of "auto"."""
        return with_numbers(self.recipe, self.num_blocks)

    def of_rank(self, batch: RankBatch, rank: int, limit_bytes: float | None = None) -> RankBatch:
        """The microbatch with the least recomputation that fits on this rank; all, if even that does not fit.

        limit_bytes: the largest predicted peak that fits; None: what the device has.
        """
        own = {name: assignment.on_rank(rank) for name, assignment in batch.decision.assignments.items()}
        fit = self._fit(batch.lengths, own, self.job.capacity_bytes if limit_bytes is None else limit_bytes)
        return replace(batch, recompute=dict(fit.recompute[0]), predicted_bytes=fit.peak_bytes)

    def of_assignment(self, assignment: StepAssignment) -> dict[str, Int64Array]:
        """The blocks that each rank recomputes in each microbatch of a step, as `of_rank` decides before any measured
        correction: module -> int64 [num_ranks, num_microbatches].
        """
        shape = assignment.modules[BACKBONE].num_replicas, assignment.num_microbatches
        numbers = {name: np.zeros(shape, dtype=np.int64) for name in assignment.modules}
        for cell in np.ndindex(*shape):
            own = {name: items.items_of(*cell) for name, items in assignment.modules.items()}
            fit = self._fit(assignment.batch, own, self.job.capacity_bytes)
            for name, count in fit.recompute[0].items():
                numbers[name][cell] = count
        return numbers

    def _fit(self, lengths: BatchLengths, own: Mapping[str, Int64Array], limit_bytes: float) -> Fit:
        """The least recomputation for these items of each module."""
        return fit_recomputation(load_alone(self.job, lengths, own), self._state, limit_bytes, "least")

    def correction(self, device_type: str, peak_bytes: Callable[[], int]) -> PeakCorrection:
        """The correction of one rank's predicted bytes. peak_bytes: as of `PeakCorrection`."""
        return PeakCorrection(
            self.job.capacity_bytes,
            sum(state.held_bytes for state in self._state.values()),
            peak_bytes,
            resolution_bytes=0.0 if device_type == "cuda" else RESIDENT_RESOLUTION_BYTES,
        )

    @cached_property
    def _state(self) -> Mapping[str, ModuleState]:
        return state_of(self.job, self.unit)

    def __str__(self) -> str:
        steps = "the one step" if self.num_steps == 1 else f"all {self.num_steps:,} steps"
        if self.num_decided < self.num_steps:
            steps = f"the {self.num_decided:,} of {self.num_steps:,} steps that keep most by their lengths"
        takes, may_take = size_words(self.largest.peak_bytes), size_words(self.job.capacity_bytes)
        largest = f"the largest microbatch of {steps} takes {takes} of the {may_take} that a rank may fill."
        if not self.num_blocks:
            return f'fsdp.recompute = "auto" recomputes nothing: {largest}'
        parts = [f"{count} of {self.job.model.num_blocks[name]} of {name}" for name, count in self.num_blocks.items()]
        return (
            f'fsdp.recompute = "auto" recomputes in each microbatch what it needs; with {", ".join(parts)} recomputed, '
            f"{largest}"
        )


def auto_recompute(
    recipe: Recipe, spec: ModelSpec, ranks: RecomputeRanks, order: ExampleOrder, lengths_of: LengthsOf
) -> AutoRecompute:
    """The AutoRecompute of a recipe whose examples come in an order and have these lengths.

    Raises UserError if the largest microbatch does not fit with everything recomputed.
    """
    if recipe.balance.cost == "profile":
        spec = with_measured_bytes(spec, kept_shares(read_profile(profile_of(recipe)), spec))
    job, unit = _job(recipe, spec, ranks), unit_of_recipe(recipe, spec, ranks.num_ranks)
    plan = Plan(spec, job.cluster, (unit,), recipe.run.batch_size, schedule="data_parallel", precision=job.precision)
    steps = largest_steps(recipe.run.num_steps, recipe.run.batch_size, order, held_elements(spec, {}), lengths_of)
    count = recipe.microbatches_on(ranks.num_ranks)
    lengths = [_lengths_of_step(step, lengths_of(step.ids), ranks.num_ranks, count) for step in steps]
    numbers: dict[str, int] = {}
    for _ in range(_MAX_ROUNDS):
        # Items are weighed with what is recomputed, and what is recomputed depends on where they are.
        orchestrator = recipe_orchestrator(
            with_numbers(recipe, numbers), spec, ranks.num_ranks, ranks.device_type, ranks.ranks_per_node
        )
        parts = [part for one in lengths for part in decide_step(orchestrator, one, count).microbatches]
        assignment = joined_decisions([part.lengths for part in parts], [part.decision for part in parts])
        fit = fit_recomputation(load_of(job, plan, assignment), state_of(job, unit), job.capacity_bytes, "least")
        chosen = {name: count for name, count in fit.recompute[0].items() if count}
        if chosen == numbers:
            break
        numbers = chosen
    found = AutoRecompute(recipe, job, unit, fit, recipe.run.num_steps, len(steps))
    if fit.shortfall_bytes:
        raise UserError(
            f'fsdp.recompute = "auto": with every block recomputed, the largest microbatch takes '
            f"{size_words(fit.peak_bytes)} on a rank, which may fill {size_words(job.capacity_bytes)}: {_FIT_ADVICE}"
        )
    return found


def recomputed_blocks_of(recipe: Recipe, spec: ModelSpec) -> dict[str, int]:
    """The numbers of blocks that a recipe states, without modules that have no backward pass to recompute for."""
    recomputed = recipe.fsdp.recomputed(spec.num_blocks)
    return {
        name: count
        for name, count in recomputed.items()
        if any(layer.recomputed for layer in stage_layers(spec, {name: (0, count)}, recomputed))
    }


def words_of_unused(recipe: Recipe, spec: ModelSpec) -> str:
    """The sentence on modules of which a recipe names a number of blocks that is not used; "" if there are none."""
    if not isinstance(recipe.fsdp.recompute, dict):
        return ""
    unused = sorted(recipe.fsdp.recomputed(spec.num_blocks).keys() - recomputed_blocks_of(recipe, spec).keys())
    if not unused:
        return ""
    named = ", ".join(f"fsdp.recompute.{name}" for name in unused)
    return f"{named}: without effect, as no gradient passes through these blocks; remove it, or let them learn."


def unit_of_recipe(
    recipe: Recipe,
    spec: ModelSpec,
    num_ranks: int,
    recomputed: Mapping[str, int] | None = None,
    tp: int = 1,
    ep: int = 1,
) -> Unit:
    """The unit of a Plan by which a recipe trains on all ranks. recomputed: the numbers of blocks by module.

    num_ranks: those that run different examples; `tp` times as many train.
    """
    fsdp = recipe.fsdp
    shard_size = fsdp.shard_size or num_ranks
    return Unit(
        "all",
        (spec.num_blocks,),
        dp=num_ranks,
        tp=tp,
        ep=ep,
        recompute=(recomputed,) if recomputed else (),
        zero=0 if shard_size == 1 else 3 if fsdp.reshard_after_forward else 1 if fsdp.once_a_step else 2,
        shard_size=0 if shard_size in (1, num_ranks) else shard_size,
    )


def memory_bytes(recipe: Recipe, device: torch.device) -> int:
    """As `known_memory_bytes`. Raises UserError for a CPU whose memory the recipe does not say."""
    known = known_memory_bytes(recipe, device)
    if known is None:
        raise UserError(
            'fsdp.recompute = "auto" must know how much memory a rank may fill, which a CPU does not tell: give '
            '[cluster] with device = "cpu" and memory_gbytes.'
        )
    return known


def known_memory_bytes(recipe: Recipe, device: torch.device) -> int | None:
    """The memory of a rank's device: of the recipe's [cluster], else of the device at hand; None of a CPU where the
    recipe does not say it.
    """
    stated = recipe.cluster
    if stated is not None and stated.memory_gbytes is not None:
        return int(1e9 * stated.memory_gbytes)
    if (device.type == "cpu") if stated is None else stated.device == "cpu":
        return None
    if stated is not None:
        return cluster(stated.device).device.memory_bytes
    known = catalogued(device)
    # As a simulation has it; a vendor's gigabytes are a little less than what the driver counts.
    return torch.cuda.get_device_properties(device).total_memory if known is None else known.memory_bytes


def with_numbers(recipe: Recipe, numbers: Mapping[str, int]) -> Recipe:
    """The recipe with these numbers of recomputed blocks by module."""
    return recipe.model_copy(update={"fsdp": recipe.fsdp.model_copy(update={"recompute": dict(numbers)})})


def _job(recipe: Recipe, spec: ModelSpec, ranks: RecomputeRanks) -> Job:
    """What the planner's memory model takes. Of its cost model only seconds of layers are read."""
    precision, nodes = recipe.plan_precision, _nodes_of(recipe, ranks)
    no_examples = BatchLengths(*(np.zeros(0, dtype=np.int64),) * 2, np.zeros(0, dtype=np.int32), {})
    workload = Workload("no examples", no_examples)
    return Job(spec, nodes, workload, recipe.run.batch_size, Analytic(nodes, precision), precision)


def _nodes_of(recipe: Recipe, ranks: RecomputeRanks) -> Cluster:
    """A cluster of the ranks, of which only the memory is more than an assumption: one node of them, as all links are
    alike."""
    flops_per_s = ASSUMED_SPEEDS[ranks.device_type].flops_per_s
    device = Device(
        ranks.device_type, {recipe.plan_precision: flops_per_s}, ranks.memory_bytes, flops_per_s * _BYTES_A_FLOP
    )
    link = Link(device.memory_bytes_per_s, 0.0)
    return Cluster(device, 1, ranks.num_ranks, link, link)


def plan_alone(recipe: Recipe, spec: ModelSpec, ranks: RecomputeRanks) -> Plan:
    """The Plan by which a recipe trains one example alone: with "auto", everything is recomputed."""
    if recipe.fsdp.recompute == "auto":
        recipe = with_numbers(recipe, spec.num_blocks)
    balance: BalancingMethod = "auto"
    if recipe.balance.method == "joint":
        balance = "joint"
    elif not recipe.balance.balanced([module.name for module in spec.modules if module.name != BACKBONE]):
        balance = "off"
    num_ranks, tp = ranks.num_ranks // ranks.tensor_size, ranks.tensor_size
    return Plan(
        spec,
        _nodes_of(recipe, ranks),
        (unit_of_recipe(recipe, spec, num_ranks, recomputed_blocks_of(recipe, spec), tp, ranks.expert_size),),
        num_ranks,
        schedule="data_parallel",
        precision=recipe.plan_precision,
        moments=recipe.optimizer.num_moments,
        balance=balance,
    )


def _lengths_of_step(step: StepExamples, lengths: BatchLengths, num_ranks: int, num_microbatches: int) -> BatchLengths:
    """The lengths of a step as it comes: with its groups, or with the rank of each example in its microbatch."""
    if step.group is not None:
        return replace(lengths, group=step.group)
    return replace(lengths, home=np.tile(home_ranks(len(step.ids) // num_microbatches, num_ranks), num_microbatches))
