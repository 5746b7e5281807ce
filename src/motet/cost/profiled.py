"""A cost model made of a profile: seconds of layers are interpolated between measured ones, those of messages too.

Where more or fewer ranks than the measured ones take part, what was measured is carried over by the steps and the bytes
of a ring (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"): n - 1 steps, each of the
latency that was fitted, and (n - 1) / n of the bytes; an all-reduce has twice both, before and after alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.exchange import Moved
from motet.core.spec import Layer
from motet.cost.fit import _NS_PER_S, Curve, Surface, fit_curve
from motet.cost.model import LayerSeconds, Work
from motet.cost.profile import LayerTimes, MessageKind, MessageTimes, Profile

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_REDUCES_A_PASS = 2
"""Megatron's tensor parallelism sums a layer's activations twice a pass: after attention and after the MLP."""


class Profiled:
    """`cost.model.CostModel` of a profile; `cluster` says which ranks share a node.

    Every question about what was not measured raises UserError that says what to profile.
    """

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile = profile
        self.cluster = cluster
        self._surfaces: dict[tuple[str, str, int, int], tuple[Surface, Surface, Surface]] = {}

    def on(self, cluster: Cluster) -> Profiled:
        return Profiled(self.profile, cluster)

    def layer_seconds(self, module: str, layer: Layer, work: Work, tp: int = 1) -> LayerSeconds:
        """A layer without attention takes as long as on one rank, for which alone it is measured."""
        tp = tp if layer.attention is not None else 1
        key = (module, layer.kind, layer.weights, tp)
        if key not in self._surfaces:
            self._surfaces[key] = _surfaces(self._times(module, layer, tp))
        forward, of_input, of_weights = (surface(work.rows, work.pairs) for surface in self._surfaces[key])
        return LayerSeconds(forward, of_input, of_weights)

    def tensor_seconds(self, layer: Layer, work: Work, ranks: Sequence[int]) -> Float64Array:
        """Of one pass: two all-reduces of the layer's rows; none of a layer without attention, which is not split."""
        if len(ranks) <= 1 or layer.attention is None:
            return np.zeros(len(work.rows))
        size_bytes = work.rows * layer.output_width * _ELEMENT_BYTES[self.profile.precision]
        return _REDUCES_A_PASS * self._seconds("all_reduce", size_bytes, ranks)

    def send_seconds(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        return self._seconds("send", size_bytes, ranks)

    def gather_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        return float(self._seconds("gather", np.array([size_bytes]), ranks)[0])

    def reduce_scatter_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        return float(self._seconds("reduce_scatter", np.array([size_bytes]), ranks)[0])

    def all_reduce_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        return float(self._seconds("all_reduce", np.array([size_bytes]), ranks)[0])

    def exchange_seconds(self, moved_bytes: Moved, ranks: Sequence[int]) -> Float64Array:
        """By all that the busiest rank moves: exchanges that were measured among nodes have both kinds of links."""
        return self._seconds("exchange", moved_bytes.busiest, ranks)

    def step_seconds(self, num_parameters: int) -> float:
        return float(self._step.seconds(num_parameters)) if num_parameters else 0.0

    @cached_property
    def _step(self) -> Curve:
        times = self.profile.optimizer
        if times is None:
            raise UserError("The profile has no times of the optimizer: profile a recipe in which something trains.")
        return fit_curve(times.seconds, times.num_parameters)

    def _times(self, module: str, layer: Layer, tp: int) -> LayerTimes:
        """The measured layer of that kind and those weights."""
        of_module = self.profile.module(module)
        for times in () if of_module is None else of_module.layers:
            if (times.kind, times.weights, times.tp) == (layer.kind, layer.weights, tp):
                return times
        mend = "run `motet profile` on a recipe of this model"
        if tp > 1:
            mend += f", under torchrun with {tp} ranks"
        raise UserError(
            f"The profile of {self.profile.recipe} has no times of layer {layer.kind!r} of {layer.weights} weights in "
            f"module {module!r} at tensor parallelism {tp}: {mend}."
        )

    def _seconds(self, kind: MessageKind, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        if len(ranks) <= 1:
            return np.zeros(len(size_bytes))
        is_local = len({self.cluster.node_of(rank) for rank in ranks}) == 1
        found = next((t for t in self.profile.messages if t.kind == kind and (t.num_nodes == 1) == is_local), None)
        if found is None:
            where = "of one node" if is_local else "of several nodes"
            raise UserError(
                f"The profile of {self.profile.recipe} has no times of {kind.replace('_', '-')} between ranks {where}: "
                f"run `motet profile` under torchrun on ranks {where}."
            )
        steps, share = _grown(kind, found.num_ranks, len(ranks))
        sizes = np.asarray(size_bytes, dtype=np.float64) * share
        nothing = np.zeros(len(sizes))
        measured = Surface(found.size_bytes, [0.0] * len(found.size_bytes), found.seconds)(sizes, nothing)
        latency_s = min(message_fit(found).constant_ns / _NS_PER_S, *found.seconds)
        return np.where(sizes > 0, np.maximum(measured, latency_s) + (steps - 1) * latency_s, 0.0)


def message_fit(*measured: MessageTimes) -> Curve:
    """Latency (constant) and inverse bandwidth (linear, nanoseconds a byte) of measured messages, taken as one kind."""
    return fit_curve(
        [s for times in measured for s in times.seconds], [b for times in measured for b in times.size_bytes]
    )


def _grown(kind: MessageKind, num_measured: int, num_ranks: int) -> tuple[float, float]:
    """By what latency and time of the bytes grow from the measured ranks to `num_ranks`."""
    if kind == "send":
        return 1.0, 1.0
    steps = (num_ranks - 1) / (num_measured - 1)
    # The size of an exchange is what a rank sends, that of the others what a ring of ranks shares.
    return steps, 1.0 if kind == "exchange" else steps * num_measured / num_ranks


def _surfaces(times: LayerTimes) -> tuple[Surface, Surface, Surface]:
    points = times.grid
    forward, of_input, of_weights = (
        Surface(points.rows, points.pairs, seconds) for seconds in (points.forward_s, points.input_s, points.weight_s)
    )
    return forward, of_input, of_weights
