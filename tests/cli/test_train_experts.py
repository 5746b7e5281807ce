"""`motet train` of backbones with experts: on one rank and on two, resumed on another number, in stages, exported."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.tiny_job import losses
from motet.cli import main
from motet.dispatch import PackedSequences
from motet.models.build import BackboneConfig, build_backbone
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 16, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}


def overrides_of(family: str, *more: str) -> list[str]:
    options = EXPERTS[family] | BALANCED
    config = [f"model.backbone.config.{key}={json.dumps(value)}" for key, value in options.items()]
    return [f"model.backbone.family={family}", *config, "run.dtype=float64", "data.heldout=[]", *more]


def train_rank(rank: int, num_ranks: int, recipe: str, overrides: list[str]) -> None:
    train(load_recipe(Path(recipe), overrides))


@pytest.mark.slow
@pytest.mark.parametrize("family", EXPERTS)
def test_ranks_and_a_resume_change_no_loss_and_the_export_is_transformers(job, tmp_path, family):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    saved = ["checkpoint.every_steps=2", "export.at_end=true"]
    run_ranks(train_rank, 1, str(job), overrides_of(family, f"run.dir={whole}", "run.steps=4"))
    run_ranks(train_rank, 2, str(job), overrides_of(family, f"run.dir={resumed}", "run.steps=2", *saved))
    run_ranks(train_rank, 1, str(job), overrides_of(family, f"run.dir={resumed}", "run.steps=4", *saved))
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-9)

    directory = resumed / "export" / "backbone"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert model.config.output_router_logits is True
    backbone = build_backbone(BackboneConfig(family=family, path=directory), 1, torch.float32, 0)
    tokens = torch.arange(5, 12)
    packed = PackedSequences(tokens, tokens > 8, torch.tensor([0, len(tokens)], dtype=torch.int32), {})
    with torch.no_grad():
        logits = backbone.logits(backbone.hidden_states(packed, {}))
        torch.testing.assert_close(logits, model(tokens[None]).logits[0], rtol=1e-5, atol=1e-5)


def motet(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """Exit code and what it says in stderr."""
    monkeypatch.setattr(sys, "argv", ["motet", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    return exit_.value.code or 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "pins",
    [
        pytest.param(["strategy=chain", "pp=2", "schedule=1f1b"], marks=pytest.mark.slow),
        pytest.param(["strategy=chain", "dp=2", "pp=1", "backbone.ep=2"], marks=pytest.mark.slow),
        ["strategy=data parallel", "backbone.ep=2"],
    ],
)
def test_stages_and_ranks_that_share_experts_change_no_loss(job, tmp_path, monkeypatch, capsys, pins):
    plan, whole, planned = tmp_path / "plan.json", tmp_path / "whole", tmp_path / "planned"
    options = overrides_of("qwen3_moe", "run.steps=2", "model.backbone.config.num_hidden_layers=3")
    sets = [word for each in options for word in ("--set", each)]
    pinned = [word for pin in pins for word in ("--pin", pin)]
    words = ["--ranks-per-node", "2", "--trainable", "--no-what-if", *pinned, "--out", str(plan)]
    assert motet(monkeypatch, capsys, "plan", str(job), *sets, *words)[0] == 0
    assert [unit.get("ep", 1) for unit in json.loads(plan.read_text())["units"]] == [
        2 if "backbone.ep=2" in pins else 1
    ]
    run_ranks(train_rank, 1, str(job), [*options, f"run.dir={whole}"])
    run_ranks(train_rank, 2, str(job), [*options, f"run.dir={planned}", f"run.plan={plan}"])
    assert losses(planned) == pytest.approx(losses(whole), rel=1e-9)
