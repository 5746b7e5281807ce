from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.analyze.mixture import MFLOP_PER_LENGTH
from motet.balance import assign, assign_jointly
from motet.balance.fragments import Overhead
from motet.balance.splitting import split
from motet.core.errors import ArgumentError
from unit.balance.contract import BACKENDS, check_equal, check_structure

OVERHEAD = Overhead(fixed=3, fraction=0.01)
GIANT = np.array([1000] + 120 * [5])

one_phase = st.lists(st.integers(0, 60) | st.integers(0, 2**40), max_size=12).map(
    lambda costs: np.array(costs, dtype=np.int64)
)
two_phases = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 60)), max_size=10).map(
    lambda rows: np.array(rows, dtype=np.int64).reshape(-1, 2)
)


def largest_loads(result):
    return int(np.atleast_2d(result.assignment.loads.T).max(axis=1).sum())


def check_split(result, costs, num_ranks, overhead, max_parts=None):
    """Each item once, its parts in order, on different ranks, with exact shares and the stated overhead."""
    rows = costs[:, None] if costs.ndim == 1 else costs
    fragment_rows = result.costs[:, None] if costs.ndim == 1 else result.costs
    check_structure(result.assignment, len(result.item), num_ranks)
    assert (np.diff(result.item) >= 0).all()
    np.testing.assert_array_equal(np.unique(result.item), np.arange(len(costs)))
    for item, row in enumerate(rows):
        mine = np.flatnonzero(result.item == item)
        assert result.part[mine].tolist() == list(range(len(mine)))
        assert (result.num_parts[mine] == len(mine)).all()
        assert len(mine) <= min(num_ranks, max_parts or num_ranks)
        assert len(set(result.assignment.ranks[mine].tolist())) == len(mine)
        ends = result.end[mine].tolist()
        assert result.begin[mine].tolist() == [0, *ends[:-1]]
        assert ends[-1] == result.units[item]
        assert (result.end[mine] > result.begin[mine]).all()
        extra = overhead.of(rows)[item] * (len(mine) > 1)
        for fragment in mine:
            begin, end, units = int(result.begin[fragment]), int(result.end[fragment]), int(result.units[item])
            share = [cost * end // units - cost * begin // units for cost in row.tolist()]
            assert (fragment_rows[fragment] == share + extra).all()
        assert (fragment_rows[mine].sum(axis=0) == row + len(mine) * extra).all()
    loads = np.zeros((num_ranks, rows.shape[1]), dtype=np.int64)
    np.add.at(loads, result.assignment.ranks, fragment_rows)
    np.testing.assert_array_equal(result.assignment.loads.reshape(num_ranks, -1), loads)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(one_phase | two_phases, st.integers(1, 6), st.none() | st.integers(1, 4), st.sampled_from([1.0, 1.02, 1.3]))
def test_split_keeps_every_item_whole_or_in_exact_parts_on_both_backends(costs, num_ranks, max_parts, target):
    results = [
        split(costs, num_ranks, OVERHEAD, max_parts=max_parts, target=target, backend=backend) for backend in BACKENDS
    ]
    check_split(results[0], costs, num_ranks, OVERHEAD, max_parts)
    check_equal(results[0].assignment, results[1].assignment)
    for field in ("item", "part", "num_parts", "begin", "end", "units", "costs"):
        np.testing.assert_array_equal(getattr(results[0], field), getattr(results[1], field))


@settings(max_examples=80, deadline=None)
@given(one_phase | two_phases, st.integers(1, 6), st.none() | st.integers(1, 4))
def test_split_is_never_worse_than_whole_items(costs, num_ranks, max_parts):
    whole = assign(costs, num_ranks) if costs.ndim == 1 else assign_jointly(costs, num_ranks)
    ideal = int(costs.sum())
    result = split(costs, num_ranks, OVERHEAD, max_parts=max_parts)
    whole_sum = int(np.atleast_2d(whole.loads.T).max(axis=1).sum())
    assert largest_loads(result) <= max(whole_sum, 1.02 * ideal / num_ranks + costs.ndim)


@settings(max_examples=80, deadline=None)
@given(one_phase, st.integers(1, 8), st.sampled_from([1.0, 1.02, 1.2]))
def test_one_phase_without_overhead_reaches_every_target_with_few_cuts(costs, num_ranks, target):
    result = split(costs, num_ranks, Overhead(), target=target)
    total = int(costs.sum())
    assert largest_loads(result) <= max(-(-total // num_ranks), target * total / num_ranks)
    assert len(result.item) - len(costs) <= num_ranks - 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_cut_where_whole_items_suffice(backend):
    rng = np.random.default_rng(0)
    one = rng.integers(1, 100, 80)
    result = split(one, 4, Overhead(), backend=backend)
    assert result.num_cut == 0
    check_equal(result.assignment, assign(one, 4, backend=backend))
    three = rng.integers(1, 100, (160, 3))
    assert split(three, 4, Overhead(), backend=backend).num_cut == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_giant_is_cut_into_equal_parts(backend):
    result = split(GIANT, 4, Overhead(), backend=backend)
    assert result.num_cut == 1
    assert result.num_parts[0] == 3
    assert np.ptp(result.costs[:3]) <= 1
    assert result.assignment.imbalance <= 1.02


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_stay_within_their_number_and_between_units(backend):
    in_two = split(GIANT, 4, Overhead(), max_parts=2, backend=backend)
    check_split(in_two, GIANT, 4, Overhead(), 2)
    assert largest_loads(in_two) == 500
    frames = split(GIANT, 4, Overhead(), divisible=[7] + 120 * [1], backend=backend)
    assert frames.num_cut == 1
    assert frames.num_parts[0] > 1
    assert frames.end[: frames.num_parts[0]].max() == 7
    whole = split(GIANT, 4, Overhead(), divisible=np.array([False] + 120 * [True]), backend=backend)
    assert whole.num_cut == 0
    assert largest_loads(whole) == 1000


def test_a_cut_that_costs_more_than_it_saves_is_not_made():
    assert split(GIANT, 4, Overhead(fixed=2000)).num_cut == 0
    assert split(GIANT, 4, Overhead(fraction=1.0)).num_cut == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "costs",
    [[], [0], [0, 0, 0], [5], [7] * 9, [1], [2**40] * 5, [2**62, 1, 1], [2**63 - 1]],
    ids=str,
)
def test_odd_cases(costs, backend):
    costs = np.array(costs, dtype=np.int64)
    for num_ranks in (1, 2, 8):
        result = split(costs, num_ranks, Overhead(), backend=backend)
        check_split(result, costs, num_ranks, Overhead())
        total = sum(costs.tolist())
        assert largest_loads(result) <= max(-(-total // num_ranks), total * 1_020_000 // 1_000_000 // num_ranks)
        joint = np.stack([costs // 2, np.zeros_like(costs)], axis=1)
        check_split(split(joint, num_ranks, Overhead(), backend=backend), joint, num_ranks, Overhead())


def fewest_cuts(costs, num_ranks, limit):
    """By trial of every placement and every choice of items to cut; cut items fill what room is left."""
    fewest = len(costs)
    for ranks in product(range(num_ranks + 1), repeat=len(costs)):  # the last rank stands for cut
        loads = np.bincount(ranks, costs, num_ranks + 1)
        if loads[:-1].max() <= limit:
            fewest = min(fewest, sum(rank == num_ranks for rank in ranks))
    return fewest


def test_cuts_are_near_the_fewest_possible():
    rng = np.random.default_rng(0)
    made = fewest = 0
    for _ in range(40):
        costs = np.maximum(rng.lognormal(4, 1, 6), 1).astype(np.int64)
        made += split(costs, 3, Overhead()).num_cut
        fewest += fewest_cuts(costs.tolist(), 3, max(-(-costs.sum() // 3), int(costs.sum() * 1.02 / 3)))
    assert fewest <= made <= 1.2 * fewest


@pytest.mark.parametrize(
    ("num_ranks", "per_rank", "most_cut"), [(8, 4, 0.35), (64, 4, 0.3), (64, 8, 0.1), (128, 16, 0.01)]
)
def test_long_items_do_not_keep_mixed_batches_from_balance(mixture, num_ranks, per_rank, most_cut):
    costs = mixture.draw(num_ranks * per_rank, np.random.default_rng(1), None) * np.array(MFLOP_PER_LENGTH)
    ideal = costs.sum() / num_ranks
    result = split(costs, num_ranks, Overhead())
    assert largest_loads(result) <= 1.02 * ideal
    assert result.num_cut <= most_cut * len(costs)
    by_phase = [split(column[column > 0], num_ranks, Overhead(fraction=0.01)) for column in costs.T]
    assert sum(largest_loads(phase) for phase in by_phase) <= 1.022 * ideal
    assert sum(phase.num_cut for phase in by_phase) <= most_cut * (costs > 0).sum()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"costs": [-1]}, r"costs\[0\] is -1"),
        ({"costs": [[[1]]]}, r"costs has shape \(1, 1, 1\)"),
        ({"costs": np.zeros((2, 0))}, "costs has shape"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"max_parts": 0}, "max_parts is 0"),
        ({"target": 0.9}, "target is 0.9"),
        ({"target": float("nan")}, "target is nan"),
        ({"divisible": [True]}, "divisible has shape"),
        ({"divisible": [1, 0]}, r"divisible\[1\] is 0"),
        ({"divisible": [1, -2]}, r"divisible\[1\] is -2"),
        ({"costs": [2**62, 2**62]}, "costs add up to 9223372036854775808"),
        ({"costs": [2**62, 5], "overhead": Overhead(fraction=1.0)}, "overhead of all parts"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        split(**{"costs": [3, 4], "num_ranks": 2, "overhead": Overhead()} | arguments)


@pytest.mark.parametrize("wrong", [{"fixed": -1}, {"fixed": 0.5}, {"fraction": -0.1}, {"fraction": float("nan")}])
def test_bad_overheads_are_named(wrong):
    with pytest.raises(ArgumentError, match=f"Overhead\\({next(iter(wrong))}="):
        Overhead(**wrong)
