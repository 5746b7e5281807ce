"""Signals: the first asks a run to save a checkpoint after the current step and to end.

One request arrives as several signals: a terminal and a scheduler signal every process of a job, and torchrun forwards
its own signal to its ranks. So signals within GRACE_S seconds of the first belong to it. A later signal ends the
process at once: the user does not wait for the checkpoint.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 5.0


class StopSignal:
    """A context manager: in its block the first signal sets `received`, a signal GRACE_S later ends the process.

    received: number of the first signal; 0 if there was none.
    A signal that was ignored before the block stays ignored, as SIGHUP under nohup.
    """

    def __init__(self) -> None:
        self.received = 0
        self._received_s = 0.0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.received:
            self.received, self._received_s = number, now_s
        elif now_s - self._received_s > GRACE_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
