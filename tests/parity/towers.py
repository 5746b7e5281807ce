"""Vision encoders of the families for the tiny model, and examples for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig
from transformers.models.mllama.modeling_mllama import MllamaVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLPatchMerger,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger, Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from motet.core.example import Media
from motet.core.grid_positions import KEYS
from motet.dispatch import LoadedExample
from motet.models.attention import ATTENTION
from motet.models.exact import keep_float64
from motet.models.families.mllama import MllamaTower
from motet.models.families.qwen2_5_vl import Qwen25VLEncoder, Qwen25VLTower
from motet.models.families.qwen2_audio import Qwen2AudioTower
from motet.models.families.qwen2_vl import Qwen2VLEncoder, Qwen2VLTower
from motet.models.families.qwen3_vl import Qwen3VLEncoder, Qwen3VLTower
from motet.models.families.registry import ENCODERS
from motet.models.module import ModalityModule
from motet.models.projector import ProjectorConfig, build_projector
from motet.models.whole.merger import MergerProjector
from motet.models.whole.mllama import KeyProjector
from motet.models.whole.qwen3_vl import StackedMerger
from motet.models.whole.tiles import Newlines, Tiles, anyres_counts
from parity.tiny import DIM, QFORMER, RESAMPLER

_OPTIONS = {
    "siglip": {"image_size": 8, "vision_use_head": False},
    "siglip2": {"num_patches": 16, "vision_use_head": False},
    "pixtral": {"image_size": 8},
    "clip": {"image_size": 8},
    "eva_clip": {"image_size": 8, "k_bias": False, "use_rms_norm": True},
    "dinov2": {"image_size": 8, "mlp_ratio": 2},
    "internvl": {"image_size": [8, 8], "use_absolute_position_embeddings": True},
    "dinov3": {"num_register_tokens": 2, "pos_embed_rescale": 1.0},
}
"""Those of a family's own in its config."""
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout_prob", "projection_dropout")
"""What the rates are called, of which each family has some."""
_DROPOUTS_OF_QUERIES = ("hidden_dropout_prob", "attention_probs_dropout_prob")
TOWERS = (
    *(*_OPTIONS, "qwen2_vl", "whole qwen2_vl", "qwen2_5_vl", "whole qwen2_5_vl", "qwen3_vl"),
    *("whole qwen3_vl", "tiled siglip", "tiled internvl"),
)
"""Of whole models of Qwen's the mergers are the projector. Tiled images are of TILE x TILE patches each, of which four
become a row.
"""
TILE = 4
JOINED = {"joined siglip": {"downsample": 4}, "pooled clip": {"pool": 4}}
"""Towers of images without tiles, four of whose patches become a row."""
RASTERS = {"raster clip": None, "raster siglip": 2}
"""Towers whose tiles become one raster with newlines, in as many tiles' rows as said."""
SOUNDS = ("whisper", "joined whisper", "qwen2_audio", "whole qwen2_audio", "joined qwen2_5_omni_audio", "read whisper")
"""Towers of sound; three rows of joined ones become one."""
READ = {
    "read siglip": ("resampler", 3),
    "read clip": ("qformer", 3),
    "read qwen2_vl": ("qformer", 3),
    "read whisper": ("resampler", 3),
    "tiled read siglip": ("resampler", 4),
    "uneven read clip": ("qformer", 3),
}
"""Towers whose rows queries read, so many of each item, or of each tile: patches of some stand for no whole query."""
WIDE, NUM_KEYS = ("mllama",), 20
"""Towers whose images become one wide row each, and of how many rows that is."""
EVEN_TILES = Tiles(TILE, lambda sizes: sizes[:, 0] // TILE)
STACKED = {"whole qwen3_vl": 1}
"""Rows of inner blocks that stand beside an image's own ones, as one wide row."""
ROW_DIM = 12
"""Of patches of 2 x 2 pixels with 3 channels."""


def tower_module(family: str, frozen: Sequence[str], dropout: float = 0.0) -> ModalityModule:
    """The same parameters in every call, in float64. frozen: as of `tiny.build_model`. dropout: of all of the registry
    that HF drops out.
    """
    phase = phase_of(family)
    torch.manual_seed(11)
    projector, before, name = None, None, family.removeprefix("tiled ")
    if family in READ:
        kind, queries = READ[family]
        config = RESAMPLER if kind == "resampler" else QFORMER | dict.fromkeys(_DROPOUTS_OF_QUERIES, dropout)
        projector = build_projector(8, DIM, ProjectorConfig(kind=kind, queries=queries, config=config))
        before, name = EVEN_TILES if is_tiled(family) else None, family.rsplit(maxsplit=1)[-1]
    elif name != family:
        projector = build_projector(8, DIM, ProjectorConfig(downsample=4))
        before = EVEN_TILES
    if family in JOINED:
        projector, name = build_projector(8, DIM, ProjectorConfig(**JOINED[family])), family.split()[1]
    after = None
    if family in RASTERS:
        name, (before, after) = family.split()[1], raster_callbacks(RASTERS[family])
    if family in SOUNDS:
        encoder = sound_tower(family, dropout)
        joined = ProjectorConfig(downsample=3 if "joined" in family else 1)
        projector = projector or build_projector(8, DIM, joined)
    elif name in _OPTIONS:
        encoder = registry_tower(name, dropout=dropout)
    elif name.endswith("qwen2_5_vl"):
        config = Qwen2_5_VLVisionConfig(
            depth=3, hidden_size=8, intermediate_size=12, num_heads=2, patch_size=2, temporal_patch_size=1,
            window_size=8, fullatt_block_indexes=[1], out_hidden_size=8,
        )  # fmt: skip
        model = Qwen2_5_VisionTransformerPretrainedModel(config)
        if family == "whole qwen2_5_vl":
            encoder, projector = Qwen25VLTower(model), MergerProjector(8, DIM, Qwen2_5_VLPatchMerger, merge=2)
        else:
            encoder = Qwen25VLEncoder(model)
    elif family in WIDE:
        encoder = mllama_tower()
        projector = KeyProjector(encoder.output_dim, DIM, NUM_KEYS)
    elif family.endswith("qwen3_vl"):
        encoder, projector = qwen3_vl_tower(8, DIM, inner=[0] if family.startswith("whole") else None)
    else:
        config = Qwen2VLVisionConfig(
            depth=2, embed_dim=8, hidden_size=8, num_heads=2, mlp_ratio=2, patch_size=2, temporal_patch_size=1
        )
        model = Qwen2VisionTransformerPretrainedModel(config)
        if family == "whole qwen2_vl":
            encoder, projector = Qwen2VLTower(model), MergerProjector(8, DIM, PatchMerger, merge=2)
        else:
            encoder = Qwen2VLEncoder(model)
    module = ModalityModule(
        encoder,
        projector or build_projector(8, DIM, ProjectorConfig()),
        train_encoder=phase not in frozen and f"{phase} encoder" not in frozen,
        train_projector=phase not in frozen,
        before=before,
        after=after,
    )
    module = module.to(torch.float64)
    keep_float64(module)  # What these norms round would hide what differs, or look as if something did.
    return module


def raster_callbacks(most: int | None) -> tuple[Tiles, Newlines]:
    """Before a tower and behind its projector. most: as of `Newlines`."""
    newlines = Newlines(DIM, TILE, most)
    nn.init.normal_(newlines.image_newline)
    return Tiles(TILE, anyres_counts), newlines


def raster_sizes(tiles: np.ndarray) -> np.ndarray:
    """Sizes of images of so many rows and columns of tiles, int64 [n, 2], with margins: of RASTERS, int64 [n, 4].

    One of one tile is on a square, and one of one row of two is a video of as many frames.
    """
    sizes = np.concatenate([tiles, TILE * tiles - 1], axis=1)
    sizes[tiles.prod(axis=1) == 1] = 0
    sizes[(tiles == (1, 2)).all(axis=1)] = 2, 0, 0, 0
    return sizes


def mllama_tower() -> MllamaTower:
    """A tower on tiles of 2 x 2 patches, of which an image has up to four; an inner layer's rows go along."""
    config = MllamaVisionConfig(
        hidden_size=8, intermediate_size=12, attention_heads=2, num_hidden_layers=2, num_global_layers=1,
        image_size=4, patch_size=2, intermediate_layers_indices=[0], max_num_tiles=4, vision_output_dim=16,
        supported_aspect_ratios=[[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        attn_implementation=ATTENTION,
    )  # fmt: skip
    model = MllamaVisionModel(config)
    for name, parameter in model.named_parameters():
        if "gate" in name or name.endswith("class_embedding"):
            nn.init.normal_(parameter)  # All zero, or of no scale, as they are made.
    return MllamaTower(model)


def arrangements(sizes: np.ndarray) -> np.ndarray:
    """Rows and columns of tiles of images of so many rows and columns of something, int64 [n, 2]: of WIDE."""
    return np.where(sizes.prod(axis=1, keepdims=True) > 4, 2, np.minimum(sizes, 3))


def is_tiled(family: str) -> bool:
    """Whether images are of tiles that become no raster."""
    return family.startswith(("tiled", "uneven"))


def phase_of(family: str) -> str:
    """What items a tower takes."""
    return "audio" if family in SOUNDS else "image"


def sound_tower(family: str, dropout: float) -> nn.Module:
    """One of SOUNDS, of 8 values a row, for frames of ROW_DIM."""
    of_family = ENCODERS[family.rsplit(maxsplit=1)[-1]]
    sizes = {"d_model": 8, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 12}
    options = {"n_window": 4, "output_dim": 8} if "omni" in family else {}
    config = of_family.config(
        num_mel_bins=ROW_DIM,
        max_source_positions=200,
        attn_implementation=ATTENTION,
        **dict.fromkeys(_DROPOUTS, dropout),
        **sizes,
        **options,
    )
    adapter = Qwen2AudioTower if family.startswith("whole") else of_family.adapter
    return adapter(of_family.model(config))


def registry_tower(family: str, depth: int = 2, dropout: float = 0.0) -> nn.Module:
    """A tower of 8 values a row."""
    of_family = ENCODERS[family]
    config = of_family.config(
        hidden_size=8,
        intermediate_size=12,
        num_attention_heads=2,
        num_hidden_layers=depth,
        patch_size=2,
        attn_implementation=ATTENTION,
        **dict.fromkeys(_DROPOUTS, dropout),
        **_OPTIONS[family],
    )
    return of_family.adapter(of_family.model(config))


def qwen3_vl_tower(
    width: int, dim: int, inner: list[int] | None, depth: int = 2
) -> tuple[nn.Module, StackedMerger | None]:
    """The tower of a whole Qwen3-VL, whose rows of inner blocks go along, and its projector; or (None) by itself.

    Sides of images are of up to 24 patches, whose places lie between those of a table of 5 x 5.
    """
    config = Qwen3VLVisionConfig(
        depth=depth, hidden_size=width, intermediate_size=12, num_heads=2, patch_size=2, temporal_patch_size=1,
        out_hidden_size=dim if inner else width, num_position_embeddings=25, deepstack_visual_indexes=inner or [],
    )  # fmt: skip
    model = Qwen3VLVisionModel(config)
    return (Qwen3VLTower(model), StackedMerger(config)) if inner else (Qwen3VLEncoder(model), None)


def with_patches(example: LoadedExample, seed: int, family: str) -> LoadedExample:
    """The example with images of twice as many rows and columns of patches, as blocks of 2 x 2 of them are joined.

    Towers of whole models get videos: items of one to three frames. Others get tiles, as many as images had rows.
    Those of sound get clips of nine times as many frames.
    """
    rng = np.random.default_rng((seed, len(example.sequence.tokens)))
    tower, media = mllama_tower() if family in WIDE else None, []
    for phase, item in zip(example.sequence.media, example.media, strict=True):
        size = 2 * item.size
        if family in SOUNDS:
            size = 9 * item.size
        elif family.startswith("whole"):
            size = np.insert(2 * item.size, 0, rng.integers(1, 4))
        elif family in RASTERS and phase == "image":
            size = raster_sizes(item.size[None])[0]
        elif is_tiled(family):
            size = np.array([TILE * item.size[0], TILE])
        elif family in WIDE and phase == "image":
            size = arrangements(item.size[None])[0]
        num_rows = size.prod() + (Qwen2AudioTower.margin if family == "whole qwen2_audio" else 0)
        if family in RASTERS and phase == "image":
            num_rows = int(anyres_counts(size[None])[0]) * TILE**2
        if family in WIDE and phase == "image":
            num_rows *= tower.tile_patches
        values = rng.standard_normal((num_rows, ROW_DIM)).astype(np.float32)
        media.append(Media(values, size) if phase == phase_of(family) else item)
    if tower is None:
        return replace(example, media=tuple(media))
    # How many of an image's rows text sees; beside them items that are rows of the sequence.
    num_seen = [int(tower.key_rows(item.size[None])[0]) if len(item.size) == 2 else 1 for item in media]
    grids = np.array([[count, 1, 1, 1, KEYS] for count in num_seen], dtype=np.int64).reshape(-1, 5)
    return LoadedExample(replace(example.sequence, grids=grids), tuple(media))
