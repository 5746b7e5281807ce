"""Segments row by row: one truth with the pairs by which tokens are distributed, and with Cornstarch's bitfield."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import Segments, distribute_tokens
from motet.core.attention_table import AttentionTable
from motet.core.errors import ArgumentError
from unit.balance.test_tokens import attends, documents, tables


@given(segments=tables())
def test_the_table_is_the_mask(segments):
    table = segments.table()
    np.testing.assert_array_equal(table.dense(), attends(segments))
    token = np.repeat(segments.document, segments.length)
    np.testing.assert_array_equal(table.document, np.searchsorted(token, token))


@given(segments=tables(), num_ranks=st.integers(1, 4), block=st.integers(1, 9))
def test_tokens_are_distributed_by_the_pairs_of_the_table(segments, num_ranks, block):
    pairs = segments.table().pairs
    placed = distribute_tokens(segments, num_ranks, block)
    for rank in range(num_ranks):
        mine = [pairs[start : start + block].sum() for start in placed.on_rank(rank) * block]
        assert placed.loads[rank, 0] == sum(mine)


@given(documents=documents)
def test_images_in_both_directions_are_those_of_a_pack(documents):
    """One interval a row, also where Segments says it."""
    table = Segments.of_documents(documents, media="bidirectional").table()
    ends = np.cumsum([0, *(n for document in documents for _, n in document)])
    kinds = [kind for document in documents for kind, _ in document]
    images = [[start, end] for kind, start, end in zip(kinds, ends, ends[1:]) if kind != "text"]
    packed = AttentionTable.packed([sum(n for _, n in document) for document in documents], together=images)
    np.testing.assert_array_equal(table.start, packed.start)
    np.testing.assert_array_equal(table.end, packed.end)
    np.testing.assert_array_equal(table.document, packed.document)


def test_several_intervals_only_where_a_segment_is_skipped():
    segments = Segments([2, 3, 2], [0, 0, 0], [0, 1, 0], [0, 2, 0], [1, 0, 1])  # text does not see the image
    assert segments.table().start[:, 5].tolist() == [0, 5]
    assert segments.table().end[:, 5].tolist() == [2, 6]
    assert len(Segments.of_documents([[("text", 2), ("image", 3), ("text", 2)]]).table().start) == 1


@given(documents=documents)
def test_a_bitfield_with_document_and_instance_is_the_same_mask(documents):
    segments = Segments.of_documents(documents)
    bits = np.where(segments.modality == 0, 7, 1 << segments.modality)
    columns = (np.repeat(column, segments.length) for column in (bits, segments.document, segments.instance))
    read = Segments.of_bitfield(*columns)
    np.testing.assert_array_equal(read.table().dense(), attends(segments))


def test_a_plain_bitfield_would_merge_two_images():
    bits, document = [1, 2, 2, 2, 2, 3], [0] * 6
    apart = Segments.of_bitfield(bits, document, [0, 1, 1, 2, 2, 0]).table().dense()
    merged = Segments.of_bitfield(bits, document, [0, 1, 1, 1, 1, 0]).table().dense()
    assert apart[1:3, 1:3].all() and not apart[1:3, 3:5].any()
    assert merged[1:3, 3:5].all()


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (([1, 6], [0, 0], [0, 1]), r"bits\[1\] is 6; it must be"),
        (([1, 0], [0, 0], [0, 1]), r"bits\[1\] is 0"),
        (([1, 2], [0, 0], [0, 0]), r"instance\[1\] is 0; it must be 0 for text, and above 0 for all else"),
        (([1, 2], [0, 0], [1, 1]), r"instance\[0\] is 1"),
        (([1, 2], [0], [0, 1]), "document has 1 tokens; bits has 2"),
        (([1, 1], [1, 0], [0, 0]), r"document\[1\] is 0; it must be at least"),
    ],
)
def test_refuses_what_is_no_bitfield(columns, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        Segments.of_bitfield(*columns)
