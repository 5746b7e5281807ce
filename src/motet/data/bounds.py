"""Bounds of options. A value out of bounds is a slip, and would hang or fill the memory."""

from __future__ import annotations

from collections.abc import Mapping


def check_attributes(options: object, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Raise ValueError for the first attribute of `options` that is out of its bounds, name -> (lowest, highest).

    An attribute may be None. Each value of a tuple is checked. NaN is out of all bounds.
    """
    for name, (lowest, highest) in bounds.items():
        option = getattr(options, name)
        for value in option if isinstance(option, tuple) else (option,):
            if value is not None and not lowest <= value <= highest:
                raise ValueError(f"{name} must be from {lowest:,} to {highest:,}, not {option}")
