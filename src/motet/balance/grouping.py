"""Which samples form a minibatch, for a whole epoch at once: groups alike in vision and in text size.

`group` is OmniBal's iterative sampling and filtering; `suggest_caps` finds its limits from the data; `pad_ratio` and
`dist_ratio` measure any batching.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX

TEXT_SLACK = 128
"""How far a group's text may stay below the cap for it to be full (OmniBal section 5.2, table 6)."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Samples in groups: full ones first, then samples above a cap, each alone, then leftover groups.

    items:     int64 [num_samples], sample numbers by group (CSR values).
    offsets:   int64 [num_groups + 1]; group g has items[offsets[g]:offsets[g + 1]], at least one.
    num_full:  how many groups reach a target.
    oversized: int64 [num_oversized], the samples above a cap; groups num_full .. num_full + num_oversized - 1.
    """

    items: Int64Array
    offsets: Int64Array
    num_full: int
    oversized: Int64Array

    @property
    def num_groups(self) -> int:
        return len(self.offsets) - 1

    @property
    def leftover(self) -> range:
        """The groups at the end that reach no target."""
        return range(self.num_full + len(self.oversized), self.num_groups)

    def samples_of(self, group: int) -> Int64Array:
        return self.items[self.offsets[group] : self.offsets[group + 1]]

    def totals(self, values: Int64Array) -> Int64Array:
        """The sum of values, int64 [num_samples], over each group, int64 [num_groups]."""
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values[self.items])])
        totals: Int64Array = before[self.offsets[1:]] - before[self.offsets[:-1]]
        return totals


@dataclass(frozen=True)
class GroupCaps:
    """What a group must not exceed, Qv and Qt, and what makes it full, Q'v or Q't."""

    max_vision: int
    max_text: int
    min_vision: int
    min_text: int


def group(
    vision: ArrayLike,
    text: ArrayLike,
    max_vision: int,
    max_text: int,
    *,
    min_vision: int | None = None,
    min_text: int | None = None,
    num_iterations: int = 10,
    seed: int = 0,
    backend: Backend = "native",
) -> Groups:
    """Group samples so that vision and text totals are at most the caps and, for full groups, near one of them.

    vision, text: int [num_samples], >= 0, each sample's images (or patches) and its tokens in the sequence.
    min_vision, min_text: a group that reaches one of them is full; by default max_vision and max_text - 128.
    num_iterations: passes over what is not in a full group yet. seed: of the shuffles, the same on every rank.
    Every sample is in exactly one group; only a sample above a cap, alone, makes a group above it.
    Raises ArgumentError for sizes as `assign` does, shapes that differ, and caps that no sample meets.
    O(num_samples) a pass. OmniBal Algorithm 1 with corrections (see reference/grouping.py).
    """
    vision, text = checked_integers(vision, "vision"), checked_integers(text, "text")
    if vision.shape != text.shape:
        raise ArgumentError(f"text has shape {text.shape}; it must be that of vision, {vision.shape}.")
    _check_caps(vision, text, max_vision, max_text)
    min_vision = max_vision if min_vision is None else min_vision
    min_text = _slack_below(max_text) if min_text is None else min_text
    for name, value, cap in (("vision", min_vision, max_vision), ("text", min_text, max_text)):
        if not 0 <= value <= cap:
            raise ArgumentError(f"min_{name} is {value}; it must be in 0 .. max_{name}, which is {cap}.")
    if num_iterations < 1:
        raise ArgumentError(f"num_iterations is {num_iterations}; it must be at least 1.")
    if not 0 <= seed < 2**64:
        raise ArgumentError(f"seed is {seed}; it must be in 0 .. 2^64 - 1.")
    items, offsets, num_full, num_oversized = algorithms(backend).isf(
        vision, text, max_vision, max_text, min_vision, min_text, num_iterations, seed
    )
    return Groups(items, offsets, num_full, items[offsets[num_full] : offsets[num_full + num_oversized]])


def suggest_caps(vision: ArrayLike, text: ArrayLike, *, batch_size: int = 4) -> GroupCaps:
    """Caps and targets from a data set's statistics (OmniBal section 5.2); arguments as of `group`, not empty.

    The text cap is the longest text; the vision cap is what goes with so much text on average, but no less than the
    largest sample, which would else be alone. Targets: the vision cap, and 128 tokens below the text cap.
    batch_size: where the longest text is less than that of so many samples on average, theirs is the cap: data that was
    cut to a length would else form groups of one sample, which no other fits beside.
    """
    if batch_size < 1:
        raise ArgumentError(f"batch_size is {batch_size}; it must be at least 1.")
    vision, text = checked_integers(vision, "vision"), checked_integers(text, "text")
    if len(vision) == 0 or vision.shape != text.shape:
        raise ArgumentError(
            f"vision and text have shapes {vision.shape} and {text.shape}; give samples, as many of both."
        )
    max_text = max(int(text.max()), batch_size * int(text.sum()) // len(text))
    with_text = max_text * int(vision.sum()) // max(int(text.sum()), 1)
    max_vision = max(with_text, int(vision.max()))
    return GroupCaps(max_vision, max_text, max_vision, _slack_below(max_text))


def pad_ratio(lengths: ArrayLike, offsets: ArrayLike) -> float:
    """The share of padding where each minibatch is padded to its longest sample, on average over minibatches.

    lengths: int [num_samples], tokens of each sample, minibatch after minibatch. offsets: int [num_minibatches + 1],
    where each begins; none may be empty. OmniBal equation 1 for each; 0 without minibatches.
    """
    tokens, starts = checked_integers(lengths, "lengths"), checked_integers(offsets, "offsets")
    if len(starts) < 1 or starts[0] != 0 or starts[-1] != len(tokens) or (np.diff(starts) < 1).any():
        raise ArgumentError(f"offsets must grow from 0 to {len(tokens)}, the number of lengths.")
    if len(starts) == 1:
        return 0.0
    padded = np.maximum.reduceat(tokens, starts[:-1]) * np.diff(starts)
    return _mean_share_missing(np.add.reduceat(tokens, starts[:-1]), padded)


def dist_ratio(totals: ArrayLike) -> float:
    """The share of a step that devices wait for the fullest of them, on average over steps.

    totals: int [num_steps, num_devices], tokens of each device's minibatch. OmniBal equation 2 for each; 0 without.
    """
    tokens = checked_integers(totals, "totals", 2)
    if tokens.size == 0:
        return 0.0
    return _mean_share_missing(tokens.sum(axis=1), tokens.max(axis=1) * tokens.shape[1])


def _mean_share_missing(used: Int64Array, whole: Int64Array) -> float:
    return float(np.mean((whole - used) / np.maximum(whole, 1)))


def _slack_below(max_text: int) -> int:
    return max_text - min(TEXT_SLACK, max_text // 2)


def _check_caps(vision: Int64Array, text: Int64Array, max_vision: int, max_text: int) -> None:
    for name, sizes, cap in (("max_vision", vision, max_vision), ("max_text", text, max_text)):
        if not 0 <= cap <= INT64_MAX:
            raise ArgumentError(f"{name} is {cap}; it must be in 0 .. 2^63 - 1.")
        if len(sizes) and sizes.min() > cap:
            raise ArgumentError(f"{name} is {cap}; no sample meets it, the smallest has {sizes.min()}.")
    if len(vision) and not ((vision <= max_vision) & (text <= max_text)).any():
        raise ArgumentError(f"max_vision is {max_vision} and max_text is {max_text}; no sample meets both.")
