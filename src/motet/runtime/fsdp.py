"""Shards a model over a mesh with PyTorch's FSDP2, block by block; a transform applied in visible order.

FSDP averages gradients over ranks; the step undoes that by scaling its loss (`runtime/step.py`), because dividing by
one instead is not supported on every backend.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from motet.core.errors import UserError
from motet.core.limits import MAX_RANKS
from motet.runtime.mesh import Mesh
from motet.runtime.stage import Model, is_trainable, modules_by_phase

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class FSDPConfig(BaseModel):
    """How parameters are held and computed with.

    shard_size:   ranks that share one copy of the parameters; None: all. Fewer is hybrid sharding, 1 is like DDP.
    param_dtype:  what modules compute in; parameters and optimizer state stay as they are. None: as the parameters are.
    reduce_dtype: what gradients are summed in over ranks.
    reshard_after_forward: free gathered parameters between forward and backward and gather them again.
    recompute: keep only the blocks' inputs in the forward pass, and run them again in the backward pass.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    shard_size: int | None = Field(default=None, ge=1, le=MAX_RANKS)
    param_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    reduce_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    reshard_after_forward: bool = True
    recompute: bool = False


def shard(model: Model, mesh: Mesh, config: FSDPConfig) -> None:
    """Shard every module of the model in place: each of its `blocks`, if it names any, then what is left of it.

    Parameters must be initialised, alike on all ranks, and frozen where they are to be frozen. Raises UserError where
    recomputation is asked for and a trainable module has no blocks that can do it.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=_DTYPES.get(config.param_dtype or ""), reduce_dtype=_DTYPES.get(config.reduce_dtype or "")
    )
    for phase, module in modules_by_phase(model).items():
        blocks: list[nn.Module] = list(getattr(module, "blocks", ()))
        if config.recompute:
            _recompute(phase, blocks, needed=is_trainable(module))
        # A frozen module that nothing trainable feeds has no backward pass, after which it would be freed.
        reshard = config.reshard_after_forward or not is_trainable(module)
        for unit in (*blocks, module):
            fully_shard(unit, mesh=mesh.shards, reshard_after_forward=reshard, mp_policy=policy)
        # Without this, a parameter that some ranks use and others do not would break the sum over ranks.
        module.set_reduce_scatter_unused_params(True)


def _recompute(phase: str, blocks: list[nn.Module], *, needed: bool) -> None:
    able = [block for block in blocks if hasattr(block, "recompute")]
    if needed and not able:
        raise UserError(f"recompute: module {phase!r} names no blocks that can be recomputed; switch recompute off.")
    for block in able:
        block.recompute = True


def sum_over_replicas(module: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass of a module sums its gradients over replicas (hybrid sharding).

    The last one of a step must; those before it may leave their part, summed over the shard group only, to be added.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(enabled)
