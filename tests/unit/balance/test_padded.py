"""Padded costs with a quadratic term: the optimum where all is padded, near a proven bound where attention is."""

import heapq
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import Padded, PaddedAttention, assign, lower_bound, score
from unit.balance.contract import BACKENDS, check_equal, check_structure

COSTS = [
    Padded(linear=3),
    Padded(linear=7, quadratic=2),
    Padded(linear=0, quadratic=1),
    PaddedAttention(),
    PaddedAttention(linear=40),
    PaddedAttention(linear=3, quadratic=5),
]
ATTENTION = [cost for cost in COSTS if isinstance(cost, PaddedAttention)]

small = st.integers(0, 30)
tiles = st.integers(0, 5).map(lambda tiles: 256 * tiles)
wide = st.integers(0, 2**20) | st.sampled_from([0, 1, 2**20])
lengths_of_a_batch = st.lists(small, max_size=60) | st.lists(tiles, max_size=60) | st.lists(wide, max_size=60)


def load(lengths, cost):
    longest = max(lengths, default=0)
    tokens = sum(lengths) if isinstance(cost, PaddedAttention) else len(lengths) * longest
    return cost.linear * tokens + cost.quadratic * len(lengths) * longest**2


def best_load(lengths, num_ranks, cost):
    """Brute force over all num_ranks ** num_items placements."""
    return min(
        max(load([x for x, r in zip(lengths, ranks, strict=True) if r == rank], cost) for rank in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(lengths))
    )


def check(placed, lengths, num_ranks, cost):
    check_structure(placed, len(lengths), num_ranks)
    assert placed.loads.tolist() == [load([lengths[i] for i in placed.on_rank(r)], cost) for r in range(num_ranks)]


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(lengths=lengths_of_a_batch, num_ranks=st.integers(1, 9))
def test_contract_and_equal_backends(cost, lengths, num_ranks):
    native, reference = (assign(lengths, num_ranks, cost, backend=backend) for backend in BACKENDS)
    check(native, lengths, num_ranks, cost)
    assert native.bound == lower_bound(lengths, num_ranks, cost)
    check_equal(native, reference)
    check_equal(native, score(native.ranks, lengths, num_ranks, cost))


@pytest.mark.parametrize("cost", COSTS, ids=str)
@given(lengths=st.lists(st.integers(0, 12), max_size=6), num_ranks=st.integers(1, 3))
def test_bound_and_load_against_brute_force(cost, lengths, num_ranks):
    best = best_load(lengths, num_ranks, cost)
    placed = assign(lengths, num_ranks, cost)
    assert placed.bound <= best
    if isinstance(cost, Padded):
        assert placed.loads.max() == placed.bound == best
    else:
        assert placed.loads.max() <= best * 1.25


def paper_load(lengths, num_ranks, cost):
    """OrchMLLM Algorithm 5 as printed, with `b` the largest sum of LPT, at most num_ranks batches, and nothing lost."""
    descending = sorted(lengths, reverse=True)
    sums = [0] * num_ranks
    for length in descending:
        heapq.heapreplace(sums, sums[0] + length)
    batches = [[]]
    rest = list(descending)
    while rest:
        if (len(batches[-1]) + 1) * (batches[-1] or rest)[0] > max(sums):
            if len(batches) == num_ranks:
                break
            batches.append([])
        batches[-1].append(rest.pop(0))
    queue = [(sum(batch), rank, batch) for rank, batch in enumerate(batches)]
    heapq.heapify(queue)
    for length in rest:
        total, rank, batch = queue[0]
        batch.append(length)
        heapq.heapreplace(queue, (total + length, rank, batch))
    return max(load(batch, cost) for batch in batches)


@pytest.mark.parametrize("cost", ATTENTION, ids=str)
@given(lengths=lengths_of_a_batch.filter(len), num_ranks=st.integers(1, 9))
def test_attention_is_never_worse_than_the_paper(cost, lengths, num_ranks):
    assert assign(lengths, num_ranks, cost).loads.max() <= paper_load(lengths, num_ranks, cost)


def sample(kind, num_items, rng):
    if kind == "audio frames":
        return np.clip(rng.normal(1100, 400, num_items), 300, 3000).astype(np.int64)
    if kind == "image tiles":
        return 256 * rng.integers(1, 13, num_items)
    return np.clip(rng.lognormal(6.3, 1.1, num_items), 16, 4096).astype(np.int64)


LINEAR = [10_000, 3_000, 1_000, 300, 100, 10, 1]  # from linear-dominated to quadratic-dominated


@pytest.mark.parametrize("kind", ["audio frames", "image tiles", "sequences"])
@pytest.mark.parametrize("linear", LINEAR)
def test_attention_ends_within_two_percent_of_the_bound(kind, linear):
    for num_ranks in (64, 256, 1024):
        lengths = sample(kind, 80 * num_ranks, np.random.default_rng(num_ranks))
        placed = assign(lengths, num_ranks, PaddedAttention(linear))
        assert placed.imbalance <= 1.02
        assert placed.loads.max() < paper_load(lengths.tolist()[: 80 * 64], 64, PaddedAttention(linear))


@pytest.mark.parametrize("linear", LINEAR)
def test_attention_ends_near_the_bound_on_mixed_sequences(mixture, linear):
    lengths = np.minimum(mixture.draw(64 * 80, np.random.default_rng(0), None)[:, 0], 4096)
    assert assign(lengths, 64, PaddedAttention(linear)).imbalance <= 1.025


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cost", COSTS, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[], [7], [7] * 3, [0] * 10, [5] * 40, [1_000] + [1] * 30, [2**20 - i for i in range(9)]],
    ids=["no item", "one item", "fewer items than ranks", "zero lengths", "equal", "one giant", "wide"],
)
def test_odd_batches(backend, cost, lengths):
    placed = assign(lengths, 4, cost, backend=backend)
    check(placed, lengths, 4, cost)
    if len(lengths) < 9 or len(set(lengths)) == 1:
        assert placed.imbalance == 1
    if lengths[:1] == [1_000]:
        assert placed.loads.max() == load([1_000], cost)


@pytest.mark.parametrize("backend", BACKENDS)
def test_costs_of_60_bits(backend):
    lengths = np.random.default_rng(0).integers(2**26, 2**27, 64)
    for cost in (Padded(quadratic=2), PaddedAttention(linear=2**26), PaddedAttention(quadratic=3)):
        check(assign(lengths, 5, cost, backend=backend), lengths.tolist(), 5, cost)
    nearly_too_long = [2**31 - 1, 2**30]  # alone on a rank, together just below 2^63
    check(assign(nearly_too_long, 1, PaddedAttention(), backend=backend), nearly_too_long, 1, PaddedAttention())
    lengths = np.random.default_rng(0).integers(2**39, 2**40, 64)
    check(assign(lengths, 5, Padded(linear=2**16), backend=backend), lengths.tolist(), 5, Padded(linear=2**16))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: Padded(linear=-1),
            r"Padded\(linear=-1, quadratic=0\): a coefficient must be an integer from 0 to 2\^63 - 1",
        ),
        (lambda: Padded(quadratic=0.5), r"integer from 0 to 2\^63 - 1"),
        (lambda: PaddedAttention(linear=0), r"integer from 1 to 2\^63 - 1"),
        (lambda: PaddedAttention(quadratic=0), r"integer from 1 to 2\^63 - 1"),
        (lambda: assign([2**31] * 3, 2, PaddedAttention()), r"can exceed 2\^63 - 1"),
        (lambda: assign([2**31] * 3, 2, Padded(quadratic=1)), r"can exceed 2\^63 - 1"),
    ],
)
def test_wrong_input_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
