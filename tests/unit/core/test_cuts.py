"""Fragments of cut sequences: two runs of rows each, which have their share of the rows and of all pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.cuts import ItemCuts, shares_between
from motet.core.errors import ArgumentError


def cuts_of(*fragments):
    """(example, rank, begin, end, units) each."""
    return ItemCuts(*np.array(fragments, dtype=np.int64).reshape(-1, 5).T)


@given(st.integers(2, 6), st.integers(2, 300))
def test_equal_fragments_have_equally_many_pairs(degree, half):
    units = degree * (half // degree + 1)
    rows = 2 * units
    bounds = [units * rank // degree for rank in range(degree + 1)]
    cuts = cuts_of(*((3, rank, bounds[rank], bounds[rank + 1], units) for rank in range(degree)))
    owner = cuts.owner(3, rows)
    pairs = np.bincount(owner, np.arange(1, rows + 1))
    assert len(set(pairs.tolist())) == 1 and len(set(np.bincount(owner).tolist())) == 1


@given(st.integers(2, 200), st.integers(0, 99))
def test_each_row_has_one_owner_and_each_fragment_its_share(rows, seed):
    rng, units = np.random.default_rng(seed), -(-rows // 2)
    if units < 2:
        return
    middle = int(rng.integers(1, units))
    cuts = cuts_of((0, 5, 0, middle, units), (0, 1, middle, units, units))
    owner = cuts.owner(0, rows)
    assert len(owner) == rows and set(owner.tolist()) <= {5, 1}
    assert (owner == 5).sum() == 2 * middle  # the row in the middle is of the last fragment
    assert (np.diff(owner) != 0).sum() <= 2
    assert cuts.share_of(np.array([2**62])).sum() == 2**62


@pytest.mark.parametrize("amount", [0, 12_345, 2**31, 2**62 - 1])
def test_shares_are_exact_also_where_amounts_times_units_do_not_fit(amount):
    cuts = [(0, 3, 7), (3, 7, 7), (0, 2**20, 2**20)]
    found = shares_between(np.full(len(cuts), amount), *(np.array(column) for column in zip(*cuts)))
    assert found.tolist() == [amount * end // units - amount * begin // units for begin, end, units in cuts]


def test_examples_that_are_left_out_take_their_fragments_with_them():
    cuts = cuts_of((1, 0, 0, 1, 2), (1, 2, 1, 2, 2), (4, 1, 0, 1, 3), (4, 3, 1, 3, 3))
    left = cuts.keep(np.array([False, True, False, True, True]))
    assert left.degrees == {0: 2, 2: 2} and left.on_rank(3).tolist() == [2]
    assert cuts.keep(np.array([True, False, True, True, False])) is None


@pytest.mark.parametrize(
    "fragments",
    [
        [(0, 1, 0, 2, 2)],
        [(0, 1, 0, 1, 2), (0, 1, 1, 2, 2)],
        [(0, 1, 0, 1, 3), (0, 2, 1, 2, 3)],
        [(0, 1, 0, 1, 3), (0, 2, 2, 3, 3)],
    ],
)
def test_fragments_that_are_no_whole_sequence_are_refused(fragments):
    with pytest.raises(ArgumentError, match="the fragments of item 0 must have all of its units"):
        cuts_of(*fragments)
