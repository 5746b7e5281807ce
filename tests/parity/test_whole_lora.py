"""LoRA in whole models: equal to peft on transformers' model in one process, on ranks and in stages, and out again."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmark import benchmark
from cli.tiny_job import losses
from motet.core.errors import UserError
from motet.models.build import build_mllm
from motet.models.whole.export import export_whole
from motet.planning.plan_first import plan_first
from motet.train.export import check_export
from motet.train.export_checkpoint import export_checkpoint
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

with benchmark("whole_models") as whole_models, benchmark("against_transformers") as against:
    pass
LORA = [
    'model.lora.backbone={ rank = 3, alpha = 5.0, targets = ["q_proj", "mlp.*"] }',
    "model.lora.image={ rank = 2 }",
]
RUN = [
    *LORA,
    "run.dtype=float64",
    "run.steps=2",
    "run.batch_size=8",
    "optimizer.lr=1e-2",
    "data.num_workers=0",
    "export.at_end=true",
]


@pytest.fixture(
    scope="module", params=["llava", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "mllama"))]
)
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job") / request.param
    whole_models.write_job(folder, request.param)
    return folder


def trained(rank, num_ranks, recipe, overrides):
    read = load_recipe(Path(recipe), overrides)
    plan = partial(plan_first, read, Path(recipe), overrides) if read.parallel else None
    train(read, plan=plan)


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(trained, 1, str(job / "recipe.toml"), [*RUN, f"run.dir={folder}"])
    return folder


def test_on_ranks_and_in_stages_it_is_one_process(job, alone, tmp_path):
    more = {"llava": "fsdp.shard_size=2"}.get(job.name, "parallel.backbone.pp=2")
    run_ranks(trained, 2, str(job / "recipe.toml"), [*RUN, more, f"run.dir={tmp_path}"])
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=1e-10)
    found, expected = (load_file(each / "export/adapter/adapter_model.safetensors") for each in (tmp_path, alone))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11)


def test_loss_and_gradients_are_those_of_peft_on_the_directory(job, alone):
    """The saved adapter, with the projector that learned beside it, on top of transformers' model as it was."""
    assert {path.name for path in (alone / "export").iterdir()} == {"README.md", "adapter"}
    reference = against.theirs(job, alone / "export" / "adapter")
    ours = against.ours(job, overrides=LORA, checkpoint=alone / "checkpoints" / "step-00000002")
    assert max(ours.distance(reference)) < 1e-8
    learned = [name for name in ours.gradients if "lora_" not in name]
    assert learned and all("projector" in name for name in learned)
    before = against.ours(job, overrides=LORA)
    assert abs(before.loss - ours.loss) > 1e-3 * ours.loss


def test_what_peft_adapts_behind_the_layer_that_is_taken_changes_nothing(tmp_path):
    """LLaVA takes the tower's last layer but one, and peft has adapters beside the last one, too."""
    import peft

    job = tmp_path / "llava"
    whole_models.write_job(job, "llava", 3)
    model = peft.get_peft_model(against.their_model(job), peft.LoraConfig(r=2, target_modules=["q_proj", "fc1"]))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("vision_tower.encoder.layers.2" in name for name in saved)
    ours = against.ours(job, overrides=[f"model.lora.path={tmp_path / 'adapter'}"])
    assert max(ours.distance(against.theirs(job, tmp_path / "adapter"))) < 1e-10
    model = peft.get_peft_model(
        against.their_model(job), peft.LoraConfig(r=2, target_modules=r".*vision_tower.encoder.layers.2.*fc1")
    )
    model.save_pretrained(tmp_path / "unused")
    with pytest.raises(UserError, match="has adapters of layers alone that are not computed"):
        against.ours(job, overrides=[f"model.lora.path={tmp_path / 'unused'}"])


@pytest.mark.slow
def test_it_goes_on_as_peft_does(job, alone, tmp_path):
    """The whole directory by one key, or by the tables of parts: what learns, loss and gradients are peft's."""
    adapter = alone / "export" / "adapter"
    reference = against.theirs(job, adapter)
    in_one = [f"model.lora.path={adapter}"]
    by_part = [each.replace("{ ", f'{{ path = "{adapter}", ') for each in LORA]
    for overrides in (in_one, by_part):
        assert max(against.ours(job, overrides=overrides).distance(reference)) < 1e-10
    run = [*in_one, *RUN[len(LORA) :]]
    run_ranks(trained, 1, str(job / "recipe.toml"), [*run, f"run.dir={tmp_path / 'one'}"])
    more = {"llava": "fsdp.shard_size=2"}.get(job.name, "parallel.backbone.pp=2")
    run_ranks(trained, 2, str(job / "recipe.toml"), [*run, more, f"run.dir={tmp_path / 'two'}"])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    assert losses(tmp_path / "one")[0] == pytest.approx(reference.loss, rel=1e-10)
    again = against.ours(job, overrides=in_one, checkpoint=tmp_path / "two" / "checkpoints" / "step-00000002")
    assert max(again.distance(against.theirs(job, tmp_path / "two" / "export" / "adapter"))) < 1e-10


def exported(job, folder, overrides, change=lambda name, weight: weight):
    """The adapter of a model as it is built, or with other weights: a directory of peft."""
    recipe = load_recipe(job / "recipe.toml", overrides)
    model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    state = {name: change(name, weight) for name, weight in model.state_dict().items()}
    export_whole(recipe.directory, model, folder, state, "A card.")
    return folder / "adapter"


@pytest.mark.parametrize("part", [0, 1])
def test_one_part_goes_on_alone_as_peft_does(job, tmp_path, part):
    """A directory has adapters of one part; the other part has none, or new ones."""

    def learned(name, weight):
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        return 0.3 * drawn if "lora_B" in name else weight

    frozen = ["model.train.projector=false"]
    one = exported(job, tmp_path / "one", [LORA[part], *frozen], learned)
    goes_on = LORA[part].replace("{ ", f'{{ path = "{one}", ')
    other = f"model.train.{['image', 'backbone'][part]}=false"
    alone = against.ours(job, overrides=[goes_on, other, *frozen])
    assert max(alone.distance(against.theirs(job, one))) < 1e-10
    beside = [goes_on, LORA[1 - part], *frozen]
    both = against.ours(job, overrides=beside)
    assert max(both.distance(against.theirs(job, exported(job, tmp_path / "both", beside)))) < 1e-10
    assert both.loss == pytest.approx(alone.loss, rel=1e-12)  # B of what is new is 0.
    assert abs(alone.loss - against.ours(job).loss) > 1e-3 * alone.loss


def test_projectors_that_stand_in_a_list_come_back_beside_adapters(tmp_path):
    """Qwen3-VL has one behind each of some layers of its tower, too; peft takes no list of modules."""
    whole_models.write_job(tmp_path, "qwen3_vl", 3)
    moved = exported(
        tmp_path,
        tmp_path / "out",
        LORA[:1],
        lambda name, weight: weight * 3 if "projector" in name else weight,
    )
    saved = json.loads((moved / "adapter_config.json").read_text())["modules_to_save"]
    assert sum("deepstack_merger_list." in name for name in saved) == len(saved) - 1 > 0
    theirs = against.theirs(tmp_path, moved)
    assert max(against.ours(tmp_path, overrides=[f"model.lora.path={moved}"]).distance(theirs)) < 1e-10
    assert abs(theirs.loss - against.theirs(tmp_path).loss) > 1e-3 * theirs.loss


def test_merged_it_is_a_directory_that_transformers_reads(job, alone, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(job, again, ignore=shutil.ignore_patterns("model", "*.motet-index"))
    checkpoint = alone / "checkpoints" / "step-00000002"
    export_checkpoint(checkpoint, again / "model", None, ["export.adapter=merged"])
    reference = against.ours(job, overrides=LORA, checkpoint=checkpoint)
    # Its weights are stored in float32.
    assert against.theirs(again).loss == pytest.approx(reference.loss, rel=1e-6)


def test_what_has_no_place(job):
    def complaint(*overrides):
        with pytest.raises(UserError) as caught:
            check_export(load_recipe(job / "recipe.toml", overrides))
        return str(caught.value)

    assert "model.lora.projector has no effect: no such part of" in complaint("model.lora.projector={ rank = 2 }")
    told = complaint("model.lora.image={ rank = 2 }", "model.train.image=false")
    assert "model.lora.image gives adapters to a part that does not learn; remove model.train.image = false" in told
    told = complaint(*LORA, "model.lora.image.dropout=0.1", "export.at_end=true")
    assert "model.lora.image.dropout is 0.1, and that of model.lora.backbone is 0.0" in told


def test_what_it_stands_on_is_written_where_that_has_changed(job, tmp_path):
    """A run that began with other weights than the directory's: peft would add the adapters to the wrong ones."""
    recipe = load_recipe(job / "recipe.toml", LORA)
    model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    name = "backbone.causal_lm.model.layers.0.inner.self_attn.q_proj.weight"
    state = model.state_dict() | {name: model.state_dict()[name] + 1}
    export_whole(recipe.directory, model, tmp_path, state, "A card.")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path) and config["modules_to_save"] is None
    before, after = (load_file(folder / "model.safetensors") for folder in (job / "model", tmp_path))
    changed = [key for key in before if not before[key].equal(after[key])]
    assert len(changed) == 1 and changed[0].endswith("layers.0.self_attn.q_proj.weight")
