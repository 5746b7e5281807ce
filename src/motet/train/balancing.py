"""The Orchestrator of a model: what its modules cost, from which seconds a way is chosen, and by which core."""

from __future__ import annotations

from functools import partial

import torch

from motet.balance import ACTIVE_BACKEND
from motet.cost.flops import batch_flops
from motet.dispatch import BalanceConfig, Orchestrator, StepTimes
from motet.models.module import MLLM
from motet.models.spec import model_spec
from motet.runtime.stage import is_trainable, modules_by_phase
from motet.train.world import JointUserError, World


def build_orchestrator(
    config: BalanceConfig, model: MLLM, num_ranks: int, device: torch.device, dtype: torch.dtype
) -> Orchestrator:
    """All ranks call it alike. dtype: that encoder outputs are moved in.

    Raises UserError for what in `config` does not fit the model.
    """
    speed = config.speed.resolved(device.type)
    modules = modules_by_phase(model)
    times = StepTimes(
        flops=partial(batch_flops, model_spec(model)),
        flops_per_s=speed.flops_per_s,
        link=speed.link,
        token_bytes=model.backbone.dim * dtype.itemsize,
        frozen=frozenset(name for name, module in modules.items() if not is_trainable(module)),
    )
    return Orchestrator(
        config.phase_costs({name: module.cost for name, module in model.encoders.items()}),
        num_ranks,
        config.balanced(model.encoders),
        times=times,
        methods=config.methods,
    )


def check_same_backend(world: World) -> None:
    """Ranks decide alike with the same core only. A collective; raises JointUserError where it is not the same."""
    found = world.gather(ACTIVE_BACKEND)
    if len(set(found)) > 1:
        raise JointUserError(
            f"Rank {found.index('fallback')} balances without the native core and rank {found.index('native')} with "
            "it, so they would not decide alike: install the same build of Motet on all machines."
        )
