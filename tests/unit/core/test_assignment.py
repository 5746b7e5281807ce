import numpy as np

from motet.core.assignment import Assignment, csr_from_ranks


def assignment(ranks, num_ranks, loads=None, bound=0):
    ranks = np.array(ranks, dtype=np.int32)
    loads = np.zeros(num_ranks, dtype=np.int64) if loads is None else np.array(loads)
    return Assignment(ranks, *csr_from_ranks(ranks, num_ranks), loads=loads, bound=bound)


def test_csr_groups_items_by_rank_in_item_order():
    items, offsets = csr_from_ranks(np.array([2, 0, 2, 0, 0], dtype=np.int32), 4)
    assert items.tolist() == [1, 3, 4, 0, 2]
    assert offsets.tolist() == [0, 3, 3, 5, 5]
    assert items.dtype == offsets.dtype == np.int64


def test_items_of_each_rank():
    placed = assignment([2, 0, 2, 0, 0], 4)
    assert (placed.num_items, placed.num_ranks) == (5, 4)
    assert placed.counts.tolist() == [3, 0, 2, 0]
    assert [placed.on_rank(rank).tolist() for rank in range(4)] == [[1, 3, 4], [], [0, 2], []]


def test_slots_invert_items():
    placed = assignment([2, 0, 2, 0, 0], 3)
    assert placed.slots.tolist() == [3, 0, 4, 1, 2]
    assert placed.items[placed.slots].tolist() == [0, 1, 2, 3, 4]


def test_no_items():
    placed = assignment([], 3)
    assert placed.counts.tolist() == [0, 0, 0]
    assert placed.slots.tolist() == []
    assert placed.imbalance == 1


def test_imbalance_is_maximum_over_bound():
    assert assignment([0, 1], 2, loads=[6, 3], bound=5).imbalance == 1.2


def test_follow_sends_parts_where_their_owners_go():
    placed = assignment([1, 0, 1], 2)  # slots: item 1, item 0, item 2
    ranks, order = placed.follow(np.array([0, 0, 1, 2, 2, 1]))
    assert ranks.tolist() == [1, 1, 0, 1, 1, 0]
    assert order.tolist() == [2, 5, 0, 1, 3, 4]


def test_composition_leads_from_slot_to_slot():
    before, after = assignment([2, 0, 2, 0, 0], 3), assignment([0, 1, 0, 2, 2], 3)
    moves = before.moves_to(after)
    assert [after.items[slot] for slot in moves] == before.items.tolist()
    assert after.moves_to(before)[moves].tolist() == [0, 1, 2, 3, 4]


def test_a_phase_of_a_joint_assignment():
    joint = assignment([0, 1], 2, loads=[[6, 0], [3, 4]], bound=np.array([5, 4]))
    assert joint.imbalance.tolist() == [1.2, 1]
    second = joint.phase(1)
    assert (second.loads.tolist(), second.bound, second.imbalance) == ([0, 4], 4, 1)
    assert second.ranks is joint.ranks
