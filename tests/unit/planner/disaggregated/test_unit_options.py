"""The tables that ranks are allocated from: slowest stages as the best cut has them, and the longest of several."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.planner.disaggregated.unit_options import longest_of
from motet.planner.stages.partition import partition, slowest_stage_s


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_slowest_stages_are_those_of_the_best_cut(block_s: list[int]) -> None:
    found = slowest_stage_s(np.array([block_s, block_s[::-1]], dtype=float))
    for row, seconds in zip(found, (block_s, block_s[::-1])):
        for num_stages in range(1, len(seconds) + 1):
            ends = accumulate(partition(seconds, num_stages), initial=0)
            assert row[num_stages - 1] == max(sum(seconds[first:stop]) for first, stop in pairwise(ends))


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=5))
def test_longest_of_is_the_mean_over_all_draws(values: list[float]) -> None:
    found = longest_of(np.array(values), 3)
    for number in (1, 2, 3):
        draws = [max(draw) for draw in product(values, repeat=number)]
        assert found[number - 1] == pytest.approx(np.mean(draws))


def test_longest_of_many_values_is_near_that_of_all() -> None:
    values = np.random.default_rng(0).lognormal(0.0, 1.0, 20_000)
    draws = np.random.default_rng(1).choice(values, (20_000, 8)).max(axis=1)
    found = longest_of(values, 8)
    assert found[0] == pytest.approx(values.mean())
    assert found[7] == pytest.approx(draws.mean(), rel=0.03)
