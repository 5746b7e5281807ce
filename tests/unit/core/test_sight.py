"""What rows of a backbone see, by which they are dealt out to ranks that share them."""

import numpy as np
import pytest

from motet.assign.context_rows import context_rows
from motet.core.attention_table import AttentionTable
from motet.core.cuts import ItemCuts
from motet.core.shapes import Transformer, language_model
from motet.core.sight import CAUSAL, Sight

LENGTHS = np.array([3000, 900, 40, 5000], dtype=np.int64)
RUNS = np.array([[0, 2500], [3100, 3600], [4000, 8500]], dtype=np.int64)
WINDOWS = ((0, 1), (512, 5))
SIGHTS = [Sight(("image",)), Sight(windows=WINDOWS), Sight(("image",), True, WINDOWS)]


def layers(windows):
    return [
        layer
        for window in windows
        for layer in language_model(Transformer(8, 16, 2, causal=True, window=window), 1, 50).layers
    ]


def test_windows_are_counted_by_layers_in_proportion():
    assert Sight.of(layers([0, 0])) == Sight.of([]) == CAUSAL
    assert Sight.of(layers([512, 0, 512, 512, 0, 512])).windows == ((0, 1), (512, 2))
    assert Sight.of(layers([512])).windows == ((512, 1),)


def test_pairs_are_those_of_all_layers():
    sight = Sight(("image",), windows=WINDOWS)
    table = AttentionTable.packed(LENGTHS, together=RUNS)
    assert (sight.pairs(LENGTHS, RUNS) == table.pairs + 5 * table.windowed(512).pairs).all()
    assert CAUSAL.pairs(LENGTHS) is None


@pytest.mark.parametrize("sight", SIGHTS)
def test_rows_are_dealt_out_by_what_they_see(sight):
    runs = RUNS if sight.bidirectional else None
    pairs = sight.pairs(LENGTHS, runs)

    def unevenness(given):
        loads = np.bincount(context_rows(LENGTHS, 4, given).owner, pairs, 4)
        return loads.max() / loads.mean()

    assert unevenness(pairs) < 1.001 < 1.01 < unevenness(None)


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("bounds", [[0, 64, 128], [0, 20, 90, 128], [0, 32, 64, 96, 128]])
def test_fragments_have_their_share_of_what_rows_see(sight, bounds):
    """And as many rows as if the sequence was causal, in two runs."""
    num_rows, begin = 5000, np.array(bounds)
    count = len(begin) - 1
    cuts = ItemCuts(
        np.zeros(count, np.int64), np.arange(count)[::-1].astype(np.int32), begin[:-1], begin[1:], np.full(count, 128)
    )
    pairs = sight.pairs(np.array([num_rows]), RUNS[:1] if sight.bidirectional else None)
    owner, causal = cuts.owner(0, num_rows, pairs), cuts.owner(0, num_rows)
    counts = np.bincount(causal)
    assert np.bincount(owner).tolist() == counts.tolist()
    assert (np.diff(owner) != 0).sum() <= 2 * (count - 1)

    def error(ranks):
        return np.abs(np.bincount(ranks, pairs) / (pairs.sum() * counts / num_rows) - 1).max()

    assert error(owner) < 0.002 < 0.02 < error(causal)


def test_who_has_a_row_of_a_sequence_depends_on_no_other_sequence():
    sight = SIGHTS[0]
    together = sight.pairs(LENGTHS, RUNS)
    starts = np.cumsum(LENGTHS) - LENGTHS
    for start, length in zip(starts.tolist(), LENGTHS.tolist()):
        inside = RUNS[(RUNS[:, 0] >= start) & (RUNS[:, 1] <= start + length)] - start
        assert (sight.pairs(np.array([length]), inside) == together[start : start + length]).all()
