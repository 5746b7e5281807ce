"""`choose_step`: long examples are deferred into one microbatch where that is faster, and nothing is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import Link, choose_step
from motet.core.errors import ArgumentError
from unit.balance.test_choice import FAST, SLOW, backbone, draw_phases


@given(st.integers(0, 99), st.integers(0, 30), st.integers(1, 5), st.integers(1, 4))
def test_every_example_is_in_one_microbatch_and_the_faster_step_is_taken(seed, num_examples, num_ranks, count):
    phases = draw_phases(seed, num_examples)
    given_microbatch = np.arange(num_examples) % count
    choice = choose_step(phases, given_microbatch, num_ranks, Link(1e9, 1e-6))
    assert choice.predicted_s.keys() == {"stay", "defer"}
    assert choice.is_deferred == (choice.predicted_s["defer"] < choice.predicted_s["stay"])
    if not choice.is_deferred:
        np.testing.assert_array_equal(choice.microbatch, given_microbatch)
    sizes = np.bincount(choice.microbatch, minlength=len(choice.choices))
    assert [chosen.assignments[0].num_items for chosen in choice.choices] == sizes.tolist()
    for number, name in enumerate(["backbone", "image", "audio"]):
        placed = sum(chosen.assignments[number].num_items for chosen in choice.choices)
        assert placed == len(phases[number].lengths), name
    total_s = sum(chosen.predicted_s[chosen.method] for chosen in choice.choices)
    assert total_s == pytest.approx(min(choice.predicted_s.values()))


def test_giants_of_several_microbatches_meet_in_one():
    # Each microbatch has a giant of 100 that its second rank waits for, with 20 to do.
    lengths = [100, *[4] * 5] * 4
    choice = choose_step([backbone(lengths)], np.repeat(np.arange(4), 6), 2, SLOW)
    assert choice.is_deferred
    assert choice.predicted_s["stay"] == 400
    assert choice.predicted_s["defer"] == 240
    assert choice.why == "defer: 240,000 ms predicted (stay 400,000 ms)."
    # No rank may get two giants, or a giant and all the rest, in a microbatch: so they stay apart.
    capped = choose_step([backbone(lengths)], np.repeat(np.arange(4), 6), 2, SLOW, capacity_s=100.0)
    assert max(chosen.assignments[0].loads.max() for chosen in capped.choices) <= 100


def test_one_microbatch_has_nothing_to_defer():
    choice = choose_step(draw_phases(0, 9), np.zeros(9, dtype=np.int64), 2, FAST)
    assert not choice.is_deferred
    assert len(choice.choices) == 1


@pytest.mark.parametrize(
    ("microbatch", "message"),
    [([0], "microbatch has shape"), ([0, -1], r"microbatch\[1\] is -1"), ([0, 0.5], r"microbatch\[1\] is 0.5")],
)
def test_wrong_microbatches(microbatch, message):
    with pytest.raises(ArgumentError, match=message):
        choose_step([backbone([1, 2])], microbatch, 2, FAST)
