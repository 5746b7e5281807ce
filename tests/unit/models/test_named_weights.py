"""Weights are chosen by patterns of names; a pattern that names none is refused."""

import pytest
import torch
from torch import nn

from motet.core.errors import UserError
from motet.models.build import ModelConfig, build_mllm
from motet.models.named_weights import is_named, weights_named

BACKBONE = {
    "family": "qwen2",
    "config": {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


@pytest.mark.parametrize(
    ("pattern", "is_of_it"),
    [
        ("a.layers.1.*", True),
        ("*.weight", True),
        ("a.layers.[01].mlp.weight", True),
        ("layers.1", False),
        ("A.*", False),
    ],
)
def test_a_pattern_is_of_the_whole_name(pattern, is_of_it):
    assert is_named("a.layers.1.mlp.weight", [pattern]) == is_named("a.layers.1.mlp.weight", ["x", pattern]) == is_of_it


def test_a_shared_weight_has_the_name_that_checkpoints_have():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert weights_named(model, "0.*", "key") == [model[0].weight]
    with pytest.raises(
        UserError, match=r"key: no weight of the model matches '1\.\*'; a name is, for example, '0\.weight'"
    ):
        weights_named(model, "1.*", "key")


def frozen_names(*patterns, **options):
    with torch.device("meta"):
        model = build_mllm(ModelConfig(backbone=BACKBONE, freeze=patterns, **options), 16)
    return {name for name, weight in model.named_parameters() if not weight.requires_grad}


def test_patterns_freeze_weights_of_a_model():
    assert frozen_names() == set()
    assert frozen_names("*.layers.0.*bias", "*embed_tokens*") == {
        "backbone.causal_lm.model.embed_tokens.weight",
        *(f"backbone.causal_lm.model.layers.0.inner.self_attn.{name}_proj.bias" for name in "qkv"),
    }


def test_a_pattern_that_freezes_nothing_is_refused():
    with pytest.raises(UserError, match=r"model\.freeze: no weight of the model matches '\*\.layers\.7\.\*'"):
        frozen_names("*.layers.7.*")

    with pytest.raises(
        UserError, match=r"model\.freeze: all weights that match '\*bias' are frozen without it; remove"
    ):
        frozen_names("*bias", lora={"backbone": {"rank": 2}})
    # What another pattern has frozen has learned before.
    assert frozen_names("*.layers.0.*bias", "*.layers.*bias") == frozen_names("*.layers.*bias")
