"""Packed placements: how even they are, with equal counts, several lengths an item and a time budget."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.analyze.mixture import Caps
from motet.balance import Packed, assign, lower_bound, score
from unit.balance.contract import BACKENDS, check_equal, check_structure

QUADRATIC = Packed(linear=5, quadratic=2)

small = st.integers(0, 30)
tiles = st.integers(0, 5).map(lambda tiles: 256 * tiles)
wide = st.integers(0, 2**20) | st.sampled_from([0, 1, 2**20])
lengths_of_a_batch = st.lists(small, max_size=60) | st.lists(tiles, max_size=60) | st.lists(wide, max_size=60)


def longest_first_load(weights, num_ranks):
    loads = [0] * num_ranks
    for weight in sorted(weights, reverse=True):
        heapq.heapreplace(loads, loads[0] + weight)
    return max(loads)


def load_of_rounds(weights, num_ranks):
    """The longest first, each round one item for every rank, the heaviest for the lightest."""
    loads, descending = [0] * num_ranks, sorted(weights, reverse=True)
    for first in range(0, len(weights), num_ranks):
        loads.sort()
        for place, weight in enumerate(descending[first : first + num_ranks]):
            loads[place] += weight
    return max(loads)


@pytest.mark.parametrize("backend", BACKENDS)
@given(lengths=lengths_of_a_batch, num_ranks=st.integers(1, 9))
def test_never_worse_than_plain_longest_first(backend, lengths, num_ranks):
    weights = [5 * length + 2 * length**2 for length in lengths]
    placed = assign(lengths, num_ranks, QUADRATIC, backend=backend)
    assert placed.loads.max() <= longest_first_load(weights, num_ranks)


@given(lengths=lengths_of_a_batch, num_ranks=st.integers(1, 9))
def test_equal_counts(lengths, num_ranks):
    native, reference = (assign(lengths, num_ranks, equal_counts=True, backend=backend) for backend in BACKENDS)
    check_structure(native, len(lengths), num_ranks)
    check_equal(native, reference)
    assert native.counts.max() - native.counts.min() <= 1
    assert native.loads.max() <= load_of_rounds(lengths, num_ranks)


@given(lengths=st.lists(wide, max_size=40), num_ranks=st.integers(1, 5))
@settings(max_examples=50)
def test_a_larger_budget_is_never_worse(lengths, num_ranks):
    placed = [assign(lengths, num_ranks, time_budget_s=budget_s) for budget_s in (0, 1e-5, 1e-4, 1e-3)]
    largest = [assignment.loads.max() for assignment in placed]
    assert largest == sorted(largest, reverse=True)
    again = assign(lengths, num_ranks, time_budget_s=1e-4, backend="reference")
    check_equal(placed[2], again)


def sample_lengths(kind, num_items, rng):
    if kind == "audio frames":
        return np.clip(rng.normal(1100, 400, num_items), 300, 3000).astype(np.int64)
    if kind == "image tiles":
        return 256 * rng.integers(1, 13, num_items)
    return np.clip(rng.lognormal(6.3, 1.1, num_items), 16, 4096).astype(np.int64)


def check_near_the_mean(lengths, num_ranks, **options):
    placed = assign(lengths, num_ranks, **options)
    unit = np.gcd.reduce(lengths)
    assert placed.loads.max() <= -(-int(lengths.sum()) // (num_ranks * unit)) * unit + 1


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("kind", ["audio frames", "image tiles", "sequences"])
@pytest.mark.parametrize(("num_items", "num_ranks"), [(80, 4), (160, 8), (1280, 64), (2560, 80)])
def test_ends_at_the_mean_from_twenty_items_a_rank(kind, num_items, num_ranks, equal_counts):
    for seed in range(10):
        lengths = sample_lengths(kind, num_items, np.random.default_rng(seed))
        check_near_the_mean(lengths, num_ranks, equal_counts=equal_counts)


@pytest.mark.parametrize(("num_ranks", "items_per_rank"), [(64, 60), (128, 75), (512, 60), (512, 20)])
def test_ends_at_the_mean_on_mixed_sequences(mixture, num_ranks, items_per_rank):
    batch = mixture.draw(num_ranks * items_per_rank, np.random.default_rng(0), Caps())
    check_near_the_mean(batch[:, 0], num_ranks)


@pytest.mark.parametrize("kind", ["audio frames", "sequences"])
def test_quadratic_cost_is_within_ten_parts_in_a_million(kind):
    lengths = sample_lengths(kind, 512 * 80, np.random.default_rng(0))
    assert assign(lengths, 512, Packed(linear=4096, quadratic=1)).imbalance <= 1.00001


@pytest.mark.parametrize("items_per_rank", [4, 6])
def test_a_time_budget_brings_few_items_closer(items_per_rank):
    largest = np.zeros(3, dtype=np.int64)
    for seed in range(5):
        lengths = sample_lengths("audio frames", 16 * items_per_rank, np.random.default_rng(seed)) * 1000 + seed
        largest += [assign(lengths, 16, time_budget_s=budget_s).loads.max() for budget_s in (1e-5, 1e-3, 1e-1)]
    assert largest[0] > largest[1] > largest[2]


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize(("num_items", "num_ranks"), [(8, 3), (70, 6), (131, 3)])
def test_backends_agree_to_the_last_step(num_items, num_ranks, equal_counts):
    # Thousands, and a single one that puts the bound between them: every kind of swap is tried until no step is left.
    for seed in range(5):
        lengths = 1000 * np.random.default_rng(seed).integers(1, 100, num_items)
        lengths[0] = 1
        native, reference = (
            assign(lengths, num_ranks, equal_counts=equal_counts, time_budget_s=1e-3, backend=backend)
            for backend in BACKENDS
        )
        check_equal(native, reference)
        check_equal(native, score(native.ranks, lengths, num_ranks))


@pytest.mark.parametrize("equal_counts", [False, True])
def test_backends_agree_where_few_of_many_ranks_swap(equal_counts):
    # Few values, so that ranks whose loads change then have those of others, and are ordered by their numbers.
    for seed in range(3):
        lengths = 10 * np.random.default_rng(seed).integers(1, 30, 500)
        lengths[0] = 1
        native, reference = (
            assign(lengths, 100, equal_counts=equal_counts, time_budget_s=2e-4, backend=backend) for backend in BACKENDS
        )
        check_equal(native, reference)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_weights_are_spread(backend):
    assert assign([0] * 10, 4, backend=backend).counts.tolist() == [3, 3, 2, 2]


def test_loads_that_leave_no_room_for_a_rank_in_64_bits():
    lengths = np.random.default_rng(0).integers(2**51, 2**52, 2000)
    for equal_counts in (False, True):
        native, reference = (assign(lengths, 300, equal_counts=equal_counts, backend=backend) for backend in BACKENDS)
        check_equal(native, reference)


def test_bound_rounds_the_mean_up_to_whole_tiles():
    assert lower_bound([256] * 5, 2) == 768
    assert assign([256] * 5, 2).imbalance == 1


def test_bound_counts_pigeonholes():
    # Three of seven items of 5, 5, 5, 5, 5, 5, 4 share one of three ranks: 5 + 5 + 4, where the mean is 12.
    assert lower_bound([5, 5, 5, 5, 5, 5, 4], 3) == 14


parts_of_items = st.lists(st.lists(small, max_size=5), min_size=1, max_size=20)


@given(parts=parts_of_items, num_ranks=st.integers(1, 5))
def test_several_lengths_an_item_add_their_squares(parts, num_ranks):
    weights = [sum(5 * length + 2 * length**2 for length in lengths) for lengths in parts]
    expected = assign(weights, num_ranks)
    check_equal(assign(parts, num_ranks, QUADRATIC), expected)
    padded = np.zeros((len(parts), 5), dtype=np.int64)
    for item, lengths in enumerate(parts):
        padded[item, : len(lengths)] = lengths
    check_equal(assign(padded, num_ranks, QUADRATIC), expected)
    check_equal(score(expected.ranks, padded, num_ranks, QUADRATIC), expected)
    assert lower_bound(parts, num_ranks, QUADRATIC) == expected.bound


def test_no_item_of_several_lengths():
    assert assign(np.zeros((0, 3), dtype=np.int64), 2).loads.tolist() == [0, 0]
