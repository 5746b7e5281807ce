"""Examples that are not trained on, or not to their end: counted, and the first of them named with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from motet.core.words import counted_words

MAX_NAMED = 20
"""Examples that are named for each reason."""


@dataclass(frozen=True)
class LeftOutExample:
    """An example that is not trained on. where: its position in its manifest. file: "" if no file is the reason."""

    where: str
    file: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.file, self.reason)))


@dataclass(frozen=True)
class LeftOut:
    """Counts of the examples that are not trained on, by reason.

    num_bad:      examples with a file that could not be used when the index was built.
    num_refused:  examples with an item that its transform refuses.
    num_too_long: examples with more tokens than allowed.
    num_truncated: examples of which the end alone is left out, as they are too long; `len` does not count them.
    named:        the first MAX_NAMED examples of each reason.
    num_too_large: examples that need more memory than a rank has, alone in a microbatch.

    Example:
        >>> left_out = LeftOut(num_bad=1, named=(LeftOutExample("train.jsonl, line 2", "a.png", "no such file"),))
        >>> describe_left_out(left_out, num_in_manifests=8), left_out.first()
        ('1 of 8 examples left out: 1 with files that cannot be used', 'train.jsonl, line 2: a.png: no such file')
    """

    num_bad: int = 0
    num_refused: int = 0
    num_too_long: int = 0
    num_truncated: int = 0
    named: tuple[LeftOutExample, ...] = ()
    num_too_large: int = 0

    def __len__(self) -> int:
        return self.num_bad + self.num_refused + self.num_too_long + self.num_too_large

    def __bool__(self) -> bool:
        """Whether anything is left out, if only the end of an example."""
        return len(self) > 0 or self.num_truncated > 0

    @classmethod
    def joined(cls, parts: Sequence[LeftOut]) -> LeftOut:
        """The left-out examples of several datasets, of which the first MAX_NAMED are named."""
        return cls(
            sum(part.num_bad for part in parts),
            sum(part.num_refused for part in parts),
            sum(part.num_too_long for part in parts),
            sum(part.num_truncated for part in parts),
            tuple(example for part in parts for example in part.named)[:MAX_NAMED],
            sum(part.num_too_large for part in parts),
        )

    def with_too_large(self, named: Sequence[LeftOutExample], count: int) -> LeftOut:
        """These, and `count` examples that need more memory than a rank has, of which some are named."""
        return replace(self, num_too_large=self.num_too_large + count, named=(*self.named, *named))

    def first(self, count: int = 3) -> str:
        """The first `count` named examples with their reasons, for a sentence."""
        return "; ".join(str(example) for example in self.named[:count])


def describe_left_out(left_out: LeftOut, num_in_manifests: int) -> str:
    """One line for the terminal: how many examples are left out or truncated, and why."""
    parts = [
        (left_out.num_bad, "with files that cannot be used"),
        (left_out.num_refused, "with media that the transform refuses"),
        (left_out.num_too_long, "longer than max_sequence_length"),
        (left_out.num_too_large, "that need more memory than a rank has"),
    ]
    listed = ", ".join(f"{count} {why}" for count, why in parts if count)
    said = f"{len(left_out)} of {counted_words(num_in_manifests, 'example')} left out" + (
        f": {listed}" if listed else ""
    )
    return said + (f"; {left_out.num_truncated} truncated to max_sequence_length" if left_out.num_truncated else "")
