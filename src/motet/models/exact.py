"""Root-mean-square norms that keep float64.

HF's RMSNorm always computes in float32, so a float64 model has activations and gradients rounded to 1e-7. A gradient
scaled by another number of ranks rounds differently, so runs could not be compared to 1e-10.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from motet.models.block import is_changed


class Float64RMSNorm(nn.Module):
    """HF's RMSNorm in float64, with the same parameter under the same name.

    from_one: the weight is added to 1, as in Gemma.
    """

    def __init__(self, weight: nn.Parameter, eps: float, from_one: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.from_one = from_one

    def forward(self, hidden: Tensor) -> Tensor:
        scale = 1 + self.weight if self.from_one else self.weight
        return scale * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


def keep_float64(model: nn.Module) -> None:
    """Replace HF's RMSNorms in a float64 model, and keep the factor of Gemma 3's embeddings in float64.

    A model of any other dtype stays as it is, and so does a norm with a hook or a `forward` of its own.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            kind = type(child).__name__
            eps = getattr(child, "eps" if kind.startswith("Gemma") else "variance_epsilon", None)
            is_hf = kind.endswith("RMSNorm") and eps is not None and not is_changed(child)
            if is_hf and child.weight.dtype == torch.float64:
                parent._modules[name] = Float64RMSNorm(child.weight, eps, from_one=kind.startswith("Gemma"))
            if hasattr(child, "scalar_embed_scale") and child.weight.dtype == torch.float64:
                child.embed_scale = torch.tensor(child.scalar_embed_scale, dtype=torch.float64)
