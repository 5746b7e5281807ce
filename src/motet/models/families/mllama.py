"""Llama 3.2 Vision (Dubey et al. 2024, section 7): a tower on tiles, and a text model some of whose layers attend to
its rows.

An image has always as many tiles as the tower has at most; those behind its own are padding. As transformers has it,
padding is computed: each row of an image's tiles sees all rows, those of padding too, which themselves see the rows of
its own tiles alone. So do rows of zeros that fill each tile up to a multiple of eight.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.mllama.modeling_mllama import MllamaCrossAttentionDecoderLayer, MllamaVisionModel

from motet.absent import take_part
from motet.core.arrays import Int64Array
from motet.core.attention_table import AttentionTable
from motet.core.shapes import Transformer, final_norm, patches
from motet.core.spec import Layer
from motet.dropout import rows_into, some_rows
from motet.models.attention import Extents
from motet.models.context_items import ContextItems, SharedItemRows
from motet.models.contract import ImageRows
from motet.models.extents import extents_of
from motet.models.families.patches import (
    add_class_rows,
    embed_patches,
    gives_output,
    rows_here,
    sent_width,
    with_carried,
    without_class_rows,
    zero_image,
)
from motet.models.families.text import TextModel
from motet.models.key_items import KeyItems
from motet.models.layers import LayerModules, any_trainable
from motet.models.row_copies import rows_wanted
from motet.models.table_items import TableItems
from motet.on_device import on_device

_MULTIPLE = 8
"""Rows of a tile are filled up to a multiple of this, which 1 + n * n never is."""


def _attention(layer: nn.Module, hidden: Tensor, segments: Extents) -> Tensor:
    attended, _ = layer.self_attn(layer.input_layernorm(hidden), attention_mask=segments)
    return hidden + (layer.gate_attn.tanh() * attended if layer.is_gated else attended)


def _mlp(layer: nn.Module, hidden: Tensor, segments: Extents) -> Tensor:
    changed = layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden + (layer.gate_ffn.tanh() * changed if layer.is_gated else changed)


class MllamaTower(nn.Module):
    """The tower: local layers, then gated ones, which transformers calls global. Both attend over the whole image.

    Rows are patches (channel, y, x) of an image's own tiles, tile by tile; sizes are (rows, columns) of tiles. The rows
    of an item are, in its layers, those that fill tiles up, and then those of all tiles, each a class row and patches.
    A row that comes out is one of the last layer, beside it those of inner local ones.
    class_rows: rows that fill up the tiles of an image. Of one that ranks share, the rank with its first row has them.
    shared:     the rows that are here, without those that fill tiles up, where ranks share images.
    on_all_rows: methods between layers that need all of these rows, also where tensor-parallel ranks have a part each.
    """

    on_all_rows = ("_between",)
    halves = (_attention, _mlp)

    def __init__(self, model: MllamaVisionModel) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.width, self.num_tiles = config.hidden_size, config.max_num_tiles
        # In a tower that is profiled one layer deep its last block stands for those that are not there.
        self.num_local = len(model.transformer.layers)
        self.inner = [min(number, self.num_local - 1) for number in config.intermediate_layers_indices]
        self.output_dim = self.width * (1 + len(self.inner))
        self.takes = ImageRows(config.patch_size, channels=config.num_channels)
        self.tile_patches = (config.image_size // config.patch_size) ** 2
        self.num_rows = self.num_tiles * (1 + self.tile_patches)
        self.class_rows = self.num_tiles * (-(1 + self.tile_patches) % _MULTIPLE)
        self._number = {tuple(sides): 1 + number for number, sides in enumerate(config.supported_aspect_ratios)}

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.model.transformer.layers, *self.model.global_transformer.layers]

    def num_inputs(self, sizes: Int64Array) -> Int64Array:
        """Patches of each image's own tiles, int64 [num_images]."""
        return sizes.prod(axis=1) * self.tile_patches

    def lengths(self, sizes: Int64Array) -> Int64Array:
        """Rows of all tiles of each image, int64 [num_images]: all the same."""
        return np.full(len(sizes), self.num_rows, dtype=np.int64)

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Rows that come out for each image, int64 [num_images]: of all tiles."""
        return self.lengths(sizes)

    def key_rows(self, sizes: Int64Array) -> Int64Array:
        """How many of its rows the text behind an image sees: those of its own tiles, int64 [num_images]."""
        return sizes.prod(axis=1) * (1 + self.tile_patches)

    def layers(self) -> list[LayerModules]:
        """What stands before the layers, the layers, and behind the local ones a norm and a place for each tile."""
        model, config = self.model, self.model.config
        own = nn.ParameterList([model.class_embedding])
        tables = (model.gated_positional_embedding, model.pre_tile_positional_embedding, own)
        stem = patches(
            model.patch_embedding.weight[0].numel(),
            self.width,
            bias=False,
            extra_parameters=sum(each.numel() for table in tables for each in table.parameters()),
            norm=True,
            trainable=any_trainable(model.patch_embedding, model.layernorm_pre, *tables),
        )
        shape = Transformer(
            self.width, config.intermediate_size, config.attention_heads, activation=config.hidden_act, biases=("mlp",)
        )
        described = [LayerModules(stem, (model.patch_embedding, model.layernorm_pre, *tables))]
        for number, block in enumerate(self.blocks):
            sent = sent_width(self.width, self.inner, number)
            layer = shape.layer(extra_rows=self.class_rows, trainable=any_trainable(block))
            if block.is_gated:  # Each gate keeps what it multiplies.
                layer = replace(
                    layer, parameters=layer.parameters + 2, activation_width=layer.activation_width + 2 * self.width
                )
            described.append(LayerModules(with_carried(layer, sent), (block,)))
            if number == self.num_local - 1:
                behind = (model.layernorm_post, model.post_tile_positional_embedding)
                described.append(LayerModules(self._behind_local(sent, *behind), behind))
        return described

    def _behind_local(self, width: int, norm: nn.Module, tiles: nn.Module) -> Layer:
        layer = final_norm(self.width, extra_rows=self.class_rows, trainable=any_trainable(norm, tiles))
        added = sum(each.numel() for each in tiles.parameters())
        return replace(layer, parameters=layer.parameters + added, output_width=width)

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """An image of zeros, of as few tiles as there can be."""
        sizes = torch.tensor([min(self._number, key=math.prod)])
        values, _ = zero_image(values, self.model.patch_embedding)
        return values.new_zeros(int(self.num_inputs(sizes.numpy())[0]), values.shape[1]), sizes

    def forward(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.through(self.enter(values, sizes, shared), sizes, 0, len(self.blocks), shared)
        return self.leave(hidden, sizes, shared)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The rows of all tiles with their places, and zeros before them, [num_images * (class_rows + num_rows),
        width]. shared: of these rows those that are here; it is a collective.
        """
        model, counts, own = self.model, self.lengths(sizes.numpy()), self._own_patches(sizes.numpy())
        if shared is not None:
            values, places = self._patches_here(values, own, shared.with_rows(self.num_inputs(sizes.numpy())), shared)
        patches = embed_patches(model.patch_embedding, values)
        tiles = patches.new_zeros(len(sizes) * self.num_tiles * self.tile_patches, self.width)
        if shared is None:
            rows = self._placed(tiles.index_copy(0, on_device(own, values.device), patches), sizes)
        else:
            rows = rows_here(self._placed(tiles, sizes), shared).index_add(0, on_device(places, values.device), patches)
        filling = rows.new_zeros(self.class_rows, self.width)
        return add_class_rows(model.layernorm_pre(rows), filling, counts, shared)

    def _own_patches(self, sizes: Int64Array) -> Int64Array:
        """Where the patches of the images' own tiles stand among those of all tiles, int64 [sum(num_inputs)]."""
        counts, most = self.num_inputs(sizes), self.num_tiles * self.tile_patches
        return np.flatnonzero(np.arange(most) < counts[:, None])

    def _patches_here(
        self, values: Tensor, own: Int64Array, patches: SharedItemRows, shared: SharedItemRows
    ) -> tuple[Tensor, Int64Array]:
        """The patches whose rows are here, and where these stand among the rows that are here. A collective: patches
        are of an image's own tiles alone, so that ranks have read others.

        values: those that this rank has read, as `patches` says. own: as of `_own_patches`.
        """
        rows = own + own // self.tile_patches + 1  # Before those of each tile stands its class row.
        wanted = [np.flatnonzero(shared.rows.owner[rows] == rank) for rank in range(shared.rows.num_ranks)]
        values = rows_wanted(values, patches, wanted.__getitem__)
        return values, np.searchsorted(shared.own, rows[wanted[shared.rank]])

    def _placed(self, tiles: Tensor, sizes: Tensor) -> Tensor:
        """Patches of all tiles, [n, width] -> rows of all tiles, with class rows and places, [num_images * num_rows,
        width].
        """
        model, numbers = self.model, self._numbers(sizes, tiles.device)
        tiles = tiles.unflatten(0, (len(sizes), self.num_tiles, self.tile_patches))
        tiles = model.pre_tile_positional_embedding(tiles, numbers)
        tiles = model.apply_class_embedding(tiles.flatten(0, 1)).unflatten(0, (len(sizes), self.num_tiles))
        return model.gated_positional_embedding(tiles, numbers).flatten(0, 2)

    def _numbers(self, sizes: Tensor, device: torch.device) -> Tensor:
        """The number of each image's arrangement of tiles, int64 [num_images]: 0 would be none."""
        numbers = [self._number[rows, columns] for rows, columns in sizes.tolist()]
        return on_device(torch.tensor(numbers, dtype=torch.int64), device)

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """The blocks first ... stop - 1. hidden: wide rows, with those of inner blocks so far."""
        hidden, *inner = hidden.split(self.width, dim=1)
        here = None if shared is None else shared.with_class_rows(self.class_rows)
        [segments] = extents_of(self, sizes.numpy(), shared)
        for number, block in enumerate(self.blocks[first:stop], first):
            hidden = block(hidden[None], segments)[0]
            if not gives_output(block):
                continue
            inner += [hidden] * self.inner.count(number)
            if number == self.num_local - 1:
                hidden = self._between(hidden, sizes, here)
        return torch.cat([hidden, *inner], dim=1)

    def who_sees(self, sizes: Int64Array, shared: SharedItemRows | None) -> tuple[Extents, ...]:
        """Of an image's rows its own tiles' see all, and all others see these. As of `contract`."""
        filled, length = self.class_rows, self.class_rows + self.num_rows
        rows, stop = np.arange(len(sizes) * length), filled + self.key_rows(sizes)[:, None]
        begin, place = rows - rows % length, np.arange(length)
        sees_all = (filled <= place) & (place < stop)
        start = begin + np.where(sees_all, 0, filled).reshape(-1)
        end = begin + np.where(sees_all, length, stop).reshape(-1)
        table = AttentionTable(start[None], end[None], rows, rows, begin)
        if shared is None:
            return (TableItems(table, causal=False),)
        return (ContextItems(shared.with_class_rows(filled), causal=False, table=table),)

    def _between(self, hidden: Tensor, sizes: Tensor, here: SharedItemRows | None) -> Tensor:
        """The norm behind the local blocks, and the place of its tile for each row, also for those that fill it up.

        here: the rows that are here, with those that fill tiles up, where ranks share images.
        """
        model, tiles = self.model, hidden.new_zeros(len(sizes), self.num_tiles, 1, self.width)
        places = model.post_tile_positional_embedding(tiles, self._numbers(sizes, hidden.device))
        counts = (count // self.num_tiles for count in (self.class_rows, self.num_rows))
        placed = [places.expand(-1, -1, count, -1).flatten(1, 2) for count in counts]
        return model.layernorm_post(hidden) + rows_here(torch.cat(placed, dim=1).flatten(0, 1), here)

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The rows of all tiles, [num_images * num_rows, output_dim]; values of inner blocks take turns."""
        rows = without_class_rows(hidden, self.lengths(sizes.numpy()), self.class_rows, shared)
        last, inner = rows[:, : self.width], rows[:, self.width :].unflatten(1, (len(self.inner), self.width))
        return torch.cat([last, inner.transpose(1, 2).flatten(1, 2)], dim=1)


class _PackedCrossLayer(MllamaCrossAttentionDecoderLayer):
    """The layer on packed documents: rows of documents with images alone pass it, and see keys as `KeyItems` says."""

    def forward(
        self,
        hidden_states: Tensor,
        cross_attention_states: Tensor,
        cross_attention_mask: KeyItems,
        **others: Any,
    ) -> Tensor:
        """hidden_states [1, total, dim], cross_attention_states [1, keys, dim]. others: of layers that see text."""
        rows, sees = cross_attention_mask.on(hidden_states.device)
        if not len(rows):
            absent = take_part(hidden_states[:, :0], [*self.parameters(), cross_attention_states])
            return hidden_states.index_add(1, rows, absent)
        own = hidden_states.index_select(1, rows)
        with some_rows(cross_attention_mask.numbers):
            # Adapters may drop out of what they read.
            with (
                rows_into(self.cross_attn.k_proj, lambda: cross_attention_mask.keys),
                rows_into(self.cross_attn.v_proj, lambda: cross_attention_mask.keys),
            ):
                attended, _ = self.cross_attn(
                    hidden_states=self.input_layernorm(own),
                    attention_mask=cross_attention_mask.extents,
                    cross_attention_states=cross_attention_states,
                )
            own = own + self.cross_attn_attn_gate.tanh() * attended
            inner = self.mlp(self.post_attention_layernorm(own)) * sees
        return hidden_states.index_copy(1, rows, own + self.cross_attn_mlp_gate.tanh() * inner)


class MllamaText(TextModel):
    """Llama, with a table of more tokens than the output layer has, and layers that attend to an encoder's rows."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__(causal_lm)
        for layer in self.layers:
            if isinstance(layer, MllamaCrossAttentionDecoderLayer):
                layer.__class__ = _PackedCrossLayer

    @property
    def crossing(self) -> tuple[int, ...]:
        return tuple(self.causal_lm.config.cross_attention_layers)
