"""What the attention of layers asks of its extents, by which these know what to make before a pass.

All that is asked follows from a layer's sizes, its window, its scores and its dropout, which the model's config says.
Where a layer asks for something else, extents make it at that point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from motet.models.scores import Scoring

_CAPS, _SINKS = "attn_logit_softcapping", "sinks"
"""What layers of Gemma 2 and of gpt-oss call the soft cap of their scores, and their sinks."""


class Asked(NamedTuple):
    """heads, kv_heads: of this rank; 0: not known. is_scored: it has a soft cap or sinks.

    device, dtype: of queries. window, dropout: as of `TableItems.attend`.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    dropout: float = 0.0
    is_scored: bool = False

    @classmethod
    def by(cls, query: Tensor, key: Tensor, how: Scoring) -> Asked:
        """What a call asks. query [1, heads, rows, head_dim], key [1, kv_heads, keys, head_dim]."""
        is_scored = how.softcap is not None or how.sinks is not None
        sizes = query.shape[1], key.shape[1], query.shape[3]
        return cls(query.device, query.dtype, *sizes, how.window, how.dropout, is_scored)


def asked_by(layers: Iterable[nn.Module], device: torch.device, dtype: torch.dtype) -> Iterator[Asked]:
    """What layers ask that have no windows and need not say how many heads they have, such as those of encoders.

    device, dtype: on which and in which they compute.
    """
    for layer in layers:
        if (attention := attention_of(layer)) is not None:
            yield Asked(device, dtype, 0, 0, _head_dim(attention), dropout=dropout_of(attention))


def attention_of(layer: nn.Module) -> nn.Module | None:
    """The module of a layer that attends; None if there is none."""
    return next((module for module in layer.modules() if _head_dim(module)), None)


def dropout_of(attention: nn.Module) -> float:
    """The share of its weights that an attention drops out when it is trained; 0 if none of its weights are."""
    if not any(parameter.requires_grad for parameter in attention.parameters()):
        return 0.0  # Frozen parts are in eval mode.
    rates = (each.p if isinstance(each, nn.Dropout) else each for each in _named(attention, "dropout"))
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def has_scores(attention: nn.Module) -> bool:
    """Whether an attention has a soft cap or sinks."""
    return any(getattr(attention, name, None) is not None for name in (_CAPS, _SINKS))


def _named(module: nn.Module, part: str) -> Iterator[object]:
    """Attributes and submodules of a module with this in their names."""
    yield from (value for name, value in vars(module).items() if part in name)
    yield from (child for name, child in module.named_children() if part in name)


def _head_dim(module: nn.Module) -> int:
    """The width of a head, by the names that transformers and layers of Motet's give it; 0 of other modules."""
    shape = getattr(module, "shape", None)
    found = getattr(shape, "head_width", 0)
    for name in ("head_dim", "attention_head_size"):
        found = found or getattr(module, name, 0)
    return found if isinstance(found, int) else 0
