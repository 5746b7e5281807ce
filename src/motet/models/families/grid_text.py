"""The text models of Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni, Qwen3-VL and Qwen3-VL-MoE as causal LMs: Qwen2, Qwen3 or
Qwen3-MoE on positions of a grid (M-RoPE).

transformers has them only inside of its multimodal classes. The layers, their rotary positions and the names of weights
are its own.
"""

from __future__ import annotations

from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2VLTextConfig,
    Qwen2VLTextModel,
    Qwen3VLMoeConfig,
    Qwen3VLMoeTextConfig,
    Qwen3VLMoeTextModel,
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTextConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerTextModel


class _GridCausalLM(PreTrainedModel):
    """A text model and its output layer. Subclasses name the config and the text model."""

    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012, as transformers has it
    _supports_attention_backend = True
    _supports_sdpa = True
    text_model: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = self.text_model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Qwen2VLCausalLM(_GridCausalLM):
    """Qwen2-VL's."""

    config: Qwen2VLTextConfig
    text_model = Qwen2VLTextModel


class Qwen3VLCausalLM(_GridCausalLM):
    """Qwen3-VL's: Qwen3 on positions whose axes take turns at a head's channels."""

    config: Qwen3VLTextConfig
    text_model = Qwen3VLTextModel


class Qwen3VLMoeCausalLM(_GridCausalLM):
    """Qwen3-VL-MoE's: Qwen3-MoE on the same positions."""

    config: Qwen3VLMoeTextConfig
    text_model = Qwen3VLMoeTextModel


# Published experts lie the other way round, which transformers knows of the whole model's type alone.
register_checkpoint_conversion_mapping(
    Qwen3VLMoeCausalLM.__name__, get_checkpoint_conversion_mapping(Qwen3VLMoeConfig.model_type) or [], overwrite=True
)


class Qwen25VLCausalLM(_GridCausalLM):
    """Qwen2.5-VL's."""

    config: Qwen2_5_VLTextConfig
    text_model = Qwen2_5_VLTextModel


class Qwen25OmniCausalLM(_GridCausalLM):
    """That of Qwen2.5-Omni's thinker: Qwen2.5-VL's, with other positions behind items."""

    config: Qwen2_5OmniTextConfig
    text_model = Qwen2_5OmniThinkerTextModel
