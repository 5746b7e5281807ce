"""Layers and whole modules from their shapes: their parameters, products, output rows and activations for backward.

Every kind of layer is defined here, once. `models/` describes real models by the same functions, and tests compare
their parameters, operations and saved tensors with torch's.

`activation_width` counts the elements of a row that stay until backward, each once (Korthikanti et al. 2022, section
4.1). Attention keeps its log-sum-exp instead of the scores. A transformer layer keeps

    of each norm:   its input, its output (which the next product needs) and its statistics. transformers computes a
                    root mean square norm in float32, so its input counts twice. If the weight is multiplied in float32
                    ("rms_float32": Gemma, OLMo2), the normalised row counts twice too;
    of attention:   query, key, value, output, and the log-sum-exp of each head in float32;
    of the MLP:     its inner row before and after the activation; if gated, the gate before and after the activation,
                    the other factor, and their product.

For gradients of weights alone, so not in a frozen layer through which gradients pass, it keeps what its matrices
multiply (but attention's output, which attention needs) and, of root mean square norms, the normalised row.
The next layer keeps a layer's output, if it needs it. Dropout is off. Elements have a 16-bit dtype, so float32 elements
count twice; a run in float32 keeps up to 8 % fewer elements than counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from motet.core.errors import ArgumentError
from motet.core.spec import Attention, Layer, ModelSpec, Module
from motet.core.words import counted_words
from motet.core.workload import BACKBONE

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
        norms = self.num_norms * _norm_parameters(self.norm, self.hidden)
        heads = 2 * _norm_parameters(self.norm, self.head_width) if self.qk_norm else 0
        rows = _norm_parameters(self.norm, self.width + self.kv_width) if self.qk_norm_rows else 0
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
        norms = self.num_norms * _norm_keeps(self.norm, self.hidden) + 2 * self.hidden
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
            heads = (self.width + self.kv_width) // self.head_width * _norm_keeps(self.norm, self.head_width)
        if self.qk_norm_rows:
            heads = _norm_keeps(self.norm, self.width) + _norm_keeps(self.norm, self.kv_width)
        return attention + mlp + heads

    @property
    def weight_width(self) -> int:
        """Of `activation_width`, what is kept for gradients of weights alone."""
        norms = self.num_norms * _norm_keeps_for_weight(self.norm, self.hidden) + 2 * self.hidden
        return norms + self.divided_weight_width + (2 * self.hidden if self.layer_scale else 0)

    @property
    def divided_weight_width(self) -> int:
        """Of `divided_width`, what is kept for gradients of weights alone."""
        # relu needs its output itself.
        mlp = 0 if self.activation == "relu" and not self.gated else self.mlp
        if self.num_experts:
            mlp = self.experts_per_token * (mlp + self.hidden)
        heads = self.width + self.kv_width if self.qk_norm or self.qk_norm_rows else 0
        return mlp + _norm_keeps_for_weight(self.norm, heads)

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
    heads = shape.kv_width // shape.head_width * _norm_keeps(shape.norm, shape.head_width) if shape.qk_norm else 0
    kept = 2 * shape.kv_width + heads
    for_weight = _norm_keeps_for_weight(shape.norm, shape.kv_width) if shape.qk_norm else 0
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


def _norm_parameters(norm: Norm, width: int) -> int:
    return 2 * width if norm == "layer" else width


def _norm_keeps(norm: Norm, width: int) -> int:
    """Elements of a row that a norm keeps beside its output."""
    return {"layer": 1, "rms": 3, "rms_float32": 4}[norm] * width + 2


def _norm_keeps_for_weight(norm: Norm, width: int) -> int:
    """Of these, what the gradient of its weight needs alone."""
    return {"layer": 0, "rms": 1, "rms_float32": 2}[norm] * width


def patches(
    row_dim: int,
    hidden: int,
    *,
    bias: bool = True,
    num_positions: int = 0,
    extra_parameters: int = 0,
    norm: bool = False,
    trainable: bool = True,
) -> Layer:
    """The layer that maps patches [row_dim] to rows [hidden], with its position table.

    extra_parameters: other parameters before the transformer layers, such as a class row.
    norm:             a norm follows (CLIP).
    """
    weights = row_dim * hidden
    tables = num_positions * hidden + extra_parameters + (2 * hidden if norm else 0)
    return Layer(
        "patches",
        weights=weights,
        parameters=weights + (hidden if bias else 0) + tables,
        output_width=hidden,
        activation_width=row_dim + (_norm_keeps("layer", hidden) if norm else 0),
        trainable=trainable,
    )


def convolution(
    input_dim: int,
    hidden: int,
    *,
    kernel: int = 3,
    stride: int = 1,
    divisor: int = 1,
    num_positions: int = 0,
    trainable: bool = True,
) -> Layer:
    """A convolution over the rows of an item, with bias and GELU, followed by a position table if there is one.

    divisor: rows of the item that one row of the output stands for.
    """
    weights = input_dim * kernel * hidden
    return Layer(
        "convolution" if stride == 1 else "strided_convolution",
        weights=weights,
        parameters=weights + hidden + num_positions * hidden,
        output_width=hidden,
        activation_width=input_dim * stride + hidden,
        divisor=divisor,
        trainable=trainable,
    )


def merge(input_dim: int, output_dim: int, size: int, *, divisor: int = 1, trainable: bool = True) -> Layer:
    """A norm of each row, then `size` rows joined to one, then an MLP of two matrices with biases (Qwen2-VL).

    divisor: rows of the item that one row of the output stands for.
    """
    joined = size * input_dim
    weights = joined * (joined + output_dim)
    return Layer(
        "merge",
        weights=weights,
        parameters=weights + joined + output_dim + 2 * input_dim,
        output_width=output_dim,
        activation_width=size * _norm_keeps("layer", input_dim) + 3 * joined,
        divisor=divisor,
        trainable=trainable,
        inner_weights=weights,
        weight_width=2 * joined,
    )


def final_norm(
    hidden: int, norm: Norm = "layer", *, divisor: int = 1, extra_rows: int = 0, trainable: bool = True
) -> Layer:
    """The norm after the last layer. divisor: larger than the layers' divisor if rows are averaged before the norm."""
    return Layer(
        "norm",
        weights=0,
        parameters=_norm_parameters(norm, hidden),
        output_width=hidden,
        activation_width=_norm_keeps(norm, hidden),
        weight_width=_norm_keeps_for_weight(norm, hidden),
        divisor=divisor,
        extra_rows=extra_rows,
        trainable=trainable,
    )


def projector(
    input_dim: int,
    output_dim: int,
    kind: Literal["linear", "mlp"] = "mlp",
    downsample: int = 1,
    *,
    divisor: int = 1,
    trainable: bool = True,
) -> Layer:
    """`downsample` rows joined to one, then a matrix with a bias, or two with GELU between them.

    divisor: rows of the item that one row of the encoder's output stands for.
    """
    joined = input_dim * downsample
    weights = joined * output_dim + (output_dim**2 if kind == "mlp" else 0)
    return Layer(
        "projector",
        weights=weights,
        parameters=weights + (2 if kind == "mlp" else 1) * output_dim,
        output_width=output_dim,
        activation_width=joined + (2 * output_dim if kind == "mlp" else 0),
        divisor=divisor * downsample,
        trainable=trainable,
        divided_width=2 * output_dim if kind == "mlp" else 0,
        weight_width=joined + (output_dim if kind == "mlp" else 0),
        divided_weight_width=output_dim if kind == "mlp" else 0,
        inner_weights=weights - joined * output_dim,
        of_outputs=True,
    )


def resampler(
    input_dim: int,
    hidden: int,
    queries: int,
    *,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    divisor: int = 1,
    trainable: bool = True,
) -> list[Layer]:
    """A Perceiver resampler (Idefics2's): a matrix to rows [hidden], then layers in which queries attend to rows and
    queries, with a gated MLP of 4 * hidden; then a norm. It is one block.

    divisor: rows of the item that one row of the encoder's output stands for.
    """
    width, kv_width, norm = num_heads * head_dim, num_kv_heads * head_dim, _norm_keeps("rms", hidden)
    mapped = Layer(
        "projector",
        weights=input_dim * hidden,
        parameters=(input_dim + 1) * hidden,
        output_width=hidden,
        activation_width=input_dim,
        divisor=divisor,
        trainable=trainable,
    )
    start = _of_queries("latents", 0, queries * hidden, hidden, 0, queries, trainable)
    # A norm keeps its own copy in float32, and the product's input; keys and values of queries stand among the rows.
    keys = Layer(
        "keys",
        weights=2 * hidden * kv_width,
        parameters=2 * hidden * kv_width + hidden,
        output_width=hidden,
        activation_width=norm + hidden + 2 * kv_width,
        attention=Attention(width, kv_width, queries=queries),
        divisor=divisor,
        extra_rows=queries,
        trainable=trainable,
        of_outputs=True,
    )
    weights = 2 * hidden * width + 12 * hidden**2
    kept = 2 * norm + 2 * hidden + 2 * (width + num_heads) + 16 * hidden
    rest = _of_queries("queries", weights, weights + 2 * hidden, hidden, kept, queries, trainable)
    layers = [layer for _ in range(num_layers) for layer in (keys, replace(rest, continues=True))]
    last = _of_queries("norm", 0, hidden, hidden, norm, queries, trainable)
    return [mapped, *_one_block(layers, start), last]


def qformer(
    input_dim: int,
    output_dim: int,
    queries: int,
    *,
    hidden: int,
    mlp: int,
    num_layers: int,
    num_heads: int,
    frequency: int = 2,
    divisor: int = 1,
    trainable: bool = True,
) -> list[Layer]:
    """BLIP-2's Q-Former: layers in which queries attend to queries and, in every `frequency`-th, to rows [input_dim];
    then a matrix to [output_dim]. The layers are one block.

    divisor: rows of the item that one row of the encoder's output stands for.
    """
    norm = _norm_keeps("layer", hidden) + hidden
    of_attention = hidden + 2 * num_heads + norm
    layers: list[Layer] = []
    for number in range(num_layers):
        crosses = number % frequency == 0
        weights = (6 if crosses else 4) * hidden**2 + 2 * hidden * mlp
        biases = (6 if crosses else 4) * hidden + mlp + hidden
        norms = (3 if crosses else 2) * 2 * hidden
        kept = 3 * hidden + of_attention + (hidden + of_attention if crosses else 0) + 2 * mlp + norm
        rest = _of_queries("queries", weights, weights + biases + norms, hidden, kept, queries, trainable)
        layers.append(replace(rest, attention=Attention(hidden, hidden)))
        if crosses:
            layers.append(
                Layer(
                    "keys",
                    weights=2 * input_dim * hidden,
                    parameters=2 * (input_dim + 1) * hidden,
                    output_width=hidden,
                    activation_width=2 * hidden + (input_dim if number == 0 else 0),
                    attention=Attention(hidden, hidden, queries=queries),
                    divisor=divisor,
                    trainable=trainable,
                    inner_weights=0,
                    of_outputs=True,
                )
            )
    start = _of_queries("latents", 0, (queries + 2) * hidden, hidden, norm, queries, trainable)
    out = (hidden + 1) * output_dim
    last = _of_queries("projector", hidden * output_dim, out, output_dim, 0, queries, trainable)
    return [*_one_block(layers, start), last]


def _of_queries(
    kind: str, weights: int, parameters: int, output_width: int, kept: int, queries: int, trainable: bool
) -> Layer:
    """A layer on the queries of each item."""
    return Layer(kind, weights, parameters, output_width, kept, item_rows=queries, trainable=trainable, of_outputs=True)


def _one_block(layers: Sequence[Layer], start: Layer) -> list[Layer]:
    """The layers and what makes the first queries, as one block. A pipeline cut before it sends rows."""
    first, *rest = layers
    return [first, *(replace(layer, continues=True) for layer in (start, *rest))]


def embedding(vocab_size: int, hidden: int, num_positions: int = 0, *, trainable: bool = True) -> Layer:
    """The look-up of a row for each token, and for each position if these are learned. Backward needs the token."""
    parameters = (vocab_size + num_positions) * hidden
    return Layer("embedding", 0, parameters, output_width=hidden, activation_width=1, trainable=trainable)


def head(vocab_size: int, hidden: int, *, tied: bool = False, trainable: bool = True) -> Layer:
    """The output layer. tied: its matrix is the embedding's, which counts it. The loss keeps the logits."""
    weights = vocab_size * hidden
    return Layer(
        "head",
        weights=weights,
        parameters=0 if tied else weights,
        output_width=vocab_size,
        activation_width=hidden,
        weight_width=hidden,
        trainable=trainable,
        targets_only=True,
    )


def unused(parameters: int, output_width: int) -> Layer:
    """Parameters that are stored, but neither used nor trainable."""
    return Layer("unused", 0, parameters, output_width, activation_width=0, trainable=False)


def vit(
    name: str,
    shape: Transformer,
    num_layers: int,
    *,
    row_dim: int = 3 * 14 * 14,
    num_positions: int = 0,
    class_row: bool = False,
    trainable: bool = True,
) -> Module:
    """A vision transformer: patches [row_dim], position table, layers, norm. class_row: each image has one more row.

    Ranks can share an image (`Module.shareable`).
    """
    extra = int(class_row)
    stem = patches(
        row_dim,
        shape.hidden,
        num_positions=num_positions + extra if num_positions else 0,
        extra_parameters=extra * shape.hidden,
        trainable=trainable,
    )
    layers = [shape.layer(extra_rows=extra, trainable=trainable)] * num_layers
    norm = final_norm(shape.hidden, shape.norm, extra_rows=extra, trainable=trainable)
    return Module.of(name, [stem, *layers, norm], shareable=True)


def audio_encoder(
    name: str,
    shape: Transformer,
    num_layers: int,
    *,
    num_mel_bins: int = 128,
    num_positions: int = 1500,
    pooled: int = 1,
    trainable: bool = True,
) -> Module:
    """Whisper's encoder: two convolutions, the second with stride 2, layers, norm. Clips are padded to the longest.

    Ranks can share a clip (`Module.shareable`); where they do, none is padded.

    num_positions: length of the position table. pooled: rows that are averaged to one before the norm (Qwen2-Audio: 2).
    """
    return Module.of(
        name,
        [
            convolution(num_mel_bins, shape.hidden, trainable=trainable),
            convolution(
                shape.hidden, shape.hidden, stride=2, divisor=2, num_positions=num_positions, trainable=trainable
            ),
            *[shape.layer(divisor=2, trainable=trainable)] * num_layers,
            final_norm(shape.hidden, shape.norm, divisor=2 * pooled, trainable=trainable),
        ],
        padded=True,
        shareable=True,
    )


def language_model(
    shape: Transformer,
    num_layers: int,
    vocab_size: int,
    *,
    name: str = BACKBONE,
    tied: bool = False,
    trainable: bool = True,
    queries: Layer | None = None,
) -> Module:
    """A decoder: embedding, layers, norm, output layer. It is causal if `shape` is. queries: as of `query_tokens`."""
    return Module.of(
        name,
        [
            embedding(vocab_size, shape.hidden, trainable=trainable),
            *([] if queries is None else [queries]),
            *[shape.layer(trainable=trainable)] * num_layers,
            final_norm(shape.hidden, shape.norm, trainable=trainable),
            head(vocab_size, shape.hidden, tied=tied, trainable=trainable),
        ],
    )


def connect(
    encoder: Module,
    output_dim: int,
    kind: Literal["linear", "mlp"] = "mlp",
    downsample: int = 1,
    *,
    trainable: bool = True,
) -> Module:
    """The encoder with a projector after its last layer."""
    last = encoder.layers[-1]
    added = projector(last.output_width, output_dim, kind, downsample, divisor=last.divisor, trainable=trainable)
    stacks = *encoder.stacks, *Module.of(encoder.name, [added]).stacks
    return replace(encoder, stacks=stacks)


def denoising_transformer(
    name: str,
    shape: Transformer,
    num_layers: int,
    *,
    row_dim: int,
    num_conditions: int = 1,
    num_positions: int = 0,
    trainable: bool = True,
) -> Module:
    """What denoises the rows [row_dim] of an item: patches, position table, layers, norm, and a product back to rows.

    num_conditions: rows of an item's condition. They stand before its own in all layers, with one of its timestep.
    """
    before = num_conditions + 1
    table = num_positions + before if num_positions else 0
    stem = patches(row_dim, shape.hidden, num_positions=table, trainable=trainable)
    weights = shape.hidden * row_dim
    # The product keeps its input, and the loss what is wrong of each value.
    kept = shape.hidden + row_dim + 10
    out = Layer("output", weights, weights + row_dim, row_dim, kept, trainable=trainable)
    layers = [shape.layer(extra_rows=before, trainable=trainable)] * num_layers
    norm = final_norm(shape.hidden, shape.norm, trainable=trainable)
    return Module.of(name, [replace(stem, reads_data=True), *layers, norm, out])


def condition(
    generator: Module,
    input_dim: int,
    kind: Literal["linear", "mlp"] = "mlp",
    num_rows: int = 1,
    *,
    trainable: bool = True,
) -> Module:
    """The generator with an output projector before its first layer: at its entrance (MMScale section 2.1).

    input_dim: width of the backbone's rows. num_rows: those that the backbone gives it of each item.
    """
    width = generator.layers[0].output_width
    added = replace(projector(input_dim, width, kind, trainable=trainable), item_rows=num_rows, of_outputs=False)
    return replace(generator, stacks=(*Module.of(generator.name, [added]).stacks, *generator.stacks), shareable=False)


def query_tokens(parameters: int, hidden: int, *, frozen: int = 0, trainable: bool = True) -> Layer:
    """The learned query tokens of all generators; like a token's, their row is looked up. frozen: parameters of
    generators whose queries do not learn beside others that do.
    """
    return Layer("queries", 0, parameters, hidden, activation_width=1, trainable=trainable, frozen_parameters=frozen)


def multimodal(
    name: str,
    backbone: Module,
    encoders: Sequence[Module],
    generators: Sequence[Module] = (),
    again: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> ModelSpec:
    """The model whose encoders feed the backbone, and whose backbone feeds the generators.

    again: encoder -> blocks of the backbone, not the first, before which its rows enter again.
    Raises ArgumentError as `ModelSpec` does.
    """
    edges = [(encoder.name, backbone.name) for encoder in encoders]
    edges += [(backbone.name, generator.name) for generator in generators]
    reentries = tuple((encoder, backbone.name, block) for encoder, blocks in again.items() for block in blocks)
    return ModelSpec(name, (*encoders, backbone, *generators), tuple(edges), reentries)
