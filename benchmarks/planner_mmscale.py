"""MMScale, sections 7.1 and 7.2.1: rigid and proportional allocation on up to 1,296 A800. Used by planner.py.

Microbatches are of one sequence (section 4.2), in 1F1B; DP is the best that divides the batch. The
encoder and the generator of the rigid allocation have the backbone's TP, where the paper gives each GPU of a group a
copy. Small models generate images of 512 x 512 pixels, MLLM-72B of 1024 x 1024; one a sequence, which is not given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from baselines.allocations import proportional
from trials import Baseline, Case, Outcome, Subject, job_of, with_any_tp

from motet.core.plan import Plan
from motet.cost.flops import batch_flops
from motet.planner.candidate import Pins
from motet.planner.disaggregated.allocate import rigid
from motet.planner.disaggregated.allocation import Allocation, Limits, UnitOptions
from motet.planner.disaggregated.propose import Allocate, fastest_allocated, options
from motet.planner.job import Job

_NAMES = ("num_layers", "hidden", "mlp", "num_heads", "num_kv_heads")
BACKBONES = {
    "MLLM-9B": (32, 4096, 11_008, 32, 32),
    "MLLM-15B": (40, 5120, 13_824, 40, 40),
    "MLLM-72B": (80, 8192, 28_672, 64, 8),
}
PP = {"MLLM-9B": 1, "MLLM-15B": 2, "MLLM-72B": 10}
"""Of Megatron-LM's backbone; its TP is 8."""
OVERALL = {"MLLM-9B": (1.7, 2.8), "MLLM-15B": (1.7, 2.8), "MLLM-72B": (1.2,)}
"""Times the MFU of Megatron-LM."""
ALLOCATION = 1.3, 2.7
"""Over Megatron-LM, of all three; section 7.2.1."""
SMALL = {"MLLM-9B": 128, "MLLM-15B": 64, "MLLM-72B": 40}
"""Batches of section 7.2, on up to 98 GPUs; here on 12 nodes."""


def cases() -> Iterator[Case]:
    for name in BACKBONES:
        yield _case(name, 162, 1920, OVERALL[name])
    for name, batch_size in SMALL.items():
        yield _case(name, 12, batch_size, ALLOCATION)


def job_with(name: str, num_nodes: int, batch_size: int, model: Mapping[str, Any] | None = None) -> Job:
    """A model on nodes of 8 A800. model: what else its tables say, of all but the backbone's shape."""
    tables = {key: dict(table) for key, table in (model or {}).items()}
    tables["backbone"] = tables.get("backbone", {}) | dict(zip(_NAMES, BACKBONES[name]))
    changes: dict[str, Any] = {
        "run": {"batch_size": batch_size},
        "cluster": {"nodes": num_nodes},
        "model": tables,
    }
    if name != "MLLM-72B":
        changes["workload"] = {"task": _small_images()}
    return with_any_tp(job_of("mllm_72b", changes, name))


def _case(name: str, num_nodes: int, batch_size: int, published: tuple[float, ...]) -> Case:
    subject = Subject(job_with(name, num_nodes, batch_size))
    megatron = Pins(tp=8, pp=PP[name], microbatch_size=1)
    flops = {module: float(count) for module, count in batch_flops(subject.job.model, subject.job.batch).items()}
    by_operations = partial(_proportional, flops)
    return Case(
        "MMScale",
        f"{name}, batch {batch_size:,}",
        subject,
        "disaggregated",
        partial(subject.searched, Pins(strategies=("disaggregated",), microbatch_size=1, schedule="1f1b")),
        (
            Baseline(
                f"Megatron-LM, TP 8, PP {PP[name]} + 2",
                partial(allocated, subject, rigid, megatron),
                published,
            ),
            Baseline("rigid, any TP and PP", partial(allocated, subject, rigid, Pins())),
            Baseline("proportional to operations", partial(allocated, subject, by_operations, Pins())),
        ),
    )


def _proportional(flops: Mapping[str, float], units: Sequence[UnitOptions], limits: Limits) -> Allocation | None:
    return proportional(units, flops, limits)


def allocated(subject: Subject, allocate: Allocate, pins: Pins) -> Outcome:
    """The fastest Plan of what `allocate` gives the units."""

    def plans() -> Iterator[tuple[str, Plan]]:
        placed = fastest_allocated(subject.job, pins, options(subject.job, pins), allocate)
        if placed is not None:
            yield placed.what, placed.plan

    return subject.fastest(plans)


def _small_images() -> list[dict[str, Any]]:
    """The recipe's tasks, with images of 512 x 512 pixels generated: of 64 x 64 latents in patches of 2."""
    generated = {"length": {"value": 1024}, "length_per_token": 1024}
    return [
        {
            "name": f"{count} images",
            "share": share,
            "text": {"value": 8191 - 1024 * count},
            "items": {"image": {"count": {"value": count}, "length": {"value": 1024}}, "generated": generated},
        }
        for count, share in ((1, 4), (3, 3), (5, 2), (7, 1))
    ]
