"""What the processor of a whole model does to an image or a clip, as the options of a transform (`data/`).

transformers reads the directory, so that what its files leave out is what the processor's class has by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    Gemma3Processor,
    PreTrainedConfig,
    WhisperFeatureExtractor,
)
from transformers.models.mllama.image_processing_pil_mllama import get_all_supported_aspect_ratios

from motet.core.crops import CropRule
from motet.core.errors import UserError
from motet.core.text_files import read_optional_object
from motet.models.config_file import one_line, quiet_transformers

_ONLY = {"do_resize": (True,), "do_rescale": (True,), "do_convert_rgb": (True, None)}
"""Option of every processor -> the values that Motet computes."""
TO_ONE_SIZE = ("CLIP", "Siglip", "Llava", "Gemma3", "ViT", "DeiT", "Bit", "Blip", "ChineseCLIP")
"""Kinds of processors that resize, crop and normalise, and do nothing that their options do not say."""
_UNPADDED = {"do_pad": (False, None), "do_pan_and_scan": (False, None)}
"""The same, of processors that make one image of each."""


@dataclass(frozen=True)
class Images:
    """Images that come to one size before the encoder of a whole model is given them (`ProcessedImages`).

    size: (height, width) that its image processor must make.
    """

    patch_size: int
    size: tuple[int, int]

    @classmethod
    def of(cls, tower: PreTrainedConfig) -> Images:
        """The images that a tower takes which reads squares of one size."""
        return cls(tower.patch_size, (tower.image_size, tower.image_size))

    def options(self, path: Path) -> dict[str, Any]:
        """The options of the transform that does what the processor in `path` does.

        Raises UserError for a processor that is not there, that does more than that, or that makes another size.
        """
        processor, where = _opened_as(path, *TO_ONE_SIZE)
        check_processor(where, processor, **_UNPADDED)
        size, crops = dict(processor.size), bool(getattr(processor, "do_center_crop", False))
        shortest_edge = size.pop("shortest_edge", None)
        made = dict(processor.crop_size) if crops else size
        sides = {key for key, side in made.items() if side}
        if (shortest_edge is not None and not crops) or sides != {"height", "width"}:
            raise UserError(f"{where} has size = {dict(processor.size)}, which does not bring all images to one size.")
        check_made(where, (made["height"], made["width"]), self.size)
        if crops and shortest_edge is None:
            raise UserError(
                f"{where} resizes to {size} and crops, which Motet does not compute; it must be shortest_edge."
            )
        own = {"patch_size": self.patch_size, "size": self.size, "shortest_edge": shortest_edge}
        return own | values_of_pixels(processor)


@dataclass(frozen=True)
class PannedSquares:
    """Images that are squeezed into squares, crops of them behind them (`PannedImages`): Gemma 3's pan and scan.

    What the directory does not say of crops is as transformers' Gemma3Processor has it.

    tile: side of a square in pixels; what is less than a patch at its edges is left out.
    """

    patch_size: int
    tile: int

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`. Raises UserError also for crops of which some could be empty."""
        processor, where = _opened_as(path, "Gemma3")
        check_processor(where, processor)
        check_made(where, (processor.size.get("height"), processor.size.get("width")), (self.tile, self.tile))
        known = Gemma3Processor.images_kwargs
        names = [f"pan_and_scan_{name}" for name in ("min_crop_size", "max_num_crops", "min_ratio_to_activate")]
        stored = [getattr(processor, name, None) for name in names]
        least, most, ratio = (known[name] if each is None else each for name, each in zip(names, stored))
        if not 1 <= most <= least:
            raise UserError(
                f"{where} has {names[1]} = {most} and {names[0]} = {least}; a crop could be empty: they must be at "
                "least 1, and in order."
            )
        own = {"patch_size": self.patch_size, "tile": self.tile, "crops": CropRule(int(least), int(most), ratio)}
        return own | values_of_pixels(processor)


def pans_and_scans(path: Path) -> bool:
    """Whether the image processor of a directory puts crops behind images. Raises UserError if it cannot be opened."""
    return bool(getattr(opened_processor(path)[0], "do_pan_and_scan", False))


@dataclass(frozen=True)
class ByProcessor:
    """Images that the directory's own processor prepares, of a model that Motet does not know (`ImagesByProcessor`).

    shape: (channels, height, width) of what it makes of every image. num_rows: that its values lie in.
    """

    shape: tuple[int, int, int]
    num_rows: int

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`."""
        return {"path": path, "shape": self.shape, "num_rows": self.num_rows}


@dataclass(frozen=True)
class AnyResTiles:
    """Images that are cut into tiles before the encoder of a whole model is given them (`AnyResImages`).

    tile:     side of a tile in pixels; what is less than a patch at its edges is left out.
    canvases: (height, width) of each, which its image processor must have, too.
    squares:  whether images are put on squares where an example has several (LLaVA-OneVision).
    """

    patch_size: int
    tile: int
    canvases: tuple[tuple[int, int], ...]
    squares: bool = False

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`. Raises UserError also for canvases that are others, or not made of tiles."""
        processor, where = _opened_as(path, "LlavaNext", "LlavaOnevision")
        check_processor(where, processor)
        size = dict(processor.size)
        edge = size.get("shortest_edge")
        made = (edge, edge) if edge else (size.get("height"), size.get("width"))
        check_made(where, made, (self.tile, self.tile))
        if getattr(processor, "do_center_crop", False):
            crop = dict(processor.crop_size)
            check_made(where, (crop.get("height"), crop.get("width")), (self.tile, self.tile))
        theirs = tuple((int(height), int(width)) for height, width in processor.image_grid_pinpoints)
        if theirs != self.canvases:
            raise UserError(
                f"{where} has image_grid_pinpoints = {theirs}, and config.json {self.canvases}; they must be the same."
            )
        if wrong := [canvas for canvas in theirs if any(side < 1 or side % self.tile for side in canvas)]:
            raise UserError(
                f"{where} has {list(wrong[0])} among its image_grid_pinpoints; each must be of whole tiles of "
                f"{self.tile} pixels."
            )
        own = {"patch_size": self.patch_size, "tile": self.tile, "canvases": theirs}
        # Whether it normalises or not.
        means = of_channels(processor.image_mean)
        if self.squares and len(means) != 3:
            raise UserError(
                f"{where} has image_mean = {processor.image_mean}; it must be three numbers, as they are the colour of "
                "squares."
            )
        square = tuple(int(mean * 255) for mean in means) if self.squares else None
        return own | {"square": square} | values_of_pixels(processor)


@dataclass(frozen=True)
class CroppedTiles:
    """Images that are cut into tiles before the encoder of a whole model is given them (`CroppedImages`).

    tile: side of a tile in pixels; what is less than a patch at its edges is left out.
    """

    patch_size: int
    tile: int

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`."""
        processor, where = _opened_as(path, "GotOcr2")
        check_processor(where, processor)
        size = dict(processor.size)
        check_made(where, (size.get("height"), size.get("width")), (self.tile, self.tile))
        least, most = processor.min_patches, processor.max_patches
        if not 1 <= least <= most:
            raise UserError(
                f"{where} has min_patches = {least} and max_patches = {most}; they must be at least 1, and in order."
            )
        own = {"patch_size": self.patch_size, "tile": self.tile, "least": least, "most": most}
        return own | values_of_pixels(processor)


@dataclass(frozen=True)
class SplitTiles:
    """Images that are cut into marked tiles before the encoder of a whole model is given them (`SplitImages`).

    tile: side of a tile in pixels; what is less than a patch at its edges is left out.
    """

    patch_size: int
    tile: int

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`. Raises UserError also for images that are not resized by their longer side."""
        processor, where = _opened_as(path, "Idefics3", "SmolVLM")
        check_processor(where, processor, do_pad=(True, False))
        size, tile = dict(processor.size), dict(processor.max_image_size).get("longest_edge")
        check_made(where, (tile, tile), (self.tile, self.tile))
        if not (longest := size.pop("longest_edge", None)) or any(size.values()):
            raise UserError(f"{where} has size = {dict(processor.size)}; it must name longest_edge alone.")
        own = {"patch_size": self.patch_size, "tile": self.tile, "longest": longest}
        return own | {"splits": bool(processor.do_image_splitting)} | values_of_pixels(processor)


@dataclass(frozen=True)
class CanvasTiles:
    """Images that are put on canvases of tiles before the encoder of a whole model is given them (`CanvasImages`).

    tile:  side of a tile in pixels; what is less than a patch at its edges is left out.
    sides: (rows, columns) of each canvas that the tower knows, which its image processor must have, too.
    """

    patch_size: int
    tile: int
    sides: tuple[tuple[int, int], ...]

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`. Raises UserError also for canvases that are others."""
        processor, where = _opened_as(path, "Mllama")
        check_processor(where, processor, do_pad=(True,))
        size = dict(processor.size)
        check_made(where, (size.get("height"), size.get("width")), (self.tile, self.tile))
        if tuple(get_all_supported_aspect_ratios(processor.max_image_tiles)) != self.sides:
            raise UserError(
                f"{where} has max_image_tiles = {processor.max_image_tiles}, and config.json supported_aspect_ratios = "
                f"{[list(each) for each in self.sides]}; these must be all of at most so many tiles."
            )
        own = {"patch_size": self.patch_size, "tile": self.tile, "most": processor.max_image_tiles}
        return own | values_of_pixels(processor)


@dataclass(frozen=True)
class Areas:
    """What images become before the encoder of a whole model that takes them in their own aspect (`AreaImages`).

    patch_size, merge_size: sides of a patch, and of a merge block in patches. temporal_patch_size: repeats of a patch.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def sides(self) -> dict[str, int]:
        """Options of the processor that the tower has as well."""
        names = ("patch_size", "merge_size", "temporal_patch_size")
        return {name: getattr(self, name) for name in names}

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`. Raises UserError also for a processor of another class."""
        processor, where = _opened_as(path, "Qwen2VL")
        check_processor(where, processor, **_UNPADDED)
        for key, taken in self.sides.items():
            if (made := getattr(processor, key)) != taken:
                raise UserError(f"{where} has {key} = {made}, and the vision tower takes {taken}.")
        size = dict(processor.size)
        least, most = size.get("shortest_edge"), size.get("longest_edge")
        if not least or not most or least > most:
            raise UserError(
                f"{where} has size = {size}; it must name the smallest area shortest_edge, and the largest "
                "longest_edge."
            )
        return self.sides | {"min_area": least, "max_area": most} | values_of_pixels(processor)


@dataclass(frozen=True)
class Clips:
    """What clips become before the encoder of a whole model is given them (`ChunkedClips`): log-mel frames in a chunk
    of silence.

    num_mels: values of a frame. max_frames: of the chunk; None: as many as it has. margin: frames of silence that the
    encoder sees.
    """

    num_mels: int
    max_frames: int | None
    margin: int

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`, of the directory's feature extractor."""
        try:
            with quiet_transformers():
                extractor = AutoFeatureExtractor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise UserError(
                f"model.path: the feature extractor of {path} cannot be opened ({one_line(error)})."
            ) from error
        where = f"model.path: the {type(extractor).__name__} of {path}"
        if type(extractor) is not WhisperFeatureExtractor:
            raise UserError(f"{where} is not what Motet computes for this model; it must be a WhisperFeatureExtractor.")
        # Mel filters of transformers end at 8 kHz, whatever the rate.
        only = {"sampling_rate": 16_000, "feature_size": self.num_mels, "dither": 0.0, "padding_value": 0.0}
        frames = {} if self.max_frames is None else {"nb_max_frames": self.max_frames}
        for key, needed in (only | frames | {"padding_side": "right"}).items():
            if (value := getattr(extractor, key)) != needed:
                raise UserError(f"{where} has {key} = {value!r}; for this model it must be {needed!r}.")
        return {
            "sampling_rate": extractor.sampling_rate,
            "num_mels": self.num_mels,
            "n_fft": extractor.n_fft,
            "hop_length": extractor.hop_length,
            "max_seconds": float(extractor.chunk_length),
            "margin": self.margin,
        }


def opened_processor(path: Path) -> tuple[Any, str]:
    """The image processor of a directory, and how sentences name it. Raises UserError if it cannot be opened."""
    try:
        with quiet_transformers():
            processor = AutoImageProcessor.from_pretrained(
                path, backend="pil", local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        raise UserError(f"model.path: the image processor of {path} cannot be opened ({one_line(error)}).") from error
    return processor, f"model.path: the {type(processor).__name__} of {path}"


def _opened_as(path: Path, *kinds: str) -> tuple[Any, str]:
    """As `opened_processor`, of these kinds: others may do more than their options say (MobileViT turns colours)."""
    processor, where = opened_processor(path)
    known = [f"{kind}ImageProcessor" for kind in kinds]
    if type(processor).__name__.removesuffix("Pil") not in known:
        raise UserError(f"{where} is not what Motet computes for this model; it must be a {' or '.join(known)}.")
    return processor, where


def check_processor(where: str, processor: Any, **only: tuple[Any, ...]) -> None:
    """Raise UserError for an option with another value than those that Motet computes. only: beside those of all."""
    for key, allowed in (_ONLY | only).items():
        if (value := getattr(processor, key, None)) not in allowed:
            raise UserError(f"{where} has {key} = {value!r}, which Motet does not compute; it must be {allowed[0]!r}.")
    if abs(processor.rescale_factor * 255 - 1) > 1e-9:
        raise UserError(f"{where} has rescale_factor = {processor.rescale_factor}; it must be 1 / 255.")


def check_values(where: str, options: dict[str, Any], **needed: object) -> None:
    """Raise UserError for an option of a processor's file with another value than the one that Motet computes."""
    for key, value in needed.items():
        if options[key] != value:
            raise UserError(f"{where} has {key} = {options[key]!r}; for this model it must be {value!r}.")


def check_token_counts(path: Path, **made: object) -> None:
    """Raise UserError where a directory's processor counts other tokens of an image than its model makes rows.

    made: options of the processor as they follow from config.json. Those that the processor's files leave out are not
    looked at. transformers refuses such a directory when it merges the first image for which they differ.
    """
    of_all = read_optional_object(path / "processor_config.json") or {}
    named = [("processor_config.json", of_all), ("processor_config.json", of_all.get("image_processor"))]
    if named[1][1] is None:
        named[1] = "preprocessor_config.json", read_optional_object(path / "preprocessor_config.json")
    for file, stored in named:
        for key, value in made.items() if isinstance(stored, dict) else ():
            if (said := stored.get(key)) not in (None, value):
                raise UserError(
                    f"model.path: {path / file} has {key} = {said!r}, and by config.json it is {value!r}, so that an "
                    f"image would have other tokens than rows; set it to {value!r} if config.json is right."
                )


def check_made(where: str, made: tuple[Any, Any], taken: tuple[int, int]) -> None:
    """Raise UserError unless a processor makes images of the (height, width) that the tower takes."""
    if made != taken:
        raise UserError(
            f"{where} makes images of {made[0]} x {made[1]} pixels, and the vision tower takes {taken[0]} x {taken[1]}."
        )


def values_of_pixels(processor: Any) -> dict[str, Any]:
    """The options of an image transform that say how pixels are resampled and normalised."""
    normalises = bool(processor.do_normalize)
    return {
        "resample": int(processor.resample),
        "mean": of_channels(processor.image_mean) if normalises else (0.0,),
        "std": of_channels(processor.image_std) if normalises else (1.0,),
    }


def of_channels(value: Any) -> tuple[float, ...]:
    """A mean or a standard deviation as a file has it, one number for all channels or one for each, as a tuple."""
    return (value,) if isinstance(value, int | float) else tuple(value)
