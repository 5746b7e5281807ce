"""Routes of all ranks played through in one process: what one rank sends is what the other receives, in order."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import score
from motet.core.nodes import node_of_ranks
from motet.core.workload import ItemLengths
from motet.dispatch import GatherRoute, Route, compose_route
from unit.balance.contract import nodes_of


def placement(rng, num_items, num_ranks):
    placed = score(rng.integers(0, num_ranks, num_items), np.ones(num_items, np.int64), num_ranks)
    items = np.concatenate([rng.permutation(placed.on_rank(rank)) for rank in range(num_ranks)])
    return type(placed)(placed.ranks, items.astype(np.int64), placed.offsets, placed.loads, placed.bound)


def play(rows: list[torch.Tensor], routes: list[Route | GatherRoute]) -> list[torch.Tensor]:
    """What `exchange_rows` does, for all ranks."""
    if isinstance(routes[0], GatherRoute):
        (share_rows,) = {route.there.share_rows for route in routes}
        assert share_rows == max(map(len, rows))
        gathered = torch.cat([torch.cat([x, x.new_full((share_rows - len(x), 2), -1)]) for x in rows])
        return [gathered[route.there.index] for route in routes]
    sent = [x if r.send_index is None else x[r.send_index] for x, r in zip(rows, routes)]
    parts = [x.split(r.send_splits) for x, r in zip(sent, routes)]
    arrived = [torch.cat([parts[source][rank] for source in range(len(rows))]) for rank in range(len(rows))]
    assert [[len(p[rank]) for p in parts] for rank in range(len(rows))] == [r.recv_splits for r in routes]
    return [x if r.recv_index is None else x[r.recv_index] for x, r in zip(arrived, routes)]


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(0, 12), st.integers(1, 5), st.data())
def test_rows_arrive_in_the_order_of_the_sequences_and_come_back(seed, num_examples, num_items, num_ranks, data):
    ranks_per_node = data.draw(nodes_of(num_ranks))
    rng = np.random.default_rng(seed)
    num_items = num_items if num_examples else 0
    examples = np.sort(rng.integers(0, max(num_examples, 1), num_items))
    items = ItemLengths(examples, np.ones(num_items, np.int64), rng.integers(0, 4, num_items))
    encoder, backbone = placement(rng, num_items, num_ranks), placement(rng, num_examples, num_ranks)
    routes = [compose_route(encoder, backbone, items, rank, ranks_per_node=ranks_per_node) for rank in range(num_ranks)]

    def rows_of(order):  # Each row is named by its item and its place in it.
        return torch.tensor([[i, k] for i in order for k in range(items.num_tokens[i])]).reshape(-1, 2)

    rows = [rows_of(encoder.on_rank(rank)) for rank in range(num_ranks)]
    expected = [
        rows_of([i for e in backbone.on_rank(rank) for i in np.flatnonzero(examples == e)]) for rank in range(num_ranks)
    ]
    arrived = play(rows, routes)
    assert all(torch.equal(a, e) for a, e in zip(arrived, expected))
    assert all(torch.equal(a, e) for a, e in zip(play(arrived, [r.transpose for r in routes]), rows))

    gathering = [compose_route(encoder, backbone, items, rank, communicator="all_gather") for rank in range(num_ranks)]
    assert all(torch.equal(a, e) for a, e in zip(play(rows, gathering), expected))
    assert all(torch.equal(a, e) for a, e in zip(play(expected, [r.transpose for r in gathering]), rows))
    assert all(g.num_rows_in == r.num_rows_in and g.num_rows_out == r.num_rows_out for g, r in zip(gathering, routes))
    assert all(g.is_local == r.is_local for g, r in zip(gathering, routes))
    assert all(g.moved_rows >= r.moved_rows for g, r in zip(gathering, routes))

    goes = backbone.ranks[examples] if num_items else np.zeros(0, np.int32)
    moved = items.num_tokens[encoder.ranks != goes].sum()
    node = node_of_ranks(ranks_per_node, num_ranks)
    crossing = items.num_tokens[node[encoder.ranks] != node[goes]].sum()
    assert {(r.moved_rows, r.crossing_rows, r.is_local) for r in routes} == {(moved, crossing, moved == 0)}


def test_nothing_is_reordered_where_order_is_right_already():
    backbone = score(np.array([0, 0, 1]), np.ones(3, np.int64), 2)
    items = ItemLengths(np.array([0, 2, 2]), np.ones(3, np.int64), np.array([2, 1, 3]))
    encoder = score(np.array([0, 1, 1]), np.ones(3, np.int64), 2)
    for rank in range(2):
        route = compose_route(encoder, backbone, items, rank)
        assert route.is_local and route.send_index is None and route.recv_index is None
