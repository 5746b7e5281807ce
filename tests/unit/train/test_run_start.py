"""What is said of a run before its first step."""

from motet.cost.catalogue import cluster
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe
from motet.train.run_start import slow_precision_words

RECIPE = """
run = { dir = "run", steps = 2, batch_size = 2 }
model = { backbone = { family = "qwen2" } }
data = { train = ["a.jsonl"], tokenizer = "tokenizer" }
optimizer = { lr = 1e-4 }
"""


def recipe(tmp_path, *overrides) -> Recipe:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    return load_recipe(file, overrides)


def test_who_computes_in_float32_by_default_is_told_what_a_gpu_would_gain(tmp_path):
    h100 = cluster("h100", num_nodes=1).device
    said = slow_precision_words(recipe(tmp_path), h100)
    assert "this device's peak in bfloat16 is 14.8 times as high" in said
    assert slow_precision_words(recipe(tmp_path, "run.dtype=float32"), h100) == ""
    assert slow_precision_words(recipe(tmp_path, "fsdp.param_dtype=bfloat16"), h100) == ""
    assert slow_precision_words(recipe(tmp_path, "fsdp.param_dtype=float32"), h100) == ""


def test_devices_without_bfloat16_and_unknown_ones(tmp_path):
    assert slow_precision_words(recipe(tmp_path), cluster("v100", num_nodes=1).device) == ""
    assert slow_precision_words(recipe(tmp_path), None) == ""
