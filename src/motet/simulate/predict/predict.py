"""A Plan, lengths and a cost model into a Prediction: what a step takes before any of it has run.

The batch is assigned to the Plan (`assign/`), its stages are priced (`pricing.py`, `traffic.py`), and the Program
that the Plan implies is simulated. Islands, the parts of a job that do not speak to each other before its gradients are
reduced, run the same Program on different examples: the slowest one is the step. Of many, those are simulated whose
microbatches take longest, each on the rank that it takes longest on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from motet.assign.balancing import Balancing, by_operations
from motet.assign.plan import assign_step
from motet.assign.step import StepAssignment
from motet.core.plan import Plan
from motet.core.timeline import Timeline
from motet.core.workload import BatchLengths, Workload
from motet.cost.flops import batch_flops
from motet.cost.model import CostModel
from motet.schedule import Planned, Presence, of_batch, planned
from motet.schedule.coordinates import ranks_of
from motet.simulate.engine.simulate import Prepared, simulate
from motet.simulate.engine.stage_times import StageTimes
from motet.simulate.predict.batch import draw_batch
from motet.simulate.predict.memory import memory_of
from motet.simulate.predict.prediction import Prediction
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.step_seconds import PricedStep
from motet.simulate.predict.traffic import Traffic

MAX_ISLANDS = 32
"""That are simulated, of one batch. In 28 predictions of the papers' jobs, the slowest was among the first 21."""


def predict(
    plan: Plan,
    workload: Workload,
    cost: CostModel,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    balancing: Balancing = by_operations,
) -> Prediction:
    """One step of `plan.batch_size` examples drawn from a workload, by a seed.

    jitter:    spread of the factor by which each computation takes longer or shorter than priced (`simulate`).
    balancing: by what training balances colocated phases.
    Raises UserError for a Plan that does not fit its model or cluster, and for a workload without a module's lengths.
    """
    return next(predictions(plan, workload, cost, 1, seed=seed, jitter=jitter, balancing=balancing))


def predictions(
    plan: Plan,
    workload: Workload,
    cost: CostModel,
    num_batches: int,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    balancing: Balancing = by_operations,
) -> Iterator[Prediction]:
    """The same for several batches, one after the other; the first is that of `predict`."""
    stages, rng = planned(plan), np.random.default_rng(seed)
    for _ in range(num_batches):
        assignment = assign_batch(plan, draw_batch(plan, workload, rng), cost, balancing)
        yield predict_assigned(plan, stages, assignment, cost, seed=int(rng.integers(1 << 32)), jitter=jitter)


def assign_batch(
    plan: Plan, batch: BatchLengths, cost: CostModel, balancing: Balancing = by_operations
) -> StepAssignment:
    """The batch on the Plan, as training assigns it; examples are dealt out, where the Plan says so, by `cost`."""
    return assign_step(plan, batch, balancing, PricedStep(plan, batch, cost))


def predict_assigned(
    plan: Plan, stages: Planned, assignment: StepAssignment, cost: CostModel, *, seed: int = 0, jitter: float = 0.0
) -> Prediction:
    """The same for a batch that is assigned already, by training's own balancer say."""
    pricing = Pricing(plan, stages, assignment, cost)
    ranks = np.unique(np.concatenate([unit.first_rank + np.arange(unit.num_ranks) for unit in plan.units]))
    return Prediction(
        _slowest_island(pricing, seed, jitter),
        ranks,
        assignment.batch.num_examples,
        int(assignment.batch.sequence.sum()),
        sum(batch_flops(plan.model, assignment.batch).values()),
        pricing.hardware_flops(),
        len(ranks) * plan.cluster.device.peak_flops[plan.precision],
        {part: rows[ranks] for part, rows in memory_of(pricing).items()},
        plan.cluster.device.memory_bytes,
        _present(pricing),
    )


def _slowest_island(pricing: Pricing, seed: int, jitter: float) -> Timeline:
    """With its ranks called by those of the cluster that they stand for."""
    traffic = Traffic(pricing)
    program = Prepared(of_batch(pricing.planned, _present(pricing)))
    overlap = pricing.plan.cluster.device.overlaps
    slowest: tuple[int, Timeline] | None = None
    for island in _simulated(pricing, jitter):
        times = stage_times_of(pricing, traffic, island)
        timeline = simulate(program, times, overlap=overlap, jitter=jitter, seed=seed + island)
        if slowest is None or timeline.makespan_s > slowest[1].makespan_s:
            slowest = island, timeline
    assert slowest is not None
    island, timeline = slowest
    return replace(timeline, rank_names=_rank_names(pricing, island))


def _present(pricing: Pricing) -> tuple[Presence, ...]:
    """What each microbatch has, where rows depend on it."""
    return pricing.assignment.present if pricing.plan.schedule == "data_parallel" else ()


def _rank_names(pricing: Pricing, island: int) -> list[str]:
    """Of each program rank, the ranks of the cluster that it stands for in an island: those that share its work."""
    ranks = (ranks_of(pricing.layout, rank, island) for rank in range(pricing.planned.program.num_ranks))
    return [f"rank {own[0]}" if len(own) == 1 else f"ranks {own[0]}-{own[-1]}" for own in ranks]


def _simulated(pricing: Pricing, jitter: float) -> Iterator[int]:
    """Islands of like lengths take the same time, unless something is left to chance; then all are simulated."""
    islands = np.arange(pricing.num_islands)
    if jitter:
        yield from islands.tolist()
        return
    if len(islands) > MAX_ISLANDS:
        islands = np.argsort(-pricing.busiest_rank_s(), kind="stable")[:MAX_ISLANDS]
    seen: set[bytes] = set()
    for island in islands.tolist():
        lengths = pricing.assignment.island_key(island, pricing.num_islands)
        if lengths not in seen:
            yield island
        seen.add(lengths)


def stage_times_of(pricing: Pricing, traffic: Traffic, island: int = 0) -> StageTimes:
    """Of the Program's stages, edges and ranks, for the examples of one island."""
    stages, colocated = pricing.planned.stages, pricing.plan.schedule == "data_parallel"
    rows = [pricing.stage(stage, island) for stage in stages]
    forward, backward_input, weight, recompute, forward_tensor, backward_tensor, _ = map(np.stack, zip(*rows))
    none = np.zeros((1, 1))
    gather_s, reduce_s, replicas_s = np.array([traffic.collectives(stage) for stage in stages]).T
    parted = [(number, stage) for number, stage in enumerate(stages) if stage.num_parts > 1]
    return StageTimes(
        forward,
        backward_input,
        weight,
        recompute,
        forward_tensor,
        backward_tensor,
        send_s=none if colocated else traffic.send_s(island),
        return_s=none if colocated else traffic.send_s(island, gradient=True),
        exchange_s=traffic.exchange_s() if colocated else none,
        gather_s=gather_s,
        reduce_s=reduce_s,
        replicas_s=replicas_s,
        norm_s=traffic.norm_s(),
        step_s=traffic.step_s(),
        forward_parts={number: pricing.parts(stage) for number, stage in parted},
        backward_parts={number: pricing.parts(stage, backward=True) for number, stage in parted if stage.has_backward},
    )
