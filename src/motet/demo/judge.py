"""Judges pictures of digits: whether they are read as what was asked for, differ from each other, and are new.

A support vector machine that scikit-learn trains on real digits reads them. Real digits that it has not seen are the
measure of all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.demo.images import load_handwriting

MIN_READ, MIN_SPREAD, MAX_NEAR = 0.8, 0.5, 0.05
_NEAREST_REAL = 0.01
"""The share of real digits that are nearer to a training one than what counts as near."""


@dataclass(frozen=True)
class Verdict:
    """What is said of pictures of digits.

    read, real_read: the share that is read as the digit asked for; of held-out real digits, as theirs.
    spread:    the mean distance of two pictures of a digit, over that of two held-out real ones; mean over digits.
    near:      the share that is nearer to a training digit than 99 of 100 held-out real ones are.
    distance, real_distance: the median distance to the nearest training digit, of pictures and of held-out real ones.

    Example:
        >>> Verdict(0.9, 0.98, 0.8, 0.02, 1.1, 1.2).misses
        []
    """

    read: float
    real_read: float
    spread: float
    near: float
    distance: float
    real_distance: float

    @property
    def misses(self) -> list[str]:
        """What is not as good as it should be, a clause each."""
        return [
            clause
            for missed, clause in (
                (self.read < MIN_READ, f"fewer than {MIN_READ:.0%} are read as asked"),
                (
                    self.spread < MIN_SPREAD,
                    f"two of a digit differ less than {MIN_SPREAD:.0%} as much as real ones",
                ),
                (self.near >= MAX_NEAR, f"{MAX_NEAR:.0%} or more are nearly training digits"),
            )
            if missed
        ]


class Judge:
    """Has learned to read from the training digits of `load_handwriting`, and knows the held-out ones.

    Raises UserError without scikit-learn.

    Example:
        >>> judge = Judge()
        >>> held = judge.real["heldout"]
        >>> [round(judge.verdict(*held).spread, 3), judge.verdict(*held).misses]
        [1.0, []]
        >>> judge.verdict(*judge.real["train"]).near  # copies
        1.0
    """

    def __init__(self) -> None:
        handwriting = load_handwriting()  # First: it says in a sentence that scikit-learn is missing.
        from sklearn.svm import SVC

        self.real: dict[str, tuple[Float64Array, Int64Array]] = {}
        for split, part in handwriting.items():
            instances = np.array([instance for of_digit in part.instances for instance in of_digit])
            digits = np.repeat(np.arange(10), [len(of_digit) for of_digit in part.instances])
            self.real[split] = part.pixels[instances].reshape(len(instances), -1), digits
        self._reader = SVC(gamma=0.25).fit(*self.real["train"])

    def read(self, pixels: Float64Array) -> Int64Array:
        """The digit that each picture is read as, int64 [n]. pixels: ink of 0 to 1, [n, 64]."""
        found: Int64Array = self._reader.predict(pixels).astype(np.int64)
        return found

    def verdict(self, pixels: Float64Array, digits: Int64Array) -> Verdict:
        """The Verdict on pictures. pixels: [n, 64]; digits: what was asked for, int64 [n]."""
        heldout, truth = self.real["heldout"]
        distance, real_distance = self._to_training(pixels), self._to_training(heldout)
        return Verdict(
            float((self.read(pixels) == digits).mean()),
            float((self.read(heldout) == truth).mean()),
            _spread(pixels, digits) / _spread(heldout, truth, np.unique(digits).tolist()),
            float((distance < np.quantile(real_distance, _NEAREST_REAL)).mean()),
            float(np.median(distance)),
            float(np.median(real_distance)),
        )

    def _to_training(self, pixels: Float64Array) -> Float64Array:
        """The distance of each picture to the nearest training digit, [n]."""
        nearest: Float64Array = _distances(pixels, self.real["train"][0]).min(axis=1)
        return nearest


def _spread(pixels: Float64Array, digits: Int64Array, of: Sequence[int] = tuple(range(10))) -> float:
    """The mean distance of two pictures of a digit, the mean over the given digits of which there are two."""
    means = []
    for digit in of:
        same = pixels[digits == digit]
        if len(same) > 1:
            means.append(_distances(same, same)[np.triu_indices(len(same), 1)].mean())
    return float(np.mean(means)) if means else 0.0


def _distances(some: Float64Array, others: Float64Array) -> Float64Array:
    """Euclidean distances, [len(some), len(others)]."""
    from scipy.spatial.distance import cdist

    found: Float64Array = cdist(some, others)
    return found
