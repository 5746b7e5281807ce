"""The layers of diffusers' SD3Transformer2DModel: their parameters, products, and what they keep for backward.

The length of an item is its number of latents, of which a patch has patch_size squared. A block has products of
patches, products of the rows of the condition, products of one row of each item (what scales and shifts), and attention
over patches and condition together, with which it begins. A profile times it whole, as that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from motet.core.spec import Attention, Layer
from motet.models.layers import LayerModules, layer_of

_STATISTICS = 4
"""Elements of a row that the statistics of two norms keep."""


def sd3_layers(transformer: Any, num_conditions: int) -> list[LayerModules]:
    """The layers in execution order. transformer: an SD3Transformer2DModel that `sd3.SD3` takes.

    num_conditions: the rows of each item's condition.
    """
    config = transformer.config
    given = config.joint_attention_dim + config.pooled_projection_dim
    # Taken from those of all items, by size, and reduced to the mean of a part.
    taken = Layer("conditions", 0, 0, given, given, item_rows=num_conditions, trainable=False)
    return [LayerModules(taken, ()), *_layers(transformer, num_conditions)]


def _layers(transformer: Any, num: int) -> Iterator[LayerModules]:
    config, width = transformer.config, transformer.inner_dim
    area, channels = config.patch_size**2, config.in_channels
    stem, embed = transformer.pos_embed.proj, transformer.time_text_embed
    yield layer_of("patches", (stem,), area * channels, width, divisor=area, continues=False)
    steering = (embed.timestep_embedder, embed.text_embedder)
    kept = embed.timestep_embedder.linear_1.in_features + config.pooled_projection_dim + 4 * width
    yield layer_of("time", steering, kept, width, item_rows=1, continues=False)
    yield layer_of("context", (transformer.context_embedder,), 0, width, item_rows=num, continues=False)
    for block in transformer.transformer_blocks:
        yield from _block(block, config.num_attention_heads, num, area, width)
    yield layer_of("modulation", (transformer.norm_out.linear,), 3 * width, 2 * width, item_rows=1, continues=False)
    # Behind it stands the loss, of each value of a patch: what is wrong of it, its weight, and the order of rows.
    kept = 3 * width + area * (channels + 10)
    yield layer_of("output", (transformer.proj_out,), kept, area * channels, divisor=area, continues=False)


def _block(block: Any, heads: int, num: int, area: int, width: int) -> Iterator[LayerModules]:
    """A JointTransformerBlock of `num` rows of conditions and patches of `area` latents."""
    attn, ends = block.attn, block.ff_context is None
    # The kind tells apart what takes different times: a layer of a profile is known by it, and this one has no weights.
    kind = "_".join(["last"] * ends + ["dual"] * (block.attn2 is not None) + ["joint_attention"])
    # Queries, keys, values and what attention gives, of both; its parts are copied before the next product.
    attends, kept = Attention(width, width, num_heads=heads, num_kv_heads=heads), 5 * width + heads
    size = {"divisor": area, "extra_rows": num, "continues": False, "divided_width": kept}
    yield layer_of(kind, (), kept, width, attends, **size)
    modulations = (block.norm1.linear, block.norm1_context.linear)
    factors = sum(each.out_features for each in modulations)
    yield layer_of("modulation", modulations, width + factors, factors, item_rows=1)
    added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.norm_added_q, attn.norm_added_k)
    of_context = (*added, attn.to_add_out, block.ff_context)
    kept, inner = 3 * width + _STATISTICS, 0
    if not ends:
        kept, inner = _kept(attn.norm_added_q, width)
    yield layer_of("context", of_context, kept, width, item_rows=num, divided_width=inner)
    if block.attn2 is not None:
        inner = 5 * width + heads + _kept_of_norms(block.attn2.norm_q, width)
        yield layer_of("attention", (block.attn2,), width + inner, width, attends, divisor=area, divided_width=inner)
    own = (attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k, attn.to_out, block.ff)
    kept, inner = _kept(attn.norm_q, width)
    yield layer_of("products", own, kept, width, divisor=area, divided_width=inner)


def _kept(norm: nn.Module | None, width: int) -> tuple[int, int]:
    """What a row of a stream keeps beside attention: its input, both norms' outputs, and what gates multiply; the MLP
    both ends of its activation. And what of it is of heads and inner columns. norm: of queries and keys.
    """
    inner = 8 * width + _kept_of_norms(norm, width)
    return 8 * width + _STATISTICS + inner, inner


def _kept_of_norms(norm: nn.Module | None, width: int) -> int:
    """Norms of queries and of keys keep what they are given, and that before the weights multiply it."""
    return 4 * width if norm is not None else 0
