"""What the blocks of a job's modules take at least, whatever Plan computes them: the seconds behind `step_bound.py`.

A *cell* is what one replica computes of one microbatch. The least that cells take together follows from how many they
are: a layer's seconds are convex in rows and pairs but for what each cell with any rows takes, so that cells with the
mean rows take the least. Of a padded module, the fewer the cells are, the more of their rows is padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from motet.assign.context_rows import moved_rows
from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.cluster import Link
from motet.core.context_rows import exchanged_heads
from motet.core.sight import Sight
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.flops import like_layer, work_of_items
from motet.cost.memory import StageLayer, stage_layers
from motet.cost.model import CostModel, Runs, Work, backward_seconds
from motet.planner.job import Job
from motet.simulate.predict.exchange_seconds import gathers_s

_MAX_LENGTHS = 96
"""The lengths of a padded module by which padding is counted: of more items, neighbours count as long as the least."""
_MAX_SHARED = 16
"""So many examples on one replica are looked at, at most."""
_MANY = 1e4
"""So many times an example, of which the seconds that any row at all takes are next to nothing."""
FORWARD, INPUT, BACKWARD = range(3)
"""The rows of seconds: of forward, of backward for the input alone, and of all of backward."""


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Rows and pairs of a layer.

    of_examples: float64 [2, num_examples].
    present:     bool [num_examples], the examples that have an item of the module.
    learning:    bool [num_examples], those that have a backward pass under data parallelism.
    of_items:    float64 [2, num_items], of a padded module.
    """

    of_examples: Float64Array
    present: BoolArray
    learning: BoolArray
    of_items: Float64Array

    @cached_property
    def total(self) -> Float64Array:
        """[2]: over all examples."""
        summed: Float64Array = self.of_examples.sum(axis=1)
        return summed

    @cached_property
    def learned(self) -> Float64Array:
        """[2]: of those with a backward pass under data parallelism."""
        summed: Float64Array = (self.of_examples * self.learning).sum(axis=1)
        return summed

    @cached_property
    def fills(self) -> bool:
        """Whether no cell with items lacks rows: else all rows may be in one cell, as far as is known here."""
        return bool((self.of_examples[0, self.present] > 0).all())

    @cached_property
    def all_learn(self) -> bool:
        """Whether all examples that have an item have a backward pass under data parallelism."""
        return bool(self.learning[self.present].all())

    @cached_property
    def least(self) -> Float64Array:
        """[2]: of the smallest example that has an item."""
        smallest: Float64Array = self.of_examples[:, self.present].min(axis=1, initial=np.inf)
        return np.where(np.isinf(smallest), 0.0, smallest)

    @cached_property
    def padded(self) -> Float64Array:
        """[2, n]: the least in all of 1 to n cells, each of whose items has what its longest one has."""
        found = [_least_padded(np.sort(column)) for column in self.of_items]
        return np.stack(found)

    def shortest_of_longest(
        self, order: Int64Array, dp: int, num_counts: int, *, learning: bool = False
    ) -> Float64Array:
        """[2, num_counts], as of `BlockSeconds.longest`. Cached."""
        key = order.tobytes(), dp, num_counts, learning  # The rows are those of clusters of any size.
        if key not in self._shortest:
            of_examples = (self.of_examples * self.learning if learning else self.of_examples)[:, order]
            sums = [np.sort(of_examples[:, : n * dp + 1])[:, : n + 1].sum(axis=1) for n in range(num_counts)]
            self._shortest[key] = np.stack(sums, axis=1)
        return self._shortest[key]

    @cached_property
    def _shortest(self) -> dict[tuple[bytes, int, int, bool], Float64Array]:
        return {}


def _least_padded(column: Float64Array) -> Float64Array:
    """The least sum of count * most over 1 to n groups, which are runs of the ascending column. O(n^3), n at most
    _MAX_LENGTHS.
    """
    groups = np.array_split(column, min(len(column), _MAX_LENGTHS)) if len(column) else []
    most, count = (np.array([part[0] for part in groups]), np.array([len(part) for part in groups]))
    begin = np.concatenate([[0], count.cumsum()])
    # of_run[i, j]: the groups i to j together.
    of_run = np.where(np.tri(len(most), dtype=bool).T, (begin[None, 1:] - begin[:-1, None]) * most[None, :], np.inf)
    best, found = np.concatenate([[0.0], np.full(len(most), np.inf)]), []
    for _ in range(len(most)):
        best = np.concatenate([[0.0], (best[:-1, None] + of_run).min(axis=0)])
        found.append(best[-1])
    return np.array(found)


class _Work(NamedTuple):
    """Rows and pairs of one of some alike cells, forward and backward, [2, n] each; and how many there are, [2, n]."""

    forward: Float64Array
    backward: Float64Array
    times: Float64Array


class ExampleRows:
    """Rows and pairs of each example of a job's batch in each layer. Jobs on other clusters (`Job.on`) share them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._known: dict[tuple[str, Layer], LayerRows] = {}

    def of(self, name: str, layer: Layer) -> LayerRows:
        """Those of a layer of a module. Cached."""
        key = name, like_layer(layer)
        if key not in self._known:
            self._known[key] = self._counted(*key)
        return self._known[key]

    def _counted(self, name: str, layer: Layer) -> LayerRows:
        batch, items = self.job.batch, self.job.batch.of(name)
        targets = batch.num_targets if name == BACKBONE else None
        each = work_of_items(layer, items, items.example, batch.num_examples, num_targets=targets)
        of_items = np.zeros((2, 0))
        if self.job.model.module(name).padded:
            count = len(items.example)
            one = work_of_items(layer, items, np.arange(count), count)
            of_items = np.stack([one.rows, one.pairs])
        learning = batch.has_any(self.job.model.learners(name))
        return LayerRows(np.stack([each.rows, each.pairs]), batch.has_any([name]), learning, of_items)


class BlockSeconds:
    """Seconds of blocks on one rank, [3, num_blocks, n] for n numbers of cells: forward, input, backward."""

    def __init__(self, job: Job, rows: ExampleRows, *, cuts: bool = False, beside_sums: bool = False) -> None:
        """cuts: as of `step_bound.step_bound`. beside_sums: whether other work runs beside sums of products, as
        predicted (`LayerPrice.beside_s`): of an encoder all of them, and half of the backbone's.
        """
        self.job, self.rows, self.cost, self.cuts = job, rows.of, job.cost.unwrapped(), cuts
        self.beside_sums = beside_sums
        self.links = on_fastest_links(self.cost)
        self.num_blocks = {module.name: len(module.blocks) for module in job.model.modules}
        self._layers: dict[str, tuple[list[StageLayer], Float64Array]] = {}

    def even(
        self,
        name: str,
        tp: int,
        cp: int,
        cells: Float64Array,
        *,
        learning: bool = False,
        of: BoolArray | None = None,
        is_shared: bool = False,
    ) -> Float64Array:
        """All cells together, of each of `cells` [n], with the mean in each. learning: backward of `LayerRows.learned`.

        of: bool [num_examples], those examples alone. is_shared: cp ranks may be several, of which all is on one.
        """

        def share(rows: LayerRows) -> _Work:
            total = rows.total if of is None else (rows.of_examples * of).sum(axis=1)
            forward = backward = np.where(rows.fills, cells, 1.0)
            learned = rows.learned if learning else total
            if learning and not rows.all_learn:
                backward = np.ones(len(cells))
            return _Work(total[:, None] / forward, learned[:, None] / backward, np.stack([forward, backward]))

        return self._blocks(name, tp, cp, share, is_shared=is_shared)

    def padded(self, name: str, tp: int, *, learning: bool = False) -> Float64Array:
        """As `even` of a padded module, in 1 to _MAX_LENGTHS cells: in more of them, less may be padding."""
        numbers = np.arange(1.0, _MAX_LENGTHS + 1)

        def share(rows: LayerRows) -> _Work:
            known, times = rows.padded, np.stack([numbers, numbers])
            if not known.shape[1]:
                return _Work(0.0 * times, 0.0 * times, times)
            forward = known[:, np.minimum(np.arange(len(numbers)), known.shape[1] - 1)] / numbers
            if not rows.fills:
                forward, times = np.repeat(known[:, -1:], len(numbers), axis=1), np.ones_like(times)
            return _Work(forward, forward * (not learning or bool(rows.learning.any())), times)

        return self._blocks(name, tp, 1, share)

    def alike(self, name: str, tp: int, cp: int, cells: Float64Array) -> tuple[int, Float64Array, float]:
        """The last blocks of a module, in what all of them have alike: how many; the seconds of one, as of `even`; and
        the least share of forward, or of backward for the input, in the sum of both of any cell.

        That share hangs on the pairs a row, and on what any row at all takes: of many rows it counts little.
        """
        layers, counts = self._of_blocks(name)
        # The first block may need no gradient of its input, and have layers of its own for it.
        is_alike = len(counts) == 1 or (counts.min(axis=0) == counts[1:].min(axis=0)).all()
        blocks = counts if is_alike else counts[1:]
        found, shares = np.zeros((3, len(cells))), np.zeros((3, 2 * self.job.batch.num_examples))
        for placed, times in zip(layers, blocks.min(axis=0), strict=True):
            rows = self.rows(name, placed.layer)
            number = np.where(rows.fills, cells, 1.0)
            mean, ones = rows.total[:, None] / number, np.ones(shares.shape[1])
            each = np.concatenate([rows.of_examples, _MANY * rows.of_examples], axis=1)
            found += times * self._priced(placed, tp, cp, _Work(mean, mean, np.stack([number, number])))
            shares += times * self._priced(placed, tp, cp, _Work(each, each, np.stack([ones, ones])))
        forward, both = shares[FORWARD], shares[[FORWARD, INPUT]].sum(axis=0)
        of_forward = np.divide(forward, both, out=np.zeros_like(both), where=both > 0)
        return len(blocks), found, float(np.minimum(of_forward, 1 - of_forward).min(initial=0.5))

    def longest(
        self,
        name: str,
        tp: int,
        cp: int,
        order: Int64Array,
        dp: int,
        *,
        learning: bool = False,
        is_shared: bool = False,
    ) -> Float64Array:
        """One cell with count + 1 examples, for each count from 0, that are on one replica: of the count * dp + 1
        longest, those with the fewest rows, and the fewest pairs. order: of the examples, the longest first.

        is_shared: as of `even`.
        """
        num_counts = min((len(order) - 1) // dp + 1, _MAX_SHARED)

        def share(rows: LayerRows) -> _Work:
            forward = rows.shortest_of_longest(order, dp, num_counts)
            backward = rows.shortest_of_longest(order, dp, num_counts, learning=True) if learning else forward
            return _Work(forward, backward, np.ones((2, num_counts)))

        return self._blocks(name, tp, cp, share, is_shared=is_shared)

    def of_examples(self, name: str) -> Float64Array:
        """Each example in a cell of its own on one rank, [3, num_blocks, num_examples]."""
        ones = np.ones((2, self.job.batch.num_examples))
        return self._blocks(name, 1, 1, lambda rows: _Work(rows.of_examples, rows.of_examples, ones))

    def least(self, name: str, tp: int, cp: int) -> Float64Array:
        """The smallest cell that has any rows, [3, num_blocks]."""
        one = np.ones((2, 1))
        found = self._blocks(name, tp, cp, lambda rows: _Work(rows.least[:, None], rows.least[:, None], one))
        smallest: Float64Array = found[:, :, 0]
        return smallest

    def exchanged(self, tp: int, cp: int) -> Float64Array:
        """What ranks that share all sequences in one cell exchange in the backbone's attention, [3, num_blocks].

        A cell has its sequences in the batch's order, as long as no encoder has replicas of its own; so which rank has
        which rows is known. Of the ways to exchange them the one that moves the fewest counts, and of the groups of
        ranks the fastest.
        """
        (layers, counts), lengths = self._of_blocks(BACKBONE), self.job.batch.of(BACKBONE).length
        passes, module = np.zeros((3, len(layers))), self.job.model.module(BACKBONE)
        number_bytes, sight = self.job.mixed_precision(pipeline=True).compute, Sight.of(module.layers)
        for number, placed in enumerate(layers):
            attention = placed.layer.attention
            if attention is None or module.tile_rows:
                continue
            heads, kv_heads = attention.num_heads // tp, max(attention.num_kv_heads // tp, 1)
            of_keys, of_all = np.array([moved_rows(lengths, cp, attention.window, sight)], dtype=np.float64).T
            sent, *_ = exchanged_heads("auto", of_keys, of_all, np.zeros(1), cp, heads, kv_heads)
            size_bytes = sent * (attention.kv_width / tp / kv_heads * number_bytes * cp / (cp - 1))
            seconds = min(float(gathers_s(self.cost, size_bytes, [ranks])[0]) for ranks in self.groups(tp, cp))
            passes[:, number] = seconds * np.array([1.0, placed.has_backward, placed.has_backward])
        every: Float64Array = passes @ counts.T
        return every

    def groups(self, tp: int, cp: int) -> list[range]:
        """The groups of ranks that may share sequences, one of each kind: by its place in its first node."""
        stop, node = self.job.cluster.num_ranks - (cp - 1) * tp, self.job.cluster.ranks_per_node
        return [range(first, first + cp * tp, tp) for first in range(min(stop, node))]

    def _blocks(
        self, name: str, tp: int, cp: int, share: Callable[[LayerRows], _Work], *, is_shared: bool = False
    ) -> Float64Array:
        layers, counts = self._of_blocks(name)
        works = [share(self.rows(name, placed.layer)) for placed in layers]
        priced = np.stack([self._priced(one, tp, cp, work, is_shared=is_shared) for one, work in zip(layers, works)])
        found: Float64Array = np.einsum("bl,lpn->pbn", counts, priced)
        return found

    def _of_blocks(self, name: str) -> tuple[list[StageLayer], Float64Array]:
        """The layers of a module that differ, and how often each block has each of them, [num_blocks, num_layers]."""
        if name not in self._layers:
            blocks = [
                Counter(stage_layers(self.job.model, {name: (number, number + 1)}, {}))
                for number in range(self.num_blocks[name])
            ]
            layers = list(dict.fromkeys(placed for block in blocks for placed in block))
            counts = np.array([[block[placed] for placed in layers] for block in blocks], dtype=np.float64)
            self._layers[name] = layers, counts
        return self._layers[name]

    def _priced(self, placed: StageLayer, tp: int, cp: int, of_cell: _Work, *, is_shared: bool = False) -> Float64Array:
        """One layer on each of tp * cp ranks, [3, n]."""
        layer, number = placed.layer, of_cell.forward.shape[1]
        columns = np.concatenate([of_cell.forward, of_cell.backward], axis=1) / cp
        rows, pairs = np.ascontiguousarray(columns)
        # What ranks share may take less than its share of whole items: here as little as any runs of it do.
        work = Work(rows, pairs, Runs(0.0 * rows, rows, pairs) if cp > 1 or is_shared or self.cuts else None)
        seconds = self.cost.layer_seconds(placed.module, spread(layer), work, tp)
        waited = 1.0 if not self.beside_sums else 0.5 if placed.module == BACKBONE else 0.0
        messages_s = waited * self.links.tensor_seconds(layer, work, range(tp)) if tp > 1 else np.zeros(2 * number)
        backward_s = backward_seconds(seconds, layer, placed.needs_input) + placed.has_backward * messages_s
        input_s = (seconds.input_s + messages_s) * placed.needs_input
        passes = np.stack([(seconds.forward_s + messages_s)[:number], input_s[number:], backward_s[number:]])
        every: Float64Array = passes * of_cell.times[[0, 1, 1]]
        return every


def spread(layer: Layer) -> Layer:
    """The layer as a rank has the least of it: where ranks share its experts, one expert each."""
    return layer.with_experts_of(layer.num_experts)


def on_fastest_links(cost: CostModel) -> CostModel:
    """Where messages take no longer than between any ranks: nodes may be joined by faster links than their own."""
    cluster, (inside, between) = cost.cluster, (cost.cluster.intra_node, cost.cluster.inter_node)
    is_slower = between.bytes_per_s <= inside.bytes_per_s and between.latency_s >= inside.latency_s
    if cluster.num_nodes == 1 or is_slower:
        return cost
    fastest = Link(max(inside.bytes_per_s, between.bytes_per_s), min(inside.latency_s, between.latency_s))
    return cost.on(replace(cluster, intra_node=fastest, inter_node=fastest))
