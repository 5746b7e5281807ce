"""Images as AnyRes prepares them: pixels and rows are those of transformers' processors, from headers alone."""

import numpy as np
import pytest
from PIL import Image

from motet.data.anyres_images import AnyResImages

CANVASES = ((16, 32), (32, 16), (32, 32), (16, 48), (48, 16))
SIZES = [(16, 16), (100, 60), (60, 100), (9, 31), (17, 16), (3, 40), (40, 3), (33, 11), (64, 63), (31, 90), (500, 8)]


def drawn(number, size):
    rng = np.random.default_rng(number)
    mode, bands = (("RGB", (3,)), ("L", ()), ("RGBA", (4,)))[number % 3]
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], *bands), dtype=np.uint8))
    assert image.mode == mode
    return image


@pytest.mark.parametrize("name", ["LlavaNext", "LlavaOnevision"])
def test_pixels_and_rows_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    grid = [list(canvas) for canvas in CANVASES]
    crop = {"crop_size": {"height": 16, "width": 16}} if name == "LlavaNext" else {}
    theirs = getattr(transformers, f"{name}ImageProcessorPil")(
        size={"height": 16, "width": 16}, image_grid_pinpoints=grid, **crop
    )
    counted = getattr(transformers, f"{name}Processor")
    counted = object.__new__(counted)
    counted.image_processor, counted.patch_size, counted.num_additional_image_tokens = theirs, 4, 0
    counted.num_image_tokens, counted.vision_aspect_ratio = 16, "anyres_max_99"
    ours = AnyResImages(
        patch_size=4, tile=16, canvases=CANVASES, mean=tuple(theirs.image_mean), std=tuple(theirs.image_std)
    )
    for number, (width, height) in enumerate(SIZES):
        media, image = ours(drawn(number, (width, height))), drawn(number, (width, height))
        tiles = theirs(image, return_tensors="np")["pixel_values"][0]
        rows = tiles.reshape(-1, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 48)
        np.testing.assert_array_equal(media.values, rows)
        np.testing.assert_array_equal(media.pixels.rows(media.patches), rows)
        size = ours.sizes(np.array([[width, height]]))[0]
        assert media.size.tolist() == size.tolist()
        down, across, kept_rows, kept_columns = size.tolist()
        assert len(media.values) == 16 * (1 + down * across)
        expected = counted._get_number_of_features(height, width, 16, 16)
        assert 16 + kept_rows * (kept_columns + 1) == expected, (width, height)


def test_an_image_of_which_nothing_is_left_is_refused():
    ours = AnyResImages(patch_size=4, tile=16, canvases=CANVASES)
    raw = np.array([[1, 5000], [5000, 1], [640, 480]])
    assert ours.accepts(raw).tolist() == [False, False, True]
    assert "so long and thin" in ours.refusal((1, 5000))
