"""Random weights of HF models, drawn part by part, so that no more than one part exists whole at a time.

A part is a layer, or a module outside of the layers. Each part is drawn on the CPU as a whole, by transformers' own
`_init_weights`, from a seed of its name: its numbers depend neither on the parts before it nor on the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed the global CPU generator, from which modules initialise themselves, by name; restore it afterwards."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def drawn(model: PreTrainedModel, where: str, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each parameter of `model`, in torch's default dtype; the first name of a tied one.

    model: on meta, without Blocks; it is on meta again afterwards. where: the table of the recipe, part of every seed.
    Take each value before asking for the next. Raises RuntimeError for a parameter that transformers leaves as it is.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = [*_parts(model, "", ())]
    sizes = [sum(each.numel() for each in part.parameters(is_whole)) for _, part, _, is_whole in parts]
    # One for all parts: what is allocated part by part leaves the heap in pieces, which stay resident.
    memory = torch.empty(max(sizes))
    for part_name, part, ancestors, is_whole in parts:
        own = [name for each in part.parameters(is_whole) if (name := names.pop(id(each), None))]
        if not own:
            continue
        _place_in(memory.fill_(torch.nan), part, is_whole)
        with torch.no_grad(), seeded(seed, f"{where} {part_name}"):
            for owner, module in _children_first(part, ancestors) if is_whole else ():
                owner._init_weights(module)
            # A module may initialise what lies deeper; on the other parts, which are on meta, that does nothing.
            for count in range(len(ancestors), 0, -1):
                _owner(ancestors[:count])._init_weights(ancestors[count - 1])
        for name in own:
            value = model.get_parameter(name).detach()
            if torch.isnan(value.sum()):
                raise RuntimeError(f"{type(model).__name__} has no initialisation for {name}")
            yield name, value
        part.to_empty(device="meta", recurse=is_whole)


def _place_in(memory: Tensor, part: nn.Module, is_whole: bool) -> None:
    """Give the parameters of a part on meta their storage: one after the other in `memory`."""
    first = 0
    for module in part.modules() if is_whole else (part,):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                stop = first + parameter.numel()
                value = memory[first:stop].view(parameter.shape)
                module._parameters[key] = nn.Parameter(value, parameter.requires_grad)
                first = stop


def compute_buffers(model: PreTrainedModel) -> None:
    """Give a model on meta its buffers, on the CPU; they are small, and are never sharded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    with torch.no_grad():
        for owner, module in _children_first(model, ()):
            owner._init_weights(module)


_Path = tuple[nn.Module, ...]
"""The modules from the model to a module's parent."""


def _parts(module: nn.Module, name: str, ancestors: _Path) -> Iterator[tuple[str, nn.Module, _Path, bool]]:
    """Name, module, its ancestors, and whether its submodules belong to the part; as deep as there are layers."""
    if not any(isinstance(each, nn.ModuleList) for each in module.modules()):
        yield name, module, ancestors, True
        return
    for child_name, child in module.named_children():
        yield from _parts(child, f"{name}.{child_name}" if name else child_name, (*ancestors, module))
    yield name, module, (*ancestors, module), False


def _children_first(module: nn.Module, ancestors: _Path) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """All submodules and the module itself, each with the HF model that initialises it, in transformers' order."""
    path = (*ancestors, module)
    for child in module.children():
        yield from _children_first(child, path)
    yield _owner(path), module


def _owner(path: _Path) -> PreTrainedModel:
    return next(each for each in reversed(path) if isinstance(each, PreTrainedModel))
