from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.data.order import GlobalOrder, ListedOrder


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
