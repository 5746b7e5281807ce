"""A plan that runs out of memory runs with more recomputation: with a real limit on a real process, and in numbers."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from cli.tiny_job import write_tiny_job
from motet.planner.candidate import Candidate, predict_candidate
from motet.planner.search_result import SimulatedCandidate
from motet.planning import measure
from motet.planning.cluster import ClusterOptions
from motet.planning.job import JobOptions
from motet.planning.measure import MeasuredPlan, Steps, measure_plan, run_steps
from motet.planning.measured_memory import BlockFigures, Refitted, recompute_more
from motet.planning.plan_of_recipe import read_recipe_as_plan
from motet.planning.trial import open_trials
from motet.train.recipe.recipe_file import load_recipe
from motet.train.world import join_world
from ranks import run_ranks

NUM_LAYERS, NUM_ROWS, MLP = 12, 3000, 512
# The MLP keeps four tensors of [rows, 512] in float32: 25 MB a layer, 295 MB in all.
KEPT_BYTES = 4 * 4 * NUM_ROWS * MLP * NUM_LAYERS
LARGER = (
    f"model.backbone.config.num_hidden_layers={NUM_LAYERS}",
    f"model.backbone.config.intermediate_size={MLP}",
    "data.heldout=[]",
    'cluster={ device = "cpu", ranks_per_node = 1, memory_gbytes = 8 }',
)


def limited_steps(meeting, steps):
    """One real step in a process that may take 75 % of what its layers keep, beyond what it has when all is built."""
    build_job, measure.WARM_UP, measure.REPEATS = measure.build_job, 0, 1
    # Freed memory that the heap keeps would count as taken: as much as two of the twelve layers, by chance.
    os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"

    def build_and_limit(*arguments):
        job = build_job(*arguments)
        words = Path("/proc/self/status").read_text().split()
        limit = 1024 * int(words[words.index("VmData:") + 1]) + int(0.75 * KEPT_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return job

    measure.build_job = build_and_limit
    return run_steps(meeting, steps)


def measured(rank, num_ranks, recipe, figures):
    steps = Steps(recipe, np.arange(recipe.run.batch_size))
    with join_world("cpu") as world, open_trials(world, __name__) as trials:
        return measure_plan(trials, steps, figures, limited_steps)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    """A job of texts alone, of 3,000 tokens a step."""
    file = write_tiny_job(tmp_path_factory.mktemp("job") / "data")
    turns = [{"from": "human", "value": "say " + "a" * (NUM_ROWS // 6 - 6)}, {"from": "gpt", "value": "a"}]
    file.with_name("train.jsonl").write_text((json.dumps({"conversations": turns}) + "\n") * 6)
    return file


@pytest.mark.slow
def test_out_of_memory_in_real_steps_is_met_with_more_recomputation(recipe_file):
    recipe = load_recipe(recipe_file, LARGER)
    plan, job = read_recipe_as_plan(recipe_file, LARGER, JobOptions(ClusterOptions()))
    figures = BlockFigures.of(job, plan)
    assert figures.every == {"backbone": NUM_LAYERS}
    (found,) = run_ranks(measured, 1, recipe, figures)
    refitted = found.refitted
    assert 2 <= refitted.recompute["backbone"] <= NUM_LAYERS and refitted.num_failed >= 1
    assert found.step_s > 0
    # In float32 on a CPU, the memory model is within a factor of two of what a block saves.
    assert 0.5 < refitted.corrections["backbone"] < 2
    said = str(refitted)
    assert said.startswith("It ran out of memory") and f"{refitted.recompute['backbone']} of backbone" in said


def test_what_was_planned_is_not_told_of_a_plan_that_recomputes_more(recipe_file):
    plan, job = read_recipe_as_plan(recipe_file, LARGER, JobOptions(ClusterOptions()))
    candidate = Candidate("data parallel", "DP 1", plan, 1.0, tell=lambda: ("Recomputes 1 of 12 layers of backbone.",))
    ran = MeasuredPlan(1.0, 10**9, Refitted({"backbone": 4}, 10**9, {"backbone": 1.0}, num_failed=1))
    found = measure._measured_candidate(job, SimulatedCandidate(candidate, predict_candidate(job, candidate)), ran)
    (fact,) = found.candidate.facts
    assert fact.startswith("It ran out of memory") and found.candidate.plan.units[0].recompute == ({"backbone": 4},)


def figures_of(rng, num_blocks):
    return BlockFigures(
        {name: np.full(count, rng.uniform(1, 3)) for name, count in num_blocks.items()},
        {name: np.full(count, float(rng.integers(50, 200))) for name, count in num_blocks.items()},
        capacity_bytes=10**9,
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_runs_in_the_end_fits_after_few_runs(seed):
    """A device whose blocks save other bytes than predicted: corrections are exact, and what is chosen fits it."""
    rng = np.random.default_rng(seed)
    num_blocks = {"image": int(rng.integers(1, 9)), "backbone": int(rng.integers(2, 30))}
    figures, factor = figures_of(rng, num_blocks), {name: rng.uniform(0.5, 2) for name in num_blocks}
    saves = {name: column * factor[name] for name, column in figures.saved_bytes.items()}
    none_bytes = 1000 + sum(column.sum() for column in saves.values())
    really = rng.uniform(1000, none_bytes - 1)
    runs = []

    def peak_of(numbers):
        return int(none_bytes - sum(saves[name][:count].sum() for name, count in numbers.items()))

    def run(numbers):
        runs.append(dict(numbers))
        return peak_of(numbers) if peak_of(numbers) <= really else None

    found = recompute_more(run, figures, {})
    assert peak_of(found.recompute) <= really and found.peak_bytes == peak_of(found.recompute)
    assert all(found.corrections[name] == pytest.approx(factor[name], rel=0.05) for name in found.corrections)
    assert found.num_failed >= 1 and len(runs) <= 5 + np.log2(sum(num_blocks.values())) + 2


def test_nothing_more_than_everything_is_recomputed():
    figures = figures_of(np.random.default_rng(0), {"image": 2, "backbone": 4})
    assert recompute_more(lambda numbers: None, figures, {}) is None
    # All that keeps anything fails: everything is the answer.
    only = recompute_more(lambda numbers: 7 if numbers == figures.every else None, figures, {})
    assert (only.recompute, only.corrections, only.peak_bytes) == (figures.every, {}, 7)


def test_a_module_that_seems_to_save_nothing_is_recomputed_in_the_end():
    """Noise can hide what a module saves. Then no choice by the model is more than the one that failed."""
    figures = figures_of(np.random.default_rng(1), {"image": 4, "backbone": 4})
    tried = []

    def run(numbers):
        tried.append(numbers)
        if numbers["backbone"] == 4 or len(tried) <= 5:
            return 1000 + 100 * (4 - numbers["image"])
        return None

    found = recompute_more(run, figures, {})
    assert found.corrections["backbone"] == 0 and found.recompute == figures.every
