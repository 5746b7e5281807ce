"""A lower bound of the step of every Plan of a job, whatever its strategy: how far an answer can be from the best.

Every Plan computes all items once, in whole examples of the backbone unless replicas may share these, and updates every
trainable parameter. For each shape of the backbone's unit (TP, CP, PP, DP on at most the ranks of the cluster), with
encoders on its ranks or on others (`bound_shapes.py`), and for each number of microbatches, a step takes at least each
of these (`bound_terms.py`):

- `work`: a mean rank's share of all rows, and of the optimizer's update. Every microbatch takes some seconds whatever
  its rows, and its padding, which is the least in the best groups of items. Padding does not count where ranks share
  items and may cut one. Stages run a backward pass of every example; data parallelism may leave some out;
- `item`: the longest example, which one replica computes, or, of the j * dp + 1 longest, the least j + 1: some replica
  has as many of them. In a pipeline, and in its bubbles, it has their items of encoders too. Its update comes on top;
- `bubbles`: a mean microbatch passes the encoders and all stages of the backbone, and comes back; all microbatches
  take turns in the backbone's last block (`bound_pipelines.py`). A rank has whole blocks, which it updates; where each
  has one stage, of neighbours, and waits for the stages before it to compute the smallest example;
- `communication`: nothing runs before the first stage is gathered, nor while the last one is reduced. All gradients are
  reduced behind the forward passes of all microbatches.

The bound is the least, over shapes and numbers of microbatches, of the largest of these. `memory` binds where shapes
that would be faster cannot hold the state of the model, or only under ZeRO 3, which gathers parameters for every pass.

Ranks that share sequences give each other the rows of encoders, which lie evenly on them, in any Plan. What they
exchange in attention is known where one cell has all sequences (`BlockSeconds.exchanged`). Of several cells it is in no
term: a rank may have whole sequences then, and which ones share a cell is free. Nor is most of what a pipeline waits
for behind its first passes: cuts, and orders of examples, are free.

It is proven where a layer's seconds rise with its rows and pairs, and are convex in them, but for what any row at all
takes. Both hold of `cost.analytic`, and of a profile but for its noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from motet.core.errors import UserError
from motet.core.workload import BACKBONE
from motet.cost.memory import state_bytes
from motet.planner.bound_seconds import ExampleRows
from motet.planner.bound_shapes import MAX_RANKS_BY_SHAPE, Shape, shapes_of
from motet.planner.bound_terms import ShapeTerms, Term
from motet.planner.job import Job

_NEARLY = 0.99


class StepBound(NamedTuple):
    """step_s: seconds that no Plan's step is below; infinite where no Plan fits. term: what binds.

    Example: a step of 0.3 s is at most 20 % above the best.
        >>> bound_s, term = StepBound(0.25, "work")
        >>> f"{0.3 / bound_s - 1:.0%}, by {term}"
        '20%, by work'
    """

    step_s: float
    term: Term


def step_bound(
    job: Job,
    *,
    cuts: bool = False,
    without: Collection[Term] = (),
    rows: ExampleRows | None = None,
    up_to_s: float = math.inf,
) -> StepBound:
    """The bound of a job on its own batch; 0 where a profile lacks times without TP. Kept for each job.

    cuts: of Plans that may cut examples and items over replicas (balance "split"). without: terms to leave out.
    rows: of the batch, where several clusters are bounded.
    up_to_s: a larger bound is not looked for; it is this then, which takes a fraction of the time.
    """
    is_whole = not without and not cuts and up_to_s == math.inf
    if is_whole and job in _known_bounds:
        return _known_bounds[job]
    try:
        bound = _Bounds(job, cuts, frozenset(without), rows or ExampleRows(job)).least(up_to_s)
    except UserError:
        bound = StepBound(0.0, "work")
    if is_whole:
        _known_bounds[job] = bound
    return bound


_known_bounds: WeakKeyDictionary[Job, StepBound] = WeakKeyDictionary()
"""Whole results of `step_bound`: a search, its refinement and its report all need that of their job."""


class _Bounds:
    """The bounds of all shapes of a job."""

    def __init__(self, job: Job, cuts: bool, without: frozenset[Term], rows: ExampleRows) -> None:
        self.job, self.without, self.terms = job, without, ShapeTerms(job, rows, cuts=cuts)
        self.num_ranks = job.cluster.num_ranks

    def least(self, up_to_s: float = math.inf) -> StepBound:
        """The least bound of a shape, and what binds. up_to_s: as of `step_bound`."""
        best, free_s = StepBound(math.inf, "memory"), math.inf
        shapes = sorted(((self.terms.floor_s(shape), shape) for shape in shapes_of(self.job)), key=lambda one: one[0])
        for floor_s, shape in shapes:
            if floor_s >= min(best.step_s, up_to_s):
                break
            bound = self._of_shape(shape, best.step_s)
            free_s = min(free_s, bound.step_s)
            if "memory" not in self.without and bound.step_s < best.step_s:
                if not self._fits(shape, (0, 1, 2, 3)):
                    continue
                if not self._fits(shape, (0, 1, 2)):
                    bound = max(bound, StepBound(self._gathered_s(shape), "memory"), key=lambda one: one.step_s)
            best = min(best, bound, key=lambda one: one.step_s)
        if best.step_s > up_to_s:
            return StepBound(up_to_s, best.term)
        return best if best.step_s <= free_s else StepBound(best.step_s, "memory")

    def _of_shape(self, shape: Shape, most_s: float) -> StepBound:
        """The bound of a shape up to most_s, whatever its memory; and what binds: the first term nearly as large."""
        terms = self.terms.of(shape, self.without, most_s)
        largest = np.max(list(terms.values()), axis=0)
        at = int(largest.argmin())
        bound_s = float(largest[at])
        return StepBound(bound_s, next(term for term in terms if terms[term][at] >= _NEARLY * bound_s))

    # ---------------------------------------------------------------------------------------------------- memory

    def _fits(self, shape: Shape, stages: tuple[int, ...]) -> bool:
        """Whether a mean rank can hold its share of the state under one of the ZeRO stages."""
        hosted = [name for name in self.job.model.num_blocks if name not in shape.apart]
        is_pipeline = self.terms.passes.by_shape and shape.kind != "data_parallel"
        own = self._state_bytes(hosted, shape.tp * shape.pp, shape.num_copies, is_pipeline or shape.pp > 1, stages)
        left = self.num_ranks - shape.num_ranks
        others = self._state_bytes(shape.apart, 1, left, True, (3,)) if shape.apart else 0.0
        return max(own, others) <= self.job.capacity_bytes

    def _state_bytes(
        self, names: Collection[str], parts: int, num_copies: int, pipeline: bool, stages: tuple[int, ...]
    ) -> float:
        total, trainable = (sum(self.terms.passes.held[name][index] for name in names) // parts for index in (0, 1))
        kinds = (True,) if pipeline else (False, True)
        return min(
            sum(state_bytes(total, trainable, precision=precision, zero=zero, shard_ranks=num_copies))
            for precision in (self.job.mixed_precision(pipeline=kind) for kind in kinds)
            for zero in stages
        )

    def _gathered_s(self, shape: Shape) -> float:
        """Messages of ZeRO 3 on a rank: parameters are gathered at least once, gradients reduced once."""
        if "communication" in self.without or shape.num_copies == 1 or self.num_ranks > MAX_RANKS_BY_SHAPE:
            return 0.0
        total, trainable = (number / shape.tp for number in self.terms.passes.held[BACKBONE])
        precision = self.job.mixed_precision(pipeline=shape.pp > 1)
        ranks = range(0, 2 * shape.tp, shape.tp)
        gathered_s = self.terms.messages.links.gather_seconds(total * precision.compute, ranks)
        reduced_s = (
            self.terms.messages.links.reduce_scatter_seconds(trainable * precision.gradient, ranks)
            if trainable
            else 0.0
        )
        return (gathered_s + reduced_s) / shape.pp
