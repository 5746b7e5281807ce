"""The table of who sees whom, against dense masks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.attention_table import AttentionTable
from motet.core.block_table import BlockTable
from motet.core.errors import ArgumentError


@st.composite
def packs(draw):
    """(lengths, causal, runs that see each other in both directions)."""
    lengths = draw(st.lists(st.integers(0, 14), max_size=6))
    runs, start = [], 0
    for length in lengths:
        if length > 1 and draw(st.booleans()):
            first, last = sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length))))
            runs.append([start + first, start + last])
        start += length
    return lengths, draw(st.booleans()), runs


def mask_of(lengths, causal, runs):
    document = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(document))
    mask = document[:, None] == document
    if causal:
        mask &= place[:, None] >= place
    for first, last in runs:
        mask[first:last, first:last] = True
    return mask


@given(packs())
def test_a_pack_is_the_mask_that_is_described(pack):
    table, mask = AttentionTable.packed(*pack), mask_of(*pack)
    np.testing.assert_array_equal(table.dense(), mask)
    np.testing.assert_array_equal(table.pairs, mask.sum(axis=1))


@given(packs(), st.integers(1, 9))
def test_a_window_hides_what_stands_too_far_before(pack, window):
    mask = mask_of(*pack)
    place = np.arange(len(mask))
    table = AttentionTable.packed(*pack).windowed(window)
    np.testing.assert_array_equal(table.dense(), mask & (place[:, None] - place < window))
    np.testing.assert_array_equal(table.windowed(window).dense(), table.dense())


@given(packs(), st.integers(1, 9))
def test_no_window_hides_anything_of_a_prefix(pack, window):
    """Of what sees itself in both directions at the beginning of a document; images behind it are hidden."""
    mask, (lengths, _, runs) = mask_of(*pack), pack
    place, begins = np.arange(len(mask)), np.cumsum([0, *lengths])
    near = place[:, None] - place < window
    for first, last in runs:
        if first in begins:
            near[first:last, first:last] = True
    table = AttentionTable.packed(*pack, prefix=True)
    np.testing.assert_array_equal(table.dense(), mask)
    np.testing.assert_array_equal(table.windowed(window).dense(), mask & near)
    rows = place[::2]
    some = table.of(rows, table.of(rows, place).seen).windowed(window)
    np.testing.assert_array_equal(some.dense(), (mask & near)[np.ix_(rows, some.keys)])


@given(packs(), st.data())
def test_some_rows_against_the_keys_that_they_see(pack, data):
    table, mask = AttentionTable.packed(*pack), mask_of(*pack)
    chosen = data.draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask)))
    rows = np.flatnonzero(chosen)
    seen = table.of(rows, np.arange(len(mask))).seen
    np.testing.assert_array_equal(seen, np.flatnonzero(mask[rows].any(axis=0)))
    extra = data.draw(st.lists(st.sampled_from(range(len(mask))), max_size=4)) if len(mask) else []
    keys = np.union1d(seen, np.array(extra, dtype=np.int64))
    some = table.of(rows, keys)
    np.testing.assert_array_equal(some.dense(), mask[np.ix_(rows, keys)])
    window = data.draw(st.integers(1, 9))
    np.testing.assert_array_equal(some.windowed(window).dense(), table.windowed(window).dense()[np.ix_(rows, keys)])
    np.testing.assert_array_equal(some.of(rows, seen).dense(), mask[np.ix_(rows, seen)])
    if len(seen):
        with pytest.raises(ArgumentError, match="keys lacks one"):
            table.of(rows, seen[1:])


@given(packs(), st.integers(1, 5))
def test_pairs_of_blocks_are_those_of_the_mask(pack, block):
    mask = mask_of(*pack)
    num_blocks = -(-len(mask) // block)
    padded = np.zeros((num_blocks * block,) * 2, dtype=np.int64)
    padded[: len(mask), : len(mask)] = mask
    expected = padded.reshape(num_blocks, block, num_blocks, block).sum(axis=(1, 3))
    np.testing.assert_array_equal(AttentionTable.packed(*pack).pairs_of_blocks(block), expected)


def test_only_plain_packs_are_packs():
    offsets, causal = AttentionTable.packed([3, 0, 2]).as_pack()
    assert (offsets.tolist(), causal) == ([0, 3, 5], True)
    offsets, causal = AttentionTable.packed([3, 2], causal=False).as_pack()
    assert (offsets.tolist(), causal) == ([0, 3, 5], False)
    table = AttentionTable.packed([3, 2])
    assert AttentionTable.packed([3, 2], together=[[0, 2]]).as_pack() is None
    assert table.windowed(2).as_pack() is None
    assert table.of([1, 2], [0, 1, 2]).as_pack() is None


def test_blocks_behind_the_table_see_nothing():
    made = BlockTable.of(AttentionTable.packed([3]), block=4, least=2)
    assert made.partial.counts.tolist() == [1, 0]
    assert made.partial.indices.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AttentionTable.packed([4, 4], together=[[2, 6]]), "rows 2 to 6, which are not of one document"),
        (lambda: AttentionTable.packed([4], together=[[2, 5]]), "together must ascend.* 0 and 4"),
        (lambda: AttentionTable.packed([4], together=[[0, 3], [2, 4]]), "together must ascend"),
        (lambda: AttentionTable.packed([4]).of([1, 1], [0, 1, 2, 3]), "rows must ascend"),
        (lambda: AttentionTable.packed([4]).of([4], [0, 1, 2, 3]), "rows has one that the table does not have"),
        (lambda: AttentionTable(*np.zeros((2, 1, 3), int), *np.arange(6).reshape(2, 3), np.zeros(2, int)), "document"),
        (lambda: AttentionTable(*np.zeros((2, 1, 2), int), *np.zeros((3, 3), int)), "intervals x 3 rows"),
        (
            lambda: AttentionTable(*np.zeros((2, 1, 2), int), *np.arange(6).reshape(3, 2), np.zeros(1, int)),
            "kept has 1",
        ),
        (lambda: AttentionTable(np.array([[2]]), np.array([[1]]), *np.arange(3)[:, None]), "intervals of a row"),
    ],
)
def test_refuses_what_is_no_table(make, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        make()
