"""Times actions: by the CPU's clock, or by events on a CUDA stream, which are read later so that nothing waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from torch.profiler import record_function

from motet.core.arrays import Float64Array
from motet.core.timeline import COMPUTE_STREAM, Timeline
from motet.schedule.program import WHOLE_RANK, Action

Mark: TypeAlias = float | torch.cuda.Event
"""A moment: seconds of `time.perf_counter()`, or an event on a CUDA stream."""


_Recorded: TypeAlias = tuple[Action, int, str, Mark, Mark]
"""An action that was taken, its step and module, start and end: as little as can be noted while a step runs."""


class ActionClock:
    """Records the spans of one rank. Times are `time.perf_counter() - zero_s` in seconds; zero_s defaults to now.

    met_s: of the spans that `take` returned last, when the ranks met (`meet`); NaN if they did not.
    names: whether torch's profiler is told the name of each action.
    """

    def __init__(self, rank: int, device: torch.device, *, zero_s: float | None = None) -> None:
        self.rank = rank
        self.zero_s = time.perf_counter() if zero_s is None else zero_s
        self._on_device = device.type == "cuda"
        self._mark: Callable[[], Mark] = self._event if self._on_device else time.perf_counter
        self._pending: list[_Recorded] = []
        self._start: Mark = 0.0
        self._met: Mark | None = None
        self.met_s = math.nan
        self.names = False
        self._named: AbstractContextManager[object] = nullcontext()
        if self._on_device:
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin.synchronize()
            self._origin_s = time.perf_counter() - self.zero_s

    def begin(self, action: Action) -> None:
        """An action of a Program begins; on a GPU, its work on the current stream."""
        if self.names:
            self._named = record_function(str(action))
            self._named.__enter__()
        self._start = self._mark()

    def end(self, action: Action, step: int, module: str) -> None:
        """The action that began has ended. One that raises does not: it is none.

        module: the module of the action's stage. Actions of the whole rank (NORM, STEP) get "" instead, as in a
        simulated Timeline.
        """
        self._pending.append((action, step, module, self._start, self._mark()))
        if self.names:
            self._named.__exit__(None, None, None)

    def meet(self, *, restarts: bool = False) -> None:
        """Note that all ranks have just met, as they do once a step, so that their spans can be aligned.

        restarts: the action that is recorded begins now; that it waited for the other ranks is none of its time.
        """
        self._met = self._mark()
        if restarts:
            self._start = self._met

    def take(self) -> Timeline:
        """The spans recorded since the last call. On a GPU this waits until the last of them has ended."""
        pending, self._pending = self._pending, []
        met, self._met = self._met, None
        if self._on_device:
            for mark in (*(end for *_, end in pending[-1:]), *(() if met is None else (met,))):
                mark.synchronize()
        self.met_s = math.nan if met is None else float(self._seconds([met])[0])
        count = len(pending)
        return Timeline(
            np.full(count, self.rank, dtype=np.int32),
            self._seconds([start for *_, start, _ in pending]),
            self._seconds([end for *_, end in pending]),
            [_text(action) for action, *_ in pending],
            [action.kind for action, *_ in pending],
            ["" if action.kind in WHOLE_RANK else module for action, _, module, *_ in pending],
            [COMPUTE_STREAM] * count,
            np.array([action.microbatch for action, *_ in pending], dtype=np.int32),
            np.array([step for _, step, *_ in pending], dtype=np.int32),
            self.rank + 1 if pending else 0,
        )

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, marks: Sequence[Mark]) -> Float64Array:
        if not self._on_device:
            return np.array(marks, dtype=np.float64) - self.zero_s
        return self._origin_s + np.array([self._origin.elapsed_time(mark) for mark in marks], dtype=np.float64) / 1e3


@lru_cache(maxsize=1 << 16)
def _text(action: Action) -> str:
    """Steps have the same actions."""
    return str(action)
