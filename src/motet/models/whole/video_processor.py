"""What the video processor of a whole model does, as the options of a transform (`data/`).

transformers' own classes of video processors need torchvision, which Motet does without. So the files are read here as
`get_video_processor_dict` finds them, and what they leave out is what the class has by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.core.errors import UserError
from motet.core.frame_sampling import EvenSampling, FrameSampling, SkippingSampling, UniformSampling
from motet.core.text_files import read_optional_object
from motet.models.whole.processor import AnyResTiles, Areas, SplitTiles, check_made, check_values, of_channels

_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "resample": 3,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "do_sample_frames": False,
    "fps": None,
    "num_frames": None,
    "min_frames": 4,
    "max_frames": 768,
    "cap_pixels_per_frame": None,
    "max_video_tokens": 128_000,
}
_TIMED_DEFAULTS = _DEFAULTS | {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "patch_size": 16,
    "do_sample_frames": True,
    "fps": 2,
    "max_video_tokens": 768,
}
_TIMED_KINDS = ("Qwen3VLVideoProcessor",)
_TILED_DEFAULTS = _DEFAULTS | {"size": {"height": 384, "width": 384}, "do_center_crop": None}
_TILED_KINDS = (
    "LlavaOnevisionVideoProcessor",
    *(f"LlavaOnevisionImageProcessor{backend}" for backend in ("", "Fast", "Pil")),
)
_FRAME_SIZE = {"longest_edge": 4 * 364}
_FRAME_DEFAULTS = _DEFAULTS | {
    "size": {},
    "max_image_size": {"longest_edge": 364},
    "video_sampling": None,
    "resample": 1,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
_FRAME_KINDS = ("SmolVLMVideoProcessor", *(f"SmolVLMImageProcessor{backend}" for backend in ("", "Fast", "Pil")))
_LONGEST_FRAME = 4096
"""No frame is resized to a longer side than this."""
_SOUND_PER_SECOND, _SECONDS_PER_CHUNK = 25, 2.0
"""Of Qwen2_5OmniProcessor: the positions of a second, and the seconds of a chunk of frames or of sound."""
_KINDS = ("Qwen2VLVideoProcessor", "Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Types that a file may name: directories without a file for videos have that for images for both."""


@dataclass(frozen=True)
class VideoAreas(Areas):
    """What images and videos become before the encoder of a whole model that takes both (`AreaVideos`).

    tokens_per_second: positions of a second between frames; None: frames are counted.
    """

    tokens_per_second: float | None = None

    def options(self, path: Path) -> dict[str, Any]:
        """As of `Images`. Raises UserError also for a video processor of another class or other patches."""
        stored, where = self._stored(path)
        check_values(where, stored, **{key: getattr(self, key) for key in self.sides})
        least, most = stored["size"].get("shortest_edge"), stored["size"].get("longest_edge")
        if not least or not most or least > most:
            raise UserError(
                f"{where} has size = {stored['size']}; it must name the smallest area shortest_edge, and the largest "
                "longest_edge."
            )
        return super().options(path) | {
            "min_video_area": least,
            "max_video_area": most,
            "sampling": self._sampling(stored, where),
            "cap_tokens": stored["max_video_tokens"] if stored["cap_pixels_per_frame"] else None,
            **_values_of_frames(stored),
            "tokens_per_second": self.tokens_per_second,
        }

    def _stored(self, path: Path) -> tuple[dict[str, Any], str]:
        return _stored(path, _KINDS, _DEFAULTS)

    def _sampling(self, stored: dict[str, Any], where: str) -> FrameSampling:
        """Which frames are taken. Raises UserError where transformers stops."""
        fps, num_frames = _asked(stored)
        if stored["do_sample_frames"] and (fps is None) == (num_frames is None):
            raise UserError(f"{where} has do_sample_frames, so it must have one of fps and num_frames.")
        return FrameSampling(fps, stored["min_frames"], stored["max_frames"], num_frames)


@dataclass(frozen=True)
class OmniAreas(VideoAreas):
    """The same of Qwen2.5-Omni (`OmniVideos`), whose processor bounds areas of frames by itself, whatever files say.

    seconds_per_chunk: in which frames alternate with rows of the video's sound, where it is read.
    """

    seconds_per_chunk: float = _SECONDS_PER_CHUNK

    @property
    def sound_chunk(self) -> int:
        """Positions of a chunk. Raises UserError for others than those of transformers' processor."""
        if (self.tokens_per_second, self.seconds_per_chunk) != (_SOUND_PER_SECOND, _SECONDS_PER_CHUNK):
            raise UserError(
                f"model.path: config.json has position_id_per_seconds = {self.tokens_per_second} and seconds_per_chunk "
                f"= {self.seconds_per_chunk}; for model.video.sound they must be {_SOUND_PER_SECOND} and "
                f"{_SECONDS_PER_CHUNK:g}, which transformers' processor has."
            )
        return int(_SOUND_PER_SECOND * _SECONDS_PER_CHUNK)

    def options(self, path: Path) -> dict[str, Any]:
        """As of `VideoAreas`."""
        least, most = (_DEFAULTS["size"][area] for area in ("shortest_edge", "longest_edge"))
        return super().options(path) | {"min_video_area": least, "max_video_area": most}


@dataclass(frozen=True)
class FrameTiles(SplitTiles):
    """What images and videos become before the encoder of SmolVLM (`SplitVideos`)."""

    def options(self, path: Path) -> dict[str, Any]:
        """As of `SplitTiles`. Raises UserError also for a video processor that makes other tiles of frames."""
        stored, where = _stored(path, _FRAME_KINDS, _FRAME_DEFAULTS)
        sampled = stored["video_sampling"] or {}
        size = dict(stored["size"] or sampled.get("video_size") or _FRAME_SIZE)
        tile = stored["max_image_size"].get("longest_edge")
        check_made(where, (tile, tile), (self.tile, self.tile))
        if not (longest := size.pop("longest_edge", None)) or any(size.values()):
            raise UserError(f"{where} has size = {stored['size']}; it must name longest_edge alone.")
        # Whatever `do_sample_frames` says: where a chat template is applied, these ask for it.
        fps, most = (
            (sampled.get("fps"), sampled.get("max_frames")) if sampled else (stored["fps"], stored["num_frames"])
        )
        if (fps is None) != (most is None) or (fps is None and stored["do_sample_frames"]):
            raise UserError(f"{where} has fps = {fps} and num_frames = {most}; it must have both of them to sample.")
        if fps is not None and (fps <= 0 or most < 1):
            raise UserError(f"{where} has fps = {fps} and num_frames = {most}; they must be more than 0.")
        sampling = SkippingSampling() if fps is None else SkippingSampling(fps=fps, max_frames=most)
        own = {"sampling": sampling, "video_longest": min(longest, _LONGEST_FRAME)}
        return super().options(path) | own | _values_of_frames(stored)


@dataclass(frozen=True)
class TiledVideos(AnyResTiles):
    """The same of LLaVA-OneVision (`AnyResVideos`)."""

    def options(self, path: Path) -> dict[str, Any]:
        """As of `AnyResTiles`. Raises UserError also for a video processor that does not make tiles of frames."""
        stored, where = _stored(path, _TILED_KINDS, _TILED_DEFAULTS)
        made = stored["size"]
        check_made(where, (made.get("height"), made.get("width")), (self.tile, self.tile))
        fps, num_frames = _asked(stored)
        if fps is not None and num_frames is not None:
            raise UserError(f"{where} has fps and num_frames; it must have one of them.")
        if stored["do_center_crop"]:
            raise UserError(f"{where} has do_center_crop, which Motet does not compute.")
        sampling = UniformSampling(fps=fps, num_frames=num_frames)
        return super().options(path) | {"sampling": sampling} | _values_of_frames(stored)


def _asked(stored: dict[str, Any]) -> tuple[float | None, int | None]:
    """fps and num_frames. A processor that does not sample takes all frames, whatever they say."""
    return (stored["fps"], stored["num_frames"]) if stored["do_sample_frames"] else (None, None)


class TimedAreas(VideoAreas):
    """The same of Qwen3-VL (`TimedVideos`)."""

    def _stored(self, path: Path) -> tuple[dict[str, Any], str]:
        return _stored(path, _TIMED_KINDS, _TIMED_DEFAULTS)

    def _sampling(self, stored: dict[str, Any], where: str) -> FrameSampling:
        return EvenSampling(**vars(super()._sampling(stored, where)))


def _stored(path: Path, kinds: tuple[str, ...], defaults: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The options of the video processor in a directory, and how sentences name it.

    kinds: that it may be, the first if no file names one. defaults: of that kind.
    """
    names = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
    found = [(read_optional_object(path / name) or {}) for name in names]
    found[0] = found[0].get("video_processor") or {}
    name, stored = next(((name, each) for name, each in zip(names, found) if each), (names[2], {}))
    where = f"model.path: the video processor in {path / name}"
    kind = stored.get("video_processor_type") or stored.get("image_processor_type") or kinds[0]
    if kind not in kinds:
        raise UserError(f"{where} is a {kind}, which Motet does not compute; it must be a {kinds[0]}.")
    options = defaults | {key: stored[key] for key in defaults.keys() & stored.keys()}
    options["size"] = dict(options["size"] or defaults["size"])
    for area, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if stored.get(old) is not None:
            options["size"][area] = stored[old]
    check_values(where, options, do_resize=True, do_rescale=True)
    if abs(options["rescale_factor"] * 255 - 1) > 1e-9:
        raise UserError(f"{where} has rescale_factor = {options['rescale_factor']}; it must be 1 / 255.")
    return options, where


def _values_of_frames(stored: dict[str, Any]) -> dict[str, Any]:
    """The options of a transform that say how frames are resampled and normalised."""
    normalises = stored["do_normalize"]
    return {
        "video_mean": of_channels(stored["image_mean"]) if normalises else (0.0,),
        "video_std": of_channels(stored["image_std"]) if normalises else (1.0,),
        "video_resample": int(stored["resample"]),
    }
