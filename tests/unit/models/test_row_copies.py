"""Keys and values of the next group of heads are on their way while attention of one is computed."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from motet.core.attention_table import AttentionTable
from motet.core.context_rows import ContextRows
from motet.core.errors import UserError
from motet.models.attention import PackedItems
from motet.models.context_items import ContextItems
from motet.models.row_copies import RowCopies
from motet.models.table_items import TableItems

LENGTHS, HEADS, KV_HEADS, HEAD_DIM = [5, 3], 6, 3, 4
HOW = None, 0.0, None  # scale, dropout, window
FORWARD = ["start", "start", "arrive", "attend", "start", "arrive", "attend", "arrive", "attend"]
BACKWARD = ["attend", "start", "attend", "start", "arrive", "attend", "start", "arrive", "arrive"]


class ToItself:
    """An exchange of a rank with itself: what has left is there when it is waited for, and not before."""

    def __init__(self, events):
        self.events = events

    def __call__(self, moved, sent, num_received, num_sent, group, async_op):
        assert async_op and num_received == num_sent == [len(sent)]
        self.events.append("start")
        moved.fill_(torch.nan)

        def wait():
            self.events.append("arrive")
            moved.copy_(sent)

        return SimpleNamespace(wait=wait)


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def share():
    rows = ContextRows(np.array(LENGTHS), np.zeros(sum(LENGTHS), int), num_ranks=1)
    sent = []
    return SimpleNamespace(rows=rows, num_whole=0, rank=0, method="group_cast", group=object(), count_bytes=sent.append)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (2, None), (None, 3.0)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_next_group_leaves_before_attention_of_one(monkeypatch, window, softcap, has_sinks):
    """And in backward gradients of a group leave before attention of the group before it. All is equal bit by bit."""
    torch.manual_seed(0)
    events, attend = [], TableItems.attend

    def noted(items, *args):
        attended = attend(items, *args)
        events.append("attend")
        attended.register_hook(lambda gradient: events.append("attend"))
        return attended

    query, key, value = (drawn(1, heads, sum(LENGTHS), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    leaves = [query, key, value, *([drawn(HEADS)] if has_sinks else [])]
    how = None, 0.0, window, softcap, leaves[3] if has_sinks else None
    gradient = torch.randn(1, sum(LENGTHS), HEADS, HEAD_DIM, dtype=torch.float64)
    alone = TableItems(AttentionTable.packed(LENGTHS).windowed(window)).attend(
        query, key, value, *how[:2], None, *how[3:]
    )
    expected = torch.autograd.grad(alone, leaves, gradient)
    monkeypatch.setattr(TableItems, "attend", noted)
    monkeypatch.setattr(dist, "all_to_all_single", ToItself(events))
    in_groups = ContextItems(share(), head_groups=3).attend(query, key, value, *how)
    assert events == FORWARD
    events.clear()
    found = torch.autograd.grad(in_groups, leaves, gradient)
    assert events == BACKWARD
    assert torch.equal(in_groups, alone)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_rank_without_rows_starts_and_waits_in_the_same_order(monkeypatch):
    events = []
    monkeypatch.setattr(dist, "all_to_all_single", ToItself(events))
    rows = ContextRows(np.array([0]), np.zeros(0, int), num_ranks=1)
    query, key, value = (drawn(1, heads, 1, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    none = SimpleNamespace(**{**vars(share()), "rows": rows})
    ContextItems(none, head_groups=3).attend(query, key, value, None, 0.0, None).sum().backward()
    exchanged = [event for event in (*FORWARD, *BACKWARD) if event != "attend"]
    assert events == exchanged
    assert not query.grad.any() and not key.grad.any()


def test_what_has_arrived_keeps_no_graph_alive(monkeypatch):
    """Freed as soon as the output is: a cycle would keep activations of a pass until Python looks for cycles."""
    under_way, started = [], RowCopies.started

    def noted(copies, rows):
        one = started(copies, rows)
        under_way.append(weakref.ref(one))
        return one

    monkeypatch.setattr(dist, "all_to_all_single", ToItself([]))
    monkeypatch.setattr(RowCopies, "started", noted)
    query, key, value = (drawn(1, heads, sum(LENGTHS), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    gc.disable()
    try:
        out = ContextItems(share(), head_groups=3).attend(query, key, value, None, 0.0, None)
        assert len(under_way) == 3 and all(one() is not None for one in under_way), "the graph has them"
        del out
        assert all(one() is None for one in under_way)
    finally:
        gc.enable()


def test_heads_that_groups_do_not_divide_are_refused():
    query, key, value = (drawn(1, heads, sum(LENGTHS), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with pytest.raises(UserError, match=r"context\.head_groups is 2, and does not divide the 3 heads of keys"):
        ContextItems(share(), head_groups=2).attend(query, key, value, None, 0.0, None)


def test_whole_documents_attend_while_keys_of_shared_ones_are_on_their_way(monkeypatch):
    """And so do their gradients, in backward. The first of two documents is whole here; all is equal bit by bit."""
    torch.manual_seed(0)
    events, attend_whole, attend_shared = [], PackedItems.attend, TableItems.attend

    def noted(name, attend):
        def attended(items, *args):
            found = attend(items, *args)
            events.append(name)
            found.register_hook(lambda gradient: events.append(name))
            return found

        return attended

    leaves = [drawn(1, heads, sum(LENGTHS), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    parts = [x.split(LENGTHS, dim=2) for x in leaves]
    alone = torch.cat(
        [TableItems(AttentionTable.packed([x.shape[2]])).attend(x, *rest, *HOW) for x, *rest in zip(*parts)], dim=1
    )
    gradient = torch.randn_like(alone)
    expected = torch.autograd.grad(alone, leaves, gradient)
    of_rank = share()
    of_rank.num_whole = 1
    items = ContextItems(of_rank)
    monkeypatch.setattr(items._whole, "attend", noted("whole", attend_whole).__get__(items._whole))
    monkeypatch.setattr(TableItems, "attend", noted("shared", attend_shared))
    monkeypatch.setattr(dist, "all_to_all_single", ToItself(events))
    found = items.attend(*leaves, *HOW)
    assert events == ["start", "whole", "arrive", "shared"]
    events.clear()
    gradients = torch.autograd.grad(found, leaves, gradient)
    assert events == ["shared", "start", "whole", "arrive"]
    assert torch.equal(found, alone) and all(map(torch.equal, gradients, expected))
