"""A transformer layer from its shape, and a layer that reads items from keys of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from motet.core.errors import ArgumentError
from motet.core.spec import Attention, Layer
from motet.core.words import counted_words

Norm = Literal["layer", "rms", "rms_float32"]
Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"]

BIASES = ("query", "key", "value", "output", "mlp")
"""The products of a transformer layer that may have a bias."""

_ACTIVATION_KEEPS = {"relu": 0, "quick_gelu": 2, "gelu_new": 4}
"""Rows that an activation keeps beside its output, if not one (its input): x * sigmoid(1.702 x) keeps both factors, and
transformers' formula of GPT-2's keeps a tanh besides."""


@dataclass(frozen=True)
class Transformer:
    """The shape of a transformer layer. Raises ArgumentError for heads that do not divide, and for an unknown bias.

    hidden:         width of a row.
    mlp:            width of the MLP's inner row.
    num_kv_heads:   0 is num_heads.
    head_dim:       0 is hidden / num_heads.
    gated:          the MLP is down(activation(gate(x)) * up(x)): three matrices.
    biases:         the products that have a bias, of BIASES.
    qk_norm:        queries and keys of each head are normalised, with `norm`.
    qk_norm_rows:   queries and keys are normalised as whole rows of all heads instead (OLMo2).
    num_norms:      norms of whole rows in the layer: 2 before or after attention and MLP, 4 for both (Gemma3).
    layer_scale:    both residual branches are multiplied by a trainable vector.
    causal, window: as in core.spec.Attention.
    num_experts, experts_per_token: a mixture of MLPs, each of mlp, and how many of them compute a row; 0 is one MLP.

    Example:
        >>> layer = Transformer(hidden=1024, mlp=4096, num_heads=16).layer()
        >>> layer.weights == 12 * 1024**2, layer.parameters - layer.weights == 13 * 1024
        (True, True)
    """

    hidden: int
    mlp: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    activation: str = "gelu"
    norm: Norm = "layer"
    biases: Sequence[str] = BIASES
    qk_norm: bool = False
    layer_scale: bool = False
    causal: bool = False
    window: int = 0
    qk_norm_rows: bool = False
    num_norms: int = 2
    num_experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        if not self.head_dim and self.hidden % self.num_heads:
            raise ArgumentError(f"{self.num_heads} heads do not divide a row of {self.hidden}; give head_dim.")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ArgumentError(
                f"{counted_words(self.num_heads, 'head')} cannot share {counted_words(self.num_kv_heads, 'head')} of "
                "keys and values."
            )
        if unknown := set(self.biases) - set(BIASES):
            raise ArgumentError(f"No product is named {min(unknown)!r}; biases may be {', '.join(BIASES)}.")
        if bool(self.num_experts) != bool(self.experts_per_token) or self.experts_per_token > self.num_experts:
            raise ArgumentError(
                f"{self.experts_per_token} of {self.num_experts} experts cannot compute a row; give both numbers, the "
                "first at most the second, or neither."
            )

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.head_dim or self.hidden // self.num_heads

    @property
    def width(self) -> int:
        """The width of a row's queries."""
        return self.num_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """The width of a row's keys, and that of its values."""
        return (self.num_kv_heads or self.num_heads) * self.head_width

    @property
    def weights(self) -> int:
        """The number of entries of the matrices that multiply each row: of a mixture, those of its experts, and the
        router."""
        attention = self.hidden * 2 * (self.width + self.kv_width)
        return attention + (self.experts_per_token or 1) * self._expert + self.hidden * self.num_experts

    @property
    def _expert(self) -> int:
        """The number of entries of the matrices of one MLP."""
        return (3 if self.gated else 2) * self.hidden * self.mlp

    @property
    def idle_weights(self) -> int:
        """The number of entries of the matrices of experts that do not compute a row."""
        return (self.num_experts - self.experts_per_token) * self._expert

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        lengths = {
            "query": self.width,
            "key": self.kv_width,
            "value": self.kv_width,
            "output": self.hidden,
            "mlp": (self.num_experts or 1) * ((2 if self.gated else 1) * self.mlp + self.hidden),
        }
        biases = sum(length for name, length in lengths.items() if name in self.biases)
        norms = self.num_norms * norm_parameters(self.norm, self.hidden)
        heads = 2 * norm_parameters(self.norm, self.head_width) if self.qk_norm else 0
        rows = norm_parameters(self.norm, self.width + self.kv_width) if self.qk_norm_rows else 0
        return (
            self.weights
            + self.idle_weights
            + biases
            + norms
            + heads
            + rows
            + (2 * self.hidden if self.layer_scale else 0)
        )

    @property
    def activation_width(self) -> int:
        """Elements of a row that stay until backward (see above)."""
        norms = self.num_norms * norm_keeps(self.norm, self.hidden) + 2 * self.hidden
        return norms + self.divided_width + (2 * self.hidden if self.layer_scale else 0)

    @property
    def divided_width(self) -> int:
        """Those of heads and of the MLP's inner row."""
        attention = 2 * (self.width + self.kv_width + self.num_heads)
        mlp = (_ACTIVATION_KEEPS.get(self.activation, 1) + (3 if self.gated else 1)) * self.mlp
        if self.num_experts:
            # Each expert keeps its own input and output of a row, and the router its scores in float32.
            mlp = self.experts_per_token * (mlp + 2 * self.hidden) + 2 * self.num_experts
        heads = 0
        if self.qk_norm:
            heads = (self.width + self.kv_width) // self.head_width * norm_keeps(self.norm, self.head_width)
        if self.qk_norm_rows:
            heads = norm_keeps(self.norm, self.width) + norm_keeps(self.norm, self.kv_width)
        return attention + mlp + heads

    @property
    def weight_width(self) -> int:
        """Of `activation_width`, what is kept for gradients of weights alone."""
        norms = self.num_norms * norm_keeps_for_weight(self.norm, self.hidden) + 2 * self.hidden
        return norms + self.divided_weight_width + (2 * self.hidden if self.layer_scale else 0)

    @property
    def divided_weight_width(self) -> int:
        """Of `divided_width`, what is kept for gradients of weights alone."""
        # relu needs its output itself.
        mlp = 0 if self.activation == "relu" and not self.gated else self.mlp
        if self.num_experts:
            mlp = self.experts_per_token * (mlp + self.hidden)
        heads = self.width + self.kv_width if self.qk_norm or self.qk_norm_rows else 0
        return mlp + norm_keeps_for_weight(self.norm, heads)

    def layer(self, divisor: int = 1, extra_rows: int = 0, trainable: bool = True) -> Layer:
        """One layer of this shape."""
        return Layer(
            "attention",
            weights=self.weights,
            parameters=self.parameters,
            output_width=self.hidden,
            activation_width=self.activation_width,
            attention=Attention(
                self.width,
                self.kv_width,
                self.causal,
                self.window,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads or self.num_heads,
            ),
            divisor=divisor,
            extra_rows=extra_rows,
            trainable=trainable,
            idle_weights=self.idle_weights,
            divided_width=self.divided_width,
            weight_width=self.weight_width,
            divided_weight_width=self.divided_weight_width,
            num_experts=self.num_experts,
            expert_weights=self._expert if self.num_experts else 0,
        )


def crossing_layers(shape: Transformer, num_keys: int, *, trainable: bool = True) -> list[Layer]:
    """A layer whose rows attend to `num_keys` keys of each image of their sequence, behind two gates (Llama 3.2
    Vision); and the products that make keys and values of as many rows. They are one block.
    """
    layer, weights = shape.layer(trainable=trainable), 2 * shape.hidden * shape.kv_width
    heads = shape.kv_width // shape.head_width * norm_keeps(shape.norm, shape.head_width) if shape.qk_norm else 0
    kept = 2 * shape.kv_width + heads
    for_weight = norm_keeps_for_weight(shape.norm, shape.kv_width) if shape.qk_norm else 0
    assert layer.attention is not None
    rows = replace(
        layer,
        weights=layer.weights - weights,
        parameters=layer.parameters + 2,
        # What each gate multiplies.
        activation_width=layer.activation_width - kept + 2 * shape.hidden,
        divided_width=layer.divided_width - kept,
        weight_width=layer.weight_width - for_weight,
        divided_weight_width=layer.divided_weight_width - for_weight,
        attention=replace(layer.attention, causal=False, keys=num_keys),
        of_media=True,
    )
    keys = Layer("keys", weights, 0, shape.hidden, kept, item_rows=num_keys, trainable=trainable, continues=True)
    keys = replace(keys, of_media=True, divided_width=kept)
    return [rows, replace(keys, weight_width=for_weight, divided_weight_width=for_weight)]


def norm_parameters(norm: Norm, width: int) -> int:
    return 2 * width if norm == "layer" else width


def norm_keeps(norm: Norm, width: int) -> int:
    """Elements of a row that a norm keeps beside its output."""
    return {"layer": 1, "rms": 3, "rms_float32": 4}[norm] * width + 2


def norm_keeps_for_weight(norm: Norm, width: int) -> int:
    """Of these, what the gradient of its weight needs alone."""
    return {"layer": 0, "rms": 1, "rms_float32": 2}[norm] * width
