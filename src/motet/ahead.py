"""What a module makes of a microbatch's lengths and places alone, before a pass asks for it.

Who sees whom becomes tables of blocks and lists of keys, which take the host some time (`models/asked.py`). The thread
that loads makes them with the microbatch, and a pass finds them. What nobody has made, the first pass that asks for it
makes by the same code, and later passes of the microbatch find it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, TypeVar

_T = TypeVar("_T")


class MadeAhead:
    """What modules have made of one microbatch: module -> what it is of -> the thing.

    Example:
        >>> made = MadeAhead()
        >>> with finding("backbone", made):
        ...     found("table", lambda: 1), found("table", lambda: 2)
        (1, 1)
        >>> found("table", lambda: 3)
        3
    """

    def __init__(self) -> None:
        self.by_module: dict[str, dict[Hashable, Any]] = {}


class _Active(local):
    made: dict[Hashable, Any] | None = None


_active = _Active()


@contextmanager
def finding(module: str, made: MadeAhead) -> Iterator[None]:
    """In the block, a module runs on a microbatch: `found` finds what has been made of that, in this thread alone."""
    before, _active.made = _active.made, made.by_module.setdefault(module, {})
    try:
        yield
    finally:
        _active.made = before


def found(key: Hashable, make: Callable[[], _T]) -> _T:
    """What `make` makes: what it has made before for this key, if it has. Outside of `finding` it makes it anew.

    key: all that the thing follows from.
    """
    made = _active.made
    if made is None:
        return make()
    if key not in made:
        made[key] = make()
    return made[key]  # type: ignore[no-any-return]
