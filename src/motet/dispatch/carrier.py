"""Carries the bytes of items between ranks: from host memory to host memory, over gloo or over the device's links.

A Carrier of a device copies bytes to the device, moves them with the device's collectives (NCCL), and copies them back.
It has a process group and a stream of its own. The communicator of the training step is used by the training thread
alone: collectives of one communicator must come in one order on all ranks, and two threads have no common order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.arrays import UInt8Array
from motet.dispatch.exchange import all_gathered

_CPU = torch.device("cpu")


class Carrier:
    """Moves bytes between the ranks of a group.

    group:  used by one thread only. It is gloo's if the device is the CPU, else a group of the device's backend.
    device: where the group's collectives work. Making a Carrier of another device than the CPU is a collective, which
            opens all connections; later none is opened while the training step runs.

    Example, on every rank of a process group, where `splits` has the bytes for each other rank:
        carrier = Carrier(dist.new_group(backend="nccl"), torch.device("cuda", local_rank))
        outgoing = carrier.buffer(sum(splits))  # filled by the caller
        incoming = carrier.all_to_all(outgoing, splits_of_others, splits)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device = _CPU) -> None:
        self._group, self._device = group, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            byte_each = [1] * group.size()
            self.all_to_all(self.buffer(group.size()), byte_each, byte_each)
            self.all_gather(self.buffer(1), 1)

    def buffer(self, num_bytes: int) -> UInt8Array:
        """Zeros in host memory from which bytes are sent, uint8 [num_bytes]; pinned if they go to a GPU."""
        zeros: UInt8Array = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None).numpy()
        return zeros

    def all_to_all(self, outgoing: UInt8Array, recv_splits: Sequence[int], send_splits: Sequence[int]) -> UInt8Array:
        """Send bytes to each rank, and return those that came, uint8 [sum of recv_splits]. A collective."""
        with self._on_stream():
            sent = self._to_device(outgoing)
            received = sent.new_empty(sum(recv_splits))
            dist.all_to_all_single(received, sent, list(recv_splits), list(send_splits), group=self._group)
            return self._to_host(received)

    def all_gather(self, outgoing: UInt8Array, share_bytes: int) -> UInt8Array:
        """The bytes of every rank, uint8 [num_ranks * share_bytes]; as in `all_gathered`. A collective."""
        with self._on_stream():
            return self._to_host(all_gathered(self._to_device(outgoing), share_bytes, self._group))

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        # The current device and stream are a thread's own, and a new thread begins with the first device.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _to_device(self, outgoing: UInt8Array) -> Tensor:
        return torch.from_numpy(outgoing).to(self._device, non_blocking=True)

    def _to_host(self, received: Tensor) -> UInt8Array:
        if self._stream is None:
            return np.asarray(received.numpy())
        host = torch.empty(received.shape, dtype=torch.uint8, pin_memory=True)
        host.copy_(received, non_blocking=True)
        self._stream.synchronize()
        return np.asarray(host.numpy())
