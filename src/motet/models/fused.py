"""Products that a family of HF computes as one, as several: queries, keys and values, or a gate and what it gates.

Tensor-parallel ranks cut each of them by itself, so there each has parameters of its own. Weights of files, drawn
weights, checkpoints and exports have one parameter, of which each of these has some rows, named "name[first:stop]", or,
where it is stored the other way round (`transposed.py`), some columns, named "name[:,first:stop]".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from motet.transposed import TransposedLinear, is_transposed

_SLICE = re.compile(r"(.+)\[(:,)?(\d+):(\d+)\]")


class NamedSlice(NamedTuple):
    """The rows (dim 0), or columns (dim 1), first ... stop - 1 of the tensor `name`.

    Example:
        >>> NamedSlice.of("qkv.weight[8:12]"), NamedSlice.of("proj.weight")
        (NamedSlice(name='qkv.weight', first=8, stop=12, dim=0), None)
        >>> NamedSlice("c_attn.weight", 8, 12, dim=1).key
        'c_attn.weight[:,8:12]'
    """

    name: str
    first: int
    stop: int
    dim: int = 0

    @staticmethod
    def of(key: str) -> NamedSlice | None:
        """What a key names; None if it names a whole tensor."""
        found = _SLICE.fullmatch(key)
        return NamedSlice(found[1], int(found[3]), int(found[4]), int(bool(found[2]))) if found else None

    @property
    def key(self) -> str:
        """The text that `of` reads."""
        return f"{self.name}[{':,' * self.dim}{self.first}:{self.stop}]"

    def within(self, whole: Tensor) -> Tensor:
        """These rows, or columns, of the whole tensor, a view."""
        return whole.narrow(self.dim, self.first, self.stop - self.first)


class SplitLinear(nn.Module):
    """A linear layer as several, one for each span of its output's columns, named "0", "1", ...

    widths: how many columns each makes; they are all columns of `layer`, whose values they take.
    """

    def __init__(self, layer: nn.Linear, widths: Sequence[int]) -> None:
        super().__init__()
        edges = [0, *accumulate(widths)]
        if edges[-1] != layer.out_features:
            raise ValueError(f"the parts have {edges[-1]} columns, and the layer {layer.out_features}")
        self.spans = list(pairwise(edges))
        for number, (first, stop) in enumerate(self.spans):
            own = {
                key: None
                if whole is None
                else nn.Parameter(
                    NamedSlice(key, first, stop, _dim_of(layer, key)).within(whole.detach()).clone(),
                    whole.requires_grad,
                )
                for key, whole in layer._parameters.items()
            }
            if is_transposed(layer):
                part: nn.Linear = TransposedLinear(own["weight"], own["bias"])
            else:
                part = nn.Linear(layer.in_features, stop - first, layer.bias is not None, device="meta")
                part._parameters.update(own)
            self.add_module(str(number), part)

    @property
    def parts(self) -> list[nn.Linear]:
        """The layers that it consists of."""
        return [self._modules[str(number)] for number in range(len(self.spans))]  # type: ignore[misc]

    @property
    def bias(self) -> Tensor | None:
        """That of the first part; None where the layer has no bias."""
        return self.parts[0].bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def stored_names(model: nn.Module, names: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name of each parameter and buffer -> the key by which weights are stored: the name, or a part of a whole tensor.

    names: name in the model -> another one to be read in its place, such as without Blocks; by default the same.
    """
    stored = dict(names) if names is not None else {name: name for name in model.state_dict()}
    for prefix, module in model.named_modules():
        for number, span in enumerate(module.spans) if isinstance(module, SplitLinear) else ():
            for of_part in _names_in(module.parts[number]):
                if (name := f"{prefix}.{number}.{of_part}") in stored:
                    whole = stored[name].removesuffix(f"{number}.{of_part}") + of_part
                    stored[name] = NamedSlice(whole, *span, _dim_of(module.parts[number], of_part)).key
    return stored


def _dim_of(layer: nn.Linear, name: str) -> int:
    """The dimension of a parameter of a linear layer, or of its adapter, that has the columns of the output."""
    return int(name == "weight" and is_transposed(layer))


def _names_in(part: nn.Module) -> list[str]:
    """The names of all parameters that a part has, or had before they were taken from it."""
    return [f"{prefix}.{key}" if prefix else key for prefix, each in part.named_modules() for key in each._parameters]


def whole_names(model: nn.Module) -> dict[str, str]:
    """Name of each parameter and buffer -> that of the whole tensor which has it, or has it as a part."""
    return {name: (NamedSlice.of(key) or NamedSlice(key, 0, 0)).name for name, key in stored_names(model).items()}


def with_whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by name, of tensors by key; all rows, or columns, of each are there."""
    whole, parts = dict[str, Tensor](), dict[tuple[str, int], dict[int, Tensor]]()
    for key, tensor in tensors.items():
        if (part := NamedSlice.of(key)) is None:
            whole[key] = tensor
        else:
            parts.setdefault((part.name, part.dim), {})[part.first] = tensor
    return whole | {name: torch.cat([own[first] for first in sorted(own)], dim) for (name, dim), own in parts.items()}
