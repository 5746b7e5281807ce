"""Builds a job from its recipe: model, data, mesh and optimizer, restored from a checkpoint if there is one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch

from motet.core.errors import JointUserError
from motet.core.heap import keep_freed_memory
from motet.core.plan import Plan
from motet.core.plan_file import plan_digest
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE
from motet.data.decode import Decoder
from motet.data.examples import Examples
from motet.data.order import ExampleOrder
from motet.data.splits import OwnSplits
from motet.dispatch import ItemExchange, RankBatch
from motet.dropout import drops_out, example_keys
from motet.models.compiling import compile_blocks
from motet.models.materialise import materialise
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.runtime.clock import ActionClock
from motet.runtime.fsdp import shard
from motet.runtime.mesh import Mesh, build_mesh
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.runtime.stage import modules_by_phase
from motet.runtime.step import TrainStep
from motet.schedule.layout import num_microbatches
from motet.train.balancing import check_same_backend, check_same_profile, compute_dtype
from motet.train.checkpoint.choice import Say
from motet.train.checkpoint.contents import CHECKPOINTS, Progress
from motet.train.checkpoint.resuming import resume_run
from motet.train.checkpoint.saving import Checkpointer
from motet.train.deferred_model import DeferredModel, build_deferred, check_compiles
from motet.train.device import device_name
from motet.train.evaluate import Evaluator
from motet.train.evaluate_planned import PlannedEvaluator
from motet.train.input.build_loading import build_loading, check_transport
from motet.train.input.datasets import (
    check_bad_at_indexing,
)
from motet.train.input.feed import StepInput
from motet.train.input.loading import Loading
from motet.train.input.opened_examples import OpenedExamples
from motet.train.input.ordering import build_order
from motet.train.input.planned import PlannedLoading, StageNeeds, StepDecider
from motet.train.input.service import open_decoder
from motet.train.optimizer import build_optimizer
from motet.train.planned_job import (
    ChosenPlan,
    PartConfig,
    build_part,
    check_context,
    check_context_unused,
    check_cuts,
    divide_whole,
    opening_copies,
    unused_pieces,
)
from motet.train.recipe.recipe import Recipe
from motet.train.recompute import (
    Recomputation,
    RecomputeRanks,
    auto_recompute,
    known_memory_bytes,
    memory_bytes,
    plan_alone,
    words_of_unused,
)
from motet.train.report.metrics import peak_memory_bytes
from motet.train.run_start import check_steps_of_epochs, first_progress, in_steps, restore_scale
from motet.train.too_long import leave_out_of_evaluation, leave_out_too_long
from motet.train.world import World


@dataclass
class TrainingJob:
    """Everything that a run consists of. Only `progress` says how far the run is.

    model: of this rank. spec: of the whole model. plan: None if the recipe alone says how it trains.
    """

    recipe: Recipe
    world: World
    mesh: Mesh
    model: MLLM
    spec: ModelSpec
    optimizer: torch.optim.Optimizer
    step: TrainStep | PlannedStep
    order: ExampleOrder
    dataset: Examples | OwnSplits
    decoder: Decoder
    loading: Loading
    recomputation: Recomputation
    evaluator: Evaluator | PlannedEvaluator | None
    checkpointer: Checkpointer
    progress: Progress
    num_microbatches: int
    plan: Plan | None = None

    @cached_property
    def _draws_by_item(self) -> bool:
        return drops_out(self.model) or bool(self.model.generators)

    def noise_rank(self, rank: int) -> int:
        """The rank by which this one draws what has no key of an item: the first of those that share its products, and
        under a Plan as of `Place`."""
        if isinstance(self.step, PlannedStep):
            return self.step.place.noise_rank
        return rank - (0 if self.mesh.tensor is None else self.mesh.tensor.index)

    def prepared(self, batch: RankBatch) -> RankBatch:
        """A loaded microbatch, ready to be computed; in the thread that loads."""
        made = self.step.prepared(batch, compute_dtype(self.recipe))
        return made.ready_for(self.world.device)

    def drawn(self, step: int, fed: StepInput) -> list[RankBatch]:
        """The microbatches; if anything is drawn, with keys by which every rank draws as one process would."""
        if not self._draws_by_item:
            return fed.batches
        replicas = self.step.place.replicas if isinstance(self.step, PlannedStep) else None
        keys = (example_keys(self.recipe.run.seed, step, ids) for ids in fed.examples)
        return [batch.with_draws(of_batch, replicas) for batch, of_batch in zip(fed.batches, keys, strict=True)]


def build_job(
    recipe: Recipe, world: World, resume: str, say: Say, cleanup: ExitStack, chosen: ChosenPlan | None = None
) -> TrainingJob:
    """Build the job of a recipe. A collective, which fails on all ranks if it fails on one.

    resume: "auto", "never" or a path. say: prints a sentence. cleanup: closes what is open when the run ends.
    chosen: the Plan to train under, with which the recipe agrees; without one, all ranks run the whole model.
    """
    if unused := unused_pieces(recipe, None if chosen is None else chosen.plan):
        say(unused)
    if chosen is not None:
        _check_same_plan(world, chosen.plan)
    if chosen is not None and chosen.plan.schedule != "data_parallel":
        return _build_planned_job(recipe, world, resume, say, cleanup, chosen)
    check_same_backend(world)
    check_context_unused(recipe.context, recipe.balance.cut_by)
    unit = None if chosen is None else chosen.plan.unit_of(BACKBONE)
    tensor_size, expert_size = (1, 1) if unit is None else (unit.tp, unit.ep)
    replicas, waits = world.replicas(tensor_size), recipe.fsdp.waits or expert_size > 1
    rank_bytes, before_bytes = _memory_bytes(recipe, world), peak_memory_bytes(world.device)
    ranks = RecomputeRanks(world.num_ranks, world.by_node, world.device.type, rank_bytes, tensor_size, expert_size)
    with world.together():
        check_transport(recipe, world)
        deferred = DeferredModel.of(recipe, world, ranks, chosen)
        orchestrator = deferred.orchestrator(recipe, replicas, waits)
        opened = OpenedExamples.of(recipe, world, deferred.vocabulary, deferred.model, say)
        if rank_bytes:
            opened.leave_out_too_long(recipe, plan_alone(recipe, deferred.spec, ranks), orchestrator, say)
    decoder = open_decoder(recipe.data, opened.transforms, world, say, cleanup)
    check_same_profile(world, deferred.measured)
    if deferred.measured is not None and (elsewhere := deferred.measured.elsewhere_words(device_name(world.device))):
        say(elsewhere)
    dataset = opened.agreed(recipe, deferred.model, world, say)
    with world.together():
        check_bad_at_indexing(recipe, dataset)
        microbatches = recipe.microbatches_on(replicas.num_ranks)  # Refused before anything is sharded.
        order = build_order(recipe, dataset, say)
    given, recipe = recipe.run, in_steps(recipe, dataset, order, world, say)
    with world.together():
        recomputation = _recomputation(recipe, world, (ranks, before_bytes), deferred.spec, dataset, order, say)
        if recomputation.auto is not None:
            # Now it is known what is recomputed, and so what weighs how much.
            orchestrator = deferred.orchestrator(recomputation.recipe, replicas, waits)
    with world.together():
        mesh = build_mesh(
            world.device,
            shard_size=recipe.fsdp.shard_size,
            tensor_size=tensor_size,
            tensor_pieces=1 if chosen is None else chosen.plan.cluster.tensor_pieces,
            expert_size=expert_size,
        )
    if chosen is not None and chosen.plan.copies_pieces:
        with world.together():
            mesh = mesh.copying(opening_copies(world.device))
    with world.together():
        optimizer = _sharded(recipe, deferred.model, mesh, world)
    keep_freed_memory(world.device.type)
    world.barrier()  # The clocks of all ranks start at the same moment.
    if "split" in orchestrator.methods:
        _ = mesh.shared_rows  # A collective: the thread that loads, which needs it, can have none of its own.
    step = TrainStep(
        deferred.model,
        mesh,
        optimizer,
        max_grad_norm=recipe.optimizer.clip_norm,
        once_a_step=recipe.fsdp.once_a_step,
        loss_scale=recipe.fsdp.scale,
        clock=ActionClock(world.rank, world.device),
    )
    evaluator = None
    if opened.heldout is not None:
        model = deferred.model
        exchange = ItemExchange(replicas.control, orchestrator, model.measured)
        asked, seed = recipe.evaluate, recipe.run.seed
        evaluator = Evaluator(
            opened.heldout, deferred.vocabulary, decoder, exchange, mesh, world, replicas, asked, seed, say
        )
    start = first_progress(recipe, dataset, order, step)
    progress, line = resume_run(recipe, world, resume, deferred.model, optimizer, start, say)
    check_steps_of_epochs(given, progress, order)
    restore_scale(step, progress)
    return TrainingJob(
        recipe,
        world,
        mesh,
        deferred.model,
        deferred.spec,
        optimizer,
        step,
        order,
        dataset,
        decoder,
        build_loading(recipe, mesh, orchestrator, dataset, decoder, deferred.model),
        recomputation,
        evaluator,
        Checkpointer(recipe.run.dir / CHECKPOINTS, recipe.checkpoint, world.saving, line, world.launch, say),
        progress,
        microbatches,
        None if chosen is None else chosen.plan,
    )


def _sharded(recipe: Recipe, model: MLLM, mesh: Mesh, world: World) -> torch.optim.Optimizer:
    """Shard the model, give it weights, compile it if it is to be, and build its optimizer. A collective."""
    shard(model, mesh, recipe.fsdp, *divide_whole(model, mesh))
    materialise(model, recipe.modules, recipe.run.seed, world.device)
    if recipe.run.compile:
        compile_blocks(modules_by_phase(model).values())
    return build_optimizer(model, recipe.optimizer)


def _memory_bytes(recipe: Recipe, world: World) -> int:
    """The memory of the rank that has least; 0 where nobody says it, and nothing must know it. A collective."""
    with world.together():
        must_know = recipe.fsdp.recompute == "auto"
        own_bytes = memory_bytes(recipe, world.device) if must_know else known_memory_bytes(recipe, world.device)
    return min(world.gather(own_bytes or 0))


def _recomputation(
    recipe: Recipe,
    world: World,
    memory: tuple[RecomputeRanks, int],
    spec: ModelSpec,
    dataset: Examples | OwnSplits,
    order: ExampleOrder,
    say: Say,
) -> Recomputation:
    """What the run recomputes, by the numbers of the recipe or by "auto".

    memory: the ranks, and this rank's peak before the model was built.
    """
    if recipe.fsdp.recompute != "auto":
        if said := words_of_unused(recipe, spec):
            say(said)
        return Recomputation(recipe, spec)
    ranks, before_bytes = memory
    assert not isinstance(dataset, OwnSplits), "a recipe that reads splits states numbers"
    chosen = auto_recompute(recipe, spec, ranks, order, lambda ids: dataset.batch_lengths(ids, 1))
    say(str(chosen))
    correction = chosen.correction(world.device.type, lambda: peak_memory_bytes(world.device) - before_bytes)
    return Recomputation(chosen.resolved, spec, chosen, correction=correction)


def _build_planned_job(
    recipe: Recipe, world: World, resume: str, say: Say, cleanup: ExitStack, chosen: ChosenPlan
) -> TrainingJob:
    """As `build_job`, for ranks that hold different parts of the model."""
    plan = chosen.plan
    check_same_backend(world)
    with world.together():
        vocabulary, model = build_deferred(recipe)
        spec = model_spec(model)
        chosen.check_fits(spec, world)
        check_cuts(model, plan)
        check_context(plan, recipe.context)
        check_compiles(recipe, model, world)
        opened = OpenedExamples.of(recipe, world, vocabulary, model, say)
        (dataset,), heldout = opened.splits.values(), opened.heldout  # Under stages no recipe has splits of its own.
        check_bad_at_indexing(recipe, dataset)
        leave_out_too_long(dataset, plan, recipe.data.max_bad_fraction, say, exchange=recipe.context.exchange)
        if heldout is not None:
            leave_out_of_evaluation(heldout, plan, say, exchange=recipe.context.exchange)
        order = build_order(recipe, dataset, say)
        place = Place.of(plan.closed_up, world.rank)
        needs = StageNeeds.of(place, recipe.context, model.backbone)
    reads = bool(needs.readers)
    decoder = open_decoder(recipe.data, dataset.transforms, world, say, cleanup, reads=reads)
    opened.agreed(recipe, model, world, say)
    given, recipe = recipe.run, in_steps(recipe, dataset, order, world, say)
    with world.together():
        mesh = build_mesh(world.device)
    step, optimizer = build_part(model, spec, place, PartConfig.of_recipe(recipe, world.device), mesh, world)
    if recipe.run.compile:
        compile_blocks(step.modules.values())
    evaluator = None
    if heldout is not None:
        evaluator = PlannedEvaluator(
            heldout, vocabulary, decoder, plan, needs, step, world, recipe.evaluate, recipe.run.seed, say
        )
    start = first_progress(recipe, dataset, order, step)
    progress, line = resume_run(recipe, world, resume, model, optimizer, start, say)
    check_steps_of_epochs(given, progress, order)
    restore_scale(step, progress)
    return TrainingJob(
        recipe,
        world,
        mesh,
        model,
        spec,
        optimizer,
        step,
        order,
        dataset,
        decoder,
        PlannedLoading(StepDecider(place, plan), dataset, decoder, needs),
        Recomputation(recipe, spec, planned=place.recomputed),
        evaluator,
        Checkpointer(recipe.run.dir / CHECKPOINTS, recipe.checkpoint, world.saving, line, world.launch, say),
        progress,
        num_microbatches(plan),
        plan,
    )


def _check_same_plan(world: World, plan: Plan) -> None:
    """Raise JointUserError if ranks have read different Plans. A collective."""
    digests = world.gather(plan_digest(plan))
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise JointUserError(f"Rank {other} has read another plan than rank 0: copy one file to all machines.")
