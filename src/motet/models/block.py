"""A layer that is sharded and recomputed by itself, also on a rank that has nothing to compute.

Hooks of a block's forward and backward start FSDP's collectives, so a rank without input must still run both. A block
that gets an empty tensor returns it by `take_part`, which gives the block's parameters zero gradients. So the hooks run
in the same order as on the other ranks, without compute and without dummy media.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from motet.absent import take_part
from motet.core.errors import UserError
from motet.dropout import draws_by_item, in_block

Halves = tuple[()] | tuple[Callable[..., Tensor], Callable[..., Tensor]]
"""The attention and the MLP of a layer: functions of the layer, and of what it is called with."""

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
"""The attributes of a module that have the hooks on its passes."""


class Block(nn.Module):
    """A wrapper of one layer with the same call; the first positional argument is the hidden states.

    recompute: free the activations of the layer after forward and compute them again in backward.
    skipped:   return the hidden states as they are: another stage, or another part of this one, runs the layer.
    entering:  changes hidden states that are not empty before the layer, such as by rows that are added to them.
    without_rows: what a rank without rows takes part in, a function of the hidden states: experts that ranks share.
    run:       computes the layer, a function of it and of what it is called with; None: the layer itself.
    number:    of the block in its module.
    halves:    of the layer, as in `contract`; () if it has none.
    half:      which half runs: the first (0), the second (1), or both (-1).
    held:      a function of what runs, which runs alike when backward calls it again (`RowParts.held`).
    """

    def __init__(self, inner: nn.Module, recompute: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.recompute = recompute
        self.skipped = False
        self.entering: Callable[[Tensor], Tensor] | None = None
        self.without_rows: Callable[[Tensor], Tensor] | None = None
        self.run: Callable[..., Any] | None = None
        self.number = 0
        self.halves: Halves = ()
        self.half = -1
        self.held: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # FSDP reduces a block's gradients when backward reaches its input, or at the very end if the input needs no
        # gradient. The time must not depend on a rank's data, or ranks would order their collectives differently.
        # It is set here and not in forward, because FSDP inspects the inputs before forward. A frozen block before
        # which nothing learns has no backward pass, on any rank.
        if torch.is_grad_enabled() and not hidden.requires_grad and not self.skipped and self._learns():
            hidden = hidden.detach().requires_grad_()
        return super().__call__(hidden, *args, **kwargs)

    def _learns(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.skipped:
            return hidden
        if hidden.numel() == 0:
            hidden = take_part(hidden, self.inner.parameters())
            if self.without_rows is None:
                return hidden
            # Recomputed, too: ranks with rows exchange them once more in the backward pass, and wait for this one.
            return hidden + self._kept_or_not(self.without_rows, hidden)
        if self.entering is not None:
            hidden = self.entering(hidden)
        return self._kept_or_not(self._running(), hidden, *args, **kwargs)

    def _kept_or_not(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns, whose activations are kept, or freed and computed again in backward."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.held(run), *args, use_reentrant=False, **kwargs)
        return run(*args, **kwargs)

    def _running(self) -> Callable[..., Any]:
        """The layer, or the half of it that runs.

        Where masks are drawn by item, a layer with halves runs as them, which draw the same together and apart.
        """
        if not self.halves or (self.half < 0 and not draws_by_item()):
            return in_block(self.number, partial(self.run, self.inner) if self.run else self.inner)
        first, second = (in_block(self.number, partial(run, self.inner), half) for half, run in enumerate(self.halves))
        if self.half >= 0:
            return second if self.half else first
        return lambda hidden, *args, **kwargs: second(first(hidden, *args, **kwargs), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Public attributes are those of the wrapped layer: models read them from their layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(super().__getattr__("inner"), name)


def _as_it_is(run: Callable[..., Any]) -> Callable[..., Any]:
    return run


def hooks_passes(module: nn.Module) -> bool:
    """Whether a module itself has a hook on its forward or backward pass."""
    return any(getattr(module, kind, None) for kind in HOOKS)


def is_called_otherwise(module: nn.Module) -> bool:
    """Whether a call of a module runs more than its class says: hooks on its passes, or a `forward` of its own."""
    return hooks_passes(module) or "forward" in vars(module)


def is_changed(module: nn.Module) -> bool:
    """Whether calling a module does more than its class says, or its weights are computed of others
    (`torch.nn.utils.parametrize`).
    """
    return is_called_otherwise(module) or is_parametrized(module)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of a module itself are compiled, as `module.compile()` has it."""
    return getattr(module, "_compiled_call_impl", None) is not None


def wrap_blocks(root: nn.Module, layers: Iterable[nn.Module], first: int = 0) -> list[Block]:
    """Replace each of `layers` inside `root` by a Block around it, and return the Blocks in the order of `layers`.

    first: the number of the first one. Raises UserError for a layer that stands twice in `layers`, and ValueError for
    one that is not a submodule of `root`.
    """
    layers = list(layers)
    if (count := len({id(layer) for layer in layers})) < len(layers):
        raise UserError(
            f"{type(root).__name__} runs one layer in several places ({len(layers)} layers, of which {count} are "
            "apart): each must be a layer of its own, as by copy.deepcopy."
        )
    owners = {
        child: (parent, name)
        for parent in root.modules()
        for name, child in parent._modules.items()
        if child is not None
    }
    blocks = []
    for number, layer in enumerate(layers, first):
        if layer not in owners:
            raise ValueError(f"a block of {type(root).__name__} ({type(layer).__name__}) is not one of its submodules")
        parent, name = owners[layer]
        block = layer if isinstance(layer, Block) else Block(layer)
        block.number = number
        parent._modules[name] = block
        blocks.append(block)
    return blocks


def outside_blocks(root: nn.Module) -> list[nn.Parameter]:
    """Parameters of `root` that no Block holds; FSDP shards them with the root."""
    parameters: dict[int, nn.Parameter] = {}
    stack = [root]
    while stack:
        module = stack.pop()
        if not isinstance(module, Block):
            parameters.update((id(p), p) for p in module.parameters(recurse=False))
            stack += reversed(list(module.children()))
    return list(parameters.values())


def plain_names(root: nn.Module) -> dict[str, str]:
    """Name in root.state_dict(), Blocks included -> the model's own name, for every entry."""
    wrapped = {
        f"{name}.inner." if name else "inner." for name, module in root.named_modules() if isinstance(module, Block)
    }

    def plain(name: str) -> str:
        parts = name.split(".")
        starts = (".".join(parts[: i + 1]) + "." for i in range(len(parts)))
        return ".".join(part for part, start in zip(parts, starts, strict=True) if start not in wrapped)

    return {name: plain(name) for name in root.state_dict()}
