"""Packed items on ranks: the largest sum of weights is small, and few items leave the node that holds them.

Not in the papers. OrchMLLM (section 5.2.2) balances first and renames the batches afterwards, so most tokens still
change nodes. Here

1. nodes export only their excess over their share (`level`);
2. the ranks of each node do the same, so that most items stay even on their rank;
3. all ranks do the same, for what remains.

With few items the result can be too high; motet.balance.home then takes the result of `packed`, its batches renamed by
`place_on_nodes`.
"""

from __future__ import annotations

import numpy as np

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.level import Holder, Item, level
from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int32Array, Int64Array


def packed_home(weights: Int64Array, num_ranks: int, home: Int32Array, ranks_per_node: int) -> AssignmentFields:
    """Balance sums of weights, int64 [num_items], >= 0, starting from `home`; their sum must fit int64.

    home: int32 [num_items], the rank that holds each item. The last node is smaller if ranks_per_node does not divide
    num_ranks. O(num_items log num_items), plus the exchanges of `level`.
    """
    bound = packed_bound(weights, num_ranks)
    items: list[Item] = sorted((-weight, item) for item, weight in enumerate(weights.tolist()))
    # 1. Nodes.
    nodes = _nodes(items, num_ranks, home.tolist(), ranks_per_node, bound)
    level(nodes)
    # 2. The ranks of each node.
    groups: list[Holder] = []
    for node in nodes:
        on_ranks = _ranks_of_node(node, len(groups), min(ranks_per_node, num_ranks - len(groups)), home, bound)
        level(on_ranks)
        groups += on_ranks
    # 3. All ranks.
    total = int(weights.sum())
    for rank, group in enumerate(groups):
        group.target = total * (rank + 1) // num_ranks - total * rank // num_ranks
    level(groups)
    ranks = np.zeros(len(weights), dtype=np.int32)
    for rank, group in enumerate(groups):
        ranks[[item for _, item in group.items]] = rank
    loads = [group.load for group in groups]
    return placement(ranks, np.array(loads, dtype=np.int64), bound)


def _nodes(items: list[Item], num_ranks: int, home: list[int], ranks_per_node: int, bound: int) -> list[Holder]:
    """The items of each node. Target: the share of its ranks. Limit: its ranks times the bound, and 2^-18 more."""
    total = -sum(negated for negated, _ in items)
    nodes = []
    for first in range(0, num_ranks, ranks_per_node):
        last = min(first + ranks_per_node, num_ranks)
        target = total * last // num_ranks - total * first // num_ranks
        nodes.append(Holder([], 0, target, min(total, (last - first) * (bound + (bound >> 18)))))
    for negated, item in items:
        node = nodes[home[item] // ranks_per_node]
        node.items.append((negated, item))
        node.load -= negated
    return nodes


def _ranks_of_node(node: Holder, first: int, size: int, home: Int32Array, bound: int) -> list[Holder]:
    """The ranks of a node: first the items at home, then imports, each where the load is furthest below target."""
    limit = bound + (bound >> 17)
    ranks = [Holder([], 0, node.load * (rank + 1) // size - node.load * rank // size, limit) for rank in range(size)]
    rank_of = {item: int(home[item]) - first for _, item in node.items if first <= home[item] < first + size}
    for negated, item in node.items:
        if item in rank_of:
            ranks[rank_of[item]].load -= negated
    for negated, item in node.items:
        if item not in rank_of:
            rank_of[item] = min(range(size), key=lambda rank: ranks[rank].load - ranks[rank].target)
            ranks[rank_of[item]].load -= negated
    for entry in node.items:
        ranks[rank_of[entry[1]]].items.append(entry)
    return ranks
