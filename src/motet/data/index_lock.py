"""One process at a time builds an index; those that wait for it say how far it has come, as it does itself."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

IndexProgress = Callable[[int, float], None]
"""Called now and then with the examples done and the share of the manifest done, 0 to 1."""

_TOLD = struct.Struct("<qd")
_LOOK_EVERY_S = 0.1


class BuildLock:
    """What the process that has the lock may say to those that wait for it.

    alone: whether no other process can be building; false where the file system knows no locks. Then several build, and
    the last index stands, which is as good.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.alone = True

    def telling(self, progress: IndexProgress | None) -> IndexProgress:
        """`progress`, which those that wait hear as well."""
        # What the last process told is not true of this one.
        os.truncate(self._descriptor, 0)

        def tell(num_examples: int, share: float) -> None:
            os.pwrite(self._descriptor, _TOLD.pack(num_examples, share), 0)
            if progress:
                progress(num_examples, share)

        return tell

    def wait(self, progress: IndexProgress | None) -> None:
        """Until this process has the lock."""
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                told = os.pread(self._descriptor, _TOLD.size, 0)
                if progress and len(told) == _TOLD.size:
                    progress(*_TOLD.unpack(told))
                time.sleep(_LOOK_EVERY_S)
            except OSError:
                self.alone = False
                return


@contextmanager
def build_lock(path: Path, progress: IndexProgress | None) -> Iterator[BuildLock]:
    """Holds the lock file at `path`, which is made where there is none. Raises OSError if it cannot be."""
    # Not blocking: whatever else stands there, a pipe, would be waited for.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        lock = BuildLock(descriptor)
        lock.wait(progress)
        yield lock
    finally:
        os.close(descriptor)
