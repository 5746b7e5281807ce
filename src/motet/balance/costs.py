"""What a rank's load is made of: the costs that a phase can be balanced on. All integer, so the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX


@dataclass(frozen=True)
class Packed:
    """Items of a rank are computed without padding: the load is the sum of linear * length + quadratic * length^2.

    OrchMLLM equation 2 without padding. Quantise fitted coefficients before: only their ratio matters.
    """

    linear: int = 1
    quadratic: int = 0

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("quadratic", self.quadratic)):
            if not isinstance(value, int) or value < 0:
                raise ArgumentError(f"Packed({name}={value!r}): a coefficient must be an integer of 0 or more.")

    def weights(self, lengths: Int64Array) -> Int64Array:
        """The cost of each item, int64 [num_items]. Raises ArgumentError where their sum does not fit int64."""
        longest = int(lengths.max(initial=0))
        if len(lengths) * (self.linear * longest + self.quadratic * longest**2) > INT64_MAX:
            exact = sum(self.linear * length + self.quadratic * length**2 for length in lengths.tolist())
            if exact > INT64_MAX:
                raise ArgumentError(
                    f"{self} of {len(lengths)} items up to {longest} long adds up to {exact}, past 2^63 - 1."
                )
        return self.alone(lengths)

    def alone(self, lengths: Int64Array) -> Int64Array:
        """What each item costs by itself on a rank, int64 [num_items]."""
        return _alone(lengths, self.linear, self.quadratic)


@dataclass(frozen=True)
class Padded:
    """Items of a rank are padded to the longest of them: count * (linear * longest + quadratic * longest^2).

    OrchMLLM equation 2 with padding. Quantise fitted coefficients before: only their ratio matters.
    """

    linear: int = 1
    quadratic: int = 0

    def __post_init__(self) -> None:
        _check_coefficients(self, self.linear, self.quadratic, at_least=0)

    def weights(self, lengths: Int64Array) -> Int64Array:
        """The lengths themselves. Raises ArgumentError where all items on one rank would not fit int64."""
        _check_padded(self, self.linear, self.quadratic, lengths)
        return lengths

    def alone(self, lengths: Int64Array) -> Int64Array:
        """What each item costs by itself on a rank, int64 [num_items]; together they cost more."""
        return _alone(lengths, self.linear, self.quadratic)


@dataclass(frozen=True)
class PaddedAttention:
    """Only attention pads to the longest item: linear * (sum of lengths) + quadratic * count * longest^2.

    OrchMLLM's ConvTransformer (appendix A, above Algorithm 5). Both coefficients are 1 or more: without the quadratic
    one this is Packed, without the linear one Padded. Quantise fitted coefficients before: only their ratio matters.
    """

    linear: int = 1
    quadratic: int = 1

    def __post_init__(self) -> None:
        _check_coefficients(self, self.linear, self.quadratic, at_least=1)

    def weights(self, lengths: Int64Array) -> Int64Array:
        """The lengths themselves. Raises ArgumentError where all items on one rank would not fit int64."""
        _check_padded(self, self.linear, self.quadratic, lengths)
        return lengths

    def alone(self, lengths: Int64Array) -> Int64Array:
        """What each item costs by itself on a rank, int64 [num_items]; together they cost more."""
        return _alone(lengths, self.linear, self.quadratic)


def _alone(lengths: Int64Array, linear: int, quadratic: int) -> Int64Array:
    if quadratic == 0:
        return lengths if linear == 1 else lengths * linear
    return lengths * (linear + quadratic * lengths)


def _check_coefficients(cost: Padded | PaddedAttention, linear: int, quadratic: int, at_least: int) -> None:
    for value in (linear, quadratic):
        if not isinstance(value, int) or value < at_least:
            raise ArgumentError(f"{cost}: a coefficient must be an integer of {at_least} or more.")


def _check_padded(cost: Padded | PaddedAttention, linear: int, quadratic: int, lengths: Int64Array) -> None:
    longest = int(lengths.max(initial=0))
    if len(lengths) * (linear * longest + quadratic * longest**2) > INT64_MAX:
        raise ArgumentError(f"{cost} of {len(lengths)} items up to {longest} long can exceed 2^63 - 1.")


Cost = Packed | Padded | PaddedAttention
