"""The options of an HF config, besides its numbers, that Motet computes as transformers does.

`Backbone` computes embedding, layers, output layer and cross entropy on positions that count from 0 in each document;
encoders compute their layers on packed items. A config with further options is refused with one sentence. If they were
ignored, Motet would silently train another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import (
    CLIPVisionConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    InternVLVisionConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2_5_VLTextConfig,
    Qwen2VLTextConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeTextConfig,
    Qwen3VLTextConfig,
    WhisperConfig,
)
from transformers.activations import ACT2FN
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniTextConfig

from motet.core.errors import UserError
from motet.core.grid_positions import NUM_AXES
from motet.core.words import counted_words
from motet.models.families.internlm2 import InternLM2Config

_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "return_dict": (None, True),
    "chunk_size_feed_forward": (None, 0),
}
"""Option of any model -> the values that Motet computes."""

_ONLY_BACKBONE: dict[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "is_causal": (None, True),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "attention_chunk_size": (None,),
    "pretraining_tp": (None, 1),
    "embd_pdrop": (None, 0),
    **dict.fromkeys(("logit_scale", "scale_emb", "scale_depth", "logits_scaling"), (None, 1)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), (None,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), (None, 0)),
    "router_jitter_noise": (None, 0),
}
"""Option of a backbone -> the values that Motet computes. No family of the registry has other values of these."""

_SOFT_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
"""Options that are numbers in Gemma 2. Gemma 3 has them, too; transformers reads one of them, and Motet none."""

_ONLY_OF: dict[type[PreTrainedConfig], dict[str, tuple[Any, ...]]] = {
    CLIPVisionConfig: {
        **dict.fromkeys(("q_bias", "k_bias", "v_bias"), (None, True)),
        **dict.fromkeys(("post_layernorm", "use_rms_norm"), (None, False)),
    },
    GPT2Config: {"reorder_and_upcast_attn": (None, False)},
    InternLM2Config: {"mlp_bias": (None, False)},
    OPTConfig: {
        "do_layer_norm_before": (None, True),
        "_remove_final_layer_norm": (None, False),
        "layer_norm_elementwise_affine": (None, True),
        "layerdrop": (None, 0),
    },
    WhisperConfig: {"apply_spec_augment": (None, False)},
}
"""Option of one family -> the values that Motet computes. A norm behind attention and narrow embeddings are OPT-350m's;
`reorder_and_upcast_attn` rounds scores to float32 in transformers' eager attention alone. Files of EVA-CLIP have CLIP's
type. Whisper's spectrograms are masked by a class around the encoder, in training."""

_COMPUTED: dict[type[PreTrainedConfig], tuple[str, ...]] = {
    GPT2Config: ("embd_pdrop",),
    GraniteConfig: ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
}
"""Options of all backbones that one family has, and Motet computes there."""

_EXPERTS = ("num_experts", "num_local_experts")
"""Options that are numbers in families with experts; transformers has each by both names."""

_MIXTURES = (MixtralConfig, Qwen3MoeConfig, Qwen3VLMoeTextConfig)
"""Backbones with experts."""

_IN_TURNS = (Qwen3VLTextConfig, Qwen3VLMoeTextConfig)
"""Backbones whose positions have three axes that take turns at channels."""

_ON_GRID = (Qwen2VLTextConfig, Qwen2_5_VLTextConfig, Qwen2_5OmniTextConfig, *_IN_TURNS)
"""Backbones whose positions have three axes."""

_KINDS = ("full_attention", "sliding_attention")

_ROPE: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"}
        | {"mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
}
"""Type of rotary positions -> its options besides the base.

"mrope" is missing: its positions have three axes.
"""
_BY_LENGTH = ("longrope", "dynamic")
"""Types whose frequencies follow from the length of each document."""


def check_backbone(config: PreTrainedConfig, where: str = "") -> None:
    """Raise UserError for options that `Backbone` does not compute as transformers does, and for dims that do not fit.

    where: the prefix of a key in the error sentence, such as "model.backbone.config.".
    """
    has_experts = isinstance(config, _MIXTURES)
    numbers = (_SOFT_CAPS if isinstance(config, Gemma2Config) else ()) + (_EXPERTS if has_experts else ())
    numbers += _COMPUTED.get(type(config), ())
    options = _ONLY | _ONLY_BACKBONE | _ONLY_OF.get(type(config), {})
    _check_only(config, where, {key: only for key, only in options.items() if key not in numbers})
    if isinstance(config, OPTConfig) and config.word_embed_proj_dim != config.hidden_size:
        raise UserError(
            f"{where}word_embed_proj_dim is {config.word_embed_proj_dim}; it must be hidden_size, "
            f"{config.hidden_size}, as Motet does not compute embeddings of another width (OPT-350m)."
        )
    if has_experts and config.num_experts_per_tok > config.num_experts:
        raise UserError(
            f"{where}num_experts_per_tok is {config.num_experts_per_tok}; it must be at most the number of experts, "
            f"{config.num_experts}."
        )
    _check_kinds(config, where)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"{where}num_attention_heads is {heads}; it must be a multiple of num_key_value_heads, {kv_heads}."
        )
    for name, rope in _ropes(config, where).items():
        _check_rope(config, f"{where}{name}", rope)


def check_encoder(config: PreTrainedConfig, where: str = "") -> None:
    """Raise UserError for options that no encoder computes as transformers does, and for dims that do not fit."""
    _check_only(config, where, _ONLY | _ONLY_OF.get(type(config), {}))
    sides = {}
    for key in ("image_size", "patch_size", "temporal_patch_size"):
        size = getattr(config, key, 1)
        if isinstance(config, InternVLVisionConfig) and isinstance(size, list | tuple) and len(set(size)) == 1:
            size = size[0]  # Its sides are given twice.
        if not isinstance(size, int):
            raise UserError(f"{where}{key} is {size!r}; it must be one whole number, as patches and images are square.")
        sides[key] = size
    if hasattr(config, "image_size") and sides["image_size"] < sides["patch_size"]:
        raise UserError(
            f"{where}image_size is {sides['image_size']}; it must be at least patch_size, {sides['patch_size']}."
        )
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return
    if set(rope) - {"rope_type", "type", "rope_theta"} or rope.get("rope_type") != "axial":
        raise UserError(f"{where}rope_parameters is {rope}; only the base, rope_theta, may be set.")
    # Qwen2-VL's hidden_size is the text's width.
    width = "embed_dim" if has_option(config, "embed_dim") else "hidden_size"
    heads = "num_heads" if has_option(config, "num_heads") else "num_attention_heads"
    if getattr(config, width) % (4 * getattr(config, heads)):
        raise UserError(
            f"{where}{width} is {getattr(config, width)}; it must be a multiple of 4 * {heads}, as the channels of a "
            "head turn in pairs, half of them with the row and half with the column."
        )


def check_windows(config: PreTrainedConfig, given: Mapping[str, Any], where: str) -> None:
    """Raise UserError for options of a recipe that ask for windows, and give no layer one, as in transformers.

    given: the options. where: as of `check_backbone`.
    """
    kinds = getattr(config, "layer_types", None)
    first = given.get("max_window_layers")
    if kinds is None or first is None:
        has_effect = getattr(config, "sliding_window", None) is not None and (kinds is None or _KINDS[1] in kinds)
    else:
        has_effect = list(kinds) == [_KINDS[number >= first] for number in range(len(kinds))]
        has_effect = has_effect and (first >= len(kinds) or config.sliding_window is not None)
    asked = [key for key in ("use_sliding_window", "sliding_window", "max_window_layers") if given.get(key) is not None]
    if asked and not has_effect and given.get("use_sliding_window") is not False:
        raise UserError(
            f"{where}{asked[0]} has no effect, as in transformers: windows take use_sliding_window = true where the "
            "family has it, and only layers that layer_types says, or else those from max_window_layers on, have one."
        )


def has_option(config: PreTrainedConfig, key: str) -> bool:
    """Whether the class of `config` has the option. A file may hold options that the class does not have."""
    return key in {field.name for field in fields(config)}


def _check_only(config: PreTrainedConfig, where: str, only: dict[str, tuple[Any, ...]]) -> None:
    if config.is_heterogeneous:
        raise UserError(f"{where}per_layer_config gives layers options of their own, which Motet does not compute.")
    if getattr(config, "attention_dropout", 0) is None:
        raise UserError(f"{where}attention_dropout is None; it must be a number, 0 for none.")
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        if (activation := getattr(config, key, None)) is not None and activation not in ACT2FN:
            raise UserError(f"{where}{key} is {activation!r}; it must be one of {', '.join(ACT2FN)}.")
    for key, allowed in only.items():
        value = getattr(config, key, None)
        if not any(value is each or (value == each and each is not None) for each in allowed):
            raise UserError(
                f"{where}{key} is {value!r}, which Motet does not compute; it must be absent or {allowed[-1]!r}."
            )


def _check_kinds(config: PreTrainedConfig, where: str) -> None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not has_option(config, "layer_types"):
        raise UserError(
            f"{where}layer_types says which layers have a window, but a {config.model_type} model has no such option: "
            "its layers are all alike."
        )
    if kinds is None:
        return
    if unknown := sorted(set(kinds) - set(_KINDS)):
        raise UserError(f"{where}layer_types has {unknown[0]!r}; Motet computes {' and '.join(_KINDS)}.")
    if len(kinds) != config.num_hidden_layers:
        raise UserError(
            f"{where}layer_types has {counted_words(len(kinds), 'entry', 'entries')}; it must have one for each of the "
            f"num_hidden_layers = {counted_words(config.num_hidden_layers, 'layer')}."
        )
    if "sliding_attention" in kinds and config.sliding_window is None:
        raise UserError(
            f"{where}layer_types has 'sliding_attention', but sliding_window is not set to a number of rows."
        )


def _ropes(config: PreTrainedConfig, where: str) -> dict[str, Any]:
    """The tables of rotary options that the model reads, by name: one table, or one for each kind of its layers."""
    if not has_option(config, "rope_parameters") and not hasattr(config, "rope_parameters"):
        return {}  # Positions are learned.
    rope = config.rope_parameters
    if isinstance(config, Gemma3TextConfig):
        if stray := sorted(set(rope) - set(_KINDS)):
            raise UserError(
                f"{where}rope_parameters.{stray[0]} has no effect; it belongs into a table for a kind of layer, "
                f"{' or '.join(_KINDS)}."
            )
        return {f"rope_parameters.{kind}": rope.get(kind) for kind in sorted(set(config.layer_types))}
    return {"rope_parameters": rope}


def _check_rope(config: PreTrainedConfig, name: str, rope: Any) -> None:
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    known = ["default"] if isinstance(config, InternLM2Config) else [*_ROPE]
    on_grid = isinstance(config, _ON_GRID)
    why = "whose rope_type Motet does not compute"
    if on_grid or isinstance(config, Gemma3TextConfig):
        known = [each for each in known if each not in _BY_LENGTH]
        if kind in _BY_LENGTH:
            told = "positions on a grid do not tell" if on_grid else "Motet does not tell each kind of layer"
            why = f"whose frequencies follow from the length of a document, which {told}"
    if kind not in known:
        raise UserError(f"{name} is {rope}, {why}; it must be {', '.join(known)}.")
    options = _ROPE[kind] | {"rope_type", "type", "rope_theta"}
    if on_grid:
        options |= {"mrope_section"}
        _check_sections(config, name, rope.get("mrope_section"))
    if isinstance(config, _IN_TURNS):
        options |= {"mrope_interleaved"}
        if rope.get("mrope_interleaved", True) is not True:
            raise UserError(
                f"{name}.mrope_interleaved is {rope['mrope_interleaved']}; transformers computes true only."
            )
    share = rope.get("partial_rotary_factor")
    if isinstance(config, Phi3Config) or share in (None, 1):
        options |= {"partial_rotary_factor"}
    if stray := sorted(set(rope) - options):
        raise UserError(
            f"{name}.{stray[0]} is {rope[stray[0]]}, which is no option of rope_type {kind!r} and not computed; a "
            "model whose positions have several axes (M-RoPE) is no backbone that Motet knows."
        )
    # Phi3's only type has older names.
    old_name = rope.get("type", kind)
    has_old_name = (isinstance(config, Phi3Config) and old_name in ("su", "yarn")) or (on_grid and old_name == "mrope")
    if old_name != kind and not has_old_name:
        raise UserError(f"{name}.type is {old_name!r}, and rope_type is {kind!r}; they must agree.")
    _check_ranges(name, kind, rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * (share or 1))
    if rotated % 2 or not rotated:
        raise UserError(
            f"{name}: {rotated} channels of a head would turn with the position; their number must be even and not 0, "
            "as they turn in pairs (head_dim, or hidden_size / num_attention_heads)."
        )
    if kind == "dynamic" and rotated == 2:  # The base is raised to the power of rotated / (rotated - 2).
        raise UserError(
            f"{name}: 2 channels of a head would turn with the position; of rope_type 'dynamic' it needs 4."
        )


def _check_sections(config: PreTrainedConfig, name: str, sections: Any) -> None:
    """Each pair of a head's channels turns with one axis of the grid: so many with the first, the second, the third."""
    pairs = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) // 2
    is_three = isinstance(sections, list | tuple) and len(sections) == NUM_AXES
    if not is_three or any(type(each) is not int or each < 1 for each in sections) or sum(sections) != pairs:
        raise UserError(
            f"{name}.mrope_section is {sections!r}; it must be {NUM_AXES} whole numbers that add up to {pairs}, half "
            "the channels of a head."
        )


def _check_ranges(name: str, kind: str, rope: dict[str, Any]) -> None:
    """Frequencies between two limits are blended, so the limits must differ and be in order."""
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if kind == "llama3" and (low is None or high is None or not low < high):
        raise UserError(f"{name}.low_freq_factor is {low}; it must be less than high_freq_factor, {high}.")
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
    if kind == "yarn" and not fast > slow:
        raise UserError(f"{name}.beta_fast is {fast}; it must be more than beta_slow, {slow}.")
