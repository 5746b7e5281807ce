"""The HF classes of each family, and the position of its tower in a larger checkpoint.

`Backbone` computes embedding, layers, output layer and cross entropy, and nothing else: no sink, scaled logits of
Granite and soft caps of Gemma 2 alone, and one auxiliary loss, that of routers. So a backbone is listed only if a test
compares its loss and gradients with transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import transformers
from torch import nn
from transformers import (
    Qwen2_5_VLTextConfig,
    Qwen2VLTextConfig,
    Qwen3VLMoeTextConfig,
    Qwen3VLMoeVisionConfig,
    Qwen3VLTextConfig,
    Qwen3VLVisionConfig,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig
from transformers.models.mllama.modeling_mllama import MllamaForCausalLM, MllamaVisionModel
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoderConfig,
    Qwen2_5OmniTextConfig,
    Qwen2_5OmniVisionEncoderConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniAudioEncoder as HFQwen25OmniAudioEncoder,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder as HFQwen2AudioEncoder
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer
from transformers.models.whisper.modeling_whisper import WhisperEncoder as HFWhisperEncoder

from motet.core.errors import UserError
from motet.core.grid_positions import BEHIND_LARGEST, BEHIND_SIDE, KEYS
from motet.core.shapes import Norm
from motet.models.families.branches import (
    AUDIO_BRANCHES,
    DINOV2_BRANCHES,
    DINOV3_BRANCHES,
    EVA_CLIP_BRANCHES,
    GEMMA2_BRANCHES,
    GEMMA3_BRANCHES,
    GPT2_BRANCHES,
    INTERNVL_BRANCHES,
    LLAMA_BRANCHES,
    MLLAMA_BRANCHES,
    MLLAMA_TOWER_BRANCHES,
    OLMO2_BRANCHES,
    PHI3_BRANCHES,
    PIXTRAL_BRANCHES,
    QWEN2_5_OMNI_BRANCHES,
    QWEN2_5_VL_BRANCHES,
    QWEN2_VL_BRANCHES,
    QWEN3_BRANCHES,
    QWEN3_VL_BRANCHES,
    SHAPED_BRANCHES,
    VISION_BRANCHES,
    TensorBranch,
)
from motet.models.families.clip import ClipEncoder
from motet.models.families.dinov2 import Dinov2Encoder
from motet.models.families.dinov3 import Dinov3Encoder
from motet.models.families.eva_clip import EvaClipEncoder, EvaCLIPVisionConfig, EvaCLIPVisionModel
from motet.models.families.grid_text import (
    Qwen2VLCausalLM,
    Qwen3VLCausalLM,
    Qwen3VLMoeCausalLM,
    Qwen25OmniCausalLM,
    Qwen25VLCausalLM,
)
from motet.models.families.idefics3 import Idefics3Tower
from motet.models.families.internlm2 import InternLM2Config, InternLM2ForCausalLM, InternLM2Text
from motet.models.families.internvl import InternVLEncoder
from motet.models.families.mllama import MllamaText, MllamaTower
from motet.models.families.pixtral import PixtralEncoder
from motet.models.families.qwen2_5_omni import Qwen25OmniAudioEncoder, Qwen25OmniAudioTower
from motet.models.families.qwen2_5_vl import Qwen25VLEncoder, Qwen25VLTower
from motet.models.families.qwen2_audio import Qwen2AudioEncoder, Qwen2AudioTower
from motet.models.families.qwen2_vl import Qwen2VLEncoder, Qwen2VLTower
from motet.models.families.qwen3_vl import Qwen3VLEncoder, Qwen3VLTower
from motet.models.families.shaped import (
    ShapedAudioConfig,
    ShapedAudioEncoder,
    ShapedAudioTransformer,
    ShapedCausalLM,
    ShapedLMConfig,
    ShapedVisionConfig,
    ShapedVisionEncoder,
    ShapedVisionTransformer,
)
from motet.models.families.siglip import SiglipEncoder
from motet.models.families.siglip2 import Siglip2Encoder
from motet.models.families.supported import check_backbone, check_encoder
from motet.models.families.text import GPT2Text, GraniteText, OPTText, TextModel
from motet.models.families.whisper import WhisperEncoder


@dataclass(frozen=True)
class Family:
    """One family of HF models.

    adapter:        the class that makes the HF model fulfil the encoder contract; None for a backbone.
    part:           the key of this family's config in a larger model's ("vision_config"); "" if there is none.
    depth:          the option that holds the number of layers.
    prefixes:       a regular expression of the weights' prefixes in a larger checkpoint; "" if there is none.
    prefix:         what stands in the place of these prefixes in the family's own model.
    norm:           the norm of a backbone's layers.
    class_row:      whether the tower computes a class row, which its encoder leaves out.
    feature_layers: whether the encoder can return the output of any layer.
    branches:       how tensor-parallel ranks divide a layer; () if they cannot.
    reads_grids:    whether positions of a backbone's rows are those of a grid (`core/grid_positions.py`).
    behind_grids:   how they go on behind a grid.
    text:           where a backbone's parts are, and what its class does besides Llama's.
    """

    config: type[transformers.PreTrainedConfig]
    model: type[transformers.PreTrainedModel]
    adapter: type[nn.Module] | None = None
    part: str = ""
    prefixes: str = ""
    prefix: str = ""
    depth: str = "num_hidden_layers"
    norm: Norm = "rms"
    class_row: bool = False
    feature_layers: bool = False
    branches: tuple[TensorBranch, ...] = ()
    reads_grids: bool = False
    behind_grids: int = BEHIND_SIDE
    text: type[TextModel] = TextModel

    @property
    def is_part(self) -> bool:
        """Whether its weights may lie among those of a larger model."""
        return self.adapter is not None or bool(self.part)

    def check(self, config: transformers.PreTrainedConfig, where: str) -> None:
        """Raise UserError for options that Motet does not compute; `where` as in `check_backbone`."""
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
        branches=VISION_BRANCHES,
    ),
    "clip": Family(
        transformers.CLIPVisionConfig,
        transformers.CLIPVisionModel,
        ClipEncoder,
        "vision_config",
        _TOWER,
        class_row=True,
        feature_layers=True,
        branches=VISION_BRANCHES,
    ),
    "eva_clip": Family(
        EvaCLIPVisionConfig,
        EvaCLIPVisionModel,
        EvaClipEncoder,
        class_row=True,
        feature_layers=True,
        branches=EVA_CLIP_BRANCHES,
    ),
    "dinov2": Family(
        transformers.Dinov2Config,
        transformers.Dinov2Model,
        Dinov2Encoder,
        class_row=True,
        feature_layers=True,
        branches=DINOV2_BRANCHES,
    ),
    "qwen2_vl": Family(
        Qwen2VLVisionConfig,
        Qwen2VisionTransformerPretrainedModel,
        Qwen2VLEncoder,
        "vision_config",
        r"^(model\.)?visual\.",
        depth="depth",
        branches=QWEN2_VL_BRANCHES,
    ),
    "internvl": Family(
        transformers.InternVLVisionConfig,
        transformers.InternVLVisionModel,
        InternVLEncoder,
        "vision_config",
        _TOWER,
        class_row=True,
        branches=INTERNVL_BRANCHES,
    ),
    "siglip2": Family(
        transformers.Siglip2VisionConfig,
        transformers.Siglip2VisionModel,
        Siglip2Encoder,
        "vision_config",
        _TOWER,
        feature_layers=True,
        branches=VISION_BRANCHES,
    ),
    "pixtral": Family(
        transformers.PixtralVisionConfig,
        transformers.PixtralVisionModel,
        PixtralEncoder,
        "vision_config",
        _TOWER,
        feature_layers=True,
        branches=PIXTRAL_BRANCHES,
    ),
    "dinov3": Family(
        transformers.DINOv3ViTConfig,
        transformers.DINOv3ViTModel,
        Dinov3Encoder,
        class_row=True,
        feature_layers=True,
        branches=DINOV3_BRANCHES,
    ),
    "qwen2_5_vl": Family(
        Qwen2_5_VLVisionConfig,
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen25VLEncoder,
        "vision_config",
        r"^(model\.)?visual\.",
        depth="depth",
        branches=QWEN2_5_VL_BRANCHES,
    ),
    "qwen3_vl": Family(
        Qwen3VLVisionConfig,
        Qwen3VLVisionModel,
        Qwen3VLEncoder,
        "vision_config",
        r"^(model\.)?visual\.",
        depth="depth",
        branches=QWEN3_VL_BRANCHES,
    ),
    "whisper": Family(
        transformers.WhisperConfig,
        HFWhisperEncoder,
        WhisperEncoder,
        "",
        r"^(model\.)?encoder\.",
        depth="encoder_layers",
        branches=AUDIO_BRANCHES,
    ),
    "qwen2_audio": Family(
        transformers.Qwen2AudioEncoderConfig,
        HFQwen2AudioEncoder,
        Qwen2AudioEncoder,
        "audio_config",
        r"^(model\.)?audio_tower\.",
        depth="encoder_layers",
        branches=AUDIO_BRANCHES,
    ),
    "qwen2_5_omni_audio": Family(
        Qwen2_5OmniAudioEncoderConfig,
        HFQwen25OmniAudioEncoder,
        Qwen25OmniAudioEncoder,
        "audio_config",
        r"^(thinker\.)?(model\.)?audio_tower\.",
        depth="encoder_layers",
        branches=AUDIO_BRANCHES,
    ),
}

BACKBONES = {
    "qwen2": Family(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, branches=LLAMA_BRANCHES),
    "qwen3": Family(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, branches=QWEN3_BRANCHES),
    "llama": Family(transformers.LlamaConfig, transformers.LlamaForCausalLM, branches=LLAMA_BRANCHES),
    "internlm2": Family(InternLM2Config, InternLM2ForCausalLM, branches=LLAMA_BRANCHES, text=InternLM2Text),
    "mistral": Family(transformers.MistralConfig, transformers.MistralForCausalLM, branches=LLAMA_BRANCHES),
    "gemma": Family(
        transformers.GemmaConfig, transformers.GemmaForCausalLM, norm="rms_float32", branches=LLAMA_BRANCHES
    ),
    "gemma2": Family(
        transformers.Gemma2Config, transformers.Gemma2ForCausalLM, norm="rms_float32", branches=GEMMA2_BRANCHES
    ),
    "gemma3": Family(
        transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, norm="rms_float32", branches=GEMMA3_BRANCHES
    ),
    "phi3": Family(transformers.Phi3Config, transformers.Phi3ForCausalLM, branches=PHI3_BRANCHES),
    "olmo2": Family(
        transformers.Olmo2Config, transformers.Olmo2ForCausalLM, norm="rms_float32", branches=OLMO2_BRANCHES
    ),
    "mixtral": Family(transformers.MixtralConfig, transformers.MixtralForCausalLM, branches=LLAMA_BRANCHES),
    "qwen3_moe": Family(transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, branches=QWEN3_BRANCHES),
    "granite": Family(
        transformers.GraniteConfig, transformers.GraniteForCausalLM, branches=LLAMA_BRANCHES, text=GraniteText
    ),
    "gpt2": Family(
        transformers.GPT2Config,
        transformers.GPT2LMHeadModel,
        depth="n_layer",
        norm="layer",
        branches=GPT2_BRANCHES,
        text=GPT2Text,
    ),
    "opt": Family(
        transformers.OPTConfig, transformers.OPTForCausalLM, norm="layer", branches=AUDIO_BRANCHES, text=OPTText
    ),
}

GRID_BACKBONES = {
    "qwen2_vl": Family(Qwen2VLTextConfig, Qwen2VLCausalLM, branches=LLAMA_BRANCHES, reads_grids=True),
    "qwen2_5_vl": Family(Qwen2_5_VLTextConfig, Qwen25VLCausalLM, branches=LLAMA_BRANCHES, reads_grids=True),
    "qwen2_5_omni": Family(
        Qwen2_5OmniTextConfig,
        Qwen25OmniCausalLM,
        branches=LLAMA_BRANCHES,
        reads_grids=True,
        behind_grids=BEHIND_LARGEST,
    ),
    "qwen3_vl": Family(Qwen3VLTextConfig, Qwen3VLCausalLM, branches=QWEN3_BRANCHES, reads_grids=True),
    "qwen3_vl_moe": Family(Qwen3VLMoeTextConfig, Qwen3VLMoeCausalLM, branches=QWEN3_BRANCHES, reads_grids=True),
}
"""Backbones of whole models alone: transformers has them as parts of these."""

CROSS_BACKBONES = {
    "mllama": Family(MllamaTextConfig, MllamaForCausalLM, branches=MLLAMA_BRANCHES, behind_grids=KEYS, text=MllamaText)
}
"""Backbones of whole models some of whose layers attend to rows of encoders, which are no rows of the sequence."""

TOWERS = {
    "qwen2_vl": replace(ENCODERS["qwen2_vl"], adapter=Qwen2VLTower),
    "qwen2_5_vl": replace(ENCODERS["qwen2_5_vl"], adapter=Qwen25VLTower),
    "qwen2_audio": replace(ENCODERS["qwen2_audio"], adapter=Qwen2AudioTower),
    "qwen3_vl": replace(ENCODERS["qwen3_vl"], adapter=Qwen3VLTower),
    "qwen3_vl_moe": replace(
        ENCODERS["qwen3_vl"], config=Qwen3VLMoeVisionConfig, model=Qwen3VLMoeVisionModel, adapter=Qwen3VLTower
    ),
    "qwen2_5_omni": Family(
        Qwen2_5OmniVisionEncoderConfig,
        Qwen2_5OmniVisionEncoder,
        Qwen25VLTower,
        "vision_config",
        r"^(thinker\.)?(model\.)?visual\.",
        depth="depth",
        branches=QWEN2_5_OMNI_BRANCHES,
    ),
    "qwen2_5_omni_audio": replace(ENCODERS["qwen2_5_omni_audio"], adapter=Qwen25OmniAudioTower),
    "idefics3": Family(
        Idefics3VisionConfig,
        Idefics3VisionTransformer,
        Idefics3Tower,
        "vision_config",
        r"^(model\.)?vision_model\.",
        branches=VISION_BRANCHES,
    ),
    "smolvlm": Family(
        SmolVLMVisionConfig,
        SmolVLMVisionTransformer,
        Idefics3Tower,
        "vision_config",
        r"^(model\.)?vision_model\.",
        branches=VISION_BRANCHES,
    ),
    "mllama": Family(
        MllamaVisionConfig,
        MllamaVisionModel,
        MllamaTower,
        "vision_config",
        r"^(model\.)?vision_model\.",
        branches=MLLAMA_TOWER_BRANCHES,
    ),
}
"""Towers as whole models have them: the last layers of some are the model's projector."""

SHAPED_BACKBONE = Family(ShapedLMConfig, ShapedCausalLM, depth="num_layers", branches=SHAPED_BRANCHES)

SHAPED_ENCODERS = {
    "vit": Family(
        ShapedVisionConfig, ShapedVisionTransformer, ShapedVisionEncoder, depth="num_layers", branches=SHAPED_BRANCHES
    ),
    "audio": Family(
        ShapedAudioConfig, ShapedAudioTransformer, ShapedAudioEncoder, depth="num_layers", branches=SHAPED_BRANCHES
    ),
}
"""By `kind` of an encoder's table of shapes."""


def backbone_family(causal_lm: nn.Module) -> Family:
    """The family of exactly this class; a subclass may compute anything. Raises UserError for any other class."""
    for family in (*BACKBONES.values(), *GRID_BACKBONES.values(), *CROSS_BACKBONES.values()):
        if type(causal_lm) is family.model:
            return family
    known = ", ".join(family.model.__name__ for family in BACKBONES.values())
    raise UserError(
        f"{type(causal_lm).__name__} is no backbone that Motet computes as transformers does; there are {known}."
    )
