"""What the processor of a whole model does to an image or a clip, as plain values.

transformers reads the directory, so that what its files leave out is what the processor's class has by default.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor, AutoImageProcessor, WhisperFeatureExtractor

from motet.core.errors import UserError
from motet.models.config_file import one_line, quiet_transformers
from motet.models.whole.family import Areas, Clips, Images

_ONLY = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_convert_rgb": (True, None),
    "do_pad": (False, None),
    "do_pan_and_scan": (False, None),
}
"""Option of a processor -> the values that Motet computes."""


def image_options(path: Path, images: Images) -> dict[str, Any]:
    """The options of `data/processed_images.py: ProcessedImages` for a model in `path`.

    Raises UserError for a processor that is not there, that does more than that, or that makes another size.
    """
    processor = open_image_processor(path)
    where = f"model.path: the {type(processor).__name__} of {path}"
    check_processor(processor, where)
    size, crops = dict(processor.size), bool(getattr(processor, "do_center_crop", False))
    shortest_edge = size.pop("shortest_edge", None)
    made = dict(processor.crop_size) if crops else size
    if (shortest_edge is not None and not crops) or {key for key, side in made.items() if side} != {"height", "width"}:
        raise UserError(f"{where} has size = {dict(processor.size)}, which does not bring all images to one size.")
    if (made["height"], made["width"]) != images.size:
        raise UserError(
            f"{where} makes images of {made['height']} x {made['width']} pixels, and the vision tower takes "
            f"{images.size[0]} x {images.size[1]}."
        )
    if crops and shortest_edge is None:
        raise UserError(f"{where} resizes to {size} and crops, which Motet does not compute; it must be shortest_edge.")
    mean, std = normalisation(processor)
    return {
        "patch_size": images.patch_size,
        "size": images.size,
        "shortest_edge": shortest_edge,
        "resample": int(processor.resample),
        "mean": mean,
        "std": std,
    }


def area_options(path: Path, areas: Areas) -> dict[str, Any]:
    """The options of `data/area_images.py: AreaImages` for a model in `path`.

    Raises UserError for a processor that is not there, that is another, or that makes other patches.
    """
    processor = open_image_processor(path)
    where = f"model.path: the {type(processor).__name__} of {path}"
    check_processor(processor, where)
    if type(processor).__name__ != "Qwen2VLImageProcessorPil":
        raise UserError(f"{where} is not what Motet computes for this model; it must be a Qwen2VLImageProcessor.")
    sides = asdict(areas)
    for key, taken in sides.items():
        if (made := getattr(processor, key)) != taken:
            raise UserError(f"{where} has {key} = {made}, and the vision tower takes {taken}.")
    size = dict(processor.size)
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    if not least or not most or least > most:
        raise UserError(
            f"{where} has size = {size}; it must name the smallest area shortest_edge, and the largest longest_edge."
        )
    mean, std = normalisation(processor)
    resample = int(processor.resample)
    area = {"min_area": least, "max_area": most}
    return sides | area | {"mean": mean, "std": std, "resample": resample}


def clip_options(path: Path, clips: Clips) -> dict[str, Any]:
    """The options of `data/chunked_clips.py: ChunkedClips` for a model in `path`.

    Raises UserError for an extractor that is not there, that is another, or that makes other frames.
    """
    try:
        with quiet_transformers():
            extractor = AutoFeatureExtractor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"model.path: the feature extractor of {path} cannot be opened ({one_line(error)}).") from error
    where = f"model.path: the {type(extractor).__name__} of {path}"
    if type(extractor) is not WhisperFeatureExtractor:
        raise UserError(f"{where} is not what Motet computes for this model; it must be a WhisperFeatureExtractor.")
    # Mel filters of transformers end at 8 kHz, whatever the rate.
    only = {"sampling_rate": 16_000, "feature_size": clips.num_mels, "dither": 0.0, "padding_value": 0.0}
    for key, needed in (only | {"padding_side": "right", "nb_max_frames": clips.max_frames}).items():
        if (value := getattr(extractor, key)) != needed:
            raise UserError(f"{where} has {key} = {value!r}; for this model it must be {needed!r}.")
    return {
        "sampling_rate": extractor.sampling_rate,
        "num_mels": clips.num_mels,
        "n_fft": extractor.n_fft,
        "hop_length": extractor.hop_length,
        "max_seconds": float(extractor.chunk_length),
        "margin": clips.margin,
    }


def open_image_processor(path: Path) -> Any:
    """transformers' image processor of a directory, on Pillow. Raises UserError if it cannot be opened."""
    try:
        with quiet_transformers():
            return AutoImageProcessor.from_pretrained(
                path, backend="pil", local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        raise UserError(f"model.path: the image processor of {path} cannot be opened ({one_line(error)}).") from error


def check_processor(processor: Any, where: str) -> None:
    """Raise UserError for what no image processor may do, whatever its sizes. where: names it in the sentence."""
    for key, allowed in _ONLY.items():
        if (value := getattr(processor, key, None)) not in allowed:
            raise UserError(f"{where} has {key} = {value!r}, which Motet does not compute; it must be {allowed[0]!r}.")
    if abs(processor.rescale_factor * 255 - 1) > 1e-9:
        raise UserError(f"{where} has rescale_factor = {processor.rescale_factor}; it must be 1 / 255.")


def normalisation(processor: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the channels; those that change nothing if it does not normalise."""
    if not processor.do_normalize:
        return (0.0,), (1.0,)
    return tuple(processor.image_mean), tuple(processor.image_std)
