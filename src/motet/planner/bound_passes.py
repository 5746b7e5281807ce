"""What ranks compute in a step of one shape of a job's Plans: passes and updates, for `bound_terms.py`.

Columns are over numbers of *cells*: microbatches times replicas of the backbone, without those that caps leave empty.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.workload import BACKBONE
from motet.planner.bound_seconds import BACKWARD, FORWARD, BlockSeconds, ExampleRows, spread
from motet.planner.bound_shapes import MAX_RANKS_BY_SHAPE, Shape, ShapeKind
from motet.planner.infeasible import tensor_degrees
from motet.planner.job import Job
from motet.simulate.predict.exchange_seconds import even_exchanges_s
from motet.simulate.predict.layer_work import MAX_DEALT

_EXACT_CELLS = MAX_RANKS_BY_SHAPE
"""So many numbers of cells are looked at one by one, those of any replicas; beyond them, one stands for all up to the
next."""

_MAX_DEALT_ROWS = 1 << 15
"""A batch of at most so many rows is dealt out to context-parallel ranks, which takes some milliseconds."""


class Cells(NamedTuple):
    """Numbers of cells, int64 [n]: all from `least` to `most`."""

    least: Int64Array
    most: Int64Array


@dataclass(frozen=True, eq=False)
class ShapePasses:
    """Seconds of one rank in a step, by block [3, num_blocks, n], if it alone ran a pipeline.

    blocks: of the modules in the backbone's pipeline. beside: of encoders in its bubbles.
    """

    blocks: Mapping[str, Float64Array]
    beside: Mapping[str, Float64Array]

    def sum(self, *rows: int, of: Collection[str] = ()) -> Float64Array:
        """[n]: over all blocks, or those of some modules."""
        every = {**self.blocks, **self.beside}
        summed: Float64Array = np.sum([every[name][rows, :].sum(axis=(0, 1)) for name in of or every], axis=0)
        return summed


class PassSeconds:
    """Of all shapes of a job. cuts, beside_sums: as of `BlockSeconds`."""

    def __init__(self, job: Job, rows: ExampleRows, *, cuts: bool = False, beside_sums: bool = False) -> None:
        self.job, self.model, self.cost, self.cuts = job, job.model, job.cost.unwrapped(), cuts
        self.num_ranks, self.batch_size = job.cluster.num_ranks, job.batch.num_examples
        self.by_shape = self.num_ranks <= MAX_RANKS_BY_SHAPE
        self.seconds = BlockSeconds(job, rows, cuts=cuts, beside_sums=beside_sums)
        self.num_blocks = self.model.num_blocks
        self.has_item = {name: job.batch.has_any([name]) for name in self.num_blocks}
        self.parameters = {name: self._parameters(name) for name in self.num_blocks}
        self.held = {name: self._parameters(name, is_spread=True) for name in self.num_blocks}
        self.cells, self._step, self._degrees = cache(self._cells_on), cache(self._step_s), cache(self._degrees_of)
        self._table, self._padded, self._sequences = (
            cache(self._in_cells),
            cache(self._padded_s),
            cache(self._sequences_s),
        )
        self._even, self._merged, self._floor = cache(self._even_s), cache(self._merged_s), cache(self._floor_s)
        self._given, self._exchanged = cache(self._given_s), cache(self.seconds.exchanged)
        self._on_one, self._with_sequences = cache(self._on_one_s), cache(self._with_sequences_s)

    def floor_s(self, shape: Shape) -> float:
        """Seconds that the shape's largest term is not below: all examples in one cell on one rank, divided."""
        own_s = self._floor(shape.tp, shape.apart, shape.kind) / shape.num_ranks
        left = self.num_ranks - shape.num_ranks
        return max(own_s, self._floor(1, shape.apart, "apart") / left) if shape.apart else own_s

    def hosted(self, shape: Shape) -> list[str]:
        return [name for name in self.num_blocks if name != BACKBONE and name not in shape.apart]

    def ways(self, name: str, shape: Shape) -> list[tuple[int, int]]:
        """TP and CP of an encoder on the ranks of the backbone's unit. In bubbles, ranks share items, and cut them, as
        far as they do not share products.
        """
        if shape.kind != "bubbles":
            return [(shape.tp, shape.cp)]
        return [(one, shape.tp * shape.cp // one) for one in self._degrees(name) if shape.tp % one == 0]

    @cached_property
    def all_cells(self) -> Cells:
        """Numbers of cells: at most an example in each."""
        least = list(range(1, min(_EXACT_CELLS, self.batch_size) + 1))
        while least[-1] < self.batch_size:
            least.append(min(least[-1] * 5 // 4, self.batch_size))
        return Cells(np.array(least), np.array([*(number - 1 for number in least[1:]), least[-1]]))

    def _cells_on(self, dp: int) -> Cells:
        """Numbers of cells, at least one on each replica."""
        if not self.by_shape:
            return Cells(np.array([dp]), np.array([dp]))
        return Cells(*(column[dp - 1 :] for column in self.all_cells))

    def _in_cells(self, name: str, tp: int, cp: int, learning: bool, is_shared: bool = False) -> Float64Array:
        """All of a module, evenly in each number of cells, [3, num_blocks, n]. is_shared: as of `BlockSeconds.even`."""
        cells = self.all_cells.least.astype(np.float64)
        return self.seconds.even(name, tp, cp, cells, learning=learning, is_shared=is_shared)

    def of(self, shape: Shape, fewest: Mapping[str, int]) -> ShapePasses:
        tp, cp, _, dp, apart, kind = shape
        learning = kind == "data_parallel"
        blocks, beside = {BACKBONE: self._even(tp, cp, dp, learning)}, {}
        if cp > 1 and self.by_shape and not self.cuts:
            blocks[BACKBONE] = blocks[BACKBONE].copy()
            for name in () if self.model.merges else self.feeding:
                blocks[BACKBONE][:, 0] += self._given(name, tp, cp, fewest.get(name, 1))[:, None] / dp
            if dp == 1 and not apart and self._deals_out_all:
                blocks[BACKBONE][:, :, 0] += self._exchanged(tp, cp)
        for name in self.hosted(shape):
            if kind == "bubbles":
                ways = [
                    self._merged(name, *way, dp, fewest[name], tp * cp == 1, False) for way in self.ways(name, shape)
                ]
                beside[name] = np.min(ways, axis=0)
            elif self.by_shape:
                blocks[name] = self._merged(name, tp, cp, dp, fewest[name], cp == 1, learning)
            else:
                blocks[name] = self._merged(name, 1, 1, dp, 1, False, learning) / (tp * cp)
        return ShapePasses(blocks, beside)

    def _even_s(self, tp: int, cp: int, dp: int, learning: bool) -> Float64Array:
        """The backbone on one replica, [3, num_blocks, n]: the mean."""
        if not self.by_shape:
            return self.seconds.even(BACKBONE, tp, cp, np.array([float(dp)]), learning=learning) / dp
        return self._table(BACKBONE, tp, cp, learning)[:, :, dp - 1 :] / dp

    def _merged_s(
        self, name: str, tp: int, cp: int, dp: int, first: int, is_whole: bool, learning: bool
    ) -> Float64Array:
        """An encoder on one replica, [3, num_blocks, n]: the mean. Its items are in few cells, of at least `first`, or,
        where padding counts, in the number that takes the least. is_whole: no item is cut, so that it counts, and no
        rank has runs of one.
        """
        most = self.cells(dp).most
        if self.by_shape and is_whole and not self.cuts and self.model.module(name).padded:
            least = np.minimum.accumulate(self._padded(name, tp, learning)[:, :, first - 1 :], axis=2)
            return least[:, :, np.minimum(most - first, least.shape[2] - 1)] / dp
        merged = self._table(name, tp, cp, learning, not is_whole)[:, :, first - 1 : first] / dp
        return np.repeat(merged, len(most), axis=2)

    def _given_s(self, name: str, tp: int, cp: int, cells: int) -> Float64Array:
        """Seconds in which ranks that share sequences give each other an encoder's rows, [3], all in so many cells.

        Rows lie on the ranks that made them, and go to those of their places before the backbone's first block; in
        backward, gradients return. A cell takes a constant and as long for each row, so cells with rows count, whatever
        each has of them. Of the groups that may share them the fastest counts. Sums of products may hide half of it.
        """
        layer, returns = self.model.moved(name)
        number_bytes = self.job.mixed_precision(pipeline=True).compute
        size_bytes = float(self.job.batch.of(name).num_tokens.sum()) * layer.output_width * number_bytes
        to_each = np.array([size_bytes / cells / cp**2])
        once = min(
            float(even_exchanges_s(self.cost, self.job.cluster, to_each, ranks)[0])
            for ranks in self.seconds.groups(tp, cp)
        )
        waited = 0.5 if self.seconds.beside_sums else 1.0
        return cells * waited * once * np.array([1.0, returns, returns])

    @cached_property
    def _deals_out_all(self) -> bool:
        """Whether what ranks exchange where they share all sequences in one cell is known, and soon found."""
        lengths = self.job.batch.of(BACKBONE).length
        return len(lengths) <= MAX_DEALT and int(lengths.sum()) <= _MAX_DEALT_ROWS

    def _padded_s(self, name: str, tp: int, learning: bool) -> Float64Array:
        return self.seconds.padded(name, tp, learning=learning)

    def _floor_s(self, tp: int, apart: tuple[str, ...], kind: ShapeKind | Literal["apart"]) -> float:
        """Rank-seconds of all passes and the update, in one cell: of the backbone's ranks, or of those apart."""
        hosted = tuple(name for name in self.num_blocks if name != BACKBONE and name not in apart)
        total_s, names = 0.0, apart if kind == "apart" else (BACKBONE, *hosted)
        for name in names:
            degrees = [tp]
            if name != BACKBONE and (kind in ("bubbles", "apart") or not self.by_shape):
                degrees = [degree for degree in self._degrees(name) if tp % degree == 0] if self.by_shape else [1]
            total_s += min(degree * self._one(name, degree, kind == "data_parallel") for degree in degrees)
        return total_s + self._step(*names)

    def _one(self, name: str, tp: int, learning: bool) -> float:
        """All of a module in one cell, whatever share of it context-parallel ranks have."""
        return _both_s(self._table(name, tp, 1, learning, True)[:, :, :1])

    def fewest_cells(self, shape: Shape) -> tuple[Mapping[str, int], float]:
        """By encoder on the backbone's ranks, in how many cells its items are; and what a step takes at least where the
        items of one are in fewer. Replicas with all items of an encoder have the examples of these items, too: if that
        takes longer than the mean of all replicas, each has items of it.
        """
        hosted, dp = self.hosted(shape), shape.dp
        if not self.by_shape or shape.kind == "data_parallel" or dp == 1 or self.cuts:
            return dict.fromkeys(hosted, 1), math.inf
        sizes = shape.tp, shape.cp, shape.kind
        all_s = sum(self._on_one(name, *sizes, dp) for name in (BACKBONE, *hosted))
        few_s = {name: self._with_sequences(name, *sizes, dp - 1) for name in hosted}
        most_s = min((each for each in few_s.values() if each > all_s), default=math.inf)
        return {name: dp if each > all_s else 1 for name, each in few_s.items()}, most_s / shape.pp

    def _on_one_s(self, name: str, tp: int, cp: int, kind: str, dp: int) -> float:
        """A module on one of dp replicas, in one cell."""
        ways = [(tp, cp)]
        if kind == "bubbles" and name != BACKBONE:
            ways = [(degree, tp * cp // degree) for degree in self._degrees(name) if tp % degree == 0]
        return min(_both_s(self._table(name, *way, False)[:, :, dp - 1 : dp]) for way in ways) / dp

    def _with_sequences_s(self, name: str, tp: int, cp: int, kind: str, dp: int) -> float:
        """All items of an encoder, and the sequences of their examples, on one of dp replicas, in one cell."""
        if not self.has_item[name].any():
            return 0.0
        sequences = self._sequences(name, tp, cp)[:, :, dp - 1 : dp]
        return self._on_one(name, tp, cp, kind, dp) + _both_s(sequences) / dp

    def _sequences_s(self, name: str, tp: int, cp: int) -> Float64Array:
        """As `_in_cells`, the backbone's sequences with items of an encoder."""
        cells = np.arange(1.0, min(self.num_ranks, self.batch_size) + 1)
        return self.seconds.even(BACKBONE, tp, cp, cells, of=self.has_item[name])

    def _degrees_of(self, name: str) -> list[int]:
        return tensor_degrees(self.job, name, on_fewer=True)

    def alone(self, name: str, shape: Shape, left: int) -> Float64Array:
        """An encoder apart, all of it on one rank, [3, num_blocks, n]. Only one rank cuts no items."""
        return self._merged(name, 1, 1, shape.dp, 1, left == 1, False) * shape.dp

    def apart_s(self, shape: Shape) -> Float64Array:
        """The even share of the ranks of encoders apart, [n] or [1]; 0 if there are none."""
        if not shape.apart:
            return np.zeros(1)
        left = self.num_ranks - shape.num_ranks
        passes = [self.alone(name, shape, left)[[FORWARD, BACKWARD]].sum(axis=(0, 1)) for name in shape.apart]
        share: Float64Array = (np.sum(passes, axis=0) + self._step(*shape.apart)) / left
        return share

    def update_s(self, shape: Shape, sharing: int) -> float:
        """The optimizer's update on a mean rank. sharing: the ranks that share that of the backbone's unit."""
        hosted, parts = self.hosted(shape), shape.tp * shape.pp
        if shape.kind == "bubbles":
            return self._step(BACKBONE) / (parts * sharing) + self._step(*hosted) / shape.num_ranks
        return self._step(*hosted, BACKBONE) / (parts * sharing)

    def updates_s(self, name: str, shape: Shape, sharing: int) -> Float64Array:
        """The update of each block of a module on one rank, [num_blocks], as of `update_s`."""
        parts = np.array(self.trainable[name]) / max(self.parameters[name][1], 1)
        updates: Float64Array = self._step(name) * parts / (shape.tp * sharing)
        return updates

    def _step_s(self, *names: str) -> float:
        trainable = sum(self.parameters[name][1] for name in names)
        return self.cost.step_seconds(trainable) if trainable else 0.0

    @cached_property
    def trainable(self) -> dict[str, list[int]]:
        """By module, the trainable parameters of each block, without those that two of them share."""
        found = {}
        for name in self.num_blocks:
            module = self.model.module(name)
            sizes = [sum(spread(module.layers[at]).updated_parameters for at in block) for block in module.blocks]
            found[name] = [max(sizes[0] - module.tied_weights, 0), *sizes[1:]]
        return found

    def _parameters(self, name: str, *, is_spread: bool = False) -> tuple[int, int]:
        """All and trainable ones. is_spread: those of a rank where one expert of each layer is on each rank."""
        layers = [spread(layer) if is_spread else layer for layer in self.model.module(name).layers]
        return sum(layer.parameters for layer in layers), sum(layer.updated_parameters for layer in layers)

    @cached_property
    def feeding(self) -> list[str]:
        """The encoders that the backbone's first block takes in."""
        return [name for name in self.model.sources(BACKBONE) if 0 in self.model.entries(name, BACKBONE)]


def _both_s(passes: Float64Array) -> float:
    """Forward and all of backward, over all blocks and cells."""
    return float(passes[[FORWARD, BACKWARD]].sum())
