"""Whole examples on ranks: all phases are balanced, and few bytes leave the node that holds them.

Not in the papers.

1. Balance the phases over nodes, one after the other. The rarest phase comes first: the one in which the fewest
   examples have a cost. Nodes exchange examples of the phase until each is near its share (`level`). An example moves
   only in the rarest of its phases. In a mixture, the many examples with text alone balance the backbone last, which
   also corrects what earlier exchanges did to it. Among examples that fit into a gap, those with the fewest bytes for
   their cost go first.
2. Do the same between the ranks of each node; imported examples have no rank there yet.
3. Do the same between all ranks.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.level import Holder, level
from motet.balance.reference.nodes import firsts_of
from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int32Array, Int64Array

NODE_BITS = 13
RANK_BITS = 12
"""The limit of a node, or of a rank, is 2^-bits above the bound of its ranks."""


def joint_home(
    costs: Int64Array,
    home: Int32Array,
    sizes: Int64Array,
    node_sizes: Int32Array,
) -> AssignmentFields:
    """Balance costs [num_examples, num_phases], >= 0, starting from `home`; the sum of all costs must fit int64.

    home: int32 [num_examples], the rank that holds each example. sizes: int64 [num_examples], its bytes.
    node_sizes: int32 [num_nodes], the number of ranks of each node.
    Result: loads [num_ranks, num_phases] and bound [num_phases].
    O(num_phases * num_examples log num_examples), plus the exchanges of `level`.
    """
    # 1. Nodes.
    firsts = firsts_of(node_sizes)
    num_ranks = firsts[-1]
    examples = _Examples(costs, sizes, num_ranks)
    node_of = np.repeat(np.arange(len(node_sizes)), node_sizes)[home].tolist()
    examples.level(examples.order, node_of, firsts, NODE_BITS)
    on_nodes: list[list[int]] = [[] for _ in firsts[1:]]
    for example in examples.order:
        on_nodes[node_of[example]].append(example)
    # 2. The ranks of each node.
    ranks = home.tolist()
    for on_node, (first, last) in zip(on_nodes, pairwise(firsts)):
        local_rank = [rank - first if first <= rank < last else -1 for rank in ranks]
        examples.level(on_node, local_rank, list(range(last - first + 1)), RANK_BITS)
        for example in on_node:
            ranks[example] = first + local_rank[example]
    # 3. All ranks.
    examples.level(examples.order, ranks, list(range(num_ranks + 1)), RANK_BITS)
    loads = np.zeros((num_ranks, costs.shape[1]), dtype=np.int64)
    np.add.at(loads, ranks, costs)
    return placement(np.array(ranks, dtype=np.int32), loads, np.array(examples.bound, dtype=np.int64))


class _Examples:
    """The examples with a cost. An example belongs to the rarest of its phases."""

    def __init__(self, costs: Int64Array, sizes: Int64Array, num_ranks: int) -> None:
        self.costs: list[list[int]] = costs.tolist()
        self.bound = [packed_bound(column, num_ranks) for column in costs.T]
        self.phases: list[int] = np.argsort(np.count_nonzero(costs, axis=0), kind="stable").tolist()  # rarest first
        self.phase_of = [next((p for p in self.phases if row[p]), -1) for row in self.costs]
        self.order: list[int] = []  # by phase, then highest cost first
        self.turns = [0] * len(costs)  # within its phase, fewest bytes for the cost first
        for phase in self.phases:
            of_phase = [example for example, rarest in enumerate(self.phase_of) if rarest == phase]
            of_phase.sort(key=lambda example: -self.costs[example][phase])
            self.order += of_phase
            of_phase.sort(key=lambda example: float(sizes[example]) / float(self.costs[example][phase]))
            for turn, example in enumerate(of_phase):
                self.turns[example] = turn

    def level(self, examples: list[int], group_of: list[int], firsts: list[int], bits: int) -> None:
        """Change the groups of `examples`, group_of [num_examples], until each group is near its share of each phase.

        Group g is the ranks firsts[g]:firsts[g + 1]; an example of group -1 is in no group yet.
        """
        totals = [sum(self.costs[example][phase] for example in examples) for phase in range(len(self.phases))]
        loads = [[0] * len(self.phases) for _ in firsts[1:]]
        for example in examples:
            if group_of[example] >= 0:
                self._add(example, loads[group_of[example]], 1)
        for phase in self.phases:
            # 1. The groups with their load, share and limit in this phase.
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
            # 2. Their examples; one without a group goes where the load is furthest below the share.
            for example in of_phase:
                if group_of[example] < 0:
                    lowest = min(range(len(groups)), key=lambda g: groups[g].load - groups[g].target)
                    group_of[example] = lowest
                    groups[lowest].load += self.costs[example][phase]
                    self._add(example, loads[lowest], 1)
                groups[group_of[example]].items.append((-self.costs[example][phase], example))
            # 3. Exchange, and update the loads of all phases.
            level(groups, self.turns)
            for index, group in enumerate(groups):
                for _, example in group.items:
                    self._add(example, loads[group_of[example]], -1)
                    self._add(example, loads[index], 1)
                    group_of[example] = index

    def _add(self, example: int, loads: list[int], sign: int) -> None:
        """Add (sign 1) or subtract (-1) the costs of an example to the loads [num_phases] of a group."""
        for phase, cost in enumerate(self.costs[example]):
            loads[phase] += sign * cost
