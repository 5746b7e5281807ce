"""The tensors of a checkpoint by name: `model.<name>` for weights, `optim.<name>.<field>` for the optimizer's state.

Names and shapes are those of the unsharded model. The state of random number generators is not stored: each step seeds
them from (run.seed, step, rank). A run that resumes on as many ranks repeats dropout exactly. On another number of
ranks, data order, learning rate and weights go on exactly, and dropout masks are other draws of the same distribution.
AdamW's step counter is derived from the run's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WEIGHT, _OPTIMIZER = "model.", "optim."
_MOMENTS = ("exp_avg", "exp_avg_sq")


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
            tensors |= {f"{_OPTIMIZER}{name}.{moment}": state[moment] for moment in _MOMENTS}
    return tensors


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set AdamW's number of steps done."""
    for state in optimizer.state.values():
        state["step"].copy_(torch.tensor(float(step)))


def describe_tensor(key: str) -> str:
    """A tensor's name in words, for messages."""
    if key.startswith(_WEIGHT):
        return f"weight '{key.removeprefix(_WEIGHT)}'"
    return f"optimizer state of '{key.removeprefix(_OPTIMIZER).rpartition('.')[0]}' (was it frozen?)"
