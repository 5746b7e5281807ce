"""The one backend switch of the simulator: the native engine, or the readable reference.

Both give the same spans, to the bit. If the native engine is not built, "native" falls back to the reference, with one
warning.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

from motet.balance.backend import Backend
from motet.core.errors import ArgumentError

try:
    _engine: ModuleType | None = import_module("motet.simulate._engine")
except ModuleNotFoundError:  # An engine that is there but broken is an error of its own.
    _engine = None


def native_engine() -> ModuleType | None:
    """motet.simulate._engine, or None where it is not built."""
    return _engine


def engine(backend: Backend) -> ModuleType | None:
    """The native engine, or None for the reference. Raises ArgumentError for a name that is no backend."""
    match backend:
        case "native":
            if _engine is None:
                _warn()
            return _engine
        case "reference":
            return None
    raise ArgumentError(f"backend is {backend!r}; it must be 'native' or 'reference'.")


@cache
def _warn() -> None:
    warnings.warn(
        "The native engine of motet.simulate is not built for this Python. Programs are simulated by the Python "
        "reference, some 40 times slower, with the same results. To build it, install Motet where there is a C++20 "
        "compiler.",
        stacklevel=4,
    )
