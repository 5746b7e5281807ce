"""Images as InternVL prepares them: tiles and pixels are those of transformers' processor, from headers alone."""

import numpy as np
import pytest
from PIL import Image

from motet.data.cropped_images import CroppedImages

SIZES = [(16, 16), (100, 60), (60, 100), (9, 31), (17, 16), (3, 40), (40, 3), (64, 63), (32, 32), (200, 200), (500, 8)]


@pytest.mark.parametrize(("least", "most"), [(1, 12), (2, 6), (1, 1)])
def test_tiles_and_pixels_are_those_of_transformers(least, most):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=least, max_patches=most
    )
    mean, std = tuple(theirs.image_mean), tuple(theirs.image_std)
    ours = CroppedImages(patch_size=4, tile=16, least=least, most=most, mean=mean, std=std)
    for number, (width, height) in enumerate(SIZES):
        rng = np.random.default_rng(number)
        mode, bands = (("RGB", (3,)), ("L", ()), ("RGBA", (4,)))[number % 3]
        image = Image.fromarray(rng.integers(0, 256, (height, width, *bands), dtype=np.uint8))
        assert image.mode == mode
        media = ours(image)
        tiles = np.asarray(theirs(image, return_tensors="np")["pixel_values"])
        rows = tiles.reshape(-1, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 48)
        np.testing.assert_array_equal(media.values, rows)
        size = ours.sizes(np.array([[width, height]]))[0]
        assert media.size.tolist() == size.tolist() == [4 * len(tiles), 4]
