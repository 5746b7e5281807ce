"""Shards a model over a mesh with PyTorch's FSDP2, block by block.

FSDP divides gradients by the number of ranks. `runtime/step.py` multiplies the loss by it instead of setting FSDP's
divisor to 1, which not every backend supports. A model of which every rank holds a whole copy is not wrapped in FSDP:
`runtime/replicas.py` sums its gradients, and `runtime/casting.py` casts its parameters.

Experts that ranks share are on fewer ranks each than all else, by which FSDP divides their gradients, while rows of all
ranks are in them: `runtime/step.py` divides them by the rest at the end of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

from motet.core.errors import UserError
from motet.core.limited import NumLayers
from motet.core.limits import MAX_RANKS, MAX_STEPS
from motet.core.words import counted_words
from motet.runtime.casting import set_compute_types
from motet.runtime.loss_scale import LossScale
from motet.runtime.mesh import Mesh, of_parts
from motet.runtime.sharded_state import ComputeTypes
from motet.runtime.shards import keep_cut, name_cut
from motet.runtime.stage import Model, is_trainable, modules_by_phase

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class FSDPConfig(BaseModel):
    """`[fsdp]` of a recipe: how parameters are sharded, and in which dtype modules compute.

    shard_size:   ranks that together hold one copy of the parameters; None: all ranks. Fewer is hybrid sharding, 1 is
                  like DDP, and gathers nothing.
    param_dtype:  dtype in which modules compute; None: that of the parameters. Parameters and optimizer state keep
                  their dtype.
    reduce_dtype: dtype in which gradients are summed over ranks; None: that in which modules compute, or that of the
                  parameters where FSDP2 adds microbatches up in it (once_a_step, hybrid sharding).
    loss_scale:   with param_dtype = "float16", what the loss is multiplied by in the first step, a power of two. It is
                  halved after a step whose gradients overflow, which changes nothing.
    loss_scale_steps: finite steps in a row after which the loss scale is doubled.
    reshard_after_forward: free gathered parameters after the forward pass, and gather them again for the backward pass.
    once_a_step:  gather parameters before their first use in a step, and sum gradients over ranks after their last
                  backward pass; both are whole in between (ZeRO 1). It needs reshard_after_forward = false.
    recompute:    keep only the inputs of blocks in the forward pass, and run the blocks again in the backward pass.
                  True: all blocks. A table: the number of blocks by module, as in `{ backbone = 12 }`; the first blocks
                  are recomputed. "auto": the least that fits the device's memory, in each microbatch anew, so that
                  small ones recompute nothing (`train/recompute.py`; OmniBal, section 4.3).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    shard_size: int | None = Field(default=None, ge=1, le=MAX_RANKS)
    param_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    reduce_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    loss_scale: float = Field(default=65536.0, ge=1, le=2.0**32)
    loss_scale_steps: int = Field(default=2000, gt=0, le=MAX_STEPS)
    reshard_after_forward: bool = True
    once_a_step: bool = False
    recompute: bool | Literal["auto"] | dict[str, NumLayers] = False

    @field_validator("recompute", mode="before")
    @classmethod
    def _recompute_understood(cls, given: Any) -> Any:
        """Refuse what is none of the three kinds in one sentence: pydantic would name the first kind alone."""
        is_table = isinstance(given, dict)
        if not is_table and not isinstance(given, bool) and given != "auto":
            raise ValueError(
                f'{given!r} is neither true, false, "auto" nor a table of numbers of blocks, as in {{ backbone = 12 }}'
            )
        for name, count in given.items() if is_table else ():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(
                    f"{name} = {count!r} is no number of blocks, which is a whole number from 1 on; leave out a module "
                    "of which none is recomputed"
                )
        return given

    @field_validator("loss_scale")
    @classmethod
    def _rounds_nothing(cls, given: float) -> float:
        if math.frexp(given)[0] != 0.5:
            raise ValueError(f"{given:g} is no power of two, which alone rounds no gradient; take 65536, or 1024")
        return given

    @model_validator(mode="after")
    def _scaled_if_float16(self) -> FSDPConfig:
        if self.param_dtype == "float16":
            return self
        if self.reduce_dtype == "float16":
            raise ValueError(
                'reduce_dtype = "float16" needs param_dtype = "float16": without a loss scale small gradients would be '
                "summed as 0"
            )
        for key in ("loss_scale", "loss_scale_steps"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f'{key} has no effect without param_dtype = "float16"; remove it')
        return self

    @model_validator(mode="after")
    def _kept_if_gathered_once(self) -> FSDPConfig:
        if self.once_a_step and self.reshard_after_forward:
            raise ValueError("once_a_step needs reshard_after_forward = false: what is gathered once a step must stay")
        return self

    @model_validator(mode="after")
    def _shares_out_what_it_keeps(self) -> FSDPConfig:
        if self.shard_size == 1 and not self.reshard_after_forward:
            raise ValueError(
                "reshard_after_forward = false has no effect with shard_size = 1, as each rank holds a whole copy and "
                "gathers nothing; remove it" + (", and once_a_step" if self.once_a_step else "")
            )
        return self

    @property
    def waits(self) -> bool:
        """Whether ranks wait for each other in each pass, layer by layer, as they gather parameters or sum gradients.

        Of whole copies gradients are summed once a step, as of parameters that are gathered once.
        """
        return self.shard_size != 1 and not self.once_a_step

    @property
    def types(self) -> ComputeTypes:
        """The types in which modules compute and gradients are summed; None: as `ComputeTypes` says."""
        return ComputeTypes(_DTYPES.get(self.param_dtype or ""), _DTYPES.get(self.reduce_dtype or ""))

    @property
    def scale(self) -> LossScale | None:
        """The loss scale that a run begins with; None where modules do not compute in float16."""
        return LossScale(self.loss_scale, self.loss_scale_steps) if self.param_dtype == "float16" else None

    def recomputed(self, num_blocks: Mapping[str, int]) -> dict[str, int]:
        """The number of blocks that each module recomputes in every microbatch, modules without any left out.

        num_blocks: those that each module has. With "auto" there are none: a microbatch says its own.
        Raises UserError for another module, and for more blocks than it has.
        """
        if not isinstance(self.recompute, dict):
            return dict(num_blocks) if self.recompute is True else {}
        for name, count in self.recompute.items():
            if name not in num_blocks:
                raise UserError(f"fsdp.recompute: there is no module {name!r}; the model has {', '.join(num_blocks)}.")
            if count > num_blocks[name]:
                raise UserError(
                    f"fsdp.recompute.{name} is {count}, but {name!r} has {counted_words(num_blocks[name], 'block')}."
                )
        return dict(self.recompute)


def shard(
    model: Model,
    mesh: Mesh,
    config: FSDPConfig,
    cuts: Mapping[str, int] = MappingProxyType({}),
    experts: Collection[str] = (),
) -> None:
    """Prepare every module of the model, in place, for the whole copy, or the share of one, that this rank holds.

    Parameters must be initialised alike on all ranks, and already frozen if they are to be frozen. Raises UserError if
    config.recompute does not fit the blocks that can be recomputed, and for a parameter that cannot be shared out;
    ValueError for a mesh of another `shard_size` than the config states.

    cuts:    name -> the dimension in which tensor-parallel ranks cut a parameter. The model's layers are already those
             of such a rank (`models/divided.py`).
    experts: names of the parameters of experts, if ranks share them. The model's layers already exchange rows.
    """
    modules = modules_by_phase(model)
    for phase, module in modules.items():
        if config.recompute in (True, "auto") and is_trainable(module) and not _recomputable(module):
            raise UserError(
                f"fsdp.recompute: module {phase!r} names no blocks that can be recomputed; set it to false, or say the "
                "blocks of other modules."
            )
    if config.shard_size is not None and config.shard_size != mesh.shard_size:
        raise ValueError(
            f"shard_size is {config.shard_size}, but the mesh is one of {mesh.shard_size}: build it by "
            f"build_mesh(device, shard_size={config.shard_size})"
        )
    counts = config.recomputed({phase: len(_recomputable(module)) for phase, module in modules.items()})
    for phase, module in modules.items():
        recompute_first(module, counts.get(phase, 0))
    if mesh.is_divided:
        # Whole copies, too: what FSDP2 stores, and what passes compute with, are two forms of a part of a parameter.
        assert isinstance(model, nn.Module), "parameters are cut by name"
        _check_dimensions(modules)
        both = (cuts, mesh.cuts), (dict.fromkeys(experts, 0), mesh.expert_cuts)
        divided = [(names, ranks) for names, ranks in both if ranks is not None]
        shapes = [keep_cut(model, names, ranks) for names, ranks in divided]
        parts = dict(model.named_parameters())
        wrap(model, mesh, config, [parts[name] for name in experts])
        for (names, ranks), of_whole in zip(divided, shapes, strict=True):
            name_cut(model, names, of_whole, ranks)
    elif mesh.is_sharded:
        _check_dimensions(modules)
        wrap(model, mesh, config)
    else:
        set_compute_types(model, config.types)


def _check_dimensions(modules: Mapping[str, Any]) -> None:
    """Raise UserError for a parameter without a dimension, of which FSDP2 has no rows to share out."""
    for phase, module in modules.items():
        for name, parameter in module.named_parameters():
            if not parameter.ndim:
                raise UserError(
                    f"The weight {name} of {phase!r} is a number without a dimension, which ranks cannot share out: "
                    "make it a list of one, torch.ones(1), or let each rank hold all weights by fsdp.shard_size = 1."
                )


def wrap(model: Model, mesh: Mesh, config: FSDPConfig, experts: Iterable[nn.Parameter] = ()) -> None:
    """Shard every module with FSDP2: each of its `blocks`, if it names any, and then what is left of it.

    experts: parameters of this rank's experts, which it shares out over the ranks that have the same ones.
    """
    placement = None if mesh.expert_cuts is None else _placed_apart(experts, mesh.expert_cuts)
    types = config.types
    reduce_dtype = types.reduce
    if types.compute is not None and reduce_dtype is None and (config.once_a_step or mesh.is_hybrid):
        # FSDP2 adds up in it what it does not reduce yet, and the last of many microbatches would be rounded away.
        reduce_dtype = next(model.backbone.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=types.compute, reduce_dtype=reduce_dtype)
    for module in modules_by_phase(model).values():
        # Without resharding, FSDP frees gathered parameters after the backward pass; a frozen module may have none.
        reshard = config.reshard_after_forward or not is_trainable(module)
        for unit in (*_blocks(module), module):
            fully_shard(
                unit,
                mesh=mesh.shards,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
                mp_policy=policy,
            )
        # A parameter that only some ranks use would otherwise be reduced on those ranks alone.
        module.set_reduce_scatter_unused_params(True)
        if hasattr(module, "sample"):
            # A generator is entered here too, and its parameters must be gathered then.
            register_fsdp_forward_method(module, "sample")


def _placed_apart(
    experts: Iterable[nn.Parameter], mesh: DeviceMesh
) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """What tells FSDP2 over which ranks it shares a parameter out: of experts, over those with the same ones.

    mesh: `Mesh.expert_cuts`.
    """
    ids = {id(parameter) for parameter in experts}
    same = of_parts(mesh)
    info = FSDPMeshInfo(same, shard_mesh_dim=0)
    if same.ndim == 2:
        info = HSDPMeshInfo(same, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda parameter: ShardPlacementResult(None, info) if id(parameter) in ids else None


def recompute_first(module: object, count: int, span: tuple[int, int] | None = None) -> None:
    """Recompute the first `count` blocks of a module, and no other, in the backward passes of forward passes to come.

    span: (first, stop) of the blocks that are meant; None: all.
    Ranks may differ: a block recomputes inside its FSDP unit, whose parameters backward has gathered by then, so that
    the collectives are the same.
    """
    blocks = _recomputable(module)
    for number, block in enumerate(blocks if span is None else blocks[slice(*span)]):
        block.recompute = number < count


def _recomputable(module: object) -> list[Any]:
    return [block for block in _blocks(module) if hasattr(block, "recompute")]


def _blocks(module: object) -> list[nn.Module]:
    return list(getattr(module, "blocks", ()))


def end_of_step(module: nn.Module, is_last: bool) -> None:
    """Set whether the next backward pass of a module sums its gradients over ranks, and frees its parameters.

    Before the last one of a step neither is done with `FSDPConfig.once_a_step`.
    """
    if isinstance(module, FSDPModule):
        if is_last:
            _add_up_alike(module)
        module.set_requires_gradient_sync(is_last)
        module.set_reshard_after_backward(is_last)


def _add_up_alike(module: nn.Module) -> None:
    """Give parameters without a gradient so far zeros to add to, beside those that have one in another type.

    FSDP2 casts what it adds up, reduces all parameters of a unit at once, and refuses to reduce two types at once.
    """
    parts = (part for part in module.modules() if isinstance(part, FSDPModule))
    for group in (group for part in parts for group in part._get_fsdp_state()._fsdp_param_groups):
        if all(each.unsharded_accumulated_grad is None for each in group.fsdp_params):
            continue
        for each in group.fsdp_params:
            if each.unsharded_accumulated_grad is None and each.sharded_param.requires_grad:
                each.unsharded_accumulated_grad = torch.zeros_like(each._unsharded_param, dtype=each.reduce_dtype)


def sum_over_shard_groups(module: nn.Module, enabled: bool) -> None:
    """Set whether the next backward pass of a module sums its gradients over the copies of hybrid sharding.

    The last backward pass of a step must. Earlier passes may sum over the shard group only and accumulate.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(enabled)
