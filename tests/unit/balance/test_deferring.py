import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.analyze.mixture import MFLOP_PER_LENGTH
from motet.balance import assign, assign_jointly, defer
from motet.core.errors import ArgumentError
from unit.balance.contract import BACKENDS, check_equal, check_structure

one_phase = st.lists(st.integers(0, 60) | st.integers(0, 2**40), max_size=20).map(
    lambda costs: np.array(costs, dtype=np.int64)
)
two_phases = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 60)), max_size=16).map(
    lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 2)
)


def balance(costs, num_ranks):
    return assign(costs, num_ranks) if costs.ndim == 1 else assign_jointly(costs, num_ranks)


def sum_of_largest(assignment):
    return int(np.atleast_1d(assignment.loads.max(axis=0)).sum())


def spread_evenly(costs, num_ranks, num_microbatches):
    return sum(sum_of_largest(balance(part, num_ranks)) for part in np.array_split(costs, num_microbatches))


def check_deferral(result, costs, num_ranks, num_microbatches, capacity=None):
    """Each item in one microbatch, on the rank that the microbatch's Assignment says, within the capacity."""
    assert result.microbatch.dtype == result.ranks.dtype == np.int32
    assert result.microbatch.shape == result.ranks.shape == (len(costs),)
    assert len(result.assignments) == num_microbatches
    for microbatch, assignment in enumerate(result.assignments):
        items = result.items_of(microbatch)
        check_structure(assignment, len(items), num_ranks)
        np.testing.assert_array_equal(assignment.ranks, result.ranks[items])
        loads = np.zeros((num_ranks, *costs.shape[1:]), dtype=np.int64)
        np.add.at(loads, assignment.ranks, costs[items])
        np.testing.assert_array_equal(assignment.loads, loads)
        if capacity is None:
            continue
        item_sizes = costs if costs.ndim == 1 else costs.sum(axis=1)
        for rank in range(num_ranks):
            sizes = item_sizes[items[assignment.on_rank(rank)]]
            assert sizes.sum() <= capacity or (sizes > 0).sum() == 1
    assert sum(len(result.items_of(microbatch)) for microbatch in range(num_microbatches)) == len(costs)
    assert result.max_sum == sum(sum_of_largest(assignment) for assignment in result.assignments)


@settings(max_examples=80, deadline=None)
@given(one_phase | two_phases, st.integers(1, 5), st.integers(1, 4))
def test_defer_is_never_worse_than_spreading_and_the_same_on_both_backends(costs, num_ranks, num_microbatches):
    results = [defer(costs, num_ranks, num_microbatches, backend=backend) for backend in BACKENDS]
    check_deferral(results[0], costs, num_ranks, num_microbatches)
    assert results[0].max_sum <= spread_evenly(costs, num_ranks, num_microbatches)
    np.testing.assert_array_equal(results[0].microbatch, results[1].microbatch)
    for a, b in zip(results[0].assignments, results[1].assignments, strict=True):
        check_equal(a, b)


@settings(max_examples=80, deadline=None)
@given(one_phase | two_phases, st.integers(1, 5), st.integers(1, 4), st.integers(1, 2**41))
def test_defer_keeps_to_the_capacity(costs, num_ranks, num_microbatches, capacity):
    try:
        result = defer(costs, num_ranks, num_microbatches, capacity=capacity)
    except ArgumentError:
        assert costs.sum() > capacity
        return
    check_deferral(result, costs, num_ranks, num_microbatches, capacity)


@pytest.mark.parametrize("backend", BACKENDS)
def test_giants_share_a_microbatch_and_the_others_get_less(backend):
    costs = np.full(400, 10)
    costs[[10, 110, 210, 310]] = 500  # one giant in each quarter of the step
    assert spread_evenly(costs, 8, 4) == 2000
    result = defer(costs, 8, 4, backend=backend)
    assert len(set(result.microbatch[costs == 500].tolist())) == 1
    assert result.max_sum <= 1.02 * costs.sum() / 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("costs", [[], [0], [5], [7] * 9, [2**40] * 5, [2**62, 1, 1], [2**63 - 1]], ids=str)
def test_odd_cases(costs, backend):
    costs = np.array(costs, dtype=np.int64)
    for num_ranks, num_microbatches in ((1, 1), (2, 3), (8, 2)):
        check_deferral(defer(costs, num_ranks, num_microbatches, backend=backend), costs, num_ranks, num_microbatches)
        rows = np.stack([costs // 2, np.zeros_like(costs)], axis=1)
        check_deferral(defer(rows, num_ranks, num_microbatches, backend=backend), rows, num_ranks, num_microbatches)


def test_an_item_above_the_capacity_has_its_rank_for_itself():
    costs = np.array([100] + [5] * 20)
    result = defer(costs, 2, 3, capacity=40)
    check_deferral(result, costs, 2, 3, 40)
    mine = (result.microbatch == result.microbatch[0]) & (result.ranks == result.ranks[0])
    assert mine.sum() == 1


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(8, 4), (16, 8), (64, 4)])
def test_long_items_are_deferred_on_mixed_batches(mixture, num_ranks, num_microbatches):
    costs = mixture.draw(num_ranks * 60, np.random.default_rng(1), None) * np.array(MFLOP_PER_LENGTH)
    longest_or_mean = np.maximum(costs.sum(axis=0) / num_ranks, costs.max(axis=0))
    backbone = defer(costs[:, 0], num_ranks, num_microbatches)
    assert backbone.max_sum <= 1.01 * longest_or_mean[0]
    assert defer(costs, num_ranks, num_microbatches).max_sum <= 1.13 * longest_or_mean.sum()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"costs": [-1]}, r"costs\[0\] is -1"),
        ({"costs": 3}, r"costs has shape \(\)"),
        ({"costs": np.zeros((2, 0))}, "costs has shape"),
        ({"costs": [2**62, 2**62]}, "costs add up to 9223372036854775808"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"capacity": 0}, "capacity is 0"),
        ({"sizes": [1, 1]}, "sizes is given without capacity"),
        ({"sizes": [1], "capacity": 5}, "sizes has 1 entries; it must have one for each of the 2 items"),
        ({"sizes": [1, -1], "capacity": 5}, r"sizes\[1\] is -1"),
        ({"costs": [3] * 9, "capacity": 5}, "capacity is 5; no placement of the 9 items on 2 ranks in 2 microbatches"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        defer(**{"costs": [3, 4], "num_ranks": 2, "num_microbatches": 2} | arguments)


def test_sizes_are_what_a_capacity_is_taken_of():
    costs = np.full(12, 10)
    sizes = np.array([6, 1, 1, 1] * 3)
    result = defer(costs, 2, 3, capacity=8, sizes=sizes)
    for microbatch in range(3):
        items = result.items_of(microbatch)
        assert np.bincount(result.ranks[items], sizes[items]).max(initial=0) <= 8
