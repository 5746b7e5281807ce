"""Collectives of rows by copies out of the memory of other ranks, which copy engines of GPUs make without
multiprocessors (StepCCL, MMScale section 6).

Each rank has memory that the others read: torch's symmetric memory, inside a node. It has two halves, which messages
use in turn, so that one barrier a message is enough:

    write half 0 | barrier | read half 0 of others | write half 1 | barrier | read half 1 of others | write half 0 | ...

A rank writes half 0 again behind the second barrier, to which the others come when they have read half 0.

torch's own helpers do not fit: `_pipelined_all_gather_and_consume` and `_pipelined_produce_and_all2all` cut by rank, so
that a rank has nothing to compute while the last one's rows come, and `_low_contention_reduce_scatter` leaves the order
of a sum to `Tensor.sum`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.errors import UserError

LEAST_BYTES = 2**20
"""Of half of a rank's memory; it grows by powers of two, as other ranks have to be met for it."""


class PeerMemory(Protocol):
    """Memory of as many bytes on each rank, as torch's symmetric memory has it."""

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> Tensor:
        """What a rank has there, from so many elements on."""

    def barrier(self) -> None:
        """What comes behind it, on the current stream, comes behind what all ranks have had before it."""


class Copied(Protocol):
    """A message that has been started."""

    def wait(self) -> None:
        """Let what this rank computes from now on come behind it."""


class PeerCopies:
    """The collectives of a group. All ranks call them alike, in one order, with tensors of the same sizes.

    They start at once, beside what is computed. Tensors must be contiguous, and be kept until they have been waited
    for. Sums are added up in the order of ranks, however rows are cut.

    allocate: gives memory of so many bytes on each rank; all ranks call it together.
    """

    def __init__(self, index: int, size: int, device: torch.device, allocate: Callable[[int], PeerMemory]) -> None:
        self.index, self.size = index, size
        self._allocate, self._half_bytes, self._is_second = allocate, LEAST_BYTES, False
        # Of high priority: a barrier is one block, and would come behind all blocks of a product that has begun.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        with self._beside():
            self._memory: PeerMemory | None = allocate(2 * LEAST_BYTES)

    def all_gather(self, every: Tensor, part: Tensor) -> Copied:
        """Put the parts [n, width] of all ranks into `every` [size * n, width]."""
        with self._beside():
            self._gather(every, part)
            return self._marked()

    def reduce_scatter(self, part: Tensor, every: Tensor) -> Copied:
        """Put the sum of this rank's rows of `every` [size * n, width] into `part` [n, width]."""
        with self._beside():
            self._scatter(part, every)
            return self._marked()

    def all_reduce(self, every: Tensor) -> Copied:
        """Sum `every` [size * n, width], in place: each rank sums some rows, which the others get."""
        with self._beside():
            part = torch.empty_like(every.chunk(self.size)[self.index])
            self._scatter(part, every)
            self._gather(every, part)
            return self._marked()

    def _gather(self, every: Tensor, part: Tensor) -> None:
        rows = every.chunk(self.size)
        self._read(part, 0, rows)
        rows[self.index].copy_(part)

    def _scatter(self, part: Tensor, every: Tensor) -> None:
        own = every.chunk(self.size)[self.index]
        parts = [own if rank == self.index else torch.empty_like(own) for rank in range(self.size)]
        self._read(every, self.index * own.numel(), parts)
        part.copy_(parts[0])
        for other in parts[1:]:
            part.add_(other)

    def _read(self, shown: Tensor, first: int, parts: Sequence[Tensor]) -> None:
        """Show a tensor to the others, and put what each of them shows, from element `first` on, into its part."""
        if shown.nbytes > self._half_bytes:
            self._grow(shown.nbytes)
        memory, start = self._memory, self._is_second * (self._half_bytes // shown.itemsize)
        assert memory is not None
        self._is_second = not self._is_second
        memory.get_buffer(self.index, shown.shape, shown.dtype, start).copy_(shown)
        memory.barrier()
        for step in range(1, self.size):
            rank = (self.index + step) % self.size  # All begin with another one.
            parts[rank].copy_(memory.get_buffer(rank, parts[rank].shape, shown.dtype, start + first))

    def _grow(self, num_bytes: int) -> None:
        """Let half of the memory have so many bytes. The host waits until all ranks have read what they were shown."""
        assert self._memory is not None
        self._memory.barrier()
        if self._stream is not None:
            self._stream.synchronize()
        self._memory = None  # It is given back before more is taken.
        self._half_bytes = 1 << (num_bytes - 1).bit_length()
        self._memory = self._allocate(2 * self._half_bytes)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is started in the block runs beside what is computed from now on, and behind what has been before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def _marked(self) -> Copied:
        """What waits for all that has been started in `_beside`."""
        return _Done() if self._stream is None else self._stream.record_event()


class _Done:
    """A message that has come: on the host, copies are made at once."""

    def wait(self) -> None:
        pass


def open_copies(group: dist.ProcessGroup, device: torch.device, limit: timedelta) -> PeerCopies:
    """The PeerCopies of a group of GPUs. A collective of it. limit: how long a rank waits for the others.

    Raises UserError, on all ranks of the group alike, where these cannot read each other's memory; and, where torch
    fails to share it, on the ranks on which it does.
    """
    check_device(device)
    reaches = [one for one in range(torch.cuda.device_count()) if torch.cuda.can_device_access_peer(device.index, one)]
    seen: list[Any] = [None] * group.size()
    dist.all_gather_object(seen, (dist.get_rank(), socket.gethostname(), device.index, reaches), group=group)
    if why := why_apart(seen):
        raise UserError(f"{_ASKED}, and {why}; {_INSTEAD}.")
    try:
        return PeerCopies(group.rank(), group.size(), device, lambda size: _SymmetricMemory(group, device, size, limit))
    except (RuntimeError, ImportError, AttributeError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"{_ASKED}, and torch's symmetric memory fails here ({why}); {_INSTEAD}.") from error


_ASKED = (
    "The plan's cluster has tensor_transport \"copy_engines\", by which tensor-parallel ranks read each other's memory"
)
_INSTEAD = 'plan with cluster.tensor_transport = "collectives"'


def check_device(device: torch.device) -> None:
    """Raise UserError for a device without copy engines."""
    if device.type != "cuda":
        raise UserError(f"{_ASKED}, and this run is on {device.type}, not on CUDA devices; {_INSTEAD}.")


def why_apart(seen: Sequence[tuple[int, str, int, Sequence[int]]]) -> str:
    """Why ranks cannot read each other's memory; "" if they may. seen: of each its number, the name of its machine, the
    number of its device there, and those of the devices whose memory that one reads.

    Example:
        >>> why_apart([(0, "a", 0, [1]), (1, "a", 1, [0])])
        ''
        >>> why_apart([(0, "a", 0, [1]), (1, "b", 1, [0])])
        'rank 0 is on a and rank 1 on b'
    """
    (rank, host, _, _), *others = seen
    if other := next((one for one in others if one[1] != host), None):
        return f"rank {rank} is on {host} and rank {other[0]} on {other[1]}"
    by_device = {index: number for number, _, index, _ in seen}
    if len(by_device) < len(seen):
        shared = next((number, by_device[index], index) for number, _, index, _ in seen if by_device[index] != number)
        return "ranks {} and {} both have device {} (each must see all of them: CUDA_VISIBLE_DEVICES)".format(*shared)
    for number, _, index, reaches in seen:
        if unread := sorted(by_device.keys() - {index, *reaches}):
            return f"device {index} of rank {number} cannot read that of rank {by_device[unread[0]]}"
    return ""


class _SymmetricMemory:
    """Memory of CUDA devices that all ranks of a group map, by torch; it is private there, or called alpha."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int, limit: timedelta) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory as OfTorch

        # Not `symm_mem.empty`: its pool may put two tensors into one block, whose barriers are one.
        own = OfTorch.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, group.group_name)
        self._own, self._limit_ms = own, int(1e3 * limit.total_seconds())
        self._shared = OfTorch.rendezvous(own)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int) -> Tensor:
        buffer: Tensor = self._shared.get_buffer(rank, tuple(sizes), dtype, storage_offset)
        return buffer

    def barrier(self) -> None:
        self._shared.barrier(channel=0, timeout_ms=self._limit_ms)
