"""The whole search, over jobs of all kinds: its Plans run, its answer stays, and more hardware is never slower.

Jobs are searched without refinement, which takes nearly all of a search's time: that its Plans run and stay, and are
never slower, is tested on a small job in `test_refinement.py`, and on random ones in `benchmarks/contradictions.py`.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from motet.cost.analytic import Analytic
from motet.planner.candidate import predict_candidate
from motet.planner.search import search
from motet.planner.strategies import STRATEGIES
from motet.schedule import program_of, validate
from unit.planner.jobs import jobs, scaled

WRONG = 1.03
"""By which estimates are wrong against each other: what is simulated is chosen by them, and they hang on memory."""


def step_s(job):
    found = search(job, STRATEGIES, is_refined=False)
    return found.results[0].prediction.step_s if found.results else math.inf


def on(job, **changed):
    """The same job on another cluster."""
    cluster = replace(job.cluster, **changed)
    return replace(job, cluster=cluster, cost=Analytic(cluster))


@pytest.mark.slow
@given(job=jobs())
@settings(max_examples=4)
def test_every_result_runs_and_the_answer_is_the_same_twice(job):
    found, again = (search(each, STRATEGIES, is_refined=False) for each in (job, scaled(job)))
    assert [one.candidate.plan for one in found.results] == [one.candidate.plan for one in again.results]
    assert [one.prediction.step_s for one in found.results] == [one.prediction.step_s for one in again.results]
    assert found.ruled_out == again.ruled_out
    for result in found.results:
        validate(program_of(result.candidate.plan))
        simulated = predict_candidate(job, result.candidate)
        assert simulated.step_s == result.prediction.step_s
        assert simulated.peak_bytes.max() <= job.capacity_bytes
        assert result.candidate.bound_s <= simulated.step_s
        assert found.bound.step_s <= simulated.step_s


@pytest.mark.slow
@given(job=jobs())
@settings(max_examples=4)
def test_more_nodes_are_never_slower_and_neither_is_twice_the_memory(job):
    alone_s = step_s(job)
    assert step_s(on(job, num_nodes=job.cluster.num_nodes + 1)) <= alone_s
    assert step_s(scaled(job, memory=2)) <= alone_s * WRONG
