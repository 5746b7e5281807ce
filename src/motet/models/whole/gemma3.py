"""Gemma 3 (Gemma Team 2025, section 2): Siglip, pooled to a fixed number of rows, which see each other.

With pan and scan, crops of an image stand behind it, each with rows of its own, and text between them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from motet.core.arrays import Int64Array
from motet.models.whole.family import (
    VISION_TOWER,
    WholeBackboneConfig,
    WholeEncoderConfig,
    WholeFamily,
    WholeParts,
    check_option,
    language_family,
    one_tower,
    vision_family,
)
from motet.models.whole.processor import Images, PannedSquares, check_token_counts, pans_and_scans
from motet.models.whole.projector import PooledProjectorConfig
from motet.models.whole.tiles import Tiles

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_PROJECTOR = "model.multi_modal_projector."
_WEIGHTS = {"norm.weight": "mm_soft_emb_norm.weight", "weight": "mm_input_projection_weight"}


def _parts(config: Gemma3Config, directory: WholeDirectory) -> WholeParts:
    where, tower = str(directory.file), config.vision_config
    side, rows = tower.image_size // tower.patch_size, config.mm_tokens_per_image
    sides = [count * count for count in range(1, side + 1) if side % count == 0]
    check_option(where, "mm_tokens_per_image", rows, *sides)
    check_token_counts(directory.path, image_seq_length=rows)
    names = {own: _PROJECTOR + theirs for own, theirs in _WEIGHTS.items()}
    has_crops = pans_and_scans(directory.path)
    encoder = WholeEncoderConfig(
        family=vision_family(config, where, "siglip"),
        path=directory.path,
        made={"before": partial(Tiles, side, _squares)} if has_crops else {},
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
        PannedSquares(tower.patch_size, tower.image_size) if has_crops else Images.of(tower),
        VISION_TOWER,
        names,
    )


def _squares(sizes: Int64Array) -> Int64Array:
    """An image and its crops, of each size of `PannedImages`, int64 [num_images]."""
    return sizes[:, 0]


GEMMA3 = WholeFamily(Gemma3ForConditionalGeneration, _parts)
