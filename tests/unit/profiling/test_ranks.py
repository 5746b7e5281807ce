"""Layers that a profile cannot share among ranks are named, with the reason, before any rank tries."""

import pytest
from torch import nn
from transformers import Olmo2Config, Phi3Config, Qwen3Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from motet.core.shapes import Transformer
from motet.models.block import Block
from motet.models.families.shaped_layer import ShapedLayer
from motet.profiling.ranks import _obstacle, _remainder

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("config", "layer", "num_ranks", "reason"),
    [
        (Qwen3Config, Qwen3DecoderLayer, 2, ""),
        (Qwen3Config, Qwen3DecoderLayer, 4, "its layers have 2 key-value heads, which is no multiple"),
        (Phi3Config, Phi3DecoderLayer, 2, "gate_up_proj, qkv_proj, of which it is not known how to share them"),
        (Olmo2Config, Olmo2DecoderLayer, 2, "its q_norm is of all heads together"),
    ],
)
def test_what_cannot_be_shared_is_named(config, layer, num_ranks, reason):
    sizes = SIZES if config is Qwen3Config else {key: size for key, size in SIZES.items() if key != "head_dim"}
    block = Block(layer(config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1), layer_idx=0))
    found = _obstacle(block) or _remainder(block, 16, 32, num_ranks)
    assert reason in found and bool(found) == bool(reason)


def test_layers_that_are_made_from_sizes_are_named():
    """They have no attention module of transformers, whose products could be shared; nor have layers of one's own."""
    assert "made from sizes alone" in _obstacle(Block(ShapedLayer(Transformer(8, 16, num_heads=2))))
    assert "have no self_attn" in _obstacle(Block(nn.Linear(4, 4)))
