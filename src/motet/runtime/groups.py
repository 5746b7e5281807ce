"""Process groups of a run, in which a rank waits for another as long as in the default group (`run.wait_limit_s`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


def wait_limit(device: torch.device) -> timedelta:
    """How long a rank waits for another in the default group. device: of the tensors of that group."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("wait_limit needs torch.distributed.init_process_group to have been called")
    # Public torch has no way to read it; `tests/dist/test_waiting.py` notices if this one goes.
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def new_group(ranks: Sequence[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup:
    """`torch.distributed.new_group`, whose limit is its own otherwise: half an hour, or ten minutes. A collective."""
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    return dist.new_group(ranks, backend=backend, timeout=wait_limit(device))


def own_group(sets: Iterable[Sequence[int]], *, backend: str | None = None) -> dist.ProcessGroup | None:
    """A `new_group` of each set of ranks; returns the one that this rank is in, the last of several. A collective."""
    rank, own = dist.get_rank(), None
    for ranks in sets:
        group = new_group(ranks, backend=backend)
        own = group if rank in ranks else own
    return own
