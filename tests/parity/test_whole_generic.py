"""Whole models that Motet does not know: loss, gradients, two ranks and the directory that comes back."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmark import benchmark
from cli.tiny_job import losses
from motet.core.errors import UserError
from motet.models.whole.directory import WholeDirectory
from motet.planning.plan_first import plan_first
from motet.train.export_checkpoint import export_checkpoint
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

with benchmark("whole_models") as whole_models, benchmark("against_transformers") as against:
    GENERIC = list(whole_models.GENERIC)
SOURCE = Path(__file__).parents[2] / "src"
ONE_STEP = ["run.dtype=float64", "run.steps=1", "run.batch_size=8", "data.shuffle=false", "data.num_workers=0"]


@pytest.fixture(scope="module", params=GENERIC)
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    whole_models.write_job(folder, request.param)
    return folder


def trained(rank, num_ranks, recipe, overrides):
    read = load_recipe(Path(recipe), overrides)
    train(read, plan=partial(plan_first, read, Path(recipe), overrides) if read.parallel else None)


def test_motet_has_not_a_word_of_these_families():
    source = " ".join(path.read_text().lower() for path in SOURCE.rglob("*.py"))
    assert len(GENERIC) == 3
    assert [name for name in GENERIC if name in source or name.replace("_", "") in source] == []


@pytest.mark.parametrize(
    "job",
    [pytest.param(name, marks=() if name == "vipllava" else pytest.mark.slow) for name in GENERIC],
    indirect=True,
)
def test_loss_and_gradients_are_those_of_transformers_also_on_two_ranks(job, tmp_path):
    reference, packed = against.theirs(job), against.ours(job)
    assert max(packed.distance(reference)) < 1e-8
    assert max(packed.distance(against.ours(job, packed=False))) < 1e-8
    overrides = [*ONE_STEP, f"run.dir={tmp_path}", "export.at_end=true", "model.train.image=false"]
    run_ranks(trained, 2, str(job / "recipe.toml"), overrides)
    step = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert step["loss"] == pytest.approx(reference.loss, rel=1e-10)
    assert {"image", "backbone"} == step["phases"].keys()
    before, after = (load_file(folder / "model.safetensors") for folder in (job / "model", tmp_path / "export"))
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert before.keys() == after.keys()
    assert changed and all("language_model" in name or "lm_head" in name for name in changed)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "export")
    kind = getattr(transformers, config.architectures[0])
    _, info = kind.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.slow
@pytest.mark.parametrize("job", ["vipllava"], indirect=True)
def test_ranks_and_steps_without_images(job, tmp_path):
    """Two examples a step on two ranks, all parts learn: the encoder's weights meet on ranks that have no image."""
    overrides = [*ONE_STEP, "run.steps=4", "run.batch_size=2", "optimizer.weight_decay=0.1"]
    for num_ranks in (1, 2):
        run_ranks(trained, num_ranks, str(job / "recipe.toml"), [*overrides, f"run.dir={tmp_path / str(num_ranks)}"])
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-10)


def test_weights_on_which_no_row_depends_are_no_parameters(tmp_path):
    """As in transformers, where they have no gradient: a weight decay must not shrink them."""
    whole_models.GENERIC["vipllava"](tmp_path)
    encoder = WholeDirectory(tmp_path).config({}, ()).encoders["image"].own_encoder()
    learned = {name for name, _ in encoder.named_parameters()}
    assert any(".layers.1." in name for name in learned) and not any(".layers.2." in name for name in learned)
    before = load_file(tmp_path / "model.safetensors")
    kept = dict(encoder.named_buffers())
    [name] = [name for name in kept if name.endswith("layers.2.mlp.fc1.weight")]
    [stored] = [each for key, each in before.items() if key.endswith("layers.2.mlp.fc1.weight")]
    assert torch.equal(kept[name], stored)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": {"image_token_id": 7}}, "as the token of an image, which config.json does not"),
        ({"processor": {"num_image_tokens": 8}}, "puts 8 tokens for an image, and 9 rows"),
        ({"config": {"model_type": "idefics2"}}, "it has no get_placeholder_mask"),
        ({"config": {"model_type": "nothing"}}, "transformers has no class of that type"),
        ({"text": {"model_type": "granite"}}, "text_config is of type 'granite', which is not held to transformers"),
    ],
)
def test_what_is_not_understood_is_one_sentence(tmp_path, change, said):
    whole_models.write_deepseek_vl(tmp_path)
    for file, table in (("config.json", "config"), ("processor_config.json", "processor")):
        stored = json.loads((tmp_path / file).read_text()) | change.get(table, {})
        if table == "config":
            stored["text_config"] |= change.get("text", {})
        (tmp_path / file).write_text(json.dumps(stored))
    with pytest.raises(UserError, match=said):
        _ = WholeDirectory(tmp_path).parts


def altered(change):
    """A class of models whose forward gives its language model something else."""
    base = transformers.DeepseekVLModel

    class Altered(base):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs | change)

    return Altered


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"position_ids": torch.zeros(1, 21, dtype=torch.long)}, "is given positions of its own"),
        ({"attention_mask": torch.zeros(1, 21)}, "is given a mask of its own"),
        ({"deepstack": torch.zeros(1)}, "is given deepstack"),
    ],
)
def test_a_forward_that_does_more_is_refused(tmp_path, monkeypatch, change, said):
    whole_models.write_deepseek_vl(tmp_path)
    directory = WholeDirectory(tmp_path)
    modeling = transformers.models.deepseek_vl.modeling_deepseek_vl
    monkeypatch.setattr(modeling, "DeepseekVLModel", altered(change))
    with pytest.raises(UserError, match=said):
        _ = directory.parts


LORA = 'model.lora.backbone={ rank = 3, alpha = 5.0, targets = ["q_proj", "mlp.*"] }'


@pytest.mark.parametrize(
    "job",
    [pytest.param(name, marks=() if name == "deepseek_vl" else pytest.mark.slow) for name in GENERIC],
    indirect=True,
)
@pytest.mark.parametrize("image", ["false", *(pytest.param(how, marks=pytest.mark.slow) for how in ("true", "lora"))])
def test_adapters_are_those_of_peft_also_on_two_ranks(job, tmp_path, image):
    """What two ranks have trained and saved, on top of transformers' model: with the encoder as it was; or learned, and
    the backbone in two stages; or with adapters beside all of its linear layers that compute anything.
    """
    part = [LORA, "model.lora.image={ rank = 2 }" if image == "lora" else f"model.train.image={image}"]
    run = [*ONE_STEP, *part, "run.steps=2", "optimizer.lr=1e-2", "export.at_end=true"]
    for num_ranks, more in ((1, []), (2, ["parallel.backbone.pp=2"] if image == "true" else [])):
        overrides = [*run, *more, f"run.dir={tmp_path / str(num_ranks)}"]
        run_ranks(trained, num_ranks, str(job / "recipe.toml"), overrides)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-10)
    adapter = tmp_path / "2" / "export" / "adapter"
    ours = against.ours(job, overrides=part, checkpoint=tmp_path / "2" / "checkpoints" / "step-00000002")
    reference = against.theirs(job, adapter)
    assert max(ours.distance(reference)) < 1e-8
    learned = {name for name in ours.gradients if "lora_" not in name}
    assert bool(learned) == (image == "true") and not any("language_model" in name for name in learned)
    assert abs(ours.loss - against.ours(job).loss) > 1e-3 * ours.loss
    if image == "lora":
        adapted = {name for name in ours.gradients if "lora_" in name and "language_model" not in name}
        assert len(adapted) > 8 and all(bool(ours.gradients[name].any()) for name in adapted if "lora_A" in name)
    if image != "true":
        shutil.copytree(job, again := tmp_path / "again", ignore=shutil.ignore_patterns("model", "*.motet-index"))
        checkpoint = tmp_path / "2" / "checkpoints" / "step-00000002"
        export_checkpoint(checkpoint, again / "model", None, ["export.adapter=merged"])
        # Its weights are stored in float32.
        assert against.theirs(again).loss == pytest.approx(ours.loss, rel=1e-5)
        goes_on = [f"model.lora.path={adapter}"]
        assert max(against.ours(job, overrides=goes_on).distance(reference)) < 1e-8


def test_adapters_of_other_parts_are_refused(tmp_path):
    job = tmp_path / "job"
    whole_models.write_job(job, "deepseek_vl", num_examples=2)
    with pytest.raises(UserError, match=r"model.lora.other has no effect"):
        load_recipe(job / "recipe.toml", ["model.lora.other.rank=2"])
    shutil.rmtree(job)
