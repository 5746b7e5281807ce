"""Motet: trains multimodal LLMs on PyTorch without the idle time that heterogeneous data and modules cause.

motet.compose(llm, {"image": tower})                HF models that are built or loaded, as one multimodal model
motet.apply(mllm, plan, optimizer).step(batch)      a Plan in a training loop of one's own (docs/loops.md)

Importing `motet` or its torch-free half (`core`, `cost`, `balance`) never imports torch; these two functions do.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["apply", "compose"]

__version__ = "0.1.0"

_MODULES = {"apply": "motet.planning.apply", "compose": "motet.models.compose"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
