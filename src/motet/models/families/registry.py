"""Which HF classes stand behind each family name, and where its tower sits in a larger checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from torch import nn
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder as HFQwen2AudioEncoder
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder as HFWhisperEncoder

from motet.models.families.clip import ClipEncoder
from motet.models.families.dinov2 import Dinov2Encoder
from motet.models.families.qwen2_audio import Qwen2AudioEncoder
from motet.models.families.qwen2_vl import Qwen2VLEncoder
from motet.models.families.siglip import SiglipEncoder
from motet.models.families.whisper import WhisperEncoder


@dataclass(frozen=True)
class Family:
    """One kind of HF model.

    adapter:    class that makes the HF model fulfil the encoder contract; None for a backbone.
    part:       name under which a larger model's config holds this family's ("vision_config"); "" if none does.
    depth:      the option that says how many layers it has.
    prefixes:   where the weights may sit in a larger checkpoint, as a regular expression; "" if nowhere.
    """

    config: type[transformers.PreTrainedConfig]
    model: type[transformers.PreTrainedModel]
    adapter: type[nn.Module] | None = None
    part: str = ""
    prefixes: str = ""
    depth: str = "num_hidden_layers"


ENCODERS = {
    "siglip": Family(transformers.SiglipVisionConfig, transformers.SiglipVisionModel, SiglipEncoder, "vision_config"),
    "clip": Family(transformers.CLIPVisionConfig, transformers.CLIPVisionModel, ClipEncoder, "vision_config"),
    "dinov2": Family(transformers.Dinov2Config, transformers.Dinov2Model, Dinov2Encoder),
    "qwen2_vl": Family(
        Qwen2VLVisionConfig,
        Qwen2VisionTransformerPretrainedModel,
        Qwen2VLEncoder,
        "vision_config",
        r"^(model\.)?visual\.",
        depth="depth",
    ),
    "whisper": Family(
        transformers.WhisperConfig,
        HFWhisperEncoder,
        WhisperEncoder,
        "",
        r"^(model\.)?encoder\.",
        depth="encoder_layers",
    ),
    "qwen2_audio": Family(
        transformers.Qwen2AudioEncoderConfig,
        HFQwen2AudioEncoder,
        Qwen2AudioEncoder,
        "audio_config",
        r"^(model\.)?audio_tower\.",
        depth="encoder_layers",
    ),
}

BACKBONES = {
    "qwen2": Family(transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": Family(transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": Family(transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": Family(transformers.MistralConfig, transformers.MistralForCausalLM),
}
