"""What `motet train --trace` executed is the row of the recipe's Program, action for action, on every rank."""

import json
import sys
from pathlib import Path

import pytest

from motet.assign.step import joined
from motet.cli import main
from motet.planning.cluster import ClusterOptions
from motet.planning.job import JobOptions
from motet.planning.plan_of_recipe import read_recipe_as_plan
from motet.runtime.step import TrainStep
from motet.schedule import Kind, executed_program
from motet.train.recipe.recipe_file import load_recipe
from motet.train.trainer import train
from ranks import run_ranks

NUM_RANKS, NUM_MICROBATCHES = 2, 3
NAMES = ("image", "audio", "backbone")
HERE = JobOptions(ClusterOptions("cpu", 1, NUM_RANKS), None, None)
FROZEN = ("model.encoders.image.train_encoder=false", "model.encoders.image.train_projector=false")


def train_rank(rank, num_ranks, recipe, overrides):
    """Lengths and Assignments of each microbatch of each step."""
    steps, run = [], TrainStep.run

    def recorded(self, batches, step=0):
        steps.append([(batch.lengths, batch.decision.assignments) for batch in batches])
        return run(self, batches, step)

    TrainStep.run = recorded
    train(load_recipe(Path(recipe), overrides), trace=True)
    return steps


def traced(run_dir):
    """By rank and step, the actions of timeline.json as (text, kind, microbatch)."""
    found = {}
    for span in json.loads((run_dir / "timeline.json").read_text()):
        spans = found.setdefault((span["rank"], span["step"]), [])
        spans.append((span["start_s"], span["action"], span["kind"], span["microbatch"]))
    return {key: [span[1:] for span in sorted(spans)] for key, spans in found.items()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("balance.method=per_phase",), marks=pytest.mark.slow),
        pytest.param(("balance.method=per_phase", *FROZEN), marks=pytest.mark.slow),
        pytest.param(("balance.method=per_phase", "model.backbone.train=false", *FROZEN), marks=pytest.mark.slow),
        ("balance.phases=off", "fsdp.shard_size=1"),
        pytest.param(("balance.method=auto",), marks=pytest.mark.slow),
    ],
    ids=["all trainable", "image frozen", "audio alone trainable", "not balanced, not sharded", "auto"],
)
def test_trace_and_program_have_the_same_actions(job, tmp_path, options):
    overrides = [f"run.dir={tmp_path}", "data.heldout=[]", f"run.microbatches={NUM_MICROBATCHES}", *options]
    steps, *_ = run_ranks(train_rank, NUM_RANKS, str(job), overrides)
    plan, _ = read_recipe_as_plan(job, overrides, HERE)
    found, absent = traced(tmp_path), set()
    assert len(found) == NUM_RANKS * len(steps)
    for number, microbatches in enumerate(steps):
        assignment = joined(*map(list, zip(*microbatches, strict=True)))
        program = executed_program(plan, assignment.present)
        for rank in range(NUM_RANKS):
            row = program.actions[rank]
            assert found[rank, number] == [(str(action), action.kind, action.microbatch) for action in row]
            ran = {(program.stages[a.stage].module, a.microbatch) for a in row if a.kind is Kind.F}
            absent |= {name for name in NAMES for i in range(NUM_MICROBATCHES) if (name, i) not in ran}
    assert absent == {"image", "audio"}, "a test of absent modalities needs microbatches that lack them"


@pytest.mark.slow
def test_simulate_prints_the_row_that_each_rank_executed(job, tmp_path, monkeypatch, capsys):
    """Where every example has everything and stays where it is, all steps are alike."""
    both = [line for line in (job.parent / "train.jsonl").read_text().splitlines() if '"both"' in line]
    (job.parent / "both.jsonl").write_text("\n".join(both) + "\n")
    overrides = [
        f"run.dir={tmp_path}", "data.heldout=[]", f'data.train=["{job.parent}/both.jsonl"]', "balance.phases=off",
        "run.microbatches=3", "run.steps=3", *FROZEN,
    ]  # fmt: skip
    run_ranks(train_rank, NUM_RANKS, str(job), overrides)
    found = traced(tmp_path)
    for rank in range(NUM_RANKS):
        given = ["motet", "simulate", str(job), "--ranks-per-node", str(NUM_RANKS), "--actions", str(rank)]
        monkeypatch.setattr(sys, "argv", [*given, *(word for one in overrides for word in ("--set", one))])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert not exit_.value.code
        heading, *lines = capsys.readouterr().out.splitlines()
        assert heading.startswith(f"# rank {rank}, ")
        for step in range(3):
            assert [line.split()[0] for line in lines] == [name for name, _, _ in found[rank, step]]
        times = [tuple(map(float, line.split()[1:3])) for line in lines]
        assert times == sorted(times) and all(start <= end for start, end in times)
