"""The tensors of a checkpoint by name: `model.<name>` for weights, `optim.<name>.<field>` for the optimizer's state.

Names and shapes are those of the unsharded model, all of it but frozen weights beside LoRA adapters. What is split
(`models/fused.py`) is named as rows, or columns, of the whole, which `storage.py` puts together.

The state of random number generators is not stored: dropout is drawn by item (`motet/dropout.py`), and each step seeds
the generators from (run.seed, step, rank), for what else is drawn. Optimizers but SGD count the steps of each
parameter: those in which no example needed its module are none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from motet.models.fused import NamedSlice, stored_names
from motet.models.named_weights import is_lora
from motet.train.optimizers import COUNTERS, slots_of

_WEIGHT, _OPTIMIZER = "model.", "optim."
_STEP = ".step"


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Name -> weight to save or to load in place: buffers too, and frozen ones that are not beside adapters."""
    keys, elsewhere = stored_names(model), _beside_adapters(model)
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored = {name: weight for name, weight in model.named_parameters() if name not in elsewhere}
    weights: dict[str, Tensor] = {_WEIGHT + keys[name]: weight.detach() for name, weight in stored.items()}
    return weights | {_WEIGHT + name: buffer for name, buffer in model.state_dict().items() if name not in aliases}


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> tensor to save or to load in place. Creates the optimizer's state if it has taken no step yet."""
    keys, tensors = stored_names(model), weights_of(model)
    groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            part = NamedSlice.of(keys[name])
            whole, of_part = (keys[name], "") if part is None else (part.name, part._replace(name="").key)
            for field, tensor in slots_of(optimizer, parameter, groups.get(id(parameter), {})).items():
                if field not in COUNTERS:
                    tensors[f"{_OPTIMIZER}{whole}.{field}{of_part}"] = tensor
                elif part is None or part.first == 0:
                    tensors[f"{_OPTIMIZER}{whole}.{field}"] = tensor
    return tensors


def _beside_adapters(model: nn.Module) -> set[str]:
    """The names of frozen weights beside LoRA adapters. They are not stored: a run has them from where it began."""
    parts = [
        (f"{name}.{module.beside_adapters}.", getattr(module, module.beside_adapters))
        for name, module in model.named_modules()
        if getattr(module, "beside_adapters", "")
    ]
    return {
        prefix + name
        for prefix, part in parts
        for name, weight in part.named_parameters()
        if not (weight.requires_grad or is_lora(name))
    }


def store_frozen(model: nn.Module, parts: Collection[str]) -> None:
    """Have checkpoints hold the frozen weights beside the adapters of these parts: they are not those of its path.

    parts: the backbone, or encoders by name. The model may lack modules.
    """
    for name, module in model.named_modules():
        if getattr(module, "beside_adapters", "") and name.removeprefix("encoders.") in parts:
            module.beside_adapters = ""  # type: ignore[assignment]


def model_part(key: str) -> str:
    """The part that has a weight, as in `store_frozen`. key: of a checkpoint."""
    first, *others = key.removeprefix(_WEIGHT).split(".")
    return others[0] if first == "encoders" else first


def share_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give parts of a tensor the number of steps of its first part, which `tensors_of` has for all of them."""
    keys, counted = stored_names(model), dict[tuple[str, str], Tensor]()
    for name, parameter in model.named_parameters():
        if (part := NamedSlice.of(keys[name])) is not None and parameter.requires_grad:
            state = optimizer.state[parameter]
            for counter in COUNTERS & state.keys():
                state[counter].copy_(counted.setdefault((part.name, counter), state[counter]))


def without_steps(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that has no number of steps of each parameter, as Motet once wrote them."""
    return {key: tensor for key, tensor in tensors.items() if not is_step(key)}


def is_weight(key: str) -> bool:
    """Whether a tensor is a weight, or a buffer, of the model."""
    return key.startswith(_WEIGHT)


def is_step(key: str) -> bool:
    """Whether a tensor is the number of steps of a parameter."""
    return key.startswith(_OPTIMIZER) and key.endswith(_STEP)


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the number of steps of all parameters, where the optimizer counts them."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].copy_(torch.tensor(float(step)))


def describe_tensor(key: str) -> str:
    """A tensor's name in words, for messages."""
    if key.startswith(_WEIGHT):
        return f"weight '{key.removeprefix(_WEIGHT)}'"
    weight, _, field = key.removeprefix(_OPTIMIZER).rpartition(".")
    return f"optimizer state {field} of '{weight}' (was it frozen, or is optimizer.name another?)"
