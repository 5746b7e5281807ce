"""Whether an optimizer updates each element of a weight by itself, as it shows on small weights.

Ranks have some weights each, and parts of those that they share. No class says what its `step` reads; what it makes of
a weight, and of the parts of it, does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

_SIDE, _NUM_STEPS = 4, 3
"""Of the weights, [_SIDE, _SIDE] or fewer dimensions; optimizers begin to differ behind their first step."""
_HALVES = slice(0, _SIDE // 2), slice(_SIDE // 2, _SIDE)
_ALIKE = "params", "lr", "initial_lr", "weight_decay"
"""What groups may have otherwise, of which one shows how all of them are updated."""
_TOLERANCE = 1e-2
"""Of the largest update: rounding is far below it."""


def mixes(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer that has taken no step updates an element by, beside its own gradients.

    "weights": by those of other weights; "elements": by those of others of its weight; "": by none, or by what cannot
    be found out, as where updates are drawn.

    Example:
        >>> mixes(torch.optim.AdamW([nn.Parameter(torch.ones(2, 3))]))
        ''
        >>> mixes(torch.optim.Adafactor([nn.Parameter(torch.ones(2, 3))]))
        'elements'
    """
    if optimizer.state:
        return ""
    found, seen = "", set()
    for group in optimizer.param_groups:
        watched = max(group["params"], key=lambda each: each.ndim == 2, default=None)
        kind = str({name: value for name, value in group.items() if name not in _ALIKE})
        if watched is None or kind in seen:
            continue
        seen.add(kind)
        try:
            found = _mixes(optimizer, watched, min(watched.ndim, 2)) or found
        except Exception:  # What it needs of real weights is not known.
            continue
        if found == "weights":
            break
    return found


def _mixes(optimizer: torch.optim.Optimizer, watched: nn.Parameter, ndim: int) -> str:
    everything = (slice(None),) * ndim
    whole = _updated(optimizer, watched, everything)
    if _differ(whole, _updated(optimizer, watched, everything, seed=1)):
        return ""
    if _differ(whole, _updated(optimizer, watched, everything, of_others=100.0)):
        return "weights"
    for dim in range(ndim):
        parts = [_updated(optimizer, watched, (*everything[:dim], half, *everything[dim + 1 :])) for half in _HALVES]
        if _differ(whole, torch.cat(parts, dim)):
            return "elements"
    return ""


def _differ(first: Tensor, second: Tensor) -> bool:
    return bool((first - second).abs().max() > _TOLERANCE * first.abs().max())


def _updated(
    optimizer: torch.optim.Optimizer,
    watched: nn.Parameter,
    part: Sequence[slice],
    of_others: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """What a copy of an optimizer adds to a part of a small weight in the place of `watched`.

    of_others: the scale of the gradients of all other weights. seed: of what it draws.
    """
    generator = torch.Generator().manual_seed(0)
    weights: dict[int, nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for each in group["params"]:
            dtype = each.dtype if each.dtype == torch.float64 else torch.float32
            values = torch.randn((_SIDE,) * min(each.ndim, 2), generator=generator, dtype=dtype)
            values = values[tuple(part)].contiguous() if each is watched else values
            memo[id(each)] = weights[id(each)] = nn.Parameter(values.to(each.device))
    copied = _copied(optimizer, memo)
    for group in copied.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = 0.01  # A schedule may begin with 0.
    own = weights[id(watched)]
    before = own.detach().clone()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(_NUM_STEPS):
            for key, weight in weights.items():
                whole = torch.randn((_SIDE,) * weight.ndim, generator=generator, dtype=weight.dtype)
                if weight.ndim:
                    whole[: _SIDE // 2] *= 10
                whole = whole[tuple(part)].contiguous() if key == id(watched) else of_others * whole
                weight.grad = whole.to(weight.device)
            type(copied).step(copied)  # An attribute `step`, as of schedulers, is that of the optimizer itself.
    return own.detach() - before


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy with all attributes, which `deepcopy` leaves out, and without hooks. memo: as of `deepcopy`."""
    copied = memo[id(optimizer)] = object.__new__(type(optimizer))
    for inner in vars(optimizer).values():
        if isinstance(inner, torch.optim.Optimizer):
            _copied(inner, memo)
    vars(copied).update(deepcopy(vars(optimizer), memo))
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(copied, name, OrderedDict())
    return copied
