"""Memory that CPU ranks read of each other, in place of CUDA's symmetric memory: `from peer_memory import copies`."""

import os
import tempfile
import time
from math import prod
from unittest import mock

import torch
import torch.distributed as dist

from motet.peer_copies import PeerCopies
from motet.train import planned_job


class SharedMemory:
    """Files that all ranks of a group map.

    delays: of each rank, seconds between a barrier and what comes behind it.
    """

    def __init__(self, group, num_bytes, delays=()):
        self.group, self.delay_s = group, dict(enumerate(delays)).get(dist.get_rank(group), 0.0)
        folder = [tempfile.mkdtemp(prefix="motet-peers-")]
        dist.broadcast_object_list(folder, group_src=0, group=group)
        files = [os.path.join(folder[0], str(rank)) for rank in range(dist.get_world_size(group))]
        torch.from_file(files[dist.get_rank(group)], shared=True, size=num_bytes, dtype=torch.uint8).zero_()
        dist.barrier(group)
        self.bytes = [torch.from_file(file, shared=True, size=num_bytes, dtype=torch.uint8) for file in files]
        dist.barrier(group)
        os.remove(files[dist.get_rank(group)])

    def get_buffer(self, rank, sizes, dtype, storage_offset):
        start = storage_offset * dtype.itemsize
        return self.bytes[rank][start : start + prod(sizes) * dtype.itemsize].view(dtype).view(*sizes)

    def barrier(self):
        dist.barrier(self.group)
        time.sleep(self.delay_s)


def opening_copies(device):
    """As `motet.train.planned_job.opening_copies`, on CPU ranks too."""
    return copies if device.type == "cpu" else planned_job.opening_copies(device)


def copies(group, delays=()):
    """The PeerCopies of a group of CPU ranks, with little memory at first, so that it grows. A collective."""
    index, size = dist.get_rank(group), dist.get_world_size(group)
    with mock.patch("motet.peer_copies.LEAST_BYTES", 256):
        return PeerCopies(index, size, torch.device("cpu"), lambda num_bytes: SharedMemory(group, num_bytes, delays))
