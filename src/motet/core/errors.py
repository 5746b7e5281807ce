"""The exceptions of Motet, and what is known of where an exception comes from.

A UserError means that the input is wrong, not the program. Any other exception is a defect, or the world around: a full
disk, no memory, a rank that died. `motet/crash.py` says either to the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_ORIGIN = "motet_origin"
_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "unable to allocate")


class UserError(Exception):
    """Wrong input by the user. Its text is one sentence: what is wrong, where, and what would be right.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """


class ArgumentError(UserError, ValueError):
    """A wrong argument to a function of the library: a ValueError to who writes Python, a sentence to who does not."""


class JointUserError(UserError):
    """A UserError that all ranks raise alike, so that one of them is enough to print it."""


class RankFailure(RuntimeError):
    """Another rank has failed, and says why itself; this rank only ends with it."""


@dataclass(frozen=True)
class Origin:
    """Where an exception comes from.

    rank:          the rank that met it; None outside of a process group.
    speaks:        False on a rank that has nothing to add to what another rank says.
    folder:        where its traceback is written; None: the folder for temporary files.
    memory_advice: what the user can do if memory ran out.
    """

    rank: int | None = None
    speaks: bool = True
    folder: Path | None = None
    memory_advice: str = ""


@contextmanager
def originating(**known: Any) -> Iterator[None]:
    """Note fields of the Origin on every exception that leaves the block."""
    try:
        yield
    except BaseException as error:
        note_origin(error, **known)
        raise


def note_origin(error: BaseException, **known: Any) -> None:
    """Note fields of the Origin on an exception."""
    setattr(error, _ORIGIN, replace(origin_of(error), **known))


def origin_of(error: BaseException) -> Origin:
    """What was noted on an exception."""
    origin = getattr(error, _ORIGIN, None)
    return origin if isinstance(origin, Origin) else Origin()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left, on the host or on a device."""
    # PyTorch raises a RuntimeError of its own for a device, and a plain one for the host.
    told = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in told for words in _NO_MEMORY)
    )
