"""Whole examples over all phases: one contract, the same Assignment from both backends, the promised quality."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.analyze.mixture import MFLOP_PER_LENGTH, Caps
from motet.balance import assign, assign_jointly, lower_bound
from motet.core.errors import UserError
from unit.balance.contract import BACKENDS, check_equal, check_structure

cost = st.integers(0, 30) | st.just(0) | st.integers(0, 5).map(lambda tiles: 256 * tiles) | st.integers(0, 2**40)
costs_of_a_batch = st.integers(2, 5).flatmap(
    lambda num_phases: st.lists(st.lists(cost, min_size=num_phases, max_size=num_phases), min_size=1, max_size=40)
)


def objective(assignment):
    return int(assignment.loads.max(axis=0).sum())


def near_bound(assignment):
    """Within this much of what nobody undercuts the algorithm looks no further."""
    bound = int(assignment.bound.sum())
    return bound + (bound >> 11)


def check_assignment(assignment, costs, num_ranks):
    costs = np.asarray(costs, dtype=np.int64)
    check_structure(assignment, len(costs), num_ranks)
    loads = np.zeros((num_ranks, costs.shape[1]), dtype=np.int64)
    np.add.at(loads, assignment.ranks, costs)
    np.testing.assert_array_equal(assignment.loads, loads)
    assert assignment.bound.tolist() == [lower_bound(column, num_ranks) for column in costs.T]
    assert assignment.imbalance.shape == (costs.shape[1],)


def longest_first_by_sum(costs, num_ranks):
    loads = np.zeros((num_ranks, costs.shape[1]), dtype=np.int64)
    for example in np.argsort(-costs.sum(axis=1), kind="stable"):
        loads[loads.sum(axis=1).argmin()] += costs[example]
    return int(loads.max(axis=0).sum())


def longest_first_by_peak(costs, num_ranks):
    """LPT over vectors, each phase in shares of its sum, 2^-30 of it at a time."""
    shares = (costs / np.maximum(costs.sum(axis=0), 1) * 2**30).astype(np.int64)
    share_loads = np.zeros((num_ranks, costs.shape[1]), dtype=np.int64)
    loads = np.zeros_like(share_loads)
    for example in np.argsort(-shares.max(axis=1), kind="stable"):
        rank = (share_loads + shares[example]).max(axis=1).argmin()
        share_loads[rank] += shares[example]
        loads[rank] += costs[example]
    return int(loads.max(axis=0).sum())


def entangled(num_examples, num_phases, rng):
    """Every example has a cost in every phase, and none says anything about another."""
    return rng.lognormal(6, 0.8, (num_examples, num_phases)).astype(np.int64)


@given(costs=costs_of_a_batch, num_ranks=st.integers(1, 9), time_budget_s=st.sampled_from([0.0, 0.0002]))
def test_contract_and_equal_backends(costs, num_ranks, time_budget_s):
    native, reference = (
        assign_jointly(costs, num_ranks, time_budget_s=time_budget_s, backend=backend) for backend in BACKENDS
    )
    check_assignment(native, costs, num_ranks)
    check_equal(native, reference)


@pytest.mark.parametrize(("num_examples", "num_ranks"), [(320, 8), (128, 32), (400, 2)])
def test_equal_backends_on_mixed_batches(mixture, num_examples, num_ranks):
    costs = mixture.draw(num_examples, np.random.default_rng(0), Caps())
    native, reference = (assign_jointly(costs, num_ranks, time_budget_s=0.0005, backend=name) for name in BACKENDS)
    check_equal(native, reference)


@given(costs=costs_of_a_batch, num_ranks=st.integers(1, 9))
def test_never_worse_than_longest_first(costs, num_ranks):
    placed = assign_jointly(costs, num_ranks, time_budget_s=0.0002)
    costs = np.array(costs)
    baseline = min(longest_first_by_sum(costs, num_ranks), longest_first_by_peak(costs, num_ranks))
    assert objective(placed) <= max(baseline, near_bound(placed))


@pytest.mark.parametrize("examples_per_rank", [4, 8, 16, 32])
def test_mixed_batches_of_any_size_are_no_worse_than_longest_first(mixture, examples_per_rank):
    costs = mixture.draw(32 * examples_per_rank, np.random.default_rng(0), Caps()) * np.array(MFLOP_PER_LENGTH)
    placed = assign_jointly(costs, 32)
    baseline = min(longest_first_by_sum(costs, 32), longest_first_by_peak(costs, 32))
    assert objective(placed) <= max(baseline, near_bound(placed))


@given(
    costs=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6),
    num_ranks=st.integers(1, 3),
)
def test_close_to_brute_force(costs, num_ranks):
    costs = np.array(costs)
    best = min(
        sum(np.max([costs[np.array(ranks) == rank].sum(axis=0) for rank in range(num_ranks)], axis=0))
        for ranks in product(range(num_ranks), repeat=len(costs))
    )
    placed = assign_jointly(costs, num_ranks)
    assert placed.bound.sum() <= best <= objective(placed) <= 1.5 * best


@pytest.mark.parametrize(("examples_per_rank", "goal"), [(60, 1.002), (32, 1.005)])
@pytest.mark.parametrize("unit", [MFLOP_PER_LENGTH, (1, 1, 1)], ids=["FLOPs", "lengths"])
@pytest.mark.parametrize("num_ranks", [64, 128, 512])
def test_mixed_batches_are_balanced_in_all_phases(mixture, num_ranks, unit, examples_per_rank, goal):
    for seed in range(3):
        lengths = mixture.draw(num_ranks * examples_per_rank, np.random.default_rng(seed), Caps())
        costs = lengths * np.array(unit)
        placed = assign_jointly(costs, num_ranks)
        ideal = costs.sum(axis=0) / num_ranks
        assert objective(placed) / ideal.sum() <= goal
        assert (placed.loads.max(axis=0) / ideal).max() <= 1.005


def test_very_many_ranks(mixture):
    num_ranks = 5_000  # Examples times ranks are above reference/joint.py: MAX_PEAKS.
    costs = mixture.draw(num_ranks * 32, np.random.default_rng(0), Caps()) * np.array(MFLOP_PER_LENGTH)
    placed = assign_jointly(costs, num_ranks)
    assert (np.bincount(placed.ranks, minlength=num_ranks) > 0).all()
    assert objective(placed) / (costs.sum() / num_ranks) <= 1.02


def test_sixteen_examples_a_rank(mixture):
    costs = mixture.draw(128 * 16, np.random.default_rng(0), Caps()) * np.array(MFLOP_PER_LENGTH)
    placed = assign_jointly(costs, 128)
    assert objective(placed) / (costs.sum() / 128) <= 1.02


@pytest.mark.parametrize("num_phases", [2, 3])
def test_phases_that_every_example_has(num_phases):
    costs = entangled(64 * 60, num_phases, np.random.default_rng(0))
    placed = assign_jointly(costs, 64)
    assert objective(placed) / placed.bound.sum() <= 1.002


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_time_is_never_worse(backend):
    costs = entangled(160, 3, np.random.default_rng(0))
    placed = [objective(assign_jointly(costs, 8, time_budget_s=s, backend=backend)) for s in (0, 0.0001, 0.001)]
    assert placed == sorted(placed, reverse=True)
    assert placed[-1] < placed[0]


@pytest.mark.parametrize("backend", BACKENDS)
@given(lengths=st.lists(st.integers(0, 2**20), max_size=40), num_ranks=st.integers(1, 9))
def test_one_phase_is_packed(backend, lengths, num_ranks):
    costs = np.array(lengths, dtype=np.int64).reshape(-1, 1)
    placed, packed = assign_jointly(costs, num_ranks, backend=backend), assign(lengths, num_ranks, backend=backend)
    check_assignment(placed, costs, num_ranks)
    assert placed.ranks.tolist() == packed.ranks.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "costs",
    [np.zeros((0, 3)), [[7, 0]], [[7, 7]] * 3, [[0, 0, 0]] * 10, [[5, 5]] * 40, [[5, 0]] * 20 + [[0, 3]] * 20],
    ids=["no example", "one", "fewer than ranks", "costs nothing", "equal", "two kinds"],
)
def test_odd_batches(backend, costs):
    placed = assign_jointly(costs, 4, backend=backend)
    check_assignment(placed, costs, 4)
    assert (placed.imbalance == 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_beside_a_giant_the_sum_counts(backend):
    costs = [[100, 3]] + [[1, 3]] * 31
    placed = assign_jointly(costs, 4, backend=backend)
    # With k small ones beside the giant: 100 + k, and 3 for each third of the 31 - k others. No k gives less than 131.
    assert objective(placed) == 131


@pytest.mark.parametrize("backend", BACKENDS)
def test_examples_that_cost_nothing_are_dealt_out(backend):
    placed = assign_jointly([[0, 0]] * 10 + [[4, 9]], 4, backend=backend)
    assert sorted(placed.counts.tolist()) in ([2, 2, 3, 4], [2, 3, 3, 3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_costs_of_62_bits(backend):
    costs = np.random.default_rng(0).integers(2**53, 2**54, (64, 3))
    check_assignment(assign_jointly(costs, 5, time_budget_s=0.001, backend=backend), costs.tolist(), 5)
    assert assign_jointly([[2**62, 2**62 - 1]], 2, backend=backend).loads.max() == 2**62


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_examples_on_few_ranks(backend):
    costs = entangled(1500, 2, np.random.default_rng(0))
    placed = assign_jointly(costs, 2, time_budget_s=0.002, backend=backend)
    assert objective(placed) <= near_bound(placed)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: assign_jointly([[1, 2]], 0), "num_ranks is 0; it must be at least 1"),
        (lambda: assign_jointly([[1, 2], [3, -1]], 2), r"costs\[1, 1\] is -1; it must be at least 0"),
        (lambda: assign_jointly([[1.5, 1]], 2), r"costs\[0, 0\] is 1.5; it must be a whole number"),
        (lambda: assign_jointly([[1.0, np.nan]], 2), r"costs\[0, 1\] is nan"),
        (lambda: assign_jointly([[2.0**53, 1]], 2), "must be below 2\\^53"),
        (lambda: assign_jointly([1, 2], 2), r"costs has shape \(2,\)"),
        (lambda: assign_jointly(np.zeros((3, 0)), 2), r"costs has shape \(3, 0\); it must have at least one phase"),
        (lambda: assign_jointly([[2**62, 2**62]], 2), r"costs add up to 9223372036854775808, past 2\^63 - 1"),
        (lambda: assign_jointly([[1, 2]], 2, time_budget_s=-1), "time_budget_s is -1; it must be"),
        (lambda: assign_jointly([[1, 2]], 2, time_budget_s=float("nan")), "time_budget_s is nan; it must be"),
        (lambda: assign_jointly([[1, 2]], 2, backend="fast"), "'native' or 'reference'"),
    ],
)
def test_wrong_input_gets_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        call()
    assert isinstance(raised.value, UserError)
