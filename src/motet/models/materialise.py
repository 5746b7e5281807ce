"""Gives a model that was laid out on meta, and perhaps sharded since, the weights of this rank, and no others.

Weights come tensor by tensor, each drawn whole or as a slice of a file, and only this rank's rows of it are kept. So a
rank holds its own share and one layer, and the numbers are those of the whole model, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.models.block import plain_names
from motet.models.families.registry import Family
from motet.models.fused import NamedSlice, stored_names
from motet.models.initialise import drawn
from motet.models.load import on_meta
from motet.models.lora import drawn_lora
from motet.models.lora_read import saved_weights
from motet.models.mllm import MLLM
from motet.models.named_weights import is_lora
from motet.models.stored import TensorInFile, stored_tensors
from motet.tensor_parallel import part_of

if TYPE_CHECKING:
    from motet.models.build import ModelConfig


class Source(Protocol):
    """A whole weight: a tensor, or one in a file. A part of it is [slices], all of it is [...]."""

    def __getitem__(self, part: tuple[slice, ...] | EllipsisType, /) -> Tensor: ...


def materialise(
    mllm: MLLM, config: ModelConfig, seed: int, device: torch.device, unfilled: Collection[str] = ()
) -> None:
    """Fill in what `build_mllm(config, ..., deferred=True)` left on meta, and bring the rest of the model to `device`.

    unfilled: parts (the backbone, encoders by name) that get memory alone, as a checkpoint has all of their weights;
              until it is read they are nan.
    The model may lack modules, and parameters of modules (`part.py`); those are left out.

    It communicates nothing. Raises UserError if weights that were in a directory are there no longer.
    """
    backbone, where = config.backbone, "backbone"
    if mllm.backbone is not None:
        model, adapters, fill = mllm.backbone.causal_lm, _adapters(config, BACKBONE), BACKBONE not in unfilled
        fill_parameters(model, where, backbone.classes, backbone.path, seed, device, adapters, fill=fill)
    for name, part in config.encoders.items():
        if part.family and name in mllm.encoders:
            model, where = mllm.encoders[name].encoder.model, f"encoders.{name}"
            adapters, fill = _adapters(config, name), name not in unfilled
            fill_parameters(model, where, part.classes, part.path, seed, device, adapters, fill=fill)
    for module in mllm.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)


def _adapters(config: ModelConfig, part: str) -> Mapping[str, TensorInFile] | None:
    """The weights of a part's adapters in the directory from which they start; None if they are drawn."""
    lora = config.lora.get(part)
    return None if lora is None or lora.path is None else saved_weights(f"model.lora.{part}", lora)


def fill_parameters(
    model: PreTrainedModel,
    where: str,
    family: Family,
    path: Path | None,
    seed: int,
    device: torch.device,
    adapters: Mapping[str, TensorInFile] | None = None,
    *,
    fill: bool = True,
) -> None:
    """Replace the parameters of an HF model that are on meta by their values on `device`, of a DTensor this rank's.

    path, adapters: the directory that holds them, and stored weights of its adapters; None: they are drawn from `seed`.
    Tied parameters stay tied. fill: whether they get their values; else they are nan.
    """
    keys = stored_names(model, plain_names(model))
    missing: dict[str, list[tuple[NamedSlice, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            part = NamedSlice.of(keys[name]) or NamedSlice(keys[name], 0, 0)
            missing.setdefault(part.name, []).append((part, parameter))
    if not missing:
        return
    # All at once, before anything is drawn: between tensors that come and go they would leave the heap in pieces.
    values = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        for parts in missing.values()
        for _, parameter in parts
    }
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in values:
                setattr(module, key, values[id(parameter)])
    if not fill:
        for value in values.values():
            nn.init.constant_(value, torch.nan)
        return
    for name, source in _sources(on_meta(family, model.config), where, family, path, seed):
        for part, parameter in missing.pop(name, ()):
            _copy_own_part(source, part, values[id(parameter)])
    for name in filter(is_lora, list(missing)):
        for part, parameter in missing.pop(name):
            if adapters is None:
                whole = NamedSlice(name, 0, 0)  # Each part is drawn whole.
                _copy_own_part(drawn_lora(parameter, where, name, seed), whole, values[id(parameter)])
            else:
                _copy_own_part(adapters[name], part, values[id(parameter)])
    if missing:
        raise UserError(f"model.{where}.path: {path} lacks {min(missing)}, which it had when the model was built.")


def _sources(
    shapes: PreTrainedModel, where: str, family: Family, path: Path | None, seed: int
) -> Iterable[tuple[str, Source]]:
    if path is None:
        return drawn(shapes, where, seed)
    return (stored_tensors(shapes, family, path) or {}).items()


@torch.no_grad()
def _copy_own_part(source: Source, of_source: NamedSlice, value: Tensor) -> None:
    """Of a part of the source, of a DTensor the part that this rank holds; else all of the source."""
    if not isinstance(value, DTensor):
        value.copy_(source[...])
        return
    part = list(_own_part(value))
    own, first = part[of_source.dim], of_source.first
    part[of_source.dim] = slice(first + own.start, first + own.stop)
    if all(each.start < each.stop for each in part):
        value.to_local().copy_(source[tuple(part)])


def _own_part(tensor: DTensor) -> tuple[slice, ...]:
    """The part of a sharded tensor that this rank holds, a slice a dimension. Each axis of the mesh cuts what those
    before it have left, as torch.chunk cuts.
    """
    spans = [(0, size) for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dimension = placement.dim  # type: ignore[attr-defined]
            first, stop = spans[dimension]
            mesh = tensor.device_mesh
            begin, end = part_of(stop - first, mesh.get_local_rank(axis), mesh.size(axis))
            spans[dimension] = first + begin, first + end
        elif not placement.is_replicate():
            raise ValueError(f"a weight with the placement {placement} cannot be filled: it is sharded, or whole")
    return tuple(slice(*span) for span in spans)
