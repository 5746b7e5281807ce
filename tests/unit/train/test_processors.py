"""An exported encoder lies beside what makes its rows of media, as it was trained."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers import AutoFeatureExtractor, AutoImageProcessor

from motet.core.example import Media
from motet.data.audio import AudioTransform
from motet.data.images import ImageTransform
from motet.data.media import MediaRef
from motet.train.processors import processors_of

SIZE, PATCH = 32, 8
MEANS = {"mean": (0.48, 0.46, 0.41), "std": (0.27, 0.26, 0.28)}
STORED = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "resample": 3}
CLIP = STORED | {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "do_center_crop": True}
KINDS = {
    "CLIP": CLIP | {"image_processor_type": "CLIPImageProcessor", "processor_class": "CLIPProcessor"},
    "CLIP of before": CLIP | {"feature_extractor_type": "CLIPFeatureExtractor", "size": 24, "crop_size": 24},
    "Siglip": STORED | {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 64}},
    "Siglip, fast": STORED | {"image_processor_type": "SiglipImageProcessorFast", "do_resize": False},
    "DINOv2": CLIP | {"image_processor_type": "BitImageProcessor", "do_convert_rgb": True},
    "ViT": {"image_processor_type": "ViTImageProcessor"},
}


def recipe_of(path, transform, before=None):
    encoders = {"image": SimpleNamespace(path=path, before=before)}
    return SimpleNamespace(modules=SimpleNamespace(encoders=encoders), transform=lambda name: transform)


def written(folder, stored, transform):
    """What is exported of a directory with these options of preprocessing."""
    (folder / "preprocessor_config.json").write_text(json.dumps(stored))
    made = processors_of(recipe_of(folder, transform))
    (folder / "preprocessor_config.json").write_text(json.dumps(made["image"]))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_makes_the_pixels_that_the_encoder_was_trained_on(tmp_path, kind):
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (6, 9, 3), np.uint8)).resize((90, 60), Image.Resampling.BICUBIC)
    picture.save(tmp_path / "a.png")
    transform = ImageTransform(patch_size=PATCH, fixed_size=SIZE, **MEANS)
    rows = transform.load(MediaRef("image", str(tmp_path / "a.png")))
    assert isinstance(rows, Media)
    made = rows.values.reshape(SIZE // PATCH, SIZE // PATCH, 3, PATCH, PATCH).transpose(2, 0, 3, 1, 4)
    processor = AutoImageProcessor.from_pretrained(written(tmp_path, KINDS[kind], transform))
    theirs = processor(Image.open(tmp_path / "a.png"), return_tensors="np").pixel_values[0]
    assert np.abs(made.reshape(3, SIZE, SIZE) - theirs).max() < 1e-5


def test_a_file_that_says_the_transform_already_stays_as_it_is(tmp_path):
    stored = KINDS["Siglip"] | {"size": {"height": SIZE, "width": SIZE}, "rescale_factor": 1 / 255}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": stored}))
    made = processors_of(recipe_of(tmp_path, ImageTransform(patch_size=PATCH, fixed_size=SIZE, **MEANS)))["image"]
    assert made == stored | {"do_resize": True, "do_center_crop": False}


def test_features_of_clips_are_those_that_the_encoder_was_trained_on(tmp_path):
    transform = AudioTransform(num_mels=128)
    stored = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "chunk_length": 30}
    extractor = AutoFeatureExtractor.from_pretrained(written(tmp_path, stored, transform))
    assert (extractor.feature_size, extractor.sampling_rate, extractor.hop_length) == (128, 16_000, 160)


@pytest.mark.parametrize(
    ("stored", "transform", "before"),
    [
        (KINDS["Siglip"], ImageTransform(patch_size=PATCH), None),
        (KINDS["Siglip"], ImageTransform(patch_size=PATCH, fixed_size=SIZE), "package:function"),
        (STORED | {"image_processor_type": "Qwen2VLImageProcessor"}, ImageTransform(PATCH, fixed_size=SIZE), None),
        ({}, ImageTransform(PATCH, fixed_size=SIZE), None),
    ],
)
def test_what_no_processor_does_is_not_written(tmp_path, stored, transform, before):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    assert processors_of(recipe_of(tmp_path, transform, before)) == {}
    assert processors_of(recipe_of(None, transform)) == {}
