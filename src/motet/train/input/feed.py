"""Prefetching in a thread: which examples come next, where each is computed, loading, agreement on what is unreadable.

    GlobalOrder.take -> lengths -> Orchestrator.decide -> decode -> agree -> RankBatch -> queue

Everything that ranks must agree on goes through one all-reduce a microbatch, on a host group that only this thread
uses: which examples are bad, whether a rank has failed, whether the job is closing. So a file that one rank cannot read
is dropped on all ranks alike, an error on one rank stops all of them, and no thread waits for another that has left.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from motet.core.arrays import BoolArray, Int64Array
from motet.core.errors import JointUserError, RankFailure, UserError
from motet.data.config import DataConfig
from motet.data.order import GlobalOrder, ListedOrder
from motet.dispatch import RankBatch
from motet.train.input.loading import Loaded, Loading, Pending, UnreadableExample

_OK, _CLOSING, _FAILED = range(3)
_MIN_EXAMPLES_OF_A_VERDICT = 100
_NAMED_IN_A_VERDICT = 3


@dataclass(frozen=True)
class Schedule:
    """Which examples the feed yields: steps [first_step, num_steps) from `position` on, `num_bad` dropped before it."""

    first_step: int
    num_steps: int
    batch_size: int
    microbatches: int
    position: int
    num_bad: int


@dataclass(frozen=True)
class StepInput:
    """One step's microbatches on this rank; position and num_bad: examples consumed and dropped when it is done.

    examples: of each microbatch the numbers in the dataset, int64 [num_examples], as its lengths have them.
    left_out: the files for which examples were dropped in this step, over all ranks.
    moved_bytes, crossing_bytes: inputs sent from rank to rank, and of those from node to node, over all ranks.
    """

    batches: list[RankBatch]
    examples: list[Int64Array]
    position: int
    num_bad: int
    left_out: tuple[UnreadableExample, ...]
    decide_s: float
    moved_bytes: int
    crossing_bytes: int


class Feed:
    """A context manager, in which `next_step` is called once for every step of the schedule; all ranks alike.

    config:  prefetch_steps and max_bad_fraction of it.
    prepare: what is done with a RankBatch in the thread, e.g. pinning its memory.
    report:  called in the thread, on all ranks alike, with every file that is bad, once a file.
    """

    def __init__(
        self,
        order: GlobalOrder | ListedOrder,
        loading: Loading,
        group: dist.ProcessGroup,
        schedule: Schedule,
        config: DataConfig,
        *,
        prepare: Callable[[RankBatch], RankBatch] | None = None,
        report: Callable[[UnreadableExample], None] = lambda bad: None,
    ) -> None:
        self._order, self._loading, self._group = order, loading, group
        self._prepare, self._report = prepare, report
        self._schedule, self._config = schedule, config
        self._reported: dict[str, UnreadableExample] = {}
        self._left_out: list[UnreadableExample] = []
        self._num_bad = schedule.num_bad
        self._queue: queue.Queue[StepInput | BaseException] = queue.Queue(maxsize=config.prefetch_steps)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def next_step(self) -> StepInput:
        """Waits for the next step's input. Raises what stopped the feed, on every rank."""
        got = self._queue.get()
        if isinstance(got, BaseException):
            raise got
        return got

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the thread, on all ranks together: those that are ahead learn of it in their next agreement."""
        self._closing.set()
        # What this rank alone has met, others do not know of: their threads would be waited for in vain.
        together = kind is None or issubclass(kind, JointUserError | SystemExit)
        while together and self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def _run(self) -> None:
        try:
            self._produce()
        except BaseException as error:
            self._put(error)

    def _produce(self) -> None:
        plan = self._schedule
        count = plan.batch_size // plan.microbatches
        num_microbatches = (plan.num_steps - plan.first_step) * plan.microbatches
        started: deque[tuple[Int64Array, Pending | None, BaseException | None]] = deque()
        num_started = 0
        step: list[tuple[Loaded, Int64Array]] = []
        for number in range(num_microbatches):
            # The next one is begun before this one is waited for, so that workers never run dry.
            while num_started < min(number + 2, num_microbatches):
                ids = self._order.take(plan.position + num_started * count, count)
                started.append((ids, *self._start(ids)))
                num_started += 1
            ids, *begun = started.popleft()
            agreed = self._agree(*begun, count)
            if agreed is None:
                return
            pending, kept = agreed
            loaded = self._loading.finish(pending, kept)
            if self._prepare:
                loaded = replace(loaded, batch=self._prepare(loaded.batch))
            step.append((loaded, ids[kept]))
            position = plan.position + (number + 1) * count
            self._check_bad_fraction(position, is_last=number + 1 == num_microbatches)
            if len(step) == plan.microbatches:
                self._put(self._joined(step, position))
                step, self._left_out = [], []

    def _joined(self, step: list[tuple[Loaded, Int64Array]], position: int) -> StepInput:
        loaded = [each for each, _ in step]
        return StepInput(
            batches=[each.batch for each in loaded],
            examples=[ids for _, ids in step],
            position=position,
            num_bad=self._num_bad,
            left_out=tuple(self._left_out),
            decide_s=sum(each.batch.decision.decide_s for each in loaded),
            moved_bytes=sum(each.moved_bytes for each in loaded),
            crossing_bytes=sum(each.crossing_bytes for each in loaded),
        )

    def _start(self, ids: Int64Array) -> tuple[Pending | None, BaseException | None]:
        try:
            return (None if self._closing.is_set() else self._loading.start(ids)), None
        except Exception as error:
            return None, error

    def _agree(
        self, pending: Pending | None, error: BaseException | None, count: int
    ) -> tuple[Pending, BoolArray] | None:
        """What all ranks do about a microbatch: which examples they keep; None if the job is closing.

        Raises on all ranks if any has failed.
        """
        bad: list[UnreadableExample] = []
        try:
            bad = pending.bad() if pending is not None else []
        except Exception as failure:
            error = error or failure
        flags = torch.zeros(count + 1, dtype=torch.uint8)
        flags[[entry.place for entry in bad]] = 1
        flags[-1] = _FAILED if error else _CLOSING if pending is None or self._closing.is_set() else _OK
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        status = int(flags[-1])
        if status == _FAILED:
            raise self._joint_error(error)
        if status == _CLOSING:
            return None
        assert pending is not None
        kept = flags[:-1].numpy() == 0
        if not kept.all():
            self._num_bad += int(np.count_nonzero(~kept))
            told = [entry for of_rank in self._gather(bad) for entry in of_rank]
            for entry in sorted(told, key=lambda entry: (entry.place, entry.file)):
                self._left_out.append(entry)
                if entry.file not in self._reported:
                    self._reported[entry.file] = entry
                    self._report(entry)
        return pending, kept

    def _joint_error(self, error: BaseException | None) -> BaseException:
        """The error to raise on this rank: a UserError alike on all, anything else with its traceback where it is."""
        told = None
        if error is not None:
            text = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error))
            told = (isinstance(error, UserError), text)
        first = next((rank, *entry) for rank, entry in enumerate(self._gather(told)) if entry is not None)
        rank, is_user_error, text = first
        if is_user_error:
            return JointUserError(text)
        return error or RankFailure(f"loading failed on rank {rank}:\n{text}")

    def _gather(self, value: object) -> list:
        values: list = [None] * self._group.size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _check_bad_fraction(self, position: int, *, is_last: bool) -> None:
        """Raises JointUserError where too many are bad: more than allowed, or, whatever is allowed, all of them."""
        allowed = self._config.max_bad_fraction
        first = "; ".join(str(entry) for entry in list(self._reported.values())[:_NAMED_IN_A_VERDICT])
        if self._num_bad == position and (is_last or position >= _MIN_EXAMPLES_OF_A_VERDICT):
            raise JointUserError(
                f"None of the first {position} examples can be used, so there is nothing to learn: {first}."
            )
        if self._num_bad > allowed * max(position, _MIN_EXAMPLES_OF_A_VERDICT):
            raise JointUserError(
                f"{self._num_bad} of the first {position} examples cannot be used, more than data.max_bad_fraction = "
                f"{allowed:g} allows; mend the files that were reported above, or raise it. The first: {first}."
            )

    def _put(self, item: StepInput | BaseException) -> None:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return
