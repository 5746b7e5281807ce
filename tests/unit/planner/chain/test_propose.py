"""Chains that are proposed fit, run, and take about what is estimated."""

from dataclasses import replace

import numpy as np
import pytest

from motet.planner.candidate import Candidate, Pins, RuledOut
from motet.planner.chain.anchored_cut import fastest_cut
from motet.planner.chain.propose import MAX_CHAINS, MAX_RIVALS, ChainSearch, propose_chain
from motet.planner.degrees import Degrees
from motet.planner.stages.stage_costs import stage_numbers, stages_of
from motet.simulate.predict.predict import predict
from unit.planner.jobs import job, model, predicted


def proposed(given_job, pins=None):
    found = list(propose_chain(given_job, pins or Pins()))
    return [one for one in found if isinstance(one, Candidate)], [one for one in found if isinstance(one, RuledOut)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("memory_mbytes", [4000, 320])
@pytest.mark.parametrize("spread", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_every_plan_fits_runs_and_takes_about_what_was_estimated(frozen, memory_mbytes, spread):
    given_job = job(model(frozen=frozen), memory_mbytes=memory_mbytes, spread=spread)
    candidates, _ = proposed(given_job)
    assert 1 <= len(candidates) <= MAX_CHAINS + MAX_RIVALS
    assert [one.estimate_s for one in candidates] == sorted(one.estimate_s for one in candidates)
    for candidate in candidates:
        found = predicted(given_job, candidate)
        assert candidate.estimate_s == pytest.approx(found.step_s, rel=0.5 if spread else 0.3)
        assert candidate.facts or candidate.plan.units[0].pp == 1


def test_stages_that_begin_with_whole_rows_of_tensor_parallel_ranks_fit():
    given_job = job(memory_mbytes=320)
    candidates, _ = proposed(given_job, Pins(tp=2, pp=2, microbatch_size=2))
    assert candidates
    for candidate in candidates:
        predicted(given_job, candidate)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v"])
def test_pins_are_kept(schedule):
    pins = Pins(tp=2, pp=2, dp=2, microbatch_size=2, schedule=schedule, recompute="full")
    candidates, _ = proposed(job(), pins)
    assert candidates
    for candidate in candidates:
        plan, (unit,) = candidate.plan, candidate.plan.units
        assert (unit.tp, unit.pp, unit.dp, plan.microbatch_size, plan.schedule) == (2, 2, 2, 2, schedule)
        assert unit.recompute == unit.stages


def test_least_memory_is_recomputed_least():
    pins = Pins(tp=1, pp=2, dp=4, microbatch_size=1, schedule="1f1b")

    def again(memory_mbytes):
        candidates, _ = proposed(job(memory_mbytes=memory_mbytes), pins)
        unit = candidates[0].plan.units[0]
        return sum(sum(counts.values()) for counts in unit.recompute)

    counts = [again(memory_mbytes) for memory_mbytes in (4000, 350, 280)]
    assert counts == sorted(counts) and counts[0] == 0 < counts[-1]


def test_measured_steps_can_decide():
    given_job = job()
    pipeline = ChainSearch(given_job, Pins()).pipeline(Degrees(1, 4, 2, 1, 16))
    plans = [pipeline.plan(stages) for stages in pipeline.cuts_beside(pipeline.settled())]
    assert 1 < len(plans) <= 13 and len({str(plan.units) for plan in plans}) == len(plans)
    fastest = fastest_cut(plans, lambda plan: predict(plan, given_job.workload, given_job.cost).step_s)
    assert fastest in plans


def test_the_same_job_gets_the_same_plans():
    first, second = (proposed(job(spread=0.5))[0] for _ in range(2))
    assert [one.plan.units for one in first] == [one.plan.units for one in second]
    assert [one.estimate_s for one in first] == [one.estimate_s for one in second]


def test_what_does_not_fit_is_ruled_out_with_what_lacks():
    candidates, ruled_out = proposed(job(memory_mbytes=40))
    assert not candidates
    assert ruled_out and all(one.shortfall_bytes > 0 for one in ruled_out)
    assert "lack" in ruled_out[0].why


def test_with_the_state_fitting_activations_are_what_lacks():
    pins = Pins(tp=1, pp=2, dp=4, microbatch_size=1, schedule="1f1b", recompute="none")
    candidates, ruled_out = proposed(job(memory_mbytes=320), pins)
    assert not candidates
    assert "with nothing recomputed" in ruled_out[0].why


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        (Pins(tp=3), "TP is pinned to 3; it must be one of 1, 2, in a node or over whole ones."),
        (Pins(tp=8), "TP is pinned to 8, and "),
        (Pins(tp=2, pp=2, dp=4), "TP 2 with PP 2 with DP 4 needs 16 ranks; the cluster has 8."),
        (
            Pins(dp=5, microbatch_size=2),
            "a batch of 32 is no multiple of the pinned DP",
        ),
        (Pins(pp=21), "PP is pinned to 21; it must be 1 to 18, the layers of the model."),
        (Pins(schedule="data_parallel"), "a chain runs in 1F1B"),
    ],
)
def test_pins_that_cannot_be_are_ruled_out(pins, why):
    candidates, (ruled_out,) = proposed(job(), pins)
    assert not candidates and ruled_out.why.startswith(why)


def test_a_batch_that_does_not_divide_leaves_ranks_idle():
    candidates, _ = proposed(job(batch_size=7), Pins(tp=1, pp=1))
    assert candidates[0].plan.units[0].dp == 7


def test_more_memory_or_nodes_never_make_the_best_slower():
    best = [
        min(predict(one.plan, given_job.workload, given_job.cost).step_s for one in proposed(given_job)[0])
        for given_job in (job(memory_mbytes=320), job(memory_mbytes=4000), job(memory_mbytes=4000, num_nodes=4))
    ]
    assert best == sorted(best, reverse=True)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("again", [(), (1, 2), (3, 6)])
def test_stages_hold_what_the_simulator_says_of_them(frozen, again):
    """With the rows of encoders that the backbone takes in, before its first block and again; examples are alike."""
    spec = model(frozen=frozen)
    given_job = job(replace(spec, reentries=tuple(("image", "backbone", block) for block in again)))
    pipeline = ChainSearch(given_job, Pins()).pipeline(Degrees(1, 3, 1, 2, 16, "1f1b"))
    num_encoder_blocks = pipeline.blocks.num_blocks - 8
    for of_backbone in ((1, 3, 4), (0, 2, 6), (3, 4, 1)):
        counts = np.array(of_backbone) + (num_encoder_blocks, 0, 0)
        stages = stages_of(pipeline.blocks, stage_numbers(counts), pipeline.limits)
        plan = pipeline.plan(stages)
        found = predict(plan, given_job.workload, given_job.cost, seed=given_job.seed).peak_bytes[:3]
        assert stages.fullness * given_job.capacity_bytes == pytest.approx(found, rel=2e-4)
