"""A job whose images two encoders read, with callbacks, queries and weighted manifests, by `motet train` itself."""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cli.test_profile import altered, grown, measure_little
from cli.tiny_job import RECIPE, losses, metrics, write_tiny_job
from motet.analyze import analyze
from motet.core.errors import UserError
from motet.cost.profile import read_profile
from motet.planning.analyze_recipe import read_subject
from motet.profiling.command import profile
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

READERS = """
[model]
merge = "callbacks_of_a_job:merge"
combine = { image = "MODE" }

[model.encoders.siglip]
reads = "image"
family = "siglip"
after = "callbacks_of_a_job:After"
[model.encoders.siglip.projector]
kind = "resampler"
queries = 3
config = { resampler_depth = 1, resampler_n_heads = 2, resampler_head_dim = 8, num_key_value_heads = 2 }
[model.encoders.siglip.config]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
image_size = 16
patch_size = 4
num_channels = 1
vision_use_head = false

[model.encoders.dino]
reads = "image"
family = "dinov2"
[model.encoders.dino.projector]
kind = "qformer"
queries = 3
[model.encoders.dino.projector.config]
hidden_size = 8
num_attention_heads = 2
intermediate_size = 12
num_hidden_layers = 2
hidden_dropout_prob = 0.0
attention_probs_dropout_prob = 0.0
[model.encoders.dino.config]
hidden_size = 16
mlp_ratio = 1
num_hidden_layers = 1
num_attention_heads = 2
image_size = 16
patch_size = 8
num_channels = 1

[transforms.image]
patch_size = 4
channels = 1

[transforms.dino]
patch_size = 8
channels = 1
mean = [0.4]
"""
CALLBACKS = """
import torch
from motet.models.merge import merge_rows

class After(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, rows, sizes):
        assert len(sizes)
        return rows + self.linear(rows)

def merge(embeds, features, sequences):
    assert all(len(rows) for rows in features.values())
    return merge_rows(embeds, {name: 2 * rows for name, rows in features.items()}, sequences)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers") / "data"
    recipe = write_tiny_job(folder)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "small.jsonl").write_text("".join(lines[:8]))
    (folder / "large.jsonl").write_text("".join(lines[8:]))
    before, rest = RECIPE.split("[model.encoders.image]")
    audio = rest[rest.index("[model.encoders.audio]") : rest.index("[transforms.image]")]
    after = rest[rest.index("[transforms.audio]") :]
    # [model] must come before its tables.
    start, backbone = before.split("[model.backbone]")
    model, encoders = READERS.split("[model.encoders.siglip]", 1)
    text = start + model + "[model.backbone]" + backbone + "[model.encoders.siglip]" + encoders + audio + after
    recipe.write_text(text.replace('["train.jsonl"]', '["small.jsonl", "large.jsonl"]\nmixture = [0.5, 0.25]'))
    (folder / "callbacks_of_a_job.py").write_text(CALLBACKS)
    return recipe


def train_rank(rank, num_ranks, recipe, overrides, resume):
    """What was printed, or said at the end."""
    sys.path.insert(0, str(Path(recipe).parent))
    with redirect_stdout(StringIO()) as printed:
        try:
            train(load_recipe(Path(recipe), overrides), resume=resume)
        except UserError as error:
            return str(error)
    return printed.getvalue()


def recipe_of(job, mode):
    recipe = job.with_name(f"{mode}.toml")
    recipe.write_text(job.read_text().replace("MODE", mode))
    return recipe


def run(job, num_ranks, run_dir, mode, *overrides, resume="auto"):
    recipe = recipe_of(job, mode)
    overrides = [f"run.dir={run_dir}", "data.heldout=[]", "run.dtype=float64", "run.steps=4", *overrides]
    return run_ranks(train_rank, num_ranks, str(recipe), overrides, resume)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rows", "sum"])
def test_losses_do_not_depend_on_ranks_or_on_how_items_reach_them(job, tmp_path, mode):
    off = "model.encoders.audio.config.dropout=0.0"
    run(job, 1, tmp_path / "one", mode, off, "balance.phases=off")
    run(job, 2, tmp_path / "index", mode, off, "balance.method=per_phase", "data.num_workers=1")
    run(job, 2, tmp_path / "exchange", mode, off, "balance.mode=exchange", "fsdp.shard_size=1", "export.at_end=true")
    expected = losses(tmp_path / "one")
    assert len(expected) == 4
    for name in ("index", "exchange"):
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-10)
        assert {"siglip", "dino", "audio", "backbone"} == metrics(tmp_path / name)[0]["phases"].keys()
    export = tmp_path / "exchange" / "export"
    assert {path.name for path in (export / "encoders").iterdir()} == {"siglip", "dino", "audio"}
    with safe_open(export / "projectors" / "dino.safetensors", "pt") as stored:
        assert "layers.queries.weight" in stored.keys()  # noqa: SIM118
    assert (export / "hooks" / "siglip.after.safetensors").exists()


@pytest.mark.slow
def test_a_mixture_goes_on_where_it_was_and_must_be_the_same(job, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(job, 1, whole, "sum", "run.steps=6", "optimizer.schedule=constant")
    run(job, 1, parts, "sum", "run.steps=3", "optimizer.schedule=constant")
    (said, _) = run(job, 2, parts, "sum", "run.steps=6", "optimizer.schedule=constant", "data.mixture=[1, 1]")
    assert "written with a data.mixture in the proportion [2, 1], not [1, 1] as now, which orders the examples" in said
    (said, _) = run(job, 2, parts, "sum", "run.steps=6", "optimizer.schedule=constant", "data.mixture=[]")
    assert "in the proportion [2, 1], not no mixture as now" in said
    run(job, 1, parts, "sum", "run.steps=6", "optimizer.schedule=constant", "data.mixture=[200, 100]")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-10)
    state = json.loads(next((parts / "checkpoints").glob("*/state.json")).read_text())
    assert state["mixture"] == [2, 1]


def profile_rank(rank, num_ranks, recipe, overrides, path):
    sys.path.insert(0, str(Path(recipe).parent))
    patch = pytest.MonkeyPatch()
    measure_little(patch)
    # All that the job has is measured, on a slow machine too: seconds of a single batch cannot be seen to grow.
    patch.setattr("motet.profiling.measure._LEAST_S", 60.0)
    with redirect_stdout(StringIO()):
        profile(load_recipe(Path(recipe), overrides), "tiny", out=Path(path), seconds=1.0)


@pytest.mark.slow
def test_a_profile_of_it_is_what_it_is_balanced_on(job, tmp_path):
    small = ("transforms.image.max_pixels_side=64", "transforms.dino.max_pixels_side=64")
    path, exact = tmp_path / "profile.json", ("model.encoders.audio.config.dropout=0.0", *small)
    run_ranks(profile_rank, 1, str(recipe_of(job, "sum")), ["run.dtype=float64", *small], str(path))
    kinds = {module.name: [times.kind for times in module.layers] for module in read_profile(path).modules}
    assert list(kinds) == ["siglip", "dino", "audio", "backbone"]
    assert {"keys", "queries"} <= set(kinds["siglip"]) & set(kinds["dino"])
    # On a busy machine measured seconds may not grow with lengths, and such a profile is refused.
    path = altered(path, tmp_path / "grown.json", grown)
    measured = ("balance.cost=profile", f"balance.profile={path}", *exact)
    run(job, 1, tmp_path / "counted", "sum", "run.steps=2", *exact)
    run(job, 2, tmp_path / "measured", "sum", "run.steps=2", *measured)
    assert losses(tmp_path / "measured") == pytest.approx(losses(tmp_path / "counted"), rel=1e-10)
    phases = metrics(tmp_path / "measured")[0]["phases"]
    assert {phase["unit"] for phase in phases.values()} == {"ps"}


@pytest.mark.parametrize("mode", ["rows", "sum"])
def test_an_analysis_has_each_of_its_encoders(job, monkeypatch, mode):
    monkeypatch.syspath_prepend(job.parent)
    subject, batch_size = read_subject(recipe_of(job, mode))
    found = analyze(subject, num_ranks=2, batch_size=batch_size, num_batches=2)
    assert set(found.loads) == {"siglip", "dino", "audio", "backbone"}
    batch = subject.lengths.batch
    both = [batch.items[name] for name in ("siglip", "dino")]
    assert both[0].example.tolist() == both[1].example.tolist() and (both[0].length > both[1].length).all()
    taken = {"rows": 6, "sum": 3}[mode] * np.bincount(both[0].example, minlength=batch.num_examples)
    audio = batch.items["audio"]
    taken = taken + np.bincount(audio.example, audio.num_tokens, batch.num_examples)
    text = batch.sequence - taken
    assert (text > 0).all() and (text < 100).all()
    # Of three examples two are of the first manifest, which has 8 of them.
    weight = subject.lengths.weight
    assert weight[:8].sum() == pytest.approx(2 * weight[8:].sum())
