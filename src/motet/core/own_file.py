"""Python files of the user's own, imported by their path."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from motet.core.errors import UserError

NAMED_IN_FILE = re.compile(r"(.+\.py):([\w.]+)")
""""folder/file.py:Name": what a file of the user's own defines."""


def import_file(where: str, file: str | Path) -> ModuleType:
    """The module that a Python file makes, executed once in a process. where: the key of the recipe.

    Raises UserError for a file that is missing, or ends in an error.
    """
    path = Path(file).resolve()
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise UserError(f"{where}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before it is executed: dataclasses and pickles look a class's module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{where}: {path} cannot be imported ({type(error).__name__}: {error})") from error
    return module


def file_named(named: str) -> Path | None:
    """The file of what "folder/file.py:Name" or "package.module:name" names; None where there is none to be read.

    Example:
        >>> file_named("motet.core.own_file:file_named").name, file_named("nothing.at.all:name")
        ('own_file.py', None)
    """
    if found := NAMED_IN_FILE.fullmatch(named):
        file = found[1]
    else:
        try:
            spec = importlib.util.find_spec(named.partition(":")[0])
        except (ImportError, ValueError):
            return None
        file = "" if spec is None or spec.origin is None else spec.origin
    return Path(file) if file and Path(file).is_file() else None
