"""What a family of whole models says of itself: its class in transformers, and the parts that its config describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from motet.core.errors import UserError
from motet.models.build import BackboneConfig, EncoderConfig
from motet.models.families.registry import BACKBONES, ENCODERS, GRID_BACKBONES, TOWERS, Family

_LANGUAGE = r"^(model\.)?language_model\.(model\.)?"
"""Where a backbone lies in a larger checkpoint, in each of transformers' formats."""

BACKBONE_NAMES = (
    ("backbone.causal_lm.model.", "model.language_model."),
    ("backbone.causal_lm.lm_head.", "lm_head."),
)
"""Weights of the backbone in an MLLM, and in transformers' class of a whole model: prefixes."""


class WholeBackboneConfig(BackboneConfig):
    """The backbone of a whole model, in whose directory it lies. family: also of those that are nothing else."""

    family: str  # type: ignore[assignment]

    @property
    def classes(self) -> Family:
        family = (BACKBONES | GRID_BACKBONES)[self.family]
        return replace(family, part="text_config", prefixes=_LANGUAGE, prefix="model.")


class TowerConfig(EncoderConfig):
    """A tower that is another in its whole model than by itself. family: of `registry.TOWERS`."""

    family: str  # type: ignore[assignment]

    @property
    def classes(self) -> Family:
        return TOWERS[self.family]


@dataclass(frozen=True)
class Images:
    """What images become before the encoder of a whole model is given them: rows of patches of one size.

    size: (height, width) that its image processor must make.
    """

    patch_size: int
    size: tuple[int, int]


@dataclass(frozen=True)
class Areas:
    """What images become before the encoder of a whole model that takes them in their own aspect.

    patch_size, merge_size: sides of a patch, and of a merge block in patches. temporal_patch_size: repeats of a patch.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int


@dataclass(frozen=True)
class Clips:
    """What clips become before the encoder of a whole model is given them: log-mel frames in a chunk of silence.

    num_mels: values of a frame. max_frames: of the chunk. margin: frames of silence that the encoder sees.
    """

    num_mels: int
    max_frames: int
    margin: int


@dataclass(frozen=True)
class WholeParts:
    """The parts of a whole model.

    names:  prefixes of weights in an MLLM, and in transformers' class. Together they cover all weights of both.
    images: by encoder, what it is given.
    """

    backbone: BackboneConfig
    encoders: dict[str, EncoderConfig]
    names: tuple[tuple[str, str], ...]
    images: dict[str, Images | Areas | Clips] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeFamily:
    """A family of whole models.

    model: transformers' class, which `from_pretrained` reads its directories with.
    parts: config and `Source` -> its parts. Raises UserError for options that Motet does not compute.
    """

    model: type[PreTrainedModel]
    parts: Callable[[PreTrainedConfig, Any], WholeParts]


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
