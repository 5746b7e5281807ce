"""Recipes of whole models whose images are cut into tiles: LLaVA-OneVision, InternVL and Idefics3."""

import json
import shutil

import numpy as np
import pytest
import torch

from motet.core.errors import UserError
from motet.data.images import ImageTransform
from motet.models.build import build_mllm
from motet.profiling.subjects import one_layer_deep, subjects
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe_file import load_recipe
from whole_jobs import changed, complaint, whole_job, whole_models

tiled = whole_job("llava_onevision", num_examples=2)
internvl = whole_job("internvl", num_examples=1)
idefics3 = whole_job("idefics3", num_examples=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": {"height": 32, "width": 32}}, "makes images of 32 x 32 pixels, and the vision tower takes 26 x 26"),
        ({"image_grid_pinpoints": [[24, 48]]}, "has image_grid_pinpoints = ((24, 48),), and config.json"),
        ({"do_resize": False}, "has do_resize = False, which Motet does not compute"),
    ],
)
def test_processors_of_tiles_that_are_refused(tiled, tmp_path, changes, said):
    job = shutil.copytree(tiled, tmp_path / "job")
    file = job / "model" / "processor_config.json"
    stored = json.loads(file.read_text())
    stored["image_processor"] |= changes
    file.write_text(json.dumps(stored))
    assert said in complaint(job)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llava", {"patch_size": 16}, "has patch_size = 16, and by config.json it is"),
        (
            "llava",
            {"num_additional_image_tokens": 5},
            "has num_additional_image_tokens = 5, and by config.json it is 1",
        ),
        (
            "llava_onevision",
            {"vision_aspect_ratio": "anyres_max_9"},
            "has vision_aspect_ratio = 'anyres_max_9', and by",
        ),
        ("llava_onevision", {"num_image_tokens": 7}, "has num_image_tokens = 7, and by config.json it is"),
        ("internvl", {"image_seq_length": 7}, "so that an image would have other tokens than rows; set it to"),
        ("idefics3", {"image_seq_len": 7}, "has image_seq_len = 7, and by config.json it is"),
        ("gemma3", {"image_seq_length": 7}, "has image_seq_length = 7, and by config.json it is"),
        (
            "paligemma",
            {"image_processor": {"image_seq_length": 7}},
            "has image_seq_length = 7, and by config.json it is",
        ),
    ],
)
def test_a_processor_that_counts_other_tokens_than_the_model_makes_rows(tmp_path, kind, changes, said):
    """transformers refuses it as well, when it merges an image."""
    load_recipe(whole_models.write_job(tmp_path, kind, num_examples=1))
    file = tmp_path / "model" / "processor_config.json"
    stored = json.loads(file.read_text())
    images = changes.pop("image_processor", {})
    stored["image_processor"] |= images
    file.write_text(json.dumps(stored | changes))
    assert said in complaint(tmp_path)


def test_canvases_that_are_not_made_of_tiles(tiled, tmp_path):
    job = shutil.copytree(tiled, tmp_path / "job")
    for file, table in (("config.json", None), ("processor_config.json", "image_processor")):
        stored = json.loads((job / "model" / file).read_text())
        (stored if table is None else stored[table])["image_grid_pinpoints"] = [[24, 50]]
        (job / "model" / file).write_text(json.dumps(stored))
    assert "has [24, 50] among its image_grid_pinpoints; each must be of whole tiles of 26 pixels" in complaint(job)
    changed(job / "model" / "config.json", vision_aspect_ratio="pad")
    assert "vision_aspect_ratio is 'pad', which Motet does not compute" in complaint(job)


def test_a_profile_makes_the_rows_of_all_tiles(tiled):
    recipe = load_recipe(tiled / "recipe.toml")
    model = build_mllm(one_layer_deep(recipe.modules), recipe.vocabulary().vocabulary_size)
    image = next(each for each in subjects(recipe, model, model, torch.device("cpu")) if each.name == "image")
    rows = image.prepare(((2, int(image.lengths[-1])),), model.encoders["image"])()
    assert rows.shape[1] == model.backbone.dim


def test_several_images_of_an_example_are_squares_of_one_tile(tiled, tmp_path):
    job = shutil.copytree(tiled, tmp_path / "job")
    shutil.rmtree(job / "media")
    whole_models.write_examples(job, 4)  # 1, 0, 2 and 1 images.
    recipe = load_recipe(job / "recipe.toml")
    with torch.device("meta"):
        model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    dataset = open_dataset(recipe, recipe.data.train, recipe.vocabulary(), model, lambda sentence: None)
    images = dataset.batch_lengths(np.arange(4), 1).items["image"]
    assert images.example.tolist() == [0, 2, 2, 3]
    tile = 16
    assert images.length[1:3].tolist() == [tile, tile] and (images.length[[0, 3]] > tile).all()
    assert images.num_tokens[1:3].tolist() == [tile + 1, tile + 1]
    # Squares have the colour of the processor's mean.
    mean = json.loads((job / "model" / "processor_config.json").read_text())["image_processor"]["image_mean"]
    assert recipe.transform("image").square == tuple(int(255 * value) for value in mean)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_config": {"image_size": [24, 30]}}, "image_size is [24, 30]; it must be square"),
        ({"vision_config": {"image_size": [30, 30]}}, "patches of a tile's side modulo 2 is 1"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2, which Motet does not compute; it must be -1"),
        ({"downsample_ratio": 1.0}, "downsample_ratio is 1.0, which Motet does not compute; it must be 0.5"),
    ],
)
def test_options_of_internvl_that_are_refused(internvl, tmp_path, changes, said):
    job = shutil.copytree(internvl, tmp_path / "job")
    changed(job / "model" / "config.json", **changes)
    with pytest.raises(UserError) as caught, torch.device("meta"):
        build_mllm(load_recipe(job / "recipe.toml").modules, 200)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": {"height": 72, "width": 72}}, "it must name longest_edge alone"),
        (
            {"max_image_size": {"longest_edge": 24}},
            "makes images of 24 x 24 pixels, and the vision tower takes 36 x 36",
        ),
    ],
)
def test_processors_of_marked_tiles_that_are_refused(idefics3, tmp_path, changes, said):
    job = shutil.copytree(idefics3, tmp_path / "job")
    file = job / "model" / "processor_config.json"
    stored = json.loads(file.read_text())
    stored["image_processor"] |= changes
    file.write_text(json.dumps(stored))
    assert said in complaint(job)


def test_marks_of_tiles_are_for_images_that_are_cut(idefics3, monkeypatch):
    """Beside another transform sizes would be taken for numbers of tiles."""
    recipe = load_recipe(idefics3 / "recipe.toml")
    vocabulary = recipe.vocabulary()
    text = vocabulary.item_text("image")((1, 2))
    assert vocabulary.decode(text.tokens, special=True) == (
        "<row_1_col_1><image><fake_token_around_image><row_1_col_2><image>\n\n"
        "<fake_token_around_image><global-img><image>"
    )
    assert (len(text.places), text.num_marks) == (3, 7)
    with torch.device("meta"):
        model = build_mllm(recipe.modules, vocabulary.vocabulary_size)
    monkeypatch.setattr(type(recipe), "transform", lambda self, encoder: ImageTransform(patch_size=6))
    with pytest.raises(UserError, match="is of a model that cuts images into tiles"):
        open_dataset(recipe, recipe.data.train, vocabulary, model, lambda sentence: None)
