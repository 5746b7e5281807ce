"""Counts in sentences."""

from __future__ import annotations


def counted_words(number: int, thing: str, plural: str = "") -> str:
    """A number with what it counts, in the singular or the plural.

    plural: of `thing`, if it is not `thing` with an s.

    Example:
        >>> counted_words(1, "step"), counted_words(1200, "step"), counted_words(2, "batch", "batches")
        ('1 step', '1,200 steps', '2 batches')
    """
    return f"{number:,} {thing if number == 1 else plural or f'{thing}s'}"
