"""The process groups of a run: the mesh over which parameters are sharded, and the groups of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from motet.core.errors import UserError
from motet.core.plan import expert_shard_size
from motet.expert_ranks import ExpertRanks
from motet.peer_copies import PeerCopies
from motet.runtime.groups import new_group, own_group, wait_limit
from motet.tensor_parallel import TensorRanks

SHARD, REPLICATE = "shard", "replicate"
TENSOR = "tensor"
"""The axis of a mesh over the tensor- or expert-parallel ranks that cut a parameter. It is the first: its parts are
shared out."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """The process groups of a rank.

    Tensor-parallel ranks, which share products, run the same examples. So there are `tensor.size` times as many ranks
    in the job as in `group`, and each of these in a group of its own.

    shards:     the mesh for `fully_shard`, with axes ("shard",), or ("replicate", "shard") for hybrid sharding.
    group:      the ranks that run different examples, on the device's backend; used by the training thread.
    host_group: the same ranks, on gloo; used by the prefetch thread, whose collectives must not mix with the step's.
    tensor:     the tensor-parallel ranks of this one; None: it is alone.
    cuts:       of parameters that these cut: the mesh of axes ("tensor",), and behind it those of `shards`.
    experts:    the ranks that share experts with this one, which run other examples; None: it has those of all.
    expert_cuts: of the experts: the mesh of axes ("tensor",), over ranks that have all of them between them, and behind
                it those over which the ranks that have the same ones share them out.
    everyone:   all ranks of the job, for the training thread. host_everyone: for the prefetch thread.
    """

    device: torch.device
    shards: DeviceMesh
    group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    host_everyone: dist.ProcessGroup
    tensor: TensorRanks | None = None
    cuts: DeviceMesh | None = None
    experts: ExpertRanks | None = None
    expert_cuts: DeviceMesh | None = None

    @property
    def rank(self) -> int:
        """This rank among those that run different examples."""
        return self.group.rank()

    @property
    def num_ranks(self) -> int:
        """The number of ranks that run different examples."""
        return self.group.size()

    def copying(self, opened: Callable[[dist.ProcessGroup], PeerCopies]) -> Mesh:
        """The same, where pieces of products of tensor-parallel ranks travel by copies. A collective of these."""
        tensor = self.tensor
        if tensor is None or tensor.group is None:
            return self
        return replace(self, tensor=replace(tensor, copies=opened(tensor.group)))

    @property
    def tensor_size(self) -> int:
        """The number of ranks that share products, and run the same examples."""
        return 1 if self.tensor is None else self.tensor.size

    @property
    def is_divided(self) -> bool:
        """Whether ranks share products or experts, and so hold parts of parameters that others never gather."""
        return self.cuts is not None or self.expert_cuts is not None

    @property
    def expert_size(self) -> int:
        """The number of ranks that share experts."""
        return 1 if self.experts is None else self.experts.size

    @cached_property
    def shared_rows(self) -> dist.ProcessGroup:
        """The ranks of `group`, for rows that some of them exchange inside of passes, between collectives of others.

        The first access is a collective.
        """
        return of_other_examples(self.tensor_size)

    @property
    def shard_size(self) -> int:
        """How many ranks hold one copy of the parameters, or of a tensor-parallel rank's, between them."""
        return self.shards.size(self.shards.ndim - 1)

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks hold one copy of the parameters, or of a tensor-parallel rank's, between them."""
        return self.shard_size > 1

    @property
    def is_hybrid(self) -> bool:
        """Whether several groups of ranks each hold a copy of the parameters (hybrid sharding)."""
        return self.shards.ndim == 2


def build_mesh(
    device: torch.device,
    *,
    shard_size: int | None = None,
    tensor_size: int = 1,
    tensor_pieces: int = 1,
    expert_size: int = 1,
) -> Mesh:
    """Build the Mesh of the initialised process group. A collective.

    shard_size:     ranks that together hold one copy of the parameters; None: all that run different examples; 1: every
                    rank holds a whole copy, as in DDP. Of tensor-parallel ranks: of each one's parameters.
    tensor_size:    ranks that share products: consecutive ones. tensor_pieces: `chunks` of `TensorRanks`.
    expert_size:    ranks that share experts: consecutive ones of those that run different examples.
    Raises UserError if tensor_size or expert_size does not divide the number of ranks, or shard_size what is left of
    it; RuntimeError without a process group.
    """
    everyone = dist.group.WORLD
    if everyone is None:
        raise RuntimeError("build_mesh needs torch.distributed.init_process_group to have been called")
    if tensor_size < 1 or everyone.size() % tensor_size:
        raise UserError(f"tp is {tensor_size}, but must divide the number of ranks, which is {everyone.size()}.")
    num_ranks = everyone.size() // tensor_size
    shard_size = num_ranks if shard_size is None else shard_size
    if shard_size < 1 or num_ranks % shard_size:
        raise UserError(f"shard_size is {shard_size}, but must divide the number of ranks, which is {num_ranks}.")
    if expert_size < 1 or num_ranks % expert_size:
        raise UserError(f"ep is {expert_size}, but must divide the number of ranks, which is {num_ranks}.")
    host_everyone = new_group(backend="gloo")
    if tensor_size == 1:
        shape, names = _axes(num_ranks, shard_size)
        shards = _waiting(init_device_mesh(device.type, shape, mesh_dim_names=names))
        mesh = Mesh(device, shards, everyone, host_everyone, everyone, host_everyone)
        return _with_experts(mesh, expert_size, shard_size)
    cuts = _cut_mesh(device, tensor_size, shard_size)
    tensor = TensorRanks(cuts.get_group(TENSOR), everyone.rank() % tensor_size, tensor_size, chunks=tensor_pieces)
    mesh = Mesh(
        device,
        of_parts(cuts),
        of_other_examples(tensor_size),
        of_other_examples(tensor_size, backend="gloo"),
        everyone,
        host_everyone,
        tensor=tensor,
        cuts=cuts,
    )
    return _with_experts(mesh, expert_size, shard_size)


def _with_experts(mesh: Mesh, expert_size: int, shard_size: int) -> Mesh:
    """The Mesh, whose ranks share experts. shard_size: of all other parameters. A collective."""
    if expert_size == 1:
        return mesh
    tp, num_ranks = mesh.tensor_size, dist.get_world_size()
    cuts = _cut_mesh(mesh.device, expert_size * tp, expert_shard_size(shard_size, expert_size))
    firsts = [first + t for first in range(0, num_ranks, expert_size * tp) for t in range(tp)]
    group = own_group(range(first, first + expert_size * tp, tp) for first in firsts)
    experts = ExpertRanks(group, mesh.rank % expert_size, expert_size)
    return replace(mesh, experts=experts, expert_cuts=cuts)


def _axes(num_ranks: int, shard_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The shape of a mesh of ranks of which each shard_size hold one copy of the parameters, and its axes."""
    if shard_size == num_ranks:
        return (num_ranks,), (SHARD,)
    return (num_ranks // shard_size, shard_size), (REPLICATE, SHARD)


def _cut_mesh(device: torch.device, size: int, shard_size: int) -> DeviceMesh:
    """The mesh of parameters of which each of `size` consecutive ranks has a part, as in `Mesh.cuts`. A collective.

    shard_size: ranks that together hold one copy of such a part.
    """
    num_ranks = dist.get_world_size() // size
    shape, names = _axes(num_ranks, shard_size)
    ranks = torch.arange(dist.get_world_size()).view(num_ranks, size).T.reshape(size, *shape)
    return _waiting(DeviceMesh(device.type, ranks, mesh_dim_names=(TENSOR, *names)))


def of_other_examples(tensor_size: int, *, backend: str | None = None) -> dist.ProcessGroup:
    """A new group of the ranks that run other examples than this one: one of each group of tensor-parallel ranks.

    A collective of all ranks.
    """
    if tensor_size == 1:
        return new_group(backend=backend)
    sets = (range(first, dist.get_world_size(), tensor_size) for first in range(tensor_size))
    group = own_group(sets, backend=backend)
    assert group is not None, "every rank is in one"
    return group


def of_parts(cuts: DeviceMesh) -> DeviceMesh:
    """The ranks that share out the same part of what the axis TENSOR of a mesh cuts."""
    return cuts[(cuts.mesh_dim_names or ())[1:]]


def _waiting(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, in whose groups ranks wait for each other as long as in others."""
    if mesh.ndim > 1:
        for axis in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(wait_limit(torch.device(mesh.device_type)), axis)
    return mesh
