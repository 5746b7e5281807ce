"""Workers that run a handler on a stream of tasks, and are replaced when they die.

A pool gives tasks to workers of one kind: processes of this machine (`worker_process.py`), or actors
(`ray_actors.py`). When a worker dies, another retries its task. A task that kills two workers fails; the pool gives up
only after many such deaths. A machine that dies with its workers blames no task: others take their tasks, and the pool
ends when none is left.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from motet.core.errors import UserError
from motet.core.words import counted_words
from motet.data.worker import Death, StartWorker, Worker
from motet.data.worker_process import WorkerProcess

_MAX_TASK_DEATHS = 2
_MAX_POOL_DEATHS = 20
TASK_LIMIT_S = 600.0
"""A task that takes longer hangs. Reading a file takes seconds, and reading a chunk's headers minutes at most."""


class WorkerDied(UserError):
    """A worker process died; usually the system killed it, for its memory or because of a damaged file.

    how:      a clause, "was killed by SIGSEGV".
    is_final: whether the pool has given up, so that every task fails.
    hangs:    whether the task has not ended in its time.
    """

    def __init__(self, text: str, how: str, *, is_final: bool = False, hangs: bool = False) -> None:
        super().__init__(text)
        self.how, self.is_final, self.hangs = how, is_final, hangs


@dataclass
class _Job:
    """A task and its future result. num_deaths: of workers that it may have killed."""

    task: Any
    future: Future[Any]
    is_running: bool = False
    num_deaths: int = 0

    def begin(self) -> bool:
        """Whether it is still wanted."""
        self.is_running = self.is_running or self.future.set_running_or_notify_cancel()
        return self.is_running


class WorkerPool:
    """`num_workers` workers, each with a handler `make_handler(*args)`; 0 runs the handler in this process.

    make_handler, args and tasks are pickled: make_handler must be importable, not defined in the main script.
    A free worker takes the next task in order. A worker that does not answer within limit_s seconds counts as dead, and
    its task, which no other is given, fails; in this process a thread goes on with it.

    num_deaths:  workers that have died so far. num_workers: those that take tasks; the others wait for room.

    Example:
        >>> with WorkerPool(0, lambda: len) as pool:
        ...     pool.submit([7, 8, 9]).result()
        3
    """

    def __init__(
        self,
        num_workers: int,
        make_handler: Callable[..., Callable[[Any], Any]],
        *args: Any,
        limit_s: float | None = None,
        start: StartWorker | None = None,
    ) -> None:
        """limit_s: None is `TASK_LIMIT_S` of workers, and no limit here. start: of workers; None: of processes.

        Raises UserError if a worker cannot be started.
        """
        self._inline = make_handler(*args) if num_workers == 0 else None
        self._handler, self._start = (make_handler, args), start or WorkerProcess
        self._limit_here_s, self._limit_s = limit_s, limit_s or TASK_LIMIT_S
        # By number, so that a task whose worker died is the next again.
        self._tasks: queue.PriorityQueue[tuple[int, _Job | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._broken: WorkerDied | None = None
        self._lock = threading.Lock()
        self._num_blamed, self._is_closing = 0, False
        self.num_deaths, self.num_workers = 0, num_workers
        self._threads: list[threading.Thread] = []
        self._workers = workers = list[Worker]()
        try:
            for _ in range(num_workers):
                workers.append(self._start(self._handler, self._limit_s))
            for worker in workers:
                worker.ready(lambda: False)
        except (OSError, UserError) as error:
            for worker in workers:
                worker.end()
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"worker process {len(workers) + 1} of {num_workers} cannot be started ({error.strerror}); use fewer "
                "(data.num_workers)"
            ) from error
        for number in range(num_workers):
            # A daemon thread, so that a program can end without closing the pool.
            thread = threading.Thread(target=self._run, args=(number,), name=f"worker-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, task: Any) -> Future[Any]:
        """The future result of a task. It raises the handler's exception, or WorkerDied."""
        future: Future[Any] = Future()
        if self._inline is None:
            self._tasks.put((next(self._numbers), _Job(task, future)))
            return future
        try:
            future.set_result(self._run_here(task))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Let the workers finish all submitted tasks, then end them."""
        self._is_closing = True
        for _ in self._threads:
            self._tasks.put((next(self._numbers), None))
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            # Nobody needs the tasks any more, queued or running.
            self._broken = self._broken or WorkerDied("the pool was closed", "was closed", is_final=True)
            for worker in self._workers:
                worker.kill()
        self.close()

    def _run_here(self, task: Any) -> Any:
        """The result of a task in this process; with a limit in a thread, as one that hangs is to be left."""
        assert self._inline is not None
        if self._limit_here_s is None:
            return self._inline(task)
        done: Future[Any] = Future()
        threading.Thread(target=_settle, args=(done, self._inline, task), daemon=True).start()
        if not wait([done], self._limit_here_s).done:
            raise _hangs("this process", f"gave no answer within {self._limit_here_s:g} s", task)
        return done.result()

    def _run(self, place: int) -> None:
        """Run tasks on a worker and its replacements, until there are no more tasks. place: among the workers."""
        while True:
            worker = self._workers[place]
            number, job = self._tasks.get()
            if job is None:
                break
            if not job.begin():
                continue
            try:
                if self._broken:
                    raise self._broken
                succeeded, value = worker.run(job.task)
                job.future.set_result(value) if succeeded else job.future.set_exception(value)
            except (EOFError, OSError) as error:
                self._retry(number, job, worker, error)
                self._workers[place] = self._replace(worker)
            except Exception as error:
                job.future.set_exception(error)
        worker.end()

    def _retry(self, number: int, job: _Job, dead: Worker, error: Exception) -> None:
        """Give the task of a dead worker to another, unless it has killed two, or hangs."""
        if self._broken:
            job.future.set_exception(self._broken)
            return
        with self._lock:
            self.num_deaths += 1
            self.num_workers -= 1
        # To find out why a worker died may take a minute, for which others do not wait.
        hangs = isinstance(error, TimeoutError)
        is_first = not job.num_deaths and not hangs
        if is_first:
            self._tasks.put((number, job))
        try:
            death = dead.cause_of_death(error)
        except UserError as gone:
            death = Death(f"is gone ({str(gone).rstrip('.')})", by_task=False)
            self._broken = self._broken or WorkerDied(f"{_article(dead.name)} {death.how}", death.how, is_final=True)
        died = self._noted(job, dead, death)
        if is_first:
            return
        if hangs:
            job.future.set_exception(self._broken or _hangs(_article(dead.name), death.how, job.task))
        elif job.num_deaths >= _MAX_TASK_DEATHS:
            job.future.set_exception(self._broken or died)
        else:
            self._tasks.put((number, job))

    def _noted(self, job: _Job, dead: Worker, death: Death) -> WorkerDied:
        """The death of a worker as an error; after _MAX_POOL_DEATHS by tasks the pool gives up."""
        text = _text(_article(dead.name), death.how, job.task)
        with self._lock:
            job.num_deaths += death.by_task
            self._num_blamed += death.by_task
            if self._num_blamed >= _MAX_POOL_DEATHS and not self._broken:
                hint = (
                    f"{counted_words(self.num_deaths, 'worker has', 'workers have')} died; is the machine short of "
                    "memory?"
                )
                self._broken = WorkerDied(f"{text}; {hint} Use fewer (data.num_workers)", death.how, is_final=True)
        return WorkerDied(text, death.how)

    def _replace(self, dead: Worker) -> Worker:
        """A new worker; the dead one, which gets no more tasks, if the pool has given up."""
        if self._broken:
            return dead
        try:
            worker = self._start(self._handler, self._limit_s)
        except (OSError, UserError) as error:
            return self._without(dead, error)
        try:
            worker.ready(self._goes_on)
        except (OSError, UserError) as error:
            worker.end()
            return self._without(dead, error)
        with self._lock:
            self.num_workers += 1
        return worker

    def _goes_on(self) -> bool:
        """Whether other workers take tasks. Raises WorkerDied if the pool has given up, or needs no more workers."""
        if self._broken or self._is_drained():
            raise self._broken or WorkerDied("the pool is closing", "was closed", is_final=True)
        return self.num_workers > 0

    def _is_drained(self) -> bool:
        """Whether the pool is closing, and no task waits."""
        with self._tasks.mutex:
            return self._is_closing and all(job is None for _, job in self._tasks.queue)

    def _without(self, dead: Worker, error: OSError | UserError) -> Worker:
        """Give up, as no other worker can be started in place of a dead one, which is returned."""
        if not self._broken and not self._is_drained():
            why = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
            text = f"{_article(dead.name)} has died, and no other can be started ({why})"
            self._broken = WorkerDied(text, "cannot be started", is_final=True)
        return dead


def _settle(future: Future[Any], handler: Callable[[Any], Any], task: Any) -> None:
    try:
        future.set_result(handler(task))
    except BaseException as error:
        future.set_exception(error)


def _hangs(who: str, how: str, task: Any) -> WorkerDied:
    return WorkerDied(_text(who, how, task), how, hangs=True)


def _text(who: str, how: str, task: Any) -> str:
    return f"{who} {how} while it had {task!r:.300}"


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
