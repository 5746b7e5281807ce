"""Worker processes that run one handler on a stream of tasks: small, fast to start, and never waited for in vain.

They are plain subprocesses on a socket each, not `multiprocessing` children: those import the main script again, and
with it torch (300 MB a process), and outlive a parent that is killed. Here a worker ends when its socket closes, for
whatever reason, and a worker that dies is noticed at once. Another takes its place and tries the task again: a task
that kills its worker twice is to blame and fails alone, and only where workers go on dying does the pool give up.
Arrays come back without being copied by pickle (protocol 5, out of band).
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from motet.core.errors import UserError

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from motet.data.workers import serve; serve(int(sys.argv[1]))"
)
_EXIT_TIMEOUT_S = 5.0
_DEATHS_OF_A_TASK = 2
_DEATHS_OF_A_POOL = 20
_TASK_LIMIT_S = 600.0
"""What answers no sooner hangs. Reading a file takes seconds, a stretch of a manifest's headers minutes at the most."""


class WorkerDied(UserError):
    """A worker process ended by itself, killed by the system as a rule: for its memory, or by a damaged file.

    how: as a clause, "was killed by SIGSEGV". is_final: whether the pool has given up, and every task fails.
    """

    def __init__(self, text: str, how: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.how, self.is_final = how, is_final


class WorkerPool:
    """`num_workers` processes, each with a handler `make_handler(*args)`; 0 runs the handler in this process.

    make_handler, args and tasks are pickled: make_handler must be importable, not defined in the main script.
    Tasks are taken in order by whichever worker is free; one that is not done after limit_s seconds counts as dead.
    """

    def __init__(
        self,
        num_workers: int,
        make_handler: Callable[..., Callable[[Any], Any]],
        *args: Any,
        limit_s: float = _TASK_LIMIT_S,
    ) -> None:
        """Raises UserError if the system starts no more processes."""
        self._inline = make_handler(*args) if num_workers == 0 else None
        self._handler, self._limit_s = (make_handler, args), limit_s
        self._tasks: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._broken: WorkerDied | None = None
        self._deaths = itertools.count(1)
        self._threads: list[threading.Thread] = []
        workers: list[_Worker] = []
        try:
            for _ in range(num_workers):
                workers.append(_Worker(self._handler, limit_s))
        except OSError as error:
            for worker in workers:
                worker.end()
            raise UserError(
                f"worker process {len(workers) + 1} of {num_workers} cannot be started ({error.strerror}); use fewer "
                "(data.num_workers)"
            ) from error
        for number, worker in enumerate(workers):
            # Daemon: a program that ends without closing the pool does not hang on it.
            thread = threading.Thread(target=self._run, args=(worker,), name=f"worker-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def submit(self, task: Any) -> Future[Any]:
        """The future raises what the handler raised, or WorkerDied."""
        future: Future[Any] = Future()
        if self._inline is None:
            self._tasks.put((task, future))
            return future
        try:
            future.set_result(self._inline(task))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Let the workers finish the tasks they have been given, and end them."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            # What is still queued is of no use to anyone.
            self._broken = self._broken or WorkerDied("the pool was closed", "was closed", is_final=True)
        self.close()

    def _run(self, worker: _Worker) -> None:
        """One worker after the other, until there are no more tasks."""
        while (item := self._tasks.get()) is not None:
            task, future = item
            if not future.set_running_or_notify_cancel():
                continue
            deaths: list[WorkerDied] = []
            while not future.done():
                try:
                    if self._broken:
                        raise self._broken
                    succeeded, value = worker.ask(task)
                    future.set_result(value) if succeeded else future.set_exception(value)
                except (EOFError, OSError) as error:
                    deaths.append(self._buried(worker, task, error))
                    worker = self._successor(worker)
                    if len(deaths) == _DEATHS_OF_A_TASK and not self._broken:
                        future.set_exception(deaths[-1])
                except Exception as error:
                    future.set_exception(error)
        worker.end()

    def _buried(self, worker: _Worker, task: Any, error: Exception) -> WorkerDied:
        """What a worker died of; if it was one too many, the pool has given up."""
        how = worker.obituary(error)
        text = f"a worker process {how} while it had {task!r:.300}"
        if (num_deaths := next(self._deaths)) >= _DEATHS_OF_A_POOL:
            hint = f"{num_deaths} workers have died; is the machine short of memory? Use fewer (data.num_workers)"
            self._broken = WorkerDied(f"{text}; {hint}", how, is_final=True)
        return WorkerDied(text, how)

    def _successor(self, dead: _Worker) -> _Worker:
        """A new worker; the dead one, of which nothing is asked any more, if the pool has given up."""
        if not self._broken:
            try:
                return _Worker(self._handler, self._limit_s)
            except OSError as error:
                text = f"a worker process has died, and no other can be started ({error.strerror})"
                self._broken = WorkerDied(text, "cannot be started", is_final=True)
        return dead


class _Worker:
    """One process, and the socket to it. Raises OSError if it cannot be started."""

    def __init__(self, handler: Any, limit_s: float) -> None:
        self._handler: Any = handler
        self._limit_s = limit_s
        self._link, self._process = _start_worker()
        self._link.settimeout(limit_s)

    def ask(self, task: Any) -> tuple[bool, Any]:
        """Whether it succeeded, and what came of it. Raises EOFError or OSError if the worker has died, or hangs."""
        if self._handler is not None:
            _send(self._link, self._handler)
            self._handler = None
        _send(self._link, task)
        return _receive(self._link)  # type: ignore[no-any-return]

    def obituary(self, error: Exception) -> str:
        """What a worker has died of, as a clause, from the error of asking it; one that hangs is killed."""
        if isinstance(error, TimeoutError):
            self._process.kill()
            self.end()
            return f"gave no answer within {self._limit_s:g} s"
        self.end()
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, as the system does where memory is short"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def end(self) -> None:
        """Let it go, by force if it does not."""
        self._link.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(descriptor: int) -> None:
    """The worker's side: answer tasks until the socket closes."""
    # A terminal signals all of its processes, and torchrun a rank with its children; the rank may still want to finish
    # its step, and its workers end when it does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as link:
        try:
            try:
                make_handler, args = _receive(link)
                handler = make_handler(*args)
            except (EOFError, OSError):
                raise
            except Exception as error:
                failure = error

                def handler(task: Any) -> Any:
                    raise failure

            while True:
                _send(link, _answer(handler, _receive(link)))
        except (EOFError, OSError):
            return


def _answer(handler: Callable[[Any], Any], task: Any) -> tuple[bool, Any]:
    try:
        return True, handler(task)
    except Exception as error:
        error.add_note("".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return False, RuntimeError(f"in a worker process: {traceback.format_exc()}")
        return False, error


def _start_worker() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    # A worker is one core's worth of work: the threads of BLAS would only fight each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return ours, process


def _send(link: socket.socket, message: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = [len(head), *(view.nbytes for view in views)]
    link.sendall(struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes) + head)
    for view in views:
        link.sendall(view)


def _receive(link: socket.socket) -> Any:
    (count,) = struct.unpack("<Q", _read(link, 8))
    sizes = struct.unpack(f"<{count}Q", _read(link, 8 * count))
    head, *buffers = (_read(link, size) for size in sizes)
    return pickle.loads(head, buffers=buffers)


def _read(link: socket.socket, num_bytes: int) -> memoryview:
    # Not a bytearray: that would be filled with zeros first.
    data = np.empty(num_bytes, dtype=np.uint8).data
    done = 0
    while done < num_bytes:
        got = link.recv_into(data[done:])
        if not got:
            raise EOFError
        done += got
    return data
