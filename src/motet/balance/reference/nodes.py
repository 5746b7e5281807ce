"""The node that computes each balanced batch, so that the source that sends most to other nodes sends little.

A source is a rank that holds items; a batch is the items that a placement puts on one rank.

OrchMLLM Algorithm 3 (section 5.2.2) after equation 5, corrected: x[batch, node] is boolean; only what is *sent* counts;
equation 5 sums the volume to *other* nodes. The rank inside the node does not matter. `exactly_on_nodes` solves this
integer program. `place_on_nodes` comes near its optimum in milliseconds:

1. Start: again and again, the source that sends most gets the batch of which it holds most on its node.
2. Tabu search: swap a batch on the node of the source that sends most for a batch of which this source holds more. The
   best swap has the smallest penalty: sum over sources of max(0, sent - threshold)^2, where the threshold is a little
   below the smallest maximum so far. It is made even if the penalty rises. A swapped batch is then fixed for two to
   five swaps; the varying number keeps the search from running in a circle.
3. The result is the state with the smallest maximum; a tie goes to the one in which all sources send least in total.
"""

from __future__ import annotations

import heapq
from itertools import accumulate, pairwise

import numpy as np

from motet.core.arrays import Float64Array, Int32Array, Int64Array

VOLUME_BITS = 24
"""The volume of a source is cut to so many bits, so that sums of squares fit 64 bits in the native core."""

MAX_SWAPS = 1000


def place_on_nodes(sources: Int32Array, batches: Int32Array, sizes: Int64Array, node_sizes: Int32Array) -> Int64Array:
    """The rank of each batch, int64 [num_ranks], a permutation, from the source, the batch and the size of each item.

    node_sizes: int32 [num_nodes], the number of ranks of each node. What a source holds must fit int64.
    O(num_ranks^2), then up to 1000 swaps of O(ranks of a node * batches of a source * sources of a batch on a node).
    This is for readers; it is slow for thousands of ranks.
    """
    num_ranks = int(node_sizes.sum())
    volume = np.zeros((num_ranks, num_ranks), dtype=np.int64)  # [source, batch]
    np.add.at(volume, (sources, batches), sizes)
    renaming = _Renaming(volume, node_sizes)
    renaming.start()
    renaming.swap_batches()
    return ranks_of_nodes(np.array(renaming.node_of, dtype=np.int64))


def firsts_of(node_sizes: Int32Array) -> list[int]:
    """The first rank of each node, and the number of all ranks behind them."""
    return list(accumulate(node_sizes.tolist(), initial=0))


def ranks_of_nodes(node_of: Int64Array) -> Int64Array:
    """The rank of each batch, int64 [num_ranks]: the batches of a node on its ranks, in batch order."""
    ranks = np.empty(len(node_of), dtype=np.int64)
    ranks[np.argsort(node_of, kind="stable")] = np.arange(len(node_of))
    return ranks


def exactly_on_nodes(volume: Int64Array, node_sizes: Int32Array) -> Int64Array:
    """As `place_on_nodes`, but optimal, to HiGHS's tolerance of 1e-6. From 64 ranks on it takes seconds to hours.

    Variables: x[batch, node], 0 or 1, and the maximum that a source sends. Minimise the maximum so that

    - for each source: held - sum over its batches on its node (volume * x) <= maximum
    - for each batch: it is on one node
    - for each node: it has as many batches as ranks
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    num_ranks = len(volume)
    num_nodes = len(node_sizes)
    node = np.repeat(np.arange(num_nodes), node_sizes)
    num_variables = num_ranks * num_nodes
    held = volume.sum(axis=1)
    unit = max(int(held.max(initial=0)), 1)

    def rows(row: Int64Array, column: Int64Array, value: Float64Array, count: int) -> coo_array:
        return coo_array((value, (row, column)), shape=(count, num_variables + 1))

    source, batch = np.nonzero(volume)
    each = np.arange(num_ranks)
    kept = rows(
        np.concatenate([source, each]),
        np.concatenate([batch * num_nodes + node[source], np.full(num_ranks, num_variables)]),
        np.concatenate([volume[source, batch] / unit, np.ones(num_ranks)]),
        num_ranks,
    )
    x, ones = np.arange(num_variables), np.ones(num_variables)
    result = milp(
        c=np.concatenate([np.zeros(num_variables), np.ones(1)]),
        integrality=np.concatenate([ones, np.zeros(1)]),
        bounds=Bounds(0, np.concatenate([ones, [np.inf]])),
        constraints=[
            LinearConstraint(kept.tocsr(), held / unit, np.inf),
            LinearConstraint(rows(x // num_nodes, x, ones, num_ranks).tocsr(), 1, 1),
            LinearConstraint(rows(x % num_nodes, x, ones, num_nodes).tocsr(), node_sizes, node_sizes),
        ],
        options={"mip_rel_gap": 0.0},
    )
    return ranks_of_nodes(result.x[:-1].reshape(num_ranks, num_nodes).argmax(axis=1))


class _Renaming:
    """The node of each batch, and what each source sends to other nodes, while both are improved."""

    def __init__(self, volume: Int64Array, node_sizes: Int32Array) -> None:
        most = int(volume.sum(axis=1).max(initial=0))
        cut = volume >> max(0, most.bit_length() - VOLUME_BITS)
        self.held: list[list[int]] = cut.tolist()  # [num_ranks (source), num_ranks (batch)]
        self.num_ranks = len(volume)
        self.nodes = [range(*ends) for ends in pairwise(firsts_of(node_sizes))]
        self.home = [node for node, sources in enumerate(self.nodes) for _ in sources]
        self.node_of = [-1] * self.num_ranks
        self.num_free = [len(sources) for sources in self.nodes]
        self.sent = [sum(row) for row in self.held]
        self.threshold = 0

    def start(self) -> None:
        """The source that sends most gets the batch of which it holds most on its node, while the node has room."""
        batches = [  # of each source; largest volume last, to be popped; of equals the first batch last
            sorted((batch for batch, part in enumerate(row) if part), key=lambda batch: (row[batch], -batch))
            for row in self.held
        ]
        waiting = [(-sent, source) for source, sent in enumerate(self.sent)]
        heapq.heapify(waiting)
        while waiting:
            negated, source = heapq.heappop(waiting)
            if -negated != self.sent[source]:  # it sends less by now: its node has got other batches
                heapq.heappush(waiting, (-self.sent[source], source))
                continue
            while batches[source] and self.node_of[batches[source][-1]] >= 0:
                batches[source].pop()
            if batches[source] and self.num_free[self.home[source]]:
                self._put(batches[source].pop(), self.home[source])
                heapq.heappush(waiting, (-self.sent[source], source))
        for batch, node in enumerate(self.node_of):
            if node < 0:
                self._put(batch, next(node for node, free in enumerate(self.num_free) if free))

    def swap_batches(self) -> None:
        """Tabu search: make the best swap, even if it is worse; swapped batches are fixed for some swaps."""
        best = list(self.node_of)
        least = self._lower_threshold()
        fixed_until = [0] * self.num_ranks
        for count in range(1, min(MAX_SWAPS, 100 + 40 * self.num_ranks) + 1):
            movable = [batch for batch in range(self.num_ranks) if fixed_until[batch] < count]
            swap = self._best_swap(self.sent.index(max(self.sent)), movable)
            if swap is None:
                continue
            leaving, arriving = swap
            node, other = self.node_of[leaving], self.node_of[arriving]
            for batch in swap:
                self._take(batch)
                fixed_until[batch] = count + 2 + count % 4
            self._put(arriving, node)
            self._put(leaving, other)
            if (max(self.sent), sum(self.sent)) < least:
                best = list(self.node_of)
                least = self._lower_threshold()
        self.node_of = best

    def _best_swap(self, source: int, movable: list[int]) -> tuple[int, int] | None:
        """A batch to leave the source's node, and one to arrive there, of which the source holds more."""
        held, node = self.held[source], self.home[source]
        swaps = [
            (self._penalty_change(leaving, arriving), leaving, arriving)
            for leaving in movable
            if self.node_of[leaving] == node
            for arriving in movable
            if self.node_of[arriving] != node and held[arriving] > held[leaving]
        ]
        return min(swaps)[1:] if swaps else None

    def _penalty_change(self, a: int, b: int) -> int:
        """The change of the sum over sources of max(0, sent - threshold)^2, if batches a and b swap nodes."""
        change = 0
        for leaving, arriving in ((a, b), (b, a)):
            for source in self.nodes[self.node_of[leaving]]:
                sent = self.sent[source]
                after = sent + self.held[source][leaving] - self.held[source][arriving]
                change += max(0, after - self.threshold) ** 2 - max(0, sent - self.threshold) ** 2
        return change

    def _lower_threshold(self) -> tuple[int, int]:
        """Set the threshold a little below the maximum that a source sends; returns this maximum, and the sum."""
        most = max(self.sent)
        self.threshold = most - (most >> 7)
        return most, sum(self.sent)

    def _put(self, batch: int, node: int) -> None:
        """Put a batch on a node."""
        self.node_of[batch] = node
        self.num_free[node] -= 1
        for source in self.nodes[node]:
            self.sent[source] -= self.held[source][batch]

    def _take(self, batch: int) -> None:
        """Take a batch off its node."""
        node = self.node_of[batch]
        self.num_free[node] += 1
        for source in self.nodes[node]:
            self.sent[source] += self.held[source][batch]
