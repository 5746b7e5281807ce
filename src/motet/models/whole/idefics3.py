"""Idefics3 (Laurençon et al. 2024, section 3.2) and SmolVLM (Marafioti et al. 2025): tiles, pixel shuffle, an LM.

Before the rows of each tile stand marks, tokens that say its place. A frame of SmolVLM's videos is one tile.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.smolvlm.processing_smolvlm import (
    DEFAULT_CHAT_TEMPLATE,
    DEFAULT_MEDIA_OUTTRO,
    DEFAULT_VIDEO_INTRO,
    FRAME_TIMESTAMP_MESSAGE,
)

from motet.core.arrays import Int64Array
from motet.core.example import FrameTexts
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
from motet.models.whole.processor import SplitTiles, check_token_counts
from motet.models.whole.projector import UnbiasedProjectorConfig
from motet.models.whole.tiles import Tiles
from motet.models.whole.video_processor import FrameTiles

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_WEIGHTS = {"layers.0.weight": "model.connector.modality_projection.proj.weight"}


def _parts(
    family: str, config: Idefics3Config | SmolVLMConfig, directory: WholeDirectory, files: type[SplitTiles]
) -> WholeParts:
    """family: of the tower. files: what images and videos become."""
    where, tower = str(directory.file), config.vision_config
    tile, patch_size, joined = one_side(tower, "image_size"), one_side(tower, "patch_size"), config.scale_factor
    side = tile // patch_size
    check_option(where, f"the number of patches of a tile's side modulo scale_factor = {joined}", side % joined, 0)
    check_token_counts(directory.path, image_seq_len=(side // joined) ** 2)
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
        files(patch_size, tile),
        "model.vision_model.",
        _WEIGHTS,
        text="model.text_model.",
    )


def _counts(sizes: Int64Array) -> Int64Array:
    """Tiles of each image or video of `SplitVideos`, int64 [num_items]."""
    tiles = sizes.prod(axis=1)
    return np.where(sizes[:, 1] == 0, sizes[:, 0], tiles + (tiles > 1))


def _idefics3(config: Idefics3Config, directory: WholeDirectory) -> WholeParts:
    return _parts("idefics3", config, directory, SplitTiles)


def _smolvlm(config: SmolVLMConfig, directory: WholeDirectory) -> WholeParts:
    return _parts("smolvlm", config, directory, FrameTiles)


IDEFICS3 = WholeFamily(Idefics3ForConditionalGeneration, _idefics3)
SMOLVLM = WholeFamily(
    SmolVLMForConditionalGeneration,
    _smolvlm,
    frames=FrameTexts(
        template=DEFAULT_CHAT_TEMPLATE,
        begin=DEFAULT_VIDEO_INTRO,
        frame=FRAME_TIMESTAMP_MESSAGE,
        end=DEFAULT_MEDIA_OUTTRO,
    ),
)
