"""An encoder of point clouds, as in PointNet (Qi et al., 2017): an MLP for each point, the maximum of every 32."""

import torch
from torch import nn

POINTS_A_ROW = 32


class PointEncoder(nn.Module):
    """Packed clouds to a row of every 32 points; what a cloud becomes does not depend on the others of the call."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.output_dim = width
        self.mlp = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, width))

    def num_outputs(self, sizes):
        """The rows of each cloud. sizes: int64 [num_items, 1], its points."""
        return -(-sizes[:, 0] // POINTS_A_ROW)

    def forward(self, values, sizes):
        """values: [points of all clouds, 3] -> [rows of all clouds, width]."""
        num_points, num_rows = sizes[:, 0], self.num_outputs(sizes)
        in_cloud = torch.cat([torch.arange(count) for count in num_points.tolist()])
        first_row = torch.repeat_interleave(num_rows.cumsum(0) - num_rows, num_points)
        row = (first_row + in_cloud // POINTS_A_ROW).to(values.device)
        features = self.mlp(values)
        rows = features.new_zeros(int(num_rows.sum()), self.output_dim)
        return rows.scatter_reduce(0, row[:, None].expand_as(features), features, "amax", include_self=False)
