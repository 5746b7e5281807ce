import json

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.planning.simulated import SimulatedJob
from motet.planning.sources import read_plan_and_workload, workload_at

TASKS = """
[[task]]
name = "chat"
text = { value = 20 }
answer = 0.5
[task.items.image]
length = { value = 16 }
length_per_token = 4
"""


def write_plan(folder, **fields):
    path = folder / "plan.json"
    unit = {"name": "all", "stages": [{"image": 1, "audio": 1, "backbone": 2}], "dp": 2}
    document = {"motet_plan": 1, "cluster": {"device": "h100"}, "units": [unit], "batch_size": 4}
    path.write_text(json.dumps(document | fields))
    return path


def test_a_plan_that_names_a_recipe_is_of_its_model_and_data(job):
    plan, workload, _ = read_plan_and_workload(write_plan(job.parent, model="recipe.toml"), None)
    assert plan.model.name == "recipe"
    assert [module.name for module in plan.model.modules] == ["image", "audio", "backbone"]
    assert plan.cluster.device.name == "h100" and plan.cluster.num_ranks == 8
    batch = workload.examples
    assert batch.num_examples == 40
    # Of each four examples one is text alone, one has an image, one a clip, one both.
    assert batch.items["image"].num_items == batch.items["audio"].num_items == 20
    assert (batch.num_targets > 0).all() and (batch.num_targets < batch.sequence).all()


@pytest.mark.parametrize("named", ["model", "workload", "both"])
def test_overrides_are_of_the_recipe_that_has_the_lengths(named, job, tmp_path):
    (job.parent / "other.toml").write_text(job.read_text())
    model = {"model": "recipe.toml", "workload": "other.toml", "both": "recipe.toml"}[named]
    overrides = "data.train=['heldout.jsonl']", "model.encoders.image.projector.kind='mlp'"
    workload_file = None if named == "model" else job
    plan, workload, _ = read_plan_and_workload(write_plan(job.parent, model=model), workload_file, overrides)
    assert workload.examples.num_examples == 8
    projector = plan.model.module("image").stacks[-1].layer
    assert (projector.inner_weights > 0) == (named != "workload")


@pytest.mark.parametrize("has_lengths", ["recipe.toml", "tasks.toml"])
def test_a_recipe_says_how_ranks_that_share_sequences_exchange_rows(has_lengths, job, tmp_path):
    """Of a Plan simulated by itself all were priced as "auto", which training under it does not take."""
    lines = job.read_text() + '\n[context]\nexchange = "all_gather"\n'
    (job.parent / "gathers.toml").write_text(lines)
    (tmp_path / "tasks.toml").write_text(TASKS)
    workload = {"recipe.toml": job.parent / "gathers.toml", "tasks.toml": tmp_path / "tasks.toml"}[has_lengths]
    stages = {"stages": [{"image": 1, "audio": 1, "backbone": 2}], "name": "all"}

    def decided(cp, model="gathers.toml", **fields):
        shared = write_plan(job.parent, model=model, units=[stages | {"cp": cp}], **fields)
        return SimulatedJob.of_plan(shared, workload, None).decided

    assert decided(2) == {"exchange": "all_gather"}
    assert decided(1) == {}
    if has_lengths == "tasks.toml":
        assert decided(2, "recipe.toml") == {"exchange": "auto"}
    (job.parent / "gathers.toml").write_text(lines.replace("all_gather", "ulysses"))
    with pytest.raises(UserError, match=r"the 3 context-parallel ranks \(cp\) of unit 'all' do not divide the"):
        decided(3)


def test_a_workload_of_distributions(job, tmp_path):
    (tmp_path / "tasks.toml").write_text(TASKS)
    _, workload, _ = read_plan_and_workload(write_plan(job.parent, model="recipe.toml"), tmp_path / "tasks.toml")
    assert np.unique(workload.examples.sequence).tolist() == [24]
    assert np.unique(workload.examples.num_targets).tolist() == [10]


def test_a_workload_of_a_table(job, tmp_path):
    (tmp_path / "lengths.csv").write_text("text_tokens,num_images,image_tokens\n7,1,256\n9,0,0\n")
    _, workload, _ = read_plan_and_workload(write_plan(job.parent, model="recipe.toml"), tmp_path / "lengths.csv")
    assert workload.examples.sequence.tolist() == [263, 9]


def test_a_plan_without_a_recipe_needs_a_workload(tmp_path):
    layer = {"kind": "attention", "weights": 1, "parameters": 1, "output_width": 1, "activation_width": 1}
    model = {"name": "m", "modules": [{"name": "backbone", "stacks": [{"layer": layer}]}], "edges": []}
    units = [{"name": "all", "stages": [{"backbone": 1}]}]
    with pytest.raises(UserError, match=r"plan\.json names no recipe, so --workload must say"):
        read_plan_and_workload(write_plan(tmp_path, model=model, units=units), None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "none.toml"}, r"Cannot read the recipe .*none\.toml"),
        ({"model": "tokenizer"}, r"There is no .*tokenizer.config\.json"),
        ({"cluster": {"device": "h1000"}}, r"plan\.json: 'cluster' is wrong: there is no device 'h1000'"),
    ],
)
def test_what_is_not_there_is_named(fields, said, job):
    with pytest.raises(UserError, match=said):
        read_plan_and_workload(write_plan(job.parent, **{"model": "recipe.toml"} | fields), None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, r"Cannot read the lengths in .*lengths.toml: No such file"),
        ("[[task", r"lengths.toml: is no valid TOML"),
        ("", r"lengths.toml is to say which lengths there are; it has neither \[data\], \[workload\] nor \[\[task"),
        ("[model]\n", r"is to say which lengths there are"),
    ],
)
def test_a_file_without_lengths_is_named(text, said, tmp_path):
    if text is not None:
        (tmp_path / "lengths.toml").write_text(text)
    with pytest.raises(UserError, match=said):
        workload_at(tmp_path / "lengths.toml")
