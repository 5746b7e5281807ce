"""Builds a job from its recipe: model, data, mesh and optimizer, restored from a checkpoint if there is one."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch

from motet.balance import ItemMemory, StepCosts
from motet.core.errors import JointUserError, UserError
from motet.core.heap import keep_freed_memory
from motet.core.plan import Plan
from motet.core.plan_file import plan_digest
from motet.core.spec import ModelSpec
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.data.dataset import Dataset
from motet.data.decode import Decoder
from motet.data.drawn import DrawnVocabulary
from motet.data.examples import Examples
from motet.data.groups import GroupedOrder
from motet.data.manifest import Manifest
from motet.data.order import EpochOrder, ExampleOrder
from motet.data.remote import is_url
from motet.data.splits import OwnSplits
from motet.data.text import ChatTokenizer
from motet.data.transforms import Transform
from motet.dispatch import Carrier, ItemExchange, Orchestrator, RankBatch
from motet.dropout import drops_out, example_keys
from motet.models.build import build_mllm
from motet.models.compiling import check_compiler, compile_blocks, why_not_compiled
from motet.models.materialise import materialise
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.planner.item_memory import RankMemory
from motet.runtime.clock import ActionClock
from motet.runtime.fsdp import shard
from motet.runtime.mesh import Mesh, build_mesh, of_other_examples
from motet.runtime.place import Place
from motet.runtime.planned_step import PlannedStep
from motet.runtime.stage import modules_by_phase
from motet.runtime.step import TrainStep
from motet.schedule.layout import num_microbatches
from motet.train.balancing import (
    MeasuredPhases,
    build_orchestrator,
    check_same_backend,
    check_same_profile,
    check_shared,
    compute_dtype,
    read_measured,
)
from motet.train.checkpoint.choice import Say
from motet.train.checkpoint.contents import CHECKPOINTS, Progress
from motet.train.checkpoint.resuming import resume_run
from motet.train.checkpoint.same_run import own_files, stated
from motet.train.checkpoint.saving import Checkpointer
from motet.train.device import device_name
from motet.train.evaluate import Evaluator, check_prompts
from motet.train.evaluate_planned import PlannedEvaluator
from motet.train.export import check_export
from motet.train.input.datasets import (
    check_bad_at_indexing,
    check_buckets_used,
    check_items_to_make,
    check_items_to_read,
    check_same_examples,
    open_dataset,
    open_heldout,
    say_named_twice,
    say_unlearned,
)
from motet.train.input.feed import StepInput
from motet.train.input.loading import ExchangeLoading, IndexLoading, Loading
from motet.train.input.ordering import build_order
from motet.train.input.own_splits import joined_splits, own_splits
from motet.train.input.planned import PlannedLoading, StageNeeds, StepDecider
from motet.train.input.rows import check_rows
from motet.train.input.service import open_decoder
from motet.train.optimizer import build_optimizer, check_groups, check_learns, never_reached
from motet.train.planned_job import (
    ChosenPlan,
    PartConfig,
    build_part,
    check_context,
    check_context_unused,
    check_cuts,
    divide_whole,
    unused_pieces,
)
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.run_config import RunConfig
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
from motet.train.too_long import leave_out_of_evaluation, leave_out_too_long
from motet.train.world import World

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


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
    check_context_unused(recipe.context)
    unit = None if chosen is None else chosen.plan.unit_of(BACKBONE)
    tensor_size, expert_size = (1, 1) if unit is None else (unit.tp, unit.ep)
    replicas, waits = world.replicas(tensor_size), recipe.fsdp.waits or expert_size > 1
    rank_bytes, before_bytes = _memory_bytes(recipe, world), peak_memory_bytes(world.device)
    ranks = RecomputeRanks(
        world.num_ranks, world.ranks_per_node, world.device.type, rank_bytes, tensor_size, expert_size
    )
    with world.together():
        _check_transport(recipe, world)
        subject = _Subject.of(recipe, world, ranks, chosen)
        orchestrator = subject.orchestrator(recipe, replicas, waits)
        opened = _OpenedExamples.of(recipe, world, subject, say)
        if rank_bytes:
            opened.leave_out_too_long(recipe, plan_alone(recipe, subject.spec, ranks), orchestrator, say)
    decoder = open_decoder(recipe.data, opened.transforms, world, say, cleanup)
    check_same_profile(world, subject.measured)
    if subject.measured is not None and (elsewhere := subject.measured.elsewhere_words(device_name(world.device))):
        say(elsewhere)
    dataset = opened.agreed(recipe, subject.model, world, say)
    with world.together():
        check_bad_at_indexing(recipe, dataset)
        microbatches = recipe.microbatches_on(replicas.num_ranks)  # Refused before anything is sharded.
        order = build_order(recipe, dataset, say)
    given, recipe = recipe.run, _in_steps(recipe, dataset, order, world, say)
    with world.together():
        recomputation = _recomputation(recipe, world, (ranks, before_bytes), subject.spec, dataset, order, say)
        if recomputation.auto is not None:
            # Now it is known what is recomputed, and so what weighs how much.
            orchestrator = subject.orchestrator(recomputation.recipe, replicas, waits)
    with world.together():
        mesh = build_mesh(
            world.device,
            shard_size=recipe.fsdp.shard_size,
            ranks_per_node=world.ranks_per_node,
            tensor_size=tensor_size,
            tensor_pieces=1 if chosen is None else chosen.plan.cluster.tensor_pieces,
            expert_size=expert_size,
        )
        optimizer = _sharded(recipe, subject.model, mesh, world)
    keep_freed_memory(world.device.type)
    world.barrier()  # The clocks of all ranks start at the same moment.
    step = TrainStep(
        subject.model,
        mesh,
        optimizer,
        max_grad_norm=recipe.optimizer.clip_norm,
        once_a_step=recipe.fsdp.once_a_step,
        loss_scale=recipe.fsdp.scale,
        clock=ActionClock(world.rank, world.device),
    )
    evaluator = None
    if opened.heldout is not None:
        model = subject.model
        exchange = ItemExchange(replicas.control, orchestrator, model.measured, ranks_per_node=replicas.ranks_per_node)
        asked, seed = recipe.evaluate, recipe.run.seed
        evaluator = Evaluator(
            opened.heldout, subject.vocabulary, decoder, exchange, mesh, world, replicas, asked, seed, say
        )
    start = _start(recipe, dataset, order, step)
    progress, line = resume_run(recipe, world, resume, subject.model, optimizer, start, say)
    _check_steps_of_epochs(given, progress, order)
    _restore_scale(step, progress)
    return TrainingJob(
        recipe,
        world,
        mesh,
        subject.model,
        subject.spec,
        optimizer,
        step,
        order,
        dataset,
        decoder,
        _loading(recipe, mesh, orchestrator, dataset, decoder, subject.model),
        recomputation,
        evaluator,
        Checkpointer(recipe.run.dir / CHECKPOINTS, recipe.checkpoint, world.saving, line, world.launch, say),
        progress,
        microbatches,
        None if chosen is None else chosen.plan,
    )


@dataclass(frozen=True, eq=False)
class _Subject:
    """What a job without stages trains, before it has weights, and what its items weigh.

    measured: the profile that it balances by, if it does. memory: of `StepTimes`.
    """

    vocabulary: ChatTokenizer | DrawnVocabulary
    model: MLLM
    spec: ModelSpec
    measured: MeasuredPhases | None
    memory: ItemMemory | None

    @classmethod
    def of(cls, recipe: Recipe, world: World, ranks: RecomputeRanks, chosen: ChosenPlan | None) -> _Subject:
        """The subject of a recipe. Raises UserError for what cannot be trained, or not by these ranks."""
        vocabulary, model = _deferred_model(recipe)
        _check_compiles(recipe, model, world)
        check_shared(recipe.balance, model)
        spec = model_spec(model)
        if chosen is not None:
            chosen.check_fits(spec, world.num_ranks, world.ranks_per_node)
            check_cuts(model, chosen.plan)
        return cls(vocabulary, model, spec, read_measured(recipe, spec), _item_memory(recipe, spec, ranks))

    def orchestrator(self, recipe: Recipe, replicas: World, waits: bool) -> Orchestrator:
        """What balances the items of a step. waits: whether ranks wait for each other in each pass."""
        return build_orchestrator(
            recipe.balance,
            self.model,
            replicas.num_ranks,
            replicas.device,
            compute_dtype(recipe),
            recompute=recipe.fsdp.recomputed(self.spec.num_blocks),
            measured=self.measured,
            ranks_per_node=replicas.ranks_per_node,
            waits=waits,
            memory=self.memory,
        )


@dataclass(frozen=True, eq=False)
class _OpenedExamples:
    """The examples of a job, before ranks have agreed on them.

    splits: by number, those that this rank reads; {0: all} of data that are not split. heldout: None without any.
    """

    splits: dict[int, Examples]
    heldout: Dataset | None

    @classmethod
    def of(cls, recipe: Recipe, world: World, subject: _Subject, say: Say) -> _OpenedExamples:
        """The examples of a recipe, indexed if they were not. Raises UserError."""
        vocabulary, model = subject.vocabulary, subject.model
        splits = {
            number: open_dataset(recipe, manifests, vocabulary, model, say)
            for number, manifests in own_splits(recipe, world).items()
        }
        say_unlearned(vocabulary, splits[min(splits)], say)
        say_named_twice(recipe, say)
        return cls(splits, open_heldout(recipe, vocabulary, model, say))

    @property
    def transforms(self) -> dict[str, Transform]:
        """What items are loaded with, which is the same in all splits."""
        return self.splits[min(self.splits)].transforms

    def leave_out_too_long(self, recipe: Recipe, alone: Plan, orchestrator: Orchestrator, say: Say) -> None:
        """Leave out examples for which no rank has memory. alone: the Plan by which each rank has whole examples."""
        # Keys of items that training cuts by itself come by group-cast (`dispatch/cut_batch.py`).
        shared, exchange = _shared_by(recipe, orchestrator), "group_cast"
        for part in self.splits.values():
            leave_out_too_long(part, alone, recipe.data.max_bad_fraction, say, shared_by=shared, exchange=exchange)
        if self.heldout is not None:
            leave_out_of_evaluation(self.heldout, alone, say, exchange=exchange)

    def agreed(self, recipe: Recipe, model: MLLM, world: World, say: Say) -> Examples | OwnSplits:
        """The examples to train on, which all ranks know alike and which ask for what the model has. A collective."""
        splits = list(self.splits.values())
        check_items_to_make(model, splits, world)
        check_items_to_read(model, splits, world)
        check_buckets_used(recipe, model, splits, world)
        dataset = joined_splits(self.splits, world, say) if recipe.data.is_split else self.splits[0]
        check_same_examples(world, dataset, self.heldout)
        check_prompts(self.heldout, recipe.evaluate, world, say)
        return dataset


def _sharded(recipe: Recipe, model: MLLM, mesh: Mesh, world: World) -> torch.optim.Optimizer:
    """Shard the model, give it weights, compile it if it is to be, and build its optimizer. A collective."""
    shard(model, mesh, recipe.fsdp, *divide_whole(model, mesh))
    materialise(model, recipe.modules, recipe.run.seed, world.device)
    if recipe.run.compile:
        compile_blocks(modules_by_phase(model).values())
    return build_optimizer(model, recipe.optimizer)


def check_ahead(recipe: Recipe) -> None:
    """Raise UserError for what is wrong with a run that begins later and shows before any example is read."""
    _deferred_model(recipe)
    for manifest in (*recipe.data.train, *recipe.data.heldout):
        if not (recipe.data.is_split or is_url(manifest)):
            Manifest.find(manifest)


def _deferred_model(recipe: Recipe) -> tuple[ChatTokenizer | DrawnVocabulary, MLLM]:
    """The vocabulary, and the whole model without weights. Raises UserError for what does not fit it."""
    vocabulary, run = recipe.vocabulary(), recipe.run
    model = build_mllm(recipe.modules, vocabulary.vocabulary_size, _DTYPES[run.dtype], run.seed, deferred=True)
    check_rows(recipe, model)
    check_learns(model)
    check_export(recipe)
    check_groups(model, recipe.optimizer)
    return vocabulary, model


def _in_steps(recipe: Recipe, dataset: Examples | OwnSplits, order: EpochOrder, world: World, say: Say) -> Recipe:
    """The recipe with steps in place of epochs; it is said if there are too few. A collective."""
    with world.together():
        run = recipe.run.over(order)
    if recipe.run.epochs is not None:
        times = "once" if recipe.run.epochs == 1 else f"{recipe.run.epochs:g} times"
        times = f"at least {times}" if recipe.data.weights else times
        examples = counted_words(dataset.num_examples, "example")
        say(f"Each of the {examples} is taken {times}, in {counted_words(run.num_steps, 'step')}.")
    if short := never_reached(recipe.optimizer, run.num_steps):
        say(short)
    return recipe.model_copy(update={"run": run})


def _check_steps_of_epochs(run: RunConfig, progress: Progress, order: EpochOrder) -> None:
    """Raise JointUserError where epochs would be counted wrong, as the steps so far had other batches. On all ranks."""
    if run.epochs is not None and order.taken_before(progress.position) != progress.step * run.batch_size:
        raise JointUserError(
            f"The run is behind {counted_words(progress.position, 'example')} after "
            f"{counted_words(progress.step, 'step')}, so run.batch_size was not {run.batch_size} as now, by which "
            f"run.epochs = {run.epochs:g} is counted in steps: set it back, or state run.steps in place of run.epochs."
        )


def _item_memory(recipe: Recipe, spec: ModelSpec, ranks: RecomputeRanks) -> ItemMemory | None:
    """What items take of a rank's memory, where it is known and items may be cut.

    None too where the model alone does not fit by prediction: then no item is to blame, and nothing is cut for it.
    """
    if not ranks.memory_bytes or not recipe.balance.cut_by:
        return None
    memory = RankMemory(plan_alone(recipe, spec, ranks))
    return memory if memory.room_bytes > 0 else None


def _shared_by(recipe: Recipe, orchestrator: Orchestrator) -> dict[str, int]:
    """Module -> the most ranks over which training cuts an item of it; of those whose items it cuts."""
    costs = orchestrator.costs
    if not recipe.balance.cut_by or not isinstance(costs, StepCosts):
        return {}
    return dict.fromkeys((BACKBONE, *costs.times.item_keys), orchestrator.num_ranks)


def _start(
    recipe: Recipe, dataset: Examples | OwnSplits, order: ExampleOrder, step: TrainStep | PlannedStep
) -> Progress:
    """The Progress before the first step, with all that the order of examples depends on."""
    caps = order.caps if isinstance(order, GroupedOrder) else None
    beside = recipe.modules.beside_adapters(recipe.run.seed)
    return Progress(
        0,
        0,
        0,
        recipe.data.seed,
        dataset.fingerprint,
        group=caps,
        mixture=recipe.data.weights,
        beside=beside,
        scales=recipe.modules.adapter_scales,
        loss_scale=step.loss_scale and step.loss_scale.value,
        shuffle=recipe.data.shuffle,
        optimizer=recipe.optimizer.name,
        stated=stated(recipe),
        own_files=own_files(recipe),
    )


def _restore_scale(step: TrainStep | PlannedStep, progress: Progress) -> None:
    """Go on with the loss scale of a checkpoint; one that computed in another type has none."""
    if step.loss_scale is not None and progress.loss_scale is not None:
        step.loss_scale.value, step.loss_scale.num_finite = progress.loss_scale, progress.num_finite


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
        vocabulary, model = _deferred_model(recipe)
        spec = model_spec(model)
        chosen.check_fits(spec, world.num_ranks, world.ranks_per_node)
        check_cuts(model, plan)
        check_context(model, plan, recipe.context)
        _check_compiles(recipe, model, world)
        dataset = open_dataset(recipe, recipe.data.train, vocabulary, model, say)
        say_unlearned(vocabulary, dataset, say)
        say_named_twice(recipe, say)
        heldout = open_heldout(recipe, vocabulary, model, say)
        check_bad_at_indexing(recipe, dataset)
        leave_out_too_long(dataset, plan, recipe.data.max_bad_fraction, say, exchange=recipe.context.exchange)
        if heldout is not None:
            leave_out_of_evaluation(heldout, plan, say, exchange=recipe.context.exchange)
        order = build_order(recipe, dataset, say)
        place = Place.of(plan, world.rank)
        needs = StageNeeds.of(
            place, recipe.context, needs_places=model.backbone.needs_places, merges=model.backbone.merge is not None
        )
    reads = bool(needs.readers)
    decoder = open_decoder(recipe.data, dataset.transforms, world, say, cleanup, reads=reads)
    check_items_to_make(model, [dataset], world)
    check_items_to_read(model, [dataset], world)
    check_buckets_used(recipe, model, [dataset], world)
    check_same_examples(world, dataset, heldout)
    check_prompts(heldout, recipe.evaluate, world, say)
    given, recipe = recipe.run, _in_steps(recipe, dataset, order, world, say)
    with world.together():
        mesh = build_mesh(world.device, ranks_per_node=world.ranks_per_node)
    step, optimizer = build_part(model, spec, place, PartConfig.of_recipe(recipe, world.device), mesh, world)
    if recipe.run.compile:
        compile_blocks(step.modules.values())
    evaluator = None
    if heldout is not None:
        evaluator = PlannedEvaluator(
            heldout, vocabulary, decoder, plan, needs, step, world, recipe.evaluate, recipe.run.seed, say
        )
    start = _start(recipe, dataset, order, step)
    progress, line = resume_run(recipe, world, resume, model, optimizer, start, say)
    _check_steps_of_epochs(given, progress, order)
    _restore_scale(step, progress)
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
        PlannedLoading(StepDecider(place), dataset, decoder, needs),
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


def _loading(
    recipe: Recipe,
    mesh: Mesh,
    orchestrator: Orchestrator,
    dataset: Examples | OwnSplits,
    decoder: Decoder,
    model: MLLM,
) -> Loading:
    """The way in which the recipe's microbatches are loaded."""
    if recipe.exchanges_items:
        exchange = ItemExchange(
            mesh.host_group,
            orchestrator,
            model.measured,
            ranks_per_node=mesh.ranks_per_node,
            carrier=_carrier(recipe, mesh),
        )
        return ExchangeLoading(dataset, decoder, exchange, mesh.ranks_per_node)
    assert not isinstance(dataset, OwnSplits), "a recipe whose examples are split exchanges items"
    return IndexLoading(dataset, decoder, orchestrator, mesh.rank, mesh.ranks_per_node)


def _carrier(recipe: Recipe, mesh: Mesh) -> Carrier:
    """What moves the bytes of inputs between ranks. A collective."""
    if recipe.balance.transport == "host":
        return Carrier(mesh.host_group)
    # A new group has a communicator of its own. That of the step belongs to the training thread.
    return Carrier(of_other_examples(mesh.tensor_size, backend="nccl"), mesh.device)


def _check_compiles(recipe: Recipe, model: MLLM, world: World) -> None:
    """Raise UserError where blocks cannot be compiled, if they are to be."""
    if not recipe.run.compile:
        return
    what = "generators, whose noise is drawn by item" if model.generators else ""
    if what := what or why_not_compiled(modules_by_phase(model).values()):
        raise UserError(f"run.compile cannot compile a model with {what}; remove run.compile.")
    check_compiler(world.device.type)


def _check_transport(recipe: Recipe, world: World) -> None:
    """Raise UserError where inputs cannot move over the links of the devices."""
    if recipe.balance.transport == "host":
        return
    if world.device.type == "cpu":
        raise UserError(
            'balance.transport = "device" moves inputs over the links of GPUs, and this run is on the CPU; remove it.'
        )
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise UserError(
            'balance.transport = "device" with CUDA_DEVICE_MAX_CONNECTIONS=1 can end in a deadlock: one queue makes an '
            "exchange of inputs wait for a collective of the step; remove it, or unset the variable."
        )
