"""The optimizers of torch that a recipe may name: their options, and the state that they keep of each weight.

They treat each element by itself, so ranks that share a weight update their rows as one process would. Adafactor and
Muon do not: one keeps means over rows and columns of whole matrices, the other multiplies whole matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from motet.core.plan import ADAM_MOMENTS

_STEPS: Mapping[str, float] = MappingProxyType({"step": 0.0})


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of torch.

    options:  those of `[optimizer]` that it reads beside rate and decay, with their defaults.
    moments:  fields of its state with a number for each element, 0 at first. With a momentum there is one more.
    counters: fields with one number for the whole weight, and what they begin with.
    is_fused: whether torch has one kernel for the whole update that also takes weights which ranks share (DTensor).
              It is ten times faster than several, on a CPU too, and reads by itself on a GPU whether it is to be left
              out.

    Example:
        >>> OPTIMIZERS["sgd"].fields(momentum=0.9), OPTIMIZERS["adagrad"].fields(momentum=0.0)
        (('momentum_buffer',), ('sum',))
    """

    make: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    moments: tuple[str, ...] = ()
    counters: Mapping[str, float] = field(default_factory=lambda: _STEPS)
    is_fused: bool = False

    def fields(self, momentum: float) -> tuple[str, ...]:
        """The moments of a weight whose group has such a momentum."""
        return (*self.moments, "momentum_buffer") if momentum else self.moments


_BETAS = {"betas": (0.9, 0.95), "eps": 1e-8}
_ADAM = ("exp_avg", "exp_avg_sq")

OPTIMIZERS = {
    "adamw": OptimizerKind(torch.optim.AdamW, _BETAS, _ADAM, is_fused=True),
    "adam": OptimizerKind(torch.optim.Adam, _BETAS, _ADAM, is_fused=True),
    "nadam": OptimizerKind(torch.optim.NAdam, _BETAS, _ADAM, {"step": 0.0, "mu_product": 1.0}),
    "radam": OptimizerKind(torch.optim.RAdam, _BETAS, _ADAM),
    "adamax": OptimizerKind(torch.optim.Adamax, _BETAS, ("exp_avg", "exp_inf")),
    "rmsprop": OptimizerKind(torch.optim.RMSprop, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0}, ("square_avg",)),
    "adagrad": OptimizerKind(torch.optim.Adagrad, {"eps": 1e-10}, ("sum",)),
    "sgd": OptimizerKind(torch.optim.SGD, {"momentum": 0.9, "nesterov": False}, counters={}),
}
WHOLE_MATRICES = {
    "adafactor": "keeps means over rows and columns of whole matrices",
    "muon": "multiplies whole matrices, in bfloat16",
}
"""Optimizers that are refused, and why: no rank has a whole matrix where ranks share weights."""
_SWITCHED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
"""Options that a recipe has not, and a loop of one's own may: each adds a moment."""
COUNTERS = frozenset(name for kind in OPTIMIZERS.values() for name in kind.counters)
_BY_CLASS = {kind.make: kind for kind in OPTIMIZERS.values()}


def num_moments(name: str, momentum: float | None) -> int:
    """How many numbers an optimizer keeps of each element.

    Example: `num_moments("adamw", None)` is 2, and `num_moments("sgd", 0.0)` is 0.
    """
    count = len(OPTIMIZERS[name].fields(momentum or 0.0))
    assert count <= ADAM_MOMENTS
    return count


def name_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """By which name a recipe has an optimizer; "" if recipes know none of its class."""
    kinds = (name for name, kind in OPTIMIZERS.items() if kind.make is type(optimizer))
    return next(kinds, "")


def slots_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a weight: what the optimizer would begin with, if the weight has taken no step yet.

    group: the options of the group that has it, as of `optimizer.param_groups`.
    """
    state: dict[str, Any] = optimizer.state[parameter]
    kind = _BY_CLASS[type(optimizer)]
    if not state:
        # Counters of fused optimizers are where their kernel reads them.
        device = parameter.device if kind.is_fused else torch.device("cpu")
        state |= {
            name: torch.tensor(first, dtype=torch.float32, device=device) for name, first in kind.counters.items()
        }
        switched = [field for switch, field in _SWITCHED.items() if group.get(switch)]
        fields = (*kind.fields(group.get("momentum", 0.0)), *switched)
        state |= {name: torch.zeros_like(parameter).detach() for name in fields}
    return state
