"""A causal LM, a vision transformer and an audio encoder made of shapes alone, for models without an HF family.

`core/shapes.py` says which layers there are and what they cost; here they are computed, with random weights. The LM and
a vision transformer without a position table turn queries and keys with the position (RoPE), which has no parameters.
"""

from __future__ import annotations

from dataclasses import field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.shapes import Transformer, audio_encoder, vit
from motet.core.spec import Module
from motet.models.attention import Extents, PackedItems
from motet.models.context_items import SharedItemRows
from motet.models.extents import extents_of
from motet.models.families.audio import AudioEncoder
from motet.models.families.patches import add_class_rows, item_extents, rows_here, without_class_rows
from motet.models.families.shaped_layer import LAYER_SCALE, ShapedLayer, shaped_norm
from motet.models.layers import LayerModules, any_trainable
from motet.models.rotary import Rotation
from motet.on_device import on_device

_ROPE_BASE = 10_000.0
"""Of a vision transformer; that of an LM is an option of its config."""


class _ShapedConfig(PreTrainedConfig):
    """shape: the fields of `core.shapes.Transformer`. Other options are as in `core/shapes.py`."""

    shape: dict[str, Any] = field(default_factory=dict)
    num_layers: int = 1

    @property
    def transformer(self) -> Transformer:
        """The shape of a layer."""
        return Transformer(**self.shape)

    @property
    def hidden_size(self) -> int:
        """The width of a row."""
        return self.transformer.hidden

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.transformer.head_width


class ShapedLMConfig(_ShapedConfig):
    """The options of `ShapedCausalLM`; transformers fills in `rope_parameters`."""

    model_type = "motet_shaped_lm"

    vocab_size: int = 1
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    rope_parameters: dict[str, Any] | None = None

    @property
    def num_attention_heads(self) -> int:
        """Heads of queries."""
        return self.transformer.num_heads

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.transformer.num_kv_heads or self.transformer.num_heads


class ShapedVisionConfig(_ShapedConfig):
    """The options of `ShapedVisionTransformer`. num_positions: 0 if there is no table."""

    model_type = "motet_shaped_vision"

    row_dim: int = 1
    class_row: bool = False
    num_positions: int = 0


class ShapedAudioConfig(_ShapedConfig):
    """The options of `ShapedAudioTransformer`."""

    model_type = "motet_shaped_audio"

    num_mel_bins: int = 1
    num_positions: int = 1


class _Shaped(PreTrainedModel):
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ShapedLayer) and module.attention_scale is not None:
            init.constant_(module.attention_scale, LAYER_SCALE)
            init.constant_(module.mlp_scale, LAYER_SCALE)


class ShapedDecoder(nn.Module):
    """Layers and the last norm of an LM."""

    rotary_emb = None

    def __init__(self, config: ShapedLMConfig) -> None:
        super().__init__()
        shape = config.transformer
        self.rope_base = config.rope_parameters["rope_theta"]
        self.embed_tokens = nn.Embedding(config.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(ShapedLayer(shape) for _ in range(config.num_layers))
        self.norm = shaped_norm(shape.norm, shape.hidden)

    def forward(
        self, inputs_embeds: Tensor, position_ids: Tensor, segments: PackedItems, use_cache: bool = False
    ) -> SimpleNamespace:
        """inputs_embeds [1, rows, dim], position_ids int64 [1, rows] -> `last_hidden_state` [1, rows, dim]."""
        hidden = inputs_embeds
        rotation = shaped_rotation(position_ids[0], hidden, self.layers[0].shape.head_width, self.rope_base)
        for layer in self.layers:
            hidden = layer(hidden, segments, rotation)
        return SimpleNamespace(last_hidden_state=self.norm(hidden))


class ShapedCausalLM(_Shaped):
    """A causal LM as `core.shapes.language_model` describes it."""

    config_class = ShapedLMConfig

    def __init__(self, config: ShapedLMConfig) -> None:
        super().__init__(config)
        self.model = ShapedDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.shape = config.transformer

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of the tokens."""
        return self.model.embed_tokens


class ShapedVisionTransformer(_Shaped):
    """What `core.shapes.vit` describes."""

    config_class = ShapedVisionConfig

    def __init__(self, config: ShapedVisionConfig) -> None:
        super().__init__(config)
        shape = config.transformer
        self.patches = nn.Linear(config.row_dim, shape.hidden)
        num_rows = config.num_positions and config.num_positions + config.class_row
        self.positions = nn.Embedding(num_rows, shape.hidden) if num_rows else None
        self.class_row = nn.Embedding(1, shape.hidden) if config.class_row else None
        self.layers = nn.ModuleList(ShapedLayer(shape) for _ in range(config.num_layers))
        self.norm = shaped_norm(shape.norm, shape.hidden)


class ShapedAudioTransformer(_Shaped):
    """What `core.shapes.audio_encoder` describes, with the names that `AudioEncoder` reads."""

    config_class = ShapedAudioConfig
    dropout = layerdrop = 0.0

    def __init__(self, config: ShapedAudioConfig) -> None:
        super().__init__(config)
        shape = config.transformer
        self.conv1 = nn.Conv1d(config.num_mel_bins, shape.hidden, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(shape.hidden, shape.hidden, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.num_positions, shape.hidden)
        self.layers = nn.ModuleList(ShapedLayer(shape) for _ in range(config.num_layers))
        self.layer_norm = shaped_norm(shape.norm, shape.hidden)


class ShapedVisionEncoder(nn.Module):
    """Rows are patches in the order of a sequence, sizes are (rows,); neighbours in it are joined by a projector."""

    grid = None
    halves = (ShapedLayer.attention_half, ShapedLayer.mlp_half)

    def __init__(self, model: ShapedVisionTransformer) -> None:
        super().__init__()
        self.model = model
        self.output_dim = model.config.hidden_size

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.layers)

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """As many rows as patches. Raises UserError for an image with more patches than the position table."""
        check_num_positions("patches", sizes, self.model.config.num_positions)
        return sizes[:, 0]

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        spec = vit(
            "image",
            config.transformer,
            config.num_layers,
            row_dim=config.row_dim,
            num_positions=config.num_positions,
            class_row=config.class_row,
        )
        stem = [each for each in (model.patches, model.positions, model.class_row) if each is not None]
        return described_layers(spec, [stem, *([block] for block in self.blocks), [model.norm]])

    @property
    def class_rows(self) -> int:
        """Rows before those of each image."""
        return int(self.model.config.class_row)

    def spare(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest image, a patch of zeros."""
        return values.new_zeros(1, self.model.config.row_dim), torch.ones(1, 1, dtype=torch.int64)

    def forward(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        hidden = self.through(self.enter(values, sizes, shared), sizes, 0, len(self.model.layers), shared)
        return self.leave(hidden, sizes, shared)

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """Patch rows with their positions, [sum(rows + class rows), dim]. shared: as of `PatchEncoder`."""
        model, counts = self.model, sizes.numpy()[:, 0]
        hidden = model.patches(values)
        if model.positions is not None:
            positions = on_device(rows_here(_within_items(counts), shared), hidden.device)
            hidden = hidden + model.positions(positions + self.class_rows)
        if model.class_row is None:
            return hidden
        class_row = model.class_row.weight[0]
        if model.positions is not None:
            class_row = class_row + model.positions.weight[0]
        return add_class_rows(hidden, class_row, counts, shared)

    def who_sees(self, sizes: Int64Array, shared: SharedItemRows | None) -> tuple[Extents, ...]:
        """Of an image all rows see each other. As of `contract`."""
        here = None if shared is None else shared.with_class_rows(self.class_rows)
        return (item_extents(sizes[:, 0] + self.class_rows, here),)

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """The layers first ... stop - 1. shared: as of `enter`."""
        config, counts = self.model.config, sizes.numpy()[:, 0] + self.class_rows
        [segments] = extents_of(self, sizes.numpy(), shared)
        shared = None if shared is None else shared.with_class_rows(self.class_rows)
        rotation = None
        if not config.num_positions:
            positions = rows_here(_within_items(counts), shared)
            rotation = shaped_rotation(on_device(positions, hidden.device), hidden, config.head_dim)
        hidden = hidden[None]
        for layer in self.blocks[first:stop]:
            hidden = layer(hidden, segments, rotation)
        return hidden[0]

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """The images' own rows behind the last norm, [sum(rows), dim]."""
        rows = self.model.norm(hidden)
        return without_class_rows(rows, sizes.numpy()[:, 0], shared=shared) if self.class_rows else rows


class ShapedAudioEncoder(AudioEncoder):
    """Whisper's encoder with layers of any shape."""

    halves = (ShapedLayer.attention_half, ShapedLayer.mlp_half)

    def __init__(self, model: ShapedAudioTransformer) -> None:
        nn.Module.__init__(self)
        self.model = model
        self.output_dim = model.config.hidden_size
        self.max_frames = 2 * model.config.num_positions

    def num_outputs(self, sizes: Int64Array) -> Int64Array:
        """Half the number of frames, rounded up. Raises UserError for a clip with more frames than positions."""
        check_num_positions("frames", sizes, self.max_frames)
        return super().num_outputs(sizes)

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        sizes = {"num_mel_bins": config.num_mel_bins, "num_positions": config.num_positions}
        spec = audio_encoder("audio", config.transformer, config.num_layers, **sizes)
        stem = [[model.conv1], [model.conv2, model.embed_positions]]
        return described_layers(spec, [*stem, *([block] for block in self.blocks), [model.layer_norm]])


def shaped_rotation(positions: Tensor, like: Tensor, head_dim: int, base: float = _ROPE_BASE) -> Rotation:
    """positions int64 [rows] -> the rotation of queries and keys, in at least float32, on the device of `like`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    channels = torch.arange(0, head_dim, 2, dtype=dtype, device=like.device)
    angles = (positions[:, None] * base ** (-channels / head_dim)).repeat(1, 2)
    return Rotation(angles.cos(), angles.sin())


def check_num_positions(what: str, sizes: Int64Array, most: int) -> None:
    """Raise UserError for an item longer than a position table has rows. most: these rows; 0: there is no table."""
    if most and (longest := int(sizes.max(initial=0))) > most:
        raise UserError(f"an item of {longest:,} {what} is longer than the {most:,} that num_positions has room for")


def _within_items(counts: Int64Array) -> Tensor:
    """The position of each row in its item, int64 [sum(counts)]."""
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(np.arange(counts.sum()) - starts)


def described_layers(spec: Module, modules: list[list[nn.Module]]) -> list[LayerModules]:
    """The layers of a spec with the modules of each."""
    return [
        LayerModules(replace(layer, trainable=any_trainable(*parts)), tuple(parts))
        for layer, parts in zip(spec.layers, modules, strict=True)
    ]
