"""A Plan applied to a model in code, for a training loop of the user's own: `motet.apply`.

Every rank has built the whole model with the same weights. It keeps the part that its stages hold, and takes steps of a
batch that all ranks are given alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motet.core.cluster import Cluster
from motet.core.errors import JointUserError, UserError
from motet.core.module_degrees import ModuleDegrees
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, Workload
from motet.cost.catalogue import cluster
from motet.cost.memory import PRECISION_OF_DTYPE
from motet.cost.source import cost_model
from motet.dispatch import LoadedExample
from motet.dropout import drops_out
from motet.models.block import Block, is_called_otherwise
from motet.models.mllm import MLLM
from motet.models.spec import model_spec
from motet.planner.job import Job
from motet.planning.elementwise import mixes
from motet.planning.own_calls import HOOK_ON_WEIGHT, has_hooks
from motet.planning.parallel_mllm import ParallelMLLM, lengths_of_batch
from motet.planning.plan_first import fastest_plan
from motet.planning.sources import plan_at
from motet.planning.trainable import cut_obstacle, untrained
from motet.train.device import device_name
from motet.train.optimizers import WHOLE_MATRICES
from motet.train.planned_job import ChosenPlan
from motet.train.world import World, borrowed_world

StatedDegrees = Mapping[str, ModuleDegrees | Mapping[str, int]]
"""Module -> its degrees of parallelism, e.g. {"image": {"pp": 1}, "backbone": {"pp": 2}}."""
_DEGREES = TypeAdapter(dict[str, ModuleDegrees], config=ConfigDict(extra="forbid"))


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
        _check_model(mllm)
        for encoder in mllm.encoders.values():
            encoder.keep_changed_whole()
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UserError(f"motet.apply: max_grad_norm is {max_grad_norm}; it must be above 0, or None.")
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
    chosen = world.gather(plan.closed_up if world.is_first else None)[0]
    with world.together():
        _check(chosen, mllm, spec, dtype, world)
    return ParallelMLLM(mllm, chosen, _optimizer_of(optimizer), max_grad_norm, world)


def _check_model(mllm: nn.Module) -> None:
    """Raise UserError for what `compose` has not made, or what was changed since in a way that a part cannot keep."""
    if not isinstance(mllm, MLLM):
        raise UserError(
            f"motet.apply: the model is {type(mllm).__name__}; give what motet.compose makes, neither wrapped nor "
            "compiled as a whole."
        )
    weights, modules = dict(mllm.named_parameters()), dict(mllm.named_modules())
    if mllm.backbone is None or any(isinstance(weight, DTensor) for weight in weights.values()):
        raise UserError(
            "motet.apply: the model is a part already, or its weights are shared by ranks (DTensor); build it anew."
        )
    owner: dict[int, str] = {}
    for name, part in {**mllm.encoders, **mllm.generators, BACKBONE: mllm.backbone}.items():
        for weight in part.parameters():
            if (other := owner.setdefault(id(weight), name)) != name:
                raise UserError(
                    f"motet.apply: {other!r} and {name!r} have weights in common, which would be on different ranks "
                    "under a plan: give each its own, as by copy.deepcopy."
                )
    if hooked := next((name for name, weight in weights.items() if has_hooks(weight)), ""):
        raise UserError(f"motet.apply: {hooked} {HOOK_ON_WEIGHT}")
    if hooked := next((name for name in _around_blocks(mllm, modules) if is_called_otherwise(modules[name])), None):
        raise UserError(
            f"motet.apply: {hooked} has a hook on its forward or backward pass, or a forward of its own, which would "
            "not run, or not on the whole of it, as stages call blocks, and compute what is around them by themselves: "
            "set it on a block, or on a module in one."
        )
    made = (f"{name}.{key}" for name, each in modules.items() for key, value in vars(each).items() if _is_made(value))
    if path := next(made, ""):
        raise UserError(
            f"motet.apply: {path} is computed of other weights before each call (torch.nn.utils.prune, or its older "
            "weight_norm and spectral_norm), which parts of a model cannot keep: end it by prune.remove and the like, "
            "or take torch.nn.utils.parametrizations."
        )
    for name, each in modules.items():
        if switch := _depends_on_batch(each):
            raise UserError(
                f"motet.apply: {name} has {switch}, by which results depend on how a batch is divided: leave it out."
            )
    if foreign := next((name for name, each in modules.items() if type(each).__module__.startswith("peft.")), ""):
        raise UserError(
            f"motet.apply: {foreign} is an adapter of peft, whose weights have no place in a plan: merge it before "
            "motet.compose, or train it by [model.lora] of a recipe."
        )


def _around_blocks(mllm: MLLM, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The names of modules that are neither blocks, nor in one, nor projectors, which run whole.

    Of single ones those of which steps may read the weights alone: tables of positions, convolutions of patches.
    """
    blocks = [f"{name}." for name, each in modules.items() if isinstance(each, Block)]
    parts = {f"encoders.{name}.encoder.": each.encoder for name, each in mllm.encoders.items()}
    parts |= {f"generators.{name}.generator.": each.generator for name, each in mllm.generators.items()}
    read = tuple(prefix for prefix, part in parts.items() if type(part).__module__.startswith("motet."))
    text = mllm.backbone.text
    called = {id(each) for each in (text.table, text.norm, mllm.backbone.causal_lm.lm_head)}
    for name, each in modules.items():
        is_whole = f"{name}.".startswith(tuple(blocks)) or "projector" in name.split(".")
        is_read = name.startswith(("backbone.causal_lm.", *read)) and id(each) not in called
        if name and not is_whole and (is_read or next(each.children(), None) is not None):
            yield name


def _depends_on_batch(module: nn.Module) -> str:
    """The option of an embedding by which it computes otherwise on a part of a batch, or no sums of gradients; ""."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ""
    if module.max_norm is not None:
        return "max_norm"
    of_gradients = ("scale_grad_by_freq", "sparse") if module.weight.requires_grad else ()
    return next((switch for switch in of_gradients if getattr(module, switch)), "")


def _is_made(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf


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
    where = cluster(name, world.num_nodes, world.ranks_per_node)
    precision = _precision(dtype)
    workload = Workload("the batch", lengths_of_batch(batch, mllm.measured))
    cost = cost_model(where, precision, None)
    job = Job(spec, where, workload, len(batch), cost, precision, degrees=stated)

    def cannot(plan: Plan) -> str:
        return _obstacle(plan, mllm)

    return fastest_plan(job, cannot)


def _check(plan: Plan, mllm: MLLM, spec: Any, dtype: torch.dtype, world: World) -> None:
    """Raise UserError for a Plan of another model or of other ranks, and for one that cannot be applied."""

    def replan(_: Cluster) -> str:
        return "motet.apply with degrees of modules in place of the plan, or motet plan"

    _check_checkpointing(plan, mllm)
    chosen = ChosenPlan(plan, Path("The plan"), replan, "the model in hand")
    chosen.check_fits(spec, world)
    if plan.precision != _precision(dtype):
        raise UserError(f"motet.apply: the plan computes in {plan.precision}, and the model is in {_precision(dtype)}.")
    if what := _obstacle(plan, mllm):
        raise UserError(f"motet.apply: the plan has {what}, which training cannot run yet.")


def _check_checkpointing(plan: Plan, mllm: MLLM) -> None:
    """Raise UserError where transformers' gradient checkpointing would run layers again otherwise than a step has."""
    why = ""
    if drops_out(mllm) and _checkpoints(mllm):
        why = "layers that drop out would draw other masks"
    elif plan.unit_of(BACKBONE).tp > 1 and _checkpoints(mllm.backbone):
        why = "ranks that share products of layers (tp) would have other rows"
    if why:
        raise UserError(
            f"motet.apply: {why} where transformers' gradient checkpointing runs them again: leave "
            "gradient_checkpointing_enable out; a plan says itself what is recomputed."
        )


def _checkpoints(part: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in part.modules())


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


def _optimizer_of(make: Callable[[list[Any]], torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # All that a rank holds may be frozen, and torch makes no optimizer of nothing.
        nothing = nn.Parameter(torch.empty(0))
        optimizer = make(trainable or [nothing])
        _check_optimizer(optimizer, [*model.parameters(), nothing])
        for group in optimizer.param_groups:
            if len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
                _update_one_by_one(group)
        return optimizer

    return made


def _check_optimizer(optimizer: torch.optim.Optimizer, known: Sequence[nn.Parameter]) -> None:
    """Raise UserError for an optimizer of other weights than this rank's, or that cannot step under the plan.

    known: the weights of this rank.
    """
    kind, given = type(optimizer).__name__, [each for group in optimizer.param_groups for each in group["params"]]
    if not {id(each) for each in given} <= {id(each) for each in known}:
        raise UserError(
            "motet.apply: the optimizer has a weight that is none of this rank's: make it of the list that it is "
            "given, as lambda part: torch.optim.AdamW(part, 1e-4)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("motet.apply: LBFGS takes several losses in a step, and a step of a plan has one.")
    is_shared = any(isinstance(each, DTensor) for each in given)
    names = (base.__name__.lower() for base in type(optimizer).__mro__)
    if is_shared and (why := next((WHOLE_MATRICES[name] for name in names if name in WHOLE_MATRICES), "")):
        raise UserError(f"motet.apply: {kind} {why}, and under this plan ranks share weights (DTensor).")
    if is_shared and isinstance(optimizer, torch.optim.Rprop):
        raise UserError(
            f"motet.apply: {kind} updates elements that it chooses by masks, and under this plan ranks share weights "
            "(DTensor), of which torch can choose none."
        )
    mixed = "" if type(optimizer).__module__.startswith("torch.optim.") else mixes(optimizer)
    if mixed == "weights" or (mixed and is_shared):
        raise UserError(
            f"motet.apply: {kind} updates a weight by gradients of other {mixed}, and under this plan ranks have "
            f"{'some weights' if mixed == 'weights' else 'parts of weights (DTensor)'} each: take an optimizer that "
            "treats each element by itself, as AdamW does."
        )


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
        of_weights, of_buffers = (
            # As text, in which nan is equal to nan.
            {
                name: float(each.sum(dtype=torch.float64)).hex()
                for name, each in named
                if not (each.is_complex() or each.is_meta)
            }
            for named in (mllm.named_parameters(), mllm.named_buffers())
        )
    for rank, (weights, buffers) in enumerate(world.gather((of_weights, of_buffers))):
        for what, others, own in (("weights", weights, of_weights), ("buffers", buffers, of_buffers)):
            if others != own:
                name = next((name for name in own if others.get(name) != own[name]), "its modules")
                raise JointUserError(
                    f"motet.apply: rank {rank} has other {what} than rank {world.rank}, first {name}: seed torch alike "
                    "on all ranks before the model is built, or load the same weights."
                )
