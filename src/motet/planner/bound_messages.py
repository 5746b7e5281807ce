"""What a step of one shape of a job's Plans sends, gathers and reduces: `communication` of `bound_terms.py`."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.workload import BACKBONE
from motet.planner.bound_passes import PassSeconds, ShapePasses
from motet.planner.bound_seconds import BACKWARD, FORWARD, INPUT, spread
from motet.planner.bound_shapes import Shape
from motet.simulate.predict.collectives import fsdp_slices


class ShapeMessages:
    """The messages of all shapes of a job. passes: what its ranks compute."""

    def __init__(self, passes: PassSeconds) -> None:
        self.of, self.job, self.model = passes, passes.job, passes.model
        self.links = passes.seconds.links
        self._messages, self._sent = cache(self._message_s), cache(self._bytes_sent)

    def collectives_s(self, shape: Shape, passes: ShapePasses, busy_s: Float64Array, sharing: int) -> Float64Array:
        """Gathers before the first pass, reductions behind the last one, and the update, [n].

        busy_s: a mean rank's passes. sharing: the ranks that share the update of the backbone's unit.
        """
        if shape.num_copies == 1:
            return np.zeros(len(busy_s))
        of = self._of_fsdp if shape.kind == "data_parallel" else self._of_stages
        return of(shape, passes, busy_s, sharing)

    def _of_fsdp(self, shape: Shape, passes: ShapePasses, busy_s: Float64Array, sharing: int) -> Float64Array:
        """FSDP reduces a slice while others compute backward: all but the last one. A microbatch that nothing learns
        from may come behind all reductions.
        """
        if not (shape.dp == self.of.batch_size or self.job.batch.has_any(self.model.learners(BACKBONE)).all()):
            return busy_s + self.of.update_s(shape, sharing)
        present = [name for name in passes.blocks if self.of.has_item[name].any()]
        slices = [part for name in present for part in fsdp_slices(self.model.module(name).layers)]
        sizes = [sum(spread(layer).updated_parameters for layer in part) for part in slices]
        last_s = min((self.reduce_s(size, shape, sharing) for size in sizes if size), default=0.0)
        trainable = self.of.held[BACKBONE][1]
        gathered_s, reduced_s = self.gather_s(trainable, shape, sharing), self.reduce_s(trainable, shape, sharing)
        forward_s = passes.sum(FORWARD, of=[BACKBONE])
        ended_s = np.maximum(busy_s + last_s, np.maximum(forward_s, gathered_s) + reduced_s)
        updated: Float64Array = ended_s + self.of.update_s(shape, sharing)
        return updated

    def _of_stages(self, shape: Shape, passes: ShapePasses, busy_s: Float64Array, sharing: int) -> Float64Array:
        """A stage is gathered before its first pass, and reduced behind its last one."""
        backbone, pp = self.of.trainable[BACKBONE], shape.pp
        # Gradients of weights may wait where all modules are in one pipeline.
        row = BACKWARD if shape.apart else INPUT
        back = passes.blocks[BACKBONE][row]
        behind = sum(self.of.held[name][1] for name in passes.blocks if name in self.of.feeding)
        forward_s = passes.sum(FORWARD, of=passes.blocks)
        ends_s = self._ends_beside_s(shape) if passes.beside else self._ends_s(shape, passes.blocks, sharing)
        terms = [
            busy_s + ends_s,
            # The backbone's first block is reduced behind all of its passes, and encoders are too.
            (forward_s + back.sum(axis=0) + self.reduce_s(backbone[0] + behind, shape, sharing)) / pp,
            (forward_s + back[-1] + self.reduce_s(sum(backbone) + behind, shape, sharing)) / pp,
            (self.gather_s(sum(backbone), shape, sharing) + passes.sum(BACKWARD, of=passes.blocks)) / pp,
        ]
        largest: Float64Array = np.max(terms, axis=0) + self.of.update_s(shape, sharing)
        return largest

    def _ends_s(self, shape: Shape, names: Collection[str], sharing: int) -> float:
        """Seconds before any pass of a pipeline, while the first stage is gathered, and behind all, while one is
        reduced. names: the modules of the pipeline.
        """
        first, last = self._ends_of(shape, names)
        return self.gather_s(first, shape, sharing) + self.reduce_s(last, shape, sharing)

    def _ends_beside_s(self, shape: Shape) -> float:
        """`_ends_s` with encoders in bubbles, of which two ranks or more have copies: all pass before and behind the
        backbone. How many ranks share them is their own choice.
        """
        first, last = self._ends_of(shape, list(self.of.num_blocks))
        gathered_s, reduced_s = (self._messages(size / shape.tp, 1, 2, 2, shape.kind) for size in (first, last))
        return min(self._messages(last / shape.tp, 1, 2, 1, shape.kind)[1], gathered_s[0] + reduced_s[1])

    def _ends_of(self, shape: Shape, names: Collection[str]) -> tuple[int, int]:
        """The least trainable parameters of what may be gathered first, and of what may be reduced last."""

        def comes_after(name: str, sources: Collection[str]) -> bool:
            known = (source for source in self.model.sources(name) if source in sources)
            return any(0 in self.model.entries(source, name) for source in known)

        first = [self.of.trainable[name][0] for name in names if not comes_after(name, names)]
        learning = [name for name in names if self.model.learners(name)]
        last = [self._first_learning(name) for name in learning if not comes_after(name, learning)]
        if not shape.apart:  # Gradients of weights may come last, of any block.
            last += [size for name in names for size in self.of.trainable[name] if size]
        return min(first), min(last, default=0)

    def _first_learning(self, name: str) -> int:
        """The trainable parameters of the first block of a module that has a backward pass."""
        sizes = self.of.trainable[name]
        if self.model.learners_before(name):
            return sizes[0]
        return next((size for size in sizes if size), 0)

    def gather_s(self, number: float, shape: Shape, sharing: int) -> float:
        """Seconds to gather so many trainable parameters on one rank; 0 of none."""
        return self._messages(number / shape.tp, shape.tp, shape.num_copies, sharing, shape.kind)[0]

    def reduce_s(self, number: float, shape: Shape, sharing: int) -> float:
        """Seconds to reduce the gradients of so many parameters on one rank; 0 of none."""
        return self._messages(number / shape.tp, shape.tp, shape.num_copies, sharing, shape.kind)[1]

    def _message_s(self, number: float, tp: int, num_copies: int, sharing: int, kind: str) -> tuple[float, float]:
        """Seconds to gather so many parameters and to reduce their gradients on one rank. sharing: ranks of a copy."""
        precision = self.job.mixed_precision(pipeline=kind != "data_parallel")
        inside, across = range(0, sharing * tp, tp), range(0, num_copies * tp, sharing * tp)
        gathered_s = reduced_s = 0.0
        if not number:
            return gathered_s, reduced_s
        if sharing > 1:
            gathered_s = self.links.gather_seconds(number * precision.compute, inside)
            reduced_s = self.links.reduce_scatter_seconds(number * precision.gradient, inside)
        if len(across) > 1:
            reduced_s += self.links.all_reduce_seconds(number * precision.gradient / sharing, across)
        return gathered_s, reduced_s

    def sending_s(self, shape: Shape) -> float:
        """What the stage that sends least sends forward, or what encoders apart send to the backbone.

        Its ranks send over the faster link, but for one boundary of a pipeline that is longer than a node.
        """
        node, seconds = self.job.cluster.ranks_per_node, [0.0]
        per_stage = shape.num_ranks // shape.pp
        if shape.pp > 1:
            least = min(self._sent(name, True) for name in self.of.num_blocks if name not in shape.apart)
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
        rows = [self.of.seconds.rows(name, layer).total[0] * layer.output_width for layer in sent]
        return min(rows, default=math.inf) * element_bytes
