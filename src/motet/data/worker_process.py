"""A worker that is a process of this machine: a plain subprocess with a socket.

A child of `multiprocessing` imports the main script again, and with it torch (300 MB for each process), and outlives a
parent that is killed. Here a worker ends when its socket closes, and its death is noticed at once. Pickle does not
copy arrays (protocol 5, out of band).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from motet.data.worker import Death, HandlerParts

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from motet.data.worker_process import serve; serve(int(sys.argv[1]))"
)
_EXIT_TIMEOUT_S = 5.0


class WorkerProcess:
    """One process, and the socket to it: a `Worker`. Raises OSError if it cannot be started."""

    name = "worker process"

    def __init__(self, handler: HandlerParts, limit_s: float) -> None:
        self._handler: HandlerParts | None = handler
        self._limit_s = limit_s
        self._link, self._process = _start_worker()
        self._link.settimeout(limit_s)

    def ready(self, may_wait: Callable[[], bool]) -> None:
        """As `Worker.ready`: tasks wait in its socket."""

    def run(self, task: Any) -> tuple[bool, Any]:
        """As `Worker.run`."""
        if self._handler is not None:
            _send(self._link, self._handler)
            self._handler = None
        _send(self._link, task)
        return _receive(self._link)  # type: ignore[no-any-return]

    def cause_of_death(self, error: Exception) -> Death:
        """As `Worker.cause_of_death`."""
        if isinstance(error, TimeoutError):
            self._process.kill()
            self.end()
            return Death(f"gave no answer within {self._limit_s:g} s")
        self.end()
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return Death("was killed by SIGKILL, as the system does where memory is short")
        return Death(f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}")

    def kill(self) -> None:
        """As `Worker.kill`."""
        self._process.kill()

    def end(self) -> None:
        """Close the socket and wait for the process; kill it if it does not end."""
        self._link.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(descriptor: int) -> None:
    """A worker process's side: run tasks until the socket closes."""
    # A terminal signals all its processes, and torchrun a rank with its children. The rank may still finish its step;
    # its workers end when the rank ends.
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
                _send(link, answer(handler, _receive(link)))
        except (EOFError, OSError):
            return


def answer(handler: Callable[[Any], Any], task: Any) -> tuple[bool, Any]:
    """Whether a task succeeded, and its result, or an exception that can be pickled."""
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
    # A worker is meant for one core: threads of BLAS would compete for it.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    return ours, process


def pickled(message: Any) -> tuple[bytes, list[memoryview]]:
    """A message as bytes, and the contents of its arrays, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return head, [buffer.raw() for buffer in buffers]


def unpickled(head: bytes | memoryview, contents: Sequence[memoryview]) -> Any:
    """What `pickled` was given. Its arrays are views of `contents`."""
    return pickle.loads(head, buffers=contents)


def _send(link: socket.socket, message: Any) -> None:
    head, views = pickled(message)
    sizes = [len(head), *(view.nbytes for view in views)]
    link.sendall(struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes) + head)
    for view in views:
        link.sendall(view)


def _receive(link: socket.socket) -> Any:
    (count,) = struct.unpack("<Q", _read(link, 8))
    sizes = struct.unpack(f"<{count}Q", _read(link, 8 * count))
    head, *buffers = (_read(link, size) for size in sizes)
    return unpickled(head, buffers)


def _read(link: socket.socket, num_bytes: int) -> memoryview:
    # Not a bytearray, which would first be filled with zeros.
    data = np.empty(num_bytes, dtype=np.uint8).data
    num_read = 0
    while num_read < num_bytes:
        received = link.recv_into(data[num_read:])
        if not received:
            raise EOFError
        num_read += received
    return data
