"""The tensors of a checkpoint by name: `model.<name>` for weights, `optim.<name>.<field>` for the optimizer's state.

Names and shapes are those of the whole model, whatever the sharding. No generator state is stored, because none is
carried from step to step: a step's generators are seeded from (run.seed, step, rank). Resumed on as many ranks, dropout
repeats exactly; on another number, the data order, the schedule and the weights go on exactly, and dropout masks are
other draws of the same distribution. AdamW's step counter follows from the run's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WEIGHT, _SLOT = "model.", "optim."
_MOMENTS = ("exp_avg", "exp_avg_sq")


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What is saved and loaded, in place; the optimizer's is made where AdamW has not yet been stepped."""
    parameters = dict(model.named_parameters())
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors: dict[str, Tensor] = {_WEIGHT + name: parameter.detach() for name, parameter in parameters.items()}
    tensors |= {_WEIGHT + name: buffer for name, buffer in model.state_dict().items() if name not in aliases}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            slots = optimizer.state[parameter]
            if not slots:
                slots["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                slots |= {moment: torch.zeros_like(parameter).detach() for moment in _MOMENTS}
            tensors |= {f"{_SLOT}{name}.{moment}": slots[moment] for moment in _MOMENTS}
    return tensors


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Let AdamW have done `step` steps."""
    for slots in optimizer.state.values():
        slots["step"].copy_(torch.tensor(float(step)))


def in_words(key: str) -> str:
    """What a name stands for."""
    if key.startswith(_WEIGHT):
        return f"weight '{key.removeprefix(_WEIGHT)}'"
    return f"optimizer state of '{key.removeprefix(_SLOT).rpartition('.')[0]}' (was it frozen?)"
