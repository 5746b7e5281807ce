"""The layers around those of a transformer: patches, convolutions, mergers, norms, embeddings and heads."""

from __future__ import annotations

from motet.core.shapes.transformer import Norm, norm_keeps, norm_keeps_for_weight, norm_parameters
from motet.core.spec import Layer


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
        activation_width=row_dim + (norm_keeps("layer", hidden) if norm else 0),
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
        activation_width=size * norm_keeps("layer", input_dim) + 3 * joined,
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
        parameters=norm_parameters(norm, hidden),
        output_width=hidden,
        activation_width=norm_keeps(norm, hidden),
        weight_width=norm_keeps_for_weight(norm, hidden),
        divisor=divisor,
        extra_rows=extra_rows,
        trainable=trainable,
    )


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


def query_tokens(parameters: int, hidden: int, *, frozen: int = 0, trainable: bool = True) -> Layer:
    """The learned query tokens of all generators; like a token's, their row is looked up. frozen: parameters of
    generators whose queries do not learn beside others that do.
    """
    return Layer("queries", 0, parameters, hidden, activation_width=1, trainable=trainable, frozen_parameters=frozen)
