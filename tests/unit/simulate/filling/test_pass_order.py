"""Passes timed in their order take what the simulator says, without messages."""

import numpy as np
import pytest

from motet.schedule import Kind, planned
from motet.schedule.program import COMPUTE_KINDS
from motet.simulate import StageTimes, simulate
from motet.simulate.engine.table import PASSES
from motet.simulate.filling.pass_order import PassOrder
from unit.simulate.filling.filled_steps import FILLED


@pytest.mark.parametrize("name", FILLED)
def test_passes_end_when_the_simulator_says(name):
    kept = COMPUTE_KINDS - {Kind.STEP}
    program = planned(FILLED[name]).program.with_rows(lambda row: (action for action in row if action.kind in kept))
    # A multiple of all numbers of parts, so that nothing is rounded.
    shape = program.num_stages, program.num_microbatches
    forward, backward, weight, recompute = 120 * np.random.default_rng(0).integers(1, 9, (4, *shape))
    has_recompute = any(action.kind is Kind.R for row in program.actions for action in row)
    ticks = dict(zip((Kind.F, Kind.I, Kind.W, Kind.R), (forward, backward, weight, recompute)))
    ticks[Kind.B] = backward + weight
    order = PassOrder(program)
    starts, ends = order.ends(np.stack([ticks[kind] for kind in PASSES]))
    assert (starts, ends) == order.ends(np.stack([ticks[kind] for kind in PASSES]), "reference")
    assert all(type(each) is int for each in starts + ends)
    recompute_s = recompute * 1.0 if has_recompute else np.zeros(shape)
    # A stage without R would recompute in B.
    recomputed = {action.stage for row in program.actions for action in row if action.kind is Kind.R}
    recompute_s[[stage for stage in range(shape[0]) if stage not in recomputed]] = 0.0
    timeline = simulate(program, StageTimes(forward * 1.0, backward * 1.0, weight * 1.0, recompute_s))
    assert max(ends) == pytest.approx(timeline.makespan_s, rel=1e-12)
