"""Bounds of options: what lies outside of them is a slip of the hand, and would hang or fill the memory."""

from __future__ import annotations

from collections.abc import Mapping


def check_attributes(options: object, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Raises ValueError for the first of the named attributes that is not from its lowest to its highest value.

    An attribute may be None, or a tuple, each value of which is held to the bounds. NaN lies outside of all bounds.
    """
    for name, (lowest, highest) in bounds.items():
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and not lowest <= value <= highest:
                raise ValueError(f"{name} must be from {lowest:,} to {highest:,}, not {given}")
