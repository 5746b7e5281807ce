"""InternLM2 (Cai et al. 2024) as the Llama that it is: its directories are published for code of their own, which is
not run. One matrix has queries, keys and values by groups: the heads of queries that share a head of keys, that head,
and its values (section 2.2). Names differ, and so do keys of the config; exports have those that were read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from motet.core.errors import UserError
from motet.models.families.text import TextModel

_NOT_OF_FILES = ("rope_parameters", "attention_bias", "mlp_bias", "scaling")
"""Llama's options that InternLM2's files have by other names, or not at all."""


class InternLM2Config(LlamaConfig):
    """What a config.json of InternLM2 says, in Llama's terms.

    is_bounded: whether frequencies would change in documents beyond max_position_embeddings (`dynamic` positions).
    """

    model_type = "internlm2"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> InternLM2Config:
        """The config of a file. Raises UserError for scaled positions of another kind than "dynamic"."""
        stored = dict(config_dict)
        scaling, theta = stored.pop("rope_scaling", None), stored.pop("rope_theta", 10_000.0)
        if scaling is not None and scaling.get("type", scaling.get("rope_type")) != "dynamic":
            raise UserError(f'rope_scaling is {scaling}; of InternLM2 it must be null, or of type "dynamic".')
        stored.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": theta})
        stored["attention_bias"] = stored.pop("bias", stored.get("attention_bias", False))
        return super().from_dict(stored | {"scaling": scaling}, **options)

    @property
    def is_bounded(self) -> bool:
        return getattr(self, "scaling", None) is not None

    def to_dict(self) -> dict[str, Any]:
        """As in a file."""
        found = {name: each for name, each in super().to_dict().items() if name not in _NOT_OF_FILES}
        theta, scaling = self.rope_parameters["rope_theta"], getattr(self, "scaling", None)
        return found | {"rope_theta": theta, "rope_scaling": scaling, "bias": self.attention_bias}


class InternLM2ForCausalLM(LlamaForCausalLM):
    """Llama, by the name that directories have."""

    config: InternLM2Config


class InternLM2Text(TextModel):
    """Documents within the positions of "dynamic" ones have plain frequencies; longer ones are refused."""

    @property
    def num_positions(self) -> int | None:
        config = self.causal_lm.config
        return config.max_position_embeddings if config.is_bounded else None


class _SplitGroups(ConversionOps):
    """Queries, keys and values by groups [groups * (n + 2) * head_dim, ...] -> each by itself."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **known: Any
    ) -> dict[str, Any]:
        (joined,) = map(_tensor, input_dict.values())
        config, rest = known["config"], joined.shape[1:]
        groups = joined.view(config.num_key_value_heads, -1, config.head_dim, *rest)
        parts = groups[:, :-2], groups[:, -2], groups[:, -1]
        return {name: part.reshape(-1, *rest).contiguous() for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return _JoinGroups()


class _JoinGroups(ConversionOps):
    """The way back."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **known: Any
    ) -> dict[str, Any]:
        (target,), config = target_patterns, known["config"]
        parts = [_tensor(input_dict[name]) for name in source_patterns]
        groups = [part.view(config.num_key_value_heads, -1, config.head_dim, *part.shape[1:]) for part in parts]
        return {target: torch.cat(groups, 1).flatten(0, 2).contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        return _SplitGroups()


def _tensor(given: Tensor | list[Tensor]) -> Tensor:
    return given[0] if isinstance(given, list) else given


register_checkpoint_conversion_mapping(
    InternLM2ForCausalLM.__name__,
    [
        *(
            WeightRenaming(theirs, ours)
            for theirs, ours in {
                "model.tok_embeddings": "model.embed_tokens",
                "attention.wo": "self_attn.o_proj",
                "feed_forward.w1": "mlp.gate_proj",
                "feed_forward.w3": "mlp.up_proj",
                "feed_forward.w2": "mlp.down_proj",
                "attention_norm": "input_layernorm",
                "ffn_norm": "post_attention_layernorm",
                r"^output\.": "lm_head.",
            }.items()
        ),
        *(
            WeightConverter(
                f"attention.wqkv.{kind}",
                [f"self_attn.{name}_proj.{kind}" for name in "qkv"],
                operations=[_SplitGroups()],
            )
            for kind in ("weight", "bias")
        ),
    ],
    overwrite=True,
)
