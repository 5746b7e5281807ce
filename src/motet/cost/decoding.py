"""Seconds of a core in which files become items: decoding is a phase too, of the pixels or samples of a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from motet.core.arrays import Float64Array
from motet.cost.profile import DecodingTimes


@dataclass(frozen=True)
class DecodingFit:
    """Seconds of one core by the amount in a file: start_s + amount * s_per_unit."""

    start_s: float
    s_per_unit: float

    @classmethod
    def of(cls, times: DecodingTimes) -> DecodingFit:
        """The line of least relative squares through what was measured, without negative parts."""
        amounts, seconds = np.array(times.amounts), np.array(times.seconds)
        columns = np.stack([np.ones_like(amounts), amounts], axis=1) / seconds[:, None]
        (start_s, s_per_unit), _ = nnls(columns, np.ones(len(seconds)))
        return cls(float(start_s), float(s_per_unit))

    def seconds(self, amounts: Float64Array) -> Float64Array:
        """Of each of some files, float64 [n]."""
        fitted: Float64Array = self.start_s + amounts * self.s_per_unit
        return fitted


class DecodingCost:
    """Seconds of decoding by phase and codec, from a profile.

    Example:
        >>> times = DecodingTimes(phase="image", codec=".png", amounts=(1e4, 1e6), seconds=(0.002, 0.02))
        >>> cost = DecodingCost([times])
        >>> bool(cost.seconds("image", ".png", np.array([1e6]))[0] > 0.01)
        True
    """

    def __init__(self, measured: Iterable[DecodingTimes]) -> None:
        self._fits = {(times.phase, times.codec): DecodingFit.of(times) for times in measured}

    def seconds(self, phase: str, codec: str, amounts: Float64Array) -> Float64Array | None:
        """Of each of some files, float64 [n]; of another codec, as of the slowest that was measured.

        amounts: pixels, or samples of all channels. None: nothing of the phase was measured.
        """
        of_phase = [fit for (name, _), fit in self._fits.items() if name == phase]
        if not of_phase:
            return None
        fit = self._fits.get((phase, codec))
        if fit is not None:
            return fit.seconds(amounts)
        slowest: Float64Array = np.max([fit.seconds(amounts) for fit in of_phase], axis=0)
        return slowest


@dataclass(frozen=True)
class DecodingLoad:
    """What decoding asks of a job's cores.

    core_s: seconds of one core that a step's media take. step_s: seconds of the step itself. num_workers: cores that
    decode.
    """

    core_s: float
    step_s: float
    num_workers: int

    @property
    def cores(self) -> int:
        """The least number of cores with which no step waits."""
        return max(int(np.ceil(self.core_s / self.step_s - 1e-9)), 1)

    @property
    def stall_s(self) -> float:
        """What each step waits for its media, with the workers there are: they are the slower part then."""
        return max(self.core_s / self.num_workers - self.step_s, 0.0)

    @property
    def stall_share(self) -> float:
        """The part of a step that is waiting."""
        return self.stall_s / (self.step_s + self.stall_s)
