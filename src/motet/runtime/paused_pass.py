"""A pass that pauses while a sum over its tensor-parallel ranks is on its way, so that other passes run meanwhile.

So encoders in bubbles have sums beside the backbone's compute (Optimus, Design Decision 3 and Figure 7). Of each half
of a block there are two parts in the row, and behind the last sum comes one more:

    row      part 0            part 1                        part 2                  ...   last part
    pass     half, to its sum  passes of the backbone, say   rest, half, to its sum  ...   rest, what stands behind

What follows a sum is inside the code of a layer, or of torch's backward pass. So the pass runs in a thread of its own,
and hands its turn back to the row's thread where it pauses: of the two one runs at a time. Collectives keep the order
of the row, as a sum is started in its turn.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread

from motet.tensor_parallel import RowParts

_Job = Callable[[], None]


class PassThread:
    """A thread that runs one function after the other, and ends with the process, or when nobody has it any more."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(target=_work, args=(self._jobs,), name="paused pass", daemon=True).start()

    def run(self, job: _Job) -> None:
        """Let it run a function, which must not raise."""
        self._jobs.put(job)

    def __del__(self) -> None:
        self._jobs.put(None)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # It would be kept until the next one comes.


class _Left(BaseException):
    """Ends a pass that nobody goes on with."""


class PausedPass:
    """A pass in a thread of its own.

    run:     the pass, a function of this object. It pauses by `until`, and at sums inside `pausing`.
    rows:    those that its tensor-parallel ranks share, by module.
    threads: threads without work, of which it takes one, and gives it back at its end.

    Example:
        >>> def run(paused):
        ...     print("first half")
        ...     paused.until(1)
        ...     print("second half")
        >>> paused = PausedPass(run, rows=[], threads=[])
        >>> paused.go_on(0)
        first half
        >>> paused.go_on(1)
        second half
        >>> paused.has_ended
        True
    """

    def __init__(self, run: Callable[[PausedPass], None], rows: Sequence[RowParts], threads: list[PassThread]) -> None:
        self._run, self._rows, self._threads = run, rows, threads
        self._turns: SimpleQueue[bool] = SimpleQueue()
        self._turns_back: SimpleQueue[None] = SimpleQueue()
        self._thread: PassThread | None = None
        self._error: BaseException | None = None
        self._reached = self._last_sum = 0
        self.has_ended = False

    def go_on(self, number: int) -> None:
        """Run it up to its next pause, or its end. Raises what it raises.

        number: of the part that begins, of those that compute.
        """
        if self.has_ended:
            return
        self._reached = number
        for rows in self._rows:
            rows.meanwhile = self._meanwhile
        try:
            self._take_turn()
        finally:
            for rows in self._rows:
                rows.meanwhile = None
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """End it where it has paused, so that nothing of it is kept: the row has failed."""
        self._turns.put(False)

    def until(self, number: int) -> None:
        """In the pass: pause until the row has reached a part, of those that compute.

        Ranks that have nothing to sum pause so, too: what they do behind it meets other ranks in the row's order.
        """
        while self._reached < number:
            self._turns_back.put(None)
            if not self._turns.get():
                raise _Left

    @contextmanager
    def pausing(self, last: int) -> Iterator[None]:
        """In the block, the pass pauses at sums, as long as the part that then goes on is not behind `last`."""
        self._last_sum = last
        try:
            yield
        finally:
            self._last_sum = 0

    def _meanwhile(self, is_sum: bool) -> None:
        """As of `RowParts`."""
        if self._reached < self._last_sum:
            self.until(self._reached + 1)

    def _take_turn(self) -> None:
        if self._thread is None:
            self._thread = self._threads.pop() if self._threads else PassThread()
            context = contextvars.copy_context()
            self._thread.run(lambda: context.run(self._run_whole))
        else:
            self._turns.put(True)
        self._turns_back.get()

    def _run_whole(self) -> None:
        try:
            self._run(self)
        except _Left:
            pass
        except BaseException as error:  # The row's thread raises it.
            self._error = error
        self.has_ended = True
        assert self._thread is not None, "a thread runs it"
        self._threads.append(self._thread)
        self._turns_back.put(None)
