"""Counts in sentences, numbers in words, and times and sizes with their unit."""

from __future__ import annotations

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_LARGE = {10**9: "billion", 10**6: "million", 1000: "thousand", 100: "hundred"}


def counted_words(number: int, thing: str, plural: str = "") -> str:
    """A number with what it counts, in the singular or the plural.

    plural: of `thing`, if it is not `thing` with an s.

    Example:
        >>> counted_words(1, "step"), counted_words(1200, "step"), counted_words(2, "batch", "batches")
        ('1 step', '1,200 steps', '2 batches')
    """
    return f"{number:,} {thing if number == 1 else plural or f'{thing}s'}"


def number_words(number: int) -> str:
    """A number from 0 to 10**12 - 1 in British words, as the package num2words has them.

    Example:
        >>> number_words(64), number_words(1205)
        ('sixty-four', 'one thousand, two hundred and five')
    """
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens = _TENS[number // 10 - 2]
        return f"{tens}-{_SMALL[number % 10]}" if number % 10 else tens
    unit = next(unit for unit in _LARGE if number >= unit)
    most, rest = divmod(number, unit)
    words = f"{number_words(most)} {_LARGE[unit]}"
    if not rest:
        return words
    return f"{words}{' and' if rest < 100 else ','} {number_words(rest)}"


def time_unit(seconds: float) -> tuple[float, str]:
    """(units in a second, name) of the unit that shows a time with a digit other than 0 before the point."""
    return next(((scale, name) for scale, name in ((1.0, "s"), (1e3, "ms")) if seconds * scale >= 1), (1e6, "µs"))


def shown_seconds(seconds: float) -> str:
    """A time with four digits and its unit.

    Example:
        >>> shown_seconds(0.009), shown_seconds(2.46813e-5)
        ('9 ms', '24.68 µs')
    """
    scale, unit = time_unit(seconds)
    value = seconds * scale
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def size_words(size_bytes: float) -> str:
    """A size with its unit.

    Example:
        >>> size_words(2.34e9), size_words(56.7e6)
        ('2.3 GB', '56.7 MB')
    """
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3g} MB"
