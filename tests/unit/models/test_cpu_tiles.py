"""Attention by tiles on a CPU: one node of the graph, whose gradients of keys add up over tiles."""

import numpy as np
import torch

from motet.core.attention_table import AttentionTable
from motet.models.cpu_tiles import attend_tiles
from motet.models.tiles import Tile, plan_tiles
from unit.models.test_table_items import dense, draw


def attended(table, tensors, tiles):
    bounds = [torch.from_numpy(table.start), torch.from_numpy(table.end)]
    return attend_tiles(*tensors, tiles, bounds, 0.3)


def test_tiles_of_all_kinds_share_a_node_and_their_keys():
    table = AttentionTable.packed([300, 20, 70], together=[[310, 318], [320, 390]])
    tiles = plan_tiles(table, has_runs=True)
    kinds = {(tile.is_run, tile.full) for tile in tiles}
    assert kinds >= {(True, False), (False, True), (False, False)}
    tensors = [x.requires_grad_() for x in draw(table)]
    out = attended(table, tensors, tiles).transpose(1, 2)
    assert {type(node).__name__ for node, _ in out.grad_fn.next_functions} == {"_TilesBackward"}
    expected = dense(*tensors, table, 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    weight = torch.randn_like(expected)
    for found, right in zip(
        torch.autograd.grad(out, tensors, weight), torch.autograd.grad(expected, tensors, weight), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-10)


def test_a_run_is_joined_of_the_keys_before_it_and_its_triangle_by_their_logarithms():
    table = AttentionTable.packed([200]).of(np.arange(120, 200), np.arange(200))
    [tile] = plan_tiles(table, has_runs=True)
    assert tile == Tile(0, 80, 0, 200, full=False, is_run=True)
    query, key, value = (x.detach() for x in draw(table))
    query *= 30  # Scores so far apart that one part has all of the weight of some rows.
    found = attended(table, (query, key, value), [tile]).transpose(1, 2)
    torch.testing.assert_close(found, dense(query, key, value, table, 0.3), rtol=0, atol=1e-10)


def test_rows_that_see_no_key_get_zeros_and_give_no_gradients():
    table = AttentionTable.packed([7])
    query, key, value = draw(table)
    tensors = [query, key[:, :, :3], value[:, :, :3]]
    out = attended(table, tensors, [Tile(0, 4, 0, 0, full=True), Tile(4, 7, 0, 3, full=True)])
    assert not out[:, :, :4].any() and out[:, :, 4:].any(dim=-1).all()
    query, *_ = torch.autograd.grad(out.square().sum(), tensors)
    assert not query[:, :, :4].any() and query[:, :, 4:].any()
    none = attended(table, tensors, [Tile(0, 7, 0, 0, full=True)])
    assert not any(x.any() for x in (none, *torch.autograd.grad(none.sum(), tensors)))
