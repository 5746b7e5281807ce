"""How measured peaks correct predicted ones: by scripted measurements, as a GPU's allocator would tell them."""

import pytest

from motet.train.recompute_measured import (
    MEASURED_STEPS,
    MeasuredPeak,
    PeakCorrection,
    RankCorrection,
    correction_words,
)

CAPACITY, STATE = 1000.0, 400.0


def corrected(steps, *, resolution_bytes=0.0) -> PeakCorrection:
    """After steps, each (predicted peak, measured peak of the step); peaks so far only grow, as an allocator's do."""
    so_far = 0
    correction = PeakCorrection(CAPACITY, STATE, lambda: so_far, resolution_bytes=resolution_bytes)
    for predicted, measured in steps:
        correction.begin_step()
        so_far = max(so_far, measured)
        correction.end_step(predicted)
    return correction


def test_the_first_step_lacks_the_optimizer_and_tells_nothing():
    correction = corrected([(800.0, 500)])
    assert correction.largest is None and correction.limit_bytes == CAPACITY


def test_what_takes_more_than_predicted_lowers_the_limit_in_proportion():
    """400 beside the state were predicted, 500 taken: the room of 600 takes what is predicted to take 480."""
    correction = corrected([(500.0, 450), (800.0, 900)])
    assert correction.limit_bytes == pytest.approx(STATE + 600 * 400 / 500)


def test_an_excess_that_does_not_grow_lowers_the_limit_by_itself():
    """A small microbatch after one that needed nearly all: the excess stays, whatever the proportion would say."""
    correction = corrected([(500.0, 450), (1100.0, 1200)])
    assert correction.limit_bytes == pytest.approx(CAPACITY - 100)


def test_what_takes_less_than_predicted_raises_the_limit_by_the_difference():
    correction = corrected([(500.0, 450), (800.0, 700)])
    assert correction.limit_bytes == pytest.approx(CAPACITY + 100)


def test_the_step_with_the_largest_prediction_counts():
    correction = corrected([(500.0, 450), (800.0, 900), (600.0, 1000), (900.0, 1010)])
    assert correction.largest == MeasuredPeak(900.0, 1010)


def test_a_peak_that_does_not_grow_is_a_bound():
    """The start took 850: a step predicted to take 800 may have taken anything below; one of 900 took less."""
    assert corrected([(500.0, 850), (800.0, 700)]).largest is None
    correction = corrected([(500.0, 850), (900.0, 700)])
    assert correction.largest == MeasuredPeak(900.0, 850) and correction.limit_bytes == CAPACITY + 50


def test_differences_that_the_measurement_does_not_tell_correct_nothing():
    steps = [(500.0, 450), (800.0, 900)]
    assert corrected(steps, resolution_bytes=100.0).limit_bytes == CAPACITY
    assert corrected(steps, resolution_bytes=99.0).limit_bytes < CAPACITY


def test_a_state_above_the_capacity_leaves_a_limit_below_it():
    so_far = iter([2000, 2000, 2000, 2100])
    correction = PeakCorrection(300.0, STATE, lambda: next(so_far))
    for _ in range(2):
        correction.begin_step()
        correction.end_step(800.0)
    assert correction.limit_bytes <= 300.0


def test_measuring_ends_after_the_first_steps():
    correction = corrected([(500.0, 450)] * MEASURED_STEPS)
    assert correction.is_measuring
    correction = corrected([(500.0, 450)] * (1 + MEASURED_STEPS))
    assert not correction.is_measuring


def test_the_words_are_of_the_rank_that_may_fill_least():
    less = RankCorrection(MeasuredPeak(8e8, 7e8), 1.1e9)
    more = RankCorrection(MeasuredPeak(8e8, 9e8), 8.8e8)
    said = correction_words([less, more], 10, 1e9, 0.0)
    assert "in steps 12 to 15, rank 1 took 900 MB where 800 MB was predicted" in said
    assert "to a prediction of 880 MB in place of 1.0 GB" in said
    same = correction_words([RankCorrection(MeasuredPeak(8e8, 9e8), 1e9)], 0, 1e9, 2.5e8)
    assert "are not corrected, as resident bytes do not tell less than 250 MB" in same
    assert "no rank filled more than when it started" in correction_words([RankCorrection(None, 1e9)], 0, 1e9, 0.0)
