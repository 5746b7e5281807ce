"""Linear layers whose weight is stored as [in, out], as GPT-2's are (transformers' Conv1D): the other way round.

Weights keep this shape by their names, in files, checkpoints and the optimizer. What multiplies by a weight views it as
[out, in] first.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear


class TransposedLinear(nn.Linear):
    """x [..., in] -> x weight + bias [..., out]. It has the parameters that it is given.

    Example:
        >>> import torch
        >>> layer = TransposedLinear(nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.zeros(2)))
        >>> layer.in_features, layer(torch.ones(3)).tolist()
        (3, [3.0, 3.0])
    """

    is_transposed = True

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)


def is_transposed(layer: nn.Linear) -> bool:
    """Whether the weight of a linear layer is stored as [in, out]."""
    return getattr(layer, "is_transposed", False)


def out_first(layer: nn.Linear, weight: Tensor | None = None) -> Tensor:
    """The weight of a linear layer as [out, in], a view. weight: in place of its own."""
    weight = layer.weight if weight is None else weight
    return weight.t() if is_transposed(layer) else weight
