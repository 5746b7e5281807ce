"""The layers of diffusers' PixArtTransformer2DModel: their parameters, products, and what they keep for backward.

The length of an item is its number of latents, of which a patch has patch_size squared. What scales and shifts is one
product of each item (adaLN-single: Chen et al. 2023, section 2.3), to which each block adds a table. A profile times a
block whole, as its first attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from motet.core.spec import Attention, Layer
from motet.models.layers import LayerModules, layer_of

_STATISTICS = 2
"""Elements of a row that the statistics of a norm keep."""


def pixart_layers(transformer: Any, num_conditions: int) -> list[LayerModules]:
    """The layers in execution order. transformer: a PixArtTransformer2DModel that `pixart.PixArt` takes.

    num_conditions: the rows of each item's condition.
    """
    given = transformer.config.caption_channels or transformer.config.cross_attention_dim
    # Taken from those of all items, by size; all blocks read them.
    taken = Layer("conditions", 0, 0, given, given, item_rows=num_conditions, trainable=False)
    return [LayerModules(taken, ()), *_layers(transformer, num_conditions)]


def _layers(transformer: Any, num: int) -> Iterator[LayerModules]:
    config, width, steering = transformer.config, transformer.inner_dim, transformer.adaln_single
    area, channels = config.patch_size**2, config.in_channels
    yield layer_of("patches", (transformer.pos_embed.proj,), area * channels, width, divisor=area, continues=False)
    waves = steering.emb.timestep_embedder.linear_1.in_features
    yield layer_of("time", (steering,), waves + 4 * width, 6 * width, item_rows=1, continues=False)
    if transformer.caption_projection is not None:
        yield layer_of("context", (transformer.caption_projection,), 3 * width, width, item_rows=num, continues=False)
    for block in transformer.transformer_blocks:
        yield from _block(block, config.num_attention_heads, num, area, width)
    yield layer_of("modulation", (_table(transformer),), width, 2 * width, item_rows=1, continues=False).timed_as()
    # Behind it stands the loss, of each value of a patch: what is wrong of it, its weight, and the order of rows.
    kept = 3 * width + _STATISTICS + area * (channels + 10)
    yield layer_of(
        "output", (transformer.proj_out,), kept, transformer.proj_out.out_features, divisor=area, continues=False
    )


def _block(block: Any, heads: int, num: int, area: int, width: int) -> Iterator[LayerModules]:
    """A BasicTransformerBlock of `num` rows of conditions and patches of `area` latents."""
    own, cross, inner = block.attn1, block.attn2, block.ff.net[2].in_features
    known = {"num_heads": heads, "num_kv_heads": heads}
    # Its input, both ends of what scales it, queries, keys, values, and both ends of the product behind attention.
    attends, of_heads = Attention(width, width, **known), 4 * width + heads
    size = {"divisor": area, "continues": False, "divided_width": of_heads}
    yield layer_of("attention", (block.norm1, own), 4 * width + of_heads + _STATISTICS, width, attends, **size)
    # Gates are parts of six rows that are kept whole; to factors 1 is added.
    yield layer_of("modulation", (_table(block),), 8 * width, 6 * width, item_rows=1)
    # Keys and values.
    keys = (cross.to_k, cross.to_v)
    yield layer_of("context", keys, 2 * width, width, item_rows=num, divided_width=2 * width)
    # Of attention its input, queries and what it gives; the MLP, as above, both ends of its activation, and its output.
    reads, of_heads = (cross.to_q, cross.to_out, block.norm2, block.ff), 2 * width + heads + 2 * inner
    attends = Attention(width, width, keys=num, **known)
    kept = 5 * width + of_heads + _STATISTICS
    yield layer_of("attention", reads, kept, width, attends, divisor=area, divided_width=of_heads)


def _table(module: Any) -> nn.Module:
    """The table of scales and shifts, which is a parameter of a module with much else."""
    return nn.ParameterList([module.scale_shift_table])
