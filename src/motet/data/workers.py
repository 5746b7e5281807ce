"""Worker processes that run one handler on a stream of tasks: small, fast to start, and never waited for in vain.

They are plain subprocesses on a socket each, not `multiprocessing` children: those import the main script again, and
with it torch (300 MB a process), and outlive a parent that is killed. Here a worker ends when its socket closes, for
whatever reason, and a worker that dies is noticed at once. Arrays come back without being copied by pickle (protocol 5,
out of band).
"""

from __future__ import annotations

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

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from motet.data.workers import serve; serve(int(sys.argv[1]))"
)
_EXIT_TIMEOUT_S = 5.0


class WorkerDied(RuntimeError):
    """A worker process ended by itself, killed by the system as a rule: for its memory, or by a damaged file."""


class WorkerPool:
    """`num_workers` processes, each with a handler `make_handler(*args)`; 0 runs the handler in this process.

    make_handler, args and tasks are pickled: make_handler must be importable, not defined in the main script.
    Tasks are taken in order by whichever worker is free.
    """

    def __init__(self, num_workers: int, make_handler: Callable[..., Callable[[Any], Any]], *args: Any) -> None:
        self._inline = make_handler(*args) if num_workers == 0 else None
        self._tasks: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._broken: WorkerDied | None = None
        self._threads = []
        for number in range(num_workers):
            ours, process = _start_worker()
            # Daemon: a program that ends without closing the pool does not hang on it.
            thread = threading.Thread(
                target=self._run,
                args=(number, ours, process, (make_handler, args)),
                name=f"worker-{number}",
                daemon=True,
            )
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
            self._broken = self._broken or WorkerDied("the pool was closed")
        self.close()

    def _run(self, number: int, link: socket.socket, process: subprocess.Popen[bytes], handler: Any) -> None:
        greeted = False
        while (item := self._tasks.get()) is not None:
            task, future = item
            if not future.set_running_or_notify_cancel():
                continue
            if self._broken:
                future.set_exception(self._broken)
                continue
            try:
                if not greeted:
                    _send(link, handler)
                    greeted = True
                _send(link, task)
                succeeded, value = _receive(link)
            except (EOFError, OSError):
                self._broken = WorkerDied(_obituary(number, process, task))
                future.set_exception(self._broken)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(value) if succeeded else future.set_exception(value)
        link.close()
        try:
            process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve(descriptor: int) -> None:
    """The worker's side: answer tasks until the socket closes."""
    # Control-C goes to the whole terminal; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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


def _obituary(number: int, process: subprocess.Popen[bytes], task: Any) -> str:
    try:
        code = process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"worker process {number} closed its connection while it had {task!r:.300}"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    hint = "; is the machine short of memory?" if code == -signal.SIGKILL else ""
    return f"worker process {number} {how} while it had {task!r:.300}{hint}"


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
