"""Qwen2.5-Omni's audio encoder (Xu et al. 2025, section 2.2): Whisper's on chunks of a clip that do not see each other.

Each chunk is convolved by itself, and its positions count from 0; then rows are averaged in pairs. A row covers four
frames. Chunks are packed, and padded for the convolutions alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioAttention,
    Qwen2_5OmniAudioEncoder,
    Qwen2_5OmniAudioEncoderLayer,
)

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.item_segments import ItemSegments
from motet.core.shapes import Transformer, convolution, final_norm, projector
from motet.models.attention import Extents, PackedItems
from motet.models.context_items import SharedItemRows
from motet.models.contract import AudioRows
from motet.models.extents import extents_of
from motet.models.families.audio import averaged_here, convolved, convolved_here, real_rows
from motet.models.families.patches import item_extents
from motet.models.layers import LayerModules, any_trainable, unused_layer
from motet.on_device import on_device


class PackedAudioAttention(nn.Module):
    """HF's Qwen2_5OmniAudioAttention over packed chunks, with HF's parameters under HF's names."""

    def __init__(self, hf: Qwen2_5OmniAudioAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = hf.q_proj, hf.k_proj, hf.v_proj, hf.out_proj
        self.head_dim = hf.head_dim

    def forward(self, hidden: Tensor, extents: PackedItems) -> Tensor:
        """hidden [rows, dim] -> [rows, dim]."""
        products = (product(hidden) for product in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (x.view(len(x), -1, self.head_dim).transpose(0, 1)[None] for x in products)
        return self.out_proj(extents.attend(query, key, value, None, 0.0, None).reshape(len(hidden), -1))


class PackedAudioLayer(nn.Module):
    """HF's Qwen2_5OmniAudioEncoderLayer with that attention; its own returns a tuple."""

    def __init__(self, hf: Qwen2_5OmniAudioEncoderLayer) -> None:
        super().__init__()
        self.self_attn = PackedAudioAttention(hf.self_attn)
        self.self_attn_layer_norm, self.final_layer_norm = hf.self_attn_layer_norm, hf.final_layer_norm
        self.fc1, self.fc2, self.activation_fn = hf.fc1, hf.fc2, hf.activation_fn

    def forward(self, hidden: Tensor, extents: PackedItems) -> Tensor:
        """hidden [rows, dim] -> [rows, dim]."""
        hidden = _mlp(self, _attention(self, hidden, extents), extents)
        if hidden.dtype != torch.float16:
            return hidden
        most = torch.finfo(torch.float16).max - 1000  # As HF's.
        return hidden.clamp(-most, most)


def _attention(layer: nn.Module, hidden: Tensor, extents: PackedItems) -> Tensor:
    return hidden + layer.self_attn(layer.self_attn_layer_norm(hidden), extents)


def _mlp(layer: nn.Module, hidden: Tensor, extents: PackedItems) -> Tensor:
    return hidden + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden))))


class _ChunkedAudio(nn.Module):
    """What stands before the last matrix.

    Rows are log-mel frames, sizes are (frames,). Raises UserError for chunks whose end pairs of rows would cross.
    """

    halves = (_attention, _mlp)

    def __init__(self, model: Qwen2_5OmniAudioEncoder) -> None:
        super().__init__()
        config = model.config
        if config.n_window % 2 or config.n_window > config.max_source_positions:
            raise UserError(
                f"n_window is {config.n_window}; it must be even, and at most max_source_positions, "
                f"{config.max_source_positions}."
            )
        self.model, self.output_dim, self.chunk = model, config.d_model, 2 * config.n_window
        self.takes = AudioRows(config.num_mel_bins)
        # Embeddings of marks, which transformers holds and never reads.
        model.audio_bos_eos_token.requires_grad_(False)
        model.layers = nn.ModuleList(PackedAudioLayer(layer) for layer in model.layers)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Rows of each clip. As in HF an odd last row is dropped, so a clip of one or two frames has no row."""
        return (sizes[:, 0] + 1) // 2 // 2

    def segments(self, sizes: Int64Array) -> ItemSegments:
        """The chunks of each clip, in frames."""
        return ItemSegments.cut(sizes[:, 0], self.chunk)

    def layers(self) -> list[LayerModules]:
        """What is never called, two convolutions, the transformer layers, and the last norm."""
        model, config = self.model, self.model.config
        hidden = config.d_model
        first = convolution(config.num_mel_bins, hidden, trainable=any_trainable(model.conv1))
        second = convolution(hidden, hidden, stride=2, divisor=2, trainable=any_trainable(model.conv2))
        shape = Transformer(
            hidden,
            config.encoder_ffn_dim,
            config.encoder_attention_heads,
            activation=config.activation_function,
            biases=("query", "value", "output", "mlp"),
        )
        norm = final_norm(hidden, divisor=4, trainable=any_trainable(model.ln_post))
        return [
            LayerModules(first, (model.conv1,)),
            LayerModules(second, (model.conv2,)),
            *(LayerModules(shape.layer(divisor=2, trainable=any_trainable(block)), (block,)) for block in self.blocks),
            unused_layer(model.audio_bos_eos_token, hidden),
            LayerModules(norm, (model.ln_post,)),
        ]

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The shortest clip that becomes a row, of zeros."""
        return values.new_zeros(4, self.model.conv1.in_channels), torch.full((1, 1), 4)

    def num_hidden(self, sizes: Int64Array) -> Int64Array:
        """Rows of each clip in the layers, int64 [num_clips]."""
        return (sizes[:, 0] + 1) // 2

    def forward(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.through(self.enter(values, sizes, shared), sizes, 0, len(self.model.layers), shared)
        return self.leave(hidden, sizes, shared)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The convolutions: rows of all chunks, [sum, dim]. shared: as of `AudioEncoder`."""
        model, chunks = self.model, self.segments(sizes.numpy())
        table, frames = model.positional_embedding.positional_embedding, chunks.length
        if shared is not None:
            of_chunks = _of_chunks(shared, chunks, (frames + 1) // 2)
            of_frames = _of_chunks(shared.with_rows(sizes.numpy()[:, 0]), chunks, frames)
            hidden = convolved_here(model, values, of_frames, of_chunks)
            positions = torch.from_numpy(of_chunks.rows.positions[of_chunks.own])
            return hidden + table.to(hidden.dtype)[on_device(positions, hidden.device)]
        padded = values.new_empty(len(frames), int(frames.max()))
        hidden = convolved(model, values, real_rows(frames, padded), *padded.shape)
        hidden = hidden + table[: hidden.shape[1]].to(hidden.dtype)
        return hidden.flatten(0, 1).index_select(0, real_rows((frames + 1) // 2, hidden))

    def who_sees(self, sizes: Int64Array, shared: SharedItemRows | None) -> tuple[Extents, ...]:
        """Of a chunk all rows see each other. As of `contract`."""
        chunks = self.segments(sizes)
        lengths = (chunks.length + 1) // 2
        return (item_extents(lengths, None if shared is None else _of_chunks(shared, chunks, lengths)),)

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """The layers first ... stop - 1. shared: as of `enter`."""
        [extents] = extents_of(self, sizes.numpy(), shared)
        for layer in self.blocks[first:stop]:
            hidden = layer(hidden, extents)
        return hidden

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The mean of two rows, and the last norm."""
        rows = self.num_hidden(sizes.numpy())
        pairs = rows // 2
        if shared is not None:
            return self.model.ln_post(averaged_here(hidden, shared, pairs))
        starts = np.repeat(np.cumsum(rows) - rows - 2 * (np.cumsum(pairs) - pairs), pairs)
        first = on_device(starts + 2 * np.arange(pairs.sum()), hidden.device)
        return self.model.ln_post((hidden[first] + hidden[first + 1]) / 2)


def _of_chunks(shared: SharedItemRows, chunks: ItemSegments, lengths: Int64Array) -> SharedItemRows:
    """The same rows as those of chunks, so many of each, int64 [num_chunks]. chunks: of the clips."""
    return shared.in_order(np.arange(lengths.sum()), lengths, int(chunks.offsets[shared.num_whole]))


class Qwen25OmniAudioTower(_ChunkedAudio):
    """The encoder without its last matrix, which is the projector of the whole model."""

    def __init__(self, model: Qwen2_5OmniAudioEncoder) -> None:
        super().__init__(model)
        model.proj = nn.Identity()


class Qwen25OmniAudioEncoder(_ChunkedAudio):
    """The encoder by itself, with its last matrix. A row covers four frames."""

    def __init__(self, model: Qwen2_5OmniAudioEncoder) -> None:
        super().__init__(model)
        self.output_dim = model.config.output_dim

    def layers(self) -> list[LayerModules]:
        proj = self.model.proj
        last = projector(proj.in_features, proj.out_features, kind="linear", divisor=4, trainable=any_trainable(proj))
        return [*super().layers(), LayerModules(last, (proj,))]

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The mean of two rows, the last norm and the last matrix."""
        return self.model.proj(super().leave(hidden, sizes, shared))
