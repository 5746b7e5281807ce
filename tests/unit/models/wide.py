"""What transformers rounds to float32 by name, kept in float64: angles of positions, resized tables, softmax, ..."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """In the block, what asks torch for float32 gets float64. Tensors that are float32 already stay so.

    Example:
        >>> with InFloat64():
        ...     torch.zeros(1, dtype=torch.float64).float().dtype, torch.zeros(1).to(torch.float32).dtype
        (torch.float64, torch.float64)
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        given = {name: _wide(each) for name, each in (kwargs or {}).items()}
        return function(*map(_wide, args), **given)


def _wide(given: Any) -> Any:
    return torch.float64 if given is torch.float32 else given
