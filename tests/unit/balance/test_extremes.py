"""The native core beside the reference where numbers are as large as they may be, or there is next to nothing to place.

`make test-sanitized` runs these under sanitizers, which see what happens to come out right.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from random import Random

import numpy as np
import pytest

from motet.balance import assign
from motet.balance.backend import algorithms
from motet.balance.costs import Packed, Padded, PaddedAttention
from motet.core.errors import ArgumentError
from motet.core.limits import INT64_MAX
from unit.balance.contract import check_equal

native, reference = algorithms("native"), algorithms("reference")
TOTALS = (10, 2**31 + 5, 2**53 + 1, INT64_MAX - 1, INT64_MAX)
COUNTS = (0, 1, 2, 5, 13, 60)
RANKS = (1, 2, 3, 7, 33)


def drawn(random, count, total):
    """Numbers of 0 or more that add up to at most `total`."""
    most = total // max(count, 1)
    match random.randrange(6):
        case 0:
            return [most] * count
        case 1:
            return [random.randint(0, most) for _ in range(count)]
        case 2:
            return [random.choice((0, most)) for _ in range(count)]
        case 3:
            return [max(most - random.randint(0, 3), 0) for _ in range(count)]
        case 4:
            return [most >> random.randrange(40) for _ in range(count)]
    heaviest = random.randrange(max(count, 1))
    return [total * (item == heaviest) for item in range(count)]


def node_sizes(random, num_ranks):
    sizes = []
    while sum(sizes) < num_ranks:
        sizes.append(random.randint(1, num_ranks - sum(sizes)))
    return np.array(sizes, dtype=np.int32)


def check_alike(name, *arguments):
    found, right = getattr(native, name)(*arguments), getattr(reference, name)(*arguments)
    pairs = zip(found, right, strict=True) if isinstance(found, tuple) else [(found, right)]
    for one, other in pairs:
        np.testing.assert_array_equal(one, other, err_msg=f"{name}{arguments}")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_sums_up_to_the_largest_integer_give_what_the_reference_gives(seed):
    random = Random(seed)
    for total, count, num_ranks in product(TOTALS, COUNTS, RANKS):
        weights = np.array(drawn(random, count, total), dtype=np.int64)
        home = np.array([random.randrange(num_ranks) for _ in range(count)], dtype=np.int32)
        nodes = node_sizes(random, num_ranks)
        check_alike("packed", weights, num_ranks, random.random() < 0.5, 2000)
        check_alike("packed_bound", weights, num_ranks)
        check_alike("packed_home", weights, home, nodes)
        batches = np.array([random.randrange(num_ranks) for _ in range(count)], dtype=np.int32)
        check_alike("place_on_nodes", home, batches, weights, nodes)
        longest = total // max(count, 1)
        lengths = np.array([max(longest - random.randint(0, 4), 0) for _ in range(count)], dtype=np.int64)
        check_alike("padded", lengths, num_ranks, 1, 0)
        check_alike("padded_attention", np.sqrt(lengths / 2).astype(np.int64), num_ranks, 1, 1)
        num_phases = random.choice((1, 2, 5))
        costs = np.array(drawn(random, count * num_phases, total), dtype=np.int64).reshape(count, num_phases)
        check_alike("joint", costs, num_ranks, 20_000)
        check_alike("joint_home", costs, home, weights, nodes)


def test_one_item_as_heavy_as_can_be_has_nothing_to_swap():
    weights = np.zeros(13, dtype=np.int64)
    weights[1] = INT64_MAX
    check_alike("packed", weights, 4, False, 100_000)


@pytest.mark.parametrize(
    "weights",
    [
        np.ones(4, dtype=np.int32),
        np.ones(4, dtype=np.float64),
        np.full(4, np.nan),
        np.ones(8, dtype=np.int64)[::2],
        np.ones((2, 2), dtype=np.int64),
    ],
    ids=["int32", "float64", "nan", "strided", "two axes"],
)
def test_arrays_of_another_kind_are_refused_rather_than_read(weights):
    for call in (lambda: native.packed(weights, 2, False, 0), lambda: native.padded(weights, 2, 1, 0)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            call()


@pytest.mark.parametrize("kind", [Packed, Padded, PaddedAttention])
def test_a_coefficient_that_is_no_int64_is_refused_even_of_items_without_a_length(kind):
    with pytest.raises(ArgumentError, match=r"to 2\^63 - 1"):
        assign([0, 0], 2, cost=kind(2**63, 1))


def test_more_ranks_than_int32_counts_are_refused():
    with pytest.raises(ArgumentError, match=r"num_ranks is 2147483648; it must be below 2\^31"):
        assign([1], 2**31)


def test_threads_that_place_at_once_place_as_one():
    batches = [np.random.default_rng(seed).integers(0, 10_000, 100 * (seed + 1)) for seed in range(8)]

    def place(lengths):
        return [assign(lengths, num_ranks, cost=cost) for num_ranks in (3, 40) for cost in (Packed(1, 1), Padded())]

    alone = [place(lengths) for lengths in batches]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(place, batches * 4))
    for one, other in zip(together, alone * 4, strict=True):
        for a, b in zip(one, other, strict=True):
            check_equal(a, b)
