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
    st.sampled_from([(2, 1), (3, 1), (1, 2), (1, 4), (2, 2)]),
)
def test_all_rows_arrive_in_the_order_of_the_replica(lengths, groups):
    items, num_ranks = dealt(lengths, *groups), groups[0] * groups[1]
    of_rows = torch.from_numpy(np.repeat(np.arange(len(items.example)), items.length))
    number_in_item = torch.cat([torch.arange(length) for length in items.length.tolist()])
    by_replica = items.by_replica(num_ranks)
    whole = by_replica.items_of(1, 0)
    expected = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.where(of_rows == item)[0] for item in whole)])
    parts = items.parts
    held = []  # What each rank has made: numbers of rows among those of all items.
    for number in range(num_ranks):
        rows = [torch.zeros(0, dtype=torch.int64)]
        for part in items.parts_of(num_ranks + number, 0).tolist():
            before = int(parts.num_rows[:part][parts.item[:part] == parts.item[part]].sum())
            is_own = (of_rows == parts.item[part]) & (number_in_item >= before)
            rows.append(torch.where(is_own & (number_in_item < before + parts.num_rows[part]))[0])
        held.append(torch.cat(rows))
    each = [GatheredRows.of(items, by_replica, 1, number, microbatch=0) for number in range(num_ranks)]
    share = max(map(len, held))
    gathered = torch.cat([torch.nn.functional.pad(rows, (0, share - len(rows)), value=-1) for rows in held])
    for rows, own in zip(each, held, strict=True):
        assert rows.share_rows == share
        assert torch.equal(gathered[rows.index], expected)
        assert torch.equal(expected[rows.own], own)
