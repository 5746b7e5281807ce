"""Bubbles of a measured step from what each rank counts by its own clock: those of all spans on one clock."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from motet.core.timeline import Timeline
from motet.schedule import one_f_one_b
from motet.simulate import bubbles, simulate, stage_times
from motet.train.report.rank_time import RankTime, aligned, busiest_bubbles, joined_bubbles


def by_rank(timeline, met_s, offsets_s):
    """What each rank has: its own spans by its own clock, and the meeting."""
    for rank, offset_s in enumerate(offsets_s):
        own = [span for span in timeline if span.rank == rank]
        shifted = Timeline.of(replace(s, start_s=s.start_s + offset_s, end_s=s.end_s + offset_s) for s in own)
        yield SimpleNamespace(timeline=shifted, met_s=met_s + offset_s)


@pytest.mark.parametrize("seed", range(5))
def test_bubbles_do_not_depend_on_the_clocks_of_ranks(seed):
    rng = np.random.default_rng(seed)
    times = stage_times(rng.uniform(0.5, 2, 3).tolist(), rng.uniform(1, 3, 3).tolist())
    timeline = simulate(one_f_one_b(3, num_microbatches=4), times)
    results = list(by_rank(timeline, met_s=timeline.makespan_s - 0.1, offsets_s=rng.uniform(-100, 100, 3)))
    found, expected = joined_bubbles(np.array([RankTime.of(each).row for each in results])), bubbles(timeline)
    assert found.step_s == pytest.approx(expected.step_s)
    assert found.busy_s == pytest.approx(expected.busy_s)
    assert found.idle_s == pytest.approx(expected.idle_s, abs=1e-9)
    busiest = busiest_bubbles(found)
    assert sum(busiest.values()) == pytest.approx(found.step_s - max(found.busy_s))
    together = aligned([(each.timeline, each.met_s) for each in results])
    assert together.start_s.min() == 0 and together.makespan_s == pytest.approx(timeline.makespan_s)
    assert bubbles(together).idle_s == pytest.approx(expected.idle_s, abs=1e-9)
