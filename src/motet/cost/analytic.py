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
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster, Link
from motet.core.errors import ArgumentError
from motet.core.exchange import Moved
from motet.core.plan import ADAM_MOMENTS
from motet.core.spec import Layer, ModelSpec
from motet.cost import communication
from motet.cost.model import Beyond, LayerSeconds, Work

try:
    _native: ModuleType | None = import_module("motet.cost._roofline")
except ModuleNotFoundError:  # Any other ImportError is a broken core, and must not be hidden.
    _native = None

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

    def as_measured(self, model: ModelSpec) -> ModelSpec:
        """As it is: it measures nothing."""
        return model

    def entry_seconds(self, module: str) -> float:
        """0: it prices operations and what they move."""
        return 0.0

    def layer_seconds(self, module: str, layer: Layer, work: Work, tp: int = 1) -> LayerSeconds:
        if layer.weights + layer.activation_width == 0:  # A layer of unused parameters takes no time.
            return LayerSeconds(*np.zeros((3, len(work.rows))))
        rates = self._rates(layer, tp if layer.is_divided else 1)
        if _native is None or not all(map(_is_plain, (work.rows, work.pairs))):
            return reference_seconds(work, rates)
        seconds = np.empty((3, len(work.rows)))
        _native.layer_seconds(work.rows, work.pairs, rates, seconds)
        return LayerSeconds(*seconds)

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
        product_s, _ = product_seconds(work.rows, self._rates(layer, len(ranks)))
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

    def _rates(self, layer: Layer, tp: int) -> LayerRates:
        """What a layer's seconds follow from on each of tp ranks."""
        share, attention_width = self.efficiency, layer.attention.width if layer.attention else 0
        return LayerRates(
            weights=layer.weights,
            width_factor=1 + share.half_width * tp / max(_narrower(layer), 1),
            half_rows=share.half_rows,
            idle=layer.idle_weights * share.half_rows,
            products_per_s=self._peak_flops * share.products,
            input_entries=layer.weights + layer.idle_weights,
            gradient_entries=layer.parameters - layer.frozen_parameters,
            output_width=layer.output_width,
            gradient_share=layer.updated_weights / layer.weights if layer.frozen_weights else 1,
            pair_flops=4 * attention_width,
            half_length=share.half_length,
            attention_per_s=self._peak_flops * share.attention,
            activation_width=layer.activation_width,
            element_bytes=self._element_bytes,
            bytes_per_s=self._bytes_per_s,
            tp=tp,
            launch_s=share.launch_s,
        )

    def _link(self, link: Link) -> Link:
        return Link(link.bytes_per_s * self.efficiency.links, link.latency_s)


class LayerRates(NamedTuple):
    """What the seconds of a layer follow from beside its rows and pairs, in the order of csrc/cost/roofline.h.

    weights:          of its products. idle: those that only fill up tiles, times half_rows.
    width_factor:     1 + half_width * tp / width.
    products_per_s, attention_per_s: operations that are reached. pair_flops: of a pair, in a forward pass.
    input_entries, gradient_entries: parameters or gradients that a pass reads or writes.
    gradient_share:   of a pass's products, those for gradients of weights.
    """

    weights: float
    width_factor: float
    half_rows: float
    idle: float
    products_per_s: float
    input_entries: float
    gradient_entries: float
    output_width: float
    gradient_share: float
    pair_flops: float
    half_length: float
    attention_per_s: float
    activation_width: float
    element_bytes: float
    bytes_per_s: float
    tp: float
    launch_s: float


def reference_seconds(work: Work, rates: LayerRates) -> LayerSeconds:
    """Seconds of a layer that takes some time: the reference of the native core, csrc/cost/."""
    rows = work.rows
    # All passes have as many operations; what they read and write differs.
    product_s, of_weights_s = product_seconds(rows, rates)
    pairs = work.pairs + rates.half_length * rows
    attention_s = rates.pair_flops * pairs / rates.tp / rates.attention_per_s
    moved_s = rows * rates.activation_width * rates.element_bytes / rates.tp / rates.bytes_per_s
    passes = (
        product_s + attention_s + 3 * moved_s,
        product_s + 2.5 * attention_s + 3 * moved_s,
        of_weights_s + 2 * moved_s,
    )
    return LayerSeconds(*(np.where(rows > 0, rates.launch_s + s, 0.0) for s in passes))


def _is_plain(column: Float64Array) -> bool:
    """Whether the native core can read a column as it is."""
    return column.dtype == np.float64 and column.ndim == 1 and column.flags.c_contiguous


def product_seconds(rows: Float64Array, rates: LayerRates) -> tuple[Float64Array, Float64Array]:
    """Seconds of the layer's products in a forward pass, or for its input; and of those for gradients of weights."""
    # Rows go to all experts of a mixture: each of them has partly filled tiles, and is read.
    filled = rates.weights * (rows * rates.width_factor + rates.half_rows) + rates.idle
    computed_s, outputs = 2 * filled / rates.products_per_s, 2 * rows * rates.output_width
    moved_s, added_s = (
        (entries + outputs) * rates.element_bytes / rates.bytes_per_s
        for entries in (rates.input_entries, rates.gradient_entries)
    )
    gradients_s = computed_s * rates.gradient_share
    return np.maximum(computed_s, moved_s) / rates.tp, np.maximum(gradients_s, added_s) / rates.tp


def _narrower(layer: Layer) -> int:
    """The narrower side of the layer's matrices, as if they were one matrix [weights / output_width, output_width]."""
    return min(layer.output_width, layer.weights // layer.output_width) or layer.output_width
