"""Builds a job from its recipe: model, data, mesh and optimizer, restored from a checkpoint if there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from motet.core.errors import JointUserError, UserError
from motet.core.spec import ModelSpec
from motet.data.dataset import Dataset, Modality
from motet.data.decode import Decoder
from motet.data.order import GlobalOrder, MixedOrder
from motet.data.splits import OwnSplits, SplitOrder
from motet.data.text import ChatTokenizer
from motet.dispatch import Carrier, ItemExchange, Orchestrator
from motet.models.build import build_mllm
from motet.models.materialise import materialise
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.runtime.clock import ActionClock
from motet.runtime.fsdp import shard
from motet.runtime.mesh import Mesh, build_mesh
from motet.runtime.step import TrainStep
from motet.train.balancing import (
    MeasuredPhases,
    build_orchestrator,
    check_same_backend,
    check_same_profile,
    compute_dtype,
    read_measured,
)
from motet.train.checkpoint.choice import Say, Start, choose_checkpoint, remove_all
from motet.train.checkpoint.contents import Progress
from motet.train.checkpoint.restoring import load
from motet.train.checkpoint.saving import Checkpointer
from motet.train.evaluate import Evaluator
from motet.train.input.loading import ExchangeLoading, IndexLoading, Loading
from motet.train.input.own_splits import check_same_splits, joined_splits, order_of, own_splits, say_left_out
from motet.train.input.rows import check_rows
from motet.train.optimizer import build_optimizer
from motet.train.recipe.recipe import Recipe
from motet.train.recompute import Recomputation, RecomputeRanks, auto_recompute, memory_bytes
from motet.train.world import World

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_CHECKPOINTS = "checkpoints"
_INDEX_PROGRESS_EVERY_S = 5.0


@dataclass
class TrainingJob:
    """Everything that a run consists of. Only `progress` says how far the run is."""

    recipe: Recipe
    world: World
    mesh: Mesh
    model: MLLM
    optimizer: torch.optim.Optimizer
    step: TrainStep
    order: GlobalOrder | MixedOrder | SplitOrder
    dataset: Dataset | OwnSplits
    loading: Loading
    recomputation: Recomputation
    evaluator: Evaluator | None
    checkpointer: Checkpointer
    progress: Progress


def build_job(recipe: Recipe, world: World, resume: str, say: Say, cleanup: ExitStack) -> TrainingJob:
    """Build the job of a recipe. A collective, which fails on all ranks if it fails on one.

    resume: "auto", "never" or a path. say: prints a sentence. cleanup: closes what is open when the run ends.
    """
    check_same_backend(world)
    rank_bytes = _memory_bytes(recipe, world)
    with world.together():
        _check_transport(recipe, world)
        dtype = _DTYPES[recipe.run.dtype]
        tokenizer = ChatTokenizer.from_directory(recipe.data.tokenizer)
        model = build_mllm(recipe.model, tokenizer.vocabulary_size, dtype, recipe.run.seed, deferred=True)
        check_rows(recipe, model)
        measured, orchestrator = _balancing(recipe, model, world)
        splits = own_splits(recipe, world)
        opened = {
            number: open_dataset(recipe, manifests, tokenizer, model, say) for number, manifests in splits.items()
        }
        recomputation = _recomputation(recipe, world, rank_bytes, model_spec(model), opened[min(opened)], say)
        if recomputation.auto is not None:
            # Now it is known what is recomputed, and so what weighs how much.
            measured, orchestrator = _balancing(recomputation.recipe, model, world)
        heldout = open_dataset(recipe, recipe.data.heldout, tokenizer, model, say) if recipe.data.heldout else None
        decoder = cleanup.enter_context(Decoder(opened[min(opened)].transforms, recipe.data.num_workers))
    check_same_profile(world, measured)
    dataset = joined_splits(opened, world, say) if recipe.data.is_split else opened[0]
    _check_same_examples(world, dataset, heldout)
    with world.together():
        _check_bad_at_indexing(recipe, dataset)
        order = order_of(recipe, dataset)  # Refused before anything is sharded.
    with world.together():
        mesh = build_mesh(world.device, shard_size=recipe.fsdp.shard_size, ranks_per_node=world.ranks_per_node)
        shard(model, mesh, recipe.fsdp)
        materialise(model, recipe.model, recipe.run.seed, world.device)
        optimizer = build_optimizer(model, recipe.optimizer)
    world.barrier()  # The clocks of all ranks start at the same moment.
    step = TrainStep(
        model,
        mesh,
        optimizer,
        max_grad_norm=recipe.optimizer.clip_norm,
        clock=ActionClock(world.rank, world.device),
    )
    evaluator = None
    if heldout is not None:
        exchange = ItemExchange(world.control, orchestrator, model.encoders, ranks_per_node=world.ranks_per_node)
        evaluator = Evaluator(heldout, tokenizer, decoder, exchange, mesh, world, recipe.evaluate, say)
    start = Progress(0, 0, 0, recipe.data.seed, dataset.fingerprint, mixture=recipe.data.weights)
    progress, line = _resume(recipe, world, resume, model, optimizer, start, say)
    return TrainingJob(
        recipe,
        world,
        mesh,
        model,
        optimizer,
        step,
        order,
        dataset,
        _loading(recipe, world, mesh, orchestrator, dataset, decoder, model),
        recomputation,
        evaluator,
        Checkpointer(recipe.run.dir / _CHECKPOINTS, recipe.checkpoint, world.saving, line, world.launch, say),
        progress,
    )


def _balancing(recipe: Recipe, model: MLLM, world: World) -> tuple[MeasuredPhases | None, Orchestrator]:
    """The profile that a recipe balances by, if it does, and its Orchestrator."""
    measured = read_measured(recipe, model_spec(model))
    orchestrator = build_orchestrator(
        recipe.balance,
        model,
        world.num_ranks,
        world.device,
        compute_dtype(recipe),
        recompute=recipe.fsdp.recomputed(model_spec(model).num_blocks),
        measured=measured,
        ranks_per_node=world.ranks_per_node,
    )
    return measured, orchestrator


def _memory_bytes(recipe: Recipe, world: World) -> int:
    """The memory of the rank that has least, where recomputation follows from it; else 0. A collective."""
    if recipe.fsdp.recompute != "auto":
        return 0
    with world.together():
        own_bytes = memory_bytes(recipe, world.device)
    return min(world.gather(own_bytes))


def _recomputation(
    recipe: Recipe, world: World, rank_bytes: int, spec: ModelSpec, dataset: Dataset, say: Say
) -> Recomputation:
    """What the run recomputes, by the numbers of the recipe or by "auto"."""
    if recipe.fsdp.recompute != "auto":
        return Recomputation(recipe, spec)
    ranks = RecomputeRanks(world.num_ranks, world.ranks_per_node, world.device.type, rank_bytes)
    chosen = auto_recompute(recipe, spec, ranks, order_of(recipe, dataset), lambda ids: dataset.batch_lengths(ids, 1))
    say(str(chosen))
    return Recomputation(chosen.resolved, spec, chosen)


def open_dataset(recipe: Recipe, manifests: Sequence[str], tokenizer: ChatTokenizer, model: MLLM, say: Say) -> Dataset:
    """The examples of the manifests, in the form that the model takes. The model's weights are not read."""
    modalities = {
        name: Modality(recipe.transform(name), module.num_tokens, module.lengths, module.segments)
        for name, module in model.encoders.items()
    }
    dataset = Dataset.open(
        manifests,
        tokenizer,
        modalities,
        combine=recipe.model.combine,
        max_sequence_length=recipe.data.max_sequence_length,
        index_folder=recipe.data.index_folder,
        num_workers=recipe.data.num_workers,
        progress=_index_progress(manifests, say),
    )
    say_left_out(manifests, dataset.left_out, dataset.num_in_manifests, say)
    return dataset


def _index_progress(manifests: Sequence[str], say: Say) -> Callable[[int, float], None]:
    """A function that prints the progress of building an index every few seconds."""
    last_s = time.monotonic()

    def show(num_examples: int, share: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _INDEX_PROGRESS_EVERY_S:
            last_s = time.monotonic()
            say(f"Indexing {', '.join(manifests)}: {num_examples:,} examples, {share:.0%}")

    return show


def _check_same_examples(world: World, dataset: Dataset | OwnSplits, heldout: Dataset | None) -> None:
    """Raise JointUserError if ranks see different examples, and are to see the same."""
    shared = {key: part for key, part in (("train", dataset), ("heldout", heldout)) if isinstance(part, Dataset)}
    by_rank = world.gather({key: (part.num_examples, part.fingerprint) for key, part in shared.items()})
    for rank, datasets in enumerate(by_rank):
        for key, other in datasets.items():
            if other != (first := by_rank[0][key]):
                raise JointUserError(
                    f"data.{key} is not the same everywhere: rank 0 finds {first[0]:,} examples that can be used, rank "
                    f"{rank} finds {other[0]:,}, or others; give all machines the same files."
                )


def _check_bad_at_indexing(recipe: Recipe, dataset: Dataset | OwnSplits) -> None:
    """Raise UserError if more examples were left out of the index as bad than data.max_bad_fraction allows."""
    num_bad, allowed = dataset.left_out.num_bad, recipe.data.max_bad_fraction
    if num_bad > allowed * dataset.num_in_manifests:
        raise UserError(
            f"{num_bad} of {dataset.num_in_manifests} training examples have files that cannot be used, more than "
            f"data.max_bad_fraction = {allowed:g} allows; the first: {dataset.left_out.first()}."
        )


def _loading(
    recipe: Recipe,
    world: World,
    mesh: Mesh,
    orchestrator: Orchestrator,
    dataset: Dataset | OwnSplits,
    decoder: Decoder,
    model: MLLM,
) -> Loading:
    """The way in which the recipe's microbatches are loaded."""
    if recipe.exchanges_items:
        exchange = ItemExchange(
            mesh.host_group,
            orchestrator,
            model.encoders,
            ranks_per_node=world.ranks_per_node,
            carrier=_carrier(recipe, world, mesh),
        )
        return ExchangeLoading(dataset, decoder, exchange, world.ranks_per_node)
    assert isinstance(dataset, Dataset), "a recipe whose examples are split exchanges items"
    return IndexLoading(dataset, decoder, orchestrator, world.rank, world.ranks_per_node)


def _carrier(recipe: Recipe, world: World, mesh: Mesh) -> Carrier:
    """What moves the bytes of inputs between ranks. A collective."""
    if recipe.balance.transport == "host":
        return Carrier(mesh.host_group)
    # A new group has a communicator of its own. That of the step belongs to the training thread.
    return Carrier(dist.new_group(backend="nccl"), world.device)


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
    chosen = choose_checkpoint(resume, folder, world, say)
    with world.together():
        if chosen is None:
            if resume == "never" and world.is_first:
                remove_all(folder)
            return start, []
        if recipe.data.is_split and chosen.state.dataset != start.dataset:
            check_same_splits(chosen, recipe, world)
        _check_same_run(chosen, start, recipe.run.steps)
    progress = load(chosen.path, model, optimizer, world.control, world.together)
    is_done = progress.step == recipe.run.steps
    say(f"Resuming after step {progress.step} from {chosen.path}{', which is the last step' if is_done else ''}.")
    return progress, chosen.line


def _check_same_run(chosen: Start, start: Progress, num_steps: int) -> None:
    """Raise UserError if a checkpoint has another order of examples or another dataset, or is beyond the last step."""
    if chosen.state.seed != start.seed:
        raise UserError(
            f"The checkpoint {chosen.path} was written with data.seed = {chosen.state.seed}, not {start.seed} as now, "
            "which orders the examples anew: set it back, or start anew with --resume never."
        )
    if chosen.state.mixture != start.mixture:
        then, now = (list(mixture) or "no mixture" for mixture in (chosen.state.mixture, start.mixture))
        raise UserError(
            f"The checkpoint {chosen.path} was written with a data.mixture in the proportion {then}, not {now} "
            "as now, which orders the examples anew: set it back, or start anew with --resume never."
        )
    if chosen.state.dataset != start.dataset:
        raise UserError(
            f"The checkpoint {chosen.path} was written on other training examples than those of data.train now, so its "
            "position among them means nothing: restore them, or start anew with --resume never."
        )
    if chosen.state.step > num_steps:
        raise UserError(
            f"The checkpoint {chosen.path} is of step {chosen.state.step}, and run.steps = {num_steps} ends before it: "
            "raise run.steps, go back to an earlier checkpoint with --resume PATH, or start anew with --resume never."
        )
