"""Images as models' own processors prepare them: pixels bit by bit those of transformers, sizes from headers alone."""

import numpy as np
import pytest
from PIL import Image

from motet.core.errors import UserError
from motet.data.by_processor import ImagesByProcessor
from motet.data.media import MediaRef
from motet.data.processed_images import ProcessedImages
from motet.models.whole.processor import TO_ONE_SIZE, AnyResTiles, CanvasTiles, CroppedTiles, Images

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = [(24, 24), (100, 60), (60, 100), (9, 31), (25, 24), (7, 200), (24, 36)]


def drawn(size, mode="RGB"):
    rng = np.random.default_rng(size)
    bands = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], *bands), dtype=np.uint8))


def pixels_of(rows: np.ndarray, height: int, width: int, patch: int) -> np.ndarray:
    """Rows of patches [n, 3 * patch ** 2] as an image [3, height, width]."""
    by_patch = rows.reshape(height // patch, width // patch, 3, patch, patch)
    return by_patch.transpose(2, 0, 3, 1, 4).reshape(3, height, width)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize(
    ("size", "crop"),
    [
        ({"shortest_edge": 24}, (24, 24)),
        ({"shortest_edge": 30}, (24, 24)),
        ({"shortest_edge": 15}, (24, 24)),  # Filled up with black.
        ({"shortest_edge": 20}, (24, 16)),
        ({"height": 24, "width": 24}, None),
    ],
)
def test_pixels_are_those_of_transformers(size, crop, resample):
    transformers = pytest.importorskip("transformers")
    cut = {"height": crop[0], "width": crop[1]} if crop else {"height": 24, "width": 24}
    theirs = transformers.CLIPImageProcessorPil(
        size=size, crop_size=cut, do_center_crop=crop is not None, resample=resample
    )
    ours = ProcessedImages(
        patch_size=8,
        size=crop or (24, 24),
        shortest_edge=size.get("shortest_edge"),
        resample=resample,
        mean=MEAN,
        std=STD,
    )
    for number, wanted in enumerate(SIZES):
        image = drawn(wanted, ("RGB", "L", "RGBA")[number % 3])
        media = ours(image)
        expected = theirs(image, return_tensors="np")["pixel_values"][0]
        assert media.size.tolist() == ours.sizes(np.array([wanted]))[0].tolist()
        np.testing.assert_array_equal(pixels_of(media.values, *expected.shape[1:], patch=8), expected)
        np.testing.assert_array_equal(media.pixels.rows(media.pixels.bytes_of(media.values)), media.values)


@pytest.mark.parametrize("kind", TO_ONE_SIZE)
def test_pixels_of_every_kind_of_processor_are_its_own(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{kind}ImageProcessorPil")
    crops = getattr(processor, "do_center_crop", None)
    square = {"height": 24, "width": 24}
    options = {"size": {"shortest_edge": 24}, "crop_size": square} if crops else {"size": square}
    processor(**options).save_pretrained(tmp_path)
    image = drawn((40, 30))
    rows = ProcessedImages(**Images(8, (24, 24)).options(tmp_path))(image).values
    expected = processor(**options)(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(pixels_of(rows, 24, 24, patch=8), expected)


@pytest.mark.parametrize("kind", ["MobileViT", "Levit", "PoolFormer", "EfficientNet"])
def test_processors_that_do_more_than_their_options_say_are_refused(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    square = {"height": 24, "width": 24}
    size = square if kind == "EfficientNet" else {"shortest_edge": 24}
    getattr(transformers, f"{kind}ImageProcessorPil")(size=size, crop_size=square).save_pretrained(tmp_path)
    for files in (Images(8, (24, 24)), AnyResTiles(8, 24, ((24, 48),)), CroppedTiles(8, 24), CanvasTiles(8, 24, ())):
        with pytest.raises(UserError, match=f"the {kind}ImageProcessorPil of .* is not what Motet computes"):
            files.options(tmp_path)


@pytest.mark.parametrize("values", [{"image_mean": 0.3}, {"image_std": 1}, {"image_mean": 0, "image_std": 0.7}])
def test_one_mean_or_deviation_of_all_channels_is_that_of_each(tmp_path, values):
    transformers = pytest.importorskip("transformers")
    square = {"height": 24, "width": 24}
    theirs = transformers.SiglipImageProcessorPil(size=square, **values)
    theirs.save_pretrained(tmp_path)
    image = drawn((40, 30))
    rows = ProcessedImages(**Images(8, (24, 24)).options(tmp_path))(image).values
    np.testing.assert_array_equal(
        pixels_of(rows, 24, 24, patch=8), theirs(image, return_tensors="np")["pixel_values"][0]
    )


def test_what_is_less_than_a_patch_at_the_edges_is_left_out():
    """As by the convolution of a tower that takes 384 pixels in patches of 14."""
    whole, parted = (ProcessedImages(patch_size=side, size=(24, 24)) for side in (24, 7))
    image = drawn((40, 30))
    assert parted.sizes(np.array([image.size])).tolist() == [[3, 3]]
    kept = pixels_of(whole(image).values, 24, 24, patch=24)[:, :21, :21]
    np.testing.assert_array_equal(pixels_of(parted(image).values, 21, 21, patch=7), kept)


def test_a_processor_that_motet_does_not_know_is_given_the_upper_bits_of_sixteen(tmp_path):
    """Its own conversion to colours would clip them, so that nearly all is white."""
    processors = pytest.importorskip("transformers")
    plain = {"do_resize": False, "do_center_crop": False, "do_normalize": False}
    processors.CLIPImageProcessorPil(**plain, do_rescale=False).save_pretrained(tmp_path)
    grey = np.arange(24 * 24, dtype=np.uint16).reshape(24, 24) * 113
    Image.fromarray(grey).save(tmp_path / "a.png")
    media = ImagesByProcessor(tmp_path, (3, 24, 24), 1).load(MediaRef("image", str(tmp_path / "a.png")))
    np.testing.assert_array_equal(media.values.reshape(3, 24, 24), np.broadcast_to(grey >> 8, (3, 24, 24)))
