"""The attention-kernel calls of a pack, where no kernel takes segments of different lengths in one call.

A long segment is one call, on a view of its rows. Short segments of similar lengths share a call, padded to the
longest, because many small calls cost more than some padding. Up to rounding, the result does not depend on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from motet.core.arrays import Int64Array
from motet.on_device import Staged

_SHORT = 48
"""Segments shorter than this may share a call.

Measured on a CPU, in entries of a score matrix: a call costs _SHORT^2, and gathering a row for a shared call _SHORT.
"""


@dataclass(frozen=True, eq=False)
class KernelCall:
    """`count` segments of `longest` rows each.

    real: keys, bool [count, 1, 1, longest], False at padding rows; None: there are none.
    """

    count: int
    longest: int
    real: Staged | None = None

    @property
    def keys(self) -> Tensor | None:
        """`real` on the device."""
        return None if self.real is None else self.real.there[0]


@dataclass(frozen=True, eq=False)
class KernelCalls:
    """All calls for a pack; each takes the next count * longest of the gathered rows.

    order: positions of gathered rows in the pack, int64 [gathered rows], and of the pack's rows in the output of all
           calls, int64 [rows]; None if the calls take the rows of the pack in their order.
    """

    calls: list[KernelCall]
    order: Staged | None = None

    @property
    def gather(self) -> Tensor | None:
        """Positions of gathered rows in the pack, on the device."""
        return None if self.order is None else self.order.there[0]

    @property
    def restore(self) -> Tensor | None:
        """Positions of the pack's rows in the output of all calls, on the device."""
        return None if self.order is None else self.order.there[1]

    @cached_property
    def pieces(self) -> list[int]:
        """Gathered rows of each call."""
        return [call.count * call.longest for call in self.calls]


def plan_calls(offsets: Int64Array, device: torch.device) -> KernelCalls:
    """The calls for segments offsets[i] to offsets[i + 1], int64 [num_segments + 1]. O(rows)."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    groups = _group_short(lengths)
    padding = sum(len(group) * int(lengths[group[0]]) ** 2 for group in groups) - int(np.square(lengths).sum())
    saved = (np.count_nonzero(lengths) - len(groups)) * _SHORT**2 - padding
    if saved <= _SHORT * int(offsets[-1]):
        return KernelCalls([KernelCall(1, length) for length in lengths.tolist() if length])
    calls, gather, is_real = [], [], []
    for group in groups:
        column = np.arange(lengths[group[0]])
        real = column < lengths[group, None]
        keys = None if real.all() else Staged([real[:, None, None, :]], device)
        calls.append(KernelCall(len(group), len(column), keys))
        gather.append((starts[group, None] + np.minimum(column, lengths[group, None] - 1)).ravel())
        is_real.append(real.ravel())
    rows, real_rows = np.concatenate(gather), np.flatnonzero(np.concatenate(is_real))
    restore = np.empty(offsets[-1], dtype=np.int64)
    restore[rows[real_rows]] = real_rows
    return KernelCalls(calls, Staged([rows, restore], device))


def _group_short(lengths: Int64Array) -> list[Int64Array]:
    """Groups of segments that share a call, longest first within and between groups; a long segment is alone."""
    groups: list[list[int]] = []
    for i in np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)].tolist():
        longest = int(lengths[groups[-1][0]]) if groups else _SHORT
        if longest < _SHORT and longest**2 - int(lengths[i]) ** 2 < _SHORT**2 // 4:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [np.array(group) for group in groups]
