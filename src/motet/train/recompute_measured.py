"""Measured peaks of the first steps correct what the memory model predicts for `recompute = "auto"`, rank by rank.

1. In each of the first steps, a rank has a predicted peak, that of its fullest microbatch, and a measured one. The very
   first step does not count: the optimizer's state is made in it.
2. excess = measured - predicted, of the step whose prediction is largest. The excess is taken to be the same for every
   microbatch; a positive one is also taken to grow with what a microbatch adds to the model's state.
3. So there is a largest prediction that fits (`limit_bytes`), and microbatches are fitted to it from then on.

Recomputation changes no number and no collective, so ranks may have other corrections than each other, and a resumed
run measures anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from motet.core.words import size_words

MEASURED_STEPS = 4
"""Steps that are measured, after the first."""
RESIDENT_RESOLUTION_BYTES = 256 * 2**20
"""A difference that resident bytes do not tell: libraries, mapped files and freed pages are resident as well."""


class MeasuredPeak(NamedTuple):
    """Peaks of a rank in one step; of measured bytes perhaps only a bound, which is below the predicted ones."""

    predicted_bytes: float
    measured_bytes: float


class PeakCorrection:
    """What a rank may fill, by prediction. Training measures; the prefetch thread only reads `limit_bytes`.

    capacity_bytes:   what the rank may fill. state_bytes: predicted for what it holds between steps.
    peak_bytes:       returns the rank's peak so far, which no step lowers.
    resolution_bytes: the largest difference that the measurement does not tell.

    Example: The second step takes 8 bytes more than predicted, where 12 are filled beside a state of 40.
        >>> peaks = iter([0, 50, 60])
        >>> correction = PeakCorrection(100, 40, peak_bytes=lambda: next(peaks))
        >>> for _ in range(2):
        ...     correction.begin_step()
        ...     correction.end_step(predicted_bytes=52.0)
        >>> correction.limit_bytes
        76.0
    """

    def __init__(
        self,
        capacity_bytes: float,
        state_bytes: float,
        peak_bytes: Callable[[], int],
        *,
        resolution_bytes: float = 0.0,
    ) -> None:
        self.capacity_bytes, self.limit_bytes = capacity_bytes, float(capacity_bytes)
        self.largest: MeasuredPeak | None = None
        self._state_bytes, self._peak_bytes, self.resolution_bytes = state_bytes, peak_bytes, resolution_bytes
        self._num_steps, self._before_bytes = 0, 0

    @property
    def is_measuring(self) -> bool:
        """Whether the next step is still one of the first."""
        return self._num_steps <= MEASURED_STEPS

    def begin_step(self) -> None:
        """Note the peak before a step."""
        self._before_bytes = self._peak_bytes()

    def end_step(self, predicted_bytes: float) -> None:
        """Correct by the peak after a step. predicted_bytes: of its fullest microbatch, as it was recomputed."""
        self._num_steps += 1
        if self._num_steps == 1:
            return
        peak_bytes = self._peak_bytes()
        # A peak that did not grow is only a bound of this step's, of use where the prediction is above it.
        is_known = peak_bytes > self._before_bytes or peak_bytes < predicted_bytes
        if is_known and (self.largest is None or predicted_bytes > self.largest.predicted_bytes):
            self.largest = MeasuredPeak(predicted_bytes, peak_bytes)
            self.limit_bytes = self._limit_bytes(self.largest)

    def _limit_bytes(self, peak: MeasuredPeak) -> float:
        """The largest predicted peak that fits, after the measured one."""
        excess = peak.measured_bytes - peak.predicted_bytes
        if abs(excess) <= self.resolution_bytes:
            return float(self.capacity_bytes)
        if excess < 0:
            return self.capacity_bytes - excess
        # Not below the state: a rank that has no room at all recomputes everything either way.
        added, room = peak.predicted_bytes - self._state_bytes, max(self.capacity_bytes - self._state_bytes, 0.0)
        in_proportion = self._state_bytes + room * added / (added + excess)
        return min(self.capacity_bytes - excess, in_proportion)


class RankCorrection(NamedTuple):
    """What a rank has measured, and what it made of it: as in `PeakCorrection`."""

    largest: MeasuredPeak | None
    limit_bytes: float


def correction_words(
    of_ranks: Sequence[RankCorrection], first_step: int, capacity_bytes: float, resolution_bytes: float
) -> str:
    """What the first steps have corrected, over all ranks, in one sentence. The rank that may fill least is named.

    first_step: the steps that were done before, by a run that is resumed.
    """
    about = f'fsdp.recompute = "auto": in steps {first_step + 2} to {first_step + 1 + MEASURED_STEPS}, '
    known = [(rank, of, of.largest) for rank, of in enumerate(of_ranks) if of.largest is not None]
    if not known:
        return f"{about}no rank filled more than when it started, so predicted bytes are not corrected."
    rank, corrected, peak = min(known, key=lambda entry: entry[1].limit_bytes)
    measured = f"rank {rank} took {size_words(peak.measured_bytes)} where {size_words(peak.predicted_bytes)} "
    if all(of.limit_bytes == capacity_bytes for of in of_ranks):
        why = f", as resident bytes do not tell less than {size_words(resolution_bytes)}" if resolution_bytes else ""
        return f"{about}{measured}was predicted; predicted bytes are not corrected{why}."
    return (
        f"{about}{measured}was predicted, so it fits microbatches to a prediction of "
        f"{size_words(corrected.limit_bytes)} in place of {size_words(capacity_bytes)}, and other ranks to their own."
    )
