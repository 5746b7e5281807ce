"""Segments of items: what they add up to, against lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.core.item_segments import ItemSegments
from motet.core.workload import BatchLengths, ItemLengths

LISTS = st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=8)


def lists_of(segments: ItemSegments) -> list[list[int]]:
    return [segments.length[first:last].tolist() for first, last in zip(segments.offsets, segments.offsets[1:])]


@given(LISTS)
def test_sums_are_those_of_lists(items):
    segments = ItemSegments.of(items)
    assert lists_of(segments) == items and segments.num_items == len(items)
    assert segments.counts.tolist() == [len(each) for each in items]
    for power in (0, 1, 2):
        assert segments.summed(segments.length**power).tolist() == [sum(s**power for s in each) for each in items]
    whole = ItemLengths(np.arange(len(items)), segments.summed(segments.length), np.zeros(len(items), int), segments)
    assert whole.summed(np.square).tolist() == [sum(s**2 for s in each) for each in items]


@given(LISTS, LISTS, st.randoms())
def test_items_are_taken_and_joined_with_their_segments(items, others, random):
    chosen = [random.randrange(len(items)) for _ in range(5)] if items else []
    taken = ItemSegments.of(items).take(np.array(chosen, dtype=np.int64))
    assert lists_of(taken) == [items[i] for i in chosen]
    assert lists_of(ItemSegments.joined([ItemSegments.of(items), ItemSegments.of(others)])) == items + others
    pattern = ItemSegments.of(items + others).pattern
    assert [(a == b) for a in pattern for b in pattern] == [a == b for a in items + others for b in items + others]


@given(st.lists(st.integers(0, 60), max_size=6), st.integers(1, 20))
def test_cut_items_are_whole_but_for_the_last_segment(lengths, segment):
    cut = lists_of(ItemSegments.cut(np.array(lengths, dtype=np.int64), segment))
    assert [sum(each) for each in cut] == lengths
    for each in cut:
        assert all(s == segment for s in each[:-1]) and all(0 < s <= segment for s in each[-1:])


def test_sums_of_items_are_exact_where_the_sum_of_all_is_not():
    large = 2**62
    segments = ItemSegments.of([[large], [large, 3], [large]])
    assert segments.summed(segments.length).tolist() == [large, large + 3, large]


@pytest.mark.parametrize("offsets", [[], [0], [0, 2], [0, 4], [1, 3], [0, 3, 2, 3]])
def test_wrong_offsets(offsets):
    with pytest.raises(ArgumentError, match="must ascend from 0 to 3"):
        ItemSegments(np.array([1, 2, 3]), np.array(offsets, dtype=np.int64))


def test_segments_of_another_length():
    with pytest.raises(ArgumentError, match="must add up to its length"):
        ItemLengths(np.array([0]), np.array([7]), np.array([1]), ItemSegments.of([[3, 3]]))


def test_segments_stay_with_their_items_through_a_step():
    def part(lengths, segments):
        example = np.arange(len(lengths))
        items = ItemLengths(example, np.array(lengths), np.array(lengths), segments and ItemSegments.of(segments))
        ones = np.ones(len(lengths), dtype=np.int64)
        return BatchLengths(ones, ones, ones.astype(np.int32), {"image": items})

    joined = BatchLengths.joined([part([5, 3], [[2, 3], [3]]), part([], None), part([4], None)])
    assert lists_of(joined.items["image"].segments) == [[2, 3], [3], [4]]
    taken = joined.take(np.array([2, 0, 0]))
    assert lists_of(taken.items["image"].segments) == [[4], [2, 3], [2, 3]]
    assert joined.keep(np.array([False, True, False])).items["image"].segments.length.tolist() == [3]
    assert BatchLengths.joined([part([5], None), part([4], None)]).items["image"].segments is None
