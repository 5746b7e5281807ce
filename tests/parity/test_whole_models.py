"""Whole models: loss and gradients are transformers', from the same files; they train, are planned and come back."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.unit.models.test_router_loss import losses_of_layers

from benchmark import benchmark
from motet.models.build import build_mllm
from motet.models.whole.export import export_whole, names_of
from motet.models.whole.registry import WHOLE
from motet.train.export_checkpoint import export_checkpoint
from motet.train.recipe.recipe_file import dump_recipe, load_recipe
from motet.train.trainer import train
from ranks import run_ranks

with benchmark("whole_models") as whole_models, benchmark("against_transformers") as against:
    FAMILIES = list(whole_models.FAMILIES)
TRAINED = ["llava", "gemma3", "llava_next", "idefics3", "mllama", "qwen3_vl", "qwen2_audio"]
"""Families that are trained on two ranks here: those that differ in what ranks do. The others are read and written."""
FROZEN = re.compile(r"vision_tower|vision_model|visual\.(?!merger|deepstack)|audio_tower")
"""Weights of the towers, without their mergers, which are projectors."""
ONE_STEP = ["run.dtype=float64", "run.steps=1", "run.batch_size=8", "data.shuffle=false", "data.num_workers=0"]


@pytest.fixture(scope="module", params=FAMILIES)
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    whole_models.write_job(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def reference(job):
    return against.theirs(job)


def test_every_family_is_held_to_transformers():
    assert {whole_models.TYPES.get(name, name) for name in FAMILIES} == set(WHOLE)


def test_loss_and_gradients_are_those_of_transformers(job, reference):
    packed = against.ours(job)
    assert max(packed.distance(reference)) < 1e-8
    assert max(packed.distance(against.ours(job, packed=False))) < 1e-8


def test_the_router_loss_is_transformers_own_of_each_layer_and_document(tmp_path):
    whole_models.write_job(tmp_path, "qwen3_vl_moe", num_examples=3)
    file, coefficient = tmp_path / "model/config.json", 0.7
    stored = json.loads(file.read_text())
    plain = against.ours(tmp_path)
    stored["text_config"] |= {"output_router_logits": True, "router_aux_loss_coef": coefficient}
    file.write_text(json.dumps(stored))
    model, expected = against.their_model(tmp_path), 0.0
    for inputs, is_target in against.their_inputs(tmp_path):
        logits = model(**inputs, output_router_logits=True).router_logits
        losses = list(losses_of_layers(logits, model.config.text_config.num_experts_per_tok))
        assert len(losses) == 2
        expected += coefficient * int(is_target[1:].sum()) * sum(losses).item() / len(losses)
    balanced = against.ours(tmp_path)
    assert (balanced.loss - plain.loss) * plain.num_targets == pytest.approx(expected, rel=1e-12)
    assert balanced.distance(plain)[1] > 1e-2


def trained(rank, num_ranks, recipe, overrides):
    train(load_recipe(Path(recipe), overrides))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def test_every_weight_comes_back_under_its_name(job, tmp_path):
    recipe = load_recipe(job / "recipe.toml")
    model = build_mllm(recipe.modules, recipe.vocabulary().vocabulary_size)
    export_whole(recipe.directory, model, tmp_path / "out", {n: w + 1 for n, w in model.state_dict().items()}, "")
    for name, module in model.encoders.items():
        assert module.spec_module(name).num_parameters == sum(weight.numel() for weight in module.parameters())
    before, after = stored(job / "model"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    names = names_of(recipe.directory, model)
    held = {names[name] for name, _ in model.named_parameters(remove_duplicate=False)}
    keys = {key: name for keys in recipe.directory.keys.values() for key, name in keys.items()}
    for key, weight in before.items():
        learned = keys.get(key) in held
        torch.testing.assert_close(after[key], weight + 1 if learned else weight, rtol=0, atol=0)
    kind = against.class_of(transformers.AutoConfig.from_pretrained(tmp_path / "out"))
    _, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    theirs = [whole_models.open_processor(each) for each in (job / "model", tmp_path / "out")]
    assert theirs[0].to_dict() == theirs[1].to_dict() and theirs[0].chat_template == theirs[1].chat_template


@pytest.mark.parametrize(
    "job", [pytest.param(name, marks=() if name == "qwen3_vl" else pytest.mark.slow) for name in TRAINED], indirect=True
)
def test_training_on_two_ranks_and_the_directory_that_comes_back(job, reference, tmp_path):
    reads = "audio" if job.name.startswith(whole_models.AUDIO_FAMILIES) else "image"
    frozen = f"model.train.{reads}=false"
    # What one rank does, three families show: images of one size, images of their own, and rows that are keys.
    alone_too = job.name.startswith(("llava0", "mllama", "qwen3_vl"))
    for num_ranks in (1, 2) if alone_too else (2,):
        run_dir = tmp_path / str(num_ranks)
        overrides = [*ONE_STEP, f"run.dir={run_dir}", "export.at_end=true", frozen]
        run_ranks(trained, num_ranks, str(job / "recipe.toml"), overrides)
        step = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
        assert step["loss"] == pytest.approx(reference.loss, rel=1e-10)
    shared = tmp_path / "2" / "export"
    alone = tmp_path / "1" / "export" if alone_too else shared
    before, after, other = stored(job / "model"), stored(alone), stored(shared)
    assert before.keys() == after.keys() == other.keys()
    for name, tensor in before.items():
        is_frozen = FROZEN.search(name) is not None
        assert torch.equal(tensor, after[name]) == is_frozen, name
        torch.testing.assert_close(after[name], other[name], rtol=1e-6, atol=1e-7)
    # A checkpoint is exported as the run was.
    later = tmp_path / "later"
    with pytest.MonkeyPatch.context() as patch:
        # The checkpoint has all weights of towers and backbones: those of the directory are not read for it.
        patch.setattr("motet.models.materialise._sources", lambda *args: pytest.fail("weights are read twice"))
        export_checkpoint(tmp_path / "2" / "checkpoints" / "step-00000001", later, None, ())
    assert {file.name: file.read_bytes() for file in later.iterdir()} == {
        file.name: file.read_bytes() for file in shared.iterdir()
    }
    # transformers' own classes read it all, and nothing is missing or left over.
    config = transformers.AutoConfig.from_pretrained(alone)
    _, info = getattr(transformers, config.architectures[0]).from_pretrained(alone, output_loading_info=True)
    assert not any(info.values())
    theirs = [whole_models.open_processor(each) for each in (job / "model", alone)]
    assert theirs[0].to_dict() == theirs[1].to_dict() and theirs[0].chat_template == theirs[1].chat_template
    assert f"All parts learned but {reads}" in (alone / "README.md").read_text()
    # And so does Motet.
    again = tmp_path / "again"
    shutil.copytree(job, again, ignore=shutil.ignore_patterns("model", "*.motet-index"))
    shutil.copytree(alone, again / "model")
    assert max(against.ours(again).distance(against.theirs(again))) < 1e-8


@pytest.mark.slow
def test_ranks_without_images_take_part_in_layers_that_attend_to_them(tmp_path):
    """One of two ranks has an image, none has, and one has two; a rank without them waits for nobody."""
    whole_models.write_job(tmp_path, "mllama")
    shutil.rmtree(tmp_path / "media")
    whole_models.write_examples(tmp_path, 6, [1, 0, 0, 0, 2, 0])
    overrides = ["run.dtype=float64", "run.batch_size=2", "data.shuffle=false", "data.num_workers=0"]
    lines = {}
    for num_ranks, more in ((1, []), (2, ["fsdp.shard_size=2", "fsdp.recompute=true", "balance.mode=exchange"])):
        run_dir = tmp_path / str(num_ranks)
        run_ranks(trained, num_ranks, str(tmp_path / "recipe.toml"), [*overrides, *more, f"run.dir={run_dir}"])
        steps = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        lines[num_ranks] = [[step["loss"], step["grad_norm"]] for step in steps]
    for alone, shared in zip(lines[1], lines[2], strict=True):
        assert shared == pytest.approx(alone, rel=1e-10)


def test_a_recipe_as_it_is_written_down_is_the_same_recipe(job, tmp_path):
    recipe = load_recipe(job / "recipe.toml", ["model.train.projector=false"])
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "recipe.toml") == recipe
