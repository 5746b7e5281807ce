"""Which samples form a minibatch, decided for a whole epoch: groups of similar vision and text size.

`group` is OmniBal's iterative sampling and filtering (ISF), and `group_phases` is the same for any phases.
`suggest_caps` and `suggest_phase_caps` find their limits from the data.
`pad_ratio` and `dist_ratio` measure any division into minibatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend, algorithms
from motet.balance.checks import checked_integers
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX
from motet.core.workload import BACKBONE

TEXT_SLACK = 128
"""A group is full if its text is at most this many tokens below the cap (OmniBal section 5.2, table 6)."""
_ENCODER_SLACK = 32
"""`group_phases`: a group is full if an encoder's length is at most this part of the cap below it.

OmniBal has no slack for images, which it counts. Lengths in patches or frames hardly ever meet a cap exactly. Of its
text cap of 4,096, this part is the 128 tokens."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Samples in groups: full groups first, then samples above a cap, each alone, then leftover groups.

    items:     int64 [num_samples], sample numbers by group (CSR values).
    offsets:   int64 [num_groups + 1]; group g has items[offsets[g]:offsets[g + 1]], at least one.
    num_full:  the number of groups that reach a minimum.
    oversized: int64 [num_oversized], the samples above a cap: groups num_full .. num_full + num_oversized - 1.

    Example:
        >>> groups = group(vision=[2, 2, 9, 1], text=[10, 10, 10, 10], max_vision=4, max_text=40, min_text=20)
        >>> groups.num_full, groups.oversized.tolist()
        (1, [2])
        >>> sorted(groups.samples_of(0).tolist())
        [0, 1]
    """

    items: Int64Array
    offsets: Int64Array
    num_full: int
    oversized: Int64Array

    @property
    def num_groups(self) -> int:
        """The number of all groups."""
        return len(self.offsets) - 1

    @property
    def leftover(self) -> range:
        """The numbers of the groups that reach no minimum; they come last."""
        return range(self.num_full + len(self.oversized), self.num_groups)

    def samples_of(self, group: int) -> Int64Array:
        """The samples of a group, int64."""
        return self.items[self.offsets[group] : self.offsets[group + 1]]

    def totals(self, values: Int64Array) -> Int64Array:
        """Sums over groups, int64 [num_groups], of values, int64 [num_samples]."""
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values[self.items])])
        totals: Int64Array = before[self.offsets[1:]] - before[self.offsets[:-1]]
        return totals


@dataclass(frozen=True)
class GroupCaps:
    """The caps of a group, Qv and Qt in OmniBal, and the minima that make it full, Q'v or Q't.

    Example:
        >>> suggest_caps(vision=[1, 2, 3], text=[300, 400, 500])
        GroupCaps(max_vision=8, max_text=1600, min_vision=8, min_text=1472)
    """

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
    """Group samples so that the vision and text totals of a group are at most the caps, and near one of them.

    vision, text: int [num_samples], >= 0: the images (or patches) of each sample, and the tokens of its sequence.
    min_vision, min_text: a group that reaches one of them is full; by default max_vision and max_text - 128.
    num_iterations: passes over the samples that are in no full group yet.
    seed: of the shuffles; it must be the same on every rank.

    Every sample is in exactly one group. A group exceeds a cap only if it is a single sample above it.
    O(num_samples) a pass. OmniBal Algorithm 1 with corrections (reference/grouping.py).
    Raises ArgumentError for sizes as `assign` does, for shapes that differ, and for caps that no sample meets.
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


def group_phases(
    sizes: Mapping[str, ArrayLike], caps: Mapping[str, int], *, num_iterations: int = 10, seed: int = 0
) -> Groups:
    """`group` for the phases of a model: the total of a group is at most the cap of each phase, and near one of them.

    sizes: per phase, int [num_samples], >= 0: the summed length of each sample's items, e.g. of all its images.
    caps:  of the phases that count. The others are not looked at.

    A group is full from TEXT_SLACK below the backbone's cap. Below an encoder's it is full if the smallest item would
    not fit, or from a thirty-second of the cap below it. Two phases take the native core, others the reference.
    Raises ArgumentError as `group` does, and for caps of unknown phases.
    """
    if not caps or not caps.keys() <= sizes.keys():
        raise ArgumentError(f"caps are of {', '.join(caps) or 'no phase'}; they must be of {', '.join(sizes)}.")
    columns = [checked_integers(sizes[name], name) for name in caps]
    if len(shapes := {column.shape for column in columns}) > 1:
        raise ArgumentError(f"sizes have shapes {', '.join(map(str, sorted(shapes)))}; all must be equal.")
    _check_phase_caps(dict(zip(caps, columns)), caps)
    most = list(caps.values())
    enough = [
        _slack_below(cap) if name == BACKBONE else _encoder_minimum(column, cap)
        for column, (name, cap) in zip(columns, caps.items())
    ]
    if len(caps) == 2:
        (vision, text), (min_vision, min_text) = columns, enough
        return group(
            vision,
            text,
            most[0],
            most[1],
            min_vision=min_vision,
            min_text=min_text,
            num_iterations=num_iterations,
            seed=seed,
        )
    # It has no native twin, and its package has all reference algorithms, which few commands need.
    from motet.balance.reference.grouping import isf_of_phases

    items, offsets, num_full, num_oversized = isf_of_phases(columns, most, enough, num_iterations, seed)
    return Groups(items, offsets, num_full, items[offsets[num_full] : offsets[num_full + num_oversized]])


def suggest_phase_caps(sizes: Mapping[str, ArrayLike], *, batch_size: int = 4) -> dict[str, int]:
    """Caps for `group_phases` from the sizes of a dataset: those of `suggest_caps`, for the backbone and each encoder.

    sizes: as in `group_phases`, the backbone's among them. Caps are at least 1. Raises ArgumentError as it does.

    Example:
        >>> suggest_phase_caps({"image": [256, 1024, 0], "backbone": [300, 500, 400]})
        {'image': 1706, 'backbone': 1600}
    """
    text = sizes[BACKBONE]
    by_phase = {name: suggest_caps(column, text, batch_size=batch_size) for name, column in sizes.items()}
    return {name: max(caps.max_text if name == BACKBONE else caps.max_vision, 1) for name, caps in by_phase.items()}


def suggest_caps(vision: ArrayLike, text: ArrayLike, *, batch_size: int = 4) -> GroupCaps:
    """Caps and minima from the sizes of a dataset (OmniBal section 5.2).

    vision, text: as in `group`, at least one sample.
    batch_size: the text cap is at least batch_size * (mean text). Without this, data that was cut to one length would
        form groups of one sample.

    Text cap: the longest text. Vision cap: text cap * (mean vision) / (mean text), but at least the largest sample,
    which else would be alone. Minima: the vision cap, and 128 tokens below the text cap.
    Raises ArgumentError as `group` does, and for no samples or batch_size < 1.
    """
    if batch_size < 1:
        raise ArgumentError(f"batch_size is {batch_size}; it must be at least 1.")
    vision, text = checked_integers(vision, "vision"), checked_integers(text, "text")
    if len(vision) == 0 or vision.shape != text.shape:
        raise ArgumentError(
            f"vision and text have shapes {vision.shape} and {text.shape}; their lengths must be equal, at least 1."
        )
    max_text = max(int(text.max()), batch_size * int(text.sum()) // len(text))
    with_text = max_text * int(vision.sum()) // max(int(text.sum()), 1)
    max_vision = max(with_text, int(vision.max()))
    return GroupCaps(max_vision, max_text, max_vision, _slack_below(max_text))


def pad_ratio(lengths: ArrayLike, offsets: ArrayLike) -> float:
    """The share of padding if each minibatch is padded to its longest sample: the mean over minibatches.

    lengths: int [num_samples], tokens of each sample, ordered by minibatch.
    offsets: int [num_minibatches + 1], where each minibatch begins; none may be empty.
    OmniBal equation 1; 0 without minibatches. Raises ArgumentError for other offsets.
    """
    tokens, starts = checked_integers(lengths, "lengths"), checked_integers(offsets, "offsets")
    if len(starts) < 1 or starts[0] != 0 or starts[-1] != len(tokens) or (np.diff(starts) < 1).any():
        raise ArgumentError(f"offsets must grow from 0 to {len(tokens)}, the number of lengths.")
    if len(starts) == 1:
        return 0.0
    padded = np.maximum.reduceat(tokens, starts[:-1]) * np.diff(starts)
    return _mean_share_missing(np.add.reduceat(tokens, starts[:-1]), padded)


def dist_ratio(totals: ArrayLike) -> float:
    """The share of a step in which a device waits for the fullest one: the mean over devices and steps.

    totals: int [num_steps, num_devices], tokens of the minibatch of each device. OmniBal equation 2; 0 without steps.
    """
    tokens = checked_integers(totals, "totals", 2)
    if tokens.size == 0:
        return 0.0
    return _mean_share_missing(tokens.sum(axis=1), tokens.max(axis=1) * tokens.shape[1])


def _mean_share_missing(used: Int64Array, whole: Int64Array) -> float:
    """The mean of (whole - used) / whole."""
    return float(np.mean((whole - used) / np.maximum(whole, 1)))


def _encoder_minimum(lengths: Int64Array, cap: int) -> int:
    """The length of an encoder that makes a group full."""
    has_any = lengths[lengths > 0]
    smallest = int(has_any.min()) if len(has_any) else 1
    return max(cap - max(cap // _ENCODER_SLACK, smallest - 1), 0)


def _slack_below(max_text: int) -> int:
    """The text that makes a group full: TEXT_SLACK below the cap, but at least half of it."""
    return max_text - min(TEXT_SLACK, max_text // 2)


def _check_caps(vision: Int64Array, text: Int64Array, max_vision: int, max_text: int) -> None:
    _check_phase_caps({"max_vision": vision, "max_text": text}, {"max_vision": max_vision, "max_text": max_text})


def _check_phase_caps(sizes: Mapping[str, Int64Array], caps: Mapping[str, int]) -> None:
    """Raise ArgumentError for a cap out of range, and unless some sample meets all of them."""
    for name, cap in caps.items():
        if not 0 <= cap <= INT64_MAX:
            raise ArgumentError(f"{name} is {cap}; it must be in 0 .. 2^63 - 1.")
        if len(sizes[name]) and sizes[name].min() > cap:
            raise ArgumentError(f"{name} is {cap}; no sample meets it, the smallest has {sizes[name].min()}.")
    meets = [sizes[name] <= cap for name, cap in caps.items()]
    if meets[0].size and not np.all(meets, axis=0).any():
        stated = " and ".join(f"{name} is {cap}" for name, cap in caps.items())
        raise ArgumentError(f"{stated}; no sample meets {'both' if len(caps) == 2 else 'all'}.")
