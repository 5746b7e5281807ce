"""What a pool gives tasks to: the contract of a worker, and how it may die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True)
class Death:
    """Why a worker is dead.

    how:     a clause, "was killed by SIGSEGV".
    by_task: whether its task may have killed it. It has not where the machine of the worker is gone.
    """

    how: str
    by_task: bool = True


class Worker(Protocol):
    """What a pool gives tasks to, one at a time: a process of this machine, or an actor.

    name: of the kind, for messages: "worker process".
    """

    name: str

    def ready(self, may_wait: Callable[[], bool]) -> None:
        """Wait until it can take tasks. Raises UserError if it never will.

        may_wait: asked while there is no room for it: whether there may be room later, however late. What it raises,
        ends the waiting.
        """

    def run(self, task: Any) -> tuple[bool, Any]:
        """Whether a task succeeded, and its result or exception. Raises EOFError or OSError if the worker is dead."""

    def cause_of_death(self, error: Exception) -> Death:
        """Why `run` raised `error`. A worker that hangs is killed. Raises UserError if no other can be started."""

    def kill(self) -> None:
        """End it from another thread than that of `run`, which then raises."""

    def end(self) -> None:
        """End it, and wait until it has ended."""


StartWorker: TypeAlias = Callable[["HandlerParts", float], Worker]
"""Starts a worker for a handler, given as (function that makes it, its arguments), with the seconds a task may take.

It does not wait until the worker is ready. Raises OSError if it cannot be started.
"""
HandlerParts: TypeAlias = tuple[Callable[..., Callable[[Any], Any]], tuple[Any, ...]]
