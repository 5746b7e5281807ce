"""Parameters as rows of DTensors, as FSDP2 has them, so that checkpoints and optimizers know no other form."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from motet.runtime.holders import RankGroups, Sharing
from motet.runtime.mesh import REPLICATE, SHARD


def share_out(
    model: nn.Module, sharings: Mapping[str, Sharing], rank: int, groups: RankGroups, device_type: str
) -> None:
    """Replace parameters of a model, in place, by DTensors with the rows of this rank. It communicates nothing.

    sharings: name -> sharing, of the parameters that are shared out. Values of a parameter that is not on meta must be
              the same on all ranks.
    """
    meshes: dict[tuple[object, ...], DeviceMesh] = {}
    parameters, shards = dict(model.named_parameters()), {}
    for name, sharing in sharings.items():
        key = sharing.ranks, sharing.shard_size
        if key not in meshes:
            meshes[key] = _mesh(sharing, rank, groups, device_type)
        parameter, mesh = parameters[name], meshes[key]
        first, stop = row_range(len(parameter), mesh)
        rows = parameter.detach()[first:stop].clone()
        rows = rows if rows.is_meta else rows.to(device_type)
        shards[id(parameter)] = nn.Parameter(as_shard(rows, mesh, parameter.shape), parameter.requires_grad)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in shards:
                module._parameters[key] = shards[id(parameter)]


def as_shard(rows: Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """The DTensor of a tensor of this shape, of which this rank has these rows."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def row_range(num_rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """(first, stop) of the rows of this rank, cut as torch.chunk cuts."""
    size = -(-num_rows // mesh.size(mesh.ndim - 1))
    first = min(mesh.get_local_rank(SHARD) * size, num_rows)
    return first, min(first + size, num_rows)


def _mesh(sharing: Sharing, rank: int, groups: RankGroups, device_type: str) -> DeviceMesh:
    shards = groups[sharing.shards(rank)]
    assert shards is not None, "a single rank shares nothing out"
    if sharing.shard_size == len(sharing.ranks):
        return DeviceMesh.from_group(shards, device_type, mesh_dim_names=(SHARD,))
    copies = groups[sharing.copies(rank)]
    assert copies is not None
    mesh = torch.tensor(sharing.ranks).view(-1, sharing.shard_size)
    return DeviceMesh.from_group([copies, shards], device_type, mesh=mesh, mesh_dim_names=(REPLICATE, SHARD))
