"""LLaVA 1.5 (Liu et al. 2024, section 3): a vision tower's inner layer, an MLP of two layers, and a causal LM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedConfig

from motet.models.families.patches import feature_layer_of
from motet.models.families.registry import ENCODERS
from motet.models.whole.family import (
    VISION_TOWER,
    MadeOfFiles,
    WholeBackboneConfig,
    WholeEncoderConfig,
    WholeFamily,
    WholeParts,
    check_option,
    language_family,
    one_tower,
    vision_family,
)
from motet.models.whole.processor import Images, check_token_counts
from motet.models.whole.projector import StoredProjectorConfig

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_PROJECTOR = "model.multi_modal_projector."
_WEIGHTS = {
    f"layers.{place}.{kind}": f"linear_{number}.{kind}"
    for place, number in ((0, 1), (2, 2))
    for kind in ("weight", "bias")
}


def _parts(config: LlavaConfig, directory: WholeDirectory) -> WholeParts:
    return llava_parts(config, directory, Images.of(config.vision_config))


def llava_parts(
    config: PreTrainedConfig,
    directory: WholeDirectory,
    images: MadeOfFiles,
    made: dict[str, Callable[[], Any]] | None = None,
    names: tuple[tuple[str, str], ...] = (),
) -> WholeParts:
    """The parts of LLaVA and of what follows it. made: the encoder's callbacks; names: of their weights."""
    where = str(directory.file)
    family = vision_family(config, where, "clip", "siglip")
    check_option(where, "projector_hidden_act", config.projector_hidden_act, "gelu")
    check_option(where, "multimodal_projector_bias", config.multimodal_projector_bias, True)
    strategy = "default" if ENCODERS[family].class_row else "full"
    check_option(where, "vision_feature_select_strategy", config.vision_feature_select_strategy, strategy)
    check_token_counts(
        directory.path,
        patch_size=config.vision_config.patch_size,
        num_additional_image_tokens=int(ENCODERS[family].class_row),
        num_image_tokens=(config.vision_config.image_size // config.vision_config.patch_size) ** 2,
        vision_feature_select_strategy=strategy,
    )
    weights = {own: _PROJECTOR + theirs for own, theirs in _WEIGHTS.items()}
    encoder = WholeEncoderConfig(
        family=family,
        path=directory.path,
        feature_layer=feature_layer_of(config),
        projector=StoredProjectorConfig(tensors=directory.tensors_at(weights)),
        made=made or {},
    )
    return one_tower(
        WholeBackboneConfig(
            family=language_family(config, where, "llama", "mistral", "qwen2", "qwen3", "granite"),
            path=directory.path,
            config={"tie_word_embeddings": config.tie_word_embeddings},
        ),
        "image",
        encoder,
        images,
        VISION_TOWER,
        weights,
        names,
    )


LLAVA = WholeFamily(LlavaForConditionalGeneration, _parts)
