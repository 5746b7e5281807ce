"""`motet train` of a recipe with LoRA adapters: what it learns, predicts and leaves for peft."""

import json
import sys

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.meddling import motet
from cli.test_stop import arguments
from cli.tiny_job import losses, write_tiny_job
from motet.cli import main
from motet.core.errors import UserError
from motet.train.export import check_export
from motet.train.recipe.recipe_file import load_recipe

LORA = ("model.lora.backbone={ rank = 4 }", "optimizer.lr=2e-2", "model.backbone.config.tie_word_embeddings=false")


@pytest.mark.slow
def test_a_run_leaves_an_adapter_that_peft_loads(tmp_path):
    job, run_dir = write_tiny_job(tmp_path / "data"), tmp_path / "run"
    done = motet(*arguments(job, run_dir, *LORA, "export.at_end=true", "run.steps=40"))
    assert done.returncode == 0, done.stderr
    assert sum(losses(run_dir)[-10:]) < 0.98 * sum(losses(run_dir)[:10])
    base = AutoModelForCausalLM.from_pretrained(run_dir / "export" / "backbone")
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    model = peft.PeftModel.from_pretrained(base, run_dir / "export" / "adapters" / "backbone")
    assert any(weight.any() for name, weight in model.state_dict().items() if "lora_B" in name)
    changed = model.merge_and_unload().state_dict()
    assert {name for name in before if not torch.equal(before[name], changed[name])} == {
        name for name in before if name.endswith("_proj.weight")
    }
    assert load_recipe(run_dir / "recipe.toml").model.lora["backbone"].rank == 4


def predicted(monkeypatch, capsys, job, *overrides):
    sets = [part for override in overrides for part in ("--set", override)]
    monkeypatch.setattr("sys.argv", ["motet", "train", str(job), *sets, "--dry-run", "--json", "-"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    return json.loads(capsys.readouterr().out)


def test_a_dry_run_knows_what_learns(tmp_path, monkeypatch, capsys):
    job = write_tiny_job(tmp_path / "data")
    parts = [
        f"model.encoders.{name}.train_{part}=false" for name in ("image", "audio") for part in ("encoder", "projector")
    ]
    lora = predicted(monkeypatch, capsys, job, *parts, 'model.lora.backbone={ rank = 4, targets = ["q_proj"] }')
    memory, num_ranks = lora["memory_bytes"], len(lora["ranks"])
    num_learned = 2 * 4 * (32 + 32)  # Of two layers' adapters, in float32; AdamW has two moments.
    assert sum(memory["gradients"]) == pytest.approx(4 * num_learned, abs=8 * num_ranks)
    assert sum(memory["optimizer"]) == pytest.approx(8 * num_learned, abs=8 * num_ranks)
    whole = predicted(monkeypatch, capsys, job, *parts)
    assert sum(whole["memory_bytes"]["gradients"]) > 10 * sum(memory["gradients"])
    assert lora["bound_s"] < 0.8 * whole["bound_s"]  # Backward computes gradients of inputs alone.


def test_a_run_that_could_not_export_is_refused_before_it_starts(tmp_path, monkeypatch):
    job = write_tiny_job(tmp_path / "data")
    recipe = load_recipe(job, ["model.lora.backbone={ rank = 4 }", "export.at_end=true"])
    check_export(recipe)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        UserError, match=r"export.adapter = \"saved\" needs the package peft, .*pip install 'motet\[lora\]'"
    ):
        check_export(recipe)
    check_export(load_recipe(job, ["model.lora.backbone={ rank = 4 }", 'export={ at_end = true, adapter = "merged" }']))
    with pytest.raises(UserError, match=r"export.adapter = 'merged' has no effect without \[model.lora\]"):
        load_recipe(job, ["export.adapter=merged"])
