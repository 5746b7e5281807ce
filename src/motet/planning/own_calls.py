"""What a user sets on modules and weights: hooks, forwards of their own, parametrizations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from motet.core.errors import UserError
from motet.models.block import HOOKS, Block

HOOK_ON_WEIGHT = (
    "has a hook on its gradient, which a plan may compute elsewhere, in parts and by microbatches: remove it."
)
_NO_HOOKS: frozenset[tuple[str, int]] = frozenset()
_OF_WEIGHTS = "_backward_hooks", "_post_accumulate_grad_hooks"


def has_hooks(weight: nn.Parameter) -> bool:
    """Whether a weight has a hook on its gradient."""
    return bool(_hooks(weight, _OF_WEIGHTS))


class _Set(NamedTuple):
    """What is set on a module. hooks: their numbers, which no other hook gets."""

    hooks: frozenset[tuple[str, int]]
    forward: Any
    is_parametrized: bool

    @classmethod
    def on(cls, module: nn.Module) -> _Set:
        """What is set on it now."""
        return cls(_hooks(module, HOOKS), vars(module).get("forward"), "parametrizations" in module._modules)

    def is_more_than(self, before: _Set) -> bool:
        """Whether anything has been set since, rather than removed."""
        is_other = self.forward is not before.forward or self.is_parametrized != before.is_parametrized
        return is_other or not self.hooks <= before.hooks


class OwnCalls:
    """Tells what is set on a model from what it has when this is made.

    runs_whole: whether a block is never run in halves.
    """

    def __init__(self, model: nn.Module, runs_whole: Callable[[Block], bool]) -> None:
        self._weights = [(name, each, _hooks(each, _OF_WEIGHTS)) for name, each in model.named_parameters()]
        self._modules = [
            (name, each, _Set.on(each))
            for name, each in model.named_modules()
            if name and not (isinstance(each, Block) and runs_whole(each))
        ]

    def check(self) -> None:
        """Raise UserError for what was set since, but on blocks: the hooks of those run under any Plan."""
        for name, weight, before in self._weights:
            if not _hooks(weight, _OF_WEIGHTS) <= before:
                raise UserError(f"{name} {HOOK_ON_WEIGHT}")
        for name, module, were in self._modules:
            if _Set.on(module).is_more_than(were):
                raise UserError(
                    f"{name} was given a hook, a forward or a parametrization behind motet.apply, which alone tells "
                    "whether it runs under the plan: set it before"
                )


def _hooks(owner: object, kinds: Iterable[str]) -> frozenset[tuple[str, int]]:
    found = [(kind, number) for kind in kinds for number in getattr(owner, kind) or ()]
    return frozenset(found) if found else _NO_HOOKS
