"""Items of many cells dealt out at once, against each cell by itself."""

import numpy as np
import pytest

from motet.assign.item_shares import item_shares, shares_of_cells


@pytest.mark.parametrize(
    ("num_groups", "can_cut", "tile_rows"), [(1, True, 0), (2, True, 0), (2, False, 0), (1, True, 8)]
)
def test_cells_are_dealt_out_as_each_by_itself(num_groups, can_cut, tile_rows):
    rng = np.random.default_rng(0)
    cell = rng.integers(0, 60, 150)  # Some are empty, some have one item, some have more than are remembered.
    lengths = rng.choice([3, 16, 40, 41, 200], 150)
    rows, options = lengths // 2 + 1, {"can_cut": can_cut, "tile_rows": tile_rows, "num_groups": num_groups}
    found = shares_of_cells(cell, lengths, rows, 3, **options)
    assert np.bincount(cell).max() > 4
    for number in range(60):
        own = np.flatnonzero(cell == number)
        alone = item_shares(lengths[own], rows[own], 3, **options)
        assert found.ranks[own].tolist() == alone.ranks.tolist()
        of_cell = cell[found.item] == number
        assert of_cell.any() == (alone.cuts is not None)
        if alone.cuts is not None:
            assert found.item[of_cell].tolist() == own[alone.cuts.item].tolist()
            for name in ("rank", "begin", "end", "units"):
                assert getattr(found, name)[of_cell].tolist() == getattr(alone.cuts, name).tolist()
    assert can_cut == bool(len(found.item))


def test_no_items():
    none = np.zeros(0, dtype=np.int64)
    assert not len(shares_of_cells(none, none, none, 2, can_cut=True).ranks)
