"""The order of an epoch as groups of examples under a cap a phase: `data.group` (OmniBal section 4.1, Algorithm 1).

OmniBal groups a dataset once, drops the last part of a group, and says nothing of samples above a cap. Here each epoch
is grouped anew by its own seed, and every example is in exactly one group: one above a cap is a group of its own. Full
groups come first, shuffled. The others, which are uneven, end the epoch in the order of their size, so that those of a
step are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from motet.balance import group_phases, suggest_phase_caps
from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.workload import BACKBONE, total_lengths
from motet.data.examples import Examples
from motet.data.order import StepExamples
from motet.data.permutation import permute

_SCAN_EXAMPLES = 1 << 16


class EpochGroups(NamedTuple):
    """The groups of one epoch. Group g has the examples items[offsets[g]:offsets[g + 1]].

    items:   int64 [num_examples]. offsets: int64 [num_groups + 1].
    num_full, num_oversized: groups that are full, and groups of one example above a cap.
    """

    items: Int64Array
    offsets: Int64Array
    num_full: int
    num_oversized: int

    @property
    def num_groups(self) -> int:
        """The number of all groups."""
        return len(self.offsets) - 1


@dataclass(frozen=True, eq=False)
class GroupedOrder:
    """The examples of all epochs in groups, a pure function of (totals, caps, seed). A position counts examples.

    totals: per phase, int64 [num_examples]: the summed length of each example's items.
    caps:   per phase, the largest sum of a group, unless it is a single example.

    Example:
        >>> order = GroupedOrder({"backbone": np.array([3, 9, 3, 2, 4, 3])}, {"backbone": 6}, seed=1)
        >>> first = order.step(position=0, batch_size=2)
        >>> first.group.tolist(), order.totals["backbone"][first.ids].tolist()
        ([0, 0, 1, 1], [4, 2, 3, 3])
        >>> order.epoch(0).num_groups, order.oversized.tolist()
        (4, [1])
    """

    totals: Mapping[str, Int64Array]
    caps: Mapping[str, int]
    seed: int = 0
    _epochs: dict[int, EpochGroups] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_examples(self) -> int:
        """The examples of an epoch."""
        return len(self.totals[BACKBONE])

    @property
    def oversized(self) -> Int64Array:
        """The examples above a cap, int64, ascending."""
        return np.flatnonzero(np.any([self.totals[name] > cap for name, cap in self.caps.items()], axis=0))

    @property
    def largest(self) -> dict[str, int]:
        """Per phase, the largest sum that any group of any epoch can have: the cap, or the largest example."""
        return {name: max(cap, int(self.totals[name].max())) for name, cap in self.caps.items()}

    def step(self, position: int, batch_size: int) -> StepExamples:
        """The next batch_size groups from a position, over the ends of epochs. O(num_examples) at each new epoch.

        Raises ValueError for a position inside a group.
        """
        ids, counts, num_taken = [], [], 0
        while num_taken < batch_size:
            epoch, within = divmod(position, self.num_examples)
            groups = self.epoch(epoch)
            first = int(np.searchsorted(groups.offsets, within))
            if groups.offsets[first] != within:
                raise ValueError(f"position {position} is inside a group of epoch {epoch}")
            last = min(first + batch_size - num_taken, groups.num_groups)
            ids.append(groups.items[within : groups.offsets[last]])
            counts.append(np.diff(groups.offsets[first : last + 1]))
            num_taken, position = num_taken + last - first, position + len(ids[-1])
        return StepExamples(np.concatenate(ids), np.repeat(np.arange(batch_size), np.concatenate(counts)))

    def taken_in(self, epochs: Fraction) -> int:
        """As of `order.EpochOrder`, in groups. O(num_examples) for each epoch."""
        whole, share = divmod(epochs, 1)
        last = math.ceil(share * self.num_examples)
        in_last = int(np.searchsorted(self.epoch(whole).offsets, last)) if last else 0
        return sum(self.epoch(number).num_groups for number in range(whole)) + in_last

    def taken_before(self, position: int) -> int:
        """As of `order.EpochOrder`, in groups. O(num_examples) for each epoch."""
        epoch, within = divmod(position, self.num_examples)
        return self.taken_in(Fraction(epoch)) + int(np.searchsorted(self.epoch(epoch).offsets, within))

    def epoch(self, number: int) -> EpochGroups:
        """The groups of an epoch, counted from 0. The last two are kept."""
        if number not in self._epochs:
            found = self._grouped(number)
            for other in [other for other in self._epochs if other != number - 1]:
                del self._epochs[other]
            self._epochs[number] = found
        return self._epochs[number]

    def _grouped(self, epoch: int) -> EpochGroups:
        seed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1, np.uint64)[0])
        found = group_phases(self.totals, self.caps, seed=seed)
        full = permute(np.arange(found.num_full), found.num_full, (self.seed, epoch)) if found.num_full else []
        # Sizes of different phases are compared as shares of their caps.
        shares = [found.totals(self.totals[name])[found.num_full :] / cap for name, cap in self.caps.items()]
        rest = found.num_full + np.argsort(-np.max(shares, axis=0), kind="stable")
        groups = np.concatenate([np.asarray(full, dtype=np.int64), rest])
        counts = np.diff(found.offsets)[groups]
        ends = np.cumsum(counts)
        items = found.items[np.arange(len(found.items)) + np.repeat(found.offsets[groups] - (ends - counts), counts)]
        return EpochGroups(items, np.concatenate([[0], ends]), found.num_full, len(found.oversized))


def phase_totals(examples: Examples) -> dict[str, Int64Array]:
    """Per phase, the summed length of each example's items, int64 [num_examples]; the backbone's is last."""
    parts: list[dict[str, Int64Array]] = []
    for start in range(0, examples.num_examples, _SCAN_EXAMPLES):
        ids = np.arange(start, min(start + _SCAN_EXAMPLES, examples.num_examples))
        lengths = examples.batch_lengths(ids, 1)
        parts.append({name: total_lengths(lengths, name) for name in (*lengths.items, BACKBONE)})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def group_caps(stated: Literal["auto"] | Mapping[str, int], totals: Mapping[str, Int64Array]) -> dict[str, int]:
    """The caps that `data.group` states, or that suit the lengths. totals: as in `GroupedOrder`, of the model's phases.

    Raises UserError if a phase has no cap, if one is of another phase, and if no example is under all of them.
    """
    if stated == "auto":
        return suggest_phase_caps(totals)
    if stated.keys() != totals.keys():
        raise UserError(
            f"data.group has caps of {', '.join(stated) or 'nothing'}; it must have one of each phase of the model: "
            f"{', '.join(totals)}."
        )
    caps = {name: stated[name] for name in totals}
    if not np.all([totals[name] <= cap for name, cap in caps.items()], axis=0).any():
        smallest = ", ".join(f"{name} {int(column.min()):,}" for name, column in totals.items())
        raise UserError(
            f"data.group: no example is under all caps, so none could be in a group; the smallest of each phase is "
            f"{smallest}; raise the caps."
        )
    return caps
