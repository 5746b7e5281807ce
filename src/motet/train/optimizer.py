"""AdamW with weight decay on matrices only, and the learning rate as a pure function of the step.

Weight decay applies to matrices that multiply activations. It does not apply to norms and biases (one dimension), nor
to embeddings: most of their rows have no gradient in a step and would only shrink. A parameter group has one device
mesh, because fused kernels take tensors of one mesh at a time.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn
from torch.distributed.tensor import DTensor

from motet.core.limits import MAX_STEPS

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(BaseModel):
    """`[optimizer]` of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = Field(gt=0, le=1000, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay of the first and of the second moment")
    eps: float = Field(1e-8, ge=1e-15, le=1, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, le=1000, description="on matrices; never on norms, biases and embeddings")
    clip_norm: float = Field(1.0, gt=0, allow_inf_nan=True, description="largest global gradient norm; inf never clips")
    warmup_steps: int = Field(0, ge=0, le=MAX_STEPS, description="steps in which the rate rises linearly to its peak")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="how the rate falls after warm-up; wsd: it stays, and falls linearly in the last decay_steps",
    )
    decay_steps: int | None = Field(
        None, gt=0, le=MAX_STEPS, description="of wsd: the last steps, in which the rate falls; default: a tenth of all"
    )
    final_lr_ratio: float = Field(0.1, ge=0, le=1, description="rate of the last step over the peak rate")

    @model_validator(mode="after")
    def _only_wsd_has_decay_steps(self) -> OptimizerConfig:
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError(f'decay_steps has no effect with schedule = "{self.schedule}"; set "wsd", or remove it')
        return self


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of step `step` (from 0) of `num_steps`: linear warm-up, then decay until the last step.

    The first step has the rate lr / warmup_steps, which is above zero. A resumed run needs no scheduler state.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    first = config.warmup_steps
    if config.schedule == "wsd":
        first = max(first, num_steps - 1 - (config.decay_steps or math.ceil(num_steps / 10)))
    decay_steps = num_steps - 1 - first
    progress = min(1.0, max(0, step - first) / decay_steps) if decay_steps > 0 else 0.0
    remaining = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "constant": 1.0,
    }[config.schedule]
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * remaining)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """The trainable parameters, grouped by weight decay and device mesh, in order of first appearance."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            decays = parameter.ndim >= 2 and id(parameter) not in embeddings
            groups.setdefault((mesh, decays), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (_, decays), parameters in groups.items()
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of a sharded model."""
    groups = parameter_groups(model, config.weight_decay) or [{"params": []}]  # All that a rank holds may be frozen.
    # Fused is 10 times faster, on a CPU too: one kernel call instead of a dozen DTensor dispatches a parameter.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
