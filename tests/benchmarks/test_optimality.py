"""The enumerator: its bounds are bounds, its answer is a Plan that fits; and the planner's answer on two small jobs."""

import ast
import json

import pytest

from benchmark import BENCHMARKS, benchmark
from motet.core.errors import UserError
from motet.planner.candidate import Pins
from motet.planner.comparison import rivals
from motet.planner.variants import fastest_variant
from motet.planning.trainable import untrained
from motet.schedule import check_fit
from motet.simulate.predict.predict import assign_batch, predict_assigned

NUMBERS = (2, pytest.param(12, marks=pytest.mark.slow))
"""Two ranks in two nodes, and eight in one, of which the batch uses few."""


@pytest.fixture(scope="module")
def programs():
    with benchmark("optimality") as optimality, benchmark("enumerated_plans") as enumerated:
        yield optimality, enumerated, optimality.workload_at(None)


def test_the_enumerator_has_nothing_of_the_planner():
    tree = ast.parse((BENCHMARKS / "enumerated_plans.py").read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert imported and not [name for name in imported if name.startswith("motet.planner")]


@pytest.fixture(scope="module", params=NUMBERS)
def outcome(programs, request):
    optimality, _, workload = programs
    job = optimality.random_job(request.param, 0, workload)
    return job, optimality.outcome_of(request.param, job, optimality.answered(job), 60)


def test_the_answer_is_within_one_per_cent_of_the_best_that_is_enumerated(programs, outcome):
    _, one = outcome
    assert 1 <= one.loss <= programs[0].WITHIN


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (5, 12))])
def test_every_plan_that_is_found_trains(programs, number):
    """Job 5 has two nodes of three ranks, and Plans that leave some of the last node over."""
    optimality, _, workload = programs
    plans = [one.candidate.plan for one in optimality.answered(optimality.random_job(number, 0, workload)).results]
    assert not [(untrained(plan), optimality.words_of_plan(plan)) for plan in plans if untrained(plan)]
    assert number != 5 or any(len(plan.ranks) == 4 for plan in plans)


def test_bounds_of_a_stored_run_are_held_to_its_best_plans(programs, tmp_path):
    optimality, _, workload = programs
    bound = optimality.step_bound(optimality.random_job(2, 0, workload))
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps({"lengths": "sampled", "jobs": [{"number": 2, "best_s": 2 * bound.step_s}]}))
    rows = {row.name: row.value for row in optimality.bounds_of(stored, 0, workload)}
    assert rows["median best / bound"] == pytest.approx(2)
    assert rows[f"jobs whose bound is of {bound.term}"] == 1


def test_bounds_of_a_run_on_other_lengths_are_refused(programs, tmp_path):
    """Its jobs were others, though they have the same numbers."""
    optimality, _, workload = programs
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps({"lengths": "own.csv", "jobs": [{"number": 2, "best_s": 1.0}]}))
    with pytest.raises(SystemExit, match=r"has jobs with the lengths own\.csv, not sampled: give them by --lengths"):
        optimality.bounds_of(stored, 0, workload)


def test_lengths_that_are_not_there_are_said_to_be_sampled(programs, tmp_path, capsys):
    optimality, *_ = programs
    assert optimality.workload_at(tmp_path / "none.csv").source == "sampled"
    assert capsys.readouterr().err == f"{tmp_path / 'none.csv'} is not there: lengths are sampled.\n"


@pytest.mark.parametrize("number", NUMBERS)
def test_no_order_or_balance_is_below_the_bound(programs, number):
    optimality, enumerated, workload = programs
    job = optimality.random_job(number, 0, workload)
    small = enumerated.SmallJob(job.model, job.cluster, job.batch, job.cost, job.capacity_bytes)
    structures = sorted(enumerated._Structures(small, 1e9), key=lambda one: one[0])
    assert len(structures) > 20
    for bound_s, plan in structures[:: len(structures) // 12]:
        for made in (plan, *enumerated._dealt(plan)):
            try:
                check_fit(made)
            except UserError:
                continue
            prediction = predict_assigned(
                made, enumerated.planned(made), assign_batch(made, job.batch, job.cost), job.cost
            )
            assert bound_s <= prediction.step_s * (1 + 1e-9)


def test_the_space_has_every_context_degree_and_groups_under_caps(programs):
    """Job 1 has four ranks. What is grouped has no more groups than microbatches under its caps."""
    optimality, enumerated, workload = programs
    job = optimality.random_job(1, 0, workload)
    drawn = tuple(job.drawn(number) for number in range(1, 4))
    small = enumerated.SmallJob(job.model, job.cluster, job.batch, job.cost, job.capacity_bytes, drawn)
    plans = [plan for _, plan in enumerated._Structures(small, 1e9)]
    assert {unit.cp for plan in plans for unit in plan.units} == {1, 2, 3, 4}
    grouped = [made for plan in plans[:: len(plans) // 12] for made in enumerated._grouped(small, plan)]
    assert {made.order for made in grouped} == {"given", "both"}
    for made in grouped:
        check_fit(made)
        sizes = {name: enumerated.total_lengths(job.batch, name) for name in made.microbatch_caps}
        most = made.batch_size // made.microbatch_size
        assert enumerated.groups_under(made.microbatch_caps, sizes, most) is not None


@pytest.mark.parametrize("number", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_the_answer_and_what_it_is_compared_with_have_no_faster_variant(programs, number):
    """Refinement makes other Plans the rivals: in job 1, a Plan by modality that "both" makes 11 % faster."""
    optimality, _, workload = programs
    job = optimality.random_job(number, 0, workload)
    result = optimality.answered(job)
    for one in (result.best, *rivals(result.results)):
        _, varied = fastest_variant(job, one.candidate, one.prediction, Pins())
        assert varied.step_s >= one.prediction.step_s * (1 - 1e-9)


@pytest.mark.slow
def test_a_slow_answer_is_found_out(programs):
    optimality, enumerated, workload = programs
    job = optimality.random_job(2, 0, workload)
    small = enumerated.SmallJob(job.model, job.cluster, job.batch, job.cost, job.capacity_bytes)
    best_s = optimality.answered(job).best.prediction.step_s
    found = enumerated.enumerate_plans(small, 1.3 * best_s, 30)
    assert found.plan is not None and found.step_s < 1.3 * best_s
    assert optimality.words_of_plan(found.plan)
