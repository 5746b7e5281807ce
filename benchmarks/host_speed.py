"""What this machine's ranks compute and exchange in a second, measured before the steps that are predicted from it.

Predictions of training are made from stated speeds, `[balance.speed]`, as decisions must not hang on the run. On ranks
that share cores an exchange takes processor time that computing lacks, so that its seconds count as those of layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from motet.core.context_rows import ContextRows
from motet.models.row_copies import RowCopies
from motet.runtime.mesh import Mesh

_ROWS = (1, 256)
"""Rows that each rank gives to each other one, in the two exchanges of which a link is fitted."""
_NUM_TIMES = 20


@dataclass(frozen=True)
class HostSpeed:
    """What a rank does in a second.

    device_tflops, link_gbytes_per_s, link_latency_us: as in `[balance.speed]`.

    fixed_s: seconds that a step takes beside its items: gradients are added up over ranks, the norm, the optimizer.
    """

    device_tflops: float
    link_gbytes_per_s: float
    link_latency_us: float
    fixed_s: float

    @property
    def stated(self) -> dict[str, float]:
        """`[balance.speed]` of a recipe."""
        return {
            "device_tflops": self.device_tflops,
            "link_gbytes_per_s": self.link_gbytes_per_s,
            "link_latency_us": self.link_latency_us,
        }


def host_speed(
    mesh: Mesh,
    flops: Sequence[float],
    taken_s: Sequence[float],
    empty_s: Sequence[float],
    heads: int,
    head_dim: int,
    clock: Callable[[], float],
) -> HostSpeed:
    """The speed of ranks, the same on all. A collective.

    flops, taken_s: operations of a rank in some steps of whole items, and the processor time of these steps.
    empty_s:        the same time of steps with next to no operations.
    heads, head_dim: of the keys that an exchange moves. clock: of a rank's seconds.
    """
    fixed_s = float(np.median(np.concatenate(_everywhere(np.array(empty_s), mesh))))
    all_flops, all_s = np.concatenate(_everywhere(np.stack([flops, taken_s], axis=1), mesh)).sum(axis=0)
    flops_per_s = all_flops / max(all_s - fixed_s * len(taken_s) * mesh.num_ranks, 1e-9)
    latency_s, byte_s = _exchange(mesh, heads, head_dim, clock)
    return HostSpeed(float(flops_per_s / 1e12), 1e-9 / byte_s, 1e6 * latency_s, fixed_s)


def _everywhere(values: np.ndarray, mesh: Mesh) -> list[np.ndarray]:
    found: list = [None] * mesh.num_ranks
    dist.all_gather_object(found, values, group=mesh.host_group)
    return found


def _exchange(mesh: Mesh, heads: int, head_dim: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of an exchange of keys and values without its bytes, and of a byte: means of the ranks.

    As attention has it: keys are joined with values, and gradients go back. Half of both counts.
    """
    medians = []
    for num_rows in _ROWS:
        owner = np.repeat(np.arange(mesh.num_ranks), num_rows)
        rows, every = ContextRows(np.array([len(owner)]), owner, mesh.num_ranks), np.arange(len(owner))
        share = SimpleNamespace(group=mesh.group, rank=mesh.rank, count_bytes=lambda _: None)
        copies = RowCopies(rows.moves(mesh.rank, [every] * mesh.num_ranks), share, torch.device("cpu"))
        keys, values = (torch.zeros(heads, num_rows, head_dim, requires_grad=True) for _ in range(2))
        gradient = torch.zeros(heads, len(owner), head_dim)
        taken_s = []
        for _ in range(_NUM_TIMES):
            dist.barrier(mesh.group)
            start = clock()
            there = copies.of(torch.cat([x.transpose(0, 1) for x in (keys, values)], dim=1))
            torch.autograd.backward(there.transpose(0, 1).chunk(2), (gradient, gradient))
            taken_s.append((clock() - start) / 2)
        medians.append(np.mean(_everywhere(np.array(np.median(taken_s)), mesh)))
    row_bytes = 2 * heads * head_dim * torch.float32.itemsize
    sizes = [num_rows * (mesh.num_ranks - 1) * row_bytes for num_rows in _ROWS]
    byte_s = max((medians[1] - medians[0]) / (sizes[1] - sizes[0]), 1e-12)
    return max(float(medians[0] - byte_s * sizes[0]), 0.0), float(byte_s)
