"""The only backend switch: algorithms from the native core, or from the readable reference.

Both modules have the functions that `_native.pyi` declares, with the same arguments and results. If the native core is
not built, "native" means fallback.py, with one warning. All ranks of a job must have the same `ACTIVE_BACKEND`.
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
except ModuleNotFoundError:  # Any other ImportError is a broken core, and must not be hidden.
    _native = None

ACTIVE_BACKEND: Literal["native", "fallback"] = "fallback" if _native is None else "native"
"""What backend="native" computes with. The two place items differently, so it must be the same on all ranks."""


def algorithms(backend: Backend) -> ModuleType:
    """The module with the algorithms of a backend; raises ArgumentError for an unknown one."""
    match backend:
        case "native":
            return _native or _fallback()
        case "reference":
            return import_module("motet.balance.reference")
    raise ArgumentError(f"backend is {backend!r}; it must be 'native' or 'reference'.")


@cache
def _fallback() -> ModuleType:
    warnings.warn(
        "The native core of motet.balance is not built for this Python. Packed placements come from numpy, about "
        "5 times slower and a little less even; all others from the Python reference, about 100 times slower. "
        "To build it, install Motet where there is a C++20 compiler.",
        stacklevel=3,
    )
    return import_module("motet.balance.fallback")
