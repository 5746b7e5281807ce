"""Microbatches that are groups of examples under caps, one of vision and one of text (OmniBal section 4.1).

OmniBal groups a data set once, and a step takes as many groups as there are devices. Here the examples of a step are
given and grouped anew, so that a step is the same examples whatever the Plan, and every one of them is in it: full
groups, examples above a cap, each alone, then what is left (ISF with the errata, balance/grouping.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from motet.balance import group
from motet.core.workload import BACKBONE, BatchLengths
from motet.simulate.placement import column

Ints = NDArray[np.int64]


def total_lengths(batch: BatchLengths, name: str) -> Ints:
    """What a module computes on of each example, int64 [num_examples]."""
    example, length, _ = column(batch, name)
    totals: Ints = np.bincount(example, length, batch.num_examples).astype(np.int64)
    return totals


def groups_under(caps: Mapping[str, int], sizes: Mapping[str, Ints], most: int) -> Ints | None:
    """The group of each example, int64 [num_examples]; None if no example meets the caps, or it takes more than `most`.

    caps: of the backbone and one other module. sizes: by module, int64 [num_examples]. O(examples).
    """
    vision = next(name for name in caps if name != BACKBONE)
    limits = caps[vision], caps[BACKBONE]
    if not ((sizes[vision] <= limits[0]) & (sizes[BACKBONE] <= limits[1])).any():
        return None
    found = group(sizes[vision], sizes[BACKBONE], *limits)
    if found.num_groups > most:
        return None
    of_example = np.empty_like(found.items)
    of_example[found.items] = np.repeat(np.arange(found.num_groups), np.diff(found.offsets))
    return of_example


def grouped(batch: BatchLengths, caps: Mapping[str, int], most: int) -> Ints:
    """The same of a batch; if it takes more groups than `most`, with caps widened by a sixteenth until it does not."""
    sizes = {name: total_lengths(batch, name) for name in caps}
    wide = dict(caps)
    while (groups := groups_under(wide, sizes, most)) is None:
        wide = {name: cap + cap // 16 + 1 for name, cap in wide.items()}
    return groups
