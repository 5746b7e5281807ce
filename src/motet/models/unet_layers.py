"""The layers of diffusers' UNet2DConditionModel: their parameters, products, and what they keep for backward.

Rows are those of the level: behind k halvings an item has a fourth to the power of k of its rows. All layers are one
block, as skip connections join the first to the last ones: a pipeline cannot cut it.

Kept of a row, each once (`core/shapes.py`): a residual block keeps its input, both norms' outputs before and behind
SiLU, and the first convolution's output; where paths join, their concatenation is a new input. A transformer keeps of
each product its input, queries and what attention gives; of the gated MLP both factors, the activated one, and their
product. Keys and values of the conditions are kept once an item.

A profile times each residual block whole, as its convolutions, and each transformer block as its attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from motet.core.spec import Attention, Layer
from motet.models.layers import LayerModules, layer_of

_OF_ITEM_STATISTICS = 4
"""Elements of a row that statistics of norms and reordering keep, at most."""


def unet_layers(unet: Any, num_conditions: int) -> list[LayerModules]:
    """The layers in execution order. unet: a UNet2DConditionModel of the blocks that `unet.check_options` knows.

    num_conditions: the rows of each item's condition.
    """
    width = unet.config.cross_attention_dim
    # Taken from those of all items, by size; all blocks read them.
    taken = Layer("conditions", 0, 0, width, width, item_rows=num_conditions, continues=True, trainable=False)
    return [LayerModules(taken, ()), *_layers(unet, num_conditions)]


def _layers(unet: Any, queries: int) -> Iterator[LayerModules]:
    first, last, time = unet.conv_in, unet.conv_out, unet.time_embedding
    width, wide = first.out_channels, time.linear_2.out_features
    yield layer_of("convolution", (first,), first.in_channels, width)
    yield layer_of("time", (time,), time.linear_1.in_features + 3 * wide, wide, item_rows=1)
    divisor = 1
    for block in unet.down_blocks:
        yield from _level(block, divisor, queries)
        for down in block.downsamplers or ():
            divisor *= 4
            # Its input has four times as many rows.
            kept = 4 * down.conv.in_channels
            yield layer_of("strided_convolution", (down,), kept, down.conv.out_channels, divisor=divisor)
    mid = unet.mid_block
    yield from _residual(mid.resnets[0], divisor)
    for attention, residual in zip(mid.attentions, mid.resnets[1:], strict=True):
        yield from _transformer(attention, divisor, queries)
        yield from _residual(residual, divisor)
    for block in unet.up_blocks:
        yield from _level(block, divisor, queries)
        for up in block.upsamplers or ():
            divisor //= 4
            yield layer_of("convolution", (up,), up.conv.in_channels, up.conv.out_channels, divisor=divisor)
    # Behind it stands the loss: what is wrong of each value, its weight, and the order of rows.
    kept = 3 * width + last.out_channels + 10
    yield layer_of("output", (unet.conv_norm_out, last), kept, last.out_channels)


def _level(block: Any, divisor: int, queries: int) -> Iterator[LayerModules]:
    """Residual blocks, each with a transformer behind it if the level has any."""
    attentions = getattr(block, "attentions", None) or [None] * len(block.resnets)
    for residual, attention in zip(block.resnets, attentions, strict=True):
        yield from _residual(residual, divisor)
        if attention is not None:
            yield from _transformer(attention, divisor, queries)


def _residual(block: Any, divisor: int) -> Iterator[LayerModules]:
    """A ResnetBlock2D: of rows, and the product of each item's timestep."""
    width, out = block.conv1.in_channels, block.conv1.out_channels
    time = block.time_emb_proj
    yield layer_of("time", (time,), 2 * time.in_features, out, item_rows=1).timed_as()
    own = (block.norm1, block.conv1, block.norm2, block.conv2, block.conv_shortcut)
    yield layer_of("convolution", own, 3 * width + 3 * out, out, divisor=divisor).timed_as(block)


def _transformer(module: Any, divisor: int, queries: int) -> Iterator[LayerModules]:
    """A Transformer2DModel: a norm and a product, its blocks, and a product."""
    width = module.proj_in.weight.shape[0]
    outer = module.proj_in.weight.shape[1]
    yield layer_of("projection", (module.norm, module.proj_in), 2 * outer, width, divisor=divisor)
    for block in module.transformer_blocks:
        heads = block.attn1.heads
        attends = Attention(width, width)
        kept = 6 * width + 2 * heads + _OF_ITEM_STATISTICS
        yield layer_of("attention", (block.norm1, block.attn1), kept, width, attends, divisor=divisor).timed_as(block)
        keys = (block.attn2.to_k, block.attn2.to_v)
        yield layer_of("keys", keys, 2 * width, width, item_rows=queries).timed_as()
        inner = block.ff.net[2].in_features
        kept = 5 * width + 4 * inner + 2 * heads + 2 * _OF_ITEM_STATISTICS
        own = (block.norm2, block.attn2.to_q, block.attn2.to_out, block.norm3, block.ff)
        attends = Attention(width, width, keys=queries)
        yield layer_of("attention", own, kept, width, attends, divisor=divisor).timed_as()
    yield layer_of("projection", (module.proj_out,), width, outer, divisor=divisor)
