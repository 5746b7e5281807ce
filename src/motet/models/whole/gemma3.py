"""Gemma 3 (Gemma Team 2025, section 2): Siglip, pooled to a fixed number of rows, which see each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from motet.models.build import EncoderConfig
from motet.models.whole.family import (
    VISION_TOWER,
    WholeBackboneConfig,
    WholeFamily,
    WholeParts,
    check_option,
    language_family,
    one_tower,
    vision_family,
)
from motet.models.whole.processor import Images
from motet.models.whole.projector import PooledProjectorConfig

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_PROJECTOR = "model.multi_modal_projector."
_WEIGHTS = {"norm.weight": "mm_soft_emb_norm.weight", "weight": "mm_input_projection_weight"}


def _parts(config: Gemma3Config, directory: WholeDirectory) -> WholeParts:
    where, tower = str(directory.file), config.vision_config
    side, rows = tower.image_size // tower.patch_size, config.mm_tokens_per_image
    sides = [count * count for count in range(1, side + 1) if side % count == 0]
    check_option(where, "mm_tokens_per_image", rows, *sides)
    names = {own: _PROJECTOR + theirs for own, theirs in _WEIGHTS.items()}
    encoder = EncoderConfig(
        family=vision_family(config, where, "siglip"),
        path=directory.path,
        projector=PooledProjectorConfig(
            tensors=directory.tensors_at(names), pool=side // math.isqrt(rows), eps=tower.layer_norm_eps
        ),
    )
    return one_tower(
        WholeBackboneConfig(
            family=language_family(config, where, "gemma3"),
            path=directory.path,
            config={"tie_word_embeddings": config.tie_word_embeddings},
            bidirectional=("image",),
        ),
        "image",
        encoder,
        Images.of(config.vision_config),
        VISION_TOWER,
        names,
    )


GEMMA3 = WholeFamily(Gemma3ForConditionalGeneration, _parts)
