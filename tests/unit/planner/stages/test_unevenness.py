"""How much longer the steady state is because microbatches differ."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.planner.stages.unevenness import running_max, unevenness
from unit.planner.jobs import job


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 15))
def test_the_largest_of_each_and_those_before_it(seconds, window):
    column = np.array(seconds, dtype=float)[:, None]
    found = running_max(column, window)[:, 0]
    assert found.tolist() == [max(seconds[max(0, end - window + 1) : end + 1]) for end in range(len(seconds))]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_h1", "zb_v"])
def test_microbatches_that_differ_take_longer_in_deeper_pipelines(schedule):
    assert unevenness(job(), 1, 1, (schedule, 4, 2)) == pytest.approx(1.0)
    found = [unevenness(job(spread=0.8), 1, 1, (schedule, pp, 2)) for pp in (1, 8, 16)]
    assert 1 <= found[0] <= found[1] <= found[2] and found[0] < found[2]
