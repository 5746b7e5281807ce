"""Grids of items on their way from rank to rank, and into packed sequences."""

import numpy as np
import pytest

from motet.core.example import Media, TokenSequence
from motet.core.grid_positions import KEYS
from motet.dispatch.batch import pack
from motet.dispatch.loaded import LoadedExample, LoadedTables, tables_of
from motet.dispatch.message import (
    MediaShape,
    example_bytes,
    media_bytes,
    read_example,
    read_media,
    write_example,
    write_media,
)
from motet.train.generate import _cut, _GrowingSequence, _join


def example(num_items, grids, pieces=None):
    num_places = num_items if pieces is None else pieces.sum()
    places = np.arange(1, num_places + 1)
    tokens, targets = np.arange(num_places + 3), np.arange(num_places + 3) > num_places
    return TokenSequence(tokens, targets, ("image",) * num_items, places, grids, pieces)


@pytest.mark.parametrize(
    ("num_items", "grids", "pieces"),
    [
        (0, None, None),
        (2, None, None),
        (2, np.array([[1, 2, 3, 0, 0], [0, 4, 1, 1 << 30, 2]]), None),
        (2, None, np.array([3, 1])),
        (2, np.arange(1, 21).reshape(4, 5), np.array([3, 1])),
    ],
)
def test_an_example_arrives_with_its_grids_and_pieces(num_items, grids, pieces):
    sent = example(num_items, grids, pieces)
    size = example_bytes(*(np.array([len(each)]) for each in (sent.tokens, sent.media_positions)))
    into = np.zeros(int(size[0]), dtype=np.uint8)
    write_example(sent, into)
    got = read_example(into, len(sent.tokens), sent.media, sent.num_pieces)
    np.testing.assert_array_equal(got.media_positions, sent.media_positions)
    for arrived, own in ((got.grids, grids), (got.pieces, pieces)):
        assert (arrived is None) == (own is None)
        if own is not None:
            np.testing.assert_array_equal(arrived, own)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_arrive_as_wide_as_they_are(dtype):
    item = Media(np.arange(15).reshape(5, 3).astype(dtype) / 7, np.array([5]))
    shape = MediaShape.of(item)
    into = np.zeros(media_bytes(MediaShape(*np.array([shape]).T))[0], dtype=np.uint8)
    write_media(item, into)
    got = read_media(into, shape)
    assert got.values.dtype == dtype
    np.testing.assert_array_equal(got.values, item.values)


def test_the_rows_of_an_item_are_dealt_over_its_placeholders():
    sequence = TokenSequence(
        np.array([9, 7, 0, 8, 0, 5, 0, 3]),
        np.arange(8) == 7,
        ("image",) * 2,
        np.array([2, 4, 6]),
        None,
        np.array([2, 1]),
    )
    packed = pack([sequence], {"image": np.array([6, 2])})
    assert packed.feature_positions["image"].tolist() == [2, 3, 4, 6, 7, 8, 10, 11]
    assert packed.tokens[[0, 1, 5, 9, 12]].tolist() == [9, 7, 8, 5, 3]
    tables = LoadedTables.read(
        [tables_of([LoadedExample(sequence, (media(6), media(2)))], ("image",), {"image": Rows()})], ("image",)
    )
    assert tables.lengths.sequence.tolist() == [packed.num_tokens]
    assert (tables.lengths.num_targets.tolist(), tables.media_of(0)[1].tolist()) == ([1], [2, 1])
    with pytest.raises(ValueError, match=r"5, 2\] rows for \[2, 1\] placeholders"):
        pack([sequence], {"image": np.array([5, 2])})


def media(num_rows):
    return Media(np.zeros((num_rows, 4), np.float32), np.array([num_rows]))


class Rows:
    def lengths(self, sizes):
        return sizes[:, 0]

    num_tokens = lengths


def test_sequences_without_items_stand_beside_those_with_grids():
    with_grids, text = example(1, np.array([[1, 2, 3, 0, 0]])), example(0, None)
    packed = pack([text, with_grids], {"image": np.array([6])})
    expected = [[0, 1, 2, 0, 1, 1, 1, 1, 1, 1, 4, 5], [0, 1, 2, 0, 1, 1, 1, 2, 2, 2, 4, 5]]
    assert packed.grid_positions[:2].tolist() == expected
    assert packed.grid_positions[2].tolist() == [0, 1, 2, 0, 1, 2, 3, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="only some of the sequences"):
        pack([with_grids, example(1, None)], {"image": np.array([6, 6])})
    assert pack([text], {"image": np.array([], dtype=int)}).grid_positions is None


def test_a_token_of_an_answer_stands_behind_all_before_it():
    packed = pack([example(0, None), example(1, np.array([[1, 2, 3, 0, 0]]))], {"image": np.array([6])})
    growing = [_GrowingSequence(*pieces) for pieces in _cut(packed, {})]
    for sequence, token in zip(growing, (7, 8)):
        sequence.add(token)
    joined, _ = _join(growing, {}, packed.tokens.device)
    assert joined.grid_positions.shape == (3, joined.num_tokens)
    ends = joined.offsets[1:].long() - 1
    assert joined.grid_positions[:, ends].tolist() == [[3, 6]] * 3


def test_items_whose_rows_are_keys_say_how_many_text_sees():
    """At their own token alone, and positions are counted; tokens of an answer are text."""
    with_keys = example(1, np.array([[6, 1, 1, 0, KEYS]]))
    packed = pack([example(0, None), with_keys], {"image": np.array([1])})
    assert packed.grid_positions is None
    place = int(packed.feature_positions["image"])
    assert packed.key_rows.nonzero().tolist() == [[place]] and packed.key_rows[place] == 6
    growing = [_GrowingSequence(*pieces) for pieces in _cut(packed, {})]
    for sequence in growing:
        sequence.add(7)
    joined, _ = _join(growing, {}, packed.tokens.device)
    # The first sequence is one token longer.
    assert joined.key_rows.nonzero().tolist() == [[place + 1]] and len(joined.key_rows) == joined.num_tokens
