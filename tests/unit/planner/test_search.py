"""The search: the same answer every time, never worse than simulating everything, and never slower for more memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.sampler import Sampler
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.analytic import Analytic
from motet.cost.catalogue import cluster
from motet.planner import partition
from motet.planner import strategies as real
from motet.planner.candidate import Candidate, Pins, PruningStrategy, RuledOut, predict_candidate
from motet.planner.evaluation import Quota
from motet.planner.job import Job
from motet.planner.report import COLUMNS, print_result
from motet.planner.search import search as refined_search
from motet.planner.search_result import nothing_fits
from motet.planner.variants import fastest_variant

search = partial(refined_search, is_refined=False)
"""The choice among what strategies propose, which is what these tests are of."""

SAMPLER = Sampler.model_validate(
    {
        "task": [
            {
                "name": "images",
                "text": {"median": 200, "spread": 0.6, "max": 2000},
                "items": {"image": {"length": {"median": 500, "spread": 0.5}, "length_per_token": 4}},
            }
        ]
    }
)
MODEL = multimodal(
    "tiny",
    language_model(Transformer(1024, 4096, 8, causal=True), 8, 32_000),
    [connect(vit("image", Transformer(512, 2048, 8), 8), 1024, downsample=4)],
)


def job_on(memory_bytes: int = 80 * 10**9) -> Job:
    eight = cluster("h100")
    eight = replace(eight, device=replace(eight.device, memory_bytes=memory_bytes))
    return Job(MODEL, eight, SAMPLER.workload(num_examples=1000), 64, Analytic(eight))


def work_s(job: Job) -> float:
    """Of the whole batch, on all ranks together, without tensor parallelism."""
    costs = [job.block_costs(module.name, job.batch_size) for module in job.model.modules]
    return sum(float((each.forward_s + each.backward_s).sum()) for each in costs)


class Chains:
    """Chains of 1, 2, 4 and 8 stages, cut by the seconds of their layers."""

    def __init__(self, name: str, schedule: str) -> None:
        self.name, self.schedule = name, schedule

    def __call__(self, job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
        for pp, microbatch_size in product((1, 2, 4, 8), (1, 2, 4)):
            if pins.allow(pp=pp, microbatch_size=microbatch_size, schedule=self.schedule, tp=1, dp=8 // pp):
                yield self._chain(job, pp, microbatch_size)

    def _chain(self, job: Job, pp: int, microbatch_size: int) -> Candidate | RuledOut:
        names = [module.name for module in job.model.modules for _ in module.blocks]
        costs = [job.block_costs(module.name, microbatch_size) for module in job.model.modules]
        seconds = [s for each in costs for s in each.forward_s + each.backward_s]
        stages, first, slowest_s = [], 0, 0.0
        for count in partition(seconds, pp):
            held = names[first : first + count]
            stages.append({name: held.count(name) for name in dict.fromkeys(held)})
            slowest_s = max(slowest_s, sum(seconds[first : first + count]))
            first += count
        unit = Unit("all", tuple(stages), dp=8 // pp, pp=pp)
        plan = Plan(job.model, job.cluster, (unit,), job.batch_size, microbatch_size, self.schedule)
        num_microbatches = job.batch_size * pp // (8 * microbatch_size)
        what = f"PP {pp}, {microbatch_size} examples a microbatch"
        estimate_s = (num_microbatches + pp - 1) * slowest_s
        # Priced one by one, examples take longer than in larger microbatches; so half is below all of them.
        candidate = Candidate(self.name, what, plan, estimate_s, bound_s=0.5 * work_s(job) / 8)
        shortfall_bytes = float(predict_candidate(job, candidate).peak_bytes.max()) - job.capacity_bytes
        if shortfall_bytes > 0:
            return RuledOut(self.name, what, f"lacks {shortfall_bytes / 1e9:.2f} GB", shortfall_bytes)
        return candidate


AS_GIVEN = Pins(order="given", balance="off")
"""What `brute_force` simulates."""
STRATEGIES = {"chain": Chains("chain", "1f1b"), "gpipe": Chains("gpipe", "gpipe")}


@pytest.fixture
def without_remedies(monkeypatch):
    """What would make a job fit, for which a search that finds nothing goes on, is of `test_nearest_miss.py`."""
    monkeypatch.setattr("motet.planner.search.would_fit", lambda *arguments: ())


def told(found) -> list[tuple[str, str, float]]:
    return [(each.candidate.strategy, each.candidate.what, each.prediction.step_s) for each in found.results]


def brute_force(job: Job, strategies) -> float:
    """The fastest step of everything that is proposed."""
    proposed = [each for strategy in strategies.values() for each in strategy(job, Pins())]
    steps = [predict_candidate(job, each).step_s for each in proposed if isinstance(each, Candidate)]
    return min(steps, default=float("inf"))


@pytest.fixture(scope="module")
def proposed() -> tuple[Job, list[Candidate], float]:
    job, strategies = job_on(), {"chain": STRATEGIES["chain"]}
    return job, list(strategies["chain"](job, Pins())), brute_force(job, strategies)


def test_the_same_answer_every_time():
    found = search(job_on(), STRATEGIES)
    assert told(found) == told(search(job_on(), STRATEGIES))
    assert [each.prediction.step_s for each in found.results] == sorted(each[2] for each in told(found))


@pytest.mark.parametrize("count", [1, 4, 99])
def test_as_many_as_are_wanted_are_simulated_and_they_are_the_fastest_of_their_kind(count):
    def suitable(plan: Plan) -> bool:
        return plan.schedule == "gpipe"

    job = job_on()
    every = sorted(predict_candidate(job, each).step_s for each in STRATEGIES["gpipe"](job, Pins()))
    given = AS_GIVEN
    found = search(job, STRATEGIES, given, max_simulated=None, quota=Quota(count, suitable))
    steps = [each.prediction.step_s for each in found.results if suitable(each.candidate.plan)]
    assert steps[:count] == every[:count]
    few = search(job, STRATEGIES, given, max_simulated=1, quota=Quota(count, suitable))
    assert sum(suitable(each.candidate.plan) for each in few.results) == min(count, len(every))
    assert len(few.results) == 1 + min(count, len(every))


def test_the_fastest_that_is_measured_comes_first():
    found = search(job_on(), STRATEGIES)
    best, second, third = (each.candidate.what for each in found.results[:3])
    measured = found.with_measured({0: 3.0, 1: None, 2: 2.0}, {3: "a pipeline"})
    assert [each.candidate.what for each in measured.results[:2]] == [third, best]
    assert [each.step_s for each in measured.results[:2]] == [2.0, 3.0]
    rest = [each.candidate for each in found.results[3:]]
    assert [each.candidate for each in measured.results[2:]] == rest
    assert [each.measured_s for each in measured.results[2:]] == [None] * len(rest)
    ruled = measured.ruled_out[-1]
    assert (ruled.what, ruled.why) == (second, "in a real step, a rank ran out of memory")
    with redirect_stdout(StringIO()) as printed:
        print_result(measured, Console(width=200))
    lines = printed.getvalue().splitlines()
    assert "predicted" in lines[1] and "measured" in lines[1]
    assert " 2 s " in lines[2] and " 3 s " in lines[3]
    assert "Training cannot run all plans yet, so these are only predicted: 1 with a pipeline." in lines
    assert any(
        line.startswith(f"It is 50% faster than {found.results[0].candidate.strategy} ({best})") for line in lines
    )


@pytest.mark.parametrize("width", [80, 100, 140, 400])
def test_figures_and_plans_stand_whole_at_every_width(width):
    found = search(job_on(), STRATEGIES)
    printed = StringIO()
    print_result(found, Console(file=printed, width=width))
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert all(title in lines[1] for title in COLUMNS[1:])
    rows = [" ".join(line.split()) for line in lines[2:]]
    for result in found.results:
        figures = f"{result.prediction.mfu:.1%} {result.prediction.peak_bytes.max() / 1e9:,.1f} "
        what = result.candidate.what
        one_line = any(what in row and figures in row for row in rows)
        assert one_line or (width < 400 and any(figures in row and what == below for row, below in pairwise(rows)))


def test_a_plan_that_cannot_run_on_the_cluster_is_ruled_out():
    def strategy(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
        for candidate in STRATEGIES["chain"](job, pins):
            size = 7 if "PP 8" in candidate.what else candidate.plan.microbatch_size
            yield replace(candidate, plan=replace(candidate.plan, microbatch_size=size))

    found = search(job_on(), {"chain": strategy}, max_simulated=None)
    assert found.results and "must be a multiple of" in found.ruled_out[0].why


def test_the_best_of_each_strategy_is_simulated_whatever_the_limit():
    found = search(job_on(), STRATEGIES, max_simulated=1)
    assert {each.candidate.strategy for each in found.results} == {"chain", "gpipe"}
    assert len(found.results) == 2
    assert len(found.results) + len(found.passed_over) == 24


@pytest.mark.slow
@settings(max_examples=10)
@given(wrong=st.lists(st.floats(0.2, 5), min_size=12, max_size=12))
def test_without_a_limit_nothing_that_is_passed_over_is_faster(proposed, wrong):
    """However wrong the estimates are, as long as the bounds are bounds."""
    job, candidates, fastest_s = proposed
    misjudged = [replace(each, estimate_s=each.estimate_s * factor) for each, factor in zip(candidates, wrong)]
    found = search(job, {"chain": lambda job, pins: iter(misjudged)}, AS_GIVEN, max_simulated=None)
    assert found.best.prediction.step_s == fastest_s


def test_bounds_prune():
    """A bound that is exact leaves nothing to simulate after the fastest."""

    def strategy(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
        for candidate in STRATEGIES["chain"](job, pins):
            step_s = predict_candidate(job, candidate).step_s
            yield replace(candidate, estimate_s=step_s, bound_s=step_s)

    found = search(job_on(), {"exact": strategy}, AS_GIVEN, max_simulated=None)
    assert len(found.results) == 1
    assert {passed.why for passed in found.passed_over} == {"bound"}
    assert found.best.prediction.step_s == brute_force(job_on(), {"exact": strategy})


@pytest.mark.slow
def test_more_memory_is_never_slower(without_remedies):
    steps = []
    for mbytes in (500, 700, 1000, 1500, 3000, 10_000):
        found = search(job_on(mbytes * 10**6), STRATEGIES, max_simulated=None)
        steps.append(found.best.prediction.step_s if found.results else float("inf"))
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) > 2


def test_what_needs_too_much_memory_in_simulation_is_ruled_out():
    def careless(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
        return STRATEGIES["chain"](job_on(), pins)

    found = search(job_on(10**9), {"careless": careless}, max_simulated=None)
    assert all(each.prediction.peak_bytes.max() <= job_on(10**9).capacity_bytes for each in found.results)
    assert any("in simulation it lacks" in ruled.why and ruled.shortfall_bytes > 0 for ruled in found.ruled_out)


def test_pins_choose_strategies_and_are_passed_on():
    found = search(job_on(), STRATEGIES, Pins(strategies=("gpipe",), pp=2))
    assert {each.candidate.strategy for each in found.results} == {"gpipe"}
    assert all(each.candidate.plan.units[0].pp == 2 for each in found.results)


def test_equal_plans_are_considered_once():
    found = search(job_on(), {"first": STRATEGIES["chain"], "second": STRATEGIES["chain"]}, max_simulated=None)
    assert len(found.results) + len(found.passed_over) == 12


@pytest.mark.parametrize("pinned", [False, True])
def test_who_is_informed_is_asked_last_and_told_what_to_beat(pinned):
    told = []

    def propose(job: Job, pins: Pins, faster_than_s: float) -> Iterator[Candidate | RuledOut]:
        told.append(faster_than_s)
        yield RuledOut("informed", "", "no better")

    pins = replace(AS_GIVEN, strategies=("informed", "chain") if pinned else ())
    found = search(job_on(), {"informed": PruningStrategy(propose), "chain": STRATEGIES["chain"]}, pins)
    assert told[0] == (float("inf") if pinned else found.best.prediction.step_s)
    assert found.ruled_out[-1].why == "no better"


def test_nothing_fits_names_the_nearest_miss(without_remedies):
    found = search(job_on(10**8), STRATEGIES)
    nearest = min(found.ruled_out, key=lambda ruled: ruled.shortfall_bytes)
    assert nearest.why in nothing_fits(found)
    with pytest.raises(UserError, match="Nothing fits for tiny in batches of 64 on 8 h100"):
        found.best  # noqa: B018


def test_a_strategy_that_cannot_price_a_plan_leaves_the_others_their_way():
    def unpriced(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
        raise UserError("The profile has no times of it.")
        yield

    found = search(job_on(), {"unpriced": unpriced, **STRATEGIES})
    assert found.ruled_out[0] == RuledOut("unpriced", "", "The profile has no times of it.")
    assert found.results


class WithoutTensorParallelism(Analytic):
    """As a profile that was made on one rank."""

    def layer_seconds(self, module, layer, work, tp=1):
        if tp > 1:
            raise UserError(f"There are no times at tensor parallelism {tp}.")
        return super().layer_seconds(module, layer, work, tp)


@pytest.mark.parametrize("name", ["data parallel", "chain", "modality parallel", "disaggregated"])
def test_without_times_of_tensor_parallelism_the_rest_is_searched(name):
    job = job_on()
    found = search(replace(job, cost=WithoutTensorParallelism(job.cluster)), {name: real.STRATEGIES[name]})
    assert {unit.tp for each in found.results for unit in each.candidate.plan.units} == {1}
    ruled = [each for each in found.ruled_out if each.strategy == "tensor parallelism"]
    assert [(each.what, each.why) for each in ruled] == [
        (f"TP {tp}", f"There are no times at tensor parallelism {tp}.") for tp in (2, 4, 8)
    ]


def test_a_workload_without_a_modules_lengths():
    text = Sampler.model_validate({"task": [{"name": "text", "text": {"value": 100}}]}).workload(num_examples=10)
    with pytest.raises(UserError, match="'image' needs lengths"):
        search(replace(job_on(), workload=text), STRATEGIES)


def test_plans_as_near_as_a_variant_gains_are_given_theirs():
    """So another one may win than was the fastest before, whatever else is searched beside it."""
    job = job_on()
    chains = {name: pipelines_of(strategy) for name, strategy in STRATEGIES.items()}
    as_given = search(job, chains, AS_GIVEN).results
    near = [one for one in as_given if one.prediction.step_s < 1.02 * as_given[0].prediction.step_s]
    assert Counter(one.candidate.strategy for one in near) == {"chain": 2, "gpipe": 2}
    found = {(name, what): step_s for name, what, step_s in told(search(job, chains))}
    for one in near:
        _, varied = fastest_variant(job, one.candidate, one.prediction, Pins())
        assert found[one.candidate.strategy, one.candidate.what] == varied.step_s < one.prediction.step_s


def pipelines_of(strategy: Chains):
    """What a strategy proposes on more than one stage."""
    return lambda job, pins: (one for one in strategy(job, pins) if not one.what.startswith("PP 1"))
