"""What a family of whole models says of itself: its class in transformers, and the parts that its config describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from motet.core.errors import UserError
from motet.core.example import FrameTexts
from motet.models.build import BackboneConfig, EncoderConfig
from motet.models.families.registry import (
    BACKBONES,
    CROSS_BACKBONES,
    ENCODERS,
    GRID_BACKBONES,
    TOWERS,
    Family,
)

_LANGUAGE = r"^(model\.)?(language|text)_model\.(model\.)?"
"""Where a backbone lies in a larger checkpoint, in each of transformers' formats."""

LANGUAGE_MODEL = "model.language_model."
"""Where the layers of a backbone lie in most of transformers' classes of whole models."""
VISION_TOWER = "model.vision_tower."
"""Where a vision tower lies in most of transformers' classes."""


class WholeBackboneConfig(BackboneConfig):
    """The backbone of a whole model, in whose directory it lies.

    family: also of those that are nothing else. stacked, keys: as of `Backbone`. lies: a regular expression of where
    its weights lie among those of the whole model, and what stands in its place by itself.
    """

    family: str  # type: ignore[assignment]
    stacked: dict[str, int] = Field(default_factory=dict)
    keys: dict[str, int] = Field(default_factory=dict)
    lies: tuple[str, str] = (_LANGUAGE, "model.")

    @property
    def classes(self) -> Family:
        family = (BACKBONES | GRID_BACKBONES | CROSS_BACKBONES)[self.family]
        return replace(family, part="text_config", prefixes=self.lies[0], prefix=self.lies[1])

    @property
    def stacked_rows(self) -> dict[str, int]:
        return self.stacked

    @property
    def key_rows(self) -> dict[str, int]:
        return self.keys


class WholeEncoderConfig(EncoderConfig):
    """An encoder of a whole model, whose callbacks are the family's own.

    made: kind of callback -> what makes it. What has weights learns with the projector.
    """

    made: dict[str, Callable[[], Any]] = Field(default_factory=dict)

    def own_callbacks(self) -> dict[str, Any]:
        callbacks = {kind: make() for kind, make in self.made.items()}
        for callback in callbacks.values():
            if isinstance(callback, nn.Module):
                callback.requires_grad_(self.train_projector)
        return callbacks


class TowerConfig(WholeEncoderConfig):
    """A tower that is another in its whole model than by itself, or is in whole models alone.

    family: of `registry.TOWERS`.
    """

    family: str  # type: ignore[assignment]

    @property
    def classes(self) -> Family:
        return TOWERS[self.family]


class MadeOfFiles(Protocol):
    """What files become before an encoder of a whole model is given them (`models/whole/processor.py`).

    `train/recipe/whole.py` has the transform of each kind.
    Example: `Images(patch_size=14, size=(336, 336))` are images that all come to one size.
    """

    def options(self, path: Path) -> dict[str, Any]:
        """The options of the transform that does what the processor in a directory does.

        Raises UserError for a processor that does anything else.
        """


@dataclass(frozen=True)
class WholeParts:
    """The parts of a whole model.

    names:  prefixes of weights in an MLLM, and in transformers' class. Together they cover all weights of both.
    images: by encoder, what it is given of files.
    forms:  by what is read, the token of an item and the text around it, where no table of processors has them.
    """

    backbone: BackboneConfig
    encoders: dict[str, EncoderConfig]
    names: tuple[tuple[str, str], ...]
    images: dict[str, MadeOfFiles] = field(default_factory=dict)
    forms: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeFamily:
    """A family of whole models.

    model: transformers' class, which `from_pretrained` reads its directories with.
    parts: config and `Source` -> its parts. Raises UserError for options that Motet does not compute.
    template: the chat template that stands for what the family's processor writes, where directories have none; None:
           directories have their own.
    frames: what its processor writes of a video whose frames stand in the text as images; None: they do not.
    """

    model: type[PreTrainedModel]
    parts: Callable[[PreTrainedConfig, Any], WholeParts]
    template: str | None = None
    frames: FrameTexts | None = None


def backbone_names(text: str = LANGUAGE_MODEL) -> tuple[tuple[str, str], ...]:
    """Prefixes of the backbone's weights in an MLLM, and in transformers' class. text: that of its layers there."""
    return ("backbone.causal_lm.model.", text), ("backbone.causal_lm.lm_head.", "lm_head.")


def one_tower(
    backbone: BackboneConfig,
    reads: str,
    encoder: EncoderConfig,
    files: MadeOfFiles,
    tower: str,
    projector: Mapping[str, str],
    others: Iterable[tuple[str, str]] = (),
    text: str = LANGUAGE_MODEL,
) -> WholeParts:
    """The parts of a whole model with one encoder, which has the name of what it reads.

    tower:     prefix of the encoder's weights in transformers' class.
    projector: weights of the projector, or prefixes of them, in Motet's and in transformers' class.
    others:    as of `WholeParts.names`, of weights in the encoder's callbacks.
    text:      prefix of the backbone's weights but its head's.
    """
    own = f"encoders.{reads}."
    in_projector = ((f"{own}projector.{name}", theirs) for name, theirs in projector.items())
    names = (*backbone_names(text), (f"{own}encoder.model.", tower), *in_projector, *others)
    return WholeParts(backbone, {reads: encoder}, names, {reads: files})


def language_family(config: PreTrainedConfig, where: str, *families: str) -> str:
    """The family of a whole model's backbone. Raises UserError unless it is one of `families`."""
    return _named(config.text_config, BACKBONES, f"{where}: its text_config", families)


def vision_family(config: PreTrainedConfig, where: str, *families: str) -> str:
    """The family of a whole model's vision tower. Raises UserError unless it is one of `families`."""
    return _named(config.vision_config, ENCODERS, f"{where}: its vision_config", families)


def _named(part: PreTrainedConfig, known: dict[str, Family], what: str, families: tuple[str, ...]) -> str:
    names = {known[name].config.model_type: name for name in families}
    if part.model_type not in names:
        raise UserError(
            f"{what} is of type {part.model_type!r}, which is not held to transformers in such a model; it may be "
            f"{', '.join(names)}."
        )
    return names[part.model_type]


def check_option(where: str, key: str, value: object, *allowed: object) -> None:
    """Raise UserError unless an option of a whole model's config has one of the values that Motet computes."""
    if value not in allowed:
        said = " or ".join(repr(each) for each in allowed)
        raise UserError(f"{where}: {key} is {value!r}, which Motet does not compute; it must be {said}.")
