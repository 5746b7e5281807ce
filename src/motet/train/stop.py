"""Ending a run early without losing it: the first SIGTERM or SIGINT asks for a checkpoint after the current step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """Inside its `with` block the first signal sets `received`; a second one does what it would have done without."""

    def __init__(self) -> None:
        self.received = 0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        # Handlers belong to the main thread; a trainer that is run in another one leaves them alone.
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
