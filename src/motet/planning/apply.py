"""A Plan applied to a model in code, for a training loop of the user's own: `motet.apply`.

Every rank has built the whole model with the same weights. It keeps the part that its stages hold, and takes steps of a
batch that all ranks are given alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn
from torch.distributed.tensor import DTensor

from motet.assign.whole_step import DecidedMicrobatch
from motet.core.cluster import Cluster
from motet.core.errors import JointUserError, UserError
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Plan
from motet.core.words import counted_words
from motet.core.workload import BatchLengths, Workload
from motet.cost.catalogue import cluster
from motet.cost.memory import PRECISION_OF_DTYPE
from motet.cost.source import cost_model
from motet.dispatch import LoadedExample, RankBatch
from motet.dispatch.loaded import LoadedTables, Measure, tables_of
from motet.dropout import drops_out, example_keys
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.planner.job import Job
from motet.planning.plan_first import fastest_plan
from motet.planning.sources import plan_at
from motet.planning.trainable import cut_obstacle, untrained
from motet.runtime.mesh import build_mesh
from motet.runtime.place import Place
from motet.runtime.step import StepResult
from motet.train.device import device_name
from motet.train.input.planned import StageNeeds, StepDecider, stages_of_examples
from motet.train.planned_job import ChosenPlan, PartConfig, build_part
from motet.train.world import World, borrowed_world

StatedDegrees = Mapping[str, ModuleDegrees | Mapping[str, int]]
"""Module -> its degrees of parallelism, e.g. {"image": {"pp": 1}, "backbone": {"pp": 2}}."""
_DEGREES = TypeAdapter(dict[str, ModuleDegrees], config=ConfigDict(extra="forbid"))


class ParallelMLLM:
    """The part of a model that this rank holds under a Plan, and the steps that it takes; made by `apply`.

    plan:      the Plan.
    model:     this rank's part; every parameter has its name in the whole model.
    optimizer: of this rank's trainable parameters. Its learning rate may be changed between steps, on all ranks alike.
    """

    def __init__(self, model: MLLM, plan: Plan, make_optimizer: Any, max_grad_norm: float | None, world: World) -> None:
        self.plan, self.model, self._world = plan, model, world
        self._measured, self._num_steps = model.measured, 0
        # Noise of generators is drawn by item, as dropout is.
        self._draws_by_item = drops_out(model) or bool(model.generators)
        self._seed = world.gather(torch.initial_seed())[0]
        with world.together():
            place = Place.of(plan, world.rank)
        part = PartConfig(lambda held: held.to(world.device), make_optimizer, max_grad_norm)
        self._needs = StageNeeds.of(place, needs_places=model.backbone.needs_places)
        self._decide = StepDecider(place)
        mesh = build_mesh(world.device, ranks_per_node=world.ranks_per_node)
        self._step, self.optimizer = build_part(model, plan.model, place, part, mesh, world)
        self._learns = _learning(model)

    def step(self, batch: Sequence[LoadedExample]) -> StepResult:
        """Forward, backward and optimizer of one step in the Plan's schedule. A collective.

        batch: all examples of the step, `plan.batch_size` of them, the same on all ranks in the same order. A rank
               computes on what its stages need of them.
        The model is put in train mode, as `motet train` and HF Trainer do; parts in which nothing learns stay in eval
        mode. Dropout and noise are drawn by the example's place in the batch, the number of the step, and torch's seed
        on rank 0. The result has the loss of the whole step, the mean over its targets and, of each generator, `weight`
        times the mean over the rows of its items (`losses` has them apart), and the gradient norm before clipping.
        Raises JointUserError on all ranks for a batch that is not as it must be on any of them.
        """
        failure, digest, batches = "", b"", []
        try:
            self._check_learns()
            lengths = _lengths_of(batch, self._measured)
            digest = _digest(lengths, batch)
            batches = self._batches(batch, lengths)
        except (UserError, ValueError) as error:
            failure = f"step: {error}"
        of_ranks = self._world.gather((failure, digest))
        if failures := [each for each, _ in of_ranks if each]:
            raise JointUserError(failures[0])
        if other := next((rank for rank, (_, each) in enumerate(of_ranks) if each != of_ranks[0][1]), 0):
            raise JointUserError(
                f"step: rank {other} was given other examples than rank 0; each rank takes the whole step's batch."
            )
        self.model.train()  # `from_pretrained` gives models in eval mode, and a loop may evaluate between steps.
        kind = self._world.device.type
        # The optimizer changes weights inside of the loop's autocast, whose cache would still have the former ones.
        autocast = torch.autocast(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
        )
        with autocast:
            result = self._step.run(batches, self._num_steps)
        self._num_steps += 1
        return result

    def _check_learns(self) -> None:
        """Raise UserError if weights were frozen, or let learn, since passes and optimizer were made."""
        if name := next((name for name, learns in _learning(self.model).items() if learns != self._learns[name]), ""):
            raise UserError(
                f"{name} {'no longer learns' if self._learns[name] else 'learns now'}, and the plan's passes are made "
                "for what learned when motet.apply was called: freeze before it, and apply a whole model anew to change"
            )

    def _batches(self, batch: Sequence[LoadedExample], lengths: BatchLengths) -> list[RankBatch]:
        if len(batch) != self.plan.batch_size:
            raise UserError(
                f"a step of the plan takes {counted_words(self.plan.batch_size, 'example')}, not {len(batch)}"
            )
        return [self._microbatch(number, part, batch) for number, part in enumerate(self._decide(lengths).microbatches)]

    def _microbatch(self, number: int, part: DecidedMicrobatch, batch: Sequence[LoadedExample]) -> RankBatch:
        made = stages_of_examples(number, part, batch, self._needs).to(self._world.device)
        if not self._draws_by_item:
            return made
        keys = example_keys(self._seed, self._num_steps, part.examples)
        return made.with_draws(keys, self._needs.replicas)


def apply(
    mllm: MLLM,
    plan: Plan | Path | str | StatedDegrees,
    optimizer: Callable[[list[Any]], torch.optim.Optimizer],
    *,
    batch: Sequence[LoadedExample] | None = None,
    max_grad_norm: float | None = None,
) -> ParallelMLLM:
    """Reduce a model, in place, to the part that this rank holds under a Plan, ready to take steps. A collective.

    mllm:          the whole model, of `compose`, with the same weights on every rank.
    plan:          a Plan or its file; or degrees of modules: then the fastest Plan with these for the ranks at hand.
    optimizer:     makes the optimizer of this rank's trainable parameters, e.g. `functools.partial(torch.optim.AdamW,
                   lr=1e-4)`. It must treat each element of a parameter by itself.
    batch:         with degrees: a batch as `step` will take, for whose number of examples and lengths is planned.
    max_grad_norm: clips the gradient of the whole model; None does not.
    Needs `torch.distributed.init_process_group`. Raises JointUserError on all ranks for a Plan of another model or of
    other ranks, for one that training cannot run, and for weights that differ between ranks.
    """
    if not dist.is_initialized():
        raise UserError("motet.apply needs torch.distributed.init_process_group to have been called, on every rank.")
    world = borrowed_world()
    with world.together():
        _check_device(mllm, world.device)
        dtype = _dtype_of(mllm)
        spec = model_spec(mllm)
    _check_same_weights(mllm, world)
    chosen = None
    with world.together():
        if isinstance(plan, str | Path):
            plan = plan_at(Path(plan))
        if not isinstance(plan, Plan) and world.is_first:
            plan = _planned(mllm, spec, plan, batch, dtype, world)
    chosen = world.gather(plan if world.is_first else None)[0]
    with world.together():
        _check(chosen, mllm, spec, dtype, world)
    return ParallelMLLM(mllm, chosen, _optimizer_of(optimizer), max_grad_norm, world)


def _check_device(mllm: MLLM, device: torch.device) -> None:
    """Raise UserError for weights on another kind of device than that of the ranks' messages, but for the CPU."""
    for name, weight in mllm.named_parameters():
        if weight.device.type not in ("cpu", device.type):
            raise UserError(
                f"motet.apply: {name} is on {weight.device.type!r}, and the process group sends from {device.type!r}: "
                'make the group by init_process_group("nccl") to train on GPUs, or load the model on the CPU.'
            )


def _dtype_of(mllm: MLLM) -> torch.dtype:
    """The dtype of all weights. Raises UserError for several: what ranks send each other is of one."""
    first: dict[torch.dtype, str] = {}
    for name, weight in mllm.named_parameters():
        if weight.is_floating_point():
            first.setdefault(weight.dtype, f"{name} in {str(weight.dtype).removeprefix('torch.')}")
    if len(first) > 1:
        raise UserError(
            f"motet.apply: weights are of several types ({', '.join(first.values())}); make all of one, as by "
            "mllm.to(torch.bfloat16)."
        )
    return next(iter(first))


def _planned(
    mllm: MLLM,
    spec: Any,
    degrees: StatedDegrees,
    batch: Sequence[LoadedExample] | None,
    dtype: torch.dtype,
    world: World,
) -> Plan:
    """The fastest Plan with these degrees for the ranks at hand."""
    if batch is None:
        raise UserError(
            "motet.apply: degrees alone say no batch size and no lengths: give batch=, a batch as `step` takes."
        )
    try:
        stated = _DEGREES.validate_python(degrees)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(
            "motet.apply: degrees of modules are as {'image': {'pp': 2}}, of tp, cp, pp, dp and ep, whole numbers from "
            f"1; {where or type(degrees).__name__} is not."
        ) from None
    if not (name := device_name(world.device)):
        raise UserError("motet.apply: no figures of this GPU are known; give a plan of `motet plan`, not degrees.")
    where = cluster(name, world.num_ranks // world.ranks_per_node, world.ranks_per_node)
    precision = _precision(dtype)
    workload = Workload("the batch", _lengths_of(batch, mllm.measured))
    cost = cost_model(where, precision, None)
    job = Job(spec, where, workload, len(batch), cost, precision, degrees=stated)

    def cannot(plan: Plan) -> str:
        return _obstacle(plan, mllm)

    return fastest_plan(job, cannot)


def _check(plan: Plan, mllm: MLLM, spec: Any, dtype: torch.dtype, world: World) -> None:
    """Raise UserError for a Plan of another model or of other ranks, and for one that cannot be applied."""

    def replan(_: Cluster) -> str:
        return "motet.apply with degrees of modules in place of the plan, or motet plan"

    chosen = ChosenPlan(plan, Path("The plan"), replan, "the model in hand")
    chosen.check_fits(spec, world.num_ranks, world.ranks_per_node)
    if plan.precision != _precision(dtype):
        raise UserError(f"motet.apply: the plan computes in {plan.precision}, and the model is in {_precision(dtype)}.")
    if drops_out(mllm) and any(getattr(module, "gradient_checkpointing", False) for module in mllm.modules()):
        raise UserError(
            "motet.apply: layers that drop out would draw other masks where transformers' gradient checkpointing runs "
            "them again: leave gradient_checkpointing_enable out; a plan says itself what is recomputed."
        )
    if what := _obstacle(plan, mllm):
        raise UserError(f"motet.apply: the plan has {what}, which training cannot run yet.")


def _obstacle(plan: Plan, mllm: MLLM) -> str:
    """As `planning.trainable.obstacle`, for a model in hand, whose precision the Plan has."""
    if plan.schedule == "data_parallel":
        return "no stages (data parallelism alone; motet.dispatch.prefetched is for that)"
    return untrained(plan) or cut_obstacle(plan, mllm)


def _precision(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    known = [dtype for dtype in PRECISION_OF_DTYPE if dtype != "float16"]  # A loop of one's own has no loss scale.
    if name not in known:
        raise UserError(f"motet.apply: the model is in {name}; it must be in {' or '.join(known)}.")
    return PRECISION_OF_DTYPE[name]


def _learning(model: nn.Module) -> dict[str, bool]:
    """Name of each parameter -> whether it learns."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def _optimizer_of(make: Callable[[list[Any]], torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # All that a rank holds may be frozen, and torch makes no optimizer of nothing.
        optimizer = make(trainable or [nn.Parameter(torch.empty(0))])
        for group in optimizer.param_groups:
            if len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
                _update_one_by_one(group)
        return optimizer

    return made


def _update_one_by_one(group: dict[str, Any]) -> None:
    """Have torch update the parameters of a group, of which ranks share some, one by one, as GPUs do not by default.

    Raises UserError if the group asks for all at once, which torch cannot do.
    """
    if asked := next((name for name in ("fused", "foreach") if group.get(name)), ""):
        raise UserError(
            f"motet.apply: the optimizer has {asked} = True, and under this plan weights that ranks share (DTensor) "
            f"stand beside whole ones, which torch updates one by one alone: leave {asked} out."
        )
    if "foreach" in group:
        group["foreach"] = False


def _check_same_weights(mllm: MLLM, world: World) -> None:
    """Raise JointUserError if ranks have built different models. A collective."""
    with torch.no_grad():
        sums = {name: float(parameter.double().sum()) for name, parameter in mllm.named_parameters()}
    for rank, others in enumerate(world.gather(sums)):
        if others != sums:
            name = next((name for name in sums if others.get(name) != sums[name]), "its modules")
            raise JointUserError(
                f"motet.apply: rank {rank} has other weights than rank {world.rank}, first {name}: seed torch alike on "
                "all ranks before the model is built, or load the same weights."
            )


def _lengths_of(batch: Sequence[LoadedExample], measured: Mapping[str, Measure]) -> BatchLengths:
    """Lengths of a batch. measured: the model's encoders and generators. Raises UserError for an item of no module."""
    phases = tuple(measured)
    for number, example in enumerate(batch):
        if unknown := set(example.sequence.media) - set(phases):
            raise UserError(
                f"example {number} has an item of {min(unknown)!r}; the model's encoders and generators are "
                f"{', '.join(phases)}"
            )
    return LoadedTables.read([tables_of(batch, phases, measured)], phases).lengths


def _digest(lengths: BatchLengths, batch: Sequence[LoadedExample]) -> bytes:
    """Of texts and sizes of all examples: what tells batches apart without reading the media."""
    digest = hashlib.blake2b(lengths.sequence.tobytes(), digest_size=16)
    for example in batch:
        text = example.sequence
        digest.update(repr(text.media).encode())
        for column in (text.tokens, text.targets, text.media_positions, text.grids, text.pieces, text.turns):
            digest.update(b"" if column is None else np.asarray(column, np.int64).tobytes())
        for item in example.media:
            digest.update(np.asarray(item.size, np.int64).tobytes())
    return digest.digest()
