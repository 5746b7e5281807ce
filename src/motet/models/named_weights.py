"""Weights of a model chosen by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from motet.core.errors import UserError


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches a pattern: * stands for any characters, dots too, ? for one, [0-3] for one of these."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_lora(name: str) -> bool:
    """Whether a parameter's name is that of a LoRA adapter, as `peft` names them."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def weights_named(model: nn.Module, pattern: str, where: str) -> list[nn.Parameter]:
    """The weights whose names match a pattern; they may be on meta. A shared weight has one name, as in checkpoints.

    where: the key that has the pattern, for the error. Raises UserError if no weight matches.
    """
    named = dict(model.named_parameters())
    if matching := [weight for name, weight in named.items() if is_named(name, [pattern])]:
        return matching
    close = difflib.get_close_matches(pattern.replace("*", ""), named, n=1) or list(named)[:1]
    raise UserError(f"{where}: no weight of the model matches {pattern!r}; a name is, for example, {close[0]!r}")
