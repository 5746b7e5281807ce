"""Modules side by side: Cornstarch's algorithm, and what is ruled out."""

import numpy as np
import pytest

from motet.core.shapes import multimodal
from motet.planner.candidate import Candidate, Pins, RuledOut
from motet.planner.modality_parallel import propose as modality
from motet.planner.modality_parallel.propose import nearest_stage_counts, propose_modality_parallel
from motet.planner.stages.partition import slowest_stages
from unit.planner.jobs import job, model, predicted


def proposed(given_job, pins=None):
    found = list(propose_modality_parallel(given_job, pins or Pins()))
    return [one for one in found if isinstance(one, Candidate)], [one for one in found if isinstance(one, RuledOut)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("memory_mbytes", [4000, 320])
def test_every_plan_fits_runs_and_takes_about_what_was_estimated(frozen, memory_mbytes):
    given_job = job(model(frozen=frozen), memory_mbytes=memory_mbytes, num_nodes=4)
    candidates, _ = proposed(given_job)
    assert 1 <= len(candidates) <= modality.NUM_CANDIDATES
    for candidate in candidates:
        found = predicted(given_job, candidate)
        assert candidate.estimate_s == pytest.approx(found.step_s, rel=0.3)


def test_encoders_get_the_stages_that_come_nearest_to_the_backbones():
    slowest_s = np.array([8.0, 5.0, 3.0, 2.0])
    assert nearest_stage_counts(slowest_s, 5.0) == (2, 1)
    assert nearest_stage_counts(slowest_s, 4.0) == (3, 2)
    assert nearest_stage_counts(slowest_s, 9.0) == (1,)
    assert nearest_stage_counts(slowest_s, 1.0) == (4, 3)


def test_the_fastest_degrees_are_about_as_fast_as_any():
    """Against all numbers of stages of all modules, by the same closed form."""
    given_job = job(model(frozen=True), num_nodes=4)
    pins = Pins(tp=1, microbatch_size=1, dp=1)
    at_best_s, degrees = next(modality.modality_degrees(given_job, pins))
    times = []
    for module in given_job.model.modules:
        cost = given_job.block_costs(module.name, 1, 1)
        times.append((cost.forward_s + cost.backward_s).tolist())
    columns = [slowest_stages(block_s, 16) for block_s in times]
    longest = sum(times[-1]) + max(sum(times[0]), sum(times[1]))
    every = [
        31 * max(columns[0][i - 1], columns[1][j - 1], columns[2][n - 1]) + longest
        for i in range(1, 7)
        for j in range(1, 5)
        for n in range(1, 9)
        if i + j + n <= 16
    ]
    assert sum(degrees.num_stages) <= 16
    assert at_best_s == pytest.approx(min(every), rel=0.02)


def test_pins_are_kept():
    candidates, _ = proposed(job(num_nodes=4), Pins(tp=2, pp=2, dp=2, microbatch_size=2, recompute="full"))
    assert candidates
    for candidate in candidates:
        backbone = candidate.plan.unit_of("backbone")
        assert (backbone.tp, backbone.pp, backbone.dp, candidate.plan.microbatch_size) == (2, 2, 2, 2)
        assert backbone.recompute == backbone.stages


@pytest.mark.parametrize(
    ("pins", "why"),
    [(Pins(schedule="zb_v"), "1F1B"), (Pins(dp=5), "is no multiple")],
)
def test_pins_that_cannot_be_are_ruled_out(pins, why):
    candidates, ruled_out = proposed(job(), pins)
    assert not candidates and why in ruled_out[0].why


def test_a_model_of_one_module_is_ruled_out():
    llm = multimodal("llm", model().module("backbone"), [])
    assert "one module" in proposed(job(llm))[1][0].why


def test_what_does_not_fit_is_ruled_out_with_what_lacks():
    candidates, ruled_out = proposed(job(memory_mbytes=40))
    assert not candidates and ruled_out and all(one.shortfall_bytes > 0 for one in ruled_out)
