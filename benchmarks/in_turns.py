"""Real steps of several Plans on the same examples, in turns, so that what else the machine does meets all of them."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rows import Row, finish, options, show

from motet.core.plan import Plan
from motet.cost.source import cost_model
from motet.dispatch import LoadedExample
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.models.mllm import MLLM
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch, predict_assigned

FIRST, OFF = 1, 0.1
"""FIRST steps are not counted. OFF: how far a simulated ratio may be from the measured one."""
Ratios = Callable[[Any, int, int], tuple[float, float]]
"""(what is measured, seed, steps) -> how many times as long a step takes in one way as in another: (measured,
simulated). It runs on every rank."""


class Stepping(Protocol):
    """What takes steps."""

    def step(self, batch: list[LoadedExample]) -> object:
        """Take one."""


def compare_ways(doc: str | None, what: str, num_ranks: int, cases: Mapping[str, Any], ratios: Ratios) -> None:
    """Run a benchmark of two ways on gloo ranks, a thread each: parse its options, show and store its rows.

    what: which way over which. cases: by name, what `ratios` is given.
    """
    parser = options(doc, reads_lengths=False)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, (folder, num_ranks, cases, ratios, asked.seed, asked.steps), num_ranks)
        found: dict[str, tuple[float, float]] = torch.load(Path(folder) / "found", weights_only=False)
    rows = []
    for name, (gain, expected) in found.items():
        rows += [
            Row(f"{name}: {what}, measured", gain),
            Row(f"{name}: {what}, simulated", expected),
            Row(f"{name}: error of the simulated ratio", abs(expected / gain - 1), OFF),
        ]
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed, steps=asked.steps)


def _measure(
    rank: int, folder: str, num_ranks: int, cases: Mapping[str, Any], ratios: Ratios, seed: int, num_steps: int
) -> None:
    """Measure all cases on one rank; rank 0 stores what is found by case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=num_ranks)
    found = {name: ratios(case, seed, FIRST + num_steps) for name, case in cases.items()}
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.destroy_process_group()


def medians_in_turns(ways: Sequence[Stepping], batches: Sequence[list[LoadedExample]]) -> list[float]:
    """Of each way the median seconds of a step, those before FIRST left out. A collective."""
    return [statistics.median(seconds[FIRST:]) for seconds in steps_in_turns(ways, batches)]


def steps_in_turns(ways: Sequence[Stepping], batches: Sequence[list[LoadedExample]]) -> list[list[float]]:
    """Of each way the seconds of its step of each batch, between barriers. A collective."""
    taken: list[list[float]] = [[] for _ in ways]
    for batch in batches:
        for way, seconds in zip(ways, taken, strict=True):
            dist.barrier()
            begun_s = time.perf_counter()
            way.step(batch)
            dist.barrier()
            seconds.append(time.perf_counter() - begun_s)
    return taken


def predicted_step_s(plan: Plan, batch: list[LoadedExample], model: MLLM) -> float:
    """Seconds of a step of a whole model as the simulator has them, by operations."""
    cost, phases = cost_model(plan.cluster, plan.precision), tuple(model.measured)
    lengths = LoadedTables.read([tables_of(batch, phases, model.measured)], phases).lengths
    return predict_assigned(plan, planned(plan), assign_batch(plan, lengths, cost), cost).step_s
