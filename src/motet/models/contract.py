"""What a module must offer to be an encoder of an MLLM, and what a backbone is given: the whole contract.

Any `torch.nn.Module` with the members of `Encoder` can be an encoder. Four more are optional:

    blocks:          list of submodules in execution order, each called with the hidden states as its first positional
                     argument and returning them; each is sharded by itself, and recomputed by itself if asked. Default:
                     none.
    cost:            "packed" (work grows with the sum of lengths; the default) or "padded" (with count x longest).
    lengths(sizes):  int64 [num_items], what the phase is balanced on. Default: the product of an item's sizes.
    layers():        list of `layers.LayerModules` in execution order: what it consists of, for FLOPs, memory, profiles
                     and plans. Default: one product of every row with all linear layers and convolutions.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Encoder(Protocol):
    """An encoder of packed items. output_dim: columns of what it returns."""

    output_dim: int

    def forward(self, values: Tensor, sizes: Tensor) -> Tensor:
        """values [sum(rows), row_dim], sizes int64 [num_items, size_dim] -> [sum(num_outputs(sizes)), output_dim].

        Rows of item 0 come first, then those of item 1, and so on, in both. There is at least one item; `sizes` is on
        the host. The result for an item must not depend on the other items of the call.
        """

    def num_outputs(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that each item becomes, int64 [num_items]; pure arithmetic, called long before any item is decoded."""


class Sequences(Protocol):
    """Documents packed without padding, as `dispatch.PackedSequences` holds them.

    tokens:            int64 [total]; any valid id where a feature row stands.
    targets:           bool [total], True where loss is taken on predicting the token from those before it.
    offsets:           int32 or int64 [num_sequences + 1], on the host.
    feature_positions: per encoder, int64 [rows]: places in [0, total) of its feature rows, in row order.
    """

    tokens: Tensor
    targets: Tensor
    offsets: Tensor
    feature_positions: dict[str, Tensor]
