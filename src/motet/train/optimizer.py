"""An optimizer of torch with weight decay on matrices only, and the learning rate as a pure function of the step.

Weight decay applies to weights of two or more dimensions, as those that multiply activations are, and class rows and
learned queries. It does not apply to norms and biases (one dimension), nor to tables of embeddings (`nn.Embedding`):
most of their rows have no gradient in a step and would only shrink. A parameter group has one device
mesh, because fused kernels take tensors of one mesh at a time.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import nn
from torch.distributed.tensor import DTensor

from motet.core.errors import UserError
from motet.core.limits import MAX_STEPS
from motet.core.spec import NOTHING_LEARNS
from motet.core.words import counted_words
from motet.models.fused import whole_names
from motet.models.named_weights import is_named, weights_named
from motet.train.optimizers import OPTIMIZERS, WHOLE_MATRICES, num_moments

Beta = Annotated[float, Field(ge=0, lt=1)]


class WeightGroup(BaseModel):
    """`[[optimizer.groups]]` of a recipe: weights with a learning rate or a decay of their own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    weights: tuple[str, ...] = Field(
        min_length=1,
        description="patterns of names of weights, as checkpoints have them: one, or a list; * is any characters",
    )
    lr: float | None = Field(
        None, gt=0, le=1000, description="their peak learning rate; it falls as that of all others"
    )
    weight_decay: float | None = Field(None, ge=0, le=1000, description="on the matrices among them")

    @field_validator("weights", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _says_something(self) -> WeightGroup:
        if self.lr is None and self.weight_decay is None:
            raise ValueError("a group needs `lr` or `weight_decay`")
        return self


def _default(option: str, given: dict[str, Any]) -> Any:
    """What an option is by default; None where the optimizer does not read it."""
    return OPTIMIZERS[given["name"]].options.get(option) if "name" in given else None


class OptimizerConfig(BaseModel):
    """`[optimizer]` of a recipe. Options that the optimizer does not read are None."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Literal["adamw", "adam", "nadam", "radam", "adamax", "rmsprop", "adagrad", "sgd"] = Field(
        "adamw", description="the optimizer of torch"
    )
    lr: float = Field(gt=0, le=1000, description="peak learning rate")
    betas: tuple[Beta, Beta] | None = Field(
        default_factory=partial(_default, "betas"),
        description="decay of the first and of the second moment; default 0.9 and 0.95, of optimizers named after Adam",
    )
    alpha: Beta | None = Field(
        default_factory=partial(_default, "alpha"), description="of rmsprop: decay of the mean square; default 0.99"
    )
    momentum: Beta | None = Field(
        default_factory=partial(_default, "momentum"), description="of sgd (default 0.9) and of rmsprop (default 0)"
    )
    nesterov: bool | None = Field(
        default_factory=partial(_default, "nesterov"), description="of sgd: Nesterov's momentum; default false"
    )
    eps: float | None = Field(
        default_factory=partial(_default, "eps"),
        ge=1e-15,
        le=1,
        description="added to the root of the second moment, of all but sgd; default 1e-8, of adagrad 1e-10",
    )
    weight_decay: float = Field(
        default_factory=lambda given: 0.1 if given.get("name") == "adamw" else 0.0,
        ge=0,
        le=1000,
        description="on weights of two or more dimensions, but for tables of embeddings; never on norms and biases. "
        "adamw shrinks them by it (default 0.1), others add it to the gradient, as torch does (default 0)",
    )
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
    groups: tuple[WeightGroup, ...] = Field(
        (), description="weights with a rate or a decay of their own; of several that name a weight, the last counts"
    )

    @field_validator("name", mode="before", json_schema_input_type=str)
    @classmethod
    def _treats_elements_by_themselves(cls, name: Any) -> Any:
        if why := WHOLE_MATRICES.get(name) if isinstance(name, str) else None:
            raise ValueError(
                f"{name} {why}, which ranks that share weights do not have; take one of {', '.join(OPTIMIZERS)}"
            )
        return name

    @model_validator(mode="after")
    def _options_are_read(self) -> OptimizerConfig:
        options = OPTIMIZERS[self.name].options
        for option in ("betas", "alpha", "momentum", "nesterov", "eps"):
            if getattr(self, option) is not None and option not in options:
                raise ValueError(f'{option} has no effect with name = "{self.name}"; remove it')
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = true needs a momentum above 0")
        return self

    @property
    def num_moments(self) -> int:
        """How many numbers the optimizer keeps of each element."""
        return num_moments(self.name, self.momentum)

    @model_validator(mode="after")
    def _constant_has_no_final_rate(self) -> OptimizerConfig:
        is_default = self.final_lr_ratio == type(self).model_fields["final_lr_ratio"].default
        if self.schedule == "constant" and not is_default:
            raise ValueError('final_lr_ratio has no effect with schedule = "constant", which stays; remove it')
        return self

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


def never_reached(config: OptimizerConfig, num_steps: int) -> str:
    """What of its schedule a run of `num_steps` is too short for, as a sentence; "" if it has room for all of it."""
    steps, warmup, decay = counted_words(num_steps, "step"), config.warmup_steps, config.decay_steps or 0
    if warmup > num_steps:
        most = learning_rate(config, num_steps - 1, num_steps)
        return (
            f"optimizer.warmup_steps = {warmup:,} is more than the {steps} of the run, so the rate rises to {most:.3g} "
            f"at its end, and never to optimizer.lr = {config.lr:g}."
        )
    if warmup + decay > num_steps:
        return (
            f"optimizer.warmup_steps = {warmup:,} and decay_steps = {decay:,} are more than the {steps} of the run, so "
            f"the rate has {num_steps - warmup:,} to fall in."
        )
    return ""


def check_learns(model: nn.Module) -> None:
    """Raise UserError if all weights of a model are frozen. model: whole; it may be on meta."""
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError(NOTHING_LEARNS)


def check_groups(model: nn.Module, config: OptimizerConfig) -> None:
    """Raise UserError for a pattern of a group that names no weight, or frozen ones alone.

    Also for a rate or a decay that none of a group's weights gets. model: whole; it may be on meta.
    """
    decaying, learned = _decaying(model), list[set[int]]()
    for number, group in enumerate(config.groups):
        where = f"optimizer.groups[{number}].weights"
        named = {pattern: weights_named(model, pattern, where) for pattern in group.weights}
        for pattern, weights in named.items():
            if not any(weight.requires_grad for weight in weights):
                raise UserError(f"{where}: all weights that match {pattern!r} are frozen; let them learn, or remove it")
        learned.append({id(weight) for weights in named.values() for weight in weights if weight.requires_grad})
        if group.weight_decay and not decaying & learned[-1]:
            raise UserError(
                f"optimizer.groups[{number}].weight_decay has no effect, as norms, biases and tables of embeddings do "
                "not decay, and it names no other weights that learn; remove it"
            )
    for option in ("lr", "weight_decay"):
        later = set[int]()
        for number in reversed([n for n, group in enumerate(config.groups) if getattr(group, option) is not None]):
            if learned[number] <= later:
                raise UserError(
                    f"optimizer.groups[{number}].{option} has no effect, as groups behind it name the same weights, "
                    "and the last one counts; put it behind them, or remove it"
                )
            later |= learned[number]


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The trainable parameters, grouped by learning rate, weight decay and device mesh, in order of first appearance.

    model: whole, or a rank's part. `lr_ratio` of a group is its peak rate over `config.lr`.
    """
    decaying = _decaying(model)
    groups: dict[tuple[object, float, float], list[nn.Parameter]] = {}
    names = whole_names(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            lr, decay = _own_options(names[name], config)
            decay = decay if id(parameter) in decaying else 0.0
            groups.setdefault((mesh, lr / config.lr, decay), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr": config.lr * lr_ratio, "lr_ratio": lr_ratio}
        for (_, lr_ratio, decay), parameters in groups.items()
    ]


def _decaying(model: nn.Module) -> set[int]:
    """The ids of the weights that decay, if any decay is asked for."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return {id(parameter) for parameter in model.parameters() if parameter.ndim >= 2} - embeddings


def _own_options(name: str, config: OptimizerConfig) -> tuple[float, float]:
    """Peak learning rate and weight decay of a weight, which decays if it is a matrix."""
    lr, decay = config.lr, config.weight_decay
    for group in config.groups:
        if is_named(name, group.weights):
            lr = lr if group.lr is None else group.lr
            decay = decay if group.weight_decay is None else group.weight_decay
    return lr, decay


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters of a sharded model."""
    groups = parameter_groups(model, config) or [{"params": []}]  # All that a rank holds may be frozen.
    kind = OPTIMIZERS[config.name]
    how = {"fused": True} if kind.is_fused else {"foreach": True}
    return kind.make(groups, lr=config.lr, **{name: getattr(config, name) for name in kind.options}, **how)  # type: ignore[call-arg]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups, each by its ratio to the others'."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)
