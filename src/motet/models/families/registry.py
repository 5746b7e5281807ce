"""Which HF classes stand behind each family name, and where its tower sits in a larger checkpoint.

A backbone stands here only if a test holds its loss and gradients to transformers' own: `Backbone` computes embedding,
layers, output layer and cross entropy, and nothing besides (no soft cap, logit scale, sink or auxiliary loss).
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from torch import nn
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder as HFQwen2AudioEncoder
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder as HFWhisperEncoder

from motet.core.errors import UserError
from motet.core.shapes import Norm
from motet.models.families.clip import ClipEncoder
from motet.models.families.dinov2 import Dinov2Encoder
from motet.models.families.qwen2_audio import Qwen2AudioEncoder
from motet.models.families.qwen2_vl import Qwen2VLEncoder
from motet.models.families.siglip import SiglipEncoder
from motet.models.families.understood import check_backbone, check_encoder
from motet.models.families.whisper import WhisperEncoder


@dataclass(frozen=True)
class Family:
    """One kind of HF model.

    adapter:    class that makes the HF model fulfil the encoder contract; None for a backbone.
    part:       name under which a larger model's config holds this family's ("vision_config"); "" if none does.
    depth:      the option that says how many layers it has.
    prefixes:   where the weights may sit in a larger checkpoint, as a regular expression; "" if nowhere.
    norm:       of a backbone's layers.
    class_row:  a tower computes a row of its own beside the patches, which its encoder leaves out.
    feature_layers: the output of any layer can be taken.
    """

    config: type[transformers.PreTrainedConfig]
    model: type[transformers.PreTrainedModel]
    adapter: type[nn.Module] | None = None
    part: str = ""
    prefixes: str = ""
    depth: str = "num_hidden_layers"
    norm: Norm = "rms"
    class_row: bool = False
    feature_layers: bool = False

    def check(self, config: transformers.PreTrainedConfig, where: str) -> None:
        """Raises UserError for what a config says and Motet does not compute; `where` as in `understood`."""
        (check_encoder if self.adapter else check_backbone)(config, where)


_TOWER = r"^(model\.)?vision_tower\."

ENCODERS = {
    "siglip": Family(
        transformers.SiglipVisionConfig,
        transformers.SiglipVisionModel,
        SiglipEncoder,
        "vision_config",
        _TOWER,
        feature_layers=True,
    ),
    "clip": Family(
        transformers.CLIPVisionConfig,
        transformers.CLIPVisionModel,
        ClipEncoder,
        "vision_config",
        _TOWER,
        class_row=True,
        feature_layers=True,
    ),
    "dinov2": Family(
        transformers.Dinov2Config, transformers.Dinov2Model, Dinov2Encoder, class_row=True, feature_layers=True
    ),
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
    "gemma": Family(transformers.GemmaConfig, transformers.GemmaForCausalLM, norm="rms_float32"),
    "gemma3": Family(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, norm="rms_float32"),
    "phi3": Family(transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "olmo2": Family(transformers.Olmo2Config, transformers.Olmo2ForCausalLM, norm="rms_float32"),
}


def backbone_family(causal_lm: nn.Module) -> Family:
    """Of exactly this class: one that inherits from it may compute anything. Raises UserError for any other class."""
    for family in BACKBONES.values():
        if type(causal_lm) is family.model:
            return family
    known = ", ".join(family.model.__name__ for family in BACKBONES.values())
    raise UserError(
        f"{type(causal_lm).__name__} is no backbone that Motet computes as transformers does; there are {known}."
    )
