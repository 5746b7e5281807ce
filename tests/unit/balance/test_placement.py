"""What holds for every cost and both backends: one contract, and the same Assignment from both."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import Packed, Padded, assign, lower_bound, score
from motet.core.errors import UserError
from unit.balance.contract import BACKENDS, check_equal, check_structure

COSTS = [Packed(), Packed(linear=3), Packed(linear=5, quadratic=2), Packed(linear=0, quadratic=1), Padded()]

small = st.integers(0, 30)
tiles = st.integers(0, 5).map(lambda tiles: 256 * tiles)
wide = st.integers(0, 2**20) | st.sampled_from([0, 1, 2**20])
lengths_of_a_batch = st.lists(small, max_size=60) | st.lists(tiles, max_size=60) | st.lists(wide, max_size=60)


def load(lengths, cost):
    if isinstance(cost, Padded):
        return len(lengths) * max(lengths, default=0)
    return sum(cost.linear * length + cost.quadratic * length**2 for length in lengths)


def best_load(lengths, num_ranks, cost):
    """Brute force over all num_ranks ** num_items placements."""
    return min(
        max(load([x for x, r in zip(lengths, ranks) if r == rank], cost) for rank in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(lengths))
    )


def check_assignment(assignment, lengths, num_ranks, cost):
    """The structure, and loads that are what they say."""
    check_structure(assignment, len(lengths), num_ranks)
    for rank in range(num_ranks):
        assert assignment.loads[rank] == load([lengths[item] for item in assignment.on_rank(rank)], cost)


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(lengths=lengths_of_a_batch, num_ranks=st.integers(1, 9))
def test_contract_and_equal_backends(cost, lengths, num_ranks):
    native, reference = (assign(lengths, num_ranks, cost, backend=backend) for backend in BACKENDS)
    check_assignment(native, lengths, num_ranks, cost)
    assert native.bound == reference.bound == lower_bound(lengths, num_ranks, cost)
    check_equal(native, reference)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(lengths=st.lists(st.integers(0, 12), max_size=6), num_ranks=st.integers(1, 3))
def test_close_to_brute_force(backend, cost, lengths, num_ranks):
    best = best_load(lengths, num_ranks, cost)
    placed = assign(lengths, num_ranks, cost, backend=backend)
    assert placed.bound <= best
    if isinstance(cost, Padded):
        assert placed.loads.max() == placed.bound == best
    else:
        assert placed.loads.max() <= best * (4 / 3 - 1 / (3 * num_ranks))


def paper_padded_load(lengths, num_ranks):
    """OrchMLLM Algorithm 2 as it is printed, shortest first, with the bounds and the returned partition corrected."""
    ascending = sorted(lengths)

    def num_batches(limit):
        count, batches = 0, 1
        for length in ascending:
            if (count + 1) * length > limit:
                count, batches = 0, batches + 1
            count += 1
        return batches

    left, right = ascending[-1], ascending[-1] * -(-len(ascending) // num_ranks)
    while left < right:
        middle = (left + right) // 2
        left, right = (left, middle) if num_batches(middle) <= num_ranks else (middle + 1, right)
    return right


@pytest.mark.parametrize("backend", BACKENDS)
@given(lengths=lengths_of_a_batch.filter(len), num_ranks=st.integers(1, 9))
def test_padded_is_as_good_as_the_paper(backend, lengths, num_ranks):
    placed = assign(lengths, num_ranks, Padded(), backend=backend)
    assert placed.loads.max() == placed.bound == paper_padded_load(lengths, num_ranks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[], [7], [7] * 3, [0] * 10, [5] * 40, [100_000] + [1] * 30],
    ids=["no item", "one item", "fewer items than ranks", "zero lengths", "equal lengths", "one giant"],
)
def test_odd_batches(backend, cost, lengths):
    placed = assign(lengths, 4, cost, backend=backend)
    check_assignment(placed, lengths, 4, cost)
    if lengths != [100_000] + [1] * 30:
        assert placed.imbalance == 1
    else:
        assert placed.loads.max() == load([100_000], cost)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_of_40_bits(backend):
    lengths = np.random.default_rng(0).integers(2**39, 2**40, 64)
    for cost in (Packed(), Packed(linear=2**16), Padded()):
        check_assignment(assign(lengths, 5, cost, backend=backend), lengths.tolist(), 5, cost)


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(data=st.data(), lengths=lengths_of_a_batch, num_ranks=st.integers(1, 9))
def test_score_of_any_placement(cost, data, lengths, num_ranks):
    ranks = data.draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=len(lengths), max_size=len(lengths)), label="ranks"
    )
    placed = score(ranks, lengths, num_ranks, cost)
    check_assignment(placed, lengths, num_ranks, cost)
    assert placed.ranks.tolist() == ranks
    assert placed.bound == lower_bound(lengths, num_ranks, cost)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: assign([1], 0), "num_ranks is 0; it must be at least 1"),
        (lambda: assign([3, -1], 2), r"lengths\[1\] is -1; it must be at least 0"),
        (lambda: assign([1.5], 2), r"lengths\[0\] is 1.5; it must be a whole number"),
        (lambda: assign([[[1]]], 2), r"lengths has shape \(1, 1, 1\)"),
        (lambda: assign([1, [2, 3]], 2), "numbers and sequences"),
        (lambda: assign([[1], 2], 2), r"lengths\[1\] has shape \(\)"),
        (lambda: assign([[1], [2, -3]], 2), r"lengths\[1\]\[1\] is -3; it must be at least 0"),
        (lambda: assign(np.array([[1, 2], [3, -4]]), 2), r"lengths\[1, 1\] is -4; it must be at least 0"),
        (lambda: assign([[1, 2]], 2, Padded()), "several lengths an item; Padded"),
        (lambda: assign([1], 2, Padded(), equal_counts=True), "equal_counts is given with Padded"),
        (lambda: assign([1], 2, Padded(), time_budget_s=1), "time_budget_s is given with Padded"),
        (lambda: assign([1], 2, time_budget_s=-1), "time_budget_s is -1; it must be from 0"),
        (lambda: assign([1], 2, time_budget_s=float("nan")), "time_budget_s is nan"),
        (lambda: assign(np.array([2**63], dtype=np.uint64), 2), r"lengths\[0\] is 9223372036854775808"),
        (lambda: assign([2**62, 2**62], 2), r"adds up to 9223372036854775808, past 2\^63 - 1"),
        (lambda: assign([2**40], 2, Packed(quadratic=1)), r"past 2\^63 - 1"),
        (lambda: assign([2**62, 2**62], 2, Padded()), r"can exceed 2\^63 - 1"),
        (lambda: assign([1.0, np.nan], 2), r"lengths\[1\] is nan"),
        (lambda: assign([2.0**53], 2), r"lengths\[0\] is 9007199254740992.0; it must be below 2\^53"),
        (lambda: assign([1], 2, backend="fast"), "'native' or 'reference'"),
        (lambda: Packed(linear=-1), r"integer from 0 to 2\^63 - 1"),
        (lambda: Packed(quadratic=0.5), r"integer from 0 to 2\^63 - 1"),
        (lambda: score([0, 2], [1, 1], 2), r"ranks\[1\] is 2; it must be below num_ranks"),
        (lambda: score([0], [1, 1], 2), "one rank for each of 2 items"),
    ],
)
def test_wrong_input_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        call()
    assert isinstance(raised.value, UserError)


def test_sum_just_within_64_bits():
    assert assign([2**62, 2**62 - 1], 1).loads.tolist() == [2**63 - 1]
