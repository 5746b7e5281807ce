"""Microbatches as groups of examples under a cap a module, e.g. of vision and of text (OmniBal section 4.1).

OmniBal groups a dataset once; a step then takes as many groups as there are devices. Here the examples of a step are
given, and each step is grouped anew. So a step has the same examples whatever the Plan, and loses none of them.
The order of the groups is: full groups, examples above a cap (each alone), the rest (ISF with the errata,
balance/grouping.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from motet.assign.pipeline import Batching
from motet.balance import group_phases
from motet.core.arrays import Int64Array
from motet.core.plan import Plan
from motet.core.workload import BACKBONE, BatchLengths, total_lengths
from motet.schedule.layout import num_microbatches


def groups_under(caps: Mapping[str, int], sizes: Mapping[str, Int64Array], most: int) -> Int64Array | None:
    """The group of each example, int64 [num_examples]; None if no example meets the caps, or groups exceed `most`.

    caps:  the largest summed length of a group, by module.
    sizes: per module, int64 [num_examples].
    most:  the largest allowed number of groups.
    O(num_examples).
    """
    if not np.all([sizes[name] <= cap for name, cap in caps.items()], axis=0).any():
        return None
    groups = group_phases(sizes, caps)
    if groups.num_groups > most:
        return None
    group_of_example = np.empty_like(groups.items)
    group_of_example[groups.items] = np.repeat(np.arange(groups.num_groups), np.diff(groups.offsets))
    return group_of_example


def batching_in_groups(plan: Plan, batch: BatchLengths) -> Batching:
    """The batching that gives each microbatch of each replica of the backbone one group under the Plan's caps, in the
    groups' order. A group's examples are spread over the indexes of the replica, in the given order.
    """
    dp, size = plan.unit_of(BACKBONE).dp, plan.microbatch_size
    groups = grouped(batch, plan.microbatch_caps, dp * num_microbatches(plan))
    microbatch, replica = np.divmod(groups, dp)
    order = np.argsort(groups, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order)) - np.searchsorted(groups[order], groups[order])
    return Batching(microbatch, replica * size + number * size // np.bincount(groups)[groups])


def grouped(batch: BatchLengths, caps: Mapping[str, int], most: int) -> Int64Array:
    """The group of each example, int64 [num_examples]. Caps grow by a sixteenth until at most `most` groups suffice."""
    sizes = {name: total_lengths(batch, name) for name in caps}
    widened = dict(caps)
    while (groups := groups_under(widened, sizes, most)) is None:
        widened = {name: cap + cap // 16 + 1 for name, cap in widened.items()}
    return groups
