"""What strategies propose fits the memory that there is, and fills it: what does not fit is only found out when it is
simulated, and then its strategy may have no Plan."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from motet.planner.candidate import BUBBLE_FILLING, DISAGGREGATED, Candidate, Pins, predict_candidate
from motet.planner.strategies import STRATEGIES
from unit.planner.jobs import job, jobs, model, scaled


def fullness(given_job, name):
    """Of each Plan that a strategy proposes: its simulated peak over the memory that there is."""
    found = [one for one in STRATEGIES[name](given_job, Pins()) if isinstance(one, Candidate)]
    peaks = [predict_candidate(given_job, one).peak_bytes.max() for one in found]
    return [float(peak / given_job.capacity_bytes) for peak in peaks]


def tight(given_job, name, share):
    """The job with less memory than any Plan takes that the strategy proposes where there is enough: share of that."""
    ample = scaled(given_job, memory=100)
    least = min(fullness(ample, name), default=None)
    return None if least is None else scaled(ample, memory=share * least)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [DISAGGREGATED, BUBBLE_FILLING])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_is_proposed_for_little_memory_fits_and_fills_it(name, tied, share):
    """Tied weights are on two stages; recomputed blocks that run in halves keep the inputs of both."""
    given_job = tight(job(model(tied=tied), num_nodes=1, batch_size=16), name, share)
    found = fullness(given_job, name)
    assert all(0.85 < full <= 1 for full in found)
    assert found or (name, share) == (DISAGGREGATED, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@given(given_job=jobs(), share=st.floats(0.3, 1))
@settings(max_examples=10)
def test_nothing_is_proposed_that_does_not_fit(name, given_job, share):
    """Jobs are tight for each strategy: with a memory of their own, few would be."""
    less = tight(given_job, name, share)
    assume(less is not None)
    assert max(fullness(less, name), default=0) <= 1
