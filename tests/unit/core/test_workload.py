from dataclasses import replace

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.workload import BatchLengths, ItemLengths, Workload, home_ranks


@pytest.fixture
def batch():
    images = ItemLengths(example=np.array([0, 2, 2, 3]), length=np.array([10, 20, 21, 30]), num_tokens=np.arange(4))
    return BatchLengths(
        sequence=np.array([100, 101, 102, 103]),
        num_targets=np.array([1, 2, 3, 4]),
        home=np.array([0, 0, 1, 1], dtype=np.int32),
        items={"image": images},
    )


def test_keep_drops_examples_with_their_items_and_renumbers(batch):
    kept = batch.keep(np.array([False, True, True, True]))
    assert kept.num_examples == 3
    assert kept.sequence.tolist() == [101, 102, 103]
    assert kept.num_targets.tolist() == [2, 3, 4]
    assert kept.home.tolist() == [0, 1, 1]
    assert kept.items["image"].example.tolist() == [1, 1, 2]
    assert kept.items["image"].length.tolist() == [20, 21, 30]
    assert kept.items["image"].num_tokens.tolist() == [1, 2, 3]
    assert kept.items["image"].num_items == 3


def test_keep_nothing_and_everything(batch):
    assert batch.keep(np.zeros(4, dtype=bool)).items["image"].num_items == 0
    assert batch.keep(np.ones(4, dtype=bool)).items["image"].example.tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize(
    ("num_examples", "num_ranks", "expected"),
    [(0, 2, []), (1, 4, [0]), (4, 2, [0, 0, 1, 1]), (5, 3, [0, 0, 1, 1, 2]), (3, 4, [0, 1, 2])],
)
def test_home_ranks_are_consecutive_and_even(num_examples, num_ranks, expected):
    home = home_ranks(num_examples, num_ranks)
    assert home.tolist() == expected
    assert home.dtype == np.int32


def test_take_repeats_and_reorders_examples_with_their_items(batch):
    taken = batch.take(np.array([2, 1, 2, 0]))
    assert taken.sequence.tolist() == [102, 101, 102, 100]
    assert taken.items["image"].example.tolist() == [0, 0, 2, 2, 3]
    assert taken.items["image"].length.tolist() == [20, 21, 20, 21, 10]
    assert batch.take(np.array([], dtype=np.int64)).items["image"].num_items == 0


def test_a_workload_draws_in_proportion_to_weights(batch):
    drawn = Workload("made", batch, weight=np.array([0.0, 1.0, 3.0, 0.0])).draw(4000, np.random.default_rng(0))
    assert set(drawn.sequence.tolist()) == {101, 102}
    assert (drawn.sequence == 102).mean() == pytest.approx(0.75, abs=0.03)
    assert drawn.items["image"].num_items == 2 * (drawn.sequence == 102).sum()


def test_what_is_chosen_is_what_is_drawn(batch):
    workload = Workload("here", batch, weight=np.array([1.0, 2.0, 3.0, 4.0]))
    chosen = workload.choose(20, np.random.default_rng(7))
    assert batch.sequence[chosen].tolist() == workload.draw(20, np.random.default_rng(7)).sequence.tolist()


def test_examples_keep_their_group_and_a_draw_of_examples_has_none(batch):
    grouped = replace(batch, group=np.arange(batch.num_examples) // 2)
    taken = np.array([batch.num_examples - 1, 0])
    assert grouped.take(taken).group.tolist() == [(batch.num_examples - 1) // 2, 0]
    assert batch.take(taken).group is None
    assert BatchLengths.joined([grouped, grouped]).group is None
    assert Workload("groups", grouped).draw(3, np.random.default_rng(0)).group is None


def test_a_step_of_groups_is_one_of_the_epoch():
    sequence = np.arange(1, 8)
    group = np.array([0, 0, 1, 2, 2, 3, 4])
    workload = Workload("groups", BatchLengths(sequence, sequence, np.zeros(7, np.int32), {}, group))
    picked = workload.groups(np.array([2, 0]))
    assert (picked.sequence.tolist(), picked.group.tolist()) == ([4, 5, 1, 2], [0, 0, 1, 1])
    steps = {tuple(workload.draw_groups(2, np.random.default_rng(seed)).sequence.tolist()) for seed in range(40)}
    # The step at the end of the epoch goes on from its beginning.
    assert steps == {(1, 2, 3), (4, 5, 6), (7, 1, 2)}
    assert workload.draw_groups(2, np.random.default_rng(0)).group.tolist()[0] == 0


def test_a_step_without_tokens_is_refused():
    sequence = np.array([0, 0, 0, 5])
    workload = Workload("lengths.csv", BatchLengths(sequence, sequence, np.zeros(4, np.int32), {}))
    empty = next(seed for seed in range(40) if 3 not in workload.choose(1, np.random.default_rng(seed)))
    with pytest.raises(UserError, match=r"A batch of 1 drawn from lengths\.csv has no tokens"):
        workload.draw(1, np.random.default_rng(empty))
    none = BatchLengths(0 * sequence, 0 * sequence, np.zeros(4, np.int32), {}, group=np.arange(4) // 2)
    for draw in (Workload("lengths.csv", none).draw, Workload("lengths.csv", none).draw_groups):
        with pytest.raises(UserError, match=r"lengths\.csv has no tokens: the sequence of every example is empty"):
            draw(1, np.random.default_rng(0))
