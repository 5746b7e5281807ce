"""The whole search, over jobs of all kinds: its Plans run, its answer stays, and more hardware is never slower."""

import math

from hypothesis import given, settings

from motet.planner.candidate import predict_candidate
from motet.planner.fewer_ranks import least_step_s
from motet.planner.search import search
from motet.planner.strategies import STRATEGIES
from motet.schedule import program_of, validate
from unit.planner.jobs import jobs, scaled

WRONG = 1.03
"""By which estimates are wrong against each other: what is simulated is chosen by them, and they hang on memory."""


def step_s(job):
    found = search(job, STRATEGIES)
    return found.results[0].prediction.step_s if found.results else math.inf


@given(job=jobs())
@settings(max_examples=12)
def test_every_result_runs_and_the_answer_is_the_same_twice(job):
    found, again = search(job, STRATEGIES), search(scaled(job), STRATEGIES)
    assert [one.candidate.plan for one in found.results] == [one.candidate.plan for one in again.results]
    assert [one.prediction.step_s for one in found.results] == [one.prediction.step_s for one in again.results]
    assert found.ruled_out == again.ruled_out
    for result in found.results:
        validate(program_of(result.candidate.plan))
        simulated = predict_candidate(job, result.candidate)
        assert simulated.step_s == result.prediction.step_s
        assert simulated.peak_bytes.max() <= job.capacity_bytes
        assert result.candidate.bound_s <= simulated.step_s
        assert least_step_s(job) <= simulated.step_s


@given(job=jobs())
@settings(max_examples=20)
def test_twice_the_nodes_are_never_slower(job):
    assert step_s(scaled(job, nodes=2)) <= step_s(job)


@given(job=jobs())
@settings(max_examples=20)
def test_twice_the_memory_is_not_slower(job):
    assert step_s(scaled(job, memory=2)) <= step_s(job) * WRONG
