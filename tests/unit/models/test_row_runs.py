"""Runs of rows without a mask: which rows they are, and that they attend as the dense mask says."""

import numpy as np
import pytest
import torch

from motet.core.attention_table import AttentionTable
from motet.core.cuts import ItemCuts
from motet.models.row_runs import row_runs
from motet.models.table_items import TableItems, plan_tiles
from unit.models.test_table_items import check, dense, draw


def fragment(num_rows, rank, *, causal):
    """The rows that one of two ranks has of a document behind another, against the keys that they see."""
    cuts = ItemCuts(*(np.array(column) for column in ([0, 0], [0, 1], [0, 2], [2, 5], [5, 5])))
    owner = cuts.owner(0, num_rows) if causal else cuts.run_owner(0, num_rows)
    table = AttentionTable.packed([30, num_rows], causal)
    own = 30 + np.flatnonzero(owner == rank)
    return table.of(own, table.of(own, table.keys).seen)


def test_runs_are_causal_rows_and_rows_that_see_the_same():
    table = AttentionTable.packed([100, 30, 400], together=[[200, 300], [310, 315]])
    assert row_runs(table) == [(0, 100, True), (130, 200, True), (200, 300, False), (314, 530, True)]
    assert row_runs(AttentionTable.packed([63] * 9)) == [] == row_runs(table.windowed(8)) == row_runs(table.of([], []))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_fragments_are_two_runs_or_one_and_equal_the_dense_mask(rank, causal):
    table = fragment(500, rank, causal=causal)
    assert [run.is_causal for run in row_runs(table)] in ([True, True], [True], [False])
    assert len(plan_tiles(table, has_runs=True)) == len(row_runs(table))
    for kv_heads in (1, 4):
        check(table, kv_heads=kv_heads)


def test_parts_of_the_keys_are_joined_in_half_precision_too():
    tensors = draw(table := fragment(500, 1, causal=True), dtype=torch.bfloat16)
    out = TableItems(table).attend(*tensors, 0.3, 0.0, None)
    expected = dense(*(x.double() for x in tensors), table, 0.3)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
