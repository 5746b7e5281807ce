"""Prefetches the microbatches of coming steps in a thread.

    ExampleOrder.step -> lengths -> decide_step -> decode -> agree -> RankBatch -> queue

Ranks agree in one all-reduce a microbatch, on a host group that only this thread uses: which examples cannot be read,
whether a rank has failed, whether the job is closing. So all ranks leave out the same examples, an error on one rank
stops all, and no thread waits for a rank that has left.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from motet.assign.whole_step import DecidedStep
from motet.core.arrays import BoolArray, Int64Array
from motet.core.errors import JointUserError, Stopped, originating
from motet.core.words import counted_words
from motet.data.config import LoadingConfig
from motet.data.order import ExampleOrder
from motet.dispatch import RankBatch
from motet.dispatch.agreement import gather, joint_error
from motet.train.input.loading import DealtStep, Loaded, Loading, Pending, UnreadableExample

_T = TypeVar("_T")

_OK, _CLOSING, _FAILED = range(3)
_MIN_EXAMPLES = 100
"""The share of bad examples is judged as if there were at least so many examples."""
_MAX_NAMED = 3
"""Examples that an error names."""
_LOOK_EVERY_S = 0.005
"""How often a step that waits for room is looked after."""
_MEMORY_ADVICE = "Lower data.num_workers or data.prefetch_steps, or set data.prefetch_bytes."


@dataclass(frozen=True)
class StepRange:
    """The steps [first_step, num_steps) of a run.

    batch_size: examples a step, over all ranks; of an order of groups, groups. microbatches: a step.
    position, num_bad: examples that were consumed, and dropped as bad, before first_step.
    """

    first_step: int
    num_steps: int
    batch_size: int
    microbatches: int
    position: int
    num_bad: int


def _media_bytes(batch: RankBatch) -> int:
    return sum(values.nbytes for values, _ in batch.media.values())


@dataclass(frozen=True)
class StepInput:
    """The microbatches of one step on this rank.

    examples:          a microbatch: numbers of its examples in the dataset, int64 [num_examples], as in its lengths.
    kept:              a microbatch: which of all that it was dealt these are, bool.
    position, num_bad: examples consumed, and dropped as bad, in the run after this step.
    left_out:          files for which examples were dropped in this step, over all ranks.
    decided:           what was decided for the step as a whole; None: nothing was.
    decide_s:          seconds for deciding which rank computes what, and when.
    moved_bytes:       inputs that were sent from rank to rank, summed over all ranks.
    crossing_bytes:    the part of moved_bytes that went from node to node.
    """

    batches: list[RankBatch]
    examples: list[Int64Array]
    kept: list[BoolArray]
    position: int
    num_bad: int
    left_out: tuple[UnreadableExample, ...]
    decided: DecidedStep | None
    decide_s: float
    moved_bytes: int
    crossing_bytes: int

    @property
    def media_bytes(self) -> int:
        """What the media of its microbatches take in memory."""
        return sum(map(_media_bytes, self.batches))


@dataclass(frozen=True)
class Ahead:
    """What waited for the step loop of this rank when it asked for a step: whole steps, and bytes of their media."""

    steps: int
    media_bytes: int


@dataclass(frozen=True)
class _Started:
    """A microbatch that was started, or was not: of an error, or because the job is closing.

    num_in_step: the examples of its step.
    """

    num_in_step: int
    step: DealtStep | None
    index: int
    pending: Pending | None
    error: BaseException | None


class Feed:
    """A context manager: in its block all ranks call `next_step` once for every step of `steps`.

    group:   a host group that only the feed uses.
    config:  of which the feed reads prefetch_steps, prefetch_bytes, service and max_bad_fraction.
    ahead:   as of the last call of `next_step`.
    prepare: applied to each RankBatch in the thread, e.g. to pin its memory.
    report:  called in the thread, on all ranks alike, once for every bad file of an example.
    """

    def __init__(
        self,
        order: ExampleOrder,
        loading: Loading,
        group: dist.ProcessGroup,
        steps: StepRange,
        config: LoadingConfig,
        *,
        prepare: Callable[[RankBatch], RankBatch] | None = None,
        report: Callable[[UnreadableExample], None] = lambda bad: None,
    ) -> None:
        self._order, self._loading, self._group = order, loading, group
        self._prepare, self._report = prepare, report
        self._steps, self._config = steps, config
        self._reported: dict[tuple[str, str], UnreadableExample] = {}
        self._left_out: list[UnreadableExample] = []
        self._num_bad = steps.num_bad
        self._queue: queue.Queue[StepInput | BaseException] = queue.Queue(maxsize=config.prefetch_steps)
        self._closing = threading.Event()
        self._largest_bytes = 0  # Of the media of a microbatch so far.
        self.ahead = Ahead(0, 0)
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def next_step(self) -> StepInput:
        """Wait for the next step's input. Raises the error that stopped the feed, on every rank."""
        self.ahead = self._waiting()
        step = self._queue.get()
        if isinstance(step, BaseException):
            raise step
        return step

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the thread on all ranks together: a rank whose thread is ahead learns of it in the next agreement."""
        self._closing.set()
        # After an error of this rank alone, the other ranks do not close, and waiting for them would never end.
        together = kind is None or issubclass(kind, JointUserError | Stopped)
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
        """Load all microbatches, and queue each step when its last microbatch is loaded."""
        steps = self._steps
        num_microbatches = (steps.num_steps - steps.first_step) * steps.microbatches
        starting = self._starting()
        started: deque[_Started] = deque()
        step: list[tuple[Loaded, Int64Array, BoolArray]] = []
        position = steps.position
        for number in range(num_microbatches):
            # Others are started before this one is awaited, so that decoders always have work.
            started.extend(islice(starting, max(1 + self._num_ahead() - len(started), int(not started))))
            begun = started.popleft()
            number_of_step = 1 + steps.first_step + number // steps.microbatches
            with originating(action=f"the loading of step {number_of_step}", memory_advice=_MEMORY_ADVICE):
                agreed = self._agree(begun)
                if agreed is None:
                    return
                pending, kept = agreed
                assert begun.step is not None, "a rank whose dealing fails does not agree to go on"
                ids = begun.step.microbatches[begun.index].ids
                loaded = self._loading.finish(pending, kept)
                if self._prepare:
                    loaded = replace(loaded, batch=self._prepare(loaded.batch))
            step.append((loaded, ids[kept], kept))
            self._largest_bytes = max(self._largest_bytes, _media_bytes(loaded.batch))
            position += len(ids)
            self._check_bad_fraction(position, is_last=number + 1 == num_microbatches)
            if len(step) == steps.microbatches:
                self._put(self._joined(step, begun.step.decided, position))
                step, self._left_out = [], []

    def _joined(
        self, step: list[tuple[Loaded, Int64Array, BoolArray]], decided: DecidedStep | None, position: int
    ) -> StepInput:
        """The input of a step from its microbatches, their example numbers, and which examples were kept."""
        loaded = [each for each, _, _ in step]
        return StepInput(
            batches=[each.batch for each in loaded],
            examples=[ids for _, ids, _ in step],
            kept=[kept for _, _, kept in step],
            position=position,
            num_bad=self._num_bad,
            left_out=tuple(self._left_out),
            decided=decided,
            decide_s=sum((each.decide_s for each in loaded), 0.0 if decided is None else decided.decide_s),
            moved_bytes=sum(each.moved_bytes for each in loaded),
            crossing_bytes=sum(each.crossing_bytes for each in loaded),
        )

    def _starting(self) -> Iterator[_Started]:
        """Deal each step when its first microbatch is asked for, and start each microbatch when it is asked for."""
        steps = self._steps
        position = steps.position
        for _ in range(steps.num_steps - steps.first_step):
            taken = self._order.step(position, steps.batch_size)
            position += len(taken.ids)
            step, error = self._tried(lambda taken=taken: self._loading.deal(taken, steps.microbatches))
            for index in range(steps.microbatches):
                pending = None
                if step is not None:
                    pending, error = self._tried(lambda part=step.microbatches[index]: self._loading.start(part))
                yield _Started(len(taken.ids), step, index, pending, error)

    def _tried(self, action: Callable[[], _T]) -> tuple[_T | None, BaseException | None]:
        """(what the action returns, None) or (None, its error); (None, None) if the job is closing."""
        try:
            return (None if self._closing.is_set() else action()), None
        except Exception as error:
            return None, error

    def _agree(self, begun: _Started) -> tuple[Pending, BoolArray] | None:
        """Agree with all ranks on a microbatch: (its loading, bool [num_examples] those kept), None if closing.

        A collective. Raises on all ranks if any has failed.
        """
        # 1. What this rank knows: the bad examples of its share, and its status.
        pending, error = begun.pending, begun.error
        bad: list[UnreadableExample] = []
        try:
            bad = pending.bad() if pending is not None else []
        except Exception as failure:
            error = error or failure
        status = _FAILED if error else _CLOSING if pending is None or self._closing.is_set() else _OK
        # 2. What any rank knows.
        is_bad, status = self._reduced([example.index for example in bad], status, begun.num_in_step)
        # 3. All ranks do the same.
        if status == _FAILED:
            raise joint_error(error, self._group)
        if status == _CLOSING:
            return None
        assert pending is not None
        if is_bad.any():
            self._num_bad += int(np.count_nonzero(is_bad))
            self._leave_out(bad)
        return pending, ~is_bad[: pending.num_examples]

    def _reduced(self, bad: list[int], status: int, num_in_step: int) -> tuple[BoolArray, int]:
        """Over all ranks: the examples that any rank found bad, and the largest status. A collective.

        Returns bool [num_in_step]: a rank that could not deal the step does not know how many a microbatch has.
        """
        flags = torch.zeros(num_in_step + 1, dtype=torch.uint8)
        flags[bad] = 1
        flags[-1] = status
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return flags[:-1].numpy() != 0, int(flags[-1])

    def _leave_out(self, bad: list[UnreadableExample]) -> None:
        """Note and report the bad examples of all ranks, on all ranks alike. bad: those of this rank. A collective."""
        # Once, though several encoders read it, perhaps on several ranks.
        everywhere = {example for of_rank in gather(bad, self._group) for example in of_rank}
        for example in sorted(everywhere, key=lambda example: (example.index, example.file)):
            self._left_out.append(example)
            # Items that records hold have the same names in all of them.
            place = example.where, example.file
            if place not in self._reported:
                self._reported[place] = example
                self._report(example)

    def _check_bad_fraction(self, position: int, *, is_last: bool) -> None:
        """Raise JointUserError if more examples are bad than config.max_bad_fraction allows, or all of them."""
        allowed = self._config.max_bad_fraction
        first = "; ".join(str(example) for example in list(self._reported.values())[:_MAX_NAMED])
        if self._num_bad == position and (is_last or position >= _MIN_EXAMPLES):
            raise JointUserError(
                f"No example of the first {position} can be used, so there is nothing to learn: {first}."
            )
        if self._num_bad > allowed * max(position, _MIN_EXAMPLES):
            raise JointUserError(
                f"{counted_words(self._num_bad, 'example')} of the first {position} cannot be used, more than "
                f"data.max_bad_fraction = {allowed:g} allows; mend the files that were reported above, or raise it. "
                f"The first: {first}."
            )

    def _num_ahead(self) -> int:
        """How many microbatches to have started beyond the one that is awaited.

        One, where decoders share the machine. Actors may be many, so they get all that may be loaded ahead.
        """
        steps, config = self._steps, self._config
        waiting = self._waiting()
        num_ahead = (
            max((config.prefetch_steps - waiting.steps) * steps.microbatches, 1) if config.service == "ray" else 1
        )
        if config.prefetch_bytes is None:
            return num_ahead
        # The first microbatch says how large one is.
        room = config.prefetch_bytes - waiting.media_bytes
        return max(min(num_ahead, room // self._largest_bytes - 1), 0) if self._largest_bytes else 0

    def _waiting(self) -> Ahead:
        """What is queued."""
        with self._queue.mutex:
            steps = [step for step in self._queue.queue if isinstance(step, StepInput)]
        return Ahead(len(steps), sum(step.media_bytes for step in steps))

    def _put(self, item: StepInput | BaseException) -> None:
        """Queue an item as soon as there is room; drop it if the feed is closing."""
        while not self._closing.is_set():
            try:
                if not self._fits(item):
                    time.sleep(_LOOK_EVERY_S)
                    continue
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _fits(self, item: StepInput | BaseException) -> bool:
        """Whether an item may wait beside what waits already; alone, each may."""
        limit, waiting = self._config.prefetch_bytes, self._waiting()
        if limit is None or isinstance(item, BaseException) or not waiting.steps:
            return True
        return waiting.media_bytes + item.media_bytes <= limit
