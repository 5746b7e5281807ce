"""Times actions: by the CPU's clock, or by events on a CUDA stream, which are read later so that nothing waits."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from motet.core.timeline import Span, Timeline
from motet.schedule.program import WHOLE_RANK, Action

Mark: TypeAlias = float | torch.cuda.Event
"""A moment: seconds of `time.perf_counter()`, or an event on a CUDA stream."""


class ActionClock:
    """Records the spans of one rank. Times are `time.perf_counter() - zero_s` in seconds; zero_s defaults to now.

    met_s: of the spans that `take` returned last, when the ranks met (`meet`); NaN if they did not.
    """

    def __init__(self, rank: int, device: torch.device, *, zero_s: float | None = None) -> None:
        self.rank = rank
        self.zero_s = time.perf_counter() if zero_s is None else zero_s
        self._on_device = device.type == "cuda"
        self._pending: list[tuple[Span, Mark, Mark]] = []
        self._start: Mark = 0.0
        self._met: Mark | None = None
        self.met_s = math.nan
        if self._on_device:
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin.synchronize()
            self._origin_s = time.perf_counter() - self.zero_s

    @contextmanager
    def span(self, action: Action, step: int, module: str) -> Iterator[None]:
        """Record the block as one action of a Program; on a GPU, its work on the current stream.

        module: the module of the action's stage. Actions of the whole rank (NORM, STEP) get "" instead, as in a
        simulated Timeline.
        """
        self._start = self._mark()
        yield
        label = "" if action.kind in WHOLE_RANK else module
        span = Span(self.rank, str(action), step, action.microbatch, 0.0, 0.0, action.kind, label)
        self._pending.append((span, self._start, self._mark()))

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
            for mark in (*(end for _, _, end in pending[-1:]), *(() if met is None else (met,))):
                mark.synchronize()
        self.met_s = math.nan if met is None else self._seconds(met)
        return Timeline.of(
            dataclasses.replace(span, start_s=self._seconds(start), end_s=self._seconds(end))
            for span, start, end in pending
        )

    def _mark(self) -> Mark:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        if not self._on_device:
            return mark - self.zero_s
        return self._origin_s + self._origin.elapsed_time(mark) / 1e3
