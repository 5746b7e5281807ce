"""The rows of an encoder in bubbles, which come together where several groups of ranks have dealt out its items.

A rank of the backbone's pipeline stands for several ranks of the job. Where fewer of these share products of an encoder
than of the backbone, they deal out the encoder's items (`plan_units.sharing_ranks`). Of the ranks that share products
of the backbone, which are one of its context-parallel ranks, all need the rows that any of them has made. Behind its
last block each gives its rows to the others; of gradients, which all of them have, each takes its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from motet.assign.rows import rows_at
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.schedule.plan_units import gathering_ranks


@dataclass(frozen=True, eq=False)
class GatheredRows:
    """One rank's part in the gathering of an encoder's rows in a microbatch.

    share_rows: rows of the rank with the most of them.
    index:      LongTensor [rows of all ranks], where each lies if all ranks have as many.
    own:        LongTensor [rows of this rank], where they stand among all.

    Example:
        Rank 1 has computed the second of three items, which have 2, 1 and 1 rows:
        >>> columns = [0, 1, 2], [4, 2, 2], [2, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 1]
        >>> items = ModuleAssignment(*map(np.array, columns), num_replicas=2)
        >>> rows = GatheredRows.of(items, items.by_replica(2), replica=0, c=1, microbatch=0)
        >>> rows.share_rows, rows.index.tolist(), rows.own.tolist()
        (3, [0, 1, 3, 2], [2])
    """

    share_rows: int
    index: Tensor
    own: Tensor

    @staticmethod
    def of(items: ModuleAssignment, whole: ModuleAssignment, replica: int, c: int, microbatch: int) -> GatheredRows:
        """Of the rank with number c of those whose rows come together.

        items:   by these ranks, as `coordinates.share_of` numbers them. whole: as they follow each other behind the
                 gathering (`gathered`), fragments of those last that further ranks share. O(items).
        replica: of `whole`.
        """
        num_ranks, parts, joined = items.num_replicas // whole.num_replicas, items.parts, whole.parts
        in_order = whole.parts_of(replica, microbatch)
        # 1. Where the rows of each item would begin among the replica's, were all of them here, and where each part.
        start = np.zeros(len(items.example), dtype=np.int64)
        before = np.cumsum(joined.num_rows[in_order]) - joined.num_rows[in_order]
        start[joined.item[in_order]] = before - joined.first_row[in_order]
        start_of_part = start[parts.item] + parts.first_row
        # 2. Where the rows of each rank stand, and where they lie when they have come.
        of_ranks = (items.parts_of(replica * num_ranks + number, microbatch) for number in range(num_ranks))
        places = [rows_at(start_of_part, of_rank, parts.num_rows) for of_rank in of_ranks]
        share_rows = max(map(len, places))
        index = np.zeros(sum(map(len, places)), dtype=np.int64)
        for number, rows in enumerate(places):
            index[rows] = number * share_rows + np.arange(len(rows))
        return GatheredRows(share_rows, torch.from_numpy(index), torch.from_numpy(places[c]))

    def to(self, device: torch.device) -> GatheredRows:
        """The same with its indices on a device."""
        return GatheredRows(self.share_rows, self.index.to(device), self.own.to(device))


def gathered(plan: Plan, step: StepAssignment) -> StepAssignment:
    """The assignment of a step behind encoders whose rows come together (`plan_units.gathering_ranks`): by the
    context-parallel ranks of the backbone, which share the items that are cut over several of them."""
    units = {name: plan.unit_of(name) for name in step.modules if name != BACKBONE}
    modules = {
        name: step.modules[name].by_replica(num_ranks)
        for name, unit in units.items()
        if (num_ranks := gathering_ranks(plan, unit)) > 1
    }
    return replace(step, modules=step.modules | modules)
