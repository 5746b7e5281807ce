"""The exceptions of Motet, and the `Origin` that is noted on an exception.

A UserError means that the input is wrong. Any other exception is a defect of the program or a failure around it: a full
disk, no memory, a dead rank. `motet/crash.py` reports both to the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_ORIGIN = "motet_origin"
_WAITED = ("timed out waiting", "wait timeout after", "application timeout caused pair closure")
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "remote process exited",
)
_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "unable to allocate")


class UserError(Exception):
    """Wrong input by the user. Its text is one sentence: what is wrong, where, and what would be right.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """


class ArgumentError(UserError, ValueError):
    """A wrong argument to a function of the library: a ValueError in Python, one sentence on the command line."""


class JointUserError(UserError):
    """A UserError that all ranks raise alike, so that one rank prints it for all."""


class Stopped(SystemExit):
    """All ranks end alike, as they were asked to. A SystemExit that is none was raised by code of the user's own."""


class RankFailure(RuntimeError):
    """Another rank has failed and reports the reason; this rank ends without a report."""


@dataclass(frozen=True)
class Origin:
    """The circumstances of an exception.

    rank:          the rank that raised it; None outside of a process group.
    speaks:        whether this rank reports it; False if another rank reports the same.
    folder:        the folder for its traceback; None is the folder for temporary files.
    memory_advice: what the user can do if memory ran out.
    action:        what the rank executed: an action of a Program and the step, the step alone, or its loading.
    module:        the module of that action.
    saved:         what of the run is saved, in a sentence.
    waits_for:     the rank that it waited for; None where all wait for all.
    others:        what is known of the other ranks, as the rest of a sentence.
    """

    rank: int | None = None
    speaks: bool = True
    folder: Path | None = None
    memory_advice: str = ""
    action: str = ""
    module: str = ""
    saved: str = ""
    waits_for: int | None = None
    others: str = ""


@contextmanager
def originating(**known: Any) -> Iterator[None]:
    """Note fields of the Origin on every exception that leaves the block, unless something within has noted them."""
    try:
        yield
    except BaseException as error:
        complete_origin(error, **known)
        raise


def note_origin(error: BaseException, **known: Any) -> None:
    """Note fields of the Origin on an exception."""
    setattr(error, _ORIGIN, replace(origin_of(error), **known))


def complete_origin(error: BaseException, **known: Any) -> None:
    """Note those fields of the Origin on an exception that are not noted yet."""
    noted, none = origin_of(error), Origin()
    note_origin(error, **{key: value for key, value in known.items() if getattr(noted, key) == getattr(none, key)})


def origin_of(error: BaseException) -> Origin:
    """The Origin that was noted on an exception, or the default."""
    origin = getattr(error, _ORIGIN, None)
    return origin if isinstance(origin, Origin) else Origin()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no memory left, on the host or on a device."""
    # PyTorch raises a subclass of RuntimeError for a device, and a plain RuntimeError for the host.
    message = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in message for words in _NO_MEMORY)
    )


def has_waited_in_vain(error: BaseException) -> bool:
    """Whether an exception says that another rank has not come in time."""
    return _says(error, _WAITED)


def has_lost_rank(error: BaseException) -> bool:
    """Whether an exception says that the connection to another rank is gone."""
    return _says(error, _LOST)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(each in str(error).lower() for each in words)
