"""The tensors of a checkpoint by name: `model.<name>` for weights, `optim.<name>.<field>` for the optimizer's state.

Names and shapes are those of the unsharded model. The state of random number generators is not stored: dropout is drawn
by item (`motet/dropout.py`), and each step seeds the generators from (run.seed, step, rank), for what else is drawn.
AdamW counts the steps of each parameter: those in which no example needed its module are none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_WEIGHT, _OPTIMIZER = "model.", "optim."
_MOMENTS, _STEP = ("exp_avg", "exp_avg_sq"), ".step"


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> tensor to save or to load in place. Creates AdamW's state if it has taken no step yet."""
    parameters = dict(model.named_parameters())
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors: dict[str, Tensor] = {_WEIGHT + name: parameter.detach() for name, parameter in parameters.items()}
    tensors |= {_WEIGHT + name: buffer for name, buffer in model.state_dict().items() if name not in aliases}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state |= {moment: torch.zeros_like(parameter).detach() for moment in _MOMENTS}
            tensors[f"{_OPTIMIZER}{name}{_STEP}"] = state["step"]
            tensors |= {f"{_OPTIMIZER}{name}.{moment}": state[moment] for moment in _MOMENTS}
    return tensors


def without_steps(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that has no number of steps of each parameter, as Motet once wrote them."""
    return {key: tensor for key, tensor in tensors.items() if not is_step(key)}


def is_step(key: str) -> bool:
    """Whether a tensor is AdamW's number of steps of a parameter."""
    return key.startswith(_OPTIMIZER) and key.endswith(_STEP)


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set AdamW's number of steps of all parameters."""
    for state in optimizer.state.values():
        state["step"].copy_(torch.tensor(float(step)))


def describe_tensor(key: str) -> str:
    """A tensor's name in words, for messages."""
    if key.startswith(_WEIGHT):
        return f"weight '{key.removeprefix(_WEIGHT)}'"
    return f"optimizer state of '{key.removeprefix(_OPTIMIZER).rpartition('.')[0]}' (was it frozen?)"
