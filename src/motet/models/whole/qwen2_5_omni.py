"""The thinker of Qwen2.5-Omni (Xu et al. 2025): images and videos as in Qwen2.5-VL, sound beside them, and text.

Frames of a video stand at their time, 25 positions a second, and rows of a clip at 25 a second, too (TMRoPE, section
2.2). Where a recipe asks for the sound of videos (`use_audio_in_video`), it is a second item of a video's file, and
frames and rows of sound alternate in chunks of time. A directory may be that of the whole model, whose talker and
vocoder stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniPatchMerger

from motet.models.whole.family import (
    LANGUAGE_MODEL,
    TowerConfig,
    WholeBackboneConfig,
    WholeFamily,
    WholeParts,
    backbone_names,
    check_option,
)
from motet.models.whole.merger import MergerProjectorConfig
from motet.models.whole.processor import Clips
from motet.models.whole.projector import StoredProjectorConfig
from motet.models.whole.video_processor import OmniAreas

if TYPE_CHECKING:
    from motet.models.whole.directory import WholeDirectory

_VISION, _AUDIO = "model.visual.", "model.audio_tower."
_MERGER = ("ln_q.weight", *(f"mlp.{place}.{kind}" for place in (0, 2) for kind in ("weight", "bias")))


def _parts(config: Qwen2_5OmniThinkerConfig, directory: WholeDirectory) -> WholeParts:
    where, tower, audio, text = str(directory.file), config.vision_config, config.audio_config, config.text_config
    check_option(where, "vision_config.out_hidden_size", tower.out_hidden_size, text.hidden_size)
    check_option(where, "audio_config.output_dim", audio.output_dim, text.hidden_size)
    merger = {f"merger.{name}": f"{_VISION}merger.{name}" for name in _MERGER}
    matrix = {f"layers.0.{kind}": f"{_AUDIO}proj.{kind}" for kind in ("weight", "bias")}
    image = TowerConfig(
        family="qwen2_5_omni",
        path=directory.path,
        projector=MergerProjectorConfig(
            tensors=directory.tensors_at(merger), merger=Qwen2_5OmniPatchMerger, merge=tower.spatial_merge_size
        ),
    )
    sound = TowerConfig(
        family="qwen2_5_omni_audio",
        path=directory.path,
        projector=StoredProjectorConfig(kind="linear", tensors=directory.tensors_at(matrix)),
    )
    names = (
        *backbone_names(LANGUAGE_MODEL),
        ("encoders.image.encoder.model.", _VISION),
        ("encoders.image.projector.merger.", f"{_VISION}merger."),
        ("encoders.audio.encoder.model.", _AUDIO),
        ("encoders.audio.projector.layers.0.", f"{_AUDIO}proj."),
    )
    areas = OmniAreas(
        tower.patch_size,
        tower.spatial_merge_size,
        tower.temporal_patch_size,
        tokens_per_second=config.position_id_per_seconds,
        seconds_per_chunk=config.seconds_per_chunk,
    )
    return WholeParts(
        WholeBackboneConfig(
            family="qwen2_5_omni",
            path=directory.path,
            config={"tie_word_embeddings": config.tie_word_embeddings},
            lies=(r"^(?:thinker\.)?(model\.|lm_head\.)(?:language_model\.)?", r"\1"),
        ),
        {"image": image, "audio": sound},
        names,
        {"image": areas, "audio": Clips(audio.num_mel_bins, None, 0)},
    )


QWEN2_5_OMNI_THINKER = WholeFamily(Qwen2_5OmniThinkerForConditionalGeneration, _parts)
