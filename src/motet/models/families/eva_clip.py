"""EVA-CLIP's vision tower (Sun et al. 2023, 2024) as the CLIP that it is: its directories are published for code of
their own, which is not run. Patches have a bias, no norm stands before the layers, and the config says which of
queries, keys and values have one, whether norms stand behind attention and MLP (EVA02-CLIP-E+) and are root mean
squares (EVA-CLIP-8B, -18B). Names of weights are those of CLIP's files. Exports have them, and the config's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, GenerationConfig, PreTrainedConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from motet.core.errors import UserError
from motet.core.shapes import Transformer, patches
from motet.models.attention import PackedItems
from motet.models.exact import keep_float64
from motet.models.families.clip import ClipEncoder
from motet.models.families.patches import FeatureLayer
from motet.models.layers import LayerModules, any_trainable, unused_layer

_PUBLISHED_TYPE = "clip_vision_model"
"""What published files call the tower, as those of CLIP do."""

_OF_NO_TOWER = frozenset(
    {"_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_cross_attention", "attn_implementation"}
    | {"auto_map", "cross_attention_hidden_size", "decoder_start_token_id", "dropout", "finetuning_task", "is_decoder"}
    | {"pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "prefix", "pruned_heads", "problem_type"}
    | {"task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class"}
    | {"torch_dtype", "torchscript", "use_bfloat16", "model_type", "transformers_version"}
)
"""Keys that earlier transformers wrote into every config, and that EVA-CLIP's code does not read."""


class EvaCLIPVisionConfig(CLIPVisionConfig):
    """What a config.json of EVA-CLIP says of the tower. A norm is taken for one with a centre if it does not say.

    q_bias, k_bias, v_bias: whether queries, keys and values have a bias.
    post_layernorm: norms stand behind attention and MLP, before what went in is added; None is no.
    use_rms_norm:   norms are root mean squares, without a bias.
    """

    model_type = "eva_clip_vision_model"

    hidden_act: str = "gelu"
    q_bias: bool = True
    k_bias: bool = True
    v_bias: bool = True
    post_layernorm: bool | None = False
    use_rms_norm: bool = False

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> EvaCLIPVisionConfig:
        """The config of a file, or of `tower_options`. Raises UserError for a key that nothing here reads."""
        known = {*cls.__dataclass_fields__, *PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(), *_OF_NO_TOWER}
        if unknown := sorted(config_dict.keys() - known):
            raise UserError(f"{unknown[0]} is no option of EVA-CLIP's tower that Motet knows; remove it")
        return super().from_dict(config_dict | {"model_type": cls.model_type}, **options)

    def to_dict(self) -> dict[str, Any]:
        """As in a file, which is told from CLIP's by the name of its class."""
        return super().to_dict() | {"model_type": _PUBLISHED_TYPE, "architectures": ["EvaCLIPVisionModel"]}


def tower_options(stored: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of EVA-CLIP's tower in a config.json of a whole EVA-CLIP or of a tower; None of another model's.

    Raises UserError for a whole EVA-CLIP whose file does not say what its tower is.
    """
    classes = stored.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    if not isinstance(first, str) or not first.startswith("EvaCLIP"):
        return None
    options = stored if first.startswith("EvaCLIPVision") else stored.get("vision_config")
    if not isinstance(options, dict):
        raise UserError(f"it is {first}'s, and has no table vision_config, which would say what its tower is.")
    return {**options, "model_type": EvaCLIPVisionConfig.model_type}


class _Layer(CLIPEncoderLayer):
    """CLIP's, with the biases and norms of the config."""

    def __init__(self, config: EvaCLIPVisionConfig) -> None:
        super().__init__(config)
        width, self.norms_outputs = config.hidden_size, bool(config.post_layernorm)
        for name in "qkv":
            if not getattr(config, f"{name}_bias"):
                setattr(self.self_attn, f"{name}_proj", nn.Linear(width, width, bias=False))
        self.layer_norm1, self.layer_norm2 = _norm(config), _norm(config)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **keywords: Any) -> Tensor:
        """[1, rows, width] -> the same; attention_mask: as of CLIP's layer, the extents of packed items."""
        return _mlp(self, _attention(self, hidden_states, attention_mask, **keywords), attention_mask)


def _norm(config: EvaCLIPVisionConfig) -> nn.Module:
    kind = LlamaRMSNorm if config.use_rms_norm else nn.LayerNorm
    return kind(config.hidden_size, eps=config.layer_norm_eps)


def _attention(layer: Any, hidden: Tensor, segments: PackedItems, **keywords: Any) -> Tensor:
    given = hidden if layer.norms_outputs else layer.layer_norm1(hidden)
    attended, _ = layer.self_attn(given, attention_mask=segments, **keywords)
    return hidden + (layer.layer_norm1(attended) if layer.norms_outputs else attended)


def _mlp(layer: Any, hidden: Tensor, segments: PackedItems) -> Tensor:
    if layer.norms_outputs:
        return hidden + layer.layer_norm2(layer.mlp(hidden))
    return hidden + layer.mlp(layer.layer_norm2(hidden))


class EvaCLIPVisionModel(CLIPVisionModel):
    """transformers' CLIP tower with EVA-CLIP's parts, by the name that directories have."""

    config: EvaCLIPVisionConfig

    def __init__(self, config: EvaCLIPVisionConfig) -> None:
        super().__init__(config)
        convolution = self.embeddings.patch_embedding
        self.embeddings.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, convolution.kernel_size, convolution.stride
        )
        self.pre_layrnorm = nn.Identity()
        self.encoder.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.post_layernorm = _norm(config)
        self.post_init()


class EvaClipEncoder(ClipEncoder):
    """Rows are patches after the last layer, without the norm behind it, which is for the pooled class row."""

    halves = (_attention, _mlp)

    def __init__(self, model: EvaCLIPVisionModel, feature_layer: FeatureLayer = None) -> None:
        keep_float64(model)
        super().__init__(model, feature_layer)

    def layers(self) -> list[LayerModules]:
        model, config = self.model, self.model.config
        hidden, embeddings = config.hidden_size, model.embeddings
        stem = patches(
            config.num_channels * config.patch_size**2,
            hidden,
            num_positions=embeddings.num_positions,
            extra_parameters=hidden,
            trainable=any_trainable(embeddings),
        )
        named = {"query": config.q_bias, "key": config.k_bias, "value": config.v_bias}
        shape = Transformer(
            hidden,
            config.intermediate_size,
            config.num_attention_heads,
            activation=config.hidden_act,
            norm="rms" if config.use_rms_norm else "layer",
            biases=(*(name for name, is_there in named.items() if is_there), "output", "mlp"),
        )
        return [
            LayerModules(stem, (embeddings,)),
            *self.block_layers(shape),
            unused_layer(model.post_layernorm, self.output_dim),
        ]


# Part by part: a prefix that is removed when a model is read is not added where a fresh one is written.
register_checkpoint_conversion_mapping(
    EvaCLIPVisionModel.__name__,
    [WeightRenaming(rf"^vision_model\.{part}\.", f"{part}.") for part in ("embeddings", "encoder", "post_layernorm")],
    overwrite=True,
)
