"""What a step did and cost, over all ranks: measured on each, joined by one small all-gather on the host.

Loads, bounds and bytes follow from the decision, which all ranks hold; only times and memory differ and must be
gathered.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from motet.dispatch import RankBatch
from motet.train.world import World


@dataclass(frozen=True)
class MeasuredStep:
    """What one rank measured in one step, in seconds; wall_s is from the end of the last step to the end of this one.

    actions: seconds of each named action of the step, the same names in the same order on all ranks.
    """

    wall_s: float
    data_wait_s: float
    decide_s: float
    actions: Mapping[str, float]


def gather_measured(measured: MeasuredStep, world: World, wish: int) -> tuple[dict[str, Any], int]:
    """Join the ranks' measurements: (part of the step's metrics, the largest wish of any rank). A collective."""
    mine = [
        float(wish),
        measured.wall_s,
        measured.data_wait_s,
        measured.decide_s,
        float(peak_memory_bytes(world.device)),
    ]
    row = torch.tensor([*mine, *measured.actions.values()], dtype=torch.float64)
    table = torch.empty(world.num_ranks, len(row), dtype=torch.float64)
    dist.all_gather_single(table.view(-1), row, group=world.control)
    largest, mean = table.max(dim=0).values.tolist(), table.mean(dim=0).tolist()
    actions = {
        name: {"max_s": _rounded(largest[i]), "mean_s": _rounded(mean[i])}
        for i, name in enumerate(measured.actions, start=len(mine))
    }
    joined = {
        "step_s": _rounded(largest[1]),
        "data_wait_s": _rounded(largest[2]),
        "decide_s": _rounded(largest[3]),
        "memory": {"peak_bytes": int(largest[4]), "kind": memory_kind(world.device)},
        "actions": actions,
    }
    return joined, int(largest[0])


def balance_metrics(batches: Sequence[RankBatch]) -> dict[str, Any]:
    """In how many of the microbatches each method of balancing was chosen, what was predicted, and why.

    predicted_s: by method, summed over the microbatches for which it was considered. why: a sentence a method, of the
    last microbatch in which it was chosen.
    """
    decisions = [batch.decision for batch in batches]
    predicted_s: Counter[str] = Counter()
    for decision in decisions:
        predicted_s.update(decision.predicted_s)
    return {
        "methods": dict(Counter(decision.method for decision in decisions)),
        "predicted_s": {method: _rounded(seconds) for method, seconds in predicted_s.items()},
        "why": {decision.method: decision.why for decision in decisions if decision.why},
    }


def phase_metrics(batches: Sequence[RankBatch]) -> dict[str, dict[str, Any]]:
    """Per phase, loads of the ranks and their maximum over the lower bound, before and after balancing.

    unit: what loads and bounds are counted in, which is what was balanced.
    Over several microbatches loads and bounds add up, and the maximum is the sum of each microbatch's own: ranks wait
    for each other in every one.
    """
    phases: dict[str, dict[str, Any]] = {}
    for phase in batches[0].decision.assignments:
        after = [batch.decision.assignments[phase] for batch in batches]
        before = [batch.decision.before[phase] for batch in batches]
        bound = sum(int(assignment.bound) for assignment in after)
        phases[phase] = {
            "unit": batches[0].decision.costs.unit(phase),
            "max_over_bound": _rounded(_summed_max(after) / bound) if bound else 1.0,
            "max_over_bound_before": _rounded(_summed_max(before) / bound) if bound else 1.0,
            "bound": bound,
            "loads": np.sum([assignment.loads for assignment in after], axis=0).tolist(),
            "loads_before": np.sum([assignment.loads for assignment in before], axis=0).tolist(),
        }
    return phases


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this rank has held: allocated by PyTorch on a GPU, else the resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB.


def memory_kind(device: torch.device) -> str:
    return "allocated on the GPU" if device.type == "cuda" else "resident"


def _summed_max(assignments: Sequence[Any]) -> int:
    return sum(int(assignment.loads.max()) for assignment in assignments)


def _rounded(value: float) -> float:
    """Six significant digits: what a measurement carries, and short lines."""
    return float(f"{value:.6g}")
