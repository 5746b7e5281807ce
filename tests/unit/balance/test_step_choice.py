"""`choose_step`: long examples are deferred into one microbatch where that is faster, and nothing is lost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import METHODS, Link, choose, choose_step
from motet.balance.phases import KeyExchange
from motet.balance.step_choice import MIN_GAIN, _phases_of
from motet.core.errors import ArgumentError
from unit.balance.test_choice import FAST, SLOW, backbone, cuttable, draw_phases


@given(st.integers(0, 99), st.integers(0, 30), st.integers(1, 5), st.integers(1, 4))
def test_every_example_is_in_one_microbatch_and_the_faster_step_is_taken(seed, num_examples, num_ranks, count):
    phases = draw_phases(seed, num_examples)
    given_microbatch = np.arange(num_examples) % count
    choice = choose_step(phases, given_microbatch, num_ranks, Link(1e9, 1e-6))
    stay_s = choice.predicted_s["stay"]
    # Nothing is gained by deferring where ranks hardly wait, and it is not tried.
    mean_s = sum(phase.cost.alone(phase.lengths).sum() * phase.seconds_per_cost for phase in phases) / num_ranks
    assert ("defer" in choice.predicted_s) == (stay_s > (1 + MIN_GAIN) * mean_s)
    assert choice.is_deferred == (choice.predicted_s.get("defer", stay_s) < stay_s)
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
    assert choice.why == "defer: 240 s predicted (stay 400 s)."


def test_deferring_keeps_to_the_memory_of_the_step_as_it_comes():
    # Each microbatch has a giant, and the others hold as much as it in a tenth of its time. Two giants meet; beside the
    # third is time for ten others, and memory for six.
    lengths = np.array([100, *[10] * 6] * 3)
    held = np.full(len(lengths), 100)
    given = np.repeat(np.arange(3), 7)
    free = choose_step([backbone(lengths)], given, 2, SLOW)
    kept = choose_step([replace(backbone(lengths), held=held)], given, 2, SLOW)
    assert free.is_deferred and kept.is_deferred

    def fullest(step):
        return max(
            np.bincount(chosen.assignments[0].ranks, held[step.microbatch == index]).max()
            for index, chosen in enumerate(step.choices)
        )

    assert (free.predicted_s["stay"], free.predicted_s["defer"], kept.predicted_s["defer"]) == (300, 240, 260)
    assert (fullest(kept), fullest(free)) == (600, 1000)


def test_a_step_that_cannot_be_deferred_in_its_memory_stays():
    # One rank holds the giant, whose time is short, so the other has no room for a second of them.
    phase = replace(backbone([4, 4, 4, 4]), held=np.array([9, 1, 9, 1]))
    choice = choose_step([phase], [0, 0, 1, 1], 1, SLOW)
    assert not choice.is_deferred


@pytest.mark.parametrize("methods", [("joint",), ("per_phase",), METHODS])
@pytest.mark.parametrize("seed", range(12))
def test_no_rank_holds_more_than_as_it_comes_or_than_one_example(seed, methods):
    phases = draw_phases(seed, 48)
    rng = np.random.default_rng(seed)
    phases = [replace(phase, held=phase.lengths * rng.integers(1, 9, len(phase.lengths))) for phase in phases]
    given = np.repeat(np.arange(6), 8)
    step = choose_step(phases, given, 3, FAST, methods=methods)

    def fullest(microbatch, choices):
        most = 0
        for index, choice in enumerate(choices):
            held = np.zeros(3)
            for phase, placed in zip(phases, choice.assignments, strict=True):
                np.add.at(held, placed.ranks, phase.held[(microbatch == index)[phase.owner]])
            most = max(most, held.max())
        return most

    alone = sum(np.bincount(phase.owner, phase.held, 48) for phase in phases).max()
    as_it_comes = [choose(_phases_of(phases, given == index), 3, FAST, methods=methods) for index in range(6)]
    assert fullest(step.microbatch, step.choices) <= max(fullest(given, as_it_comes), alone)
    assert {choice.method for choice in step.choices} <= set(methods)


def test_homes_are_those_of_the_examples_whatever_their_microbatch():
    home = np.tile([0, 0, 0, 1, 1, 1], 4)
    choice = choose_step([backbone([100, *[4] * 5] * 4)], np.repeat(np.arange(4), 6), 2, SLOW, home=home)
    assert choice.is_deferred
    for index, chosen in enumerate(choice.choices):
        lengths = np.array([100, *[4] * 5] * 4)[choice.microbatch == index]
        busiest = np.bincount(home[choice.microbatch == index], lengths, 2).max()
        assert chosen.predicted_s["unbalanced"] == pytest.approx(busiest)


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


def test_a_microbatch_is_priced_by_its_own_items():
    """By their keys, what is beside them and what is merged of them, not by those of the step's first items."""
    rows, size = np.array([1000, 10, 30, 700]), 1 + np.arange(4)

    def phase(own):
        beside, merged = (10 * size)[own], ((rows[own], 2), (size[own], 1))
        cut = cuttable(rows[own].tolist(), KeyExchange(0, 1, 3))
        return replace(cut, key_lengths=2 * rows[own], beside=beside, merged=merged)

    step, second = phase(np.arange(4)), np.array([False, False, True, True])
    (of_step,), link = _phases_of([step], second), Link(1e4, 0.0)
    found, expected = (choose([one], 2, link, methods=["split"]) for one in (of_step, phase(np.flatnonzero(second))))
    assert found.fragments.num_cut and found.moved_bytes == expected.moved_bytes
    assert found.predicted_s == expected.predicted_s
