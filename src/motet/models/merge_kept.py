"""What a merge of the user's own keeps for backward, found by running it once on a few rows.

Nothing else says it: a function has no modules, and what a module multiplies, gates or drops out is in its `forward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ROWS = 64
_SHARES = (1.0, 0.25)
"""Of the rows, those that are of encoders. What is kept of a row may be more of theirs, or more of text."""


def kept_of_merge(merge: Callable[..., Any], width: int, encoders: Collection[str]) -> int | None:
    """Elements of a row that a merge keeps, beside its output and the rows of encoders, which count elsewhere.

    As much of each row: what grows with the square of a sequence is not seen. width: of rows. encoders: that it merges.

    None if it does not run: on the CPU, in float32, with weights of zero, on two sequences of a few rows.
    """
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
            return max(_kept(merge, width, tuple(encoders), share) for share in _SHARES)
    except Exception:  # Whatever code of the user's own raises where it expects its own data.
        return None


def _kept(merge: Callable[..., Any], width: int, encoders: tuple[str, ...], share: float) -> int:
    places = np.array_split(np.arange(round(_ROWS * share)), len(encoders)) if encoders else []
    positions = {name: torch.from_numpy(each) for name, each in zip(encoders, places, strict=True)}
    features = {name: torch.zeros(len(each), width, requires_grad=True) for name, each in positions.items()}
    sequences = SimpleNamespace(
        tokens=torch.zeros(_ROWS, dtype=torch.int64),
        targets=torch.arange(_ROWS) % (_ROWS // 2) > 0,
        offsets=torch.tensor([0, _ROWS // 2, _ROWS], dtype=torch.int32),
        feature_positions=positions,
    )
    called = _without_values(merge) if isinstance(merge, nn.Module) else merge
    own = [*called.parameters(), *called.buffers()] if isinstance(called, nn.Module) else []
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # Held, so that no other tensor gets its place.
        return tensor

    embeds = torch.zeros(_ROWS, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        merged = called(embeds.clone(), features, sequences)
    elsewhere = [merged, *features.values(), *positions.values(), sequences.tokens, sequences.targets, *own]
    for tensor in elsewhere:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return math.ceil(sum(map(_elements, kept.values())) / _ROWS)


def _elements(tensor: Tensor) -> float:
    """The elements of a tensor's memory as they are in the type of passes; of a mask as if that has two bytes. Places
    of rows are left out: a number a row.
    """
    size_bytes = tensor.untyped_storage().nbytes()
    if tensor.is_floating_point():
        return size_bytes / torch.float32.itemsize
    return size_bytes / 2 if tensor.dtype == torch.bool else 0


def _without_values(merge: nn.Module) -> nn.Module:
    """A copy with weights of zero, in float32: those of the merge may have no values yet, or be shared out."""
    zeros: dict[int, Any] = {}
    for parameter in merge.parameters():
        of_zeros = torch.zeros(
            parameter.shape, dtype=torch.float32 if parameter.is_floating_point() else parameter.dtype
        )
        zeros[id(parameter)] = nn.Parameter(of_zeros, requires_grad=parameter.requires_grad)
    zeros |= {id(each): torch.zeros(each.shape, dtype=each.dtype) for each in merge.buffers() if each.is_meta}
    return deepcopy(merge, zeros)
