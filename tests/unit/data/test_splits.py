from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from motet.data.config import DataConfig
from motet.data.left_out import LeftOut, LeftOutExample
from motet.data.splits import OwnSplits, SplitOrder

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=7).map(tuple)


@given(sizes=SIZES, seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_every_example_once_an_epoch(sizes, seed, epoch):
    taken = SplitOrder(sizes, seed).take(epoch * sum(sizes), sum(sizes))
    assert sorted(taken.tolist()) == list(range(sum(sizes)))


@given(sizes=SIZES, cuts=st.lists(st.integers(0, 200), max_size=6), shuffle=st.booleans())
def test_any_cut_gives_the_same_sequence(sizes, cuts, shuffle):
    whole = SplitOrder(sizes, 3, shuffle).take(0, 200)
    places = [0, *sorted(cuts), 200]
    parts = [SplitOrder(sizes, 3, shuffle).take(start, end - start) for start, end in pairwise(places)]
    assert np.concatenate(parts).tolist() == whole.tolist()


@given(sizes=SIZES, start=st.integers(0, 100))
def test_each_split_gives_its_share_of_any_stretch(sizes, start):
    """By any place of an epoch, a split has given what its size says, to within half an example a split."""
    order, num_examples = SplitOrder(sizes), sum(sizes)
    place = start % (num_examples + 1)
    split = np.searchsorted(np.cumsum(sizes), order.take(0, place), side="right")
    given_by = np.bincount(split, minlength=len(sizes))
    fair = place * np.array(sizes) / num_examples
    assert np.all(np.abs(given_by - fair) <= 0.5 + len(sizes) / 2 * np.array(sizes) / num_examples + 1e-9)


def test_splits_of_equal_size_take_turns_and_are_shuffled_apart():
    order = SplitOrder((50, 50, 50, 50), seed=1)
    ids = order.take(0, 400)
    assert (ids // 50).tolist() == [0, 1, 2, 3] * 100
    assert order.take(0, 200).tolist() != order.take(200, 200).tolist()
    within = (ids[:200] % 50).reshape(50, 4)
    assert all((within[:, 0] == within[:, other]).mean() < 0.2 for other in (1, 2, 3))
    assert SplitOrder((50, 50), seed=2).take(0, 9).tolist() != SplitOrder((50, 50), seed=3).take(0, 9).tolist()


def test_far_positions_of_many_large_splits_cost_nothing():
    sizes = tuple(range(10**8, 10**8 + 2560))
    order = SplitOrder(sizes, 1)
    assert len(set(order.take(7 * sum(sizes) + 5, 5000).tolist())) == 5000


def test_wrong_arguments():
    with pytest.raises(ValueError, match="each split must have an example"):
        SplitOrder((3, 0))
    with pytest.raises(ValueError, match="negative"):
        SplitOrder((3,)).take(-1, 2)


def test_examples_are_at_home_where_their_split_is():
    left_out = LeftOut.joined([LeftOut(num_bad=1, named=(LeftOutExample("a", "b", "c"),)), LeftOut(num_too_long=2)])
    assert len(left_out) == 3 and left_out.first() == "a: b: c"
    splits = OwnSplits({}, (3, 2, 4), ("x", "y", "z"), left_out, 12)
    assert splits.home(np.arange(9), 3).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert splits.home(np.arange(9), 2).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert splits.where(4) == ""
    with pytest.raises(KeyError):
        splits.tokens(4)


def data(**options) -> DataConfig:
    return DataConfig.model_validate({"tokenizer": "tokenizer", **options})


def test_the_name_of_a_split_has_the_rank():
    config = data(train=["a/{rank}.jsonl", "b/x-{rank:05d}.tar"])
    assert config.is_split and config.split(12) == ("a/12.jsonl", "b/x-00012.tar")
    assert not data(train=["train-{000..127}.tar"]).is_split


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"train": ["a/{rank}.jsonl", "b.jsonl"]}, r"b.jsonl in train is the same for all ranks, and a/{rank}.jsonl"),
        ({"train": ["a/{rank:x}.jsonl"]}, r"a rank is written {rank}, or {rank:05d}"),
        ({"train": ["a"], "heldout": ["h-{rank}.jsonl"]}, "all ranks must read the same held-out examples"),
        ({"train": ["a"], "num_splits": 2}, "num_splits has no effect without {rank}"),
        (
            {"train": ["a-{rank}", "b-{rank}"], "mixture": [1, 2]},
            "each split has its share by its size; remove mixture",
        ),
    ],
)
def test_what_is_no_split_is_refused(options, sentence):
    with pytest.raises(ValidationError, match=sentence):
        data(**options)
