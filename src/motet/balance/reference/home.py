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

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from motet.balance.reference.bound import packed_bound
from motet.balance.reference.level import Holder, Item, level
from motet.balance.reference.nodes import firsts_of
from motet.balance.reference.result import AssignmentFields, placement
from motet.core.arrays import Int32Array, Int64Array


def packed_home(weights: Int64Array, home: Int32Array, node_sizes: Int32Array) -> AssignmentFields:
    """Balance sums of weights, int64 [num_items], >= 0, starting from `home`; their sum must fit int64.

    home: int32 [num_items], the rank that holds each item. node_sizes: int32 [num_nodes], the ranks of each node.
    O(num_items log num_items), plus the exchanges of `level`.
    """
    firsts = firsts_of(node_sizes)
    num_ranks = firsts[-1]
    bound = packed_bound(weights, num_ranks)
    items: list[Item] = sorted((-weight, item) for item, weight in enumerate(weights.tolist()))
    # 1. Nodes.
    nodes = _nodes(items, home.tolist(), firsts, bound)
    level(nodes)
    # 2. The ranks of each node.
    groups: list[Holder] = []
    for node, (first, last) in zip(nodes, pairwise(firsts)):
        on_ranks = _ranks_of_node(node, first, last - first, home, bound)
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


def _nodes(items: list[Item], home: list[int], firsts: list[int], bound: int) -> list[Holder]:
    """The items of each node. Target: the share of its ranks. Limit: its ranks times the bound, and 2^-18 more."""
    total = -sum(negated for negated, _ in items)
    nodes, num_ranks = [], firsts[-1]
    for first, last in pairwise(firsts):
        target = total * last // num_ranks - total * first // num_ranks
        nodes.append(Holder([], 0, target, min(total, (last - first) * (bound + (bound >> 18)))))
    for negated, item in items:
        node = nodes[bisect_right(firsts, home[item]) - 1]
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
