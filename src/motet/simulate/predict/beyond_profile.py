"""What of a prediction lies beyond the batches that a profile measured: said, and refused where it would be a guess.

Rows beyond the most that were measured take as long as the last of them, at most the mean: a straight line, which holds
for some multiples of what was measured. How attention grows with the keys of a row is another matter: where more than
half of what a row computes is with more keys than were ever measured, no measurement says what it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from motet.cost.model import Beyond

_MAX_TIMES_ROWS, _MAX_TIMES_OPERATIONS = 16.0, 2.0
"""The most times as many rows as were measured, and operations a row, of which seconds are no guess."""
_SAID = 1.1
"""What is beyond by less than this factor is not worth a sentence."""


def guesses(beyond: Mapping[str, Beyond]) -> str:
    """The module of which a prediction would be a guess, in a sentence; "" if there is none."""
    for name, by in beyond.items():
        if by.rows > _MAX_TIMES_ROWS or by.operations > _MAX_TIMES_OPERATIONS:
            return (
                f"What module {name!r} takes would be a guess: a microbatch has {_words(by)} of the profile. Profile "
                "for more --seconds, or predict smaller microbatches."
            )
    return ""


def extrapolated(beyond: Mapping[str, Beyond]) -> Iterator[str]:
    """A sentence for each module whose microbatches are beyond the profile."""
    for name, by in beyond.items():
        if max(by.rows, by.keys) > _SAID:
            yield (
                f"Beyond the profile: a microbatch of {name} has {_words(by)} of the profile; its seconds are "
                "extrapolated, and grow no faster than its operations."
            )


def _words(by: Beyond) -> str:
    told = [f"{by.rows:.3g} times the rows"] if by.rows > _SAID else []
    told += [f"{by.keys:.3g} times the keys a row"] if by.keys > _SAID else []
    return " and ".join(told)
