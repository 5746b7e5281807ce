"""Projectors by cross attention: a fixed number of queries reads the rows of each item, whatever their number.

resampler: a matrix to the backbone's width, then Idefics2's Perceiver resampler: queries attend to rows and queries.
qformer:   BLIP-2's Q-Former: queries attend to each other and, in every second layer, to rows; then a matrix.

The layers are transformers' own, on packed items without padding. They are one block: sharded, recomputed, and passed
through by a rank without items, as a whole. Where ranks share items, each has some rows and some queries of them, and
gets keys and values of the others in attention (`models/shared_queries.py`). Queries start from a normal distribution,
as in Flamingo and BLIP-2's own code; transformers starts them all alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Blip2QFormerConfig, Blip2QFormerModel, PreTrainedConfig
from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.shapes import qformer, resampler
from motet.core.words import counted_words
from motet.models.attention import ATTENTION, QueriedItems
from motet.models.config_file import hf_options, one_line, quiet_transformers
from motet.models.contract import item_rows
from motet.models.extents import extents_of
from motet.models.families.bounds import check_bounds
from motet.models.layers import LayerModules, any_trainable
from motet.models.shared_queries import SharedQueries, SharedReading

_ELSEWHERE = {
    "resampler": ("hidden_size", "resampler_n_latents"),
    "qformer": ("encoder_hidden_size", "vocab_size", "max_position_embeddings", "pad_token_id"),
}
"""Options of HF's configs that the model around a projector decides, or that have no effect on it."""


class CrossProjector(nn.Module):
    """Rows [sum(rows of an item), input_dim] -> [num_items * queries, output_dim]; `extents` as in `Projector`.

    Raises UserError for HF options that are unknown, out of bounds, or not computed here.

    Example:
        >>> projector = CrossProjector("qformer", 8, 32, 4, {"hidden_size": 16, "num_attention_heads": 2,
        ...                                                  "intermediate_size": 24, "num_hidden_layers": 2})
        >>> projector.num_outputs(np.array([5, 8])).tolist(), projector(torch.zeros(13, 8), np.array([5, 8])).shape
        ([4, 4], torch.Size([8, 32]))
    """

    downsample = 1
    shareable = True
    """As of `Projector`."""

    def __init__(self, kind: str, input_dim: int, output_dim: int, queries: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.queries = kind, queries
        self.input_dim, self.output_dim = input_dim, output_dim
        if kind == "resampler":
            given = {"hidden_size": output_dim, "resampler_n_latents": queries}
            self.input: nn.Module = nn.Linear(input_dim, output_dim)
            self.layers: nn.Module = _Perceiver(_config(kind, Idefics2PerceiverConfig, options, given))
            self.output: nn.Module = nn.Identity()
        else:
            config = _config(kind, Blip2QFormerConfig, options, {"encoder_hidden_size": input_dim})
            self.input = nn.Identity()
            self.layers = _QFormer(config, queries)
            self.output = nn.Linear(config.hidden_size, output_dim)

    @property
    def blocks(self) -> list[nn.Module]:
        """The block of all layers."""
        return [self.layers]

    def num_outputs(self, extents: Int64Array) -> Int64Array:
        """Output rows of each item, int64 [num_items]: the queries."""
        return np.full(len(extents), self.queries, dtype=np.int64)

    def forward(self, rows: Tensor, extents: Int64Array, shared: SharedReading | None = None) -> Tensor:
        """shared: as of `through`."""
        return self.leave(self.through(self.enter(rows), extents, shared))

    def enter(self, rows: Tensor) -> Tensor:
        """What stands before the block: rows [n, input_dim] -> the rows that queries read, [n, width]."""
        return self.input(rows)

    def through(self, rows: Tensor, extents: Int64Array, shared: SharedReading | None = None) -> Tensor:
        """The block: what `enter` gives -> [num_items * queries, width].

        shared: which rows, and which queries, are here where ranks share items; all of them call it then.
        """
        [items] = extents_of(self, extents, shared)
        return self.layers(rows, items).flatten(0, -2)

    def who_sees(self, extents: Int64Array, shared: SharedReading | None) -> tuple[QueriedItems | SharedQueries, ...]:
        """Queries of an item see its rows. As of `contract`, but of arrangements. shared: as of `through`."""
        sees_queries = self.kind == "resampler"
        if shared is None:
            return (QueriedItems(item_rows(extents), self.queries, sees_queries),)
        return (SharedQueries(shared, sees_queries),)

    def leave(self, rows: Tensor) -> Tensor:
        """What stands behind the block: [num_items * queries, output_dim]."""
        return self.output(rows)

    def described(self, divisor: int) -> list[LayerModules]:
        """The layers in execution order. divisor: length of an item that makes one row of the encoder's output."""
        trainable = any_trainable(self)
        modules = self.layers.described()
        if self.kind == "resampler":
            layers = resampler(
                self.input_dim, self.output_dim, self.queries, **self.layers.sizes, divisor=divisor, trainable=trainable
            )
            modules = [(self.input,), *modules]
        else:
            layers = qformer(
                self.input_dim, self.output_dim, self.queries, **self.layers.sizes, divisor=divisor, trainable=trainable
            )
            modules = [*modules, (self.output,)]
        return [LayerModules(layer, parts) for layer, parts in zip(layers, modules, strict=True)]


class _Queries(nn.Module):
    """Trained rows [queries, dim], the same for every item."""

    def __init__(self, queries: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(queries, dim).normal_(std=std))

    def forward(self, rows: Tensor, items: QueriedItems | SharedQueries) -> Tensor:
        """[1, queries of all items that are here, dim]; rows: any tensor of the items."""
        return items.spread(self.weight)[None]


class _Perceiver(nn.Module):
    def __init__(self, config: Idefics2PerceiverConfig) -> None:
        super().__init__()
        with quiet_transformers():
            model = Idefics2PerceiverResampler(config)
        self.latents = _Queries(config.resampler_n_latents, config.hidden_size, config.initializer_range)
        self.blocks, self.norm = model.layers, model.norm
        self.sizes = {
            "num_layers": config.resampler_depth,
            "num_heads": config.resampler_n_heads,
            "head_dim": config.resampler_head_dim,
            "num_kv_heads": config.num_key_value_heads,
        }

    def forward(self, rows: Tensor, items: QueriedItems | SharedQueries) -> Tensor:
        """rows [n, hidden] -> [queries, hidden], of all items that are here."""
        hidden = self.latents(rows, items)
        for layer in self.blocks:
            hidden = layer(hidden, rows[None], attention_mask=items)
        return self.norm(hidden[0])  # FSDP takes no view out of a module.

    def described(self) -> list[tuple[nn.Module, ...]]:
        modules: list[tuple[nn.Module, ...]] = []
        for layer in self.blocks:
            attention = layer.self_attn
            modules.append((layer.input_context_norm, attention.k_proj, attention.v_proj))
            norms = (layer.input_latents_norm, layer.post_attention_layernorm)
            modules.append((*norms, attention.q_proj, attention.o_proj, layer.mlp))
        return [modules[0], (self.latents,), *modules[1:], (self.norm,)]


class _QFormer(nn.Module):
    def __init__(self, config: Blip2QFormerConfig, queries: int) -> None:
        super().__init__()
        with quiet_transformers():
            model = Blip2QFormerModel(config)
        self.queries = _Queries(queries, config.hidden_size, config.initializer_range)
        self.norm, self.dropout, self.blocks = model.layernorm, model.dropout, model.encoder.layer
        self.sizes = {
            "hidden": config.hidden_size,
            "mlp": config.intermediate_size,
            "num_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
            "frequency": config.cross_attention_frequency,
        }

    def forward(self, rows: Tensor, items: QueriedItems | SharedQueries) -> Tensor:
        """rows [n, input_dim] -> [1, queries, hidden], of all items that are here."""
        hidden = self.dropout(self.norm(self.queries(rows, items)))
        for layer in self.blocks:
            hidden = layer(hidden, items.among, rows[None], encoder_attention_mask=items, query_length=hidden.shape[1])
        return hidden

    def described(self) -> list[tuple[nn.Module, ...]]:
        modules: list[tuple[nn.Module, ...]] = []
        for layer in self.blocks:
            # Modules that are called by position, as a profile calls them alone.
            own = layer.attention.attention
            rest = (own.query, own.key, own.value, layer.attention.output, layer.intermediate_query, layer.output_query)
            if layer.has_cross_attention:
                attention = layer.crossattention.attention
                modules.append((*rest, attention.query, layer.crossattention.output))
                modules.append((attention.key, attention.value))
            else:
                modules.append(rest)
        return [modules[0], (self.queries, self.norm), *modules[1:]]


def _config(
    kind: str, config: type[PreTrainedConfig], options: dict[str, Any], given: dict[str, Any]
) -> PreTrainedConfig:
    where = "projector.config"
    hf_options(where, config, options)
    for name in _ELSEWHERE[kind]:
        if name in options:
            raise UserError(f"{where}.{name} is not for a {kind}: the model around it says it, or it has no effect")
    if options.get("use_qformer_text_input"):
        raise UserError(f"{where}.use_qformer_text_input is not computed: queries are all that a qformer is given")
    check_bounds(f"{where}.", options)
    try:
        made = config(**given, **options)
    except Exception as error:
        # HF raises exceptions of any kind for wrong options.
        raise UserError(f"{where}: no {kind} can be made of it ({one_line(error)})") from error
    heads, shared = _heads(made)
    if heads % shared:
        raise UserError(
            f"{where}: {counted_words(heads, 'head')} cannot share {counted_words(shared, 'head')} of keys and values"
        )
    if kind == "qformer" and made.hidden_size % heads:
        raise UserError(f"{where}: {heads} heads do not divide hidden_size = {made.hidden_size}")
    made._attn_implementation = ATTENTION
    return made


def _heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    if isinstance(config, Idefics2PerceiverConfig):
        return config.resampler_n_heads, config.num_key_value_heads
    return config.num_attention_heads, config.num_attention_heads
