"""Idefics3 (Laurençon et al. 2024, section 3.2) and SmolVLM (Marafioti et al. 2025): tiles, pixel shuffle, an LM.

Before the rows of each tile stand marks, tokens that say its place. SmolVLM's videos are not read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from motet.core.arrays import Int64Array
from motet.models.families.internvl import one_side
from motet.models.whole.family import (
    TowerConfig,
    WholeBackboneConfig,
    WholeFamily,
    WholeParts,
    check_option,
    language_family,
    one_tower,
)
from motet.models.whole.processor import SplitTiles
from motet.models.whole.projector import UnbiasedProjectorConfig
from motet.models.whole.tiles import Tiles

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_WEIGHTS = {"layers.0.weight": "model.connector.modality_projection.proj.weight"}


def _parts(family: str, config: Idefics3Config | SmolVLMConfig, directory: WholeDirectory) -> WholeParts:
    """family: of the tower."""
    where, tower = str(directory.file), config.vision_config
    tile, patch_size, joined = one_side(tower, "image_size"), one_side(tower, "patch_size"), config.scale_factor
    side = tile // patch_size
    check_option(where, f"the number of patches of a tile's side modulo scale_factor = {joined}", side % joined, 0)
    encoder = TowerConfig(
        family=family,
        path=directory.path,
        projector=UnbiasedProjectorConfig(kind="linear", downsample=joined**2, tensors=directory.tensors_at(_WEIGHTS)),
        made={"before": partial(Tiles, side, _counts)},
    )
    return one_tower(
        WholeBackboneConfig(
            family=language_family(config, where, "llama"),
            path=directory.path,
            config={"tie_word_embeddings": config.tie_word_embeddings},
        ),
        "image",
        encoder,
        SplitTiles(patch_size, tile),
        "model.vision_model.",
        _WEIGHTS,
        text="model.text_model.",
    )


def _counts(sizes: Int64Array) -> Int64Array:
    """Tiles of each image of `SplitImages`, int64 [num_images]."""
    tiles = sizes.prod(axis=1)
    return tiles + (tiles > 1)


def _idefics3(config: Idefics3Config, directory: WholeDirectory) -> WholeParts:
    return _parts("idefics3", config, directory)


def _smolvlm(config: SmolVLMConfig, directory: WholeDirectory) -> WholeParts:
    return _parts("smolvlm", config, directory)


IDEFICS3 = WholeFamily(Idefics3ForConditionalGeneration, _idefics3)
SMOLVLM = WholeFamily(SmolVLMForConditionalGeneration, _smolvlm)
