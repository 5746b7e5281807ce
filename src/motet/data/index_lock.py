"""A lock so that one process at a time builds an index, and the processes that wait can report its progress."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

IndexProgress = Callable[[int, float], None]
"""A function of the number of examples done and of the share of the manifest done, 0 to 1; called now and then."""

_PROGRESS = struct.Struct("<qd")
_POLL_INTERVAL_S = 0.1


class BuildLock:
    """A lock file, which also holds the progress of the process that has the lock.

    is_exclusive: whether no other process can build; False where the file system has no locks. Then several processes
                  build, and the last index remains, which is as good as the others.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_exclusive = True

    def share_progress(self, progress: IndexProgress | None) -> IndexProgress:
        """A function that calls `progress` and writes it into the lock file for the processes that wait."""
        # The progress of the process before this one is out of date.
        os.truncate(self._descriptor, 0)

        def report(num_examples: int, share: float) -> None:
            os.pwrite(self._descriptor, _PROGRESS.pack(num_examples, share), 0)
            if progress:
                progress(num_examples, share)

        return report

    def wait(self, progress: IndexProgress | None) -> None:
        """Wait until this process has the lock; meanwhile report the progress of the process that has it."""
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                written = os.pread(self._descriptor, _PROGRESS.size, 0)
                if progress and len(written) == _PROGRESS.size:
                    progress(*_PROGRESS.unpack(written))
                time.sleep(_POLL_INTERVAL_S)
            except OSError:
                self.is_exclusive = False
                return


@contextmanager
def build_lock(path: Path, progress: IndexProgress | None) -> Iterator[BuildLock]:
    """Hold the lock file at `path`, which is created if it is missing. Raises OSError if it cannot be opened."""
    # O_NONBLOCK: opening a pipe under this name would block.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        lock = BuildLock(descriptor)
        lock.wait(progress)
        yield lock
    finally:
        os.close(descriptor)
