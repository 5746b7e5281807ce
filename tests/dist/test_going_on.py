"""A run that stops under one kind of Plan goes on under every other, also at another number of ranks."""

from dataclasses import replace
from itertools import permutations

import pytest

from cli.tiny_job import losses, metrics
from dist.test_planned import DEEPER, FEW_CUTS, FOUR_STAGES, plan_of, run_planned, train_under
from motet.core.plan import Unit
from motet.cost.catalogue import cluster
from motet.train.checkpoint.contents import name_of
from ranks import run_ranks

WHOLE = {"image": 2, "audio": 2, "backbone": 3}
HALVES = ({"backbone": 1}, {"backbone": 2})
FOUR = "interleaved, 4 ranks"
PLANS = {
    "data parallel": ((Unit("all", (WHOLE,), dp=2, zero=3),), "data_parallel"),
    "chain": ((Unit("all", FEW_CUTS, pp=2),), "1f1b"),
    "zb_v": ((Unit("all", FOUR_STAGES, pp=2),), "zb_v"),
    "bubbles": (
        (*(Unit(name, ({name: 2},), dp=2, zero=0) for name in ("image", "audio")), Unit("llm", HALVES, pp=2, zero=0)),
        "1f1b",
    ),
    "disaggregated, 3 ranks": (
        (Unit("encoders", ({"image": 2, "audio": 2},)), Unit("llm", ({"backbone": 3},), first_rank=1, dp=2, zero=2)),
        "1f1b",
    ),
    FOUR: ((Unit("all", FOUR_STAGES, dp=2, pp=2, zero=1),), "interleaved_1f1b"),
}
SHORT = {("bubbles", "disaggregated, 3 ranks"), (FOUR, "data parallel")}


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("alone")
    run_ranks(train_under, 1, str(job), [*DEEPER, f"run.dir={run_dir}"], None)
    return losses(run_dir)


@pytest.fixture(scope="module")
def stopped(job, alone, tmp_path_factory):
    """The checkpoint of half a run under a Plan, which is made when it is first asked for."""
    made = {}

    def under(name):
        if name not in made:
            made[name] = run_under(job, tmp_path_factory.mktemp("stopped"), name) / "checkpoints" / name_of(4)
        return str(made[name])

    return under


def run_under(job, folder, name, **options):
    units, schedule = PLANS[name]
    dp = units[-1].dp
    num_ranks = max(unit.ranks.stop for unit in units)
    plan = plan_of(job, (WHOLE,), dp=dp)
    where = replace(cluster("h100", 1, num_ranks), device=plan.cluster.device)
    plan = replace(plan, cluster=where, units=units, schedule=schedule, microbatch_size=2 // dp)
    return run_planned(job, folder, plan, **options)


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=[] if pair in SHORT else pytest.mark.slow) for pair in permutations(PLANS, 2)],
)
def test_a_run_under_any_plan_goes_on_under_any_other(job, alone, stopped, tmp_path, before, after):
    run_dir = run_under(job, tmp_path, after, resume=stopped(before))
    assert [step["loss"] for step in metrics(run_dir)] == pytest.approx(alone[4:], rel=1e-10)
