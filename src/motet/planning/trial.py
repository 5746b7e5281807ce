"""Trials: tasks that every rank runs in a process of its own, and that may fail on some ranks only.

A rank that runs out of memory leaves the others in a collective that never ends. So a trial runs in processes that can
be killed. The processes that started them gather the outcomes again and again, on a group of their own; a failure of
one rank is raised on all. Each trial starts afresh, as training does.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from motet.core.errors import JointUserError, UserError, is_out_of_memory
from motet.train.world import Meeting, World, open_store

_POLL_S = 0.5
"""How long a rank waits for its own trial between two rounds of gathering."""
_GRACE_S = 3.0
"""How long all wait after the first failure: it may be a consequence of another rank's, which is then heard of too."""
_EXIT_S = 20.0
"""How long a process that has answered may take to end."""


class OutOfMemory(Exception):
    """At least one rank ran out of memory; raised on all."""


class RankOutcome(NamedTuple):
    """How a trial ended on one rank. value: what the task returned if kind is "done", else the error's text."""

    kind: Literal["done", "wrong", "memory", "failed"]
    value: Any


TrialTask = Callable[[Meeting, Any], Any]
"""A function at the top of a module, with an argument that can be pickled; it returns the rank's answer."""


class Trials:
    """Runs trials one after the other, on all ranks alike. `open_trials` makes it."""

    def __init__(self, world: World, address: tuple[str, int]) -> None:
        self._world, self._address, self._number = world, address, 0
        self._context = mp.get_context("forkserver")

    def run(self, task: TrialTask, argument: Any, used: Collection[int] | None = None) -> list[Any]:
        """What the task returned on every rank that it ran on.

        used: these ranks, which its Meeting numbers anew, in order; None: all.
        Raises, on all ranks alike, OutOfMemory; JointUserError for a UserError; RuntimeError for anything else.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        ranks = sorted(range(self._world.num_ranks) if used is None else used)
        rank = ranks.index(self._world.rank) if self._world.rank in ranks else None
        identity = (*self._address, self._number, rank, len(ranks))
        process = self._context.Process(target=_run_task, args=(task, argument, identity, sender))
        self._number += 1
        process.start()
        sender.close()
        try:
            outcomes = self._gather_outcomes(process, receiver)
            if all(outcome is not None and outcome.kind == "done" for outcome in outcomes):
                process.join(_EXIT_S)
        finally:
            process.kill()
            process.join()
            receiver.close()
        answers = _answers(outcomes)
        return [answers[rank] for rank in ranks]

    def _gather_outcomes(self, process: Any, receiver: Connection) -> list[RankOutcome | None]:
        """The outcome on every rank; None for a rank that was still running when others had failed."""
        outcome: RankOutcome | None = None
        failed_s: float | None = None
        while True:
            if outcome is None and receiver.poll(_POLL_S):
                outcome = _received(process, receiver)
            waited_s = 0.0 if failed_s is None else time.monotonic() - failed_s
            gathered = self._world.gather((outcome, waited_s))
            outcomes = [each for each, _ in gathered]
            if None not in outcomes or max(waited_s for _, waited_s in gathered) > _GRACE_S:
                return outcomes
            if failed_s is None and any(each is not None and each.kind != "done" for each in outcomes):
                failed_s = time.monotonic()


@contextmanager
def open_trials(world: World, preload: str) -> Iterator[Trials]:
    """Trials on the ranks of a world. preload: the module of the tasks, imported once for all trials. A collective."""
    mp.get_context("forkserver").set_forkserver_preload([preload])
    host = os.environ.get("MASTER_ADDR", "localhost")
    with world.together():
        store = open_store(host, 0, serves=True) if world.is_first else None
    address = world.gather((host, store.port) if store is not None else None)[0]
    yield Trials(world, address)
    world.barrier()  # The store must be there as long as any rank's trial is.


def _run_task(
    task: TrialTask, argument: Any, identity: tuple[str, int, int, int | None, int], sender: Connection
) -> None:
    """What the process of a trial runs on one rank. identity: host, port, trial, rank, number of ranks; without a rank,
    the trial is not for this one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    host, port, number, rank, num_ranks = identity
    if rank is None:
        sender.send(RankOutcome("done", None))
        return
    try:
        store = dist.PrefixStore(f"trial_{number}", open_store(host, port, serves=False))
        sender.send(RankOutcome("done", task(Meeting(store, rank, num_ranks), argument)))
    except BaseException as error:
        if isinstance(error, UserError):
            sender.send(RankOutcome("wrong", str(error)))
        else:
            sender.send(RankOutcome("memory" if is_out_of_memory(error) else "failed", traceback.format_exc()))
        # An ordinary exit would wait for the other ranks, and they may wait for this one.
        os._exit(1)


def _end_with_parent() -> None:
    """End this process with its parent, which torchrun may kill without time to end its own children."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _received(process: Any, receiver: Connection) -> RankOutcome:
    try:
        outcome: RankOutcome = receiver.recv()
    except EOFError:
        process.join()
        # Only the system, out of memory, kills a process without an outcome.
        kind: Literal["memory", "failed"] = "memory" if process.exitcode == -signal.SIGKILL else "failed"
        return RankOutcome(kind, f"the process ended with exit code {process.exitcode}")
    return outcome


def _answers(outcomes: list[RankOutcome | None]) -> list[Any]:
    """What the task returned on every rank; raises as `Trials.run` says."""
    # By kind, the outcome on the first rank.
    by_kind = {each.kind: (rank, each.value) for rank, each in reversed([*enumerate(outcomes)]) if each}
    if "wrong" in by_kind:
        raise JointUserError(by_kind["wrong"][1])
    if "memory" in by_kind:
        raise OutOfMemory
    if "failed" in by_kind:
        rank, trace = by_kind["failed"]
        raise RuntimeError(f"rank {rank} of a trial failed with {trace.strip().splitlines()[-1]}\n{trace}")
    return [each.value for each in outcomes if each]
