"""Fills that are decided by step: each Program can run, is faster by its own figures, and is the same on all ranks."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.cost.source import cost_model
from motet.schedule import Kind, planned, validate
from motet.schedule.program import COMPUTE_KINDS
from motet.simulate.filling.pass_order import PassOrder
from motet.simulate.filling.step_filler import StepFiller
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.stage_pricing import Pricing
from unit.simulate.filling.filled_steps import FILLED, step_of

FILLERS = {name: StepFiller(planned(plan)) for name, plan in FILLED.items()}


def passes(program):
    """The Program without messages and collectives."""
    kept = COMPUTE_KINDS - {Kind.STEP}
    return program.with_rows(lambda row: (action for action in row if action.kind in kept))


def done(planned_program):
    """How often each pass, or part of one, of each unit is run, over all ranks."""
    return Counter(
        (planned_program.stages[a.stage].unit.name, planned_program.stages[a.stage].index, a.kind, a.microbatch, a.part)
        for row in passes(planned_program.program).actions
        for a in row
    )


@pytest.mark.parametrize("name", FILLED)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=6, deadline=None)
def test_every_step_can_run_and_has_the_passes_of_the_plan(name, seed):
    filler, plan = FILLERS[name], FILLED[name]
    step = step_of(plan, np.random.default_rng(seed))
    for island in range(filler.own.layout.num_islands):
        found = filler.program(step, island)
        validate(found.program, holds_up=not plan.cluster.device.overlaps, host_waits=True)
        assert found.program.edges == filler.own.program.edges
        for ours, own in zip(found.stages, filler.own.stages, strict=True):
            assert replace(ours, microbatches=own.microbatches) == own
            assert ours.microbatches  # No pipeline is left out, or its collectives would be missing.
        for ours, own in zip(found.program.actions, filler.own.program.actions, strict=True):
            # What a rank does for the backbone is the same, and in the same order.
            is_base = [stage.unit.name in ("llm", "beside") for stage in found.stages]
            assert [a for a in ours if is_base[a.stage] and a.kind in COMPUTE_KINDS] == [
                a for a in own if is_base[a.stage] and a.kind in COMPUTE_KINDS
            ]
        assert done(found) == done(filler.own)


@pytest.mark.parametrize("name", FILLED)
def test_a_decided_step_is_shorter_than_the_plans_own(name):
    filler, plan = FILLERS[name], FILLED[name]
    cost, shorter = cost_model(plan.cluster, plan.precision), []
    static = replace(plan, filling="static")
    for seed in range(6):
        step = step_of(plan, np.random.default_rng(seed))
        islands = range(filler.own.layout.num_islands) if filler.has_one_program else [0]
        ticks = filler._ticks(Pricing(plan, filler.own, step, cost), islands)
        found = filler.program(step, 0)
        taken, own = (max(PassOrder(passes(one.program)).ends(ticks)[1]) for one in (found, filler.own))
        assert taken < own or found is filler.own
        shorter.append(predict_assigned(plan, filler.own, step, cost).step_s)
        shorter[-1] /= predict_assigned(static, planned(static), step, cost).step_s
    # Simulated with messages and collectives.
    if plan.cluster.device.overlaps:
        assert np.median(shorter) < 1
    else:
        assert min(shorter) < 1
        assert max(shorter) <= 1


@pytest.mark.parametrize("name", FILLED)
def test_ranks_decide_alike(name):
    other = StepFiller(planned(FILLED[name]))
    for seed in range(3):
        step = step_of(FILLED[name], np.random.default_rng(seed))
        assert other.program(step, 0).program == FILLERS[name].program(step, 0).program


def test_fills_change_from_step_to_step():
    filler, plan = FILLERS["gpipe"], FILLED["gpipe"]
    steps = [step_of(plan, np.random.default_rng(seed)) for seed in range(4)]
    assert len({filler.program(step, 0).program.actions for step in steps}) >= 3
    assert len({tuple(stage.microbatches for stage in filler.program(step, 0).stages) for step in steps}) > 1


def test_islands_decide_by_themselves():
    filler, plan = FILLERS["interleaved, replicas"], FILLED["interleaved, replicas"]
    step = step_of(plan, np.random.default_rng(0))
    first, second = (filler.program(step, island).program.actions for island in range(2))
    assert first != second
    # They meet in the collectives of all islands in one order, before all passes and after them.
    for ours, theirs in zip(first, second):
        kinds = [[action for action in row if action.kind in (Kind.GATHER, Kind.REDUCE)] for row in (ours, theirs)]
        assert kinds[0] == kinds[1]
        names = [action.kind for action in ours]
        assert names.index(Kind.F) > max(index for index, kind in enumerate(names) if kind is Kind.GATHER)


def test_a_step_that_does_not_fit_memory_keeps_the_plans_own_fills():
    name = "two encoders with pipelines of their own"
    step = step_of(FILLED[name], np.random.default_rng(0))
    assert FILLERS[name].program(step, 0) is not FILLERS[name].own
    device = replace(FILLED[name].cluster.device, memory_bytes=1)
    small = replace(FILLED[name], cluster=replace(FILLED[name].cluster, device=device))
    filler = StepFiller(planned(small))
    most = []
    for seed in range(8):
        step = step_of(small, np.random.default_rng(seed))
        found = filler.program(step, 0)
        most.append(found is filler.own)
    assert any(most)
