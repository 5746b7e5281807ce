"""Rows that come together: each rank ends with all rows of its replica, in the order of whole items."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.assign.item_shares import item_shares
from motet.assign.step import ModuleAssignment
from motet.dispatch.gathered_rows import GatheredRows


def dealt(lengths, num_groups, cp):
    """Items of the second of two replicas, dealt out, with one of the first before them."""
    shares = item_shares(lengths, lengths, cp, can_cut=True, num_groups=num_groups)
    num_ranks, first = num_groups * cp, np.zeros(1, np.int64)
    ranks = np.concatenate([first, num_ranks + shares.ranks])
    position = np.array([int((ranks[:number] == rank).sum()) for number, rank in enumerate(ranks)])
    cuts = shares.cuts
    if cuts is not None:
        cuts = type(cuts)(cuts.item + 1, cuts.rank + np.int32(num_ranks), cuts.begin, cuts.end, cuts.units)
    lengths, zeros = np.concatenate([first + 7, lengths]), np.zeros(len(ranks), np.int32)
    example = np.arange(len(ranks))
    return ModuleAssignment(
        example, lengths, lengths, ranks.astype(np.int32), zeros, position, 2 * num_ranks, cuts=cuts
    )


@given(
    st.lists(st.integers(1, 40), max_size=9).map(lambda each: np.array(each, dtype=np.int64)),
    st.sampled_from(
        [(2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 4, 2), (2, 3, 3), (1, 6, 2), (2, 3, 2)]
    ),
)
def test_all_rows_arrive_in_the_order_of_the_replica(lengths, groups):
    """groups: groups of ranks that share items, ranks of each, and among how many the rows of all come together."""
    *of_groups, num_among = groups
    items, num_ranks = dealt(lengths, *of_groups), of_groups[0] * of_groups[1]
    num_together = num_ranks // num_among
    among = items.by_replica(num_together)
    for first in range(0, num_ranks, num_together):
        expected = rows_made(among, (num_ranks + first) // num_together)
        held = [rows_made(items, num_ranks + first + number) for number in range(num_together)]
        share = max(map(len, held))
        gathered = torch.cat([torch.nn.functional.pad(rows, (0, share - len(rows)), value=-1) for rows in held])
        for number, own in enumerate(held):
            rows = GatheredRows.of(items, among, (num_ranks + first) // num_together, number, microbatch=0)
            assert rows.share_rows == share
            assert torch.equal(gathered[rows.index], expected)
            assert torch.equal(expected[rows.own], own)


def rows_made(items, replica):
    """Numbers, among the rows of all items, of those that a replica has of the first microbatch, in its order."""
    parts = items.parts
    starts = (np.cumsum(items.length) - items.length)[parts.item] + parts.first_row
    of_parts = [torch.arange(parts.num_rows[part]) + starts[part] for part in items.parts_of(replica, 0).tolist()]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *of_parts])
