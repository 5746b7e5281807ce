"""A model whose products or experts ranks share is filled by each of them, and exported whole."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, SiglipVisionConfig, SiglipVisionModel

from cli.tiny_job import losses, write_tiny_job
from dist.test_planned import DEEPER, plan_of, train_under
from motet.core.plan import Unit
from motet.core.plan_file import write_plan
from motet.planning.planned_recipe import read_job_recipe
from ranks import run_ranks

PHI3 = [*DEEPER, "model.backbone.family=phi3", "export.at_end=true", "run.steps=3"]
"""Its products are fused, as are those of the image encoder, Qwen2-VL's."""
MIXTRAL = [*PHI3, "model.backbone.family=mixtral", "model.backbone.config.num_local_experts=4"]


def exported(run_dir):
    files = (run_dir / "export").rglob("*.safetensors")
    return {str(file.relative_to(run_dir)): load_file(file) for file in files}


@pytest.mark.parametrize(
    ("schedule", "overrides", "degrees"),
    [
        ("data_parallel", PHI3, {"tp": 2}),
        pytest.param("1f1b", PHI3, {"tp": 2}, marks=pytest.mark.slow),
        ("data_parallel", MIXTRAL, {"dp": 2, "ep": 2}),
    ],
    ids=["FSDP2", "a stage", "experts"],
)
def test_an_export_is_that_of_one_process(tmp_path, schedule, overrides, degrees):
    job, file, alone, shared = write_tiny_job(tmp_path / "data"), tmp_path / "plan.json", tmp_path / "1", tmp_path / "2"
    plan = plan_of(job, ({"image": 2, "audio": 2, "backbone": 3},))
    unit = Unit("all", plan.units[0].stages, zero=1, **degrees)
    model, where = read_job_recipe(job, overrides).model, replace(plan.cluster, ranks_per_node=2)
    plan = replace(plan, model=model, units=(unit,), schedule=schedule, cluster=where, microbatch_size=1)
    write_plan(plan, file)
    run_ranks(train_under, 2, str(job), [*overrides, f"run.dir={shared}"], str(file))
    run_ranks(train_under, 1, str(job), [*overrides, f"run.dir={alone}"], None)
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-10)
    found, expected = exported(shared), exported(alone)
    assert found.keys() == expected.keys() and len(expected) == 5
    for name, tensors in expected.items():
        assert found[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(found[name][key], tensor, rtol=1e-10, atol=1e-12)


def test_an_encoder_is_exported_beside_what_makes_its_rows(tmp_path):
    job, tower = write_tiny_job(tmp_path / "data"), tmp_path / "tower"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    SiglipVisionModel(SiglipVisionConfig(image_size=16, patch_size=4, **sizes)).save_pretrained(tower)
    said = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 64}, "resample": 3}
    (tower / "preprocessor_config.json").write_text(
        json.dumps(said | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    )
    before, rest = job.read_text().split("[model.encoders.image]")
    after = rest[rest.index("[model.encoders.audio]") :].replace("merge_size = 2\nchannels = 1", "fixed_size = 16")
    job.write_text(f'{before}[model.encoders.image]\nfamily = "siglip"\npath = "{tower}"\n{after}')
    overrides = ["run.steps=1", "data.heldout=[]", "export.at_end=true", f"run.dir={tmp_path / 'run'}"]
    run_ranks(train_under, 1, str(job), overrides, None)
    folder = tmp_path / "run" / "export" / "encoders"
    processor = AutoImageProcessor.from_pretrained(folder / "image")
    assert processor.size == {"height": 16, "width": 16} and (folder / "image" / "model.safetensors").is_file()
    assert not (folder / "audio" / "preprocessor_config.json").exists()
