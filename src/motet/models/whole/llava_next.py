"""LLaVA-NeXT and LLaVA-OneVision: LLaVA on the tiles of an image, whose rows become one raster with newline rows.

(Liu et al. 2024, "LLaVA-NeXT"; Li et al. 2024, "LLaVA-OneVision", section 3.2.) LLaVA-OneVision resamples a large
raster. Each of several images of an example is one tile there, and so is a frame of a video.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

from motet.core.errors import UserError
from motet.models.stored import TensorInFile
from motet.models.whole.family import WholeFamily, WholeParts
from motet.models.whole.llava import llava_parts
from motet.models.whole.processor import AnyResTiles, check_token_counts
from motet.models.whole.projector import with_weights
from motet.models.whole.tiles import Newlines, Tiles, anyres_counts
from motet.models.whole.video_processor import TiledVideos

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_NEWLINE = ("image_newline", "model.image_newline")


def _next_parts(config: LlavaNextConfig, directory: WholeDirectory) -> WholeParts:
    return _tiled_parts(config, directory, None, AnyResTiles)


def _onevision_parts(config: LlavaOnevisionConfig, directory: WholeDirectory) -> WholeParts:
    said = str(config.vision_aspect_ratio)
    if not (found := re.fullmatch(r"anyres_max_(\d+)", said)) or not int(found.group(1)):
        raise UserError(
            f"{directory.file}: vision_aspect_ratio is {said!r}, which Motet does not compute; it must be "
            "'anyres_max_9', or such with another number."
        )
    check_token_counts(directory.path, vision_aspect_ratio=said)
    return _tiled_parts(config, directory, int(found.group(1)), partial(TiledVideos, squares=True))


def _tiled_parts(
    config: LlavaNextConfig | LlavaOnevisionConfig,
    directory: WholeDirectory,
    most: int | None,
    files: Callable[..., AnyResTiles],
) -> WholeParts:
    """most: as of `Newlines`. files: what images and videos become."""
    tower = config.vision_config
    side = tower.image_size // tower.patch_size
    canvases = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
    own, theirs = _NEWLINE
    newlines = partial(_newlines, config.text_config.hidden_size, side, most, directory.tensors_at({own: theirs}))
    return llava_parts(
        config,
        directory,
        files(tower.patch_size, tower.image_size, canvases),
        {"before": partial(Tiles, side, anyres_counts), "after": newlines},
        ((f"encoders.image.after.{own}", theirs),),
    )


def _newlines(dim: int, side: int, most: int | None, tensors: dict[str, TensorInFile]) -> Newlines:
    return with_weights(Newlines(dim, side, most), tensors)


LLAVA_NEXT = WholeFamily(LlavaNextForConditionalGeneration, _next_parts)
LLAVA_ONEVISION = WholeFamily(LlavaOnevisionForConditionalGeneration, _onevision_parts)
