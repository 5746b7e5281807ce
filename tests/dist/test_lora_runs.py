"""`motet train` with LoRA adapters: alone, sharded, and under Plans, from each other's checkpoints, and exported."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from cli.tiny_job import losses
from dist.test_planned import DEEPER, plan_of, train_under
from dist.test_resume import stop_after
from motet.core.errors import UserError
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.models.named_weights import is_lora
from motet.planning.planned_recipe import read_job_recipe
from motet.train.export import check_export
from motet.train.export_checkpoint import export_checkpoint
from motet.train.recipe.recipe_file import load_recipe
from ranks import RankFailed, run_ranks

LORA = [
    *DEEPER,
    "model.backbone.family=phi3",
    "model.lora.backbone={ rank = 2, dropout = 0.1 }",
    'model.lora.audio={ rank = 3, targets = ["*_proj"] }',
    "model.encoders.image.train_encoder=false",
    "export.at_end=true",
]


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone")
    run_ranks(train_under, 1, str(job), [*LORA, f"run.dir={run_dir}"], None)
    return run_dir


def exported(run_dir):
    files = (run_dir / "export").rglob("*.safetensors")
    return {str(file.relative_to(run_dir / "export")): load_file(file) for file in files}


def contents(folder):
    """Bytes by file, but of a config that names the folder where it lies."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.name == "adapter_config.json" or file.read_bytes() for file in files}


def assert_same(run_dir, alone):
    assert losses(run_dir) == pytest.approx(losses(alone), rel=1e-10)
    found, expected = exported(run_dir), exported(alone)
    assert found.keys() == expected.keys() and "adapters/encoders/audio/adapter_model.safetensors" in found
    for name, tensors in expected.items():
        assert found[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(found[name][key], tensor, rtol=1e-9, atol=1e-11)


def test_an_export_does_not_replace_the_weights_that_its_adapters_stand_on(job, tmp_path):
    base = tmp_path / "run/export/backbone"
    options = [f"run.dir={tmp_path / 'run'}", f"model.backbone.path={base}", "model.lora.backbone.rank=2"]
    check_export(load_recipe(job, options))
    with pytest.raises(UserError, match=rf"model\.backbone\.path = {base} lies in .*, which export\.at_end replaces"):
        check_export(load_recipe(job, [*options, "export.at_end=true"]))


@pytest.mark.parametrize("more", [pytest.param("fsdp.shard_size=2", marks=pytest.mark.slow), "fsdp.shard_size=1"])
def test_data_parallel_ranks_train_as_one_process_does(job, alone, tmp_path, more):
    run_ranks(train_under, 2, str(job), [*LORA, more, f"run.dir={tmp_path}"], None)
    assert_same(tmp_path, alone)


def write_tensor_parallel_plan(job, file):
    plan = plan_of(job, ({"image": 2, "audio": 2, "backbone": 3},))
    unit = Unit("all", plan.units[0].stages, tp=2, zero=1)
    cluster = replace(plan.cluster, ranks_per_node=2)
    model = read_job_recipe(job, LORA).model
    write_plan(replace(plan, model=model, units=(unit,), schedule="1f1b", cluster=cluster), file)


@pytest.mark.slow
def test_adapters_that_were_saved_start_on_any_ranks(job, alone, tmp_path):
    """Of phi3 a rank of two tensor-parallel ones has some rows of each B that is split."""
    saved = [
        f"model.lora.{name}.path={alone}/export/adapters/{folder}"
        for name, folder in (("backbone", "backbone"), ("audio", "encoders/audio"))
    ]
    write_tensor_parallel_plan(job, tmp_path / "plan.json")
    ways = {"alone": (1, [], None), "sharded": (2, ["fsdp.shard_size=2"], None), "tp": (2, [], "plan.json")}
    found = {}
    for name, (num_ranks, more, plan) in ways.items():
        given = [*LORA, *saved, *more, "run.steps=1", "export.at_end=false", f"run.dir={tmp_path / name}"]
        run_ranks(train_under, num_ranks, str(job), given, plan and str(tmp_path / plan))
        found[name] = losses(tmp_path / name)
    for name in ("sharded", "tp"):
        assert found[name] == pytest.approx(found["alone"], rel=1e-10), name
    assert abs(found["alone"][0] - losses(alone)[0]) > 1e-3


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(job, alone, tmp_path):
    file, run_dir = tmp_path / "plan.json", tmp_path / "run"
    write_tensor_parallel_plan(job, file)
    given = [*LORA, f"run.dir={run_dir}"]
    run_ranks(train_under, 2, str(job), given, str(file))
    assert_same(run_dir, alone)
    export_checkpoint(run_dir / "checkpoints" / "step-00000008", tmp_path / "later", None, ())
    assert contents(tmp_path / "later") == contents(run_dir / "export")
    stored = json.loads((run_dir / "checkpoints" / "step-00000008" / "tensors.json").read_text())
    base = [name for name in stored if name.startswith("model.backbone.") and not is_lora(name)]
    assert base == [] and any(is_lora(name) for name in stored)
    stop_after(run_dir, 4)
    with pytest.raises(RankFailed, match=r"has adapters of 'backbone' alone, and was written beside other weights"):
        run_ranks(train_under, 2, str(job), [*given, "run.seed=4"], None)
    with pytest.raises(UserError, match=r"was written beside other weights .*: restore them\.$"):
        export_checkpoint(run_dir / "checkpoints" / "step-00000004", tmp_path / "other", None, ["run.seed=4"])
    steeper = ["model.lora.backbone={ rank = 2, dropout = 0.1, alpha = 8 }"]
    said = r"has adapters of 'backbone' that are multiplied by 2, and alpha, rank and rank_stabilized .* say 4 now"
    with pytest.raises(RankFailed, match=said):
        run_ranks(train_under, 2, str(job), [*given, *steeper], None)
    with pytest.raises(UserError, match=said):
        export_checkpoint(run_dir / "checkpoints" / "step-00000004", tmp_path / "other", None, steeper)
    assert not (tmp_path / "other").exists()
    run_ranks(train_under, 2, str(job), [*given, "fsdp.shard_size=2"], None)
    assert_same(run_dir, alone)


@pytest.mark.slow
def test_adapters_beside_what_a_run_learned_before_and_on_from_them(job, tmp_path):
    """Checkpoints then have the frozen weights, which lie in no directory, and nothing of them is lost in an export."""
    full, first, then, last = (tmp_path / name for name in ("full", "first", "then", "last"))
    own = [*(each for each in LORA if "lora" not in each), "checkpoint.every_steps=1"]
    with_lora = [*own, *(each.replace("dropout = 0.1", "dropout = 0.0") for each in LORA if "lora" in each)]
    run_ranks(train_under, 1, str(job), [*own, "run.steps=2", f"run.dir={first}"], None)
    start = f"run.start={first}/checkpoints/step-00000002"
    run_ranks(train_under, 1, str(job), [*own, start, "run.steps=1", f"run.dir={full}"], None)
    given = [*with_lora, start, "run.steps=2", f"run.dir={then}"]
    run_ranks(train_under, 2, str(job), given, None)
    assert losses(then)[0] == pytest.approx(losses(full)[0], rel=1e-10)  # B is 0 at first.
    learned, kept = exported(first), exported(then)
    backbone = "backbone/model.safetensors"
    for name, tensor in learned[backbone].items():
        assert torch.equal(kept[backbone][name], tensor), name
    adapter = "adapters/backbone/adapter_model.safetensors"
    assert all(tensor.any() for tensor in kept[adapter].values())

    # Resumed, though what it began with is gone.
    whole = losses(then)
    shutil.rmtree(then / "checkpoints" / "step-00000002")
    (first / "checkpoints").rename(first / "gone")
    run_ranks(train_under, 1, str(job), given, None)
    assert losses(then) == pytest.approx(whole, rel=1e-10)
    assert exported(then)[backbone].keys() == learned[backbone].keys()

    # Another run goes on from its adapters, and has its frozen weights.
    on = [*with_lora, f"run.start={then}/checkpoints/step-00000002", "run.steps=1", "optimizer.lr=1e-13"]
    run_ranks(train_under, 1, str(job), [*on, f"run.dir={last}"], None)
    for file in (backbone, adapter):
        for name, tensor in exported(last)[file].items():
            torch.testing.assert_close(tensor, exported(then)[file][name], rtol=1e-7, atol=1e-11)
    with pytest.raises(RankFailed, match=r"the model has no weight .*lora_A"):
        run_ranks(train_under, 1, str(job), [*own, *on[-3:], f"run.dir={tmp_path / 'none'}"], None)


@pytest.mark.slow
def test_new_adapters_of_products_that_ranks_split_begin_beside_weights_of_another_run(job, tmp_path):
    """Tensor-parallel ranks hold rows of B of a fused product, which have names of their own."""
    first, alone, shared, file = (tmp_path / name for name in ("first", "alone", "shared", "plan.json"))
    own = [*(each for each in LORA if "lora" not in each), "run.steps=1", "checkpoint.every_steps=1"]
    run_ranks(train_under, 1, str(job), [*own, f"run.dir={first}"], None)
    given = [*own, *(each for each in LORA if "lora" in each), f"run.start={first}"]
    plan = plan_of(job, ({"image": 2, "audio": 2, "backbone": 3},))
    model, where = read_job_recipe(job, given).model, replace(plan.cluster, ranks_per_node=2)
    unit = Unit("all", plan.units[0].stages, zero=1, tp=2)
    write_plan(replace(plan, model=model, units=(unit,), schedule="data_parallel", cluster=where), file)
    run_ranks(train_under, 1, str(job), [*given, f"run.dir={alone}"], None)
    run_ranks(train_under, 2, str(job), [*given, f"run.dir={shared}"], str(file))
    assert_same(shared, alone)
