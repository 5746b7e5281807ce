"""A transform that makes other rows than its encoder takes is named, also where their shapes agree."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import CLIPImageProcessorPil

from motet.core.errors import UserError
from motet.data.audio import AudioTransform
from motet.data.images import ImageTransform
from motet.data.media import MediaRef
from motet.models.build import EncoderConfig, build_modality
from motet.models.contract import ImageRows
from motet.models.module import ModalityModule
from motet.models.projector import Projector, ProjectorConfig
from motet.train.input.rows import check_rows

VISION = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODERS = {
    "siglip": VISION | {"image_size": 16, "patch_size": 4},
    "clip": VISION | {"image_size": 16, "patch_size": 4},
    "dinov2": {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
    "qwen2_vl": {"depth": 1, "embed_dim": 24, "hidden_size": 20, "num_heads": 2, "patch_size": 4},
    "whisper": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
}
RIGHT = dict.fromkeys(("siglip", "clip", "dinov2"), ImageTransform(4)) | {
    "qwen2_vl": ImageTransform(4, merge_size=2, temporal_patch_size=2),
    "whisper": AudioTransform(num_mels=80),
}


def check(module, transform, path=None) -> None:
    name = transform.modality
    recipe = SimpleNamespace(
        transform=lambda _: transform,
        table_of=lambda name: name,
        modules=SimpleNamespace(encoders={name: SimpleNamespace(path=path)}),
    )
    check_rows(recipe, SimpleNamespace(encoders={name: module}, generators={}))


def encoder(family, deferred=False, **options):
    config = EncoderConfig(family=family, config=ENCODERS[family], **options)
    return build_modality("it", config, 32, torch.float32, 0, deferred=deferred)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("family", ENCODERS)
def test_what_fits_passes_whether_or_not_weights_are_there(family, deferred):
    check(encoder(family, deferred), RIGHT[family])


@pytest.mark.parametrize(
    ("family", "transform", "said"),
    [
        *[
            (name, ImageTransform(4, 2), "merge_size is 2, but .* merge_size = 1")
            for name in ("siglip", "clip", "dinov2")
        ],
        ("qwen2_vl", ImageTransform(4, 4, temporal_patch_size=2), "merge_size is 4, but .* merge_size = 2"),
        ("qwen2_vl", ImageTransform(4, temporal_patch_size=2), "merge_size is 1, but .* merge_size = 2"),
        # Rows of as many values as the encoder's patches have.
        ("siglip", ImageTransform(2, temporal_patch_size=4), "patch_size is 2, but .* patch_size = 4"),
        ("qwen2_vl", ImageTransform(2, 2, temporal_patch_size=8), "patch_size is 2, but .* patch_size = 4"),
        ("siglip", ImageTransform(4, channels=1, temporal_patch_size=3), "channels is 1, but .* channels = 3"),
        ("whisper", AudioTransform(num_mels=20), "num_mels is 20, but .* num_mels = 80"),
        ("whisper", ImageTransform(4), "makes rows of image, but .* num_mels"),
    ],
)
def test_what_does_not_fit_is_named(family, transform, said):
    with pytest.raises(UserError, match=said) as error:
        check(encoder(family), transform)
    assert str(error.value).startswith("transforms.")


class Own(nn.Module):
    output_dim = 6

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 6)

    def num_outputs(self, sizes):
        return np.prod(sizes, axis=1)

    def forward(self, values, sizes):
        return self.linear(values)


def own(downsample=1, **members):
    encoder = Own()
    for name, member in members.items():
        setattr(encoder, name, member)
    return ModalityModule(encoder, Projector(6, 8, ProjectorConfig(downsample=downsample)))


def test_an_encoder_of_ones_own_answers_for_its_rows_but_must_say_how_they_lie():
    check(own(), ImageTransform(4))
    with pytest.raises(UserError, match="which the encoder cannot take"):
        check(own(), ImageTransform(8))
    with pytest.raises(UserError, match=r"joins rows of an image, and Own does not say how they lie"):
        check(own(downsample=4), ImageTransform(4))
    check(own(downsample=4, grid=lambda sizes: sizes), ImageTransform(4))
    check(own(downsample=3, grid=None), ImageTransform(4))
    check(own(takes=ImageRows(4)), ImageTransform(4))
    with pytest.raises(UserError, match=r"patch_size is 4, but .* patch_size = 8"):
        check(own(takes=ImageRows(8)), ImageTransform(4))
    with pytest.raises(UserError, match="takes is 8; it must be ImageRows or AudioRows"):
        check(own(takes=8), ImageTransform(4))
    with pytest.raises(UserError, match=r"Own.grid has not as many rows as num_outputs says"):
        check(own(grid=lambda sizes: sizes + 1), ImageTransform(4))
    check(own(downsample=3), AudioTransform(num_mels=48))


CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def directory(tmp_path, family, name, stored):
    module = encoder(family)
    module.encoder.model.config.save_pretrained(tmp_path)
    (tmp_path / name).write_text(json.dumps(stored))
    return module


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_pixels_are_normalised_as_the_weights_were_made_with(tmp_path, name):
    stored = CLIP if name.startswith("pre") else {"image_processor": CLIP}
    module = directory(tmp_path, "clip", name, stored)
    mean, std = tuple(CLIP["image_mean"]), tuple(CLIP["image_std"])
    check(module, ImageTransform(4, mean=mean, std=std), tmp_path)
    with pytest.raises(UserError, match=rf"transforms.image is not what .* {name} has image_mean = \[0.48") as both:
        check(module, ImageTransform(4), tmp_path)
    lines = f"set mean = {CLIP['image_mean']}, std = {CLIP['image_std']}, or"
    assert lines in str(both.value)
    with pytest.raises(UserError, match=r"transforms\.image is not what .*; set std = \[0\.26[^a-z]*, or remove"):
        check(module, ImageTransform(4, mean=mean), tmp_path)


def test_images_are_resized_as_the_weights_were_made_with(tmp_path):
    """Siglip 2's and DINOv3's own processors resize bilinearly: pixels differ by 1.7 of 255 in the mean."""
    module = directory(tmp_path, "clip", "preprocessor_config.json", {"do_resize": True, "resample": 2})
    with pytest.raises(UserError, match=r"transforms\.image is not what .* has resample = 2; set resample = 2, or"):
        check(module, ImageTransform(4), tmp_path)
    ours = ImageTransform(4, resample=2, fixed_size=12)
    check(module, ours, tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (31, 23, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    made = ours.load(MediaRef("image", str(tmp_path / "a.png"))).values
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    plain = CLIPImageProcessorPil(do_center_crop=False, size={"height": 12, "width": 12}, resample=2, **half)
    theirs = plain(images=Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
    assert made.reshape(3, 3, 3, 4, 4).transpose(2, 0, 3, 1, 4).reshape(3, 12, 12) == pytest.approx(theirs, abs=1e-6)
    for stored in ({"do_resize": False, "resample": 2}, {"resample": None}, {"resample": 3}):
        check(directory(tmp_path, "clip", "preprocessor_config.json", stored), ImageTransform(4), tmp_path)


def test_pixels_that_are_not_normalised(tmp_path):
    module = directory(tmp_path, "clip", "preprocessor_config.json", CLIP | {"do_normalize": False})
    check(module, ImageTransform(4, mean=(0.0,), std=(1.0,)), tmp_path)
    with pytest.raises(UserError, match=r"transforms\.image is .* set mean = "):
        check(module, ImageTransform(4), tmp_path)


@pytest.mark.parametrize(
    ("options", "mean", "std"),
    [
        ({"rescale_factor": 1 / 127.5, "image_mean": 1, "image_std": 1}, 0.5, 0.5),
        ({"rescale_factor": 0.0078, "image_mean": [1.0] * 3, "image_std": [1.0] * 3}, 1 / 1.989, 1 / 1.989),
        ({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [255.0] * 3}, 0.5, 1.0),
        ({"do_rescale": False, "do_normalize": False}, 0.0, 1 / 255),
        ({"do_rescale": True, "rescale_factor": 1 / 255, "image_mean": 0.5, "image_std": 0.5}, 0.5, 0.5),
    ],
)
def test_pixels_are_scaled_as_the_weights_were_made_with(tmp_path, options, mean, std):
    module = directory(tmp_path, "clip", "preprocessor_config.json", options)
    ours = ImageTransform(4, mean=(mean,), std=(std,))
    check(module, ours, tmp_path)
    for other in (ImageTransform(4, mean=(0.3,), std=(std,)), ImageTransform(4, mean=(mean,), std=(0.3,))):
        with pytest.raises(UserError, match=r"is not what the weights in .*; set (mean|std) = "):
            check(module, other, tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    made = ours.load(MediaRef("image", str(tmp_path / "a.png"))).values.reshape(3, 4, 4)
    plain = CLIPImageProcessorPil(do_resize=False, do_center_crop=False, **options)
    theirs = plain(images=pixels, return_tensors="np", input_data_format="channels_last")["pixel_values"][0]
    assert made == pytest.approx(theirs, abs=1e-3, rel=1e-3)


def test_pixels_of_which_a_file_says_half_are_refused(tmp_path):
    module = directory(tmp_path, "clip", "preprocessor_config.json", {"rescale_factor": 1 / 127.5})
    with pytest.raises(UserError, match=r"scales pixels to 0 \.\.\. 2 and has no image_mean"):
        check(module, ImageTransform(4), tmp_path)
    for factor in ("1/255", 0, -1, True):
        directory(tmp_path, "clip", "preprocessor_config.json", CLIP | {"rescale_factor": factor})
        with pytest.raises(UserError, match=r"has rescale_factor = .*; it must be a number above 0"):
            check(module, ImageTransform(4), tmp_path)


def test_sound_is_cut_as_the_weights_were_made_with(tmp_path):
    stored = {"sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "feature_size": 80}
    module = directory(tmp_path, "whisper", "preprocessor_config.json", stored)
    check(module, AudioTransform(num_mels=80), tmp_path)
    for option in ({"sampling_rate": 8000}, {"hop_length": 320}, {"n_fft": 512}):
        with pytest.raises(UserError, match=rf"transforms\.audio is not what .*; set {next(iter(option))} = "):
            check(module, AudioTransform(num_mels=80, **option), tmp_path)


def test_an_option_of_another_type_is_named(tmp_path):
    module = directory(tmp_path, "clip", "preprocessor_config.json", CLIP | {"image_mean": "grey"})
    with pytest.raises(UserError, match="image_mean = grey"):
        check(module, ImageTransform(4), tmp_path)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "nests lists and tables more than 100 deep"),
        ("[]", "must hold a JSON object"),
        ("null", "must hold a JSON object"),
        ('{"image_mean": NaN}', "has NaN"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, name, text, said):
    module = directory(tmp_path, "clip", name, {})
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}: {said}"):
        check(module, ImageTransform(4), tmp_path)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (os.mkfifo, "it is a pipe"),
        (lambda path: path.symlink_to("nowhere"), "No such file"),
        (os.mkdir, "it is a directory"),
    ],
    ids=["pipe", "link", "directory"],
)
def test_what_is_no_file_is_refused_at_once(tmp_path, place, said):
    module = directory(tmp_path, "clip", "preprocessor_config.json", {})
    (tmp_path / "preprocessor_config.json").unlink()
    place(tmp_path / "preprocessor_config.json")
    with pytest.raises(UserError, match=rf"preprocessor_config\.json: {said}"):
        check(module, ImageTransform(4), tmp_path)
