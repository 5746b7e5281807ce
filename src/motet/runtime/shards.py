"""Parameters as rows of DTensors, as FSDP2 has them, so that checkpoints and optimizers know no other form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from motet.runtime.holders import RankGroups, Sharing
from motet.runtime.mesh import REPLICATE, SHARD, TENSOR
from motet.tensor_parallel import part_of


def share_out(
    model: nn.Module, sharings: Mapping[str, Sharing], rank: int, groups: RankGroups, device_type: str
) -> None:
    """Replace parameters of a model, in place, by DTensors with the part of this rank. It communicates nothing.

    sharings: name -> sharing, of the parameters that are shared out. Values of a parameter that is not on meta must be
              the same on all ranks.
    """
    meshes: dict[tuple[object, ...], DeviceMesh] = {}
    parameters, shards = dict(model.named_parameters()), {}
    for name, sharing in sharings.items():
        key = sharing.ranks, sharing.shard_size, sharing.cut is not None
        if key not in meshes:
            meshes[key] = _mesh(sharing, rank, groups, device_type)
        parameter, mesh = parameters[name], meshes[key]
        whole = parameter.detach()
        if sharing.cut is not None:
            first, stop = cut_range(parameter.shape[sharing.cut], mesh)
            whole = whole.narrow(sharing.cut, first, stop - first)
        first, stop = row_range(len(whole), mesh)
        rows = whole[first:stop].clone(memory_format=torch.contiguous_format)
        rows = rows if rows.is_meta else rows.to(device_type)
        placements = [_placement(axis, sharing.cut) for axis in mesh.mesh_dim_names or ()]
        shards[id(parameter)] = nn.Parameter(as_shard(rows, mesh, placements, parameter.shape), parameter.requires_grad)
    _replace(model, shards)


def keep_cut(model: nn.Module, cuts: Mapping[str, int], mesh: DeviceMesh) -> dict[str, torch.Size]:
    """Reduce parameters of a model, in place, to the part of this rank by the axis TENSOR of a mesh; returns the shapes
    of the whole.

    cuts: name -> the dimension that is cut. Values of a parameter that is not on meta must be the same on all ranks.
    """
    parameters, parts, shapes = dict(model.named_parameters()), {}, {}
    for name, cut in cuts.items():
        parameter = parameters[name]
        first, stop = cut_range(parameter.shape[cut], mesh)
        part = parameter.detach().narrow(cut, first, stop - first).clone(memory_format=torch.contiguous_format)
        parts[id(parameter)], shapes[name] = nn.Parameter(part, parameter.requires_grad), parameter.shape
    _replace(model, parts)
    return shapes


def name_cut(model: nn.Module, cuts: Mapping[str, int], shapes: Mapping[str, torch.Size], mesh: DeviceMesh) -> None:
    """Let what FSDP2 has made of the parts of `keep_cut` say which part of the whole it is, in place.

    mesh: with the axis TENSOR, and behind it those over which FSDP2 shares the parts out. FSDP2 takes a parameter that
    is another one than its own as that parameter is, layout included, before the first pass.
    """
    parameters, whole = dict(model.named_parameters()), {}
    for name, cut in cuts.items():
        part = parameters[name]
        assert isinstance(part, DTensor), f"FSDP2 shares out every parameter, and {name} is whole"
        placements = [_placement(axis, cut) for axis in mesh.mesh_dim_names or ()]
        shard = as_shard(part.detach().to_local(), mesh, placements, shapes[name])
        whole[id(part)] = nn.Parameter(shard, part.requires_grad)
    _replace(model, whole)


def _replace(model: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters in the place of a model's. others: id of a parameter -> the one that takes its place."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in others:
                module._parameters[key] = others[id(parameter)]


def as_shard(rows: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """The DTensor of a tensor of this shape, of which this rank has this part."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=stride)


def row_range(num_rows: int, mesh: DeviceMesh) -> tuple[int, int]:
    """(first, stop) of the rows that this rank stores of those that its passes use, cut as torch.chunk cuts."""
    return _range(num_rows, mesh, SHARD)


def cut_range(num: int, mesh: DeviceMesh) -> tuple[int, int]:
    """(first, stop) of the rows or columns that the passes of this rank use, of all; cut as torch.chunk cuts."""
    return _range(num, mesh, TENSOR)


def _range(num: int, mesh: DeviceMesh, axis: str) -> tuple[int, int]:
    names = mesh.mesh_dim_names or ()
    return part_of(num, mesh.get_local_rank(axis), mesh.size(names.index(axis))) if axis in names else (0, num)


def _placement(axis: str, cut: int | None) -> Placement:
    return {REPLICATE: Replicate(), SHARD: Shard(0), TENSOR: Shard(cut or 0)}[axis]


def _mesh(sharing: Sharing, rank: int, groups: RankGroups, device_type: str) -> DeviceMesh:
    sets: dict[str, tuple[int, ...]] = {}
    if sharing.cut is not None:
        sets[TENSOR] = sharing.cut_ranks
    if 1 < sharing.shard_size < len(sharing.ranks):
        sets[REPLICATE] = sharing.copies(rank)
    if sharing.shard_size > 1:
        sets[SHARD] = sharing.shards(rank)
    of_axes, names = [groups[ranks] for ranks in sets.values()], tuple(sets)
    assert None not in of_axes, "a single rank shares nothing out"
    if len(sets) == 1:
        return DeviceMesh.from_group(of_axes[0], device_type, mesh_dim_names=names)
    ranks = torch.tensor(sharing.ranks)
    if TENSOR in sets:
        ranks = ranks + (torch.tensor(sharing.cut_ranks) - rank)[:, None]
    mesh = ranks.view([len(of_axis) for of_axis in sets.values()])
    return DeviceMesh.from_group(of_axes, device_type, mesh=mesh, mesh_dim_names=names)
