"""What a loop of one's own has set in the groups of its optimizer: rates, decay and the like, by the names of weights.

A rank has the weights of its part alone, and under another Plan it has others. So options are stored by weight, and a
group takes those of its weights, as torch's `Optimizer.load_state_dict` restores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from motet.core.errors import UserError
from motet.models.fused import NamedSlice, stored_names

Options = dict[str, float | tuple[float, ...]]
"""Option of a group -> its number or numbers, e.g. {"lr": 0.01, "betas": (0.9, 0.999)}."""
OptionsOfWeights = tuple[tuple[Options, tuple[str, ...]], ...]
"""Options, and the weights that have them."""


def options_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptionsOfWeights:
    """The options of this rank's weights, group by group; `initial_lr` of a scheduler of torch is one of them."""
    names = _names(model)
    return tuple(
        (_numbers(group), tuple(names[id(weight)] for weight in group["params"] if id(weight) in names))
        for group in optimizer.param_groups
    )


def over_ranks(of_ranks: Iterable[OptionsOfWeights]) -> OptionsOfWeights:
    """The options of all weights, from those of each rank; weights of the same options stand together.

    Example:
        >>> over_ranks([(({"lr": 0.1}, ("a",)),), (({"lr": 0.1}, ("b", "a")), ({"lr": 0.2}, ("c",)))])
        (({'lr': 0.1}, ('a', 'b')), ({'lr': 0.2}, ('c',)))
    """
    together: dict[tuple[tuple[str, Any], ...], dict[str, None]] = {}
    for options, names in (each for of_rank in of_ranks for each in of_rank):
        if names:
            together.setdefault(tuple(sorted(options.items())), {}).update(dict.fromkeys(names))
    return tuple((dict(options), tuple(names)) for options, names in together.items())


def restore_options(model: nn.Module, optimizer: torch.optim.Optimizer, stored: OptionsOfWeights) -> None:
    """Give each group the options that its weights had; one without any takes those of all weights, if these are alike.

    Raises UserError if the weights of a group had several.
    """
    names, of_weight = _names(model), {name: options for options, all_names in stored for name in all_names}
    alike = stored[0][0] if len(stored) == 1 else {}  # A rank may hold frozen weights alone.
    for group in optimizer.param_groups:
        own = [name for weight in group["params"] if (name := names.get(id(weight))) in of_weight]
        if other := next((name for name in own if of_weight[name] != of_weight[own[0]]), ""):
            raise UserError(
                f"the checkpoint has other options of the optimizer for {other} than for {own[0]}, which are in one "
                "group now; make the groups as they were."
            )
        for option, value in (of_weight[own[0]] if own else alike).items():
            tensor = group.get(option)  # Groups may share one.
            group[option] = torch.full_like(tensor, value) if isinstance(tensor, Tensor) else value


def _names(model: nn.Module) -> dict[int, str]:
    """The id of each weight -> its name, that of the whole tensor of which it is a part."""
    keys = stored_names(model)
    parts = {name: NamedSlice.of(keys[name]) for name, _ in model.named_parameters()}
    return {
        id(weight): keys[name] if (of_whole := parts[name]) is None else of_whole.name
        for name, weight in model.named_parameters()
    }


def _numbers(group: Mapping[str, Any]) -> Options:
    """The finite numbers among a group's options: switches say how it is computed, and are those of this run."""
    numbers: Options = {}
    for option, value in group.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        several = plain if isinstance(plain, tuple | list) else (plain,)
        if option != "params" and all(type(one) in (int, float) and math.isfinite(one) for one in several):
            numbers[option] = tuple(map(float, several)) if isinstance(plain, tuple | list) else float(plain)
    return numbers
