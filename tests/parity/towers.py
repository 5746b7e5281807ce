"""Vision encoders of the families for the tiny model, and examples for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from motet.core.example import Media
from motet.dispatch import LoadedExample
from motet.models.attention import ATTENTION
from motet.models.families.qwen2_vl import Qwen2VLEncoder
from motet.models.families.registry import ENCODERS
from motet.models.module import ModalityModule
from motet.models.projector import ProjectorConfig, build_projector
from parity.tiny import DIM

TOWERS = ("siglip", "qwen2_vl")
ROW_DIM = 12
"""Of patches of 2 x 2 pixels with 3 channels."""


def tower_module(family: str, frozen: Sequence[str]) -> ModalityModule:
    """The same parameters in every call, in float64. frozen: as of `tiny.build_model`."""
    torch.manual_seed(11)
    if family != "qwen2_vl":
        of_family = ENCODERS[family]
        options = {
            "siglip": {"image_size": 8, "vision_use_head": False},
            "siglip2": {"num_patches": 16, "vision_use_head": False},
            "pixtral": {"image_size": 8},
        }
        config = of_family.config(
            hidden_size=8,
            intermediate_size=12,
            num_attention_heads=2,
            num_hidden_layers=2,
            patch_size=2,
            attn_implementation=ATTENTION,
            **options[family],
        )
        encoder = of_family.adapter(of_family.model(config).to(torch.float64))
    else:
        config = Qwen2VLVisionConfig(
            depth=2, embed_dim=8, hidden_size=8, num_heads=2, mlp_ratio=2, patch_size=2, temporal_patch_size=1
        )
        encoder = Qwen2VLEncoder(Qwen2VisionTransformerPretrainedModel(config))
    module = ModalityModule(
        encoder,
        build_projector(8, DIM, ProjectorConfig()),
        train_encoder="image" not in frozen and "image encoder" not in frozen,
        train_projector="image" not in frozen,
    )
    return module.to(torch.float64)


def with_patches(example: LoadedExample, seed: int, tower: str = "") -> LoadedExample:
    """The example with images of twice as many rows and columns of patches, as blocks of 2 x 2 of them are joined."""
    rng = np.random.default_rng((seed, len(example.sequence.tokens)))
    media = []
    for phase, item in zip(example.sequence.media, example.media, strict=True):
        size = 2 * item.size
        values = rng.standard_normal((size.prod(), ROW_DIM)).astype(np.float32)
        media.append(Media(values, size) if phase == "image" else item)
    return replace(example, media=tuple(media))
