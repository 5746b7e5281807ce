"""Images as AnyRes prepares them: pixels and rows are those of transformers' processors, from headers alone."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from motet.core.errors import UserError
from motet.data.anyres_images import AnyResImages
from motet.data.dataset import Dataset
from motet.data.media import OF_SEVERAL, BadMedia, MediaRef
from motet.data.modality import Modality
from motet.data.transforms import load_media
from motet.data.videos import amount_of
from motet.models.whole.processor import AnyResTiles
from motet.models.whole.tiles import Newlines, anyres_counts
from unit.data.samples import a_record, write_image, write_manifest

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


@pytest.mark.parametrize("options", [{}, {"do_normalize": False, "image_mean": [0.1, 0.5, 0.999]}])
def test_an_image_beside_others_is_that_of_transformers(tmp_path, options):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 18, "width": 18}, image_grid_pinpoints=[[18, 36]], **options
    )
    theirs.save_pretrained(tmp_path)
    ours = AnyResImages(**AnyResTiles(4, 18, ((18, 36),), squares=True).options(tmp_path))
    images = [drawn(number, size).convert("RGB") for number, size in enumerate(SIZES)]
    tiles = theirs([images], return_tensors="np")["pixel_values"]
    for number, (image, tile) in enumerate(zip(images, tiles, strict=True)):
        image.save(tmp_path / f"{number}.png")
        ref = MediaRef("image", str(tmp_path / f"{number}.png"), raw=(image.width, image.height + OF_SEVERAL))
        media = load_media(ref, ours)
        assert media.size.tolist() == ours.sizes(np.array([ref.raw]))[0].tolist() == [0, 0, 0, 0]
        assert amount_of(ref) == image.width * image.height
        rows = tile[:, :, :16, :16].reshape(3, 4, 4, 4, 4).transpose(1, 3, 0, 2, 4).reshape(-1, 48)
        np.testing.assert_array_equal(media.values, rows)
        with pytest.raises(BadMedia, match=f"its header at indexing promised {image.width} x 99 pixels"):
            load_media(replace(ref, raw=(image.width, 99 + OF_SEVERAL)), ours)


def test_squares_of_one_mean_for_all_channels_are_refused_as_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    options = {"size": {"height": 18, "width": 18}, "image_grid_pinpoints": [[18, 36]], "image_mean": 0.3}
    transformers.LlavaOnevisionImageProcessorPil(**options).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has image_mean = 0\.3; it must be three numbers"):
        AnyResTiles(4, 18, ((18, 36),), squares=True).options(tmp_path)


def test_an_image_is_beside_others_where_its_whole_example_has_several(tmp_path, tokenizer):
    ours = AnyResImages(patch_size=4, tile=16, canvases=CANVASES, square=(9, 9, 9))
    for number in range(2):
        write_image(tmp_path / f"{number}.png", 40, 20 + number)
    turns = [("human", "<image> a"), ("gpt", "cat " * 40), ("human", "<image> b"), ("gpt", "dog")]
    both = [{"from": role, "value": text} for role, text in turns]
    records = [a_record("<image>", image="0.png"), {"conversations": both, "image": ["0.png", "1.png"]}]
    manifest = write_manifest(tmp_path / "train.jsonl", records)
    modality = Modality(ours, Newlines(8, side=4).num_rows, lambda sizes: anyres_counts(sizes) * 16)
    whole = Dataset.open([manifest], tokenizer, {"image": modality})
    items = whole.batch_lengths(np.arange(2), 1).items["image"]
    alone = 16 + 4 * (8 + 1)
    assert items.num_tokens.tolist() == [alone, 17, 17] and items.length.tolist() == [3 * 16, 16, 16]
    assert whole.item_sizes(np.array([1])) == {"image": pytest.approx(np.zeros((2, 4)))}
    assert [load_media(ref, ours).size.tolist() for ref in whole.media_refs(1)] == [[0, 0, 0, 0]] * 2
    # What is cut off from an example was there when its images were prepared, as in transformers.
    cut = Dataset.open([manifest], tokenizer, {"image": modality}, max_sequence_length=60, too_long="truncate")
    assert cut.batch_lengths(np.arange(2), 1).items["image"].num_tokens.tolist() == [alone, 17]
    assert [load_media(ref, ours).size.tolist() for ref in cut.media_refs(1)] == [[0, 0, 0, 0]]
    with pytest.raises(ValueError, match="must be the only one of images"):
        Dataset.open([manifest], tokenizer, {"a": modality, "b": modality}, combine={"image": "rows"})


def test_squares_that_are_too_large_are_refused():
    ours = AnyResImages(patch_size=4, tile=16, canvases=CANVASES, square=(0, 0, 0))
    # Alone, the second would fit no canvas.
    raw = np.array([[20_000, 4_000], [3, 900], [640, 480]]) + [0, OF_SEVERAL]
    assert ours.accepts(raw).tolist() == [False, True, True]
    assert "20,000 x 4,000 pixels, and beside other images" in ours.refusal(tuple(raw[0].tolist()))


def test_an_image_of_which_nothing_is_left_is_refused():
    ours = AnyResImages(patch_size=4, tile=16, canvases=CANVASES)
    raw = np.array([[1, 5000], [5000, 1], [640, 480]])
    assert ours.accepts(raw).tolist() == [False, False, True]
    assert "so long and thin" in ours.refusal((1, 5000))
