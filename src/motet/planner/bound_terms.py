"""The terms of `step_bound.py` for one shape of a job's Plans: seconds that no step of the shape is below.

Each term is a column over numbers of *cells*: microbatches times replicas of the backbone, without those that caps
leave empty. The bound of a shape is the least, over these numbers, of its largest term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cache, cached_property
from typing import Literal

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.workload import BACKBONE
from motet.planner.bound_messages import ShapeMessages
from motet.planner.bound_passes import PassSeconds
from motet.planner.bound_pipelines import ShapePipelines
from motet.planner.bound_seconds import BACKWARD, FORWARD, INPUT, ExampleRows
from motet.planner.bound_shapes import Shape
from motet.planner.degrees import divisors
from motet.planner.job import Job

Term = Literal["work", "item", "memory", "bubbles", "communication"]


class ShapeTerms:
    """The terms of all shapes of a job. cuts: whether sequences and items may be cut over replicas.

    beside_sums: of those alone in which encoders run beside sums of products (`BlockSeconds`).
    """

    def __init__(self, job: Job, rows: ExampleRows, *, cuts: bool = False, beside_sums: bool = False) -> None:
        self.job, self.rows, self.cuts, self.beside_sums = job, rows, cuts, beside_sums
        self.passes = PassSeconds(job, rows, cuts=cuts, beside_sums=beside_sums)
        self.messages = ShapeMessages(self.passes)
        self.pipelines = ShapePipelines(self.passes, self.messages)
        self._longest = cache(self._longest_s)

    def floor_s(self, shape: Shape) -> float:
        """Seconds that the shape's largest term is not below: all examples in one cell on one rank, divided."""
        return self._that_counts(shape).passes.floor_s(shape)

    def _that_counts(self, shape: Shape) -> ShapeTerms:
        """The terms of a shape of which encoders may run in bubbles: those are beside sums of products, too."""
        has_encoders = len(self.job.model.num_blocks) > 1
        may_run = shape.kind == "bubbles" or (has_encoders and not self.passes.by_shape)
        is_beside = may_run and shape.tp > 1 and self.job.cluster.runs_beside_sums
        return self._beside_sums if is_beside and not self.beside_sums else self

    @cached_property
    def _beside_sums(self) -> ShapeTerms:
        return ShapeTerms(self.job, self.rows, cuts=self.cuts, beside_sums=True)

    def of(self, shape: Shape, without: Collection[Term] = (), most_s: float = math.inf) -> dict[Term, Float64Array]:
        """The terms, [n] each, but for `memory`; up to those by which none of n is below most_s."""
        if (that_count := self._that_counts(shape)) is not self:
            return that_count.of(shape, without, most_s)
        fewest, few_s = self.passes.fewest_cells(shape)
        terms = self._terms(shape, fewest, without, most_s)
        if few_s < min(float(np.max(list(terms.values()), axis=0).min()), most_s):
            fewer = self._terms(shape, dict.fromkeys(fewest, 1), without, most_s)
            terms = {term: np.minimum(terms[term], np.maximum(fewer[term], few_s)) for term in fewer if term in terms}
        return terms

    def _terms(
        self, shape: Shape, fewest: Mapping[str, int], without: Collection[Term], most_s: float
    ) -> dict[Term, Float64Array]:
        """`of`, where the items of each encoder are in so many cells, at the fewest."""
        passes, sharing = self.passes.of(shape, fewest), divisors(shape.num_copies)
        busy_s = passes.sum(FORWARD, BACKWARD) / shape.pp
        has_bubbles = self.passes.by_shape and (shape.pp > 1 or shape.apart)
        # How many ranks share an update says what each rank does of it, and what is sent for it.
        waited_s = cache(lambda: [self.pipelines.seconds(shape, passes, ranks) for ranks in sharing])

        def communication_s() -> Float64Array:
            # Where a rank has the whole backbone, collectives are before and behind its longest examples too.
            is_whole = shape.pp == 1 and shape.kind != "bubbles" and "item" not in without
            most_s = np.maximum(busy_s, self._item_s(shape)) if is_whole else busy_s
            choices = [self.messages.collectives_s(shape, passes, most_s, ranks) for ranks in sharing]
            if has_bubbles and "bubbles" not in without:
                choices = [np.maximum(*each) for each in zip(choices, waited_s(), strict=True)]
            least: Float64Array = np.maximum(np.min(choices, axis=0), self.messages.sending_s(shape))
            return least

        parts: dict[Term, Callable[[], Float64Array]] = {
            "work": lambda: np.maximum(
                busy_s + self.passes.update_s(shape, shape.num_copies), self.passes.apart_s(shape)
            ),
            "item": lambda: np.full(len(busy_s), self._item_s(shape)),
        }
        if has_bubbles:
            parts["bubbles"] = lambda: np.min(waited_s(), axis=0)
        if self.passes.by_shape:
            parts["communication"] = communication_s
        terms, largest = dict[Term, Float64Array](), np.zeros(len(busy_s))
        for term, part in parts.items():
            if term not in without and largest.min() < most_s:
                terms[term] = part()
                largest = np.maximum(largest, terms[term])
        return terms

    def _item_s(self, shape: Shape) -> float:
        if self.cuts:
            return 0.0
        if not self.passes.by_shape:
            shared = self._longest(shape.tp, self.passes.num_ranks // shape.tp, 1, False)
            return float(shared[[FORWARD, INPUT], 0].sum())
        of_counts = self._longest(shape.tp, shape.cp, shape.dp, shape.kind == "data_parallel")
        # One example passes stage after stage; the gradients of weights may come beside it.
        alone_s = of_counts[[FORWARD, BACKWARD if shape.pp == 1 else INPUT], 0].sum()
        return max(float(alone_s), float((of_counts[FORWARD] + of_counts[BACKWARD]).max()) / shape.pp)

    def _longest_s(self, tp: int, cp: int, dp: int, learning: bool) -> Float64Array:
        """[3, n]: the fewest rows of the backbone that are on one replica, in one cell."""
        order = self._by_length if self.passes.by_shape else self._by_length[:1]
        summed: Float64Array = self.passes.seconds.longest(BACKBONE, tp, cp, order, dp, learning=learning).sum(axis=1)
        return summed

    @cached_property
    def _by_length(self) -> Int64Array:
        """Examples, the longest first."""
        return np.argsort(-self.job.batch.sequence, kind="stable")
