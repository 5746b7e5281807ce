"""Seconds from layers' shapes and a device's published figures alone: a roofline whose efficiency depends on size.

- Matrix products take max(operations / (peak * efficiency), bytes / bandwidth), where
  efficiency = products / (1 + half_rows / rows + half_width * tp / width).
  Products are computed in tiles, and a partly filled tile costs as much as a full one: r rows cost like r + half_rows.
  width is the narrower side of the matrix; tensor parallelism divides it. The time is a constant plus a linear function
  of rows, as in profiles.
- Attention takes operations / (peak * attention), counted by pairs of a query and a key; short items reach less.
  Backward computes five products for forward's two (FlashAttention-2, section 4.1).
- Everything else (norms, activations, residuals, rotations) is bound by memory bandwidth. Forward writes each element
  that is kept for backward once and reads it twice. Backward reads it once more, and writes and reads its gradient.
  The gradients of weights, biases and norms read both again.
- Backward for the input costs the products of a forward pass, and so does backward for the weights. So backward takes
  2, 1 or 0 times forward, by what is trainable, and once more where activations are recomputed (Cornstarch section 4.2,
  whose formula leaves recomputation out).
- Tensor parallelism divides all of the above, but for products that each rank computes whole (`Layer.is_divided`). It
  communicates as Megatron with sequence parallelism: two all-gathers and two reduce-scatters a transformer layer and
  pass (Optimus section 2.2), one of each for a single product that is divided.
- The optimizer is bound by memory bandwidth: it reads a gradient, and reads and writes a weight and what it keeps of
  it, such as AdamW's two moments.

Shares of the peak are measured. Large bf16 products: 271 TFLOP/s on A100, 795 on H100, 1,745 on B200 and 782 on MI300X
("Maximum Achievable Matmul FLOPS", S. Bekman, Machine Learning Engineering, 2025). Attention: 50 to 73 % on A100
(FlashAttention-2, section 4.1), 35 to 75 % on H100 (FlashAttention-3, section 4.1). Links: 360 of 450 GB/s on Hopper
(as NCCL assumes). Devices without published figures get the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster, Link
from motet.core.errors import ArgumentError
from motet.core.exchange import Moved
from motet.core.plan import ADAM_MOMENTS
from motet.core.spec import Layer
from motet.cost import communication
from motet.cost.model import Beyond, LayerSeconds, Work

ELEMENT_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of an activation's element by the precision of products. Products in fp8 read and write bf16."""


@dataclass(frozen=True)
class Efficiency:
    """The share of a device's published figures that training reaches.

    products:    share of peak FLOP/s that large products reach.
    half_rows:   number of rows at which a product reaches half of `products`.
    half_width:  narrower side of the matrix at which a product reaches half of `products`.
    attention:   share of peak FLOP/s that fused attention reaches on long items.
    half_length: mean number of keys a query attends to at which attention reaches half of `attention`.
    memory:      share of memory bandwidth.
    links:       share of the bandwidth of links.
    launch_s:    seconds between the kernels of one pass of a layer: some 15 kernels, 2 us each.
    """

    products: float = 0.8
    half_rows: float = 128
    half_width: float = 128
    attention: float = 0.5
    half_length: float = 256
    memory: float = 0.85
    links: float = 0.8
    launch_s: float = 30e-6


EFFICIENCY: Mapping[str, Efficiency] = {
    "a100-80g": Efficiency(products=0.87, attention=0.6),
    "a800": Efficiency(products=0.87, attention=0.6),
    "b200": Efficiency(products=0.776),
    "gb200": Efficiency(products=0.776),
    "mi300x": Efficiency(products=0.6),
    # Peak and bandwidths of a CPU are measured as reached. The other figures are of PyTorch running a layer of Qwen2,
    # width 256 to 1536 and 16 to 1024 rows, in float32 on one core. Dispatch takes longer than on a GPU, whose host
    # runs ahead.
    "cpu": Efficiency(0.85, 16, 16, attention=0.5, half_length=16, memory=1, links=1, launch_s=300e-6),
}
"""Efficiencies that differ from the default, by device."""


class Analytic:
    """A `CostModel` without measurements. efficiency: by default the device's in EFFICIENCY.

    Raises ArgumentError for a precision in which the device has no peak.

    Example:
        >>> from motet.cost.catalogue import cluster
        >>> from motet.cost.model import Work
        >>> layer = Layer("projector", weights=4096**2, parameters=4096**2, output_width=4096, activation_width=4096)
        >>> model, work = Analytic(cluster("h100")), Work(np.array([8192.0]), np.array([0.0]))
        >>> f"{1e6 * model.layer_seconds('image', layer, work).forward_s[0]:.0f} us"
        '464 us'
    """

    def __init__(
        self,
        cluster: Cluster,
        precision: str = "bf16",
        efficiency: Efficiency | None = None,
        moments: int = ADAM_MOMENTS,
    ) -> None:
        device = cluster.device
        if precision not in device.peak_flops:
            raise ArgumentError(
                f"device {device.name!r} has no peak in {precision!r}; it has one in {', '.join(device.peak_flops)}."
            )
        if precision not in ELEMENT_BYTES:
            raise ArgumentError(f"precision {precision!r} is not known; known are {', '.join(ELEMENT_BYTES)}.")
        self.cluster = cluster
        self.precision = precision
        self.moments = moments
        self.efficiency = efficiency or EFFICIENCY.get(device.name, Efficiency())
        self._peak_flops = device.peak_flops[precision]
        self._bytes_per_s = device.memory_bytes_per_s * self.efficiency.memory
        self._element_bytes = ELEMENT_BYTES[precision]
        self._reached = replace(
            cluster, intra_node=self._link(cluster.intra_node), inter_node=self._link(cluster.inter_node)
        )

    def on(self, cluster: Cluster) -> Analytic:
        """The model of the same devices, precision and efficiency in another cluster."""
        return Analytic(cluster, self.precision, self.efficiency, self.moments)

    def beyond(self, module: str, layer: Layer, work: Work, tp: int = 1) -> Beyond:
        """Nothing: it measures nothing."""
        return Beyond()

    def unwrapped(self, *, waits: bool = False) -> Analytic:
        """This model: it prices no hooks."""
        return self

    def entry_seconds(self, module: str) -> float:
        """0: it prices operations and what they move."""
        return 0.0

    def layer_seconds(self, module: str, layer: Layer, work: Work, tp: int = 1) -> LayerSeconds:
        tp = tp if layer.is_divided else 1
        # All passes have as many operations; what they read and write differs.
        computed_s = self._computed_s(layer, work.rows, tp)
        product_s = self._product_s(layer, work.rows, tp, layer.weights + layer.idle_weights, computed_s)
        gradients_s = computed_s * (layer.updated_weights / layer.weights if layer.frozen_weights else 1)
        attention_s = self._attention_s(layer, work, tp)
        moved_s = work.rows * layer.activation_width * self._element_bytes / tp / self._bytes_per_s
        passes = LayerSeconds(
            product_s + attention_s + 3 * moved_s,
            product_s + 2.5 * attention_s + 3 * moved_s,
            self._product_s(layer, work.rows, tp, layer.parameters - layer.frozen_parameters, gradients_s)
            + 2 * moved_s,
        )
        # A layer of unused parameters takes no time.
        runs = (work.rows > 0) & (layer.weights + layer.activation_width > 0)
        each_s = [self.efficiency.launch_s + s for s in passes]
        return LayerSeconds(*(each_s if runs.all() else (np.where(runs, s, 0.0) for s in each_s)))

    def tensor_seconds(self, layer: Layer, work: Work, ranks: Sequence[int]) -> Float64Array:
        if not layer.is_divided:
            return np.zeros_like(work.rows)
        width = layer.output_width if layer.attention else _narrower(layer)
        pairs = 2 if layer.attention else 1
        # A reduce-scatter takes as long as an all-gather. Embedding and output layer are not in pieces.
        pieces, size_bytes = (
            self.cluster.tensor_pieces if layer.attention else 1,
            work.rows * width * self._element_bytes,
        )
        piece_s = 2 * pairs * communication.gather_s(self._reached, size_bytes / pieces, ranks)
        if pieces == 1:
            return piece_s
        # The first piece of each product is waited for; the others are hidden behind products, as far as these last.
        # Backward has twice the products of forward, whose messages are as many.
        computed_s = self._computed_s(layer, work.rows, len(ranks))
        product_s = self._product_s(layer, work.rows, len(ranks), layer.weights + layer.idle_weights, computed_s)
        longer_s: Float64Array = np.maximum(piece_s - product_s / pieces, 0.0)
        return piece_s + (pieces - 1) * longer_s

    def send_seconds(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        return communication.send_s(self._reached, size_bytes, ranks)

    def call_seconds(self, size_bytes: Float64Array, ranks: Sequence[int]) -> Float64Array:
        """0: no published figure says it."""
        return np.zeros(np.shape(size_bytes))

    def gather_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        return float(communication.gather_s(self._reached, size_bytes, ranks))

    def reduce_scatter_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """As many as an all-gather of the same size takes."""
        return self.gather_seconds(size_bytes, ranks)

    def all_reduce_seconds(self, size_bytes: float, ranks: Sequence[int]) -> float:
        return float(communication.all_reduce_s(self._reached, size_bytes, ranks))

    def exchange_seconds(self, moved_bytes: Moved, ranks: Sequence[int]) -> Float64Array:
        return communication.all_to_all_s(self._reached, moved_bytes, ranks)

    def step_seconds(self, num_parameters: int, share: float = 1.0) -> float:
        state_bytes = 8 if self.precision == "fp64" else 4
        return (3 + 2 * self.moments) * state_bytes * num_parameters / self._bytes_per_s

    def _product_s(
        self, layer: Layer, rows: Float64Array, tp: int, num_entries: int, computed_s: Float64Array
    ) -> Float64Array:
        """Seconds of the layer's products in one pass. num_entries: parameters or gradients, read or written.

        computed_s: `_computed_s` of the layer.
        """
        moved_s = (num_entries + 2 * rows * layer.output_width) * self._element_bytes / self._bytes_per_s
        return np.maximum(computed_s, moved_s) / tp

    def _computed_s(self, layer: Layer, rows: Float64Array, tp: int) -> Float64Array:
        """Seconds of the operations of one pass, over all tp ranks."""
        share = self.efficiency
        width_factor = 1 + share.half_width * tp / max(_narrower(layer), 1)
        # Rows go to all experts of a mixture: each of them has partly filled tiles, and is read.
        filled = layer.weights * (rows * width_factor + share.half_rows) + layer.idle_weights * share.half_rows
        return 2 * filled / (self._peak_flops * share.products)

    def _attention_s(self, layer: Layer, work: Work, tp: int) -> Float64Array:
        if layer.attention is None:
            return np.zeros_like(work.rows)
        pairs = work.pairs + self.efficiency.half_length * work.rows
        return 4 * layer.attention.width * pairs / tp / (self._peak_flops * self.efficiency.attention)

    def _link(self, link: Link) -> Link:
        return Link(link.bytes_per_s * self.efficiency.links, link.latency_s)


def _narrower(layer: Layer) -> int:
    """The narrower side of the layer's matrices, as if they were one matrix [weights / output_width, output_width]."""
    return min(layer.output_width, layer.weights // layer.output_width) or layer.output_width
