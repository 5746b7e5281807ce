"""transformers' own video processors without torchvision, which their modules ask for.

What is its own here: which frames are sampled, the bounds of areas, padding to pairs, the order of patches. Frames are
resized by Pillow, and values normalised as in transformers' image processors on numpy, in place of torchvision.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata, read_video_pyav

_MODULES = [f"torchvision{part}" for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]
_QWEN = "transformers.models.qwen{0}_vl.video_processing_qwen{0}_vl"
_KINDS = {
    "Qwen2VLVideoProcessor": _QWEN.format(2),
    "Qwen3VLVideoProcessor": _QWEN.format(3),
    "LlavaOnevisionVideoProcessor": "transformers.models.llava_onevision.video_processing_llava_onevision",
    "SmolVLMVideoProcessor": "transformers.models.smolvlm.video_processing_smolvlm",
}
"""Class -> its module."""
_OPTIONS = (
    *("patch_size", "temporal_patch_size", "merge_size", "cap_pixels_per_frame"),
    *("do_center_crop", "crop_size", "do_pad"),
)
"""Options that some of the classes have."""


@cache
def kind(called: str = "Qwen2VLVideoProcessor") -> Any:
    """A class by its name, imported while empty modules stand for torchvision."""
    absent = [name for name in _MODULES if name not in sys.modules]
    for name in absent:
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    try:
        from transformers.video_processing_utils import BaseVideoProcessor

        processor = getattr(importlib.import_module(_KINDS[called]), called)
    finally:
        for name in absent:
            del sys.modules[name]

    class ByPillow(BaseVideoProcessor):
        def resize(self, image: torch.Tensor, size: Any, resample: int, **options: Any) -> torch.Tensor:
            shape, to = image.shape, (size.width, size.height)
            frames = [each.permute(1, 2, 0).numpy() for each in image.reshape(-1, *shape[-3:])]
            resized = [np.asarray(Image.fromarray(each).resize(to, Image.Resampling(resample))) for each in frames]
            return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).reshape(*shape[:-2], *reversed(to))

        def rescale_and_normalize(self, images: torch.Tensor, *options: Any) -> torch.Tensor:
            _, factor, normalises, mean, std = options
            rescaled = (images.numpy().astype(np.float64) * factor).astype(np.float32)
            mean, std = (np.array(each, dtype=np.float32).reshape(-1, 1, 1) for each in (mean, std))
            return torch.from_numpy((rescaled - mean) / std if normalises else rescaled)

    return type("VideoProcessor", (processor, ByPillow), {})


class TheirVideo(NamedTuple):
    """What a processor makes of a video. metadata: with the numbers of its frames. grid: None where there is none."""

    values: torch.Tensor
    grid: torch.Tensor | None
    metadata: VideoMetadata


def their_video(folder: Path, path: Path, **options: Any) -> TheirVideo:
    """`pixel_values_videos` and `video_grid_thw` of one video, and its frames.

    folder: whose files say what the processor does. options: over these.
    """
    file = folder / "video_preprocessor_config.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    processor = kind(stored.get("video_processor_type", "Qwen2VLVideoProcessor")).from_pretrained(folder, **options)
    # As the class calls it by itself.
    sample = partial(processor.sample_frames, num_frames=processor.num_frames, fps=processor.fps)
    # A template that is applied asks SmolVLM's for frames, whatever its files say of that.
    asks = type(processor).__mro__[1].__name__ == "SmolVLMVideoProcessor" and processor.fps is not None
    if not processor.do_sample_frames and not asks:
        sample = None

    def numbers(metadata: VideoMetadata, **_: Any) -> Any:
        if not metadata.total_num_frames:  # Its reader stops at containers that do not say it.
            with av.open(path) as container:
                metadata.total_num_frames = sum(1 for _ in container.decode(video=0))
                metadata.duration = float(metadata.total_num_frames / container.streams.video[0].average_rate)
        return sample(metadata=metadata) if sample else np.arange(metadata.total_num_frames)

    frames, metadata = read_video_pyav(str(path), numbers)
    made = processor._preprocess(
        [torch.from_numpy(frames).permute(0, 3, 1, 2)],
        do_resize=processor.do_resize,
        size=processor._standardize_kwargs(size=processor.size)["size"],
        resample=int(processor.resample),
        do_rescale=processor.do_rescale,
        rescale_factor=processor.rescale_factor,
        do_normalize=processor.do_normalize,
        image_mean=processor.image_mean,
        image_std=processor.image_std,
        return_tensors="pt",
        **{name: getattr(processor, name, None) for name in _OPTIONS},
    )
    values = made["pixel_values_videos"] if "pixel_values_videos" in made else made["pixel_values"]
    return TheirVideo(values, made.get("video_grid_thw"), metadata)
