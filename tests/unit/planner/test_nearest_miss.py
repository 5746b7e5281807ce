"""What is said to make a job fit does: each phrase is held against the Plan that it promises."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from motet.planner.candidate import Candidate, Pins, PruningStrategy, RuledOut
from motet.planner.job import Job
from motet.planner.nearest_miss import nearest_miss, would_fit
from motet.planner.search import search
from motet.planner.search_result import SearchResult, nothing_fits
from motet.planner.strategies import STRATEGIES
from unit.planner.jobs import job

PINNED = {
    "recompute": (Pins(strategies=("chain",), pp=2, tp=1, dp=4, microbatch_size=1, recompute="none"), 350),
    "tp": (Pins(strategies=("chain",), tp=1, pp=1), 350),
    "dp": (Pins(strategies=("modality parallel",), tp=1, pp=1, dp=2), 400),
    "replicas": (Pins(strategies=("data parallel",), dp=2, tp=1), 400),
    "units": (Pins(strategies=("disaggregated",), pp=1, tp=1), 350),
}


def searched(pins: Pins, memory_mbytes: float) -> SearchResult:
    return search(job(memory_mbytes=memory_mbytes), STRATEGIES, pins)


def fits(remedy: str, given: Job, pins: Pins) -> bool:
    """Whether the strategy has a Plan if the job, or what is pinned, is as the phrase says."""
    if match := re.fullmatch(r"(\d+) nodes", remedy):
        cluster = replace(given.cluster, num_nodes=int(match[1]))
        given = replace(given, cluster=cluster, cost=given.cost.on(cluster))
    elif match := re.fullmatch(r"(TP|PP|DP) (\d+)", remedy):
        pins = replace(pins, **{match[1].lower(): int(match[2])})
    elif match := re.fullmatch(r"microbatches of (\d+)", remedy):
        pins = replace(pins, microbatch_size=int(match[1]))
    elif match := re.fullmatch(r"recomputation of (\d+) layers?", remedy):
        plans = [one.plan for one in STRATEGIES[pins.strategies[0]](given, replace(pins, recompute="least"))
                 if isinstance(one, Candidate)]  # fmt: skip
        counts = [sum(sum(stage.values()) for unit in plan.units for stage in unit.recompute) for plan in plans]
        return int(match[1]) in counts
    elif match := re.fullmatch(r"strategy '(.+)'", remedy):
        pins = replace(pins, strategies=(match[1],))
    else:
        raise AssertionError(remedy)
    return any(isinstance(one, Candidate) for one in STRATEGIES[pins.strategies[0]](given, pins))


@pytest.mark.parametrize(
    "pinned", [pytest.param(name, marks=() if name in ("tp", "units") else pytest.mark.slow) for name in PINNED]
)
def test_what_is_said_to_make_it_fit_does(pinned):
    pins, memory_mbytes = PINNED[pinned]
    found = searched(pins, memory_mbytes)
    assert not found.results and found.remedies
    for remedy in found.remedies:
        assert fits(remedy, found.job, pins), remedy
    assert nothing_fits(found).endswith(f"; fits with {' or '.join(found.remedies)}.")


def test_the_layers_that_would_have_to_be_recomputed_are_counted():
    pins, memory_mbytes = PINNED["recompute"]
    (plan,) = (one.plan for one in STRATEGIES["chain"](job(memory_mbytes=memory_mbytes), replace(pins, recompute=None))
               if isinstance(one, Candidate) and one.plan.schedule == "1f1b")  # fmt: skip
    counts = [sum(stage.values()) for stage in plan.units[0].recompute]
    (phrase, *_) = searched(replace(pins, schedule="1f1b"), memory_mbytes).remedies
    assert phrase == f"recomputation of {sum(counts)} layers"


def test_a_value_that_is_let_go_is_replaced_by_one_with_all_other_pins():
    pins = Pins(strategies=("chain",), pp=8, balance="split")
    found = search(job(batch_size=8), {"chain": STRATEGIES["chain"]}, pins, is_refined=False)
    assert not found.results
    assert found.remedies and "PP 8" not in found.remedies
    (degree,) = (remedy for remedy in found.remedies if remedy.startswith("PP "))
    again = replace(pins, pp=int(degree.removeprefix("PP ")))
    assert search(job(batch_size=8), {"chain": STRATEGIES["chain"]}, again, is_refined=False).results


def test_with_nothing_pinned_more_nodes_are_what_is_left():
    found = searched(Pins(), 120)
    assert not found.results
    (remedy,) = found.remedies
    nearest = nearest_miss(found.ruled_out)
    assert nearest and fits(remedy, found.job, Pins(strategies=(nearest.strategy,)))


@pytest.mark.slow
def test_the_nodes_that_are_named_are_the_fewest_by_any_strategy():
    given = job(memory_mbytes=82)
    quick = {name: one for name, one in STRATEGIES.items() if not isinstance(one, PruningStrategy)}
    (remedy,) = would_fit(given, quick, Pins(), RuledOut("chain", "", "a rank lacks memory", 1.0))
    match = re.fullmatch(r"(\d+) nodes \((.+)\)", remedy)
    assert match and match[2] != "chain"

    def fits_on(num_nodes: int, *names: str) -> bool:
        larger = job(memory_mbytes=82, num_nodes=num_nodes)
        return any(isinstance(one, Candidate) for name in names for one in quick[name](larger, Pins()))

    num_nodes = int(match[1])
    assert fits_on(num_nodes, match[2]) and not fits_on(num_nodes, "chain")
    assert num_nodes > given.cluster.num_nodes + 1 and not fits_on(num_nodes - 1, *quick)


def test_a_degree_that_does_not_divide_is_let_go():
    found = searched(Pins(dp=5), 4000)
    assert not found.results
    (dp, *batches) = found.remedies[::-1]
    assert fits(dp, found.job, Pins(strategies=("data parallel",)))
    assert batches[::-1] == ["a batch of 30", "a batch of 35"]


@pytest.mark.parametrize(("memory_mbytes", "pins"), [(60, Pins(dp=5)), (4000, Pins(dp=5, microbatch_size=4))])
def test_a_batch_that_divides_and_does_not_fit_either_is_not_named(memory_mbytes, pins):
    pins = replace(pins, strategies=("data parallel",))
    found = searched(pins, memory_mbytes)
    assert not found.results
    assert not [remedy for remedy in found.remedies if remedy.startswith("a batch of")]


def test_where_no_pin_alone_is_to_blame_all_are_let_go():
    pins = Pins(strategies=("chain",), tp=1, pp=1, dp=2, microbatch_size=16, recompute="none")
    (remedy, *_) = searched(pins, 400).remedies
    what = re.fullmatch(r"other values than those pinned \((.*)\)", remedy)
    assert what and what[1] in {one.what for one in STRATEGIES["chain"](job(memory_mbytes=400), Pins())
                                if isinstance(one, Candidate)}  # fmt: skip


def test_the_nearest_miss_lacks_the_least_memory_and_a_plan_is_nearer_than_none():
    divides, much, less = RuledOut("a", "", "x"), RuledOut("b", "", "y", 2.0), RuledOut("c", "", "z", 1.0)
    guess = RuledOut("d", "TP 1", "beyond the profile")
    assert nearest_miss([divides, guess, much, less]) is less
    pinned = RuledOut("chain", "TP 2", "deferred_warmup is no, not yes, as is pinned.", nearly_fits=True)
    assert nearest_miss([divides, guess, much, less, pinned]) is pinned
    assert nearest_miss([divides, guess]) is guess
    assert nearest_miss([divides]) is divides
    assert nearest_miss([]) is None


def test_the_strategies_beside_those_pinned_are_tried():
    asked: list[str] = []

    def named(name: str, plans: Mapping[str, bool]):
        def strategy(given: Job, pins: Pins):
            asked.append(name)
            if plans[name]:
                yield next(one for one in STRATEGIES["chain"](given, Pins()) if isinstance(one, Candidate))

        return strategy

    has = {"a": False, "b": True, "c": True}
    strategies = {name: named(name, has) for name in has}
    pins = Pins(strategies=("a",))
    assert would_fit(job(), strategies, pins, RuledOut("a", "", "it has two modules")) == ("strategy 'b'",)
    assert asked == ["b"]


def test_what_is_named_fits_in_simulation_too():
    """A strategy may propose what memory does not hold once it is simulated: its own count of bytes is coarser."""

    def coarse(given: Job, pins: Pins):
        generous = given.on(replace(given.cluster, device=replace(given.cluster.device, memory_bytes=4 * 10**9)))
        for one in STRATEGIES["chain"](generous, Pins()):
            if isinstance(one, Candidate):
                yield replace(one, plan=replace(one.plan, cluster=given.cluster))

    def remedies(memory_mbytes: int) -> tuple[str, ...]:
        nearest = RuledOut("coarse", "", "it has TP 4")
        return would_fit(job(memory_mbytes=memory_mbytes), {"coarse": coarse}, Pins(tp=4), nearest)

    assert remedies(4000)[0].startswith("TP ")
    assert remedies(60) == ()
