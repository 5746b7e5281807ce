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
        self._longest, self._order = cache(self._longest_s), cache(self._order_of)

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
            # Collectives are before and behind the longest examples of a replica too.
            most_s = np.maximum(busy_s, self._load_s(shape)) if "item" not in without else busy_s
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
        """The longest examples: on their way through all stages, or together on the ranks of one replica."""
        if self.cuts:
            return 0.0
        if not self.passes.by_shape:
            shared = self._longest(BACKBONE, shape.tp, self.passes.num_ranks // shape.tp, 1, None)
            return float(shared[[FORWARD, INPUT], 0].sum())
        return max(self._way_s(shape), self._load_s(shape) + self.passes.update_s(shape, shape.num_copies))

    def _way_s(self, shape: Shape) -> float:
        """One example passes stage after stage, its encoders one beside the other; the gradients of weights may come
        beside that.
        """
        way_s = 0.0
        for by in self._orders(shape):
            of_modules = self._of_longest(shape, by)
            ways = {name: float(passes[[FORWARD, INPUT], 0].sum()) for name, passes in of_modules.items()}
            before_s = max((ways[name] for name in self.passes.feeding if name in ways), default=0.0)
            way_s = max(way_s, ways[BACKBONE] + before_s)
        return way_s

    def _load_s(self, shape: Shape) -> float:
        """Passes of the replica with the longest examples, on a mean rank of it."""
        if self.cuts:
            return 0.0
        loads = (np.sum(list(self._of_longest(shape, by).values()), axis=0) for by in self._orders(shape))
        return max(float((load[FORWARD] + load[BACKWARD]).max()) for load in loads) / shape.pp

    def _orders(self, shape: Shape) -> tuple[tuple[str, ...] | None, ...]:
        """The orders of examples in which the longest ones are looked at, as of `_order_of`."""
        return (None,) if shape.kind == "data_parallel" else (None, tuple(self.passes.hosted(shape)))

    def _of_longest(self, shape: Shape, by: tuple[str, ...] | None) -> dict[str, Float64Array]:
        """By module, the examples of `_longest_s`. In a pipeline, and in its bubbles, items of encoders are on the
        ranks of their sequence; colocated phases may have them elsewhere.
        """
        tp, cp, _, dp, _, kind = shape
        if kind == "data_parallel":
            return {BACKBONE: self._longest(BACKBONE, tp, cp, dp, by, learning=True)}
        found = {BACKBONE: self._longest(BACKBONE, tp, cp, dp, by)}
        for name in self.passes.hosted(shape):
            ways = self.passes.ways(name, shape)
            found[name] = np.min([self._longest(name, *way, dp, by, is_shared=tp * cp > 1) for way in ways], axis=0)
        return found

    def _longest_s(
        self,
        name: str,
        tp: int,
        cp: int,
        dp: int,
        by: tuple[str, ...] | None,
        *,
        learning: bool = False,
        is_shared: bool = False,
    ) -> Float64Array:
        """[3, n]: the fewest rows of a module that are on one replica, in one cell. by: as of `_order_of`."""
        order = self._order(by) if self.passes.by_shape else self._order(by)[:1]
        found = self.passes.seconds.longest(name, tp, cp, order, dp, learning=learning, is_shared=is_shared)
        summed: Float64Array = found.sum(axis=1)
        return summed

    def _order_of(self, by: tuple[str, ...] | None) -> Int64Array:
        """Examples, the longest first: by their sequences, or by the seconds of these and of items of some encoders."""
        if by is None:
            return np.argsort(-self.job.batch.sequence, kind="stable")
        every = (self.passes.seconds.of_examples(name)[[FORWARD, BACKWARD]] for name in (BACKBONE, *by))
        return np.argsort(-np.sum([passes.sum(axis=(0, 1)) for passes in every], axis=0), kind="stable")
