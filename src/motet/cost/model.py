"""The interface of a cost model: seconds of a layer on given work, and of a message.

`Analytic` computes them from published figures, `Profiled` from a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster
from motet.core.exchange import Moved
from motet.core.spec import Layer, ModelSpec


class Runs(NamedTuple):
    """Runs of rows on one rank, of items that it shares with others: what attention computes one by one.

    number: float64 [num_microbatches], how many there are; 0 where it is not known, and the cheapest runs are meant.
    rows, pairs: float64 [num_microbatches], of all of them together, as of `Work`.
    """

    number: Float64Array
    rows: Float64Array
    pairs: Float64Array


@dataclass(frozen=True, eq=False)
class Work:
    """The work of one layer in each of several microbatches.

    rows:  float64 [num_microbatches], rows in the layer, with padding if the module pads.
    pairs: float64 [num_microbatches], pairs of a query and a key that attention computes; 0 without attention.
    runs:  of these, what attention computes of items that ranks share; None: all items are whole.
    """

    rows: Float64Array
    pairs: Float64Array
    runs: Runs | None = None


class LayerSeconds(NamedTuple):
    """Seconds that one rank computes its share of a layer, float64 [num_microbatches] each, whether or not needed.

    input_s:  for the gradient of the input.
    weight_s: for the gradients of the weights, and of biases and norms. Where backward is split, W takes all of it if
              the layer `defers_weights`, although biases and norms, a small part of it, come in I.
    `backward_seconds` leaves out what a frozen layer does not need.
    """

    forward_s: Float64Array
    input_s: Float64Array
    weight_s: Float64Array


def backward_seconds(
    seconds: LayerSeconds, layer: Layer, input_gradient: bool, recomputed: bool = False
) -> Float64Array:
    """Seconds of a layer's backward (Cornstarch section 4.2, which omits recomputation), float64 [num_microbatches].

    input_gradient: backward needs the gradient of the layer's input (`ModelSpec.input_gradients`).
    For a layer of products alone, backward takes 2 (trainable), 1 (frozen, but a gradient passes) or 0 (neither) times
    as long as forward; with recomputation 3, 2 or 0. A trainable layer of several products always needs inner gradients
    (`Layer.input_share`).

    Example:
        >>> import numpy as np
        >>> from motet.core.spec import Layer
        >>> seconds = LayerSeconds(np.array([1.0]), np.array([1.0]), np.array([1.0]))
        >>> frozen = Layer("projector", 4, 4, output_width=2, activation_width=2, trainable=False)
        >>> [float(backward_seconds(seconds, frozen, input_gradient)[0]) for input_gradient in (True, False)]
        [1.0, 0.0]
    """
    total = layer.input_share(input_gradient) * seconds.input_s
    if layer.trainable:
        total = total + seconds.weight_s
    return total + seconds.forward_s if recomputed and (input_gradient or layer.trainable) else total


class Beyond(NamedTuple):
    """How far the work of a layer is beyond what was measured of it; up to 1 is within.

    rows: rows of the largest microbatch over the most that were measured. keys: keys that a row attends to, likewise.
    operations: of a row, over those of a row with the most keys that were measured.
    """

    rows: float = 0.0
    keys: float = 0.0
    operations: float = 0.0

    def or_further(self, other: Beyond) -> Beyond:
        """The larger of each."""
        return Beyond(*map(max, self, other))


class CostModel(Protocol):
    """Seconds of one rank.

    tp:    the number of tensor-parallel ranks that share a layer.
    ranks: the ranks of the cluster that take part in a message.

    Example:
        >>> from motet.cost.catalogue import cluster
        >>> from motet.cost.source import cost_model
        >>> model: CostModel = cost_model(cluster("h100", num_nodes=2), "bf16")
        >>> inside, across = (model.all_reduce_seconds(1e9, ranks) for ranks in (range(8), range(16)))
        >>> f"{1e3 * inside:.1f} ms inside a node, {1e3 * across:.1f} ms across two"
        '4.9 ms inside a node, 6.0 ms across two'
    """

    cluster: Cluster

    def on(self, cluster: Cluster) -> CostModel:
        """The cost model of the same devices in another cluster."""

    def unwrapped(self, *, waits: bool = False) -> CostModel:
        """The cost model of layers around which FSDP has no hooks, as in pipelines and whole copies.

        waits: gradients of weights wait, where backward is split into I and W.
        """

    def layer_seconds(self, module: str, layer: Layer, work: Work, tp: int = 1) -> LayerSeconds:
        """Seconds of a layer's passes on one of `tp` tensor-parallel ranks, without communication."""

    def entry_seconds(self, module: str) -> float:
        """Seconds that a forward pass takes beside its layers where it begins inside a module; 0 if not known.

        Positions, rotations and extents of attention are made anew there, which its first layers' seconds include.
        """

    def as_measured(self, model: ModelSpec) -> ModelSpec:
        """The model with what its layers were measured to keep for backward (`cost.memory.with_measured_bytes`)."""

    def beyond(self, module: str, layer: Layer, work: Work, tp: int = 1) -> Beyond:
        """How far work is beyond what was measured; nothing of a model that measures nothing."""

    def tensor_seconds(self, layer: Layer, work: Work, ranks: Sequence[int]) -> Float64Array:
        """Seconds of a layer's tensor-parallel communication in one pass, float64 [num_microbatches]."""

    def send_seconds(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        """Seconds of a message from one of two ranks to the other."""

    def call_seconds(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        """Of `send_seconds`, what each of the two ranks computes: 0 if the device does not, or it is not known."""

    def gather_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of an all-gather after which every rank has `size_bytes`."""

    def reduce_scatter_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a reduce-scatter of `size_bytes` on every rank."""

    def all_reduce_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of an all-reduce of `size_bytes` on every rank."""

    def exchange_seconds(self, moved_bytes: Moved, ranks: Sequence[int]) -> Float64Array:
        """Seconds of an all-to-all among `ranks`. moved_bytes: [..., 2, len(ranks)]; the result is float64 [...]."""

    def step_seconds(self, num_parameters: int, share: float = 1.0) -> float:
        """Seconds of the optimizer's update of the parameters that one rank holds.

        share: of the model's trainable tensors, those of which the rank updates anything.
        """
