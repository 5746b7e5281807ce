"""The encoder that Whisper and its descendants share: convolutions, then full attention, over padded clips.

HF pads every clip to 30 s, and the padding affects the clip's rows. Here clips are padded to the longest of the call,
and the padding affects nothing: the first convolution's output is zeroed there, as the second convolution would see it
in a call with this clip alone, and attention is masked. So a clip's rows do not depend on other clips, and a clip of
full length gets HF's result.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu

from motet.core.arrays import Int64Array, rows_of_runs
from motet.core.errors import UserError
from motet.core.shapes import Transformer, convolution, final_norm
from motet.models.attention import Extents, PaddedClips
from motet.models.context_items import ContextItems, SharedItemRows
from motet.models.contract import AudioRows
from motet.models.extents import extents_of
from motet.models.layers import LayerModules, any_trainable
from motet.models.row_copies import rows_wanted
from motet.on_device import on_device


def _attention(layer: nn.Module, hidden: Tensor, extents: PaddedClips) -> Tensor:
    attended, _ = layer.self_attn(layer.self_attn_layer_norm(hidden), attention_mask=extents)
    return hidden + dropout(attended, p=layer.dropout, training=layer.training)


def _mlp(layer: nn.Module, hidden: Tensor, extents: PaddedClips) -> Tensor:
    inner = layer.activation_fn(layer.fc1(layer.final_layer_norm(hidden)))
    inner = layer.fc2(dropout(inner, p=layer.activation_dropout, training=layer.training))
    return hidden + dropout(inner, p=layer.dropout, training=layer.training)


class AudioEncoder(nn.Module):
    """Rows are log-mel frames, sizes are (frames,). Clips are padded, so the phase has the padded cost.

    pooled: number of rows that are averaged into one before the last norm.
    margin: frames behind a clip's own, as far as there are positions, which the convolutions see and nothing else.
    """

    cost = "padded"
    pooled = 1
    margin = 0
    halves = (_attention, _mlp)

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if model.layerdrop:
            raise UserError(f"{type(model).__name__}'s encoder_layerdrop must be 0: ranks could not skip a layer alike")
        self.model = model
        self.output_dim = model.config.d_model
        self.takes = AudioRows(model.config.num_mel_bins)
        self.max_frames = 2 * model.config.max_source_positions

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    def num_inputs(self, sizes: Int64Array) -> Int64Array:
        """Frames of each clip, those behind its own included."""
        return np.minimum(sizes[:, 0] + self.margin, self.max_frames)

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Half the number of frames, rounded up. Raises UserError for a clip with more frames than positions."""
        if (longest := int(sizes.max(initial=0))) > self.max_frames:
            raise UserError(
                f"a clip of {longest} frames is longer than the {self.max_frames} that its encoder has positions for; "
                "let its transform's max_seconds bound it"
            )
        return (sizes[:, 0] + 1) // 2

    def layers(self) -> list[LayerModules]:
        """Two convolutions, the transformer layers, and the last norm."""
        model, config = self.model, self.model.config
        hidden, strided = config.d_model, (model.conv2, model.embed_positions)
        first = convolution(config.num_mel_bins, hidden, trainable=any_trainable(model.conv1))
        second = convolution(
            hidden,
            hidden,
            stride=2,
            divisor=2,
            num_positions=config.max_source_positions,
            trainable=any_trainable(*strided),
        )
        shape = Transformer(
            hidden,
            config.encoder_ffn_dim,
            config.encoder_attention_heads,
            activation=config.activation_function,
            biases=("query", "value", "output", "mlp"),
        )
        norm = final_norm(hidden, divisor=2 * self.pooled, trainable=any_trainable(model.layer_norm))
        return [
            LayerModules(first, (model.conv1,)),
            LayerModules(second, strided),
            *(LayerModules(shape.layer(divisor=2, trainable=any_trainable(block)), (block,)) for block in self.blocks),
            LayerModules(norm, (model.layer_norm,)),
        ]

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The shortest clip that becomes a row, of zeros."""
        sizes = torch.full((1, 1), 2 * self.pooled)
        return values.new_zeros(int(self.num_inputs(sizes.numpy())[0]), self.model.conv1.in_channels), sizes

    def forward(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.through(self.enter(values, sizes, shared), sizes, 0, len(self.model.layers), shared)
        return self.leave(hidden, sizes, shared)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The convolutions: rows of all clips, each padded to the longest, [num_clips * longest, dim].

        shared: the rows that are here, of layers, where ranks share clips: of these alone then, [len(shared.own), dim].
        """
        model, frames = self.model, self.num_inputs(sizes.numpy())
        if shared is not None:
            hidden = convolved_here(model, values, shared.with_rows(frames), shared)
            positions = on_device(shared.rows.positions[shared.own], hidden.device)
            hidden = hidden + model.embed_positions.weight[positions]
            return dropout(hidden, p=model.dropout, training=model.training)
        padded, longest = values.new_empty(len(frames), int(frames.max())), int(self.num_hidden(sizes.numpy()).max())
        hidden = convolved(model, values, real_rows(frames, padded), *padded.shape)[:, :longest]
        hidden = hidden + model.embed_positions.weight[: hidden.shape[1]]
        return dropout(hidden, p=model.dropout, training=model.training).flatten(0, 1)

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """The layers first ... stop - 1. shared: as of `enter`."""
        [extents] = extents_of(self, sizes.numpy(), shared)
        hidden = hidden[None]
        for layer in self.blocks[first:stop]:
            hidden = layer(hidden, extents)
        return hidden[0]

    def who_sees(self, sizes: Int64Array, shared: SharedItemRows | None) -> tuple[Extents, ...]:
        """Of a clip all rows see each other. As of `contract`."""
        return (PaddedClips(self.num_hidden(sizes)) if shared is None else ContextItems(shared, causal=False),)

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The last norm, and the clips' own rows."""
        if shared is not None:
            return self.model.layer_norm(hidden)
        normed = self.model.layer_norm(hidden.unflatten(0, (len(sizes), -1)))
        return normed.flatten(0, 1).index_select(0, real_rows(self.num_hidden(sizes.numpy()), normed))

    def num_hidden(self, sizes: Int64Array) -> Int64Array:
        """Rows of each clip in the layers, int64 [num_clips]."""
        return AudioEncoder.num_outputs(self, sizes)


def convolved(model: nn.Module, values: Tensor, places: Tensor, num_clips: int, longest: int) -> Tensor:
    """Frames [n, mels] through Whisper's convolutions -> [num_clips, (longest + 1) // 2, dim].

    places: int64 [n], where each stands among those of clips of `longest` frames. All else affects nothing.
    """
    clips = values.new_zeros(num_clips * longest, values.shape[1]).index_copy(0, places, values)
    is_real = values.new_zeros(num_clips * longest).index_fill(0, places, 1).view(num_clips, 1, longest)
    hidden = gelu(model.conv1(clips.view(num_clips, longest, -1).transpose(1, 2))) * is_real
    return gelu(model.conv2(hidden)).transpose(1, 2)


def convolved_here(model: nn.Module, values: Tensor, frames: SharedItemRows, hidden: SharedItemRows) -> Tensor:
    """As `convolved`, where ranks share clips: the rows behind the convolutions that are here, [len(hidden.own), dim].

    values: the frames that are here. frames, hidden: who has which frames, and which rows behind. A collective: a row
    sees five frames, of which other ranks may have some.
    """
    lengths, starts = frames.rows.lengths, frames.rows.starts

    def seen(rank: int) -> tuple[Int64Array, Int64Array]:
        first, counts = hidden.rows.runs_of(rank)
        begin = np.maximum(2 * first - 2, 0)
        return begin, np.where(counts > 0, np.minimum(2 * (first + counts) + 1, lengths) - begin, 0)

    def wanted(rank: int) -> Int64Array:
        begin, counts = seen(rank)
        return rows_of_runs(starts + begin, counts)

    values = rows_wanted(values, frames, wanted)
    first, counts = hidden.rows.runs_of(hidden.rank)
    begin, num_frames = seen(hidden.rank)
    # Each run is a clip that begins two frames before the one in the middle of what its first row sees.
    longest, clips = 2 * int(counts.max()) + 3, np.arange(len(counts))
    places = rows_of_runs(clips * longest + begin - (2 * first - 2), num_frames)
    rows = convolved(model, values, on_device(places, values.device), len(clips), longest)
    own = rows_of_runs(clips * rows.shape[1] + 1, counts)
    return rows.flatten(0, 1).index_select(0, on_device(own, rows.device))


def averaged_here(hidden: Tensor, shared: SharedItemRows, pairs: Int64Array) -> Tensor:
    """Means of two rows each, where ranks share clips: those that are here. A collective.

    hidden: [len(shared.own), dim]. pairs: of each whole clip, int64 [num_clips].
    """
    means = shared.with_rows(pairs)

    def wanted(rank: int) -> Int64Array:
        first, counts = means.rows.runs_of(rank)
        return rows_of_runs(shared.rows.starts + 2 * first, 2 * counts)

    rows = rows_wanted(hidden, shared, wanted)
    return rows.view(len(rows) // 2, 2, rows.shape[1]).mean(1)


def real_rows(counts: Int64Array, padded: Tensor) -> Tensor:
    """Positions, int64 [sum(counts)], of the first counts[i] rows of each clip in padded.flatten(0, 1).

    padded: [num_clips, longest, ...].
    """
    starts = np.arange(len(counts)) * padded.shape[1] - (np.cumsum(counts) - counts)
    return on_device(np.arange(counts.sum()) + np.repeat(starts, counts), padded.device)
