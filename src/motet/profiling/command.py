"""`motet profile`: measures a recipe's layers, messages and optimizer on the device at hand.

It trains nothing. Of the recipe's data it reads the tokenizer, lengths, and a few files that it times decoding of:
contents of what it computes are random. It prints how far predictions from the profile are from batches that were held
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from motet.core.errors import UserError
from motet.core.files import check_output
from motet.core.heap import keep_freed_memory
from motet.core.spec import ModelSpec
from motet.core.words import counted_words
from motet.cost.profile import PROFILE_FILE, DecodingTimes, MessageTimes, ModuleTimes, OptimizerTimes, Profile
from motet.models.build import ModelConfig, build_mllm
from motet.models.mllm import MLLM
from motet.models.spec import spec_of_config
from motet.profiling.decoding import measure_decoding
from motet.profiling.job_lengths import AskedLengths, asked_lengths
from motet.profiling.measure import MeasuredSubject, measure
from motet.profiling.ranks import measure_messages, measure_shared
from motet.profiling.stopwatch import Stopwatch
from motet.profiling.subjects import one_layer_deep, subjects
from motet.profiling.table import print_tables
from motet.runtime.clip import clip_factor, scale_gradients, square_sum
from motet.runtime.fsdp import shard, wrap
from motet.runtime.mesh import SHARD, build_mesh
from motet.train.input.datasets import open_dataset
from motet.train.input.service import open_decoder
from motet.train.optimizer import OptimizerConfig, build_optimizer
from motet.train.recipe.recipe import Recipe
from motet.train.world import World, join_world

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
_OPTIMIZER_REPEATS = 9
_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of each parameter that the optimizer is timed on."""
_MAX_PARAMETERS = 2**28
"""Any device that trains has room for the weights, gradients and optimizer state of so many parameters."""


def profile(recipe: Recipe, name: str, *, out: Path | None = None, seconds: float = 60.0) -> Profile:
    """Measure on this rank, together with all others; rank 0 writes the file and prints its tables.

    name: the recipe's name in the file. out: the file, by default in `recipe.run.dir`. seconds: time for the layers.
    Raises UserError for what is wrong with the recipe, and for a file that cannot be written.
    """
    with join_world(recipe.run.device) as world:
        with world.together():
            if out is not None and world.is_first:
                check_output(out)
            vocab_size = recipe.vocabulary().vocabulary_size
            model = _build(recipe, vocab_size, dtype_name(recipe), world.device)
            # Whole copies are cast once a step; what FSDP wraps, it casts in its hooks.
            stored = dtype_name(recipe) if recipe.fsdp.shard_size == 1 else recipe.run.dtype
            sharded = _build(recipe, vocab_size, stored, world.device)
            asked, unread = _asked(recipe, model, world.num_ranks)
            to_measure = subjects(recipe, model, sharded, world.device, asked)
            spec = spec_of_config(recipe.modules, vocab_size)
        mesh = build_mesh(world.device, shard_size=1)
        mesh = replace(mesh, shards=mesh.shards[SHARD])
        # Without recomputation: a Plan decides that.
        prepare = shard if recipe.fsdp.shard_size == 1 else wrap
        prepare(sharded, mesh, recipe.fsdp.model_copy(update={"recompute": False}))
        messages_watch, watch = Stopwatch(world.device), Stopwatch(world.device, waits=False, evicts=True)
        keep_freed_memory(world.device.type)  # As training does.
        with _progress(world) as show:
            measured = measure(to_measure, watch, world, seconds, show)
        messages = measure_messages(world, messages_watch) if world.num_ranks > 1 else []
        modules, left_out = _modules(measured, messages_watch, world, messages)
        measured_profile = Profile(
            recipe=name,
            device=_device_name(world.device),
            precision=dtype_name(recipe),
            torch=torch.__version__,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            num_ranks=world.num_ranks,
            modules=modules,
            messages=messages,
            optimizer=_optimizer_times(recipe, vocab_size, watch, world, mesh.shards),
            decoding=_decoding(recipe, model, world),
            left_out=[*unread, *left_out],
        )
        with world.together():
            if world.is_first:
                _finish(measured_profile, spec, recipe, out or recipe.run.dir / PROFILE_FILE)
        return measured_profile


def _asked(recipe: Recipe, model: MLLM, num_ranks: int) -> tuple[dict[str, AskedLengths], list[str]]:
    """What the job's own lengths ask for; none, and why, where its data cannot be read."""
    try:
        if recipe.data.is_split:
            raise UserError("data.train is another file for each rank.")
        return asked_lengths(recipe, model, num_ranks), []
    except UserError as error:
        told = str(error).rstrip(".")
        return {}, [f"the job's own lengths ({told}), so that all lengths were measured which the recipe allows"]


def _decoding(recipe: Recipe, model: MLLM, world: World) -> list[DecodingTimes]:
    """Seconds of decoding, on the first rank; none where the recipe has no files, or they cannot be read.

    By a worker of this machine or, if the recipe says so, by an actor of Ray. A collective.
    """
    if recipe.is_drawn or recipe.data.is_split:
        return []
    dataset = None
    with suppress(UserError):
        dataset = open_dataset(recipe, recipe.data.train, recipe.vocabulary(), model, lambda sentence: None)
    if None in world.gather(None if dataset is None else dataset.num_examples):
        return []
    assert dataset is not None
    with ExitStack() as cleanup:
        config = recipe.data.model_copy(update={"num_workers": 1})
        decoder = open_decoder(config, dataset.transforms, world, lambda sentence: None, cleanup)
        with world.together():
            return measure_decoding(dataset, decoder) if world.is_first else []


def dtype_name(recipe: Recipe) -> str:
    """The type that modules compute in."""
    return recipe.fsdp.param_dtype or recipe.run.dtype


def _build(recipe: Recipe, vocab_size: int, dtype: str, device: torch.device) -> MLLM:
    model = build_mllm(one_layer_deep(recipe.modules), vocab_size, _DTYPES[dtype], recipe.run.seed)
    return model.to(device).train()


def _modules(
    measured: Sequence[MeasuredSubject], watch: Stopwatch, world: World, messages: Sequence[MessageTimes]
) -> tuple[list[ModuleTimes], list[str]]:
    modules, left_out = [], []
    for each in measured:
        times = each.times(world)
        if world.num_ranks > 1:
            shared, reasons = measure_shared(each, watch, world, messages)
            left_out += reasons
            times = times.model_copy(update={"layers": (*times.layers, *shared)})
        modules.append(times)
    return modules, left_out


def _optimizer_times(
    recipe: Recipe, vocab_size: int, watch: Stopwatch, world: World, mesh: DeviceMesh
) -> OptimizerTimes | None:
    """Seconds of norm, clipping and update, as the step does them, for slices of all trainable parameters.

    The slices are smaller and smaller shares of each parameter, as FSDP makes them. So the cost of a parameter can be
    separated from the cost of its elements. In a model too large for a device, one layer of each module stands for
    all. None if nothing is trainable. mesh: of this rank alone.
    """
    shapes = _trainable_shapes(recipe.modules, vocab_size)
    if sum(map(math.prod, shapes)) > _MAX_PARAMETERS:
        shapes = _trainable_shapes(one_layer_deep(recipe.modules), vocab_size)
    numbers, seconds = [], []
    for share in _SHARES if shapes else ():
        slices = [(max(round(share * rows), 1), *rest) for rows, *rest in shapes]
        tensors = [torch.zeros(size, dtype=_DTYPES[recipe.run.dtype], device=world.device) for size in slices]
        numbers.append(sum(tensor.numel() for tensor in tensors))
        shared = recipe.fsdp.shard_size != 1
        stored = [DTensor.from_local(tensor, mesh, [Shard(0)]) if shared else tensor for tensor in tensors]
        parameters = [nn.Parameter(each) for each in stored]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        step = _optimizer_step(parameters, recipe.optimizer, world)
        samples = [watch(step, ())[0] for _ in range(_OPTIMIZER_REPEATS + 1)]
        # The first step makes the optimizer's state.
        seconds.append(float(np.median(world.gather(float(np.median(samples[1:]))))))
    return OptimizerTimes(num_parameters=tuple(numbers), seconds=tuple(seconds)) if shapes else None


def _trainable_shapes(config: ModelConfig, vocab_size: int) -> list[torch.Size]:
    with torch.device("meta"):
        return [one.shape for one in build_mllm(config, vocab_size).parameters() if one.requires_grad]


def _optimizer_step(parameters: Sequence[nn.Parameter], config: OptimizerConfig, world: World) -> Callable[[], None]:
    optimizer = build_optimizer(nn.ParameterList(parameters), config)

    def step() -> None:
        norm = square_sum(parameters, 1, world.device).sqrt()
        scale_gradients(parameters, clip_factor(norm, config.clip_norm))
        optimizer.step()

    return step


def _finish(profile: Profile, spec: ModelSpec, recipe: Recipe, path: Path) -> None:
    profile.write(path)
    print_tables(profile, spec, recomputed=recipe.fsdp.recomputed(spec.num_blocks))
    print(f"Profile: {path}", flush=True)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {counted_words(threads, 'thread')} a rank"


@contextmanager
def _progress(world: World) -> Iterator[Callable[[float], None]]:
    """A progress bar on the first rank. Yields a function of the share of the time that is spent."""
    if not world.is_first:
        yield lambda share: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bars:
        task = bars.add_task("Measuring layers", total=1.0)
        yield lambda share: bars.update(task, completed=share)
