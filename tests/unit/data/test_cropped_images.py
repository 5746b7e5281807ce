"""Images as InternVL prepares them: tiles and pixels are those of transformers' processor, from headers alone."""

import numpy as np
import pytest
from PIL import Image

from motet.data.canvas_images import CanvasImages, canvas_sides
from motet.data.cropped_images import CroppedImages
from motet.data.split_images import SplitImages

SIZES = [(16, 16), (100, 60), (60, 100), (9, 31), (17, 16), (3, 40), (40, 3), (64, 63), (32, 32), (200, 200), (500, 8)]


def rows_of(tiles):
    return tiles.reshape(-1, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 48)


@pytest.mark.parametrize(("longest", "splits"), [(61, True), (16, True), (40, False)])
def test_split_tiles_are_those_of_transformers(longest, splits):
    """61: a square comes to 61 x 62 pixels first."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": 16}, do_image_splitting=splits
    )
    mean, std = tuple(theirs.image_mean), tuple(theirs.image_std)
    ours = SplitImages(patch_size=4, tile=16, longest=longest, splits=splits, mean=mean, std=std)
    for number, (width, height) in enumerate(SIZES):
        image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))
        media = ours(image)
        made = theirs(image, return_tensors="np", return_row_col_info=True)
        np.testing.assert_array_equal(media.values, rows_of(np.asarray(made["pixel_values"])))
        size = ours.sizes(np.array([[width, height]]))[0].tolist()
        assert media.size.tolist() == size == [max(made["rows"][0][0], 1), max(made["cols"][0][0], 1)]
    # No side has more than 4096 pixels before it is cut.
    large = SplitImages(patch_size=4, tile=364, longest=5000)
    assert large.sizes(np.array([[6000, 4000], [4000, 6000]])).tolist() == [[8, 12], [12, 8]]


@pytest.mark.parametrize("most", [1, 4, 6])
def test_canvases_are_those_of_transformers(most):
    """Tiles, pixels and black margins; a thin image comes to a single row of pixels."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.MllamaImageProcessorPil(size={"height": 16, "width": 16}, max_image_tiles=most)
    mean, std = tuple(theirs.image_mean), tuple(theirs.image_std)
    ours = CanvasImages(patch_size=4, tile=16, most=most, mean=mean, std=std)
    for number, (width, height) in enumerate([*SIZES, (1000, 3), (33, 48), (31, 17)]):
        mode, bands = (("RGB", (3,)), ("L", ()), ("RGBA", (4,)))[number % 3]
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, *bands), dtype=np.uint8)
        image = Image.fromarray(pixels)
        assert image.mode == mode
        media, made = ours(image), theirs(image, return_tensors="np")
        num_tiles = int(made["aspect_ratio_mask"].sum())
        np.testing.assert_array_equal(media.values, rows_of(np.asarray(made["pixel_values"])[0, 0, :num_tiles]))
        assert not np.asarray(made["pixel_values"])[0, 0, num_tiles:].any()
        size = ours.sizes(np.array([[width, height]]))[0]
        assert media.size.tolist() == size.tolist() and size.prod() == num_tiles
        assert canvas_sides(most).index(tuple(size)) + 1 == made["aspect_ratio_ids"]


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
        np.testing.assert_array_equal(media.values, rows_of(tiles))
        size = ours.sizes(np.array([[width, height]]))[0]
        assert media.size.tolist() == size.tolist() == [4 * len(tiles), 4]
