"""A recipe whose model is a directory of transformers: `model.path`.

The directory says what is made of texts and images, so such a recipe has neither `[transforms]` nor `data.tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from motet.core.errors import UserError
from motet.core.frame_sampling import FrameSampling, SkippingSampling
from motet.core.modalities import AUDIO, VIDEO
from motet.core.workload import BACKBONE
from motet.data.anyres_images import AnyResImages
from motet.data.anyres_videos import AnyResVideos
from motet.data.area_images import AreaImages
from motet.data.area_videos import AreaVideos
from motet.data.by_processor import ImagesByProcessor
from motet.data.canvas_images import CanvasImages
from motet.data.chunked_clips import ChunkedClips
from motet.data.config import FilesConfig
from motet.data.cropped_images import CroppedImages
from motet.data.omni_videos import OmniVideos
from motet.data.panned_images import PannedImages
from motet.data.processed_images import ProcessedImages
from motet.data.split_images import SplitImages
from motet.data.split_videos import SplitVideos
from motet.data.text import ChatTokenizer
from motet.data.timed_videos import TimedVideos
from motet.data.tokenizer_files import read_template
from motet.data.transforms import Transform
from motet.models.build import ModelConfig
from motet.models.lora import LoraConfig
from motet.models.whole.directory import WholeDirectory
from motet.models.whole.processor import (
    AnyResTiles,
    Areas,
    ByProcessor,
    CanvasTiles,
    Clips,
    CroppedTiles,
    Images,
    PannedSquares,
    SplitTiles,
)
from motet.models.whole.video_processor import FrameTiles, OmniAreas, TiledVideos, TimedAreas, VideoAreas
from motet.train.recipe.recipe import Recipe

_TRANSFORMS: dict[type, Callable[..., Transform]] = {
    Images: ProcessedImages,
    PannedSquares: PannedImages,
    AnyResTiles: AnyResImages,
    CroppedTiles: CroppedImages,
    SplitTiles: SplitImages,
    FrameTiles: SplitVideos,
    CanvasTiles: CanvasImages,
    Areas: AreaImages,
    VideoAreas: AreaVideos,
    TimedAreas: TimedVideos,
    TiledVideos: AnyResVideos,
    OmniAreas: OmniVideos,
    Clips: ChunkedClips,
    ByProcessor: ImagesByProcessor,
}


_PATH = "path"


class VideoConfig(BaseModel):
    """`[model.video]` of a recipe: which frames of a video are taken, in place of what the directory's processor says.

    fps:        so many frames a second, between `min_frames` and `max_frames`, which are the directory's by default.
    num_frames: so many of each video.
    min_frames, max_frames: bounds of `fps`.
    sound:      whether the sound of a video is read with its frames (Qwen2.5-Omni's `use_audio_in_video`); each must
                have some then.
    """

    model_config = ConfigDict(extra="forbid")
    fps: float | None = Field(default=None, gt=0, le=1000)
    num_frames: int | None = Field(default=None, ge=1, le=2**16)
    min_frames: int | None = Field(default=None, ge=1, le=2**16)
    max_frames: int | None = Field(default=None, ge=1, le=2**16)
    sound: bool = False

    @model_validator(mode="after")
    def _one_way(self) -> VideoConfig:
        if self.sound and not (self.fps or self.num_frames or self.min_frames or self.max_frames):
            return self
        if (self.fps is None) == (self.num_frames is None):
            raise ValueError("it must have one of `fps` and `num_frames`")
        if self.num_frames is not None and (self.min_frames or self.max_frames):
            raise ValueError("`min_frames` and `max_frames` are bounds of `fps`; remove them beside `num_frames`")
        return self

    def over(self, stored: FrameSampling) -> FrameSampling:
        """The frames that are taken. stored: what the directory's processor says. Raises UserError for bounds."""
        if self.fps is None and self.num_frames is None:
            return stored
        if isinstance(stored, SkippingSampling):
            for name in ("num_frames", "min_frames"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"model.video.{name} is not known to this model's processor, which takes fps frames a second "
                        "and at most max_frames; set these."
                    )
            if stored.fps is None and self.max_frames is None:
                raise UserError("model.video.fps needs max_frames beside it, as the model's directory has none.")
        bounds = {"min_frames": self.min_frames, "max_frames": self.max_frames}
        given = {name: value for name, value in bounds.items() if value is not None}
        made = replace(stored, fps=self.fps, num_frames=self.num_frames, **given)
        if made.min_frames > made.max_frames:
            raise UserError(
                f"model.video: min_frames is {made.min_frames} and max_frames {made.max_frames}; they must be in order."
            )
        return made


def _with_path(schema: dict[str, Any]) -> None:
    """Let the JSON Schema of `lora` have tables by part, and `path`: of values it would allow both everywhere."""
    table, path = schema["additionalProperties"]["anyOf"]
    said = "A directory of peft, whose adapters go on with all that it says of them; no part has a table beside it."
    schema["additionalProperties"], schema["properties"] = table, {_PATH: path | {"description": said}}


class WholeModelConfig(BaseModel):
    """`[model]` of a recipe whose model is a directory of transformers.

    path:   a local directory with config, weights, processor and tokenizer of a multimodal model.
    train:  by part, whether it learns: the encoders by what they read (image), projector, backbone. Default: all do.
    lora:   by part (the backbone, encoders by what they read): LoRA adapters, beside which the part's own weights are
            frozen. Or `path` alone: a directory of peft, whose adapters go on with all that it says of them.
    video:  which frames of videos are taken; by default those that the directory's own processor takes.
    freeze: weights that do not learn, beside those of parts that do not: patterns of their names, as checkpoints have
            them, in which * stands for any characters.
    """

    model_config = ConfigDict(extra="forbid")
    path: Path
    train: dict[str, bool] = Field(default_factory=dict)
    lora: dict[str, LoraConfig | Path] = Field(default_factory=dict, json_schema_extra=_with_path)
    video: VideoConfig | None = None
    freeze: tuple[str, ...] = ()

    @field_validator("lora", mode="before")
    @classmethod
    def _tables_or_a_path(cls, given: object) -> object:
        """Refuse what is neither in one sentence: pydantic would name the tables alone."""
        for name, table in given.items() if isinstance(given, dict) else ():
            is_path = isinstance(table, str | Path)
            if (name == _PATH) != is_path:
                wanted = "a path, as a string" if name == _PATH else "a table"
                raise ValueError(f"`{name}` must be {wanted}, not {table!r}")
        if isinstance(given, dict) and _PATH in given and len(given) > 1:
            other = next(name for name in given if name != _PATH)
            raise ValueError(
                f"`path` says all that there is of adapters, so `{other}` has no place beside it; give each part a "
                "table with the path, or remove the table"
            )
        return given

    @property
    def adapters(self) -> dict[str, LoraConfig] | Path:
        """The tables of parts, or the directory that says it all."""
        tables = {name: each for name, each in self.lora.items() if isinstance(each, LoraConfig)}
        whole = self.lora.get(_PATH)
        return whole if isinstance(whole, Path) else tables


class WholeRecipe(Recipe):
    """A training job whose model is a directory of transformers, with its own processor and tokenizer.

    Example: `[run] dir, steps, batch_size`, `[model] path`, `[data] train` and `[optimizer] lr` are a whole recipe.
    """

    model: WholeModelConfig
    data: FilesConfig

    @model_validator(mode="after")
    def _parts_fit(self) -> WholeRecipe:
        if self.modalities:
            raise ValueError(
                f"modalities.{next(iter(self.modalities))} has no effect beside model.path, as the model reads what "
                "its own processor knows; remove it"
            )
        if self.transforms:
            raise ValueError(
                f"transforms.{next(iter(self.transforms))} has no effect beside model.path, as the model's own "
                "processor says what files become; remove it"
            )
        return self

    @model_validator(mode="after")
    def _parallel_has_modules(self) -> WholeRecipe:
        return self  # `modules` checks it: the modules stand in the directory.

    @cached_property
    def directory(self) -> WholeDirectory:
        """The model's directory. Raises UserError for one of no family that is known."""
        adapters = self.model.adapters
        if isinstance(adapters, Path):
            return WholeDirectory(self.model.path, {"model.lora.path": adapters})
        named = {f"model.lora.{name}.path": each.path for name, each in adapters.items() if each.path is not None}
        return WholeDirectory(self.model.path, named)

    @cached_property
    def modules(self) -> ModelConfig:
        """The parts of the model. Raises UserError for a directory whose options Motet does not compute."""
        config = self.directory.config(self.model.train, self.model.freeze, self.model.adapters)
        known = [*config.encoders, BACKBONE]
        if unknown := [name for name in self.parallel if name not in known]:
            raise UserError(
                f"parallel.{unknown[0]} has no effect, as the model has no such module; it has {', '.join(known)}."
            )
        return config

    def check_weights(self) -> None:
        """Raise UserError for a directory without files of weights."""
        self.directory.check_weights()

    def vocabulary(self) -> ChatTokenizer:
        """The model's own tokenizer with its chat template, read from its directory. Raises UserError."""
        template = self.directory.family.template
        if template is not None and read_template(self.model.path) is not None:
            raise UserError(
                f"model.path: {self.model.path} has a chat template, where the processor of "
                f"{self.directory.family.model.__name__} writes texts by itself; remove it."
            )
        heard = any(getattr(each, "sound_chunk", None) is not None for each in self._transforms.values())
        crops = [each.crops for each in self._transforms.values() if isinstance(each, PannedImages)]
        return ChatTokenizer.from_directory(
            self.model.path,
            template,
            forms=self.directory.parts.forms,
            beside={VIDEO: AUDIO} if heard else {},
            frames=self.directory.family.frames,
            crops=crops[0] if crops else None,
        )

    def table_of(self, encoder: str) -> str:
        """The encoder's own name: there are no tables."""
        return encoder

    def transform(self, encoder: str) -> Transform:
        """What the model's own processor makes of files for an encoder. Raises UserError for one that is not known."""
        return self._transforms[encoder]

    @cached_property
    def _transforms(self) -> dict[str, Transform]:
        images = self.directory.parts.images
        made = {name: _TRANSFORMS[type(each)](**each.options(self.model.path)) for name, each in images.items()}
        if self.model.video is None:
            return made
        reads = {name: each for name, each in made.items() if isinstance(each, AreaVideos | AnyResVideos | SplitVideos)}
        if not reads:
            raise UserError("model.video has no effect, as the model reads no videos; remove it.")
        made |= {name: replace(each, sampling=self.model.video.over(each.sampling)) for name, each in reads.items()}
        if not self.model.video.sound:
            return made
        heard = {name: each.sound_chunk for name, each in images.items() if isinstance(each, OmniAreas)}
        if not heard:
            raise UserError(
                "model.video.sound has no effect, as this model does not read the sound of a video with its frames; "
                "remove it."
            )
        return made | {name: replace(made[name], sound_chunk=chunk) for name, chunk in heard.items()}


def check_whole_tables(path: Path, tables: dict[str, Any]) -> None:
    """Raise UserError for keys that have no place beside `model.path`."""
    model, data = (tables.get(name, {}) for name in ("model", "data"))
    for name in ("backbone", "encoders"):
        if isinstance(model, dict) and name in model:
            raise UserError(
                f"{path}: model.path is a whole model with parts of its own, so model.{name} has no place beside it; "
                "for parts of several directories give each its own path."
            )
    if isinstance(data, dict) and "tokenizer" in data:
        raise UserError(f"{path}: model.path brings its own tokenizer; remove data.tokenizer.")
