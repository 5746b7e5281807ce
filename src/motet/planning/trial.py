"""Trials: something that every rank runs in a process of its own, and that may end badly on some ranks alone.

A rank that runs out of memory leaves the others in a collective that will never end. So a trial runs in processes that
can be killed: those that started them agree now and then on how far they are, on a group of their own, and what one
rank met is what all of them are told. Each trial begins as training does, with nothing left over from the one before.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from motet.core.errors import JointUserError, UserError, is_out_of_memory
from motet.train.world import Meeting, World, open_store

_POLL_S = 0.5
_GRACE_S = 3.0
"""What one rank met, others may meet as its consequence: what is waited for after the first, to hear of the cause."""
_LEAVE_S = 20.0
"""In which a process that has answered must have ended."""


class OutOfMemory(Exception):
    """At least one rank ran out of memory; raised on all."""


class RankOutcome(NamedTuple):
    """How a trial ended on one rank. value: where it is done; else what is said of it."""

    kind: Literal["done", "wrong", "memory", "failed"]
    value: Any


TrialTask = Callable[[Meeting, Any], Any]
"""What is run, at the top of a module, from an argument that can be pickled: what it returns is the rank's answer."""


class Trials:
    """Runs trials one after the other; all ranks alike, in a `with` block of `open_trials`."""

    def __init__(self, world: World, address: tuple[str, int]) -> None:
        self._world, self._address, self._number = world, address, 0
        self._context = mp.get_context("forkserver")

    def run(self, task: TrialTask, argument: Any) -> list[Any]:
        """What the task returned on every rank.

        Raises, on all ranks alike, OutOfMemory; JointUserError for a UserError; RuntimeError for anything else.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        place = (*self._address, self._number, self._world.rank, self._world.num_ranks)
        process = self._context.Process(target=_answer, args=(task, argument, place, sender))
        self._number += 1
        process.start()
        sender.close()
        try:
            answers = self._agree(process, receiver)
            if all(answer is not None and answer.kind == "done" for answer in answers):
                process.join(_LEAVE_S)
        finally:
            process.kill()
            process.join()
            receiver.close()
        return _verdict(answers)

    def _agree(self, process: Any, receiver: Connection) -> list[RankOutcome | None]:
        """Every rank's answer; None of those that were still running when others had ended badly."""
        own: RankOutcome | None = None
        ended_s: float | None = None
        while True:
            if own is None and receiver.poll(_POLL_S):
                own = _received(process, receiver)
            waited_s = 0.0 if ended_s is None else time.monotonic() - ended_s
            told = self._world.gather((own, waited_s))
            answers = [answer for answer, _ in told]
            if None not in answers or max(waited for _, waited in told) > _GRACE_S:
                return answers
            if ended_s is None and any(answer is not None and answer.kind != "done" for answer in answers):
                ended_s = time.monotonic()


@contextmanager
def open_trials(world: World, preload: str) -> Iterator[Trials]:
    """preload: the module of the tasks, imported once for all trials. A collective."""
    mp.get_context("forkserver").set_forkserver_preload([preload])
    host = os.environ.get("MASTER_ADDR", "localhost")
    with world.together():
        store = open_store(host, 0, serves=True) if world.is_first else None
    address = world.gather((host, store.port) if store is not None else None)[0]
    yield Trials(world, address)
    world.barrier()  # The store must be there as long as any rank's trial is.


def _answer(task: TrialTask, argument: Any, place: tuple[str, int, int, int, int], sender: Connection) -> None:
    """The trial's process, on one rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    host, port, number, rank, num_ranks = place
    try:
        store = dist.PrefixStore(f"trial_{number}", open_store(host, port, serves=False))
        sender.send(RankOutcome("done", task(Meeting(store, rank, num_ranks), argument)))
    except BaseException as error:
        if isinstance(error, UserError):
            sender.send(RankOutcome("wrong", str(error)))
        else:
            sender.send(RankOutcome("memory" if is_out_of_memory(error) else "failed", traceback.format_exc()))
        # Not by the ordinary way, which would wait for the other ranks, as they may wait for this one.
        os._exit(1)


def _end_with_parent() -> None:
    """The parent may be killed, by torchrun say, with no time to kill this."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _received(process: Any, receiver: Connection) -> RankOutcome:
    try:
        answer: RankOutcome = receiver.recv()
    except EOFError:
        process.join()
        # Nothing else than the system, which has no memory left, kills without a word.
        kind: Literal["memory", "failed"] = "memory" if process.exitcode == -signal.SIGKILL else "failed"
        return RankOutcome(kind, f"the process ended with exit code {process.exitcode}")
    return answer


def _verdict(answers: list[RankOutcome | None]) -> list[Any]:
    by_kind = {answer.kind: (rank, answer.value) for rank, answer in reversed([*enumerate(answers)]) if answer}
    if "wrong" in by_kind:
        raise JointUserError(by_kind["wrong"][1])
    if "memory" in by_kind:
        raise OutOfMemory
    if "failed" in by_kind:
        rank, told = by_kind["failed"]
        raise RuntimeError(f"rank {rank} of a trial failed with {told.strip().splitlines()[-1]}\n{told}")
    return [answer.value for answer in answers if answer]
