import io
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import BaseModel, ValidationError

from motet.data.headers import read_header
from motet.data.images import ImageTransform
from motet.data.media import BadMedia, MediaRef
from motet.data.transforms import load_media
from unit.data.samples import write_image


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@given(
    width=st.integers(1, 150),
    height=st.integers(1, 150),
    patch=st.integers(1, 9),
    merge=st.integers(1, 3),
    bound=st.integers(27, 120),
    fixed=st.sampled_from([None, 1, 3]),
)
def test_sizes_are_those_of_the_transform(width, height, patch, merge, bound, fixed):
    bounds = {"max_pixels_side": bound} if fixed is None else {"fixed_size": fixed * patch * merge}
    transform = ImageTransform(patch, merge, **bounds)
    media = transform(picture(width, height))
    sizes = transform.sizes(np.array([[width, height]]))[0]
    assert media.size.tolist() == sizes.tolist()
    assert media.values.shape == (sizes.prod(), transform.row_dim)
    assert (sizes % merge == 0).all()
    if fixed is None:
        assert (sizes * patch).max() <= bound


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), patch=st.integers(1, 16), merge=st.integers(1, 2))
def test_no_side_changes_by_more_than_half_a_block(width, height, patch, merge):
    transform = ImageTransform(patch, merge, max_pixels_side=1000)
    scale = min(1.0, 1000 / max(width, height))
    resized = transform.pixels(np.array([[width, height]]))[0]
    for side, original in zip(resized, (width, height)):
        at_least_one_block = max(original * scale, transform.block / 2)
        # Up to half a block, and the bound itself may have to be rounded down to whole blocks.
        assert abs(side - at_least_one_block) <= transform.block / 2 + 1000 % transform.block


BUCKETS = ((32, 32), (64, 64), (64, 32), (32, 64))


@given(width=st.integers(1, 400), height=st.integers(1, 400))
def test_an_image_goes_to_the_bucket_of_the_nearest_aspect_and_area(width, height):
    transform = ImageTransform(8, merge_size=2, buckets=BUCKETS)
    [chosen] = transform.pixels(np.array([[width, height]])).tolist()
    media = transform(picture(width, height))
    assert media.size.tolist() == transform.sizes(np.array([[width, height]]))[0].tolist()

    def distance(bucket):
        aspect, area = (width * bucket[1]) / (height * bucket[0]), (width * height) / (bucket[0] * bucket[1])
        return round(abs(math.log(aspect)), 9), round(abs(math.log(area)), 9)

    assert distance(chosen) == min(map(distance, BUCKETS))


def test_a_bucket_has_the_middle_of_an_image():
    """Red on the left and on the right, where a wide image is cut off."""
    image = Image.new("RGB", (96, 32), "red")
    image.paste("blue", (32, 0, 64, 32))
    transform = ImageTransform(16, buckets=((32, 32),))
    media = transform(image)
    assert np.asarray(transform.picture(media.values, media.size))[:, :, 2].min() == 255


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buckets": ((32, 24),)}, "multiples of patch_size"),
        ({"buckets": ()}, "has 0 sizes"),
        ({"buckets": ((32, 32), (32, 32))}, "a size twice"),
        ({"buckets": ((2**18, 2**18),)}, "there may be"),
        ({"buckets": ((32, 32),), "fixed_size": 32}, "fixed_size has no effect beside buckets"),
        ({"buckets": ((32, 32),), "max_pixels_side": 64}, "max_pixels_side has no effect beside buckets"),
    ],
)
def test_buckets_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        ImageTransform(16, **options)


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize(("channels", "repeats"), [(3, 1), (1, 2)])
def test_rows_are_a_picture_again(merge, channels, repeats):
    transform = ImageTransform(3, merge, channels=channels, temporal_patch_size=repeats, mean=(0.3,), std=(0.2,))
    image = picture(30, 18).convert("L" if channels == 1 else "RGB")
    media = transform(image)
    again = transform.picture(media.values + 0.005, media.size)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(image))


def test_a_fitting_image_is_not_resampled():
    image = picture(24, 12)
    values = ImageTransform(6, mean=(0.0,), std=(1.0,))(image).values
    first_patch = values[0].reshape(3, 6, 6).transpose(1, 2, 0)
    np.testing.assert_allclose(first_patch * 255, np.asarray(image)[:6, :6], atol=1e-4)


@pytest.mark.parametrize("size", [(56, 28), (150, 301), (29, 400)])
def test_rows_are_in_the_order_of_qwen2_vl(size):
    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    reference = pil.Qwen2VLImageProcessorPil(size={"shortest_edge": 1, "longest_edge": 10**9})
    expected = reference(images=picture(*size), return_tensors="np")
    transform = ImageTransform(
        14, 2, temporal_patch_size=2, mean=tuple(reference.image_mean), std=tuple(reference.image_std)
    )
    media = transform(picture(*size))
    assert [1, *media.size.tolist()] == expected["image_grid_thw"][0].tolist()
    np.testing.assert_allclose(media.values, expected["pixel_values"], atol=2e-6)


def test_grey_and_sixteen_bit_images():
    deep = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))
    values = ImageTransform(4, channels=1, mean=(0.0,), std=(1.0,))(deep).values
    np.testing.assert_allclose(values, 128 / 255, rtol=1e-6)


@pytest.mark.parametrize("kind", ["RGBA", "LA", "palette of bytes", "palette of one", "grey of one"])
@pytest.mark.filterwarnings("ignore:Please pass `return_numpy=True`")
def test_what_is_transparent_is_white_as_in_transformers(tmp_path, kind):
    transforms = pytest.importorskip("transformers.image_transforms")
    image, options = picture(24, 12), {}
    image.putalpha(Image.fromarray(np.arange(288, dtype=np.uint16).reshape(12, 24).astype(np.uint8)))
    if kind == "LA":
        image = image.convert("LA")
    elif kind == "grey of one":
        image, options = image.convert("L"), {"transparency": 128}
    elif kind != "RGBA":
        image = image.convert("RGB").convert("P")
        options = {"transparency": 3 if kind == "palette of one" else bytes(range(256))}
    image.save(tmp_path / "a.png", **options)
    with Image.open(tmp_path / "a.png") as stored, warnings.catch_warnings():
        expected = np.asarray(transforms.convert_to_rgb(stored))
        warnings.simplefilter("error")
        values = ImageTransform(12, mean=(0.0,), std=(1.0,))(stored).values
    whole = values.reshape(2, 3, 12, 12).transpose(2, 0, 3, 1).reshape(12, 24, 3)
    np.testing.assert_allclose(whole * 255, expected, atol=1e-4)


@pytest.mark.parametrize("ending", ["gif", "webp", "tif", "png"])
def test_of_several_pictures_the_first_is_taken(tmp_path, ending):
    first, second = Image.new("RGB", (12, 12), "red"), Image.new("RGB", (12, 12), "blue")
    first.save(tmp_path / f"a.{ending}", save_all=True, append_images=[second])
    ref = MediaRef("image", str(tmp_path / f"a.{ending}"))
    values = load_media(ref, ImageTransform(12, mean=(0.0,), std=(1.0,))).values.reshape(3, 144)
    np.testing.assert_allclose(values.mean(axis=1), [1, 0, 0], atol=0.02)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_becomes_finite_rows_of_the_promised_size(tmp_path, mode, channels):
    image = Image.new("I;16", (24, 12)) if mode == "I;16" else picture(24, 12).convert(mode)
    path = tmp_path / ("a.jpg" if mode in ("CMYK", "YCbCr") else "a.png")
    image.save(path)
    media = load_media(MediaRef("image", str(path), raw=(24, 12)), ImageTransform(6, channels=channels))
    assert media.values.shape == (8, 36 * channels)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_no_cut_through_an_image_goes_unnoticed(kind, tmp_path):
    whole = io.BytesIO()
    picture(40, 40).save(whole, kind)
    transform, path = ImageTransform(10), tmp_path / "a.png"
    path.write_bytes(whole.getvalue())
    ref = MediaRef("image", str(path), raw=(40, 40))
    expected = load_media(ref, transform).values
    for end in np.linspace(0, len(whole.getvalue()) - 1, 60).astype(int):
        path.write_bytes(whole.getvalue()[:end])
        try:
            np.testing.assert_array_equal(load_media(ref, transform).values, expected)
        except BadMedia:
            continue


def test_a_turned_photograph_is_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = write_image(tmp_path / "turned.jpg", 40, 20, exif=exif)
    ref = MediaRef("image", str(path))
    assert read_header(ref) == (20, 40)
    transform = ImageTransform(10)
    assert load_media(ref, transform).size.tolist() == transform.sizes(np.array([[20, 40]]))[0].tolist() == [4, 2]


def test_a_cut_off_image_is_bad_only_when_decoded(tmp_path):
    path = write_image(tmp_path / "cut.png", 60, 60)
    path.write_bytes(path.read_bytes()[:2000])
    ref = MediaRef("image", str(path))
    assert read_header(ref) == (60, 60)
    with pytest.raises(BadMedia, match="truncated"):
        load_media(ref, ImageTransform(6))


def test_an_image_that_was_replaced_is_bad(tmp_path):
    path = write_image(tmp_path / "a.png", 24, 24)
    with pytest.raises(BadMedia, match="promised"):
        load_media(MediaRef("image", str(path), raw=(48, 24)), ImageTransform(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": 0}, "from 1 to 256"),
        ({"patch_size": 14, "merge_size": 2, "fixed_size": 40}, "multiple of patch_size"),
        ({"patch_size": 14, "merge_size": 2, "max_pixels_side": 20}, "less than a block"),
        ({"patch_size": 14, "channels": 4}, "channels must be"),
        ({"patch_size": 14, "mean": (0.1, 0.2)}, "1 value or 3,"),
        ({"patch_size": 14, "std": (0.0,)}, "from 0.001 to 1"),
        ({"patch_size": 14, "std": (math.inf,)}, "std must be from 0.001 to 1, not"),
        ({"patch_size": 14, "std": (58.4, 57.1, 57.4)}, "from 0.001 to 1"),
        ({"patch_size": 14, "mean": (math.nan,)}, "mean must be from 0 to 1, not"),
        ({"patch_size": 14, "mean": (123.7,)}, "from 0 to 1"),
        ({"patch_size": 14, "max_pixels_side": 10**12}, "from 1 to 16,384"),
        ({"patch_size": 14, "fixed_size": 14 * 10**9}, "from 1 to 16,384"),
        ({"patch_size": 14, "temporal_patch_size": 10**9}, "from 1 to 16"),
        ({"patch_size": 14, "patchsize": 3}, "Unexpected keyword"),
    ],
)
def test_wrong_options_in_a_recipe(options, message):
    class Recipe(BaseModel):
        image: ImageTransform

    with pytest.raises(ValidationError, match=message):
        Recipe(image=options)


def test_a_fixed_size_that_would_fill_the_memory_is_refused():
    with pytest.raises(ValueError, match="fixed_size = 16384 and patch_size = 4 make 16,777,216 patches of an image"):
        ImageTransform(patch_size=4, fixed_size=16384)


def photograph(path, width: int = 640, height: int = 480, **options) -> MediaRef:
    """Smooth, as most of a photograph is, with some noise."""
    rng, steps = np.random.default_rng(0), np.linspace(0, 3, width)
    waves = 127 + 90 * np.sin(steps[None, :, None] * (1, 2, 3) + np.linspace(0, 5, height)[:, None, None])
    pixels = (waves + rng.normal(0, 4, waves.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return MediaRef("image", str(path))


@pytest.mark.parametrize(("bound", "decoded"), [(80, (160, 120)), (100, (320, 240)), (161, (640, 480))])
@pytest.mark.parametrize("turned", [1, 6])
def test_a_draft_has_twice_the_sides_of_the_target_or_more(tmp_path, monkeypatch, bound, decoded, turned):
    exif = Image.Exif()
    exif[0x0112] = turned
    ref = photograph(tmp_path / "a.jpg", quality=95, exif=exif)
    transform = ImageTransform(1, max_pixels_side=bound, draft_jpeg=True)
    resized = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda image, *given, **named: resized.append(image.size) or resize(image, *given, **named),
    )
    media = load_media(ref, transform)
    assert resized == [decoded if turned == 1 else decoded[::-1]]
    assert media.size.tolist() == transform.sizes(np.array([read_header(ref)]))[0].tolist()


def test_a_draft_differs_from_the_whole_by_little(tmp_path):
    """By less than one step of 255 in the mean; and not at all where a file is no JPEG, or is small already."""
    as_levels = {"max_pixels_side": 80, "mean": (0.0,), "std": (1 / 255,)}
    whole, draft = ImageTransform(4, **as_levels), ImageTransform(4, **as_levels, draft_jpeg=True)
    jpeg = photograph(tmp_path / "a.jpg", quality=95)
    difference = np.abs(load_media(jpeg, whole).values - load_media(jpeg, draft).values)
    assert 0 < difference.mean() < 1
    for ref in (photograph(tmp_path / "a.png"), photograph(tmp_path / "small.jpg", 159, 100, quality=95)):
        np.testing.assert_array_equal(load_media(ref, whole).values, load_media(ref, draft).values)


def test_pixels_are_those_of_the_whole_image_by_default(tmp_path):
    ref = photograph(tmp_path / "a.jpg", quality=95)
    with Image.open(ref.path) as image:
        expected = ImageTransform(4, max_pixels_side=80)(image.convert("RGB")).values
    np.testing.assert_array_equal(load_media(ref, ImageTransform(4, max_pixels_side=80)).values, expected)


def test_an_image_of_the_wanted_colours_is_not_converted(monkeypatch):
    image = picture(8, 8)
    monkeypatch.setattr(Image.Image, "convert", None)
    assert ImageTransform(4)(image).size.tolist() == [2, 2]
