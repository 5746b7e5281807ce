"""InternVL in transformers' format (Chen et al. 2024): tiles, four rows of a square joined, a norm, an MLP, an LM."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from transformers import InternVLConfig, InternVLForConditionalGeneration

from motet.core.arrays import Int64Array
from motet.models.families.internvl import one_side
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
from motet.models.whole.processor import CroppedTiles, check_token_counts
from motet.models.whole.projector import NormedProjectorConfig
from motet.models.whole.tiles import Tiles

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_PROJECTOR = "model.multi_modal_projector."
_WEIGHTS = {
    f"layers.{place}.{kind}": f"{name}.{kind}"
    for place, name in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2"))
    for kind in ("weight", "bias")
}


def _parts(config: InternVLConfig, directory: WholeDirectory) -> WholeParts:
    where, tower = str(directory.file), config.vision_config
    family = vision_family(config, where, "internvl")
    check_option(where, "projector_hidden_act", config.projector_hidden_act, "gelu")
    check_option(where, "vision_feature_select_strategy", config.vision_feature_select_strategy, "default")
    check_option(where, "vision_feature_layer", config.vision_feature_layer, -1)
    check_option(where, "downsample_ratio", config.downsample_ratio, 0.5)
    tile, patch_size = one_side(tower, "image_size"), one_side(tower, "patch_size")
    side = tile // patch_size
    check_option(where, "the number of patches of a tile's side modulo 2", side % 2, 0)
    check_token_counts(directory.path, image_seq_length=(side // 2) ** 2)
    weights = {own: _PROJECTOR + theirs for own, theirs in _WEIGHTS.items()}
    encoder = WholeEncoderConfig(
        family=family,
        path=directory.path,
        projector=NormedProjectorConfig(downsample=4, tensors=directory.tensors_at(weights)),
        made={"before": partial(Tiles, side, partial(_counts, side))},
    )
    return one_tower(
        WholeBackboneConfig(
            family=language_family(config, where, "qwen2", "qwen3", "llama"),
            path=directory.path,
            config={"tie_word_embeddings": config.tie_word_embeddings},
        ),
        "image",
        encoder,
        CroppedTiles(patch_size, tile),
        VISION_TOWER,
        weights,
    )


def _counts(side: int, sizes: Int64Array) -> Int64Array:
    """Tiles of each image of `CroppedImages`, int64 [num_images]."""
    return sizes[:, 0] // side


INTERNVL = WholeFamily(InternVLForConditionalGeneration, _parts)
