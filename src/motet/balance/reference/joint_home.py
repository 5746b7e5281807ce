"""Whole examples on ranks so that all phases are balanced at once and few bytes leave the node that holds them.

Not in the papers. Phase by phase, the scarcest first (the one in which the fewest examples have a cost): nodes exchange
examples of that phase until all are near their share of it (`level`). Examples with a cost in an earlier phase do not
move any more; in a mixture, the many examples of nothing but text level the backbone last, and with it what the
earlier exchanges did to it. Of the examples that fit into a gap, those with the fewest bytes for their cost go first.
Then the same between the ranks of each node, where imported examples have no home yet, and at last between all ranks.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.level import Holder, level
from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int32Array, Int64Array

NODE_BITS = 13
RANK_BITS = 12
"""A group is left alone up to 2^-bits above the bound of its ranks."""


def joint_home(
    costs: Int64Array,
    num_ranks: int,
    home: Int32Array,
    sizes: Int64Array,
    ranks_per_node: int,
) -> AssignmentFields:
    """Balance costs [num_examples, num_phases], >= 0, whose sum over all fits int64, starting from `home`.

    home: int32 [num_examples], the rank that holds each example; sizes: int64 [num_examples], the bytes that move with
    it. Loads are [num_ranks, num_phases], bound is [num_phases].
    O(num_phases * num_examples log num_examples) and the exchanges of `level`.
    """
    examples = _Examples(costs, sizes, num_ranks)
    firsts = [*range(0, num_ranks, ranks_per_node), num_ranks]
    node_of = (home // ranks_per_node).tolist()
    examples.level(examples.order, node_of, firsts, NODE_BITS)
    on_nodes: list[list[int]] = [[] for _ in firsts[1:]]
    for example in examples.order:
        on_nodes[node_of[example]].append(example)
    ranks = home.tolist()
    for on_node, (first, last) in zip(on_nodes, pairwise(firsts)):
        place_of = [rank - first if first <= rank < last else -1 for rank in ranks]
        examples.level(on_node, place_of, list(range(last - first + 1)), RANK_BITS)
        for example in on_node:
            ranks[example] = first + place_of[example]
    examples.level(examples.order, ranks, list(range(num_ranks + 1)), RANK_BITS)
    loads = np.zeros((num_ranks, costs.shape[1]), dtype=np.int64)
    np.add.at(loads, ranks, costs)
    return placement(np.array(ranks, dtype=np.int32), loads, np.array(examples.bound, dtype=np.int64))


class _Examples:
    """The examples that cost something, each in the scarcest of its phases."""

    def __init__(self, costs: Int64Array, sizes: Int64Array, num_ranks: int) -> None:
        self.costs: list[list[int]] = costs.tolist()
        self.bound = [packed_bound(column, num_ranks) for column in costs.T]
        self.phases: list[int] = np.argsort(np.count_nonzero(costs, axis=0), kind="stable").tolist()  # scarcest first
        self.phase_of = [next((p for p in self.phases if row[p]), -1) for row in self.costs]
        self.order: list[int] = []  # by phase, then costliest first
        self.turns = [0] * len(costs)  # in its phase, fewest bytes for the cost first
        for phase in self.phases:
            of_phase = [example for example, own in enumerate(self.phase_of) if own == phase]
            of_phase.sort(key=lambda example: -self.costs[example][phase])
            self.order += of_phase
            of_phase.sort(key=lambda example: float(sizes[example]) / float(self.costs[example][phase]))
            for turn, example in enumerate(of_phase):
                self.turns[example] = turn

    def level(self, examples: list[int], group_of: list[int], firsts: list[int], bits: int) -> None:
        """Change group_of [num_examples], of `examples` in their order, until each phase is near each group's share.

        Group g is the ranks firsts[g]:firsts[g + 1]. Where group_of is -1, the example comes from elsewhere.
        """
        totals = [sum(self.costs[example][phase] for example in examples) for phase in range(len(self.phases))]
        loads = [[0] * len(self.phases) for _ in firsts[1:]]
        for example in examples:
            if group_of[example] >= 0:
                self._move(example, loads[group_of[example]], 1)
        for phase in self.phases:
            of_phase = [example for example in examples if self.phase_of[example] == phase]
            groups = [
                Holder(
                    [],
                    load[phase],
                    totals[phase] * last // firsts[-1] - totals[phase] * first // firsts[-1],
                    (last - first) * (self.bound[phase] + (self.bound[phase] >> bits)),
                )
                for load, (first, last) in zip(loads, pairwise(firsts))
            ]
            for example in of_phase:
                if group_of[example] < 0:
                    least = min(range(len(groups)), key=lambda g: groups[g].load - groups[g].target)
                    group_of[example] = least
                    groups[least].load += self.costs[example][phase]
                    self._move(example, loads[least], 1)
                groups[group_of[example]].items.append((-self.costs[example][phase], example))
            level(groups, self.turns)
            for number, group in enumerate(groups):
                for _, example in group.items:
                    self._move(example, loads[group_of[example]], -1)
                    self._move(example, loads[number], 1)
                    group_of[example] = number

    def _move(self, example: int, loads: list[int], sign: int) -> None:
        for phase, cost in enumerate(self.costs[example]):
            loads[phase] += sign * cost
