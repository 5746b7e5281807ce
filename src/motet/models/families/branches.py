"""How tensor-parallel ranks divide the layers of HF's families: the names of what is cut in each residual branch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorBranch:
    """One branch of a layer, by paths in the layer.

    norm:       what makes the rows that all ranks multiply; "": they are the input of the one column layer.
    columns:    the first products, of which each rank has some rows of the weight and of the bias: heads, or inner
                columns. A layer may lack some of them (None).
    row:        the last product, of which each rank has some columns of the weight.
    head_norms: norms of single heads, whose weights all ranks have.
    has_heads:  whether its columns are those of heads.

    Example:
        >>> attention, mlp = LLAMA_BRANCHES
        >>> mlp.columns, mlp.row
        (('mlp.gate_proj', 'mlp.up_proj'), 'mlp.down_proj')
    """

    norm: str
    columns: tuple[str, ...]
    row: str
    head_norms: tuple[str, ...] = ()
    has_heads: bool = False


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_GATED = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"

LLAMA_BRANCHES = (
    TensorBranch("input_layernorm", _QKV, "self_attn.o_proj", has_heads=True),
    TensorBranch("post_attention_layernorm", *_GATED),
)
QWEN3_BRANCHES = (
    TensorBranch("input_layernorm", _QKV, "self_attn.o_proj", _HEAD_NORMS, has_heads=True),
    LLAMA_BRANCHES[1],
)
GEMMA2_BRANCHES = (LLAMA_BRANCHES[0], TensorBranch("pre_feedforward_layernorm", *_GATED))
GEMMA3_BRANCHES = (QWEN3_BRANCHES[0], GEMMA2_BRANCHES[1])
VISION_BRANCHES = (
    TensorBranch("layer_norm1", _QKV, "self_attn.out_proj", has_heads=True),
    TensorBranch("layer_norm2", ("mlp.fc1",), "mlp.fc2"),
)
"""Siglip's and CLIP's."""
AUDIO_BRANCHES = (
    TensorBranch("self_attn_layer_norm", _QKV, "self_attn.out_proj", has_heads=True),
    TensorBranch("final_layer_norm", ("fc1",), "fc2"),
)
"""Whisper's and Qwen2-Audio's."""
SHAPED_BRANCHES = (
    TensorBranch("attention_norm", ("q_proj", "k_proj", "v_proj"), "o_proj", ("q_norm", "k_norm"), has_heads=True),
    TensorBranch("mlp_norm", ("gate_proj", "up_proj"), "down_proj"),
)
