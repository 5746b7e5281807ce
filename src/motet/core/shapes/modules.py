"""Whole modules from their shapes, and the model that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from motet.core.shapes.layers import convolution, embedding, final_norm, head, patches
from motet.core.shapes.transformer import Transformer
from motet.core.spec import Layer, ModelSpec, Module
from motet.core.workload import BACKBONE


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
