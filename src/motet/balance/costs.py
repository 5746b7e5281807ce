"""How the items of a rank add up to its load. All costs are integers, so every rank computes the same."""

from __future__ import annotations

from dataclasses import dataclass

from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX
from motet.core.plan import Policy


@dataclass(frozen=True)
class Packed:
    """Items without padding: a rank's load is the sum of linear * length + quadratic * length^2.

    OrchMLLM equation 2 without padding. Only the ratio of the coefficients matters; round fitted ones to integers.

    Example:
        >>> from motet.balance import assign
        >>> assign([4, 3, 3], num_ranks=2, cost=Packed(1, 2)).loads.tolist()  # 4 + 2 * 16; 2 * (3 + 2 * 9)
        [36, 42]
    """

    linear: int = 1
    quadratic: int = 0

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("quadratic", self.quadratic)):
            if not isinstance(value, int) or not 0 <= value <= INT64_MAX:
                raise ArgumentError(f"Packed({name}={value!r}): a coefficient must be an integer from 0 to 2^63 - 1.")

    def weights(self, lengths: Int64Array) -> Int64Array:
        """The cost of each item, int64 [num_items]. Raises ArgumentError where the sum does not fit int64."""
        longest = int(lengths.max(initial=0))
        if len(lengths) * (self.linear * longest + self.quadratic * longest**2) > INT64_MAX:
            exact = sum(self.linear * length + self.quadratic * length**2 for length in lengths.tolist())
            if exact > INT64_MAX:
                raise ArgumentError(
                    f"{self} of {len(lengths)} items up to {longest} long adds up to {exact}, past 2^63 - 1."
                )
        return self.alone(lengths)

    def alone(self, lengths: Int64Array) -> Int64Array:
        """The cost of each item alone on a rank, int64 [num_items]."""
        return _alone(lengths, self.linear, self.quadratic)


@dataclass(frozen=True)
class Padded:
    """Items padded to the longest of their rank: its load is count * (linear * longest + quadratic * longest^2).

    OrchMLLM equation 2 with padding. Only the ratio of the coefficients matters; round fitted ones to integers.

    Example:
        >>> from motet.balance import assign
        >>> assign([9, 2, 2, 2], num_ranks=2, cost=Padded()).loads.tolist()  # 1 * 9; 3 * 2
        [9, 6]
    """

    linear: int = 1
    quadratic: int = 0

    def __post_init__(self) -> None:
        _check_coefficients(self, self.linear, self.quadratic, at_least=0)

    def weights(self, lengths: Int64Array) -> Int64Array:
        """The lengths themselves. Raises ArgumentError where the load of all items on one rank does not fit int64."""
        _check_padded(self, self.linear, self.quadratic, lengths)
        return lengths

    def alone(self, lengths: Int64Array) -> Int64Array:
        """The cost of each item alone on a rank, int64 [num_items]. Items together cost at least the sum of these."""
        return _alone(lengths, self.linear, self.quadratic)


@dataclass(frozen=True)
class PaddedAttention:
    """Items padded in attention alone: a load is linear * (sum of lengths) + quadratic * count * longest^2.

    OrchMLLM's ConvTransformer (appendix A, above Algorithm 5). Both coefficients are at least 1: without the quadratic
    one this is Packed, without the linear one Padded. Only their ratio matters; round fitted ones to integers.

    Example:
        >>> from motet.balance import assign
        >>> assign([9, 2, 2, 2], num_ranks=2, cost=PaddedAttention()).loads.tolist()  # 9 + 1 * 81; 6 + 3 * 4
        [90, 18]
    """

    linear: int = 1
    quadratic: int = 1

    def __post_init__(self) -> None:
        _check_coefficients(self, self.linear, self.quadratic, at_least=1)

    def weights(self, lengths: Int64Array) -> Int64Array:
        """The lengths themselves. Raises ArgumentError where the load of all items on one rank does not fit int64."""
        _check_padded(self, self.linear, self.quadratic, lengths)
        return lengths

    def alone(self, lengths: Int64Array) -> Int64Array:
        """The cost of each item alone on a rank, int64 [num_items]. Items together cost at least the sum of these."""
        return _alone(lengths, self.linear, self.quadratic)


def _alone(lengths: Int64Array, linear: int, quadratic: int) -> Int64Array:
    if quadratic == 0:
        return lengths if linear == 1 else lengths * linear
    return lengths * (linear + quadratic * lengths)


def _check_coefficients(cost: Padded | PaddedAttention, linear: int, quadratic: int, at_least: int) -> None:
    for value in (linear, quadratic):
        if not isinstance(value, int) or not at_least <= value <= INT64_MAX:
            raise ArgumentError(f"{cost}: a coefficient must be an integer from {at_least} to 2^63 - 1.")


def _check_padded(cost: Padded | PaddedAttention, linear: int, quadratic: int, lengths: Int64Array) -> None:
    longest = int(lengths.max(initial=0))
    if len(lengths) * (linear * longest + quadratic * longest**2) > INT64_MAX:
        raise ArgumentError(f"{cost} of {len(lengths)} items up to {longest} long can exceed 2^63 - 1.")


Cost = Packed | Padded | PaddedAttention


def cost_of(policy: Policy, coefficients: Packed | None = None) -> Cost:
    """The Cost by which a policy adds up work.

    coefficients: those of "padded_attention", which has no figure of an item by itself; other policies add up work
    that has them in it already (`LengthWork`).
    """
    if policy == "padded_attention":
        stated = coefficients or Packed(linear=1, quadratic=1)
        return PaddedAttention(stated.linear, stated.quadratic)
    return Padded() if policy == "padded" else Packed()
