"""The thread of a loop of one's own: it loads steps, and agrees with the threads of the other ranks on each microbatch.

The thread has a host group of its own, so its collectives cannot mix with those of the loop. Ranks agree after each
microbatch: whether a rank has failed, has left the loop or has no more examples. So all ranks stop alike, and no rank
waits for one that has left.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from motet.core.errors import JointUserError
from motet.core.words import counted_words
from motet.dispatch.agreement import joint_error
from motet.dispatch.batch import RankBatch
from motet.dispatch.loop_source import LoopSource, Status

_CLOSING_S = 5.0
"""How long a loop that is left waits for its thread. The thread ends when all ranks have left."""


_Step: TypeAlias = list[tuple[RankBatch, Any]]
"""The microbatches of a step, each with the state of the source behind it."""


class LoopThread:
    """Loads the steps of one epoch. first_batch: batches of the loader that are skipped."""

    def __init__(
        self,
        source: LoopSource,
        group: dist.ProcessGroup,
        first_batch: int,
        accumulate: int,
        steps_ahead: int,
        prepare: Callable[[RankBatch], RankBatch],
    ) -> None:
        self._source, self._group, self._accumulate, self._prepare = source, group, accumulate, prepare
        self._first_batch = first_batch
        self._steps: queue.Queue[_Step | BaseException | None] = queue.Queue(maxsize=steps_ahead)
        self._closing = threading.Event()
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="prefetched", daemon=True)
        self._thread.start()

    def next_step(self) -> _Step | None:
        """Wait for a step; None behind the last. Raises the error that stopped the thread, on every rank."""
        step = self._steps.get()
        if isinstance(step, BaseException):
            raise step
        return step

    def close(self) -> None:
        """End the thread, which ends when all ranks have left; wait for that a while."""
        # Not for ever: after an error of this rank alone the others do not leave, and the error is to be seen.
        self._closing.set()
        self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        try:
            self._produce()
        except BaseException as error:
            self._put(error)
        finally:
            self._source.end()

    def _produce(self) -> None:
        self._source.begin(self._first_batch)
        step: _Step = []
        while True:
            turn = self._source.turn(is_closing=self._closing.is_set())
            batch, error = turn.batch, turn.error
            try:
                batch = batch and self._prepare(batch)
            except Exception as failure:
                error = error or failure
            statuses = self._statuses(Status.FAILED if error else turn.status)
            if Status.FAILED in statuses:
                raise joint_error(error, self._group)
            if Status.CLOSING in statuses:
                rank = statuses.index(Status.CLOSING)
                raise JointUserError(
                    f"Rank {rank} has left the loop over batches and this rank has not; all ranks must take the same "
                    "number of batches."
                )
            is_end = min(statuses) == Status.ENDED
            if not is_end:
                assert batch is not None
                step.append((batch, turn.state))
                self._warn(statuses, turn.num_left_out)
            if len(step) == self._accumulate or (is_end and step):
                self._put(_with_step(step))
                step = []
            if is_end:
                self._put(None)
                return

    def _statuses(self, status: Status) -> list[int]:
        """The status of every rank. A collective."""
        everywhere = torch.empty(self._group.size(), dtype=torch.int64)
        dist.all_gather_single(everywhere, torch.tensor([status], dtype=torch.int64), group=self._group)
        return everywhere.tolist()

    def _warn(self, statuses: list[int], num_left_out: int) -> None:
        """Say on the first rank, for all, what no rank fails of."""
        if self._group.rank() != 0:
            return
        if num_left_out:
            warnings.warn(
                f"{counted_words(num_left_out, 'example')} of a batch could not be loaded; all ranks leave "
                f"{'it' if num_left_out == 1 else 'them'} out.",
                stacklevel=2,
            )
        if Status.ENDED in statuses and not self._has_warned:
            self._has_warned = True
            ranks = ", ".join(str(rank) for rank, status in enumerate(statuses) if status == Status.ENDED)
            warnings.warn(
                f"The loader of rank {ranks} has ended before the others'; it goes on with what they load.",
                stacklevel=2,
            )

    def _put(self, item: _Step | BaseException | None) -> None:
        """Queue an item as soon as there is room; drop it if the loop is left."""
        while not self._closing.is_set():
            try:
                self._steps.put(item, timeout=0.1)
            except queue.Full:
                continue
            return


def _with_step(step: _Step) -> _Step:
    """The same microbatches, each with the targets and the number of those of its step; the last ends it."""
    num_targets, count = sum(batch.num_targets for batch, _ in step), len(step)
    return [
        (replace(batch, num_step_targets=num_targets, num_microbatches=count, ends_step=number == count), state)
        for number, (batch, state) in enumerate(step, start=1)
    ]
