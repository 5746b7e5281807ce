"""The one backend switch: the same functions from the native core, or from the readable reference.

Both modules have the functions that `_native.pyi` declares, with the same arguments and results. Where the native core
is not built, "native" means fallback.py, with one warning; the ranks of a job must agree on `ACTIVE_BACKEND`.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Literal

from motet.core.errors import ArgumentError

Backend = Literal["native", "reference"]

try:
    _native: ModuleType | None = import_module("motet.balance._native")
except ModuleNotFoundError:  # A core that is there but broken is an error of its own.
    _native = None

ACTIVE_BACKEND: Literal["native", "fallback"] = "fallback" if _native is None else "native"
"""What backend="native" computes with. The two place items differently, so all ranks must have the same."""


def algorithms(backend: Backend) -> ModuleType:
    """The module that computes; raises ArgumentError for a name that is no backend."""
    match backend:
        case "native":
            return _native or _fallback()
        case "reference":
            return import_module("motet.balance.reference")
    raise ArgumentError(f"backend is {backend!r}; it must be 'native' or 'reference'.")


@cache
def _fallback() -> ModuleType:
    warnings.warn(
        "The native core of motet.balance is not built for this Python. Packed placements come from numpy, some "
        "5 times slower and a little less even; all others from the Python reference, some 100 times slower. "
        "To build it, install Motet where there is a C++20 compiler.",
        stacklevel=3,
    )
    return import_module("motet.balance.fallback")
