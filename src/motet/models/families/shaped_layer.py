"""A transformer layer of any shape that `core.shapes.Transformer` describes, with exactly the parameters it counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from motet.core.shapes import Norm, Transformer
from motet.models.attention import PackedItems, PaddedClips
from motet.models.rotary import Rotation

_EPSILON = 1e-6
LAYER_SCALE = 0.1
"""The factor of each residual branch with `layer_scale`, before it is trained (InternViT)."""


class ShapedRMSNorm(nn.Module):
    """A root mean square norm in at least float32, as in transformers, with its parameter named as there.

    wide_weight: the weight is multiplied in float32 too ("rms_float32").
    """

    def __init__(self, dim: int, wide_weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.wide_weight, self.eps = wide_weight, _EPSILON

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.wide_weight:
            return (self.weight.to(wide.dtype) * wide).to(hidden.dtype)
        return self.weight * wide.to(hidden.dtype)


def shaped_norm(norm: Norm, dim: int) -> nn.Module:
    """A norm of rows of `dim` elements."""
    return nn.LayerNorm(dim, eps=_EPSILON) if norm == "layer" else ShapedRMSNorm(dim, norm == "rms_float32")


class ShapedLayer(nn.Module):
    """Attention and MLP, each a residual branch that begins with a norm; with four norms it also ends with one."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.shape = shape
        hidden, mlp = shape.hidden, shape.mlp

        def product(name: str, input_dim: int, output_dim: int) -> nn.Linear:
            return nn.Linear(input_dim, output_dim, bias=name in shape.biases)

        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            product("query", hidden, shape.width),
            product("key", hidden, shape.kv_width),
            product("value", hidden, shape.kv_width),
            product("output", shape.width, hidden),
        )
        self.gate_proj = product("mlp", hidden, mlp) if shape.gated else None
        self.up_proj, self.down_proj = product("mlp", hidden, mlp), product("mlp", mlp, hidden)
        self.activation = ACT2FN[shape.activation]
        self.attention_norm, self.mlp_norm = (shaped_norm(shape.norm, hidden) for _ in range(2))
        ends = shape.num_norms == 4
        self.attention_end_norm, self.mlp_end_norm = (shaped_norm(shape.norm, hidden) if ends else None for _ in "12")
        self.q_norm, self.k_norm = self._norms_of_queries_and_keys()
        scales = shape.layer_scale
        self.attention_scale, self.mlp_scale = (
            nn.Parameter(torch.full((hidden,), LAYER_SCALE)) if scales else None for _ in "12"
        )

    def _norms_of_queries_and_keys(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Of each head, or of the whole row of all heads."""
        shape = self.shape
        if shape.qk_norm_rows:
            return shaped_norm(shape.norm, shape.width), shaped_norm(shape.norm, shape.kv_width)
        if shape.qk_norm:
            return shaped_norm(shape.norm, shape.head_width), shaped_norm(shape.norm, shape.head_width)
        return None, None

    def forward(self, hidden: Tensor, extents: PackedItems | PaddedClips, rotation: Rotation | None = None) -> Tensor:
        """hidden [batch, rows, dim] -> the same shape. rotation: of the rows; None if they have positions already."""
        return self.mlp_half(self.attention_half(hidden, extents, rotation), extents, rotation)

    def attention_half(
        self, hidden: Tensor, extents: PackedItems | PaddedClips, rotation: Rotation | None = None
    ) -> Tensor:
        """Attention with its norms, and what went in."""
        attended = self._attend(self.attention_norm(hidden), extents, rotation)
        return hidden + _ended(attended, self.attention_end_norm, self.attention_scale)

    def mlp_half(self, hidden: Tensor, extents: PackedItems | PaddedClips, rotation: Rotation | None = None) -> Tensor:
        """The MLP with its norms, on what attention returns."""
        inner = self.mlp_norm(hidden)
        if self.gate_proj is None:
            inner = self.activation(self.up_proj(inner))
        else:
            inner = self.activation(self.gate_proj(inner)) * self.up_proj(inner)
        return hidden + _ended(self.down_proj(inner), self.mlp_end_norm, self.mlp_scale)

    def _attend(self, rows: Tensor, extents: PackedItems | PaddedClips, rotation: Rotation | None) -> Tensor:
        head_dim = self.shape.head_width
        query, key, value = self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)
        if self.shape.qk_norm_rows:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (each.unflatten(-1, (-1, head_dim)) for each in (query, key, value))
        if self.q_norm is not None and not self.shape.qk_norm_rows:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = rotation.apply(query), rotation.apply(key)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        attended = extents.attend(query, key, value, None, 0.0, self.shape.window or None)
        return self.o_proj(attended.flatten(-2))


def _ended(branch: Tensor, norm: nn.Module | None, scale: nn.Parameter | None) -> Tensor:
    branch = branch if norm is None else norm(branch)
    return branch if scale is None else branch * scale
