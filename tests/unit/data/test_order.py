from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.data.order import GlobalOrder, ListedOrder, MixedOrder, whole_weights


@given(num_examples=st.integers(1, 300), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_every_example_once_an_epoch(num_examples, seed, epoch):
    order = GlobalOrder(num_examples, seed)
    assert sorted(order.take(epoch * num_examples, num_examples).tolist()) == list(range(num_examples))


@given(num_examples=st.integers(1, 50), cuts=st.lists(st.integers(0, 120), max_size=6), shuffle=st.booleans())
def test_any_cut_gives_the_same_sequence(num_examples, cuts, shuffle):
    whole = GlobalOrder(num_examples, 3, shuffle).take(0, 120)
    places = [0, *sorted(cuts), 120]
    # A new object for each part: nothing but the position is carried over.
    parts = [GlobalOrder(num_examples, 3, shuffle).take(start, end - start) for start, end in pairwise(places)]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_epochs_and_seeds_differ():
    first, second = GlobalOrder(1000, 0).take(0, 2000).reshape(2, 1000)
    assert (first == second).mean() < 0.02
    assert (first == GlobalOrder(1000, 1).take(0, 1000)).mean() < 0.02
    assert GlobalOrder(5, shuffle=False).take(3, 4).tolist() == [3, 4, 0, 1]
    assert GlobalOrder(5).epoch(9) == 1


def test_it_shuffles_well():
    # Where example 0 comes, over many seeds: uniform, by chi-squared (16 places, 15 degrees of freedom; 37.7 is p =
    # 0.001).
    places = np.array([np.flatnonzero(GlobalOrder(16, seed).take(0, 16) == 0)[0] for seed in range(1600)])
    observed = np.bincount(places, minlength=16)
    assert ((observed - 100) ** 2 / 100).sum() < 37.7
    # Neighbours are unrelated.
    order = GlobalOrder(100_000, 7).take(0, 100_000)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01


def test_far_positions_cost_nothing():
    order = GlobalOrder(10**12, 1)
    assert len(set(order.take(7 * 10**12 + 5, 1000).tolist())) == 1000


def test_wrong_arguments():
    with pytest.raises(ValueError, match="at least one"):
        GlobalOrder(0)
    with pytest.raises(ValueError, match="negative"):
        GlobalOrder(3).take(-1, 2)


def test_listed_examples_come_as_they_are_listed():
    order = ListedOrder(np.array([5, 3, 5, 8]))
    assert order.take(0, 2).tolist() == [5, 3] and order.take(2, 2).tolist() == [5, 8]


SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=4)


@given(sizes=SIZES, cuts=st.lists(st.integers(0, 150), max_size=5), shuffle=st.booleans(), data=st.data())
def test_any_cut_of_a_mixture_gives_the_same_sequence(sizes, cuts, shuffle, data):
    weights = data.draw(st.tuples(*[st.integers(1, 5)] * len(sizes)))
    order = MixedOrder(tuple(sizes), weights, 3, shuffle)
    whole = order.take(0, 150)
    parts = [order.take(start, end - start) for start, end in pairwise([0, *sorted(cuts), 150])]
    assert np.concatenate(parts).tolist() == whole.tolist()
    manifest = np.searchsorted(np.cumsum(sizes), whole, side="right")
    for number, (weight, size) in enumerate(zip(weights, sizes)):
        mine = whole[manifest == number]
        share = np.cumsum(manifest == number) - np.arange(1, 151) * weight / sum(weights)
        assert np.abs(share).max() <= len(sizes) / 2, "evenly spread"
        for epoch in range(len(mine) // size):
            once = mine[epoch * size : (epoch + 1) * size] - sum(sizes[:number])
            assert sorted(once.tolist()) == list(range(size)), "every example once in each epoch of its manifest"


def test_a_mixture_is_shuffled_by_seed_epoch_and_manifest():
    order = MixedOrder((500, 500), (1, 1), seed=1)
    ids = order.take(0, 2000)
    first, second = ids[ids < 500], ids[ids >= 500] - 500
    assert (first[:500] == second[:500]).mean() < 0.05 and (first[:500] == first[500:]).mean() < 0.05
    assert (ids == MixedOrder((500, 500), (1, 1), seed=2).take(0, 2000)).mean() < 0.05
    assert len(set(order.take(7 * 10**15, 100).tolist())) == 100


def test_weights_in_whole_numbers():
    assert whole_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert whole_weights([10, 5]) == (2, 1) and whole_weights([1e-3, 1]) == (1, 1000)
    with pytest.raises(ValueError, match="more than 1,000,000; round them"):
        whole_weights([1, 0.00000123])
    with pytest.raises(ValueError, match="a weight for each manifest"):
        MixedOrder((3, 4), (1,))
    with pytest.raises(ValueError, match="negative"):
        MixedOrder((3, 4), (1, 1)).take(-1, 2)
