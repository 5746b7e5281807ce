"""Which node computes which balanced batch, so that the rank that sends most to other nodes sends little.

OrchMLLM Algorithm 3 (section 5.2.2) after equation 5, corrected: x is boolean, [num_ranks, num_nodes], batch on node;
only what is *sent* counts, and what equation 5 sums is the volume to *other* nodes. Which rank of the node a batch
goes to does not matter to it. `exactly_on_nodes` solves that integer program. `place_on_nodes` comes near it in
milliseconds:

1. Taking turns: the source that sends most takes the batch of which it holds most to its node.
2. Swaps: the batches of the source that sends most are tried against those it holds more of. The best swap, not
   seldom one for the worse, is the one with the smallest sum over sources of the square of what they send above a
   threshold, a little below the best maximum so far; a swapped batch then stays for two to five swaps (a tabu
   search, with stays of several lengths, so that it does not run in a circle). The result is the state with the
   smallest maximum, of several the one in which all sources together send least.
"""

from __future__ import annotations

import heapq

import numpy as np

from motet.core.arrays import Float64Array, Int64Array

VOLUME_BITS = 24
"""What a source holds in all is cut to so many bits, so that squares add up within 64 in the native core."""

MAX_SWAPS = 1000


def place_on_nodes(volume: Int64Array, ranks_per_node: int) -> Int64Array:
    """The rank of each batch, int64 [num_ranks], a permutation, from volume [num_ranks (source), num_ranks (batch)].

    What a source holds in all must fit int64. O(num_ranks^2), then up to 1000 swaps of O(ranks_per_node * batches of a
    source * sources of a batch on a node). In Python for the reader, not for thousands of ranks.
    """
    renaming = _Renaming(volume, ranks_per_node)
    renaming.take_turns()
    renaming.swap_batches()
    return ranks_of_nodes(np.array(renaming.node_of, dtype=np.int64), ranks_per_node)


def ranks_of_nodes(node_of: Int64Array, ranks_per_node: int) -> Int64Array:
    """The batches of each node on its ranks, in batch order."""
    ranks = np.empty(len(node_of), dtype=np.int64)
    ranks[np.argsort(node_of, kind="stable")] = np.arange(len(node_of))
    return ranks


def exactly_on_nodes(volume: Int64Array, ranks_per_node: int) -> Int64Array:
    """The same, with the smallest maximum there is, to HiGHS's tolerance of 1e-6: seconds to hours from 64 ranks on.

    Variables: x[batch, node], 0 or 1, and the maximum.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    num_ranks = len(volume)
    num_nodes = -(-num_ranks // ranks_per_node)
    num_places = num_ranks * num_nodes
    held = volume.sum(axis=1)
    unit = max(int(held.max(initial=0)), 1)

    def rows(row: Int64Array, column: Int64Array, value: Float64Array, count: int) -> coo_array:
        return coo_array((value, (row, column)), shape=(count, num_places + 1))

    source, batch = np.nonzero(volume)
    each = np.arange(num_ranks)
    kept = rows(
        np.concatenate([source, each]),
        np.concatenate([batch * num_nodes + source // ranks_per_node, np.full(num_ranks, num_places)]),
        np.concatenate([volume[source, batch] / unit, np.ones(num_ranks)]),
        num_ranks,
    )
    place, ones = np.arange(num_places), np.ones(num_places)
    sizes = np.bincount(each // ranks_per_node)
    result = milp(
        c=np.concatenate([np.zeros(num_places), np.ones(1)]),
        integrality=np.concatenate([ones, np.zeros(1)]),
        bounds=Bounds(0, np.concatenate([ones, [np.inf]])),
        constraints=[
            LinearConstraint(kept.tocsr(), held / unit, np.inf),  # held - kept <= maximum
            LinearConstraint(rows(place // num_nodes, place, ones, num_ranks).tocsr(), 1, 1),
            LinearConstraint(rows(place % num_nodes, place, ones, num_nodes).tocsr(), sizes, sizes),
        ],
        options={"mip_rel_gap": 0.0},
    )
    return ranks_of_nodes(result.x[:-1].reshape(num_ranks, num_nodes).argmax(axis=1), ranks_per_node)


class _Renaming:
    """Batches on nodes, and what each source sends to other nodes."""

    def __init__(self, volume: Int64Array, ranks_per_node: int) -> None:
        most = int(volume.sum(axis=1).max(initial=0))
        cut = volume >> max(0, most.bit_length() - VOLUME_BITS)
        self.held: list[list[int]] = cut.tolist()  # [num_ranks (source), num_ranks (batch)]
        self.num_ranks = len(volume)
        self.nodes = [
            range(first, min(first + ranks_per_node, self.num_ranks))
            for first in range(0, self.num_ranks, ranks_per_node)
        ]
        self.home = [node for node, sources in enumerate(self.nodes) for _ in sources]
        self.node_of = [-1] * self.num_ranks
        self.num_free = [len(sources) for sources in self.nodes]
        self.sent = [sum(row) for row in self.held]
        self.threshold = 0

    def take_turns(self) -> None:
        """The start: whoever sends most takes the batch that it holds most of to its node, while that has room."""
        wanted = [  # most last, to be popped; of equals the first batch last
            sorted((batch for batch, part in enumerate(row) if part), key=lambda batch: (row[batch], -batch))
            for row in self.held
        ]
        waiting = [(-sent, source) for source, sent in enumerate(self.sent)]
        heapq.heapify(waiting)
        while waiting:
            negated, source = heapq.heappop(waiting)
            if -negated != self.sent[source]:  # it sends less by now, because of its neighbours' batches
                heapq.heappush(waiting, (-self.sent[source], source))
                continue
            while wanted[source] and self.node_of[wanted[source][-1]] >= 0:
                wanted[source].pop()
            if wanted[source] and self.num_free[self.home[source]]:
                self._put(wanted[source].pop(), self.home[source])
                heapq.heappush(waiting, (-self.sent[source], source))
        for batch, node in enumerate(self.node_of):
            if node < 0:
                self._put(batch, next(node for node, free in enumerate(self.num_free) if free))

    def swap_batches(self) -> None:
        """Tabu search: the best swap each time, also where it is worse; batches that moved stay for some steps."""
        best = list(self.node_of)
        least = self._lower_threshold()
        settled_until = [0] * self.num_ranks
        for step in range(1, min(MAX_SWAPS, 100 + 40 * self.num_ranks) + 1):
            free = [batch for batch in range(self.num_ranks) if settled_until[batch] < step]
            swap = self._best_swap(self.sent.index(max(self.sent)), free)
            if swap is None:
                continue
            gone, come = swap
            node, other = self.node_of[gone], self.node_of[come]
            for batch in swap:
                self._take(batch)
                settled_until[batch] = step + 2 + step % 4
            self._put(come, node)
            self._put(gone, other)
            if (max(self.sent), sum(self.sent)) < least:
                best = list(self.node_of)
                least = self._lower_threshold()
        self.node_of = best

    def _best_swap(self, source: int, free: list[int]) -> tuple[int, int] | None:
        """A batch of the source's node and one to come instead, of which it holds more."""
        held, node = self.held[source], self.home[source]
        swaps = [
            (self._change(gone, come), gone, come)
            for gone in free
            if self.node_of[gone] == node
            for come in free
            if self.node_of[come] != node and held[come] > held[gone]
        ]
        return min(swaps)[1:] if swaps else None

    def _change(self, gone: int, come: int) -> int:
        """Of the sum over sources of the square of what they send above the threshold."""
        change = 0
        for leaving, arriving in ((gone, come), (come, gone)):
            for source in self.nodes[self.node_of[leaving]]:
                sent = self.sent[source]
                after = sent + self.held[source][leaving] - self.held[source][arriving]
                change += max(0, after - self.threshold) ** 2 - max(0, sent - self.threshold) ** 2
        return change

    def _lower_threshold(self) -> tuple[int, int]:
        """Returns what the source that sends most sends, and what all send."""
        most = max(self.sent)
        self.threshold = most - (most >> 7)
        return most, sum(self.sent)

    def _put(self, batch: int, node: int) -> None:
        self.node_of[batch] = node
        self.num_free[node] -= 1
        for source in self.nodes[node]:
            self.sent[source] -= self.held[source][batch]

    def _take(self, batch: int) -> None:
        node = self.node_of[batch]
        self.num_free[node] += 1
        for source in self.nodes[node]:
            self.sent[source] += self.held[source][batch]
