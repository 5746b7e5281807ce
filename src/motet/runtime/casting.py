"""Whole copies that compute in another type than they are stored in (`fsdp.param_dtype`), without FSDP.

In the block of `computing`, each parameter's place in its module holds a cast of it, made once. The cast is part of the
graph, so gradients arrive at the parameter in its own type, and are added up over microbatches there. It stays in place
for blocks that are recomputed in the backward pass. Checkpoints and the optimizer know the stored parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from motet.runtime.sharded_state import SAME_TYPES, ComputeTypes
from motet.runtime.stage import Model, modules_by_phase

_ATTRIBUTE = "compute_types"


def set_compute_types(model: Model, types: ComputeTypes) -> None:
    """Say in which types the modules of a model compute, and sum gradients, where each rank holds all of them."""
    for module in modules_by_phase(model).values():
        setattr(module, _ATTRIBUTE, types)


def compute_types_of(model: Model) -> ComputeTypes:
    """The types that `set_compute_types` has set; those of the parameters, if it has not."""
    types: ComputeTypes = getattr(model.backbone, _ATTRIBUTE, SAME_TYPES)
    return types


@contextmanager
def computing(model: Model) -> Iterator[None]:
    """In the block, modules compute with their parameters in the type that is set for them."""
    dtype = compute_types_of(model).compute
    places = [
        (module._parameters, key, parameter)
        for whole in modules_by_phase(model).values()
        for module in (whole.modules() if isinstance(whole, nn.Module) else ())
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and dtype not in (None, parameter.dtype)
    ]
    casts: dict[int, Tensor] = {}  # A tied parameter has one.
    with torch.enable_grad():
        for _, _, parameter in places:
            casts.setdefault(id(parameter), parameter.to(dtype))
    for parameters, key, parameter in places:
        parameters[key] = casts[id(parameter)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameters, key, parameter in places:
            parameters[key] = parameter
