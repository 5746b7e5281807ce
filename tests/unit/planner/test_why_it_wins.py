"""Why a Plan wins and what it pays; what is in bubbles; what devices cost."""

from dataclasses import replace

import numpy as np
import pytest

from motet.core.timeline import Span, Timeline
from motet.planner.candidate import Candidate
from motet.planner.comparison import Comparison
from motet.planner.search_result import SimulatedCandidate
from motet.planner.why_it_wins import against, device_hours, in_bubbles
from motet.simulate.bubbles import share_between_passes
from motet.simulate.predict.prediction import Prediction
from unit.simulate.jobs import PLANS


def simulated(
    step_s, busy_s, *, name="a", ranks=4, hardware=1.2, held_gb=10.0, plan="data parallel"
) -> SimulatedCandidate:
    spans = [Span(rank, "0F0", 0, 0, 0.0, busy_s, "F", "backbone") for rank in range(ranks)]
    timeline = Timeline.of([*spans, Span(0, "0STEP", 0, 0, step_s, step_s, "STEP")])
    memory = {"activations": np.full(ranks, int(held_gb * 1e9))}
    prediction = Prediction(
        timeline, np.arange(ranks), 8, 3600, 10**15, int(hardware * 1e15), ranks * 1e15, memory, 80 * 10**9
    )
    return SimulatedCandidate(Candidate(name, f"the {name}", PLANS[plan], step_s), prediction)


def told(best, rival) -> list[str]:
    return list(against(best, Comparison(rival, np.array([rival.step_s / best.step_s - 1]))))


def test_what_is_better_is_why_and_what_is_worse_is_the_price():
    best = simulated(10.0, 9.0, hardware=1.5, held_gb=60)
    rival = simulated(15.0, 9.0, name="b", hardware=1.2, held_gb=20)
    why, price = told(best, rival)
    assert why == "It is 50% faster than b (the b): 10% of it are bubbles, of the other's step 40%."
    assert price == (
        "What it pays for that: recomputation and padding add 50% to the operations, there 20%; the fullest rank holds "
        "60.0 GB, there 20.0 GB."
    )


def test_nothing_is_paid_where_nothing_is_worse():
    best, rival = simulated(10.0, 9.0), simulated(15.0, 9.0, name="b", ranks=3)
    (why,) = told(best, rival)
    assert "it uses 4 ranks, that 3" in why
    assert told(best, simulated(10.1, 9.0, name="b", held_gb=1)) == ["b (the b) is as fast, but for 1.0%."]


def test_hours_are_of_all_devices_that_are_hired():
    """8 of 32 ranks compute; 3,600 tokens take 10 s."""
    assert device_hours(simulated(10.0, 9.0, ranks=8)) == (
        "A billion tokens take 771.6 hours: 24,691 hours of one test, as 32 are hired, of which 24 are idle."
    )
    assert device_hours(simulated(10.0, 9.0, ranks=32)).endswith(", as 32 are hired.")
    alone = simulated(10.0, 9.0, ranks=1)
    plan = replace(alone.candidate.plan, cluster=replace(alone.candidate.plan.cluster, num_nodes=1, ranks_per_node=1))
    assert device_hours(replace(alone, candidate=replace(alone.candidate, plan=plan))).endswith(", as 1 is hired.")


def test_in_bubbles_is_between_the_first_and_the_last_pass_of_the_backbone():
    kinds = [("image", 0, 2), ("backbone", 2, 3), ("audio", 3, 5), ("backbone", 5, 6), ("image", 6, 10)]
    timeline = Timeline.of(Span(0, "0F0", 0, 0, start, end, "F", name) for name, start, end in kinds)
    assert share_between_passes(timeline, ["image", "audio"], ["backbone"]) == pytest.approx(2 / 8)
    assert share_between_passes(timeline, ["video"], ["backbone"]) == 1
    assert share_between_passes(timeline, ["image"], ["backbone"]) == 0
    one = simulated(10.0, 9.0)
    (words,) = in_bubbles(PLANS["in bubbles"], replace(one.prediction, timeline=timeline))
    assert words.startswith("25% of the computation of image and audio is in bubbles: between the first and the")
    assert list(in_bubbles(PLANS["data parallel"], one.prediction)) == []
