"""The mergers of Qwen's vision towers as projectors: the patches of a block become one row of the backbone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.shapes import merge
from motet.models.layers import LayerModules, any_trainable
from motet.models.whole.projector import StoredProjectorConfig, with_weights


class MergerProjectorConfig(StoredProjectorConfig):
    """A merger with stored weights. merger, merge: as of `MergerProjector`."""

    merger: type[nn.Module]
    merge: int

    def build(self, input_dim: int, output_dim: int) -> MergerProjector:
        """The projector, with its weights unless it has shapes only. Its dtype is that of the files."""
        return with_weights(MergerProjector(input_dim, output_dim, self.merger, self.merge), self.tensors)


class MergerProjector(nn.Module):
    """transformers' own merger. Rows of merge x merge neighbours, which are consecutive, become one row.

    merger: the class, called with the widths behind it and before it, and the side of a block. merge: this side.

    Example:
        >>> from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchMerger
        >>> MergerProjector(8, 32, PatchMerger, merge=2).raster(np.array([[4, 6]])).tolist()
        [[2, 3]]
    """

    kind = "merger"
    shareable = True
    """As of `Projector`: a block's rows are consecutive, and a rank has whole blocks."""

    def __init__(self, input_dim: int, output_dim: int, merger: type[nn.Module], merge: int) -> None:
        super().__init__()
        self.input_dim, self.output_dim, self.merge, self.downsample = input_dim, output_dim, merge, merge**2
        self.merger = merger(dim=output_dim, context_dim=input_dim, spatial_merge_size=merge)

    @property
    def blocks(self) -> list[nn.Module]:
        """None: it is sharded with what stands outside of the encoder's blocks."""
        return []

    def described(self, divisor: int) -> list[LayerModules]:
        """Its layer. divisor: length of an item that makes one row of the encoder's output."""
        layer = merge(
            self.input_dim,
            self.output_dim,
            self.downsample,
            divisor=divisor * self.downsample,
            trainable=any_trainable(self),
        )
        # Its norm may lack a bias.
        return [LayerModules(replace(layer, parameters=sum(each.numel() for each in self.parameters())), (self,))]

    def raster(self, extents: Int64Array) -> Int64Array:
        """Rows and columns of each item's output rows, int64 [num_items, 2], or frames before them, [num_items, 3]."""
        return np.concatenate([extents[:, :-2], extents[:, -2:] // self.merge], axis=1)

    def num_outputs(self, extents: Int64Array) -> Int64Array:
        """Output rows of each image, int64 [num_items]."""
        return np.prod(self.raster(extents), axis=1)

    def forward(self, rows: Tensor, extents: Int64Array) -> Tensor:
        """rows [sum(rows of an image), input_dim] -> [sum(num_outputs), output_dim]. extents: sides, behind frames."""
        return self.merger(rows)
