"""What a rank does for the fuzzer: many cases in one process, each against one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from parity.planned import PlannedCase, differences, errors_of


def run_cases(rank: int, num_ranks: int, cases: Sequence[PlannedCase]) -> list[tuple[float, list[str]]]:
    """(the largest error of this rank, what is off) of each case. A collective."""
    found = []
    for case in cases:
        errors = errors_of(case)
        found.append((max(errors.values()), [f"rank {rank}: {line}" for line in differences(errors)]))
        dist.barrier()
        _destroy_groups()
    return found


def _destroy_groups() -> None:
    """Groups of a case, which nobody uses again; thousands of them would be left otherwise."""
    for group in [*dist.distributed_c10d._world.pg_map]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
