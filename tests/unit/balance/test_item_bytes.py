"""What does not fit a rank whole is cut, however fast it would be whole; what fits is chosen by time."""

from dataclasses import replace

import numpy as np
import pytest

from motet.balance import Link, Packed, choose, choose_step
from motet.balance.item_bytes import ItemBytes, lacking_bytes
from motet.balance.phases import KeyExchange, Phase
from motet.core.assignment import Assignment

SLOW = Link(1e3, 10.0)
"""A link on which no cut pays."""


def bytes_of(kept, working=0, copied=0):
    kept = np.asarray(kept, dtype=np.int64)
    one = np.ones((len(kept), 1), dtype=np.int64)
    return ItemBytes(kept, working * one, np.array([1 << 62]), copied * kept // 100, 0 * one)


def backbone(rows, taken=None):
    rows = np.asarray(rows, dtype=np.int64)
    keys = (KeyExchange(0, 8, 4),)
    return Phase("backbone", rows, Packed(), np.arange(len(rows)), 1e-3, bytes=taken, rows=rows, keys=keys)


def bytes_on_ranks(phase, choice, num_ranks):
    found, cut = np.zeros(num_ranks), choice.fragments
    if cut is None:
        np.add.at(found, choice.assignments[0].ranks, phase.bytes.kept)
        return found
    np.add.at(
        found, cut.assignment.ranks, phase.bytes.of_fragments(cut.item, cut.end - cut.begin, cut.units[cut.item])[0]
    )
    return found


def test_an_item_that_no_rank_holds_is_cut_where_it_would_be_faster_whole():
    rows = np.array([400, 360, 350, 370, 300])
    phase = backbone(rows, bytes_of(rows * 10, copied=5))
    methods = ("joint", "split")
    whole, held = (choose([phase], 5, SLOW, methods=methods, room_bytes=room) for room in (4000, 3900))
    assert whole.method == "joint" and whole.lacking_bytes == 0
    assert held.method == "split" and held.lacking_bytes == 0
    assert held.predicted_s["split"] > 10 * held.predicted_s["joint"]
    assert "100 bytes more than a rank has" in held.why and bytes_on_ranks(phase, held, 5).max() <= 3900
    assert choose([phase], 5, SLOW, methods=methods).method == "joint"


def test_where_nothing_fits_the_least_is_lacking():
    phase = backbone([400, 100], bytes_of([4000, 1000]))
    choice = choose([phase], 2, SLOW, methods=("joint", "split"), room_bytes=2000)
    assert choice.method == "split" and 500 <= choice.lacking_bytes <= 600
    assert "split: " in choice.why and f"{choice.lacking_bytes:,} bytes more than a rank has" in choice.why


@pytest.mark.parametrize("seed", range(8))
def test_whatever_can_be_fitted_by_whole_items_or_equal_parts_is_fitted(seed):
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 6))
    rows = rng.integers(40, 2000, int(rng.integers(1, 12)))
    phase = backbone(rows, bytes_of(rows * rng.integers(1, 9, len(rows)), working=7, copied=10))
    # Each item over all ranks: what is kept in equal parts, copies of the rest, and what each layer works on.
    room = int(np.ceil(1.25 * phase.bytes.kept.sum() / num_ranks + 7 * len(rows) + 200))
    choice = choose([phase], num_ranks, SLOW, methods=("joint", "split"), room_bytes=room)
    assert choice.lacking_bytes == 0 and bytes_on_ranks(phase, choice, num_ranks).max() <= room


def test_images_are_cut_by_memory_too():
    sequences = replace(backbone([50, 50, 50, 50]), bytes=bytes_of([0, 0, 0, 0]))
    length = np.array([400, 400, 400, 440])
    size, keys = length // 4 * 8, (KeyExchange(0, 8, 4),)
    images = Phase(
        "image", length, Packed(), np.arange(4), 1e-3, size, bytes=bytes_of(length * 10), rows=length // 4, keys=keys
    )  # fmt: skip
    choice = choose([sequences, images], 4, SLOW, methods=("joint", "split"), room_bytes=4300)
    assert choice.method == "split" and choice.lacking_bytes == 0
    assert choice.cut_items["image"].num_cut >= 1 and choice.fragments is None


def test_a_step_that_lacks_memory_as_it_comes_is_deferred_where_that_fits():
    """Two long examples in one microbatch of two ranks, each with a short one: none fits beside another."""
    rows = np.array([300, 300, 300, 10, 10, 10])
    phase = backbone(rows, bytes_of(rows))
    given = np.array([0, 0, 0, 1, 1, 1])
    chosen = choose_step([phase], given, 2, Link(1e9, 0.0), methods=("joint",), room_bytes=320)
    assert chosen.is_deferred and all(choice.lacking_bytes == 0 for choice in chosen.choices)


def test_phases_share_a_rank_one_after_the_other():
    """What is kept adds up over phases; of what layers work on, that of the busiest counts, up to its most."""
    placed = Assignment(np.zeros(2, np.int32), np.array([0, 1]), np.array([0, 2]), np.array([2]), 2)
    first, second = bytes_of([10, 20], working=100), replace(bytes_of([1, 2], working=90), most=np.array([150]))
    assert lacking_bytes([(first, placed, None), (second, placed, None), (None, placed, None)], 1, 0) == 33 + 200
    assert lacking_bytes([(second, placed, None)], 1, 3) == 150
    assert lacking_bytes([(second, placed, None)], 1, None) == 0


def test_layers_with_a_whole_item_are_on_the_rank_with_its_largest_fragment():
    """A merge of the user's own keeps 100 of a sequence and works on 500, of which each rank keeps half."""
    taken = replace(bytes_of([4000]), whole=bytes_of([100], working=500))
    assert taken.alone.tolist() == [4600]
    assert taken.take(np.array([False])).whole.kept.tolist() == []
    for room, lacks in ((2600, 0), (2599, 1)):
        choice = choose([backbone([400], taken)], 2, SLOW, methods=["split"], room_bytes=room)
        assert choice.fragments.num_cut == 1 and choice.lacking_bytes == lacks
