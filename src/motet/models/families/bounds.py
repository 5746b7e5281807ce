"""Bounds of the numbers in an HF config. A number out of bounds is refused by its key before HF builds the model.

HF checks only types. A number out of bounds would build for hours (10^9 layers), build nonsense (no layer, weights that
are inf) or fail far away. The bounds hold in a recipe and in a config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from motet.core.errors import UserError
from motet.core.limits import MAX_HEADS, MAX_LAYERS, MAX_MLP, MAX_VOCABULARY, MAX_WIDTH


class Bound(NamedTuple):
    """The range of a number: `least` to `most`, both included. open: without `least`; below: without `most`.

    whole: the number has no fraction.

    Example:
        >>> str(Bound(0, 1, whole=False, below=True)), Bound(1, 8).holds(9)
        ('a number, at least 0 and less than 1', False)
    """

    least: float
    most: float
    whole: bool = True
    open: bool = False
    below: bool = False

    def __str__(self) -> str:
        kind, digits = ("a whole number", "d") if self.whole else ("a number", "g")
        least = "more than" if self.open else "at least"
        most = "less than" if self.below else "at most"
        return f"{kind}, {least} {self.least:{digits}} and {most} {self.most:{digits}}"

    def holds(self, value: float) -> bool:
        """Whether `value` is within the range; nan is not."""
        above = value > self.least if self.open else value >= self.least
        return above and (value < self.most if self.below else value <= self.most)


def _counts(most: int, *keys: str, least: int = 1) -> dict[str, Bound]:
    return dict.fromkeys(keys, Bound(least, most))


_SHARE = Bound(0, 1, whole=False, below=True)
_RANGE = Bound(0, 1, whole=False, open=True)
_EPSILON = Bound(0, 0.1, whole=False, open=True)
_FACTOR = Bound(0, 1e6, whole=False, open=True)

BOUNDS: dict[str, Bound] = {
    **_counts(MAX_VOCABULARY, "vocab_size"),
    **_counts(
        MAX_WIDTH,
        "hidden_size",
        "d_model",
        "n_embd",
        "word_embed_proj_dim",
        "embed_dim",
        "projection_dim",
        "classifier_proj_size",
    ),
    **_counts(MAX_MLP, "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"),
    **_counts(MAX_MLP, "ffn_dim", "n_inner"),
    **_counts(2**16, "num_experts", "num_local_experts", least=0),
    **_counts(2**16, "num_experts_per_tok"),
    **_counts(MAX_LAYERS, "decoder_sparse_step"),
    **_counts(MAX_LAYERS, "mlp_only_layers", least=0),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise"), Bound(0, 1e6, whole=False)),
    **_counts(MAX_LAYERS, "num_hidden_layers", "depth", "encoder_layers", "n_layer", "num_layers"),
    **_counts(MAX_LAYERS, "resampler_depth", "cross_attention_frequency"),
    **_counts(MAX_HEADS, "resampler_n_heads", "resampler_head_dim"),
    **_counts(MAX_LAYERS, "decoder_layers", "max_window_layers", least=0),
    **_counts(MAX_HEADS, "num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "head_dim"),
    **_counts(MAX_HEADS, "encoder_attention_heads", "decoder_attention_heads"),
    **_counts(2**30, "max_position_embeddings", "original_max_position_embeddings", "sliding_window"),
    **_counts(2**30, "n_positions", "num_position_embeddings"),
    **_counts(2**20, "max_source_positions", "max_target_positions"),
    **_counts(2**20, "query_pre_attn_scalar"),
    **_counts(2**16, "image_size", "window_size", "tokens_per_second", "n_window"),
    **_counts(2**24, "num_patches"),
    **_counts(2**10, "num_register_tokens", least=0),
    **_counts(MAX_LAYERS, "fullatt_block_indexes", "deepstack_visual_indexes", least=0),
    **_counts(MAX_LAYERS, "intermediate_layers_indices", "cross_attention_layers", "num_global_layers", least=0),
    **_counts(MAX_HEADS, "attention_heads"),
    **_counts(64, "max_num_tiles"),
    **_counts(2**30, "vision_output_dim"),
    **_counts(MAX_WIDTH, "out_hidden_size", "output_dim"),
    "pos_embed_shift": Bound(0, 1, whole=False),
    **dict.fromkeys(("pos_embed_jitter", "pos_embed_rescale"), _FACTOR),
    **_counts(2**10, "patch_size"),
    "mlp_ratio": Bound(0, 64, whole=False, open=True),
    **_counts(64, "temporal_patch_size", "spatial_merge_size", "num_channels", "in_channels"),
    **_counts(MAX_WIDTH, "block_out_channels", "cross_attention_dim", "norm_num_groups", "attention_head_dim"),
    **_counts(MAX_LAYERS, "layers_per_block", "transformer_layers_per_block"),
    **_counts(2**10, "latent_channels"),
    **_counts(MAX_WIDTH, "caption_channels", "joint_attention_dim", "pooled_projection_dim", "caption_projection_dim"),
    **_counts(2**11, "sample_size", "pos_embed_max_size"),
    **_counts(128, "out_channels"),
    "interpolation_scale": _FACTOR,
    "norm_eps": _EPSILON,
    **_counts(10**5, "num_train_timesteps"),
    **_counts(2**12, "num_mel_bins"),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), _FACTOR),
    "initializer_range": _RANGE,
    "init_std": _RANGE,
    "initializer_factor": Bound(0, 100, whole=False, open=True),
    **dict.fromkeys(("layerscale_value", "layer_scale_init_value"), Bound(0, 100, whole=False, open=True)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), _EPSILON),
    **dict.fromkeys(("attention_dropout", "dropout", "activation_dropout", "hidden_dropout_prob"), _SHARE),
    **dict.fromkeys(
        ("attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "drop_path_rate", "projection_dropout"), _SHARE
    ),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "layerdrop", "attn_pdrop"), _SHARE),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), _FACTOR),
    "rope_theta": Bound(1, 1e12, whole=False, open=True),
    "rope_local_base_freq": Bound(1, 1e12, whole=False, open=True),
    "partial_rotary_factor": Bound(0, 1, whole=False, open=True),
    "factor": Bound(1, 1e6, whole=False),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "attention_factor"), _FACTOR),
    **dict.fromkeys(("beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Bound(0, 1e6, whole=False)),
    **dict.fromkeys(("short_factor", "long_factor"), _FACTOR),
}


def check_bounds(where: str, options: Mapping[str, Any]) -> None:
    """Check every number in `options` and in the tables inside it. None is HF's own default.

    where: the prefix of a key in the error sentence, such as "model.backbone.config.".
    Raises UserError for the first number that is out of bounds, or that has no bound and is inf or nan.
    """
    for key, value in options.items():
        if isinstance(value, Mapping):
            check_bounds(f"{where}{key}.", value)
            continue
        for number in value if isinstance(value, list | tuple) else (value,):
            _check(f"{where}{key}", BOUNDS.get(key), number)


def _check(name: str, bound: Bound | None, value: Any) -> None:
    if not isinstance(value, int | float):
        return  # HF itself refuses a wrong type.
    if bound is None:
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}; it must be finite.")
        return
    fits_kind = not isinstance(value, bool) and (isinstance(value, int) or not bound.whole)
    if not fits_kind or not bound.holds(value):
        raise UserError(f"{name} is {value}; it must be {bound}.")
