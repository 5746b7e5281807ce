"""An image and its crops are those of transformers' processor, and so is the text around them."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from benchmark import benchmark
from motet.core.crops import CropRule
from motet.core.errors import UserError
from motet.data.panned_images import PannedImages
from motet.models.build import build_mllm
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe_file import load_recipe

with benchmark("whole_models") as whole_models, benchmark("against_transformers") as against:
    pass


@pytest.mark.parametrize(("least", "most", "ratio"), [(256, 4, 1.2), (8, 3, 1.3), (2, 2, 1.0), (1, 1, 2.5)])
def test_crops_and_pixels_are_those_of_the_processor(least, most, ratio):
    named = {"min_crop_size": least, "max_num_crops": most, "min_ratio_to_activate": ratio}
    options = {f"pan_and_scan_{name}": each for name, each in named.items()}
    processor = transformers.Gemma3ImageProcessorPil(
        size={"height": 20, "width": 20}, image_mean=[0.5] * 3, image_std=[0.5] * 3, do_pan_and_scan=True, **options
    )
    transform = PannedImages(patch_size=6, tile=20, crops=CropRule(least, most, ratio), mean=(0.5,) * 3, std=(0.5,) * 3)
    rng = np.random.default_rng(most)
    sizes = [rng.integers(1, 900 if least == 256 else 70, 2) for _ in range(30)] + [np.array([least, least])] * 2
    seen = set()
    for width, height in sizes:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        made = processor(image, return_tensors="np")
        num_crops = int(made["num_crops"][0])
        seen.add(num_crops)
        assert transform.sizes(np.array([[width, height]])).tolist() == [[1 + num_crops, 1]]
        item = transform(image)
        assert item.size.tolist() == [1 + num_crops, 1]
        whole = made["pixel_values"][:, :, :18, :18].reshape(
            -1, 3, 3, 6, 3, 6
        )  # What is less than a patch is left out.
        rows = whole.transpose(0, 2, 4, 1, 3, 5).reshape(len(item.values), -1)
        np.testing.assert_array_equal(item.values, rows)
        assert (item.pixels.rows(transform.patches_of(image)) == item.values).all()
    assert len(seen) > 1 or most == least == 2


def test_text_around_crops_is_that_of_the_processor(tmp_path):
    whole_models.write_job(tmp_path, "gemma3_crops")
    recipe = load_recipe(tmp_path / "recipe.toml")
    processor = whole_models.open_processor(tmp_path / "model")
    vocabulary = recipe.vocabulary()
    inputs = [each["input_ids"][0].numpy() for each, _ in against.their_inputs(tmp_path)]
    with torch.device("meta"):
        model = build_mllm(recipe.modules, vocabulary.vocabulary_size)
    dataset = open_dataset(recipe, recipe.data.train, vocabulary, model, lambda sentence: None)
    mark, pieces = processor.tokenizer.image_token_id, 0
    for number, expected in enumerate(inputs):
        sequence = dataset.tokens(number)
        # Four rows of an image are four tokens there and one here.
        repeats = (expected == mark) & (np.roll(expected, 1) == mark)
        assert sequence.tokens.tolist() == expected[~repeats].tolist()
        pieces += int((sequence.num_pieces > 1).sum())
    assert pieces > 3
    prompt, _, answer = dataset.prompt(0)
    assert answer and prompt.num_pieces.tolist() == dataset.tokens(0).num_pieces.tolist()


def test_crops_that_could_be_empty_are_refused(tmp_path):
    whole_models.write_gemma3(tmp_path / "model", do_pan_and_scan=True, pan_and_scan_min_crop_size=3)
    (tmp_path / "recipe.toml").write_text(whole_models.RECIPE)
    with pytest.raises(UserError, match="has pan_and_scan_max_num_crops = 4 and pan_and_scan_min_crop_size = 3"):
        load_recipe(tmp_path / "recipe.toml").transform("image")
