"""The order of groups: every example once an epoch, no group above a cap, a pure function of seed and position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import dist_ratio
from motet.core.errors import UserError
from motet.data.groups import GroupedOrder, group_caps

CAPS = {"image": 40, "audio": 30, "backbone": 90}
examples = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 35), st.integers(1, 110)), min_size=1, max_size=40
)  # fmt: skip


def order_of(columns, seed=0, caps=CAPS):
    totals = dict(zip(CAPS, np.array(columns, dtype=np.int64).T.copy()))
    for column in totals.values():
        column[0] = 1  # one example under all caps
    return GroupedOrder(totals, caps, seed)


def steps(order, position, batch_size, count):
    taken = []
    for _ in range(count):
        taken.append(order.step(position, batch_size))
        position += len(taken[-1].ids)
    return taken


@given(columns=examples, seed=st.integers(0, 2**32), batch_size=st.integers(1, 7))
def test_every_example_is_in_one_group_of_an_epoch_and_no_group_is_above_a_cap(columns, seed, batch_size):
    order, num_examples = order_of(columns, seed), len(columns)
    num_steps = -(-2 * num_examples // batch_size)
    taken = steps(order, 0, batch_size, num_steps)
    ids = np.concatenate([step.ids for step in taken])
    for epoch in (ids[:num_examples], ids[num_examples : 2 * num_examples]):
        assert sorted(epoch.tolist()) == list(range(num_examples))
    above = set(order.oversized.tolist())
    for step in taken:
        assert sorted(set(step.group.tolist())) == list(range(batch_size)) and (np.diff(step.group) >= 0).all()
        for number in range(batch_size):
            group = step.ids[step.group == number]
            sums = {name: int(order.totals[name][group].sum()) for name in CAPS}
            assert all(sums[name] <= order.largest[name] for name in CAPS)
            assert len(group) == 1 if above & set(group.tolist()) else all(sums[name] <= CAPS[name] for name in CAPS)


@given(columns=examples, seed=st.integers(0, 2**32), first=st.integers(1, 4), second=st.integers(1, 4))
def test_from_any_step_on_another_order_takes_the_same_groups(columns, seed, first, second):
    whole = steps(order_of(columns, seed), 0, first, 6)
    position = sum(len(step.ids) for step in whole[:3])
    resumed = steps(order_of(columns, seed), position, second, 6)
    after = np.concatenate([step.ids for step in whole[3:]])
    again = np.concatenate([step.ids for step in resumed])
    shorter = min(len(after), len(again))
    assert after[:shorter].tolist() == again[:shorter].tolist()


def test_seeds_and_epochs_group_differently():
    columns = np.random.default_rng(0).integers(1, 30, (200, 3))
    first, second = (order_of(columns).epoch(number).items.tolist() for number in (0, 1))
    assert first != second and first == order_of(columns).epoch(0).items.tolist()
    assert first != order_of(columns, seed=1).epoch(0).items.tolist()


def test_steps_of_full_groups_come_first_and_are_even():
    rng = np.random.default_rng(0)
    image = rng.choice([0, 256, 512, 1024], 4000)
    totals = {"image": image, "backbone": image // 4 + rng.integers(20, 400, 4000)}
    order = GroupedOrder(totals, group_caps("auto", totals))
    epoch = order.epoch(0)
    num_steps = epoch.num_full // 16
    assert num_steps > 20
    taken = steps(order, 0, 16, num_steps)
    at_random = rng.permutation(4000)[: 4000 // 64 * 64].reshape(-1, 16, 4)
    for column in totals.values():
        by_rank = np.array([np.bincount(step.group, column[step.ids], 16) for step in taken]).astype(np.int64)
        assert dist_ratio(by_rank) < dist_ratio(column[at_random].sum(axis=2)) / 2
    # Of what is left the largest come first, so that ranks with uneven groups wait for like ones.
    last = np.add.reduceat(totals["backbone"][epoch.items], epoch.offsets[:-1])[epoch.num_full + epoch.num_oversized :]
    assert last[:5].mean() > last[-5:].mean()


def test_an_epoch_may_end_inside_a_step():
    order = GroupedOrder({"backbone": np.array([5, 5, 5])}, {"backbone": 5})
    step = order.step(position=2, batch_size=3)
    assert step.ids[0] == order.epoch(0).items[2] and step.ids[1:].tolist() == order.epoch(1).items[:2].tolist()
    assert step.group.tolist() == [0, 1, 2]


def test_a_position_inside_a_group_is_an_error():
    order = GroupedOrder({"backbone": np.array([2, 2, 2, 2])}, {"backbone": 4})
    with pytest.raises(ValueError, match="position 1 is inside a group of epoch 0"):
        order.step(1, 1)


def test_caps_that_do_not_fit_get_one_sentence():
    totals = {"image": np.array([9, 0]), "backbone": np.array([10, 20])}
    assert group_caps({"backbone": 30, "image": 9}, totals) == {"image": 9, "backbone": 30}
    with pytest.raises(
        UserError, match=r"data\.group has caps of image; it must have one of each phase of the model: i"
    ):
        group_caps({"image": 9}, totals)
    with pytest.raises(UserError, match=r"no example is under all caps, .* is image 0, backbone 10; raise the caps"):
        group_caps({"image": 8, "backbone": 19}, totals)
    assert group_caps("auto", totals)["backbone"] == 60
