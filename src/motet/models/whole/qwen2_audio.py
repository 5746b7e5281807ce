"""Qwen2-Audio (Chu et al. 2024, section 2): Whisper's encoder with rows averaged in pairs, a matrix, and Qwen2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from motet.models.families.qwen2_audio import Qwen2AudioTower
from motet.models.whole.family import (
    TowerConfig,
    WholeBackboneConfig,
    WholeFamily,
    WholeParts,
    check_option,
    language_family,
    one_tower,
)
from motet.models.whole.processor import Clips
from motet.models.whole.projector import StoredProjectorConfig

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_LINEAR = "model.multi_modal_projector.linear."


def _parts(config: Qwen2AudioConfig, directory: WholeDirectory) -> WholeParts:
    where, tower = str(directory.file), config.audio_config
    check_option(where, "audio_config.model_type", tower.model_type, "qwen2_audio_encoder")
    names = {f"layers.0.{kind}": _LINEAR + kind for kind in ("weight", "bias")}
    encoder = TowerConfig(
        family="qwen2_audio",
        path=directory.path,
        projector=StoredProjectorConfig(kind="linear", tensors=directory.tensors_at(names)),
    )
    return one_tower(
        # transformers' class ties no weights, whatever the config says.
        WholeBackboneConfig(
            family=language_family(config, where, "qwen2"), path=directory.path, config={"tie_word_embeddings": False}
        ),
        "audio",
        encoder,
        Clips(tower.num_mel_bins, 2 * tower.max_source_positions, Qwen2AudioTower.margin),
        "model.audio_tower.",
        {"layers.0.": _LINEAR},
    )


QWEN2_AUDIO = WholeFamily(Qwen2AudioForConditionalGeneration, _parts)
