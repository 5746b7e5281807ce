"""Positions of packed rows on three axes."""

import numpy as np
import pytest

from motet.core.grid_positions import grid_positions


def one_by_one(text_length, images):
    """The positions of one sequence, token by token. images: place of a placeholder -> its grid."""
    found, largest = [], -1
    for place in range(text_length):
        start = largest + 1
        height, width = images.get(place, (1, 1))
        found += [(start, start + row, start + column) for row in range(height) for column in range(width)]
        largest = max(max(each) for each in found)
    return found


def test_text_goes_on_behind_the_longer_side_of_an_image():
    rng = np.random.default_rng(2)
    lengths, placeholders, grids, expected = [], [], [], []
    for length in (5, 1, 0, 9, 4):
        chosen = sorted(rng.choice(length, size=min(length, int(rng.integers(0, 4))), replace=False).tolist())
        of_sequence = {place: tuple(rng.integers(1, 6, 2).tolist()) for place in chosen}
        placeholders += [sum(lengths) + place for place in chosen]
        grids += of_sequence.values()
        expected += one_by_one(length, of_sequence)
        lengths.append(length)
    grids = np.array(grids)
    num_rows = np.ones(sum(lengths), dtype=np.int64)
    num_rows[placeholders] = grids.prod(axis=1)
    assert len(grids) > 3
    found = grid_positions(np.array(lengths), np.array(placeholders), num_rows, grids)
    assert found.T.tolist() == [list(each) for each in expected]
    with pytest.raises(ValueError, match="have the grids"):
        grid_positions(np.array(lengths), np.array(placeholders), num_rows + 1, grids)
