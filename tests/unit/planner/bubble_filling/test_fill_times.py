"""Passes of encoders in bubbles: the native core against the reference, to the bit."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.planner.bubble_filling import _pass_ends
from motet.planner.bubble_filling.backbone_bubbles import BubbleRoom, Slices
from motet.planner.bubble_filling.fill_times import Direction


def drawn(rng, num_ranks):
    """A direction of two pipelines: bubbles of whole and broken lengths, and passes of up to two encoders."""
    bubbles = []
    for _ in range(2 * num_ranks):
        bounds = np.cumsum(rng.choice([0.25, 0.5, 1.0, 1.5, rng.random()], 2 * int(rng.integers(1, 9))))
        start_s, stop_s = bounds[::2] - 1, bounds[1::2] - 1
        bubbles.append(BubbleRoom(start_s, np.append(stop_s[:-1], 1e6)))
    slices = [Slices(float(rng.choice([0.0, 0.25, 0.5, 0.1, 0.7])), int(rng.integers(0, 5))) for _ in range(2)]
    passes = tuple(tuple(slices[: int(rng.integers(1, 3))]) for _ in range(num_ranks))
    ranks = tuple(tuple((place, 2 * place + pipeline) for place in range(num_ranks)) for pipeline in range(2))
    return Direction(ranks, passes, bubbles, (), float(rng.choice([0.0, 0.125, 0.3])))


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(0, 12), st.booleans())
def test_the_native_core_places_passes_as_the_reference(seed, num_ranks, num_microbatches, is_first):
    rng = np.random.default_rng(seed)
    direction = drawn(rng, num_ranks)
    begins_s = np.sort(np.round(rng.random(num_microbatches) * 8 - 2, int(rng.integers(1, 16)))).tolist()
    free_s = (-math.inf if is_first else -0.5,) * num_ranks
    for pipeline in range(2):
        expected = free_s
        for begin_s in begins_s:
            expected = direction.advanced(pipeline, begin_s, expected)
        assert direction.through(pipeline, begins_s, free_s) == expected
        assert direction._natively[pipeline].through(begins_s, free_s) == expected


def test_the_native_core_refuses_what_does_not_match():
    table = ([0.0], [1.0], [0, 2], 0.5, 3)
    with pytest.raises(IndexError, match="do not hold all slices"):
        _pass_ends.PassEnds([[table]], 0.0).through([0.0], (0.0,))
    most = ([0.0, 2.0], [1.0, 3.0], [0, 2**62, 2**63 - 1], 1e-30, 2**63 - 1)
    with pytest.raises(IndexError, match="do not hold all slices"):
        _pass_ends.PassEnds([[most]], 0.0).through([1.5], (0.0,))
    with pytest.raises(ValueError, match="do not match"):
        _pass_ends.PassEnds([[([0.0, 2.0], [1.0, 3.0], [2, 0, 4], 0.5, 3)]], 0.0)
    with pytest.raises(ValueError, match="one end a rank"):
        _pass_ends.PassEnds([[table]], 0.0).through([0.0], ())
    with pytest.raises(ValueError, match="do not match"):
        _pass_ends.PassEnds([[([0.0], [], [0, 2], 0.5, 3)]], 0.0)
