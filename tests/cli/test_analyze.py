"""`motet analyze RECIPE.toml`: a recipe's data, in the unit and by the costs that its training balances by."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from cli.tiny_job import write_tiny_job
from motet.analyze import analyze
from motet.analyze.loads import take
from motet.balance import METHODS
from motet.cli import main
from motet.core.workload import BACKBONE
from motet.cost.flops import batch_flops
from motet.data.text import ChatTokenizer
from motet.models.build import build_mllm
from motet.models.spec import model_spec
from motet.planning.analyze_recipe import read_subject
from motet.train.balancing import build_orchestrator
from motet.train.recipe.recipe_file import load_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_tiny_job(tmp_path_factory.mktemp("job") / "data")


def model_of(recipe, overrides=()):
    read = load_recipe(recipe, overrides)
    return read, build_mllm(read.model, ChatTokenizer.from_directory(read.data.tokenizer).vocabulary_size)


@pytest.mark.parametrize("overrides", [(), ("balance.cost=length",), ("fsdp.recompute=true",)])
def test_loads_are_those_that_training_would_log(recipe, overrides):
    overrides = (*overrides, "run.device=cpu", "run.batch_size=12", "run.microbatches=2")
    subject, num_examples = read_subject(recipe, overrides)
    assert num_examples == 6
    found = analyze(subject, num_ranks=2, batch_size=num_examples, num_batches=3, seed=4)
    rng, (read, model) = np.random.default_rng(4), model_of(recipe, overrides)
    orchestrator = build_orchestrator(
        read.balance,
        model,
        2,
        torch.device("cpu"),
        torch.float32,
        recompute=read.fsdp.recomputed(model_spec(model).num_blocks),
    )
    chosen = []
    for number in range(3):
        drawn = rng.integers(0, subject.lengths.batch.num_examples, num_examples)
        decision = orchestrator.decide(take(subject.lengths.batch, drawn, 2))
        chosen.append(decision.method)
        for phase, before in decision.before.items():
            loads = found.loads[phase]
            assert loads.loads["off"][number].tolist() == before.loads.tolist()
            assert loads.unit == decision.costs.unit(phase)
        assert found.steps.seconds["chosen"][number] == decision.predicted_s[decision.method]
    assert found.steps.methods == {method: chosen.count(method) for method in METHODS if method in chosen}


def test_loads_are_operations(recipe):
    subject, _ = read_subject(recipe)
    whole = replace(subject, lengths=replace(subject.lengths, batch=subject.lengths.batch.take(np.arange(4))))
    found = analyze(whole, num_ranks=1, batch_size=5, num_batches=1)
    drawn = np.random.default_rng(0).integers(0, 4, 5)
    exact = batch_flops(model_spec(model_of(recipe)[1]), whole.lengths.batch.take(drawn))
    assert found.loads[BACKBONE].loads["off"].sum() == exact[BACKBONE]
    assert {loads.unit for loads in found.loads.values()} == {"FLOP"}


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command: (exit code, stdout in one line, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["motet", "analyze", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        said = capsys.readouterr()
        return exit_.value.code or 0, " ".join(said.out.split()), said.err.strip()

    return run


def test_a_recipe_is_analysed_by_its_own_model(run, recipe, tmp_path):
    code, out, _ = run(recipe, "--ranks", 2, "--batches", 3, "--html", tmp_path / "page.html")
    assert code == 0
    for said in ("3 batches of 6 examples", "operations of the recipe's model", "It is in FLOP.", "400 TFLOP/s a rank"):
        assert said in out
    assert "backbone, FLOP" in (tmp_path / "page.html").read_text()
    code, out, _ = run(recipe, "--ranks", 2, "--batch-size", 9, "--batches", 2, "--set", "balance.cost=length")
    assert code == 0 and "2 batches of 9 examples" in out and "Balanced on lengths; with balance.cost" in out


def test_wrong_use_is_one_sentence_with_exit_code_2(run, recipe, tmp_path):
    manifest, planned = recipe.parent / "train.jsonl", tmp_path / "planned.toml"
    planned.write_text("[run]\nbatch_size = 8\n")
    for arguments, said in (
        ((recipe, "--tokenizer", tmp_path), "--tokenizer is for a manifest"),
        ((manifest, "--set", "run.seed=1"), "--set is for a recipe"),
        ((planned,), "has neither [data] nor [workload] to analyse"),
        ((recipe, "--set", "balance.cost=profile"), "Cannot read the profile"),
    ):
        code, _, error = run(*arguments)
        assert code == 2 and said in error and "\n" not in error
