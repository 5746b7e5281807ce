"""The terms of `step_bound.py` for one shape of a job's Plans: seconds that no step of the shape is below.

Each term is a column over numbers of *cells*: microbatches times replicas of the backbone, without those that caps
leave empty. The bound of a shape is the least, over these numbers, of its largest term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.workload import BACKBONE
from motet.planner.bound_seconds import BACKWARD, FORWARD, INPUT, BlockSeconds, ExampleRows, spread
from motet.planner.bound_shapes import MAX_RANKS_BY_SHAPE, Shape, ShapeKind
from motet.planner.degrees import divisors
from motet.planner.infeasible import tensor_degrees
from motet.planner.job import Job
from motet.simulate.predict.collectives import fsdp_slices

Term = Literal["work", "item", "memory", "bubbles", "communication"]
_EXACT_CELLS = MAX_RANKS_BY_SHAPE
"""So many numbers of cells are looked at one by one, those of any replicas; beyond them, one stands for all up to the
next."""
_PRECISION = 1e-3
"""The relative precision of the best cut."""


class _Cells(NamedTuple):
    """Numbers of cells, int64 [n]: all from `least` to `most`."""

    least: Int64Array
    most: Int64Array


@dataclass(frozen=True, eq=False)
class _Passes:
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


class ShapeTerms:
    """The terms of all shapes of a job. cuts: whether sequences and items may be cut over replicas."""

    def __init__(self, job: Job, rows: ExampleRows, *, cuts: bool = False) -> None:
        self.job, self.model, self.cost, self.cuts = job, job.model, job.cost.unwrapped(), cuts
        self.num_ranks, self.batch_size = job.cluster.num_ranks, job.batch.num_examples
        self.by_shape = self.num_ranks <= MAX_RANKS_BY_SHAPE
        self.seconds = BlockSeconds(job, rows, cuts=cuts)
        self.links = self.seconds.links
        self.num_blocks = self.model.num_blocks
        self.has_item = {name: job.batch.has_any([name]) for name in self.num_blocks}
        self.parameters = {name: self._parameters(name) for name in self.num_blocks}
        self.held = {name: self._parameters(name, is_spread=True) for name in self.num_blocks}
        self._cells, self._step, self._degrees = cache(self._cells_on), cache(self._step_s), cache(self._degrees_of)
        self._table, self._padded, self._sequences = (
            cache(self._in_cells),
            cache(self._padded_s),
            cache(self._sequences_s),
        )
        self._even, self._merged, self._floor = cache(self._even_s), cache(self._merged_s), cache(self._floor_s)
        self._on_one, self._with_sequences = cache(self._on_one_s), cache(self._with_sequences_s)
        self._least, self._longest = cache(self.seconds.least), cache(self._longest_s)
        self._messages, self._sent = cache(self._message_s), cache(self._bytes_sent)

    def floor_s(self, shape: Shape) -> float:
        """Seconds that the shape's largest term is not below: all examples in one cell on one rank, divided."""
        own_s = self._floor(shape.tp, shape.apart, shape.kind) / shape.num_ranks
        left = self.num_ranks - shape.num_ranks
        return max(own_s, self._floor(1, shape.apart, "apart") / left) if shape.apart else own_s

    def of(self, shape: Shape, without: Collection[Term] = (), most_s: float = math.inf) -> dict[Term, Float64Array]:
        """The terms, [n] each, but for `memory`; up to those by which none of n is below most_s."""
        fewest, few_s = self._fewest_cells(shape)
        terms = self._terms(shape, fewest, without, most_s)
        if few_s < min(float(np.max(list(terms.values()), axis=0).min()), most_s):
            fewer = self._terms(shape, dict.fromkeys(fewest, 1), without, most_s)
            terms = {term: np.minimum(terms[term], np.maximum(fewer[term], few_s)) for term in fewer if term in terms}
        return terms

    def _terms(
        self, shape: Shape, fewest: Mapping[str, int], without: Collection[Term], most_s: float
    ) -> dict[Term, Float64Array]:
        """`of`, where the items of each encoder are in so many cells, at the fewest."""
        passes = self._passes(shape, fewest)
        busy_s = passes.sum(FORWARD, BACKWARD) / shape.pp
        parts: dict[Term, Callable[[], Float64Array]] = {
            "work": lambda: np.maximum(busy_s + self._update_s(shape, shape.num_copies), self._apart_s(shape)),
            "item": lambda: np.full(len(busy_s), self._item_s(shape)),
        }
        if self.by_shape and (shape.pp > 1 or shape.apart):
            parts["bubbles"] = lambda: np.maximum(self._latency_s(shape, passes), self._cut_s(shape, passes))
        if self.by_shape:
            parts["communication"] = lambda: np.maximum(
                self._collectives_s(shape, passes, busy_s), self._sending_s(shape)
            )
        terms, largest = dict[Term, Float64Array](), np.zeros(len(busy_s))
        for term, part in parts.items():
            if term not in without and largest.min() < most_s:
                terms[term] = part()
                largest = np.maximum(largest, terms[term])
        return terms

    def _hosted(self, shape: Shape) -> list[str]:
        return [name for name in self.num_blocks if name != BACKBONE and name not in shape.apart]

    # ------------------------------------------------------------------------------------------------------ work

    @cached_property
    def _all_cells(self) -> _Cells:
        """Numbers of cells: at most an example in each."""
        least = list(range(1, min(_EXACT_CELLS, self.batch_size) + 1))
        while least[-1] < self.batch_size:
            least.append(min(least[-1] * 5 // 4, self.batch_size))
        return _Cells(np.array(least), np.array([*(number - 1 for number in least[1:]), least[-1]]))

    def _cells_on(self, dp: int) -> _Cells:
        """Numbers of cells, at least one on each replica."""
        if not self.by_shape:
            return _Cells(np.array([dp]), np.array([dp]))
        return _Cells(*(column[dp - 1 :] for column in self._all_cells))

    def _in_cells(self, name: str, tp: int, cp: int, learning: bool) -> Float64Array:
        """All of a module, evenly in each number of cells, [3, num_blocks, n]."""
        return self.seconds.even(name, tp, cp, self._all_cells.least.astype(np.float64), learning=learning)

    def _passes(self, shape: Shape, fewest: Mapping[str, int]) -> _Passes:
        tp, cp, _, dp, _, kind = shape
        learning = kind == "data_parallel"
        blocks, beside = {BACKBONE: self._even(tp, cp, dp, learning)}, {}
        for name in self._hosted(shape):
            if kind == "bubbles":
                # Its ranks share items, and cut them, as far as they do not share products.
                ways = [
                    self._merged(name, degree, tp * cp // degree, dp, fewest[name], tp * cp == 1, False)
                    for degree in self._degrees(name)
                    if tp % degree == 0
                ]
                beside[name] = np.min(ways, axis=0)
            elif self.by_shape:
                blocks[name] = self._merged(name, tp, cp, dp, fewest[name], cp == 1, learning)
            else:
                blocks[name] = self._merged(name, 1, 1, dp, 1, False, learning) / (tp * cp)
        return _Passes(blocks, beside)

    def _even_s(self, tp: int, cp: int, dp: int, learning: bool) -> Float64Array:
        """The backbone on one replica, [3, num_blocks, n]: the mean."""
        if not self.by_shape:
            return self.seconds.even(BACKBONE, tp, cp, np.array([float(dp)]), learning=learning) / dp
        return self._table(BACKBONE, tp, cp, learning)[:, :, dp - 1 :] / dp

    def _merged_s(
        self, name: str, tp: int, cp: int, dp: int, first: int, is_whole: bool, learning: bool
    ) -> Float64Array:
        """An encoder on one replica, [3, num_blocks, n]: the mean. Its items are in few cells, of at least `first`, or,
        where padding counts, in the number that takes the least. is_whole: no item is cut, so that it counts.
        """
        most = self._cells(dp).most
        if self.by_shape and is_whole and not self.cuts and self.model.module(name).padded:
            least = np.minimum.accumulate(self._padded(name, tp, learning)[:, :, first - 1 :], axis=2)
            return least[:, :, np.minimum(most - first, least.shape[2] - 1)] / dp
        merged = self._table(name, tp, cp, learning)[:, :, first - 1 : first] / dp
        return np.repeat(merged, len(most), axis=2)

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
        """All of a module in one cell."""
        return _both_s(self._table(name, tp, 1, learning)[:, :, :1])

    def _fewest_cells(self, shape: Shape) -> tuple[Mapping[str, int], float]:
        """By encoder on the backbone's ranks, in how many cells its items are; and what a step takes at least where the
        items of one are in fewer. Replicas with all items of an encoder have the examples of these items, too: if that
        takes longer than the mean of all replicas, each has items of it.
        """
        hosted, dp = self._hosted(shape), shape.dp
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

    def _apart_s(self, shape: Shape) -> Float64Array:
        """The even share of the ranks of encoders apart, [n] or [1]; 0 if there are none."""
        if not shape.apart:
            return np.zeros(1)
        left = self.num_ranks - shape.num_ranks
        passes = [self._alone(name, shape, left)[[FORWARD, BACKWARD]].sum(axis=(0, 1)) for name in shape.apart]
        share: Float64Array = (np.sum(passes, axis=0) + self._step(*shape.apart)) / left
        return share

    def _alone(self, name: str, shape: Shape, left: int) -> Float64Array:
        """An encoder apart, all of it on one rank, [3, num_blocks, n]. Only one rank cuts no items."""
        return self._merged(name, 1, 1, shape.dp, 1, left == 1, False) * shape.dp

    def _update_s(self, shape: Shape, sharing: int) -> float:
        """The optimizer's update on a mean rank. sharing: the ranks that share that of the backbone's unit."""
        hosted, parts = self._hosted(shape), shape.tp * shape.pp
        if shape.kind == "bubbles":
            return self._step(BACKBONE) / (parts * sharing) + self._step(*hosted) / shape.num_ranks
        return self._step(*hosted, BACKBONE) / (parts * sharing)

    def _step_s(self, *names: str) -> float:
        trainable = sum(self.parameters[name][1] for name in names)
        return self.cost.step_seconds(trainable) if trainable else 0.0

    # ------------------------------------------------------------------------------------------------------ item

    def _item_s(self, shape: Shape) -> float:
        if self.cuts:
            return 0.0
        if not self.by_shape:
            shared = self._longest(shape.tp, self.num_ranks // shape.tp, 1, False)
            return float(shared[[FORWARD, INPUT], 0].sum())
        of_counts = self._longest(shape.tp, shape.cp, shape.dp, shape.kind == "data_parallel")
        # One example passes stage after stage; the gradients of weights may come beside it.
        alone_s = of_counts[[FORWARD, BACKWARD if shape.pp == 1 else INPUT], 0].sum()
        return max(float(alone_s), float((of_counts[FORWARD] + of_counts[BACKWARD]).max()) / shape.pp)

    def _longest_s(self, tp: int, cp: int, dp: int, learning: bool) -> Float64Array:
        """[3, n]: the fewest rows of the backbone that are on one replica, in one cell."""
        order = self._by_length if self.by_shape else self._by_length[:1]
        summed: Float64Array = self.seconds.longest(BACKBONE, tp, cp, order, dp, learning=learning).sum(axis=1)
        return summed

    @cached_property
    def _by_length(self) -> Int64Array:
        """Examples, the longest first."""
        return np.argsort(-self.job.batch.sequence, kind="stable")

    # --------------------------------------------------------------------------------------------------- bubbles

    def _latency_s(self, shape: Shape, passes: _Passes) -> Float64Array:
        """A mean cell on its way through the stages of encoders and the backbone, and back."""
        cells, number = self._cells(shape.dp), shape.dp / self._cells(shape.dp).least
        latency_s, before_s = passes.sum(FORWARD, INPUT, of=[BACKBONE]) * number, np.zeros(len(number))
        left = self.num_ranks - shape.num_ranks
        for name in self._feeding:
            if name in shape.apart:
                alone = self._alone(name, shape, left)[[FORWARD, INPUT]].sum(axis=(0, 1))
                before_s = np.maximum(before_s, alone / (left * cells.least))
            else:
                before_s = np.maximum(before_s, passes.sum(FORWARD, INPUT, of=[name]) * number)
        return np.where(cells.least == cells.most, latency_s + before_s, 0.0)

    @cached_property
    def _feeding(self) -> list[str]:
        """The encoders that the backbone's first block takes in."""
        return [name for name in self.model.sources(BACKBONE) if 0 in self.model.entries(name, BACKBONE)]

    def _cut_s(self, shape: Shape, passes: _Passes) -> Float64Array:
        """The fullest rank, as ranks have whole blocks: any, or, where they have one stage each, neighbours."""
        if shape.pp == 1:
            return np.zeros(len(self._cells(shape.dp).least))
        blocks = {name: each[FORWARD] + each[BACKWARD] for name, each in passes.blocks.items()}
        in_order = -np.sort(-np.concatenate(list(blocks.values())), axis=0)
        fullest_s: Float64Array = in_order[0]
        for count in range(1, (len(in_order) - 1) // shape.pp + 1):
            last = count * shape.pp
            fullest_s = np.maximum(fullest_s, in_order[last - count : last + 1].sum(axis=0))
        if 2 * shape.pp > len(in_order):
            fullest_s = np.maximum(fullest_s, self._best_cut_s(shape, {name: blocks[name].min(1) for name in blocks}))
        return fullest_s

    def _best_cut_s(self, shape: Shape, blocks: Mapping[str, Float64Array]) -> float:
        """The slowest stage of the best cut, which waits for the stages before it to compute the smallest cell.

        blocks: seconds by module, [num_blocks]. Of several encoders, blocks may be cut anywhere.
        """
        encoders = [name for name in blocks if name != BACKBONE]
        if any(name not in self._feeding or self.model.sources(name) for name in encoders):
            return 0.0
        in_order = [*(encoders if len(encoders) == 1 else ()), BACKBONE]
        first_s = sum(float(blocks[name].sum()) for name in encoders if name not in in_order)
        before = np.concatenate([[0.0], *(blocks[name] for name in in_order)]).cumsum()
        # Of an example that is cut, a replica may have next to nothing.
        waits = [(not self.cuts) * self._least(name, shape.tp, shape.cp)[FORWARD] for name in in_order]
        waited = np.concatenate([*(each.cumsum() - each for each in waits), [0.0]])
        begins = np.maximum.accumulate(before - waited)

        def can_take(limit_s: float) -> bool:
            stop = len(before) - 1
            for number in range(shape.pp):
                begin = int(np.searchsorted(begins, before[stop] - limit_s))
                if begin == 0:
                    return first_s <= limit_s * (shape.pp - number) - float(before[stop])
                if begin >= stop:
                    return False
                stop = begin
            return False

        low_s, high_s = 0.0, first_s + float(before[-1])
        while high_s - low_s > _PRECISION * high_s:
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if can_take(middle_s) else (middle_s, high_s)
        return low_s

    # --------------------------------------------------------------------------------------------- communication

    def _collectives_s(self, shape: Shape, passes: _Passes, busy_s: Float64Array) -> Float64Array:
        """Gathers before the first pass, reductions behind the last one, and the update, by how many ranks share it."""
        if shape.num_copies == 1:
            return np.zeros(len(busy_s))
        of = self._of_fsdp if shape.kind == "data_parallel" else self._of_stages
        choices = [of(shape, passes, busy_s, sharing) for sharing in divisors(shape.num_copies)]
        least: Float64Array = np.min(choices, axis=0)
        return least

    def _of_fsdp(self, shape: Shape, passes: _Passes, busy_s: Float64Array, sharing: int) -> Float64Array:
        """FSDP reduces a slice while others compute backward: all but the last one. A microbatch that nothing learns
        from may come behind all reductions.
        """
        if not (shape.dp == self.batch_size or self.job.batch.has_any(self.model.learners(BACKBONE)).all()):
            return busy_s + self._update_s(shape, sharing)
        sizes = [
            sum(spread(layer).updated_parameters for layer in part)
            for name in passes.blocks
            if self.has_item[name].any()
            for part in fsdp_slices(self.model.module(name).layers)
        ]
        last_s = min((self._reduce_s(size, shape, sharing) for size in sizes if size), default=0.0)
        trainable = self.held[BACKBONE][1]
        gathered_s, reduced_s = self._gather_s(trainable, shape, sharing), self._reduce_s(trainable, shape, sharing)
        forward_s = passes.sum(FORWARD, of=[BACKBONE])
        return np.maximum(busy_s + last_s, np.maximum(forward_s, gathered_s) + reduced_s) + self._update_s(
            shape, sharing
        )

    def _of_stages(self, shape: Shape, passes: _Passes, busy_s: Float64Array, sharing: int) -> Float64Array:
        """A stage is gathered before its first pass, and reduced behind its last one."""
        backbone, pp = self._trainable[BACKBONE], shape.pp
        # Gradients of weights may wait where all modules are in one pipeline.
        row = BACKWARD if shape.apart else INPUT
        back = passes.blocks[BACKBONE][row]
        behind = sum(self.held[name][1] for name in passes.blocks if name in self._feeding)
        forward_s = passes.sum(FORWARD, of=passes.blocks)
        ends_s = self._ends_beside_s(shape) if passes.beside else self._ends_s(shape, passes.blocks, sharing)
        terms = [
            busy_s + ends_s,
            # The backbone's first block is reduced behind all of its passes, and encoders are too.
            (forward_s + back.sum(axis=0) + self._reduce_s(backbone[0] + behind, shape, sharing)) / pp,
            (forward_s + back[-1] + self._reduce_s(sum(backbone) + behind, shape, sharing)) / pp,
            (self._gather_s(sum(backbone), shape, sharing) + passes.sum(BACKWARD, of=passes.blocks)) / pp,
        ]
        largest: Float64Array = np.max(terms, axis=0) + self._update_s(shape, sharing)
        return largest

    def _ends_s(self, shape: Shape, names: Collection[str], sharing: int) -> float:
        """Seconds before any pass of a pipeline, while the first stage is gathered, and behind all, while one is
        reduced. names: the modules of the pipeline.
        """
        first, last = self._ends_of(shape, names)
        return self._gather_s(first, shape, sharing) + self._reduce_s(last, shape, sharing)

    def _ends_beside_s(self, shape: Shape) -> float:
        """`_ends_s` with encoders in bubbles, of which two ranks or more have copies: all pass before and behind the
        backbone. How many ranks share them is their own choice.
        """
        first, last = self._ends_of(shape, list(self.num_blocks))
        gathered_s, reduced_s = (self._messages(size / shape.tp, 1, 2, 2, shape.kind) for size in (first, last))
        return min(self._messages(last / shape.tp, 1, 2, 1, shape.kind)[1], gathered_s[0] + reduced_s[1])

    def _ends_of(self, shape: Shape, names: Collection[str]) -> tuple[int, int]:
        """The least trainable parameters of what may be gathered first, and of what may be reduced last."""

        def comes_after(name: str, sources: Collection[str]) -> bool:
            known = (source for source in self.model.sources(name) if source in sources)
            return any(0 in self.model.entries(source, name) for source in known)

        first = [self._trainable[name][0] for name in names if not comes_after(name, names)]
        learning = [name for name in names if self.model.learners(name)]
        last = [self._first_learning(name) for name in learning if not comes_after(name, learning)]
        if not shape.apart:  # Gradients of weights may come last, of any block.
            last += [size for name in names for size in self._trainable[name] if size]
        return min(first), min(last, default=0)

    def _first_learning(self, name: str) -> int:
        """The trainable parameters of the first block of a module that has a backward pass."""
        sizes = self._trainable[name]
        if self.model.learners_before(name):
            return sizes[0]
        return next((size for size in sizes if size), 0)

    @cached_property
    def _trainable(self) -> dict[str, list[int]]:
        """By module, the trainable parameters of each block, without those that two of them share."""
        found = {}
        for name in self.num_blocks:
            module = self.model.module(name)
            sizes = [sum(spread(module.layers[at]).updated_parameters for at in block) for block in module.blocks]
            found[name] = [max(sizes[0] - module.tied_weights, 0), *sizes[1:]]
        return found

    def _gather_s(self, number: float, shape: Shape, sharing: int) -> float:
        return self._messages(number / shape.tp, shape.tp, shape.num_copies, sharing, shape.kind)[0]

    def _reduce_s(self, number: float, shape: Shape, sharing: int) -> float:
        return self._messages(number / shape.tp, shape.tp, shape.num_copies, sharing, shape.kind)[1]

    def _message_s(self, number: float, tp: int, num_copies: int, sharing: int, kind: str) -> tuple[float, float]:
        """Seconds to gather so many parameters and to reduce their gradients on one rank. sharing: ranks of a copy."""
        precision = self.job.mixed_precision(pipeline=kind != "data_parallel")
        inside, across = range(0, sharing * tp, tp), range(0, num_copies * tp, sharing * tp)
        gathered_s = reduced_s = 0.0
        if sharing > 1:
            gathered_s = self.links.gather_seconds(number * precision.compute, inside)
            reduced_s = self.links.reduce_scatter_seconds(number * precision.gradient, inside)
        if len(across) > 1:
            reduced_s += self.links.all_reduce_seconds(number * precision.gradient / sharing, across)
        return gathered_s, reduced_s

    def _sending_s(self, shape: Shape) -> float:
        """What the stage that sends least sends forward, or what encoders apart send to the backbone.

        Its ranks send over the faster link, but for one boundary of a pipeline that is longer than a node.
        """
        node, seconds = self.job.cluster.ranks_per_node, [0.0]
        per_stage = shape.num_ranks // shape.pp
        if shape.pp > 1:
            least = min(self._sent(name, True) for name in self.num_blocks if name not in shape.apart)
            peer = node if (shape.pp - 1) * per_stage >= node else 1
            seconds.append(self._send_s(least / per_stage, peer))
        if shape.apart:
            seconds.append(self._send_s(sum(self._sent(name, False) for name in shape.apart) / per_stage, 1))
        return max(seconds)

    def _send_s(self, size_bytes: float, peer: int) -> float:
        return float(self.links.send_seconds(np.array([size_bytes]), (0, peer))[0]) if size_bytes else 0.0

    def _bytes_sent(self, name: str, is_cut: bool) -> float:
        """Bytes of the batch behind a module; or behind the block of it that has the fewest."""
        module, element_bytes = self.model.module(name), self.job.mixed_precision(pipeline=True).compute
        if not is_cut and name not in {source for source, _ in self.model.edges}:
            return 0.0
        stops = range(1, len(module.blocks) + (name != BACKBONE)) if is_cut else (len(module.blocks),)
        sent = {module.sent(stop) for stop in stops}
        rows = [self.seconds.rows(name, layer).total[0] * layer.output_width for layer in sent]
        return min(rows, default=math.inf) * element_bytes

    def _parameters(self, name: str, *, is_spread: bool = False) -> tuple[int, int]:
        """All and trainable ones. is_spread: those of a rank where one expert of each layer is on each rank."""
        layers = [spread(layer) if is_spread else layer for layer in self.model.module(name).layers]
        return sum(layer.parameters for layer in layers), sum(layer.updated_parameters for layer in layers)


def _both_s(passes: Float64Array) -> float:
    """Forward and all of backward, over all blocks and cells."""
    return float(passes[[FORWARD, BACKWARD]].sum())
