"""Cuts of layers into stages, held against every cut there is."""

from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.planner import partition
from motet.planner.stages import _cuts
from motet.planner.stages.partition import best_bounds, slowest_by_sums, slowest_stage_s, slowest_stages

seconds = st.lists(st.integers(0, 6), min_size=1, max_size=9)


def stages_of(layer_s, counts):
    bounds = [0, *accumulate(counts)]
    return [sum(layer_s[start:stop]) for start, stop in pairwise(bounds)]


def devices_of(layer_s, counts, num_devices):
    stages = stages_of(layer_s, counts)
    return [sum(stages[device::num_devices]) for device in range(num_devices)]


def every_cut(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(stop - start for start, stop in pairwise([0, *inner, num_layers]))


def order(layer_s, counts):
    stages = stages_of(layer_s, counts)
    return max(stages), sum(stage**2 for stage in stages), counts[-1], counts


@given(seconds, st.integers(1, 4))
def test_the_cut_is_the_first_of_all_by_the_order_that_is_stated(layer_s, num_stages):
    layer_s = layer_s + [1] * (num_stages - len(layer_s))
    best = min(every_cut(len(layer_s), num_stages), key=lambda counts: order(layer_s, counts))
    assert partition(layer_s, num_stages) == best


@given(seconds, st.integers(1, 3), st.integers(2, 3))
@settings(max_examples=60)
def test_with_chunks_the_slowest_stage_is_the_least_and_devices_are_no_less_even(layer_s, num_stages, num_chunks):
    num_cuts = num_stages * num_chunks
    layer_s = [*layer_s, *([1] * num_cuts)]
    counts = partition(layer_s, num_stages, num_chunks=num_chunks)
    assert len(counts) == num_cuts and sum(counts) == len(layer_s) and min(counts) >= 1
    assert max(stages_of(layer_s, counts)) == max(stages_of(layer_s, partition(layer_s, num_cuts)))
    flat = devices_of(layer_s, partition(layer_s, num_cuts), num_stages)
    assert max(devices_of(layer_s, counts, num_stages)) <= max(flat)


@given(seconds, st.integers(1, 3))
@settings(max_examples=40)
def test_folded_chunks_are_no_less_even_on_their_devices(layer_s, num_stages):
    layer_s = [*layer_s, *([1] * 2 * num_stages)]
    flat, folded = partition(layer_s, 2 * num_stages), partition(layer_s, num_stages, num_chunks=2, folded=True)

    def slowest(counts):
        stages = stages_of(layer_s, counts)
        return max(stages[rank] + stages[2 * num_stages - 1 - rank] for rank in range(num_stages))

    assert slowest(folded) <= slowest(flat)
    assert max(stages_of(layer_s, folded)) == max(stages_of(layer_s, flat))


@given(seconds, st.integers(1, 12))
def test_the_slowest_of_any_number_of_stages_is_that_of_the_cut(layer_s, most):
    layer_s = [*layer_s, 1]
    found = slowest_stages(layer_s, most)
    assert len(found) == min(most, len(layer_s))
    for number, second in enumerate(found, start=1):
        assert second == pytest.approx(max(stages_of(layer_s, partition(layer_s, number))))


def test_nearly_as_many_stages_as_layers_leaves_the_devices_even():
    """ViT-22B before GPT-175B on 8 devices of 12 stages: 144 layers, of which an LLM layer takes four times a ViT's."""
    layer_s = [1] * 48 + [4] * 96
    counts = partition(layer_s, 8, num_chunks=12)
    assert max(stages_of(layer_s, counts)) == 8
    assert set(devices_of(layer_s, counts, 8)) == {54}


@given(st.lists(st.floats(0, 1e3), min_size=4, max_size=12), st.floats(1e-6, 1e6))
def test_equal_layers_and_other_units_change_nothing(layer_s, unit):
    assert partition([second * 2.0**20 for second in layer_s], 3) == partition(layer_s, 3)
    counts = partition([unit] * len(layer_s), 4)
    assert max(counts) - min(counts) <= 1


def test_layers_that_take_no_time_are_cut_all_the_same():
    assert sum(partition([0.0] * 5, 3)) == 5
    assert sum(partition([5e-324] * 5, 3)) == 5


@pytest.mark.parametrize(
    ("layer_s", "num_stages", "num_chunks", "culprit"),
    [
        ([1, 2], 3, 1, "2 layers for 3 stages"),
        ([1, 2, 3], 2, 2, "3 layers for 4 stages"),
        ([1, -2], 1, 1, "not negative"),
        ([1, float("nan")], 1, 1, "finite"),
        ([1e308] * 20, 2, 1, "with a finite sum"),
        ([[1, 2]], 1, 1, "one number a layer"),
        ([1, 2], 0, 1, "num_stages is 0"),
        ([1, 2], 1, 0, "num_chunks 0"),
    ],
)
def test_wrong_arguments_are_named(layer_s, num_stages, num_chunks, culprit):
    with pytest.raises(ArgumentError, match=culprit):
        partition(layer_s, num_stages, num_chunks=num_chunks)


@given(st.lists(st.integers(0, 5), min_size=24, max_size=60), st.integers(1, 5), st.integers(1, 4), st.booleans())
@settings(max_examples=200)
def test_the_native_core_cuts_as_the_reference(layer_s, num_devices, num_chunks, folded):
    sums = [0, *accumulate(layer_s)]
    expected = best_bounds(sums, num_devices, num_chunks, folded)
    assert _cuts.best_cut(sums, num_devices, num_chunks, folded) == expected


@given(st.lists(st.lists(st.floats(0, 9), min_size=11, max_size=11), min_size=1, max_size=3), st.integers(1, 11))
def test_the_native_core_finds_the_same_slowest_stages_to_the_bit(block_s, num_blocks):
    columns = np.array(block_s)[:, :num_blocks]
    sums = np.concatenate([np.zeros((len(columns), 1)), columns.cumsum(axis=1)], axis=1)
    assert slowest_stage_s(columns).tobytes() == slowest_by_sums(sums).tobytes()
    found = np.empty_like(columns)
    _cuts.slowest_stages(sums, found)
    assert found.tobytes() == slowest_by_sums(sums).tobytes()


def test_the_native_core_refuses_what_does_not_match():
    with pytest.raises(ValueError, match="fewer layers than stages"):
        _cuts.best_cut([0, 1], 2, 1, False)
    for sums in ([1, 2, 3], [0, 5, 4], [0, 1, 2**62]):
        with pytest.raises(ValueError, match="must ascend from 0"):
            _cuts.best_cut(sums, 1, 2, False)
    with pytest.raises(ValueError, match="do not match"):
        _cuts.slowest_stages(np.zeros((1, 3)), np.zeros((1, 3)))
