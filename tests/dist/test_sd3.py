"""A recipe whose generator is a transformer of Stable Diffusion 3: the same in a Plan with stages, and exported."""

import diffusers
import pytest
import torch

from cli.tiny_job import metrics
from dist.test_generators import EXACT, planned, run, run_planned
from dist.test_unet import job  # noqa: F401
from motet.core.plan import Unit
from motet.planning.planned_recipe import read_job_recipe

TRANSFORMER = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "joint_attention_dim": 6,
    "caption_projection_dim": 8,
    "pooled_projection_dim": 5,
    "pos_embed_max_size": 6,
    "sample_size": 6,
}


def test_stages_train_as_one_process_does_and_an_export_is_read_by_diffusers(job, tmp_path):  # noqa: F811
    pipeline = job.parent / "sd3"
    torch.manual_seed(1)
    diffusers.SD3Transformer2DModel(**TRANSFORMER).save_pretrained(pipeline / "transformer")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(pipeline / "scheduler")
    recipe = job.with_name("sd3.toml")
    table = job.read_text().replace('"pipeline"', '"sd3"').replace("min_snr = 5.0", 'times = "logit_normal"')
    recipe.write_text(table.replace('sampler = "ddpm", ', ""))
    few = ("run.steps=2", "data.heldout=[]")
    run(recipe, 1, tmp_path / "alone", *few, "fsdp.shard_size=1", "export.at_end=true")
    whole = {"draw": read_job_recipe(recipe, EXACT).model.num_blocks["draw"]}
    stages = {"image": 1, "audio": 1, "backbone": 1}, {"backbone": 1} | whole
    run_planned(recipe, planned(recipe, Unit("all", stages, pp=2, zero=0)), tmp_path / "stages", *few)
    for a, b in zip(metrics(tmp_path / "alone"), metrics(tmp_path / "stages"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    exported = tmp_path / "alone" / "export" / "generators" / "draw"
    model = diffusers.SD3Transformer2DModel.from_pretrained(exported / "transformer")
    assert model.config.joint_attention_dim == 6
    assert diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(exported / "scheduler").config.shift == 3.0
