"""Blocks compiled by `torch.compile`, each by itself, with graphs that serve all lengths.

What depends on lengths is attention: it knows an item's rows in Python, and would be compiled anew for each pack. So it
stays outside of graphs, as it is; a block is a graph on each side of it, whose number of rows is a symbol. Compiled is
what a Block wraps, inside of FSDP's hooks and of recomputation, so that collectives, and what is kept, are those of a
block that is not compiled. Stages of a Plan run the same Blocks; a half of one runs as it is. A backward pass of which
gradients of weights wait (`runtime/deferred.py`) cannot be compiled: its graph is made once, with all gradients.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from transformers import AttentionInterface

from motet.core.errors import UserError
from motet.dropout import drops_out
from motet.models.attention import ATTENTION, PackedItems, PaddedClips, QueriedItems
from motet.models.context_items import ContextItems
from motet.models.experts import RoutedExperts
from motet.models.shared_queries import SharedQueries
from motet.models.table_items import TableItems

_EXTENTS = (PackedItems, PaddedClips, QueriedItems, ContextItems, SharedQueries, TableItems)
_CPP_COMPILERS = ("g++", "clang++")
_MOST_KINDS = 64
"""Frames that layers share (that of transformers' base class) are compiled once for each kind of layer that has them;
torch gives up after eight."""


def why_not_compiled(modules: Iterable[nn.Module]) -> str:
    """What of a model `torch.compile` cannot have, in words; "" if it can have all of it."""
    modules = list(modules)
    if not any(getattr(module, "blocks", ()) for module in modules):
        return "no blocks that could be compiled"
    for module in modules:
        if any(isinstance(child, RoutedExperts) for child in module.modules()):
            return "experts, whose rows differ from step to step"
        if drops_out(module):
            return "dropout, whose masks are drawn by item; set it to 0"
    return ""


def check_compiler(device_type: str) -> None:
    """Raise UserError where this machine lacks what code is made with: a C++ compiler for a CPU, Triton for a GPU."""
    if device_type == "cpu" and not any(map(shutil.which, _CPP_COMPILERS)):
        raise UserError(
            f"run.compile needs a C++ compiler to make code for a CPU, and there is no {' or '.join(_CPP_COMPILERS)} "
            "here; install one, or remove run.compile."
        )
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError("run.compile needs the package triton to make code for a GPU; install it, or remove the key.")


def compile_blocks(modules: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Have each block of these modules compiled at its first call. backend: of `torch.compile`.

    From then on attention runs outside of graphs in the whole process.
    """
    _leave_attention_out()
    for module in modules:
        for block in getattr(module, "blocks", ()):
            block.inner.compile(dynamic=True, backend=backend)


@cache
def _leave_attention_out() -> None:
    AttentionInterface.register(ATTENTION, torch.compiler.disable(AttentionInterface()[ATTENTION]))
    for extents in _EXTENTS:
        extents.attend = torch.compiler.disable(extents.attend)  # type: ignore[method-assign]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_KINDS)


@contextmanager
def uncompiled(is_compiled: bool) -> Iterator[None]:
    """In the block, what is compiled runs as it is: where graphs of its own would serve few calls."""
    if not is_compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
