"""Which rows of images each row of packed documents sees, where these are keys: as transformers' processor says."""

from itertools import pairwise

import numpy as np
import pytest
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from motet.models.key_items import KeyItems

NUM_TILES, TILE_ROWS = 3, 2


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
def test_rows_see_what_the_processor_says(share):
    """Documents of every mixture: without images, with some, with images side by side, and with nothing else."""
    rng = np.random.default_rng(3)
    for lengths in [rng.integers(1, 9, rng.integers(0, 5)) for _ in range(60)]:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        is_image = rng.random(offsets[-1]) < share
        num_tiles = rng.integers(1, NUM_TILES + 1, is_image.sum())
        keys = KeyItems.packed(offsets, np.flatnonzero(is_image), num_tiles * TILE_ROWS, NUM_TILES * TILE_ROWS)
        expected = np.zeros((offsets[-1], NUM_TILES * TILE_ROWS * len(num_tiles)), dtype=bool)
        sees, first = np.zeros(offsets[-1], dtype=bool), 0
        for start, stop in pairwise(offsets):
            spans = get_cross_attention_token_mask(is_image[start:stop].astype(int).tolist(), 1)
            if not spans:
                continue
            of_images = num_tiles[first : first + len(spans)].tolist()
            # A single image has the end -1, which their function makes the end of the text.
            mask = convert_sparse_cross_attention_mask_to_dense([spans], [of_images], NUM_TILES, int(stop - start))[0]
            mask = np.repeat(mask, TILE_ROWS, axis=2).reshape(stop - start, -1).astype(bool)
            sees[start:stop] = mask.any(axis=1)
            mask[~mask.any(axis=1)] = True
            at = first * NUM_TILES * TILE_ROWS
            expected[start:stop, at : at + mask.shape[1]] = mask
            first += len(spans)
        assert keys.rows.tolist() == np.flatnonzero(expected.any(axis=1)).tolist()
        assert keys.sees.tolist() == sees[keys.rows].tolist()
        np.testing.assert_array_equal(keys.table.dense(), expected[keys.rows])
        # Of ranks that share the documents each sees with its rows what they saw.
        for own in np.flatnonzero(is_first := rng.random(offsets[-1]) < 0.5), np.flatnonzero(~is_first):
            items = keys.items_of(own)
            part = keys.of(own, items)
            assert own[part.rows].tolist() == [row for row in keys.rows if row in own]
            of_items = expected.reshape(offsets[-1], len(num_tiles), NUM_TILES * TILE_ROWS)[own]
            assert items.tolist() == np.flatnonzero(of_items.any(axis=(0, 2))).tolist()
            seen = of_items[part.rows][:, items].reshape(len(part.rows), len(items) * NUM_TILES * TILE_ROWS)
            np.testing.assert_array_equal(part.table.dense(), seen)
            assert part.sees.tolist() == sees[own[part.rows]].tolist()
