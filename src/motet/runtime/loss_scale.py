"""The loss scale of float16: gradients are computed of a multiple of the loss, so that small ones are not rounded to 0.

Micikevicius et al. 2018 (Mixed Precision Training, section 3.2). The scale is a power of two, so multiplying and
dividing by it rounds nothing. A step whose gradients overflow changes nothing and halves the scale; a number of finite
steps in a row doubles it.

The norm of the gradients is summed over all ranks before anything is updated, and one that is not finite makes the sum
so. All ranks therefore skip the same steps and have the same scale, and no rank tells another.
"""

from __future__ import annotations

_LARGEST = 2.0**32
"""No gradient of float16 is so small that a larger scale would help it, and float32 still holds its square."""


class LossScale:
    """The scale of a run.

    value:      a power of two, from 1.
    num_finite: finite steps since it last changed. grow_after: how many of them double it.

    Example:
        >>> scale = LossScale(1024.0, grow_after=2)
        >>> scale.overflowed()
        >>> scale.value
        512.0
        >>> scale.passed(); scale.passed()
        >>> scale.value, scale.num_finite
        (1024.0, 0)
    """

    def __init__(self, value: float, grow_after: int, num_finite: int = 0) -> None:
        self.value, self.grow_after, self.num_finite = value, grow_after, num_finite

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale is left to be tried."""
        return self.value > 1

    def passed(self) -> None:
        """Note a step that was finite."""
        self.num_finite += 1
        if self.num_finite >= self.grow_after:
            self.value, self.num_finite = min(2 * self.value, _LARGEST), 0

    def overflowed(self) -> None:
        """Note a step whose loss is finite and whose gradients are not."""
        self.value, self.num_finite = max(self.value / 2, 1.0), 0
