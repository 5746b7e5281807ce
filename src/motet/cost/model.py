"""What a cost model answers: seconds for a layer on given work, and for a message. Analytic or fitted to a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster
from motet.core.exchange import Moved
from motet.core.spec import Layer


@dataclass(frozen=True, eq=False)
class Work:
    """What one layer is given in each of several microbatches.

    rows:  float64 [num_microbatches], rows in it, padding included where the module pads.
    pairs: float64 [num_microbatches], pairs of a query and a key that attention computes; 0 without attention.
    """

    rows: Float64Array
    pairs: Float64Array


class LayerSeconds(NamedTuple):
    """Compute of one rank for its share of a layer, float64 [num_microbatches] each.

    forward_s; input_s, the gradient of the input; weight_s, the gradients of the weights. All as if they were needed:
    what is frozen is left out by who adds up layers.
    """

    forward_s: Float64Array
    input_s: Float64Array
    weight_s: Float64Array


def backward_seconds(
    seconds: LayerSeconds, layer: Layer, input_gradient: bool, recomputed: bool = False
) -> Float64Array:
    """Backward of a layer by what is trainable, and where (Cornstarch section 4.2, and recomputation, which it omits).

    input_gradient: something before the layer learns (`ModelSpec.input_gradients`). Where products are all there is,
    backward takes 2 (trained), 1 (frozen, but a gradient must pass) or 0 (neither) times as long as forward, and with
    recomputation 3, 2 or 0. A layer with attention that learns needs gradients inside, whatever is before it.
    """
    total = np.zeros_like(seconds.forward_s)
    if input_gradient or (layer.trainable and layer.attention is not None):
        total = total + seconds.input_s
    if layer.trainable:
        total = total + seconds.weight_s
    return total + seconds.forward_s if recomputed and (input_gradient or layer.trainable) else total


class CostModel(Protocol):
    """Times of one rank. tp: tensor-parallel ranks that share a layer; ranks: those of the cluster that take part."""

    cluster: Cluster

    def on(self, cluster: Cluster) -> CostModel:
        """Of the same devices in another cluster."""

    def layer_seconds(self, module: str, layer: Layer, work: Work, tp: int = 1) -> LayerSeconds: ...

    def tensor_seconds(self, layer: Layer, work: Work, ranks: Sequence[int]) -> Float64Array:
        """Tensor-parallel communication of one pass (forward, or backward) of a layer, float64 [num_microbatches]."""

    def send_seconds(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        """A message from one of two ranks to the other."""

    def gather_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """All-gather after which every rank has `size_bytes`."""

    def reduce_scatter_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """Of `size_bytes` of every rank."""

    def all_reduce_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float: ...

    def exchange_seconds(self, moved_bytes: Moved, ranks: Sequence[int]) -> Float64Array:
        """All-to-all among `ranks`, of what each of them moves: float64, a number for each of its leading axes."""

    def step_seconds(self, num_parameters: int) -> float:
        """The optimizer's update of the parameters that one rank holds."""
