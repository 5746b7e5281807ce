"""What transformers' processors must do so that an exported encoder is given what it was trained with.

The file beside an encoder's weights says how its media become rows, and a recipe may choose another size. Mean,
standard deviation, filter and windows are the file's (`input/rows.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.core.text_files import read_optional_object
from motet.data.audio import AudioTransform
from motet.data.images import ImageTransform
from motet.data.transforms import Transform

if TYPE_CHECKING:
    from motet.train.recipe.recipe import Recipe

_FILES = {"preprocessor_config.json": None, "processor_config.json": ("image_processor", "feature_extractor")}
"""HF's files with options of preprocessing, and the tables in the file that may have them; None: the file itself."""
_KINDS = "image_processor_type", "feature_extractor_type"
_OF_ONE_SIZE = ("CLIP", "Siglip", "ViT", "DeiT", "Bit", "DINOv3ViT")
"""Processors that make an image of any aspect one of `size`, height by width, as `fixed_size` does."""
_OF_CLIPS = ("WhisperFeatureExtractor",)


def preprocessed(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """What HF's files in a directory say that media become, with the name of the file."""
    found = []
    for name, tables in _FILES.items():
        stored = read_optional_object(path / name)
        parts = [stored] if tables is None else [stored.get(table) for table in tables]
        found += [(name, part) for part in parts if isinstance(part, dict)]
    return found


def processors_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Encoder -> its preprocessor_config.json, of those from a directory that has one, where it can say the transform.

    It cannot say `max_pixels_side`, which bounds a side and not an area, `buckets`, and what a callback `before` does.
    """
    found = {}
    for name, part in recipe.modules.encoders.items():
        if part.path is not None and part.before is None:
            made = (_as_trained(recipe.transform(name), stored) for _, stored in preprocessed(part.path))
            if said := next(filter(None, made), None):
                found[name] = said
    return found


def _as_trained(transform: Transform, stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the file says, as trained; None where no processor does that."""
    kind = next((str(stored[key]) for key in _KINDS if key in stored), "")
    left = {key: value for key, value in stored.items() if key not in (*_KINDS, "processor_class")}
    if isinstance(transform, AudioTransform) and kind in _OF_CLIPS:
        return left | {"feature_extractor_type": kind, "feature_size": transform.num_mels}
    of_image = kind.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    is_known = of_image in {f"{name}ImageProcessor" for name in _OF_ONE_SIZE}
    if not isinstance(transform, ImageTransform) or not is_known:
        return None
    if (size := transform.fixed_size) is None or transform.channels != 3:
        return None
    values = {"image_mean": transform.mean, "image_std": transform.std}
    defaults = {key: [*each] if len(each) == 3 else [*each] * 3 for key, each in values.items()}
    return (
        defaults
        | {key: value for key, value in left.items() if key not in ("crop_size", "do_pad", "pad_size")}
        | {
            "image_processor_type": of_image,
            "size": {"height": size, "width": size},
            "do_resize": True,
            "resample": transform.resample,
            "do_center_crop": False,
        }
    )
