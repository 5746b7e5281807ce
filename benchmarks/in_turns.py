"""Real steps of several Plans on the same examples, in turns, so that what else the machine does meets all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from motet.core.plan import Plan
from motet.cost.source import cost_model
from motet.dispatch import LoadedExample
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.models.mllm import MLLM
from motet.planning.apply import ParallelMLLM
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch, predict_assigned


def steps_in_turns(ways: Sequence[ParallelMLLM], batches: Sequence[list[LoadedExample]]) -> list[list[float]]:
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
