"""The process groups of a run: the mesh over which parameters are sharded, and the groups of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from motet.core.errors import UserError
from motet.runtime.groups import new_group, wait_limit

SHARD, REPLICATE = "shard", "replicate"


@dataclass(frozen=True, eq=False)
class Mesh:
    """The process groups of a rank.

    shards:     the mesh for `fully_shard`, with axes ("shard",), or ("replicate", "shard") for hybrid sharding.
    group:      all ranks, on the device's backend; used by the training thread.
    host_group: all ranks, on gloo; used by the prefetch thread, whose collectives must not mix with those of the step.
    """

    device: torch.device
    shards: DeviceMesh
    group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    ranks_per_node: int

    @property
    def rank(self) -> int:
        """This rank among all ranks."""
        return self.group.rank()

    @property
    def num_ranks(self) -> int:
        """The number of all ranks."""
        return self.group.size()

    @cached_property
    def shared_rows(self) -> dist.ProcessGroup:
        """All ranks, for rows that some of them exchange inside of passes, between collectives of other groups.

        The first access is a collective.
        """
        return new_group()

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks hold one copy of the parameters between them."""
        return self.shards.size(self.shards.ndim - 1) > 1

    @property
    def is_hybrid(self) -> bool:
        """Whether several groups of ranks each hold a copy of the parameters (hybrid sharding)."""
        return self.shards.ndim == 2


def build_mesh(device: torch.device, *, shard_size: int | None = None, ranks_per_node: int | None = None) -> Mesh:
    """Build the Mesh of the initialised process group. A collective.

    shard_size:     ranks that together hold one copy of the parameters; None: all ranks; 1: every rank holds a whole
                    copy, as in DDP.
    ranks_per_node: None: all ranks are on one node.
    Raises UserError if shard_size does not divide the number of ranks, RuntimeError without a process group.
    """
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("build_mesh needs torch.distributed.init_process_group to have been called")
    num_ranks = group.size()
    shard_size = num_ranks if shard_size is None else shard_size
    if shard_size < 1 or num_ranks % shard_size:
        raise UserError(f"shard_size is {shard_size}, but must divide the number of ranks, which is {num_ranks}.")
    if shard_size == num_ranks:
        shards = init_device_mesh(device.type, (num_ranks,), mesh_dim_names=(SHARD,))
    else:
        shape = (num_ranks // shard_size, shard_size)
        shards = init_device_mesh(device.type, shape, mesh_dim_names=(REPLICATE, SHARD))
        for axis in shards.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(wait_limit(device), axis)
    return Mesh(device, shards, group, new_group(backend="gloo"), ranks_per_node or num_ranks)
