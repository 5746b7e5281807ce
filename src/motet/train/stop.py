"""Ending a run early without losing it: a signal asks for a checkpoint after the current step.

One wish to stop arrives as several signals: a terminal signals all processes of a job, a scheduler each of them, and
torchrun passes on to its ranks what it has got itself. So those that follow the first within a few seconds are part of
it; one that comes later means that the user will not wait for the checkpoint.
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
    """Inside its `with` block the first signal sets `received`, and one that comes GRACE_S after it ends the process.

    A signal that is ignored outside of the block, as nohup does with SIGHUP, is ignored inside.
    """

    def __init__(self) -> None:
        self.received = 0
        self._received_s = 0.0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Handlers belong to the main thread; a trainer that is run in another one leaves them alone.
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
