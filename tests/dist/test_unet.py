"""A recipe whose generator is a UNet of diffusers: the same on any number of ranks, shown and exported."""

import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cli.tiny_job import metrics, write_tiny_job
from denoiser_shapes import UNET
from dist.test_generators import EXACT, held_out, planned, run, run_planned, shown
from motet.core.errors import UserError
from motet.core.plan import Unit
from motet.models.build import build_mllm
from motet.models.spec import spec_of_config
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.trainable import obstacle_in
from motet.profiling.measure import MeasuredSubject, measure_once
from motet.profiling.subjects import one_layer_deep, subjects
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from unit.profiling.test_command import ALONE, counting_watch

GENERATOR = """
[model.generators.draw]
makes = "image"
path = "pipeline"
num_queries = 2
drop_condition = 0.2
noise = { schedule = "path", min_snr = 5.0 }
sampling = { sampler = "ddpm", steps = 3, guidance = 2.0 }

[transforms.draw]
patch_size = 2
channels = 1
"""
VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 8),
    "norm_num_groups": 2,
    "scaling_factor": 0.5,
}
SIDES = ((8, 8), (12, 8), (8, 8), (4, 4), (8, 12))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A tiny job in which some examples ask for a picture, of several sizes."""
    recipe = write_tiny_job(tmp_path_factory.mktemp("job") / "data", num_train=10, num_heldout=4)
    folder, asked = recipe.parent, []
    for number, sides in enumerate(SIDES):
        name = f"media/drawn-{number}.png"
        Image.effect_noise(sides, 60.0).save(folder / name)
        turns = [{"from": "human", "value": f"draw {'abcde'[number]}"}, {"from": "gpt", "value": "see: <image>"}]
        asked.append(json.dumps({"conversations": turns, "image": [name]}) + "\n")
    for split in ("train", "heldout"):
        file = folder / f"{split}.jsonl"
        file.write_text(file.read_text() + "".join(asked))
    torch.manual_seed(1)
    diffusers.UNet2DConditionModel(**UNET, in_channels=4, out_channels=4).save_pretrained(folder / "pipeline" / "unet")
    scheduler = diffusers.DDPMScheduler(prediction_type="v_prediction")
    scheduler.save_pretrained(folder / "pipeline" / "scheduler")
    recipe.write_text(recipe.read_text() + GENERATOR)
    return recipe


@pytest.mark.slow
def test_ranks_train_make_and_export_as_one_process_does(job, tmp_path):
    few = ("run.steps=3", "evaluate.num_made=4", "evaluate.batch_size=2")
    run(job, 1, tmp_path / "one", *few, "fsdp.shard_size=1")
    run(job, 2, tmp_path / "two", *few, "export.at_end=true", "run.microbatches=2")
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    assert held_out(tmp_path / "two") == pytest.approx(held_out(tmp_path / "one"), rel=1e-9)
    assert shown(tmp_path / "two") == shown(tmp_path / "one") != []

    exported = tmp_path / "two" / "export" / "generators" / "draw"
    unet = diffusers.UNet2DConditionModel.from_pretrained(exported / "unet")
    before = diffusers.UNet2DConditionModel.from_pretrained(job.parent / "pipeline" / "unet")
    assert not torch.equal(unet.conv_in.weight, before.conv_in.weight)
    assert diffusers.DDPMScheduler.from_pretrained(exported / "scheduler").config.prediction_type == "v_prediction"
    assert "nothing" in load_file(exported / "entrance.safetensors")


@pytest.mark.slow
def test_buckets_are_what_it_makes_and_one_that_nothing_fits_is_refused(job, tmp_path):
    once = ("run.steps=1", "data.heldout=[]", "fsdp.shard_size=1")
    assert "step 1/1" in run(job, 1, tmp_path / "run", *once, "transforms.draw.buckets=[[8, 8], [12, 8]]")
    said = run(job, 2, tmp_path / "refused", *once[:2], "transforms.draw.buckets=[[8, 8], [32, 8]]")
    assert said == (
        "transforms.draw.buckets has [32, 8], which no example of data.train fits that draw computes; remove it."
    )


def test_a_frozen_unet_is_exported_bit_for_bit(job, tmp_path):
    frozen = ("model.generators.draw.train_generator=false", "run.dtype=float32", "data.heldout=[]")
    run(job, 1, tmp_path / "run", *frozen, "run.steps=2", "export.at_end=true", "fsdp.shard_size=1")
    [file] = (tmp_path / "run" / "export" / "generators" / "draw" / "unet").glob("*.safetensors")
    stored = load_file(job.parent / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    exported = load_file(file)
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], value) for name, value in stored.items())
    assert len({line["losses"]["draw"] for line in metrics(tmp_path / "run")}) == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("transforms.draw.patch_size=4", "rows of 16 values, but model.generators.draw makes rows of 4"),
        ("transforms.draw.fixed_size=6", "model.generators.draw: a raster of 3 x 3 rows is not what a UNet makes"),
        ("fsdp.recompute=true", "fsdp.recompute: module 'draw' names no blocks that can be recomputed"),
        ("model.generators.draw.config.in_channels=3", "`path` excludes `config`"),
    ],
)
def test_what_does_not_fit_is_said(job, tmp_path, override, said):
    with pytest.raises(UserError) as refused:
        train(load_recipe(job, [f"run.dir={tmp_path / 'run'}", override]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def latent(job):
    """The same job, whose pixels a VAE makes latents of: 2 x 2 colours are a row of 4 latents."""
    shutil.copytree(job.parent / "pipeline", job.parent / "latent")
    torch.manual_seed(2)
    diffusers.AutoencoderKL(**VAE).save_pretrained(job.parent / "latent" / "vae")
    recipe = job.with_name("latent.toml")
    recipe.write_text(job.read_text().replace('"pipeline"', '"latent"').replace("channels = 1", "channels = 3"))
    return recipe


def check_profiled(recipe, kinds):
    """Layers of these kinds take time by themselves; with the rest they add up, and the whole model is among them."""
    read = load_recipe(recipe)
    vocab_size = read.vocabulary().vocabulary_size
    model, twin = (build_mllm(one_layer_deep(read.modules), vocab_size) for _ in range(2))
    subject = {each.name: each for each in subjects(read, model, twin, torch.device("cpu"))}["draw"]
    batch = (2, int(subject.lengths[0])), (1, int(subject.lengths[1]))
    # Every call of a module takes a second; the whole took a thousand forward, and two backward.
    sample = measure_once(subject, batch, counting_watch)
    assert {layer.kind for (layer, _), seconds in zip(subject.layers, sample[1:]) if seconds.any()} == kinds
    data = [seconds for (layer, _), seconds in zip(subject.layers, sample[1:]) if layer.reads_data]
    assert all(seconds[1:].tolist() == [0, 0] for seconds in data)  # No gradient passes them.
    sample[0] = [1000.0, 0.0, 2000.0]
    times = MeasuredSubject(subject, [batch], [], [[sample]]).times(ALONE)
    [rest] = [each.grid for each in times.layers if each.kind == "output"]
    assert rest.forward_s[0] == 1000 - sample[1:-1, 0].sum()
    assert rest.input_s[0] + rest.weight_s[0] == 2000 - sample[2:-1, 2].sum() - (sample[1, 2] - sample[1, 1])
    measured = {(each.kind, each.weights) for each in times.layers}
    whole = spec_of_config(read.modules, vocab_size).module("draw")
    assert measured == {(layer.kind, layer.weights) for layer in whole.layers}


@pytest.mark.slow
def test_layers_are_profiled(job, latent):
    kinds = {"projector", "convolution", "strided_convolution", "time", "projection", "attention", "output"}
    check_profiled(job, kinds)
    check_profiled(latent, {*kinds, "latents"})


@pytest.mark.slow
def test_a_vae_makes_latents_alike_on_all_ranks_shows_pixels_and_is_exported_bit_for_bit(latent, tmp_path):
    few = ("run.steps=2", "evaluate.num_made=2", "evaluate.batch_size=2")
    run(latent, 1, tmp_path / "one", *few, "fsdp.shard_size=1")
    run(latent, 2, tmp_path / "two", *few, "run.microbatches=2")
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    assert shown(tmp_path / "two") == shown(tmp_path / "one") != []
    assert np.asarray(shown(tmp_path / "one")[0]["file"]).shape == (8, 8, 3)

    exported = ("run.dtype=float32", "data.heldout=[]", "run.steps=1", "export.at_end=true", "fsdp.shard_size=1")
    run(latent, 1, tmp_path / "three", *exported)
    [file] = (tmp_path / "three" / "export" / "generators" / "draw" / "vae").glob("*.safetensors")
    stored = load_file(latent.parent / "latent" / "vae" / "diffusion_pytorch_model.safetensors")
    written = load_file(file)
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], value) for name, value in stored.items())
    config = diffusers.AutoencoderKL.load_config(file.parent)
    assert config["scaling_factor"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["index", "exchange", "plan"])
def test_workers_encode_what_the_step_would(latent, tmp_path, mode):
    few = ("run.steps=2", "evaluate.num_made=2", "evaluate.batch_size=2")
    run(latent, 1, tmp_path / "step", *few, "fsdp.shard_size=1")
    encoded = latent.with_name("encoded.toml")
    text = latent.read_text().replace("num_workers = 0", "num_workers = 1")
    encoded.write_text(text.replace("noise =", 'vae = { encode_in = "workers" }\nnoise =', 1))
    if mode == "plan":
        whole = {"draw": read_job_recipe(encoded, EXACT).model.num_blocks["draw"]}
        stages = {"image": 1, "audio": 1, "backbone": 1}, {"backbone": 1} | whole
        run_planned(encoded, planned(encoded, Unit("all", stages, pp=2, zero=0)), tmp_path / "workers", *few)
    else:
        run(encoded, 2, tmp_path / "workers", *few, f"balance.mode={mode}")
    for a, b in zip(metrics(tmp_path / "step"), metrics(tmp_path / "workers"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-10)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-9)
    assert held_out(tmp_path / "workers") == pytest.approx(held_out(tmp_path / "step"), rel=1e-10)
    assert shown(tmp_path / "workers") == shown(tmp_path / "step") != []


def test_workers_that_are_not_there_encode_nothing(latent):
    with pytest.raises(UserError) as refused:
        load_recipe(latent, ["model.generators.draw.vae.encode_in=workers", "data.num_workers=0"])
    said = 'model.generators.draw.vae.encode_in = "workers" takes workers, and data.num_workers is 0; raise it'
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("transforms.draw.channels=1", "rows of 4 values, but model.generators.draw makes rows of 12"),
        ("transforms.draw.mean=[0.4]", "transforms.draw.mean is not 0.5, but the VAE of model.generators.draw takes"),
        ("fsdp.param_dtype=float16", "is beyond what the VAE of model.generators.draw can hold"),
        ("transforms.draw.fixed_size=6", "model.generators.draw: a raster of 3 x 3 rows is not what a UNet makes"),
    ],
)
def test_what_does_not_fit_a_vae_is_said(latent, tmp_path, override, said):
    with pytest.raises(UserError) as refused:
        train(load_recipe(latent, [f"run.dir={tmp_path / 'run'}", override]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_plan_with_stages_trains_it_as_one_process_does_and_one_that_recomputes_it_is_refused(job, tmp_path):
    whole = {"draw": read_job_recipe(job, EXACT).model.num_blocks["draw"]}
    stages = {"image": 1, "audio": 1, "backbone": 1}, {"backbone": 1} | whole
    run(job, 1, tmp_path / "alone", "data.heldout=[]", "fsdp.shard_size=1")
    run_planned(job, planned(job, Unit("all", stages, pp=2, zero=0)), tmp_path / "stages", "data.heldout=[]")
    for a, b in zip(metrics(tmp_path / "alone"), metrics(tmp_path / "stages"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    recomputed = planned(job, Unit("all", stages, pp=2, zero=0, recompute=({}, whole)))
    assert "recomputes 'draw', which cannot be: this generator is one block" in obstacle_in(load_recipe(job, EXACT))(
        recomputed
    )
