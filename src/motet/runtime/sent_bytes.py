"""Bytes that a step sends from rank to rank, by kind.

Of a collective, those that a ring sends (Thakur et al. 2005, section 4.1): of S bytes on n ranks, each rank sends
S (n - 1) / n in an all-gather to S bytes and in a reduce-scatter of them, and twice as many in an all-reduce. Which
algorithm a backend takes, it does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

SENT_KINDS = ("p2p", "exchange", "gather", "reduce")
"""SEND; exchanges of encoder outputs and their gradients, and of rows between ranks that share sequences or
layers; parameters; gradients of parameters."""


def by_kind(p2p: float, exchange: float, gather: float, reduce: float) -> dict[str, int]:
    """Whole bytes by SENT_KINDS."""
    return dict(zip(SENT_KINDS, map(round, (p2p, exchange, gather, reduce)), strict=True))


class SentBytes:
    """What this rank has sent in collectives for parameters (gather) and gradients (reduce) since `take`.

    Example:
        >>> sent = SentBytes()
        >>> sent.all_gather(whole_bytes=80, num_ranks=4)
        >>> sent.all_reduce(whole_bytes=80, num_ranks=2)
        >>> sent.take(), sent.take()
        ((60.0, 80.0), (0.0, 0.0))
    """

    def __init__(self) -> None:
        self._gather = self._reduce = 0.0

    def all_gather(self, whole_bytes: int, num_ranks: int) -> None:
        """Count an all-gather, after which each rank has whole_bytes."""
        self._gather += whole_bytes * (num_ranks - 1) / num_ranks

    def reduce_scatter(self, whole_bytes: int, num_ranks: int) -> None:
        """Count a reduce-scatter, before which each rank has whole_bytes."""
        self._reduce += whole_bytes * (num_ranks - 1) / num_ranks

    def all_reduce(self, whole_bytes: int, num_ranks: int) -> None:
        """Count an all-reduce of whole_bytes on each rank."""
        self._reduce += 2 * whole_bytes * (num_ranks - 1) / num_ranks

    def take(self) -> tuple[float, float]:
        """(gather, reduce), which then begin with 0 again."""
        taken = self._gather, self._reduce
        self._gather = self._reduce = 0.0
        return taken


def count_fsdp(module: nn.Module, sent: SentBytes) -> None:
    """Count what FSDP2 sends for the parts of a module that it shards."""
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        # FSDP2's own setters refuse a part with experts, which are on other ranks than what is beside them.
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group._all_gather_comm, group._reduce_scatter_comm = _CountedAllGather(sent), _CountedReduceScatter(sent)
            if isinstance(group.mesh_info, HSDPMeshInfo):
                # The last sum of a step is summed over the copies too (`fsdp.sum_over_shard_groups`).
                group._all_reduce_hook = partial(_count_all_reduce, sent, group.mesh_info.replicate_mesh_size)


def _count_all_reduce(sent: SentBytes, num_ranks: int, gradients: Tensor) -> None:
    sent.all_reduce(gradients.nbytes, num_ranks)


class _Collective:
    """A collective as FSDP2 calls it, and does it by itself."""

    def __init__(self, sent: SentBytes) -> None:
        self._sent = sent

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedAllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._sent.all_gather(output_tensor.nbytes, group.size())
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _CountedReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._sent.reduce_scatter(input_tensor.nbytes, group.size())
        return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
