"""What pipelines of one shape of a job's Plans wait for: the term `bubbles` of `bound_terms.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.workload import BACKBONE
from motet.planner.bound_messages import ShapeMessages
from motet.planner.bound_passes import PassSeconds, ShapePasses
from motet.planner.bound_seconds import BACKWARD, FORWARD, INPUT
from motet.planner.bound_shapes import Shape

_PRECISION = 1e-3
"""The relative precision of the best cut."""


class ShapePipelines:
    """The pipelines of all shapes of a job. passes, messages: what its ranks compute, and send."""

    def __init__(self, passes: PassSeconds, messages: ShapeMessages) -> None:
        self.of, self.messages, self.model, self.cuts = passes, messages, passes.model, passes.cuts
        self._least, self._alike = cache(passes.seconds.least), cache(self._of_alike)

    def seconds(self, shape: Shape, passes: ShapePasses, sharing: int) -> Float64Array:
        """[n]. sharing: the ranks that share the update of the backbone's unit."""
        terms = [self._latency_s(shape, passes), self._turns_s(shape, passes, sharing)]
        largest: Float64Array = np.max([*terms, self._cut_s(shape, passes, sharing)], axis=0)
        return largest

    def _of_alike(self, name: str, tp: int, cp: int) -> tuple[int, Float64Array, float]:
        return self.of.seconds.alike(name, tp, cp, self.of.all_cells.least.astype(np.float64))

    def _latency_s(self, shape: Shape, passes: ShapePasses) -> Float64Array:
        """A mean cell on its way through the stages of encoders and the backbone, and back."""
        cells, number = self.of.cells(shape.dp), shape.dp / self.of.cells(shape.dp).least
        latency_s, before_s = passes.sum(FORWARD, INPUT, of=[BACKBONE]) * number, np.zeros(len(number))
        left = self.of.num_ranks - shape.num_ranks
        for name in self.of.feeding:
            if name in shape.apart:
                alone = self.of.alone(name, shape, left)[[FORWARD, INPUT]].sum(axis=(0, 1))
                before_s = np.maximum(before_s, alone / (left * cells.least))
            else:
                before_s = np.maximum(before_s, passes.sum(FORWARD, INPUT, of=[name]) * number)
        return np.where(cells.least == cells.most, latency_s + before_s, 0.0)

    def _turns_s(self, shape: Shape, passes: ShapePasses, sharing: int) -> Float64Array:
        """All cells take turns in the backbone's last block, behind the first one's way there and before the last one's
        way back.

        Cells pass each stage in one order, forward and back. Of one replica, let c run over its m cells; of a cell, F
        and I are seconds of forward and of backward for the input in all N blocks that are alike. Then a step T is

        1. at least (N - 1) / N * (F of the first cell + I of the last one) + the sum of (F + I) / N over all cells:
           the rank with the last block computes it of all cells between these two ways;
        2. at least F + I of each cell.

        Let no cell's F or I be below a share s of both, and b = s * (N - 1) / N. Once (1) and b times (2) of each cell
        but the first and the last are (1 + (m - 2) * b) * T >= (1 / N + b) * the sum of F + I. One cell has it, too.
        The sum over dp replicas with n cells is (dp * (1 - 2 * b) + n * b) * T on the left, whatever each of them has.
        What the last block alone takes comes on top in (1): of it, 1 - b count, as many as one cell has.

        The first stage is gathered before, and is reduced and updated behind all that.
        """
        num_alike, of_alike, share = self._alike(BACKBONE, shape.tp, shape.cp)
        both_s = of_alike[[FORWARD, INPUT], shape.dp - 1 :].sum(axis=0)
        beside = share * (1 - 1 / num_alike)
        in_last_s = passes.blocks[BACKBONE][[FORWARD, INPUT], -1].sum(axis=0) * shape.dp - both_s
        covered_s = (1 / num_alike + beside) * num_alike * both_s + (1 - beside) * in_last_s
        turns_s = covered_s / (shape.dp * (1 - 2 * beside) + self.of.cells(shape.dp).most * beside)
        first = self.of.trainable[BACKBONE][0]
        ends_s = self.messages.gather_s(first, shape, sharing) + self.messages.reduce_s(first, shape, sharing)
        ended: Float64Array = turns_s + ends_s + self.of.updates_s(BACKBONE, shape, sharing)[0]
        return ended

    def _cut_s(self, shape: Shape, passes: ShapePasses, sharing: int) -> Float64Array:
        """The fullest rank, as ranks have whole blocks, and update them: any, or, where they have one stage each,
        neighbours.
        """
        if shape.pp == 1:
            return np.zeros(len(self.of.cells(shape.dp).least))
        blocks = {
            name: each[FORWARD] + each[BACKWARD] + self.of.updates_s(name, shape, sharing)[:, None]
            for name, each in passes.blocks.items()
        }
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
        if any(name not in self.of.feeding or self.model.sources(name) for name in encoders):
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
