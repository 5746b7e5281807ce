"""Into how many calls of an attention kernel a pack is cut where no kernel takes segments of any length by itself.

A long segment is a call by itself, on a view of its rows. Short ones of like length share a call, filled up to the
longest: many calls on little cost more than a little too much work. The result does not depend on the cut, up to
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from motet.core.arrays import Int64Array

_SHORT = 48
"""Segments shorter than this may share a call. Measured on a CPU: a call costs as much as _SHORT^2 entries of a score
matrix, and moving a row to where it can share a call as much as _SHORT entries.
"""


@dataclass(frozen=True, eq=False)
class KernelCall:
    """`count` segments of `longest` rows each; keys: bool [count, 1, 1, longest], False at rows that only fill up."""

    count: int
    longest: int
    keys: Tensor | None = None


@dataclass(frozen=True, eq=False)
class KernelCalls:
    """All calls for a pack; each takes the next count * longest of the gathered rows.

    gather:  int64 [gathered rows], where they stand in the pack.
    restore: int64 [rows], where the rows of the pack stand in the output of all calls.
    Both are None if the calls take the rows of the pack as they are.
    """

    calls: list[KernelCall]
    gather: Tensor | None = None
    restore: Tensor | None = None

    @cached_property
    def pieces(self) -> list[int]:
        """Gathered rows of each call."""
        return [call.count * call.longest for call in self.calls]


def plan_calls(offsets: Int64Array, device: torch.device) -> KernelCalls:
    """The calls for segments offsets[i] to offsets[i + 1], int64 [num_segments + 1]. O(rows)."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    sets = _share(lengths)
    filled_up = sum(len(members) * int(lengths[members[0]]) ** 2 for members in sets) - int(np.square(lengths).sum())
    saved = (np.count_nonzero(lengths) - len(sets)) * _SHORT**2 - filled_up
    if saved <= _SHORT * int(offsets[-1]):
        return KernelCalls([KernelCall(1, length) for length in lengths.tolist() if length])
    calls, gather, kept = [], [], []
    for members in sets:
        column = np.arange(lengths[members[0]])
        real = column < lengths[members, None]
        keys = None if real.all() else torch.from_numpy(real[:, None, None, :]).to(device)
        calls.append(KernelCall(len(members), len(column), keys))
        gather.append((starts[members, None] + np.minimum(column, lengths[members, None] - 1)).ravel())
        kept.append(real.ravel())
    rows, real_rows = np.concatenate(gather), np.flatnonzero(np.concatenate(kept))
    restore = np.empty(offsets[-1], dtype=np.int64)
    restore[rows[real_rows]] = real_rows
    return KernelCalls(calls, torch.from_numpy(rows).to(device), torch.from_numpy(restore).to(device))


def _share(lengths: Int64Array) -> list[Int64Array]:
    """Sets of segments that share a call, longest first in each and overall; long segments stay alone."""
    sets: list[list[int]] = []
    for i in np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)].tolist():
        longest = int(lengths[sets[-1][0]]) if sets else _SHORT
        if longest < _SHORT and longest**2 - int(lengths[i]) ** 2 < _SHORT**2 // 4:
            sets[-1].append(i)
        else:
            sets.append([i])
    return [np.array(members) for members in sets]
