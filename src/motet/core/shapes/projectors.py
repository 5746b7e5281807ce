"""What stands between modules: projectors, resamplers and Q-Formers, alone or connected to a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from motet.core.shapes.transformer import norm_keeps
from motet.core.spec import Attention, Layer, Module


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
    width, kv_width, norm = num_heads * head_dim, num_kv_heads * head_dim, norm_keeps("rms", hidden)
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
    norm = norm_keeps("layer", hidden) + hidden
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


def _of_queries(
    kind: str, weights: int, parameters: int, output_width: int, kept: int, queries: int, trainable: bool
) -> Layer:
    """A layer on the queries of each item."""
    return Layer(kind, weights, parameters, output_width, kept, item_rows=queries, trainable=trainable, of_outputs=True)


def _one_block(layers: Sequence[Layer], start: Layer) -> list[Layer]:
    """The layers and what makes the first queries, as one block. A pipeline cut before it sends rows."""
    first, *rest = layers
    return [first, *(replace(layer, continues=True) for layer in (start, *rest))]
