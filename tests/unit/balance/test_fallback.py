"""Without the native core: the same contract from numpy, and one warning."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import ACTIVE_BACKEND, fallback
from motet.core.assignment import Assignment
from unit.balance.contract import check_equal, check_structure
from unit.balance.test_packed import lengths_of_a_batch, load_of_rounds, longest_first_load, sample_lengths


def assign(lengths, num_ranks, equal_counts=False, num_steps=5_000_000):
    weights = np.array(lengths, dtype=np.int64)
    return Assignment(*fallback.packed(weights, num_ranks, equal_counts, num_steps))


@pytest.fixture(params=["one at a time", "in batches"], autouse=True)
def few_ranks(request, monkeypatch):
    monkeypatch.setattr(fallback, "FEW_RANKS", 256 if request.param == "one at a time" else 0)


@pytest.mark.parametrize("equal_counts", [False, True])
def test_contract(equal_counts):
    @given(lengths=lengths_of_a_batch, num_ranks=st.integers(1, 9))
    def check(lengths, num_ranks):
        placed = assign(lengths, num_ranks, equal_counts)
        check_structure(placed, len(lengths), num_ranks)
        assert placed.loads.tolist() == [
            sum(lengths[item] for item in placed.on_rank(rank)) for rank in range(num_ranks)
        ]
        worst = load_of_rounds if equal_counts else longest_first_load
        assert placed.loads.max() <= worst(lengths, num_ranks)
        assert not equal_counts or placed.counts.max() - placed.counts.min() <= 1
        check_equal(placed, assign(lengths, num_ranks, equal_counts))

    check()


def test_weights_of_60_bits():
    lengths = np.random.default_rng(0).integers(2**54, 2**55, 100).tolist()
    placed = assign(lengths, 7)
    assert placed.loads.max() <= longest_first_load(lengths, 7)


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("kind", ["audio frames", "image tiles", "sequences"])
def test_nearly_as_even_as_the_native_core(kind, equal_counts):
    lengths = sample_lengths(kind, 300 * 80, np.random.default_rng(0))
    assert assign(lengths, 300, equal_counts).imbalance <= 1.0004


def test_more_steps_are_not_worse():
    lengths = sample_lengths("audio frames", 64 * 6, np.random.default_rng(0))
    largest = [assign(lengths, 64, num_steps=num_steps).loads.max() for num_steps in (0, 10_000, 1_000_000)]
    assert largest[0] > largest[1] > largest[2]


WITHOUT_NATIVE_CORE = """
import sys, warnings
sys.modules["motet.balance._native"] = None
from motet.balance import ACTIVE_BACKEND, Padded, assign, assign_jointly, lower_bound
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert assign([3, 1, 2], 2).loads.tolist() == [3, 3]
    assert assign([3, 1, 2], 2, Padded()).loads.max() == 4
    assert assign_jointly([[3, 1], [1, 2]], 2).num_items == 2
    assert lower_bound([3, 1, 2], 2) == 3
assert ACTIVE_BACKEND == "fallback"
assert [str(warning.message)[:36] for warning in caught] == ["The native core of motet.balance is "], caught
"""


def test_all_works_without_the_native_core_after_one_warning():
    subprocess.run([sys.executable, "-c", WITHOUT_NATIVE_CORE], check=True)


def test_active_backend_is_native_here():
    assert ACTIVE_BACKEND == "native"
