"""Builds a job from its recipe: model, data, mesh and optimizer, restored from a checkpoint if there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from motet.balance import ItemMemory, StepCosts
from motet.core.errors import JointUserError, UserError
from motet.core.example import ItemText
from motet.core.grid_positions import AS_TEXT
from motet.core.heap import keep_freed_memory
from motet.core.modalities import VIDEO
from motet.core.plan import Plan
from motet.core.plan_file import plan_digest
from motet.core.spec import ModelSpec
from motet.core.words import counted_words
from motet.core.workload import BACKBONE
from motet.data.dataset import Dataset, Modality
from motet.data.decode import Decoder
from motet.data.drawn import DrawnDataset, DrawnVocabulary
from motet.data.examples import Examples
from motet.data.groups import GroupedOrder
from motet.data.order import ExampleOrder
from motet.data.split_images import SplitImages
from motet.data.splits import OwnSplits
from motet.data.text import ChatTokenizer
from motet.data.timed_videos import TimedVideos
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
from motet.runtime.groups import new_group
from motet.runtime.mesh import Mesh, build_mesh
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
from motet.train.checkpoint.choice import Say, Start, choose_checkpoint, remove_all, verified_start
from motet.train.checkpoint.contents import Progress, RunState, digest_of, is_checkpoint, name_of, read_state
from motet.train.checkpoint.remote import RemoteCheckpoints, checkpoint_at, digest_at, is_stored
from motet.train.checkpoint.restoring import load, load_weights
from motet.train.checkpoint.saving import Checkpointer
from motet.train.checkpoint.state import store_frozen
from motet.train.evaluate import Evaluator
from motet.train.evaluate_planned import PlannedEvaluator
from motet.train.export import check_export
from motet.train.input.feed import StepInput
from motet.train.input.loading import ExchangeLoading, IndexLoading, Loading
from motet.train.input.ordering import build_order
from motet.train.input.own_splits import check_same_splits, joined_splits, own_splits, say_left_out
from motet.train.input.planned import PlannedLoading, StageNeeds, StepDecider
from motet.train.input.rows import check_rows
from motet.train.input.service import open_decoder
from motet.train.optimizer import build_optimizer, check_groups, check_learns
from motet.train.planned_job import (
    ChosenPlan,
    PartConfig,
    build_part,
    check_context,
    check_context_unused,
    check_cuts,
    unused_pieces,
)
from motet.train.recipe.recipe import DrawnRecipe, Recipe
from motet.train.recompute import (
    Recomputation,
    RecomputeRanks,
    auto_recompute,
    known_memory_bytes,
    memory_bytes,
    plan_alone,
)
from motet.train.report.metrics import peak_memory_bytes
from motet.train.too_long import leave_out_of_evaluation, leave_out_too_long
from motet.train.world import World

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CHECKPOINTS, _START = "checkpoints", "start"
"""Folders in that of a run; the latter has the copy of a checkpoint that it begins with, where `run.start` is a URL."""
_INDEX_PROGRESS_EVERY_S = 5.0


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
    if chosen is not None and chosen.plan.schedule != "data_parallel":
        return _build_planned_job(recipe, world, resume, say, cleanup, chosen)
    check_same_backend(world)
    check_context_unused(recipe.context)
    rank_bytes, before_bytes = _memory_bytes(recipe, world), peak_memory_bytes(world.device)
    ranks = RecomputeRanks(world.num_ranks, world.ranks_per_node, world.device.type, rank_bytes)
    with world.together():
        _check_transport(recipe, world)
        dtype = _DTYPES[recipe.run.dtype]
        vocabulary = recipe.vocabulary()
        model = build_mllm(recipe.modules, vocabulary.vocabulary_size, dtype, recipe.run.seed, deferred=True)
        check_rows(recipe, model)
        check_learns(model)
        check_export(recipe)
        _check_compiles(recipe, model, world)
        check_groups(model, recipe.optimizer)
        check_shared(recipe.balance, model)
        spec = model_spec(model)
        if chosen is not None:
            chosen.check_fits(spec, world.num_ranks, world.ranks_per_node)
        measured = read_measured(recipe, spec)
        memory = _item_memory(recipe, spec, ranks)
        orchestrator = _orchestrator(recipe, model, spec, measured, world, memory)
        splits = own_splits(recipe, world)
        opened = {
            number: open_dataset(recipe, manifests, vocabulary, model, say) for number, manifests in splits.items()
        }
        heldout = _open_heldout(recipe, vocabulary, model, say)
        if rank_bytes:
            alone, shared = plan_alone(recipe, spec, ranks), _shared_by(recipe, orchestrator)
            for part in opened.values():
                # Keys of items that training cuts by itself come by group-cast (`dispatch/cut_batch.py`).
                leave_out_too_long(
                    part, alone, recipe.data.max_bad_fraction, say, shared_by=shared, exchange="group_cast"
                )
            if heldout is not None:
                leave_out_of_evaluation(heldout, alone, say, exchange="group_cast")
    decoder = open_decoder(recipe.data, opened[min(opened)].transforms, world, say, cleanup)
    check_same_profile(world, measured)
    _check_made(model, opened.values(), world)
    _check_read(model, list(opened.values()), world)
    _check_buckets(recipe, model, opened.values(), world)
    dataset = joined_splits(opened, world, say) if recipe.data.is_split else opened[0]
    _check_same_examples(world, dataset, heldout)
    with world.together():
        _check_bad_at_indexing(recipe, dataset)
        microbatches = recipe.microbatches_on(world.num_ranks)  # Refused before anything is sharded.
        order = build_order(recipe, dataset, say)
        recomputation = _recomputation(recipe, world, (ranks, before_bytes), spec, dataset, order, say)
        if recomputation.auto is not None:
            # Now it is known what is recomputed, and so what weighs how much.
            orchestrator = _orchestrator(recomputation.recipe, model, spec, measured, world, memory)
    with world.together():
        mesh = build_mesh(world.device, shard_size=recipe.fsdp.shard_size, ranks_per_node=world.ranks_per_node)
        shard(model, mesh, recipe.fsdp)
        materialise(model, recipe.modules, recipe.run.seed, world.device)
        if recipe.run.compile:
            compile_blocks(modules_by_phase(model).values())
        optimizer = build_optimizer(model, recipe.optimizer)
    keep_freed_memory(world.device.type)
    world.barrier()  # The clocks of all ranks start at the same moment.
    step = TrainStep(
        model,
        mesh,
        optimizer,
        max_grad_norm=recipe.optimizer.clip_norm,
        once_a_step=recipe.fsdp.once_a_step,
        loss_scale=recipe.fsdp.scale,
        clock=ActionClock(world.rank, world.device),
    )
    evaluator = None
    if heldout is not None:
        exchange = ItemExchange(world.control, orchestrator, model.measured, ranks_per_node=world.ranks_per_node)
        evaluator = Evaluator(
            heldout, vocabulary, decoder, exchange, mesh, world, recipe.evaluate, recipe.run.seed, say
        )
    start = _start(recipe, dataset, order, step)
    progress, line = _resume(recipe, world, resume, model, optimizer, start, say)
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
        _loading(recipe, world, mesh, orchestrator, dataset, decoder, model),
        recomputation,
        evaluator,
        Checkpointer(recipe.run.dir / _CHECKPOINTS, recipe.checkpoint, world.saving, line, world.launch, say),
        progress,
        microbatches,
        None if chosen is None else chosen.plan,
    )


def _orchestrator(
    recipe: Recipe,
    model: MLLM,
    spec: ModelSpec,
    measured: MeasuredPhases | None,
    world: World,
    memory: ItemMemory | None = None,
) -> Orchestrator:
    """The Orchestrator of a recipe. measured: the profile that it balances by, if it does. memory: of `StepTimes`."""
    return build_orchestrator(
        recipe.balance,
        model,
        world.num_ranks,
        world.device,
        compute_dtype(recipe),
        recompute=recipe.fsdp.recomputed(spec.num_blocks),
        measured=measured,
        ranks_per_node=world.ranks_per_node,
        waits=recipe.fsdp.waits,
        memory=memory,
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
        dtype, vocabulary = _DTYPES[recipe.run.dtype], recipe.vocabulary()
        model = build_mllm(recipe.modules, vocabulary.vocabulary_size, dtype, recipe.run.seed, deferred=True)
        spec = model_spec(model)
        chosen.check_fits(spec, world.num_ranks, world.ranks_per_node)
        check_cuts(model, plan)
        check_context(model, plan, recipe.context)
        check_rows(recipe, model)
        check_learns(model)
        check_export(recipe)
        _check_compiles(recipe, model, world)
        check_groups(model, recipe.optimizer)
        dataset = open_dataset(recipe, recipe.data.train, vocabulary, model, say)
        heldout = _open_heldout(recipe, vocabulary, model, say)
        _check_bad_at_indexing(recipe, dataset)
        leave_out_too_long(dataset, plan, recipe.data.max_bad_fraction, say, exchange=recipe.context.exchange)
        if heldout is not None:
            leave_out_of_evaluation(heldout, plan, say, exchange=recipe.context.exchange)
        order = build_order(recipe, dataset, say)
        place = Place.of(plan, world.rank)
        needs = StageNeeds.of(place, recipe.context, needs_places=model.backbone.needs_places)
    reads = bool(needs.readers)
    decoder = open_decoder(recipe.data, dataset.transforms, world, say, cleanup, reads=reads)
    _check_made(model, [dataset], world)
    _check_read(model, [dataset], world)
    _check_buckets(recipe, model, [dataset], world)
    _check_same_plan(world, plan)
    _check_same_examples(world, dataset, heldout)
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
    progress, line = _resume(recipe, world, resume, model, optimizer, start, say)
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
        Checkpointer(recipe.run.dir / _CHECKPOINTS, recipe.checkpoint, world.saving, line, world.launch, say),
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


def _check_fits_positions(recipe: Recipe, model: MLLM, answers: bool) -> None:
    """Raise UserError if a sequence may be longer than a table of learned positions, or grow longer as it is answered.

    A document may not be found to be too long in a step, by the one rank that has it.
    """
    rows, allowed = model.backbone.max_rows, recipe.data.max_sequence_length
    if rows is None:
        return
    most = rows - (recipe.evaluate.max_new_tokens if answers else 0)
    if allowed is None or allowed > most:
        raise UserError(
            f"data.max_sequence_length is {'not set' if allowed is None else f'{allowed:,}'}, but model.backbone has "
            f"positions for {rows:,} rows{' with the evaluate.max_new_tokens of an answer' if answers else ''}; set it "
            f"to {most} at most."
        )


def open_dataset(
    recipe: Recipe,
    manifests: Sequence[str],
    vocabulary: ChatTokenizer | DrawnVocabulary,
    model: MLLM,
    say: Say,
    *,
    whole: bool = False,
) -> Examples:
    """The examples of the manifests, or those that are drawn, in the form that the model takes.

    The model's weights are not read. whole: examples are not truncated, but left out, as answers are compared whole.
    """
    _check_fits_positions(recipe, model, answers=whole)
    modalities = {
        name: Modality(
            recipe.transform(name),
            module.num_tokens,
            module.lengths,
            module.segments,
            is_made=name in model.generators,
            max_turn=getattr(module, "max_turn", 0),
            grids=module.grids if model.backbone.places_items and name in model.encoders else None,
            behind=model.backbone.behind_grids if module.has_raster else AS_TEXT,
            item_text=_item_text(vocabulary, recipe.transform(name)),
        )
        for name, module in model.measured.items()
    }
    dataset: Examples
    if isinstance(recipe, DrawnRecipe):
        dataset = DrawnDataset(
            recipe.drawn(),
            modalities,
            vocabulary_size=vocabulary.vocabulary_size,
            seed=recipe.data.seed,
            max_sequence_length=recipe.data.max_sequence_length,
        )
    else:
        dataset = Dataset.open(
            manifests,
            vocabulary,
            modalities,
            combine=recipe.modules.combine,
            max_sequence_length=recipe.data.max_sequence_length,
            too_long="drop" if whole and recipe.data.too_long == "truncate" else recipe.data.too_long,
            index_folder=recipe.data.index_folder,
            copies=recipe.data.copies,
            num_workers=recipe.data.num_workers,
            progress=_index_progress(manifests, say),
        )
    say_left_out(manifests or ("[workload]",), dataset.left_out, dataset.num_in_manifests, say)
    return dataset


def _item_text(
    vocabulary: ChatTokenizer | DrawnVocabulary, transform: Transform
) -> Callable[[tuple[int, ...]], ItemText | None] | None:
    """As of `Modality`. Raises UserError for a tokenizer that tells tiles apart, beside a transform that makes none."""
    if not isinstance(vocabulary, ChatTokenizer):
        return None
    if isinstance(transform, TimedVideos):
        return lambda key: vocabulary.timed_text(VIDEO, transform.times(key))
    text = vocabulary.item_text(transform.modality)
    if text is not None and not isinstance(transform, SplitImages):
        raise UserError(
            "data.tokenizer is of a model that cuts images into tiles and marks each of them, which the transform here "
            "does not; take the tokenizer of another model, or the whole model (model.path)."
        )
    return text


def _open_heldout(recipe: Recipe, vocabulary: ChatTokenizer | DrawnVocabulary, model: MLLM, say: Say) -> Dataset | None:
    if not recipe.data.heldout:
        return None
    heldout = open_dataset(recipe, recipe.data.heldout, vocabulary, model, say, whole=True)
    assert isinstance(heldout, Dataset), "drawn examples are not held out"
    return heldout


def _index_progress(manifests: Sequence[str], say: Say) -> Callable[[int, float], None]:
    """A function that prints the progress of building an index every few seconds."""
    last_s = time.monotonic()

    def show(num_examples: int, share: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _INDEX_PROGRESS_EVERY_S:
            last_s = time.monotonic()
            say(f"Indexing {', '.join(manifests)}: {counted_words(num_examples, 'example')}, {share:.0%}")

    return show


def _check_same_examples(world: World, dataset: Examples | OwnSplits, heldout: Dataset | None) -> None:
    """Raise JointUserError if ranks see different examples, and are to see the same."""
    parts = {"train": dataset, "heldout": heldout}
    shared = {key: part for key, part in parts.items() if part is not None and not isinstance(part, OwnSplits)}
    by_rank = world.gather({key: (part.num_examples, part.fingerprint) for key, part in shared.items()})
    for rank, datasets in enumerate(by_rank):
        for key, other in datasets.items():
            if other != (first := by_rank[0][key]):
                raise JointUserError(
                    f"data.{key} is not the same everywhere: rank 0 finds {counted_words(first[0], 'example')} that "
                    f"can be used, rank {rank} finds {other[0]:,}, or others; give all machines the same files."
                )


def _check_bad_at_indexing(recipe: Recipe, dataset: Examples | OwnSplits) -> None:
    """Raise UserError if more examples were left out of the index as bad than data.max_bad_fraction allows."""
    num_bad, allowed = dataset.left_out.num_bad, recipe.data.max_bad_fraction
    if num_bad > allowed * dataset.num_in_manifests:
        raise UserError(
            f"{counted_words(num_bad, 'example has', 'examples have')} files that cannot be used, of "
            f"{dataset.num_in_manifests:,} for training, more than data.max_bad_fraction = {allowed:g} allows; the "
            f"first: {dataset.left_out.first()}."
        )


def _check_made(model: MLLM, datasets: Iterable[Examples], world: World) -> None:
    """Raise JointUserError if a generator learns and no rank has an item for it to make. A collective."""
    for name, generator in model.generators.items():
        learns = any(parameter.requires_grad for parameter in generator.parameters())
        # Drawn examples have what the recipe's workload says.
        is_there = any(not isinstance(dataset, Dataset) or dataset.has_items(name) for dataset in datasets)
        if not any(world.gather(is_there or not learns)):
            raise JointUserError(
                f"model.generators.{name} learns to make items of answers, and no answer of data.train has any; add "
                "examples whose answers do, or remove the generator."
            )


def _check_read(model: MLLM, datasets: Sequence[Examples], world: World) -> None:
    """Raise JointUserError if all that learns are encoders whose items no rank has any of. A collective."""
    encoders = [name for name, module in model.encoders.items() if any(p.requires_grad for p in module.parameters())]
    others = (model.backbone, *model.generators.values())
    learns = any(parameter.requires_grad for module in others for parameter in module.parameters())
    # Drawn examples have what the recipe's workload says.
    is_there = any(
        not isinstance(dataset, Dataset) or dataset.has_items(name) for dataset in datasets for name in encoders
    )
    if not any(world.gather(learns or is_there)):
        raise JointUserError(
            f"Nothing learns: only {' and '.join(f'model.encoders.{name}' for name in encoders)} would, and no example "
            "of data.train has anything to read for it; add examples that have, or let another part learn."
        )


def _check_buckets(recipe: Recipe, model: MLLM, datasets: Iterable[Examples], world: World) -> None:
    """Raise JointUserError for a bucket of a transform that no example of any rank fits. A collective."""
    for name in model.measured:
        transform = recipe.transform(name)
        if not (buckets := getattr(transform, "buckets", None)):
            continue
        own = [dataset.sizes_of(name).tolist() for dataset in datasets if isinstance(dataset, Dataset)]
        used = {tuple(size) for of_rank in world.gather(own) for sizes in of_rank for size in sizes}
        for width, height in buckets:
            if (height // transform.patch_size, width // transform.patch_size) not in used:
                raise JointUserError(
                    f"transforms.{recipe.table_of(name)}.buckets has [{width}, {height}], which no example of "
                    f"data.train fits that {name} computes; remove it."
                )


def _loading(
    recipe: Recipe,
    world: World,
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
            ranks_per_node=world.ranks_per_node,
            carrier=_carrier(recipe, world, mesh),
        )
        return ExchangeLoading(dataset, decoder, exchange, world.ranks_per_node)
    assert not isinstance(dataset, OwnSplits), "a recipe whose examples are split exchanges items"
    return IndexLoading(dataset, decoder, orchestrator, world.rank, world.ranks_per_node)


def _carrier(recipe: Recipe, world: World, mesh: Mesh) -> Carrier:
    """What moves the bytes of inputs between ranks. A collective."""
    if recipe.balance.transport == "host":
        return Carrier(mesh.host_group)
    # A new group has a communicator of its own. That of the step belongs to the training thread.
    return Carrier(new_group(backend="nccl"), world.device)


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


def _resume(
    recipe: Recipe,
    world: World,
    resume: str,
    model: MLLM,
    optimizer: torch.optim.Optimizer,
    start: Progress,
    say: Say,
) -> tuple[Progress, list[str]]:
    """Restore the checkpoint that `resume` ("auto", "never" or a path) selects, if any. A collective.

    start: the Progress before the first step.
    Returns the Progress from which the run goes on, and the names of the checkpoints that led there.
    """
    folder = recipe.run.dir / _CHECKPOINTS
    chosen = choose_checkpoint(_fetched(resume, recipe, world, say), folder, world, say)
    with world.together():
        if chosen is not None:
            if recipe.data.is_split and chosen.state.dataset != start.dataset:
                check_same_splits(chosen, recipe, world)
            _check_same_run(chosen, start, recipe.run.steps)
            _check_same_start(chosen, recipe.run.start)
        elif resume == "never" and world.is_first:
            remove_all(folder)
    if chosen is None:
        return _begun(recipe, world, model, start, say), []
    store_frozen(model, (start.beside or {}).keys() - (chosen.state.beside or {}).keys())
    progress = load(chosen.path, model, optimizer, world.control, world.together)
    is_done = progress.step == recipe.run.steps
    say(f"Resuming after step {progress.step} from {chosen.path}{', which is the last step' if is_done else ''}.")
    return progress, chosen.line


def _fetched(resume: str, recipe: Recipe, world: World, say: Say) -> str:
    """What to resume from once it is here: a checkpoint that is named by URL, or the newest one of `checkpoint.url`.

    A collective.
    """
    folder, found = recipe.run.dir / _CHECKPOINTS, resume
    with world.together():
        if world.is_first:
            if is_stored(resume):
                remote, name = checkpoint_at(resume)
                say(f"Fetching {resume} to {folder}.")
                found = str(remote.fetch(name, folder))
            elif resume == "auto" and recipe.checkpoint.url is not None:
                remote = RemoteCheckpoints(recipe.checkpoint.url)
                if name := remote.newer_than(folder):
                    say(f"Fetching {remote.url}/{name} to {folder}.")
                    remote.fetch(name, folder)
    return str(world.gather(found)[0])


def has_ended(recipe: Recipe) -> bool:
    """Whether the checkpoint of the last step is there. Its bytes are verified when something begins with it."""
    return is_checkpoint(recipe.run.dir / _CHECKPOINTS / name_of(recipe.run.steps))


def _begun(recipe: Recipe, world: World, model: MLLM, start: Progress, say: Say) -> Progress:
    """The Progress of a run that begins, with the weights of `run.start` if there is one. A collective."""
    path = _start_here(recipe, world, say)
    if path is None:
        return start
    digest = verified_start(path, world)
    with world.together():
        then = read_state(path)
        check_beside(path, then, start)
    store_frozen(model, (start.beside or {}).keys() - (then.beside or {}).keys())
    load_weights(path, model, world.control, world.together, may_lack_adapters=True)
    say(f"Beginning with the weights of {recipe.run.start}.")
    beside = {name: weights for name, weights in (start.beside or {}).items() if name in (then.beside or {})}
    return replace(start, start=digest, beside=beside or None)


def _start_here(recipe: Recipe, world: World, say: Say) -> Path | None:
    """The checkpoint of `run.start`, once it is here: one that is named by URL is copied. A collective."""
    named = recipe.run.start
    if named is None or not is_stored(named):
        return None if named is None else Path(named)
    folder = recipe.run.dir / _START
    with world.together():
        remote, name = checkpoint_at(named)
        if world.is_first:
            say(f"Fetching {named} to {folder}.")
            remote.fetch(name, folder)
    return folder / name


def _check_same_start(chosen: Start, now: str | None) -> None:
    """Raise UserError if the run of a checkpoint began with other weights than those of `run.start` now."""
    begun, digest = chosen.state.start, ""
    if now is not None and is_stored(now):
        digest = digest_at(now) or ""
    elif now is not None and is_checkpoint(Path(now)):
        digest = digest_of(Path(now))
    if now is not None and begun and not digest:
        return  # Who goes on may have removed the checkpoint that the run began with.
    if begun == digest and (now is None or digest):
        return
    whose = "the weights of another checkpoint" if begun else "weights of its own"
    wanted = ", and there is no run.start now" if now is None else f", not with those of run.start = {now}"
    raise UserError(
        f"The run of the checkpoint {chosen.path} began with {whose}{wanted}: set run.start back, or start anew with "
        "--resume never."
    )


def _check_same_run(chosen: Start, start: Progress, num_steps: int) -> None:
    """Raise UserError if a checkpoint has another order, groups or dataset, or is beyond the last step."""
    if chosen.state.seed != start.seed:
        raise UserError(
            f"The checkpoint {chosen.path} was written with data.seed = {chosen.state.seed}, not {start.seed} as now, "
            "which orders the examples anew: set it back, or start anew with --resume never."
        )
    if chosen.state.shuffle not in (None, start.shuffle):
        then, now = (str(shuffle).lower() for shuffle in (chosen.state.shuffle, start.shuffle))
        raise UserError(
            f"The checkpoint {chosen.path} was written with data.shuffle = {then}, not {now} as now, which orders the "
            "examples anew: set it back, or start anew with --resume never."
        )
    if chosen.state.optimizer not in ("", start.optimizer):
        raise UserError(
            f'The checkpoint {chosen.path} has the state of optimizer.name = "{chosen.state.optimizer}", not of '
            f'"{start.optimizer}" as now: set it back, or begin with its weights alone by run.start.'
        )
    if chosen.state.mixture != start.mixture:
        then, now = (list(mixture) or "no mixture" for mixture in (chosen.state.mixture, start.mixture))
        raise UserError(
            f"The checkpoint {chosen.path} was written with a data.mixture in the proportion {then}, not {now} "
            "as now, which orders the examples anew: set it back, or start anew with --resume never."
        )
    if chosen.state.dataset != start.dataset:
        raise UserError(
            f"The checkpoint {chosen.path} was written on other training examples than those of data.train now, or of "
            "[workload], so its position among them means nothing: restore them, or start anew with --resume never."
        )
    check_beside(chosen.path, chosen.state, start, ", or start anew with --resume never")
    if chosen.state.group != start.group:
        raise UserError(
            f"The checkpoint {chosen.path} was written {_group_words(chosen.state.group)}, and this run is "
            f"{_group_words(start.group)}, which orders the examples anew: set it back, or start anew with --resume "
            "never."
        )
    if chosen.state.step > num_steps:
        raise UserError(
            f"The checkpoint {chosen.path} is of step {chosen.state.step}, and run.steps = {num_steps} ends before it: "
            "raise run.steps, go back to an earlier checkpoint with --resume PATH, or start anew with --resume never."
        )


def check_beside(checkpoint: Path, then: RunState, now: Progress, or_else: str = "") -> None:
    """Raise UserError if a checkpoint has adapters of a part whose frozen weights, or whose scale, are others now.

    or_else: what may be done about it but to restore them.
    """
    if other := _first_other(then.beside or {}, now.beside or {}):
        raise UserError(
            f"The checkpoint {checkpoint} has adapters of {other!r} alone, and was written beside other weights than "
            f"those of its path in [model] now, or of run.seed: restore them{or_else}."
        )
    scales, stated = then.scales or {}, now.scales or {}
    if other := _first_other(scales, stated):
        raise UserError(
            f"The checkpoint {checkpoint} has adapters of {other!r} that are multiplied by {scales[other]:g}, and "
            f"alpha, rank and rank_stabilized of model.lora say {stated[other]:g} now: restore them{or_else}."
        )


def _first_other(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The first part of both whose value is another now; "" if there is none."""
    return next((name for name in then if name in now and then[name] != now[name]), "")


def _group_words(group: Mapping[str, int] | None) -> str:
    if group is None:
        return "without data.group"
    return "with data.group = { " + ", ".join(f"{name} = {cap}" for name, cap in group.items()) + " }"
