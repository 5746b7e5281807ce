"""A cost model from a profile: it interpolates the measured seconds of layers and of messages.

Measured messages are scaled to other numbers of ranks as a ring (Thakur et al. 2005, "Optimization of Collective
Communication Operations in MPICH"). A ring of n ranks takes n - 1 steps, each of the fitted latency, and moves
(n - 1) / n of the bytes. An all-reduce takes twice both, so its scale is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.exchange import Moved
from motet.core.spec import Layer, ModelSpec
from motet.cost.fit import Curve, PassOperations, RunSurface, Surface, fit_curve
from motet.cost.memory import with_measured_bytes
from motet.cost.model import Beyond, LayerSeconds, Work
from motet.cost.profile import (
    DTYPE_BYTES,
    LayerTimes,
    MessageKind,
    MessageTimes,
    Profile,
    RunPoints,
    in_words,
    kept_shares,
)

_REDUCES_A_PASS = 2
"""The number of all-reduces of a layer and pass in Megatron's tensor parallelism: after attention and after the MLP."""


class Profiled:
    """The `cost.model.CostModel` of a profile. cluster: says which ranks share a node. hooks, waits: see `unwrapped`.

    Every method raises UserError for a layer or message that was not measured, and says what to profile.
    """

    def __init__(self, profile: Profile, cluster: Cluster, *, hooks: bool = True, waits: bool = False) -> None:
        self.profile = profile
        self.cluster = cluster
        self._hooks, self._waits = hooks, waits
        self._unwrapped: dict[bool, Profiled] = {}
        self._surfaces: dict[tuple[object, ...], tuple[Surface, Surface, Surface]] = {}
        self._measured: list[ModelSpec] = []
        self._runs: dict[tuple[object, ...], tuple[RunSurface, RunSurface] | None] = {}

    def on(self, cluster: Cluster) -> Profiled:
        """The model of the same profile in another cluster."""
        return Profiled(self.profile, cluster, hooks=self._hooks, waits=self._waits)

    def unwrapped(self, *, waits: bool = False) -> Profiled:
        """The model of the same profile, without the seconds of FSDP's hooks. waits: as of `cost.model.CostModel`."""
        if waits not in self._unwrapped:
            layers = [layer for module in self.profile.modules for layer in module.layers]
            hooks = self._hooks and not any(any(layer.hooks_s) for layer in layers)
            wait = waits and any(any(layer.waits_s) for layer in layers)
            is_own = (hooks, wait) == (self._hooks, self._waits)
            self._unwrapped[waits] = self if is_own else Profiled(self.profile, self.cluster, hooks=hooks, waits=wait)
        return self._unwrapped[waits]

    def layer_seconds(self, module: str, layer: Layer, work: Work, tp: int = 1) -> LayerSeconds:
        """Interpolated seconds, and bounded by operations beyond what was measured.

        A layer without attention is not split over ranks, so it takes as long as on one. What items take that ranks
        share is that of whole ones, and what was measured that attention of their runs takes more or less.
        """
        tp = tp if layer.attention is not None else 1
        waits = self._waits and layer.trainable
        key = (module, layer.kind, layer.weights, layer.attention and layer.attention.reach, tp, waits)
        if key not in self._surfaces:
            self._surfaces[key] = _surfaces(self._times(module, layer, tp), layer, hooks=self._hooks, waits=waits)
        forward, of_input, of_weights = (surface(work.rows, work.pairs) for surface in self._surfaces[key])
        if work.runs is not None and (of_runs := self._of_runs(module, layer)) is not None:
            number, rows, pairs = work.runs
            # Each tensor-parallel rank has a part of the heads.
            more = (surface(number, rows, pairs) / tp for surface in of_runs)
            forward, of_input = (np.maximum(of + each, 0.0) for of, each in zip((forward, of_input), more, strict=True))
        return LayerSeconds(forward, of_input, of_weights)

    def _of_runs(self, module: str, layer: Layer) -> tuple[RunSurface, RunSurface] | None:
        """What runs of a layer's attention take more than their share of whole items; None if it was not measured."""
        key = (module, layer.kind, layer.weights, layer.attention and layer.attention.reach)
        if key not in self._runs:
            of_module = self.profile.module(module)
            times = of_module and of_module.of_layer(layer)
            self._runs[key] = run_surfaces(times.runs.grid) if times and times.runs and times.runs.grid.rows else None
        return self._runs[key]

    def as_measured(self, model: ModelSpec) -> ModelSpec:
        """With the bytes that layers were measured to keep."""
        if not any(model is each for each in self._measured):
            self._measured = [model, with_measured_bytes(model, kept_shares(self.profile, model))]
        return self._measured[-1]

    def entry_seconds(self, module: str) -> float:
        times = self.profile.module(module)
        return 0.0 if times is None else times.entry_s

    def beyond(self, module: str, layer: Layer, work: Work, tp: int = 1) -> Beyond:
        grid = self._times(module, layer, tp if layer.attention is not None else 1).grid
        rows, pairs = np.array(grid.rows), np.array(grid.pairs)
        asked = work.rows > 0
        if not asked.any() or not rows.any():
            return Beyond()
        most_keys = float((pairs[rows > 0] / rows[rows > 0]).max())
        keys = float((work.pairs[asked] / work.rows[asked]).max())
        of = _operations(layer)
        return Beyond(
            float(work.rows.max() / rows.max()),
            keys / most_keys if most_keys else 0.0,
            (of.row + of.pair * keys) / (of.row + of.pair * most_keys),
        )

    def tensor_seconds(self, layer: Layer, work: Work, ranks: Sequence[int]) -> Float64Array:
        """Seconds of two all-reduces of the layer's rows; 0 for a layer without attention, which is not split."""
        if len(ranks) <= 1 or layer.attention is None:
            return np.zeros(len(work.rows))
        size_bytes = work.rows * layer.output_width * DTYPE_BYTES[self.profile.precision]
        return _REDUCES_A_PASS * self._seconds("all_reduce", size_bytes, ranks)

    def send_seconds(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        return self._seconds("send", size_bytes, ranks)

    def call_seconds(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        times = next((times for times in self.profile.messages if times.kind == "call"), None)
        return np.zeros(np.shape(size_bytes)) if times is None else _message_seconds(times, size_bytes, len(ranks))

    def gather_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        return float(self._seconds("gather", np.array([size_bytes]), ranks)[0])

    def reduce_scatter_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        return float(self._seconds("reduce_scatter", np.array([size_bytes]), ranks)[0])

    def all_reduce_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        return float(self._seconds("all_reduce", np.array([size_bytes]), ranks)[0])

    def exchange_seconds(self, moved_bytes: Moved, ranks: Sequence[int]) -> Float64Array:
        """Seconds by the bytes of the busiest rank. Exchanges measured between nodes include both kinds of links."""
        return self._seconds("exchange", moved_bytes.busiest, ranks)

    def step_seconds(self, num_parameters: int, share: float = 1.0) -> float:
        """What a tensor costs whatever its size was measured over all of them: a rank has that for its share."""
        each = replace(self._step, constant_ns=self._step.constant_ns * share)
        return float(each.seconds(num_parameters)) if num_parameters else 0.0

    @cached_property
    def _step(self) -> Curve:
        times = self.profile.optimizer
        if times is None:
            raise UserError("The profile has no times of the optimizer: profile a recipe in which something trains.")
        return fit_curve(times.seconds, times.num_parameters)

    def _times(self, module: str, layer: Layer, tp: int) -> LayerTimes:
        """The measured layer of that kind, those weights and that reach."""
        module_times = self.profile.module(module)
        if module_times is not None and (times := module_times.of_layer(layer, tp)) is not None:
            return times
        advice = ": run `motet profile` on a recipe of this model"
        if tp > 1:
            advice += f", under torchrun with {tp} ranks"
            if why := self.profile.why_unshared(module, tp):
                advice = f", which `motet profile` cannot take ({why}): keep it at 1, or leave out --profile"
        raise UserError(
            f"The profile of {self.profile.recipe} has no times of layer {in_words(layer)} in "
            f"module {module!r} at tensor parallelism {tp}{advice}."
        )

    def _seconds(self, kind: MessageKind, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        if len(ranks) <= 1:
            return np.zeros(len(size_bytes))
        is_local = len({self.cluster.node_of(rank) for rank in ranks}) == 1
        times = next((t for t in self.profile.messages if t.kind == kind and (t.num_nodes == 1) == is_local), None)
        if times is None:
            where = "of one node" if is_local else "of several nodes"
            raise UserError(
                f"The profile of {self.profile.recipe} has no times of {kind.replace('_', '-')} between ranks {where}: "
                f"run `motet profile` under torchrun on ranks {where}."
            )
        return _message_seconds(times, size_bytes, len(ranks))


def _message_seconds(times: MessageTimes, size_bytes: Float64Array, num_ranks: int) -> Float64Array:
    """Seconds among `num_ranks` ranks, by what was measured among others; of any shape."""
    latency_scale, bytes_scale = _ring_scales(times.kind, times.num_ranks, num_ranks)
    sizes = np.asarray(size_bytes, dtype=np.float64) * bytes_scale
    measured_s = Surface(times.size_bytes, [0.0] * len(times.size_bytes), times.seconds)(sizes, np.zeros_like(sizes))
    latency_s = min(float(message_fit(times).seconds(0.0)), *times.seconds)
    return np.where(sizes > 0, np.maximum(measured_s, latency_s) + (latency_scale - 1) * latency_s, 0.0)


def message_fit(*measured: MessageTimes) -> Curve:
    """Latency (constant) and inverse bandwidth (linear, nanoseconds a byte) of all measured messages together."""
    return fit_curve(
        [s for times in measured for s in times.seconds], [b for times in measured for b in times.size_bytes]
    )


def _ring_scales(kind: MessageKind, num_measured: int, num_ranks: int) -> tuple[float, float]:
    """The factors of the latency and of the bytes from `num_measured` ranks to `num_ranks`."""
    if kind in ("send", "call"):
        return 1.0, 1.0
    steps = (num_ranks - 1) / (num_measured - 1)
    # The size of an exchange is what one rank sends; the size of another collective is shared by the ring.
    return steps, 1.0 if kind == "exchange" else steps * num_measured / num_ranks


def run_surfaces(points: RunPoints) -> tuple[RunSurface, RunSurface]:
    """What a pair takes more in runs than in whole items: in forward, and in backward for the input."""
    columns = (points.forward_s, points.whole_forward_s), (points.input_s, points.whole_input_s)
    more_s = ((np.array(runs) - np.array(whole)) / np.array(points.pairs) for runs, whole in columns)
    forward, of_input = (RunSurface(points.length, points.rows, points.keys, each) for each in more_s)
    return forward, of_input


def _operations(layer: Layer) -> PassOperations:
    """Operations of a forward pass. A look-up or a norm has none: it moves its rows, and the time goes with them."""
    return PassOperations(
        max(2 * layer.weights, layer.output_width), 4 * layer.attention.width if layer.attention else 0
    )


def _surfaces(times: LayerTimes, layer: Layer, *, hooks: bool, waits: bool) -> tuple[Surface, Surface, Surface]:
    """Seconds of forward, of backward for the input, and of backward for the weights."""
    points, (forward_s, weight_s) = times.grid, (0.0, 0.0) if hooks else times.hooks_s
    more_s = times.waits_s if waits else (0.0, 0.0, 0.0)
    row, pair = _operations(layer)
    columns = (
        (points.forward_s, forward_s - more_s[0], PassOperations(row, pair)),
        (points.input_s, -more_s[1], PassOperations(row, 2 * pair)),
        (points.weight_s, weight_s - more_s[2], PassOperations(row)),
    )
    forward, of_input, of_weights = (
        Surface(points.rows, points.pairs, [max(one - less_s, 0.0) for one in seconds], operations)
        for seconds, less_s, operations in columns
    )
    return forward, of_input, of_weights
