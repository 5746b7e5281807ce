"""Minimal movement: as balanced as without `home`, and hardly anything leaves its node."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.analyze.mixture import MFLOP_PER_LENGTH, Caps
from motet.balance import Packed, Padded, assign, assign_jointly, crossing
from motet.balance.home import renamed
from motet.core.errors import ArgumentError
from motet.core.nodes import node_of_ranks
from unit.balance.contract import BACKENDS, check_equal, check_structure, nodes_of

COSTS = [Packed(), Packed(linear=5, quadratic=2)]
lengths_of_a_batch = st.lists(st.integers(0, 30) | st.sampled_from([0, 256, 1024]) | st.integers(0, 2**20), max_size=60)


@st.composite
def held_items(draw):
    """lengths, num_ranks, home, and ranks of a node."""
    lengths = draw(lengths_of_a_batch)
    num_ranks = draw(st.integers(1, 9))
    ranks = st.integers(0, num_ranks - 1)
    home = draw(st.lists(ranks, min_size=len(lengths), max_size=len(lengths)) | ranks.map(lambda r: [r] * len(lengths)))
    return lengths, num_ranks, home, draw(st.none() | nodes_of(num_ranks))


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(held=held_items())
def test_contract_and_equal_backends(cost, held):
    lengths, num_ranks, home, ranks_per_node = held
    native, reference = (
        assign(lengths, num_ranks, cost, home=home, ranks_per_node=ranks_per_node, backend=backend)
        for backend in BACKENDS
    )
    check_structure(native, len(lengths), num_ranks)
    weights = cost.weights(np.array(lengths, dtype=np.int64))
    np.testing.assert_array_equal(native.loads, np.bincount(native.ranks, weights, num_ranks).astype(np.int64))
    check_equal(native, reference)
    unconstrained = assign(lengths, num_ranks, cost)
    assert native.bound == unconstrained.bound
    assert native.loads.max() <= unconstrained.loads.max() + (unconstrained.loads.max() >> 10)


@given(held=held_items())
def test_nothing_moves_where_nothing_need(held):
    lengths, num_ranks, _, ranks_per_node = held
    unconstrained = assign(lengths, num_ranks)
    if unconstrained.loads.max() <= unconstrained.bound:
        again = assign(lengths, num_ranks, home=unconstrained.ranks, ranks_per_node=ranks_per_node)
        np.testing.assert_array_equal(again.ranks, unconstrained.ranks)


def in_order(num_items, num_ranks):
    """The home of items that were dealt out in equal consecutive counts."""
    return np.repeat(np.arange(num_ranks), num_items // num_ranks)


def excess(lengths, home, num_nodes):
    """What must leave its node at least, as a share of all."""
    held = np.bincount(home, lengths, num_nodes)
    return np.maximum(held - held.mean(), 0).sum() / held.sum()


@pytest.mark.parametrize("ranks_per_node", [8, None])
def test_moves_little_more_than_the_excess(mixture, ranks_per_node):
    num_ranks = 256
    lengths = mixture.draw(80 * num_ranks, np.random.default_rng(0), Caps())[:, 0]
    home = in_order(len(lengths), num_ranks)
    placed = assign(lengths, num_ranks, home=home, ranks_per_node=ranks_per_node)
    assert placed.loads.max() <= 1.00002 * placed.loads.mean() + 1
    size = ranks_per_node or 1
    least = excess(lengths, home // size, num_ranks // size)
    assert least <= crossing(placed, home, lengths, ranks_per_node) <= (1.05 if ranks_per_node else 1.3) * least
    assert crossing(placed, home, lengths) <= 0.1, "most items stay even on their rank"


@pytest.mark.parametrize("backend", BACKENDS)
def test_true_costs_are_levelled(backend):
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(7, 1, 24 * 60), 12, 16_000).astype(np.int64)
    home = in_order(len(lengths), 24)
    cost = Packed(linear=7000, quadratic=1)
    placed = assign(lengths, 24, cost, home=home, ranks_per_node=8, backend=backend)
    assert placed.imbalance <= 1.00002
    assert crossing(placed, home, lengths, 8) <= 0.04


def test_all_items_on_one_rank_are_dealt_out():
    lengths = np.arange(1, 641)
    placed = assign(lengths, 16, home=np.full(640, 3), ranks_per_node=4)
    assert placed.loads.max() <= placed.bound + 1
    assert crossing(placed, np.full(640, 3), lengths, 4) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("ranks_per_node", [4, (1, 6, 3), (3, 7)], ids=str)
def test_a_smaller_node_gets_its_share(ranks_per_node):
    """And no more leaves a node than must, but for what does not go up in whole items."""
    lengths = np.random.default_rng(2).integers(1, 1000, 10 * 60)
    home, node = in_order(600, 10), node_of_ranks(ranks_per_node, 10)
    costs = lengths[:, None] * np.array([1, 2])
    for placed in (
        assign(lengths, 10, home=home, ranks_per_node=ranks_per_node),
        assign_jointly(costs, 10, home=home, bytes=lengths, ranks_per_node=ranks_per_node),
    ):
        assert (placed.loads.max(axis=0) <= placed.bound + 0.002 * placed.bound).all()
        held = np.bincount(node[home], lengths)
        least = np.maximum(held - lengths.sum() / 10 * np.bincount(node), 0).sum() / lengths.sum()
        assert least * (1 - 1e-3) <= crossing(placed, home, lengths, ranks_per_node) <= 1.1 * least + 0.002


def test_a_giant_moves_nothing_that_fits_beside_it():
    lengths = np.array([1000, 3, 4, 5, 6, 7, 8])
    home = np.array([0, 1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(assign(lengths, 3, home=home).ranks, home)


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_levelling_fails_whole_batches_are_placed_on_nodes(backend):
    placed = assign([2, 3, 5, 9], 2, home=[1, 0, 0, 1], backend=backend)
    assert placed.loads.tolist() == [9, 10] or placed.loads.tolist() == [10, 9]
    assert crossing(placed, [1, 0, 0, 1], [2, 3, 5, 9]) <= 0.5


@pytest.mark.parametrize("size", [2**40, 2**54])
def test_large_lengths(size):
    lengths = np.random.default_rng(3).integers(0, size, 400)
    home = np.arange(400) % 8
    for ranks_per_node in (None, 3):
        placed = assign(lengths, 8, home=home, ranks_per_node=ranks_per_node)
        check_equal(placed, assign(lengths, 8, home=home, ranks_per_node=ranks_per_node, backend="reference"))
        assert placed.imbalance <= 1.00001


@pytest.mark.parametrize(
    ("cost", "options", "sentence"),
    [
        (Packed(), {"home": [0]}, r"home has shape \(1,\)"),
        (Packed(), {"home": [0, 2]}, r"home\[1\] is 2"),
        (Packed(), {"home": [0, -1]}, r"home\[1\] is -1"),
        (Packed(), {"home": [0, 0], "ranks_per_node": 0}, "ranks_per_node is 0"),
        (Packed(), {"ranks_per_node": 8}, "ranks_per_node is given without home"),
        (Padded(), {"home": [0, 0]}, "home is given with Padded"),
    ],
)
def test_wrong_input(cost, options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        assign([3, 4], 2, cost, **options)


def test_sums_up_to_the_largest_integer():
    for lengths in ([2**63 - 1], [2**62, 2**62 - 1], [2**61] * 3):
        for num_ranks in (1, 2, 3):
            placed = assign(lengths, num_ranks, home=[0] * len(lengths), ranks_per_node=2)
            assert placed.loads.max() == assign(lengths, num_ranks).loads.max()
            costs = np.array(lengths)[:, None]
            assert assign_jointly(costs, num_ranks, home=[0] * len(lengths)).loads.max() == placed.loads.max()


def test_crossing():
    placed = assign([4, 4, 4, 4], 4, home=[0, 1, 2, 3])
    assert crossing(placed, [0, 1, 2, 3]) == 0
    assert crossing(placed, [1, 0, 2, 3]) == 0.5
    assert crossing(placed, [1, 0, 2, 3], ranks_per_node=2) == 0
    assert crossing(placed, [3, 0, 2, 3], [1, 7, 0, 0], ranks_per_node=2) == 1 / 8
    assert crossing(placed, [1, 0, 1, 2], ranks_per_node=(1, 3)) == 0.5
    assert crossing(placed, [0, 0, 0, 0], [0, 0, 0, 0]) == 0
    with pytest.raises(ArgumentError, match=r"weights has shape \(3,\)"):
        crossing(placed, [0, 1, 2, 3], [1, 1, 1])


@st.composite
def held_examples(draw):
    """costs, num_ranks, home and ranks of a node; most examples lack most phases, or none does."""
    num_phases = draw(st.integers(1, 3))
    cost = draw(st.sampled_from([st.integers(0, 30), st.just(0) | st.integers(0, 2**40)]))
    row = st.lists(cost, min_size=num_phases, max_size=num_phases)
    rows = draw(st.lists(row, max_size=40))
    num_ranks = draw(st.integers(1, 6))
    home = draw(st.lists(st.integers(0, num_ranks - 1), min_size=len(rows), max_size=len(rows)))
    costs = np.array(rows, dtype=np.int64).reshape(len(rows), num_phases)
    return costs, num_ranks, home, draw(st.none() | nodes_of(num_ranks))


def objective(assignment):
    return assignment.loads.max(axis=0).sum()


@given(held=held_examples(), with_bytes=st.booleans())
def test_joint_contract_and_equal_backends(held, with_bytes):
    costs, num_ranks, home, ranks_per_node = held
    sizes = np.arange(len(costs))[::-1] % 7 if with_bytes else None
    native, reference = (
        assign_jointly(costs, num_ranks, home=home, bytes=sizes, ranks_per_node=ranks_per_node, backend=backend)
        for backend in BACKENDS
    )
    check_structure(native, len(costs), num_ranks)
    loads = np.zeros((num_ranks, costs.shape[1]), dtype=np.int64)
    np.add.at(loads, native.ranks, costs)
    np.testing.assert_array_equal(native.loads, loads)
    check_equal(native, reference)
    unconstrained = objective(assign_jointly(costs, num_ranks))
    assert objective(native) <= unconstrained + (unconstrained >> 6)


@pytest.mark.parametrize(("num_ranks", "items_a_rank", "goal"), [(128, 60, 1.001), (64, 60, 1.001), (64, 32, 1.01)])
def test_joint_moves_little(mixture, num_ranks, items_a_rank, goal):
    """Bytes: of a token 4, of a patch of 14 x 14 pixels 588, of an audio frame of 10 ms 320."""
    lengths = mixture.draw(num_ranks * items_a_rank, np.random.default_rng(1), Caps())
    sizes = lengths @ np.array([4, 588, 320])
    home = in_order(len(lengths), num_ranks)
    placed = assign_jointly(lengths * np.array(MFLOP_PER_LENGTH), num_ranks, home=home, bytes=sizes, ranks_per_node=8)
    assert objective(placed) <= goal * placed.loads.mean(axis=0).sum()
    assert crossing(placed, home, sizes, 8) <= (0.08 if items_a_rank == 60 else 0.15)


def test_of_examples_alike_those_with_fewest_bytes_move():
    costs = np.full((40, 1), 5)
    home = np.array([0] * 30 + [1] * 10)
    sizes = np.array([100, 1, 100] * 10 + [50] * 10)
    placed = assign_jointly(costs, 2, home=home, bytes=sizes)
    np.testing.assert_array_equal(np.flatnonzero(placed.ranks != home), np.arange(1, 30, 3))


def test_where_levelling_all_phases_fails_whole_batches_are_placed_on_nodes():
    costs = np.array([[6, 3], [5, 2], [6, 4]])
    placed = assign_jointly(costs, 2, home=[0, 1, 1])
    unconstrained = assign_jointly(costs, 2)
    assert objective(placed) == objective(unconstrained)
    assert crossing(placed, [0, 1, 1]) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"home": [0]}, r"home has shape \(1,\)"),
        ({"home": [0, 2]}, r"home\[1\] is 2"),
        ({"home": [0, 1], "bytes": [1]}, r"bytes has shape \(1,\)"),
        ({"home": [0, 1], "bytes": [1, -1]}, r"bytes\[1\] is -1"),
        ({"home": [0, 1], "bytes": [2**62, 2**62]}, "bytes add up to 9223372036854775808"),
        ({"home": [0, 1], "ranks_per_node": -1}, "ranks_per_node is -1"),
        ({"bytes": [1, 1]}, "bytes is given without home"),
        ({"ranks_per_node": 8}, "ranks_per_node is given without home"),
    ],
)
def test_wrong_joint_input(options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        assign_jointly([[3, 4], [5, 6]], 2, **options)


def test_joint_costs_that_do_not_fit():
    with pytest.raises(ArgumentError, match="costs add up to 9223372036854775808"):
        assign_jointly([[2**62, 0], [0, 2**62]], 2, home=[0, 1])


@pytest.mark.parametrize("num_ranks", [16, 1 << 17])
def test_a_placement_gets_the_ranks_where_its_items_are(num_ranks):
    lengths = np.arange(1, num_ranks + 1)
    placed = assign(lengths, num_ranks)
    home = placed.ranks[::-1].copy()  # A matrix of 2^17 ranks by ranks would take 137 GB.
    assert crossing(placed, home, ranks_per_node=8) > 0
    assert crossing(renamed(placed, home, lengths, 8), home, ranks_per_node=8) == 0
