"""How tensor-parallel ranks divide the layers of HF's families: the names of what is cut in each residual branch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorBranch:
    """One branch of a layer, by paths in the layer.

    norm:       what makes the rows that all ranks multiply; "": they are the input of what holds the row layer.
    columns:    the first products, of which each rank has some rows of the weight and of the bias: heads, or inner
                columns. A layer may lack some of them (None).
    row:        the last product, of which each rank has some columns of the weight. A layer without it has no such
                branch.
    head_norms: norms of single heads, whose weights all ranks have.
    row_norms:  norms of all heads together, of whose weights each rank has those of its columns.
    has_heads:  whether its columns are those of heads.
    fused:      the one product that the family computes for all `columns`, which are named after it ("0", "1", ...)
                once it is split. The first has as many rows as `row` has columns; the others share the rest equally.
    keys:       the argument by which what holds the row layer is given keys beside the rows, which all columns but the
                first multiply; "": they multiply what the first does. All ranks have the keys, and all rows.
    inputs:     the module whose input `columns` multiply; "": as `norm` says.
    beside:     further first products, of `encoder_hidden_states` that this module is given.
    beside_row: the last product of what these become. A layer may lack it (None).

    Example:
        >>> attention, mlp = LLAMA_BRANCHES
        >>> mlp.columns, mlp.row
        (('mlp.gate_proj', 'mlp.up_proj'), 'mlp.down_proj')
    """

    norm: str
    columns: tuple[str, ...]
    row: str
    head_norms: tuple[str, ...] = ()
    row_norms: tuple[str, ...] = ()
    has_heads: bool = False
    fused: str = ""
    keys: str = ""
    inputs: str = ""
    beside: tuple[str, ...] = ()
    beside_row: str = ""

    @property
    def rows(self) -> tuple[str, ...]:
        """The last products."""
        return (self.row, self.beside_row) if self.beside_row else (self.row,)


def _numbered(path: str, count: int) -> tuple[str, ...]:
    return tuple(f"{path}.{number}" for number in range(count))


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_GATED = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"

LLAMA_BRANCHES = (
    TensorBranch("input_layernorm", _QKV, "self_attn.o_proj", has_heads=True),
    TensorBranch("post_attention_layernorm", *_GATED),
)
"""Those of Mixtral, too, whose layers have experts in place of the second branch (`models/experts.py`)."""
QWEN3_BRANCHES = (
    TensorBranch("input_layernorm", _QKV, "self_attn.o_proj", _HEAD_NORMS, has_heads=True),
    LLAMA_BRANCHES[1],
)
GEMMA2_BRANCHES = (LLAMA_BRANCHES[0], TensorBranch("pre_feedforward_layernorm", *_GATED))
GEMMA3_BRANCHES = (QWEN3_BRANCHES[0], GEMMA2_BRANCHES[1])
OLMO2_BRANCHES = (
    TensorBranch("", _QKV, "self_attn.o_proj", row_norms=_HEAD_NORMS, has_heads=True),
    TensorBranch("", *_GATED),
)
"""Norms stand behind attention and MLP, before what went in is added."""
PHI3_BRANCHES = (
    TensorBranch(
        "input_layernorm", _numbered("self_attn.qkv_proj", 3), "self_attn.o_proj", has_heads=True,
        fused="self_attn.qkv_proj",
    ),
    TensorBranch(
        "post_attention_layernorm", _numbered("mlp.gate_up_proj", 2), "mlp.down_proj", fused="mlp.gate_up_proj"
    ),
)  # fmt: skip
GPT2_BRANCHES = (
    TensorBranch("ln_1", _numbered("attn.c_attn", 3), "attn.c_proj", has_heads=True, fused="attn.c_attn"),
    TensorBranch("ln_2", ("mlp.c_fc",), "mlp.c_proj"),
)
MLLAMA_BRANCHES = (
    *LLAMA_BRANCHES,
    TensorBranch(
        "input_layernorm", tuple(f"cross_attn.{name}_proj" for name in "qkv"), "cross_attn.o_proj",
        ("cross_attn.q_norm", "cross_attn.k_norm"), has_heads=True, keys="cross_attention_states",
    ),
)  # fmt: skip
"""A layer attends to its sequence, or to rows of images beside it."""
VISION_BRANCHES = (
    TensorBranch("layer_norm1", _QKV, "self_attn.out_proj", has_heads=True),
    TensorBranch("layer_norm2", ("mlp.fc1",), "mlp.fc2"),
)
"""Those of Siglip, CLIP and Idefics3."""
EVA_CLIP_BRANCHES = (
    TensorBranch("", _QKV, "self_attn.out_proj", has_heads=True),
    TensorBranch("", ("mlp.fc1",), "mlp.fc2"),
)
"""Norms stand before attention and MLP or behind them, as the config says."""
DINOV2_BRANCHES = (
    TensorBranch("norm1", tuple(f"attention.{name}_proj" for name in "qkv"), "attention.o_proj", has_heads=True),
    TensorBranch("norm2", ("mlp.fc1",), "mlp.fc2"),
    TensorBranch("norm2", *_GATED),
)
"""Its MLP is gated or not."""
DINOV3_BRANCHES = (DINOV2_BRANCHES[0], DINOV2_BRANCHES[2])
"""Its MLP has a gate or not, and other names than Dinov2's without."""
PIXTRAL_BRANCHES = (
    TensorBranch(
        "attention_norm", tuple(f"attention.{name}_proj" for name in "qkv"), "attention.o_proj", has_heads=True
    ),
    TensorBranch("ffn_norm", ("feed_forward.gate_proj", "feed_forward.up_proj"), "feed_forward.down_proj"),
)
INTERNVL_BRANCHES = (
    TensorBranch(
        "layernorm_before", tuple(f"attention.{name}_proj" for name in "qkv"), "attention.projection_layer",
        has_heads=True,
    ),
    TensorBranch("layernorm_after", ("mlp.fc1",), "mlp.fc2"),
)  # fmt: skip
QWEN2_VL_BRANCHES = (
    TensorBranch("norm1", _numbered("attn.qkv", 3), "attn.proj", has_heads=True, fused="attn.qkv"),
    TensorBranch("norm2", ("mlp.fc1",), "mlp.fc2"),
)
QWEN2_5_OMNI_BRANCHES = (
    TensorBranch("norm1", tuple(f"attn.{name}" for name in "qkv"), "attn.proj", has_heads=True),
    TensorBranch("norm2", *_GATED),
)
QWEN2_5_VL_BRANCHES = (QWEN2_VL_BRANCHES[0], TensorBranch("norm2", *_GATED))
QWEN3_VL_BRANCHES = (QWEN2_VL_BRANCHES[0], TensorBranch("norm2", ("mlp.linear_fc1",), "mlp.linear_fc2"))
AUDIO_BRANCHES = (
    TensorBranch("self_attn_layer_norm", _QKV, "self_attn.out_proj", has_heads=True),
    TensorBranch("final_layer_norm", ("fc1",), "fc2"),
)
"""Whisper's and Qwen2-Audio's."""
MLLAMA_TOWER_BRANCHES = (
    TensorBranch("input_layernorm", _QKV, "self_attn.o_proj", has_heads=True),
    TensorBranch("post_attention_layernorm", ("mlp.fc1",), "mlp.fc2"),
)
DIT_BRANCHES = (
    TensorBranch("", _numbered("attention.input", 3), "attention.output", has_heads=True, fused="attention.input"),
    TensorBranch("", ("mlp.0",), "mlp.2"),
)
"""What scales and shifts the rows of a branch, and its outcome, is whole on every rank."""


def _of_diffusers(
    path: str, beside: tuple[str, ...] = (), beside_row: str = "", queries_alone: bool = False
) -> TensorBranch:
    """An Attention of diffusers. queries_alone: keys and values are of what is given beside."""
    names = ("to_q",) if queries_alone else ("to_q", "to_k", "to_v")
    columns, others = (tuple(f"{path}.{name}" for name in each) for each in (names, beside))
    norms = tuple(f"{path}.norm_{name}" for name in (("q", "k", "added_q", "added_k") if beside_row else ("q", "k")))
    row = f"{path}.{beside_row}" if beside_row else ""
    return TensorBranch(
        "", columns, f"{path}.to_out.0", norms, has_heads=True, inputs=path, beside=others, beside_row=row
    )


def _feed_forward(path: str) -> TensorBranch:
    """A FeedForward of diffusers."""
    return TensorBranch("", (f"{path}.net.0.proj",), f"{path}.net.2", inputs=path)


SD3_BRANCHES = (
    _of_diffusers("attn", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out"),
    _of_diffusers("attn2"),
    _feed_forward("ff"),
    _feed_forward("ff_context"),
)
"""Some blocks have a second attention; the last one gives no rows of conditions, and has no MLP for them."""
PIXART_BRANCHES = (
    _of_diffusers("attn1"),
    _of_diffusers("attn2", ("to_k", "to_v"), queries_alone=True),
    _feed_forward("ff"),
)
SHAPED_BRANCHES = (
    TensorBranch("attention_norm", ("q_proj", "k_proj", "v_proj"), "o_proj", ("q_norm", "k_norm"), has_heads=True),
    TensorBranch("mlp_norm", ("gate_proj", "up_proj"), "down_proj"),
)
