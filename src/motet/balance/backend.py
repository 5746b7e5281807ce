"""The one backend switch: the same functions from the native core, or from the readable reference.

Both modules have the functions that `_native.pyi` declares, with the same arguments and results.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

from motet.balance import reference
from motet.core.errors import ArgumentError

try:
    from motet.balance import _native
except ImportError as error:
    raise ImportError("The native core of motet.balance is not built for this Python: run `make venv`.") from error

Backend = Literal["native", "reference"]


def algorithms(backend: Backend) -> ModuleType:
    """The module that computes; raises ArgumentError for a name that is no backend."""
    match backend:
        case "native":
            return _native
        case "reference":
            return reference
    raise ArgumentError(f"backend is {backend!r}; it must be 'native' or 'reference'.")
