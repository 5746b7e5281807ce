"""What a recipe must not change before a run goes on, and what it may."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cli.tiny_job import RECIPE
from motet.core.errors import UserError
from motet.train.checkpoint.choice import Start
from motet.train.checkpoint.contents import Progress, RunState
from motet.train.checkpoint.same_run import changed_files, check_same_run, check_stated, own_files, stated
from motet.train.recipe.recipe_file import load_recipe

MADE = """
[model.generators.draw]
makes = "image"
family = "dit"
num_queries = 2
config = { row_dim = 16, hidden = 16, num_layers = 1, num_heads = 2 }
noise = { schedule = "cosine" }

[transforms.draw]
patch_size = 4
channels = 1
"""
START = Progress(step=0, position=0, num_bad=0, seed=0, dataset="3f2a", shuffle=True, optimizer="adamw")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "recipe.toml"
    path.write_text(RECIPE + MADE)
    return path


def refusal(then, now, num_steps=9):
    """What is said of a checkpoint of `then` where the run is as `now`; "" if it goes on."""
    state = RunState(**vars(replace(then, step=3, position=18)), num_ranks=1, launch="", written=datetime.now(UTC))
    try:
        check_same_run(Start(Path("there"), state), now, num_steps)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("transforms.image.mean=[0.4]", "with transforms.image.mean as by default, not = [0.4] as now"),
        ("transforms.image.std=[0.3]", "with transforms.image.std as by default, not = [0.3]"),
        ("transforms.audio.hop_length=200", "with transforms.audio.hop_length as by default"),
        (
            "model.generators.draw.noise.predicts=v",
            'with model.generators.draw.noise.predicts as by default, not = "v"',
        ),
        ("model.generators.draw.noise.schedule=linear", 'schedule = "cosine", not = "linear" as now'),
        ("model.backbone.config.rope_parameters={ rope_theta = 7.0 }", "model.backbone.config.rope_parameters.rope_th"),
        ("model.backbone.config.hidden_act=relu", "model.backbone.config.hidden_act"),
        ("model.encoders.image.projector.kind=mlp", "model.encoders.image.projector.kind"),
        ("model.backbone.first_position=1", "model.backbone.first_position"),
        ("model.backbone.bidirectional=['image']", "model.backbone.bidirectional"),
        ("model.generators.draw.weight=3.0", ""),
        ("model.generators.draw.drop_condition=0.2", ""),
        ("model.generators.draw.sampling.steps=5", ""),
        ("model.encoders.audio.config.dropout=0.0", ""),
        ("model.encoders.audio.train_projector=false", ""),
        ("transforms.image.draft_jpeg=true", ""),
        ("optimizer.lr=1.0", ""),
        ("fsdp.param_dtype=bfloat16", ""),
    ],
)
def test_what_a_run_learns_of_must_stay(recipe, override, said):
    then, now = (replace(START, stated=stated(load_recipe(recipe, each))) for each in ((), (override,)))
    sentence = refusal(then, now)
    assert said in sentence if said else sentence == ""
    assert bool(refusal(now, then)) == bool(said)
    assert refusal(replace(then, stated=None), now) == "", "one that does not say it"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 4}, "data.seed = 0, not 4 as now"),
        ({"shuffle": False}, "data.shuffle = true, not false as now"),
        ({"optimizer": "sgd"}, 'has the state of optimizer.name = "adamw", not of "sgd" as now'),
        ({"mixture": (1, 2)}, "in the proportion no mixture, not [1, 2] as now"),
        ({"dataset": "other"}, "was written on other training examples"),
        (
            {"group": {"backbone": 9}},
            "was written without data.group, and this run is with data.group = { backbone = 9 }",
        ),
        ({"start": "weights of another run"}, ""),
    ],
)
def test_examples_and_their_order_must_stay(changed, said):
    sentence = refusal(START, replace(START, **changed))
    assert said in sentence if said else sentence == ""


def test_a_run_does_not_go_on_behind_its_end():
    assert "is of step 3, and run.steps = 2 ends before it" in refusal(START, START, num_steps=2)


def test_a_directory_may_lie_elsewhere_and_must_say_the_same(recipe, tmp_path):
    said = {"hidden_size": 32, "rope_theta": 7.0, "transformers_version": "5.0", "attention_dropout": 0.1}
    changes = {
        "same": {"transformers_version": "5.1", "attention_dropout": 0.0, "pad_token_id": 3, "head_dim": None},
        "other": {"rope_theta": 8.0},
    }
    for name, change in {"first": {}, **changes}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(said | change))
    first, same, other = (
        replace(START, stated=stated(load_recipe(recipe, [f"model.backbone.path={tmp_path / name}"])))
        for name in ("first", *changes)
    )
    assert refusal(first, same) == ""
    assert "with rope_theta in model.backbone.path/config.json = 7.0, not = 8.0 as now" in refusal(first, other)


def test_code_of_ones_own_may_lie_elsewhere(recipe, tmp_path):
    own = [
        replace(START, stated=stated(load_recipe(recipe, [f"model.encoders.image.after={folder}/own.py:{name}"])))
        for folder, name in ((tmp_path, "a"), (tmp_path / "b", "a"), (tmp_path, "c"))
    ]
    assert refusal(own[0], own[1]) == ""
    assert 'model.encoders.image.after = "own.py:a", not = "own.py:c"' in refusal(own[0], own[2])


def test_another_text_of_code_of_ones_own_is_said(recipe, tmp_path):
    """What it changes is not known. The same text elsewhere is the same, and installed packages count, too."""
    for folder, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(f"def own(rows, sizes):\n    return rows * {text}\n")
    first, same, other = (
        own_files(load_recipe(recipe, [f"model.encoders.image.after={tmp_path}/{folder}/own.py:own"]))
        for folder in "abc"
    )
    then = RunState(**vars(replace(START, own_files=first)), num_ranks=1, launch="", written=datetime.now(UTC))
    assert changed_files(then, same) == changed_files(then, {}) == ""
    assert changed_files(then, other) == (
        f"Since the checkpoint was written the text of {tmp_path}/c/own.py (model.encoders.image.after) has changed: "
        "what the model is given or computes may be another from here on."
    )
    assert changed_files(then.model_copy(update={"own_files": None}), other) == "", "one that does not say it"
    installed = own_files(load_recipe(recipe, ["model.encoders.audio.after=motet.models.merge:merge_rows"]))
    assert [key for key, file in installed.items() if "/merge.py " in file] == ["model.encoders.audio.after"]


def test_an_export_is_of_the_model_that_was_trained(recipe):
    then, now = (
        replace(START, stated=stated(load_recipe(recipe, each)))
        for each in ((), ("model.backbone.config.hidden_act=relu", "transforms.image.mean=[0.4]"))
    )
    state = RunState(**vars(then), num_ranks=1, launch="", written=datetime.now(UTC))
    with pytest.raises(UserError, match=r'with model.backbone.config.hidden_act as by default, not = "relu" as now'):
        check_stated(Path("there"), state, now.stated, "model.")
    check_stated(Path("there"), state, {**then.stated, "transforms.image.mean": "[0.4]"}, "model.")
