"""The recomputation that makes every rank of colocated data parallelism fit its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Plan
from motet.planner.data_parallel.loads import Load, ModuleLoad, ModuleState, assigned_load, state_of
from motet.planner.job import Job
from motet.planner.stages.recompute import Fit, LeastRecompute, RecomputeMode

_MAX_ROUNDS = 32


def fit_recomputation(load: Load, state: Mapping[str, ModuleState], capacity_bytes: float, mode: RecomputeMode) -> Fit:
    """The recomputation that makes every rank fit.

    Mode "least" takes the least for the bytes that the fullest rank lacks. Ranks differ, so that another rank may still
    lack some: then it takes the least for these bytes as well. At the end, no module could recompute one block less.
    """
    every = {name: _num_recomputable(stage.saved_bytes[name]) for name, stage in load.stages.items()}
    none = dict.fromkeys(every, 0)

    def over(recompute: Mapping[str, int]) -> float:
        return load.peak_bytes(recompute, state) - capacity_bytes

    chosen: Mapping[str, int] = none
    if mode == "full" or (mode == "least" and over(none) > 0):
        chosen = every
    if mode == "least" and over(none) > 0 >= over(every):
        chosen = _trimmed(load, _least(load, state, over, every), over)
    lacking = over(chosen)
    return Fit((chosen,), lacking + capacity_bytes, max(lacking, 0.0))


def least_recomputed(job: Job, plan: Plan) -> Plan | None:
    """A Plan of data parallelism with the least recomputation under which its batch fits, as it is assigned to ranks
    without any; None if it does not fit with all of it."""
    (unit,) = plan.units
    load = assigned_load(job, replace(plan, units=(replace(unit, recompute=()),)))
    fit = fit_recomputation(load, state_of(job, unit), job.capacity_bytes, "least")
    recompute = {name: count for name, count in fit.recompute[0].items() if count}
    return None if fit.shortfall_bytes else replace(plan, units=(replace(unit, recompute=(recompute,)),))


def _num_recomputable(saved_bytes: Float64Array) -> int:
    """The number of blocks up to the last one whose recomputation saves anything."""
    return int(np.flatnonzero(saved_bytes)[-1]) + 1 if saved_bytes.any() else 0


def _least(
    load: Load, state: Mapping[str, ModuleState], over: Callable[[Mapping[str, int]], float], every: Mapping[str, int]
) -> Mapping[str, int]:
    """The least recomputation under which no rank is over its memory, in rounds; all of it if that needs too many.

    over: from recomputed blocks by module to bytes above the memory of the fullest rank. every: all blocks by module.
    """
    stages = load.stages
    idle = max(state[name].transient_bytes + stage.largest_bytes for name, stage in stages.items())
    saved = {name: stage.saved_bytes[name] for name, stage in stages.items()}
    grown = {
        name: np.maximum(state[name].transient_bytes + stage.working_bytes[name] - idle, 0)
        for name, stage in stages.items()
    }
    recompute_s = {name: block_seconds(load.modules[name]) for name in every}
    lacking, choice = over(dict.fromkeys(every, 0)), LeastRecompute(recompute_s, saved, grown)
    for _ in range(_MAX_ROUNDS):
        chosen = choice.for_bytes(lacking)
        if chosen is None:
            return every
        if (more := over(chosen)) <= 0:
            return chosen
        lacking += more
    return every


def block_seconds(load: ModuleLoad) -> Float64Array:
    """[num_blocks]: seconds that recomputing each block adds to the busiest rank, for which the others wait."""
    layers = np.diff(load.num_recomputed, axis=0).astype(np.float64)
    seconds: Float64Array = layers @ load.recompute_s.max(axis=1).sum(axis=1)
    return seconds


def _trimmed(load: Load, recompute: Mapping[str, int], over: Callable[[Mapping[str, int]], float]) -> Mapping[str, int]:
    """The recomputation without blocks that are not needed; the most costly modules lose blocks first."""
    chosen = dict(recompute)
    cost = {name: float(block_seconds(load.modules[name]).max(initial=0.0)) for name in chosen}
    for name in sorted(chosen, key=lambda name: (-cost[name], name)):
        while chosen[name] and over({**chosen, name: chosen[name] - 1}) <= 0:
            chosen[name] -= 1
    return chosen
