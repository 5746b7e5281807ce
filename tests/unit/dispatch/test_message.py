"""Grids of items on their way from rank to rank, and into packed sequences."""

import numpy as np
import pytest

from motet.core.example import TokenSequence
from motet.dispatch.batch import pack
from motet.dispatch.message import example_bytes, read_example, write_example
from motet.train.generate import _cut, _GrowingSequence, _join


def example(num_items, grids):
    places = np.arange(1, num_items + 1)
    tokens, targets = np.arange(num_items + 3), np.arange(num_items + 3) > num_items
    return TokenSequence(tokens, targets, ("image",) * num_items, places, grids)


@pytest.mark.parametrize(
    ("num_items", "grids"), [(0, None), (2, None), (2, np.array([[1, 2, 3, 0], [5, 4, 1, 1 << 30]]))]
)
def test_an_example_arrives_with_its_grids(num_items, grids):
    sent = example(num_items, grids)
    into = np.zeros(int(example_bytes(np.array([len(sent.tokens)]), np.array([num_items]))[0]), dtype=np.uint8)
    write_example(sent, into)
    got = read_example(into, len(sent.tokens), sent.media)
    np.testing.assert_array_equal(got.media_positions, sent.media_positions)
    assert (got.grids is None) == (grids is None)
    if grids is not None:
        np.testing.assert_array_equal(got.grids, grids)


def test_sequences_without_items_stand_beside_those_with_grids():
    with_grids, text = example(1, np.array([[1, 2, 3, 0]])), example(0, None)
    packed = pack([text, with_grids], {"image": np.array([6])})
    expected = [[0, 1, 2, 0, 1, 1, 1, 1, 1, 1, 4, 5], [0, 1, 2, 0, 1, 1, 1, 2, 2, 2, 4, 5]]
    assert packed.grid_positions[:2].tolist() == expected
    assert packed.grid_positions[2].tolist() == [0, 1, 2, 0, 1, 2, 3, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="only some of the sequences"):
        pack([with_grids, example(1, None)], {"image": np.array([6, 6])})
    assert pack([text], {"image": np.array([], dtype=int)}).grid_positions is None


def test_a_token_of_an_answer_stands_behind_all_before_it():
    packed = pack([example(0, None), example(1, np.array([[1, 2, 3, 0]]))], {"image": np.array([6])})
    growing = [_GrowingSequence(*pieces) for pieces in _cut(packed, {})]
    for sequence, token in zip(growing, (7, 8)):
        sequence.add(token, end_token=None)
    joined, _ = _join(growing, {}, packed.tokens.device)
    assert joined.grid_positions.shape == (3, joined.num_tokens)
    ends = joined.offsets[1:].long() - 1
    assert joined.grid_positions[:, ends].tolist() == [[3, 6]] * 3
