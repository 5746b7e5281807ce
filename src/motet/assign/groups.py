"""Microbatches that are groups of examples under caps, one of vision and one of text (OmniBal section 4.1).

OmniBal groups a data set once, and a step takes as many groups as there are devices. Here the examples of a step are
given and grouped anew, so that a step is the same examples whatever the Plan, and every one of them is in it: full
groups, examples above a cap, each alone, then what is left (ISF with the errata, balance/grouping.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from motet.assign.pipeline import Batching
from motet.balance import group
from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule.layout import Layout


def total_lengths(batch: BatchLengths, name: str) -> Int64Array:
    """What a module computes on of each example, int64 [num_examples]."""
    items = batch.of(name)
    totals: Int64Array = np.bincount(items.example, items.length, batch.num_examples).astype(np.int64)
    return totals


def groups_under(caps: Mapping[str, int], sizes: Mapping[str, Int64Array], most: int) -> Int64Array | None:
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


def batching_in_groups(plan: Plan, batch: BatchLengths) -> Batching:
    """A group under the Plan's caps in each microbatch of each island, in the order of the groups."""
    layout = Layout(plan)
    groups = grouped(batch, plan.microbatch_caps, layout.num_islands * layout.num_microbatches)
    microbatch, island = np.divmod(groups, layout.num_islands)
    return Batching(microbatch, island * layout.num_examples)


def grouped(batch: BatchLengths, caps: Mapping[str, int], most: int) -> Int64Array:
    """The group of each example, int64 [num_examples]; caps are widened by a sixteenth until `most` groups suffice."""
    sizes = {name: total_lengths(batch, name) for name in caps}
    wide = dict(caps)
    while (groups := groups_under(wide, sizes, most)) is None:
        wide = {name: cap + cap // 16 + 1 for name, cap in wide.items()}
    return groups
