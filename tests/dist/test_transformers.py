"""A recipe whose generator is a transformer of diffusers: the same in a Plan with stages, and exported."""

import diffusers
import pytest
import torch

from cli.tiny_job import metrics
from denoiser_shapes import PIXART, SD3
from dist.test_generators import EXACT, planned, run, run_planned, shown
from dist.test_unet import check_profiled, job  # noqa: F401
from motet.core.plan import Unit
from motet.planning.planned_recipe import read_job_recipe

CHANNELS = {"in_channels": 4, "out_channels": 4}

PROFILED = {
    "SD3": {
        "projector",
        "patches",
        "time",
        "context",
        "modulation",
        "joint_attention",
        "last_joint_attention",
        "output",
    },
    "PixArt": {"projector", "patches", "time", "context", "attention", "output"},
}


@pytest.mark.parametrize(
    ("kind", "options", "scheduler", "noise"),
    [
        pytest.param(
            "SD3",
            SD3 | CHANNELS,
            diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            'times = "logit_normal"',
            marks=pytest.mark.slow,
        ),
        (
            "PixArt",
            PIXART | CHANNELS | {"out_channels": 8},
            diffusers.DPMSolverMultistepScheduler(beta_schedule="linear"),
            "min_snr = 5.0",
        ),
    ],
    ids=["SD3", "PixArt"],
)
def test_stages_train_and_make_what_one_process_does_and_an_export_is_read_by_diffusers(
    job,  # noqa: F811
    tmp_path,
    kind,
    options,
    scheduler,
    noise,
):
    pipeline, model_class = job.parent / kind, getattr(diffusers, f"{kind}Transformer2DModel")
    torch.manual_seed(1)
    model_class(**options).save_pretrained(pipeline / "transformer")
    scheduler.save_pretrained(pipeline / "scheduler")
    recipe = job.with_name(f"{kind}.toml")
    table = job.read_text().replace('"pipeline"', f'"{kind}"').replace("min_snr = 5.0", noise)
    recipe.write_text(table.replace('sampler = "ddpm", ', ""))
    few = ("run.steps=2", "evaluate.num_made=2", "evaluate.batch_size=2")
    check_profiled(recipe, PROFILED[kind])
    run(recipe, 1, tmp_path / "alone", *few, "fsdp.shard_size=1", "export.at_end=true")
    stages = {"image": 1, "audio": 1, "backbone": 2, "draw": 1}, {"draw": 1}
    assert read_job_recipe(recipe, EXACT).model.num_blocks["draw"] == 2
    run_planned(recipe, planned(recipe, Unit("all", stages, pp=2, zero=0)), tmp_path / "stages", *few)
    for a, b in zip(metrics(tmp_path / "alone"), metrics(tmp_path / "stages"), strict=True):
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-8)
    assert shown(tmp_path / "stages") == shown(tmp_path / "alone") != []
    exported = tmp_path / "alone" / "export" / "generators" / "draw"
    config = model_class.from_pretrained(exported / "transformer").config
    assert {name: config[name] for name in options} == options
    written = type(scheduler).from_pretrained(exported / "scheduler").config
    assert {name: written[name] for name in written if name[0] != "_"} == {
        name: value for name, value in scheduler.config.items() if name[0] != "_"
    }
