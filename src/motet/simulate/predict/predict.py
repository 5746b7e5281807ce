"""A Plan, lengths and a cost model into a Prediction of a step.

1. The step's examples are assigned to the Plan (`assign/`).
2. Its stages and messages are priced (`stage_pricing.py`, `traffic.py`, `collectives.py`).
3. The Plan's Program is simulated.

Islands (`core/plan.py`) run the same Program on different examples, and the slowest one is the step. If there are many,
only MAX_ISLANDS are simulated: those with the largest sum, over microbatches, of the seconds on the busiest rank. Where
replicas share sequences, islands wait for each other in the passes of these microbatches, and where they share
experts in all passes of layers with these (`met_passes.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from motet.assign.balancing import Balancing, by_operations
from motet.assign.plan import assign_step
from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan
from motet.core.timeline import Timeline
from motet.core.workload import BatchLengths, Workload
from motet.cost.flops import batch_flops
from motet.cost.model import CostModel
from motet.schedule import PlannedProgram, Presence, planned, program_of_batch
from motet.schedule.coordinates import first_ranks, ranks_a_program_rank
from motet.schedule.program import Program
from motet.simulate.engine.simulate import Prepared, makespans, simulate, simulate_together
from motet.simulate.filling.step_filler import StepFiller
from motet.simulate.predict.batch import draw_batch
from motet.simulate.predict.memory import MemoryOfRanks
from motet.simulate.predict.met_passes import met_passes
from motet.simulate.predict.prediction import Prediction
from motet.simulate.predict.program_times import stage_times_of, times_in_islands
from motet.simulate.predict.stage_pricing import Pricing, Recomputed, Recomputes
from motet.simulate.predict.step_seconds import PricedSteps
from motet.simulate.predict.traffic import Traffic

MAX_ISLANDS = 32
"""Most islands that are simulated for a step. In 28 predictions of the papers' jobs the slowest was among the first 21.
"""


def predict(
    plan: Plan,
    workload: Workload,
    cost: CostModel,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    balancing: Balancing = by_operations,
) -> Prediction:
    """The Prediction of one step, with `plan.batch_size` examples drawn from a workload by `seed`.

    jitter:    sigma of the factor on the seconds of each compute action (`simulate`).
    balancing: how training balances colocated phases.
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
    recomputes: Recomputes | None = None,
    exchange: str = "auto",
) -> Iterator[Prediction]:
    """Predictions of several steps, one after the other. The first is that of `predict`.

    recomputes: where training decides it in each microbatch. exchange: as of `Pricing`.
    """
    stages, rng = planned(plan), np.random.default_rng(seed)
    filler, seconds = filler_of(stages), PricedSteps(plan, cost, stages)
    for _ in range(num_batches):
        assignment = assign_step(plan, draw_batch(plan, workload, rng), balancing, seconds)
        drawn, recomputed = int(rng.integers(1 << 32)), recomputes and recomputes(assignment)
        yield predict_assigned(
            plan,
            stages,
            assignment,
            cost,
            seed=drawn,
            jitter=jitter,
            filler=filler,
            recomputed=recomputed,
            exchange=exchange,
        )


def assign_batch(
    plan: Plan, batch: BatchLengths, cost: CostModel, balancing: Balancing = by_operations
) -> StepAssignment:
    """The step's examples assigned to the Plan, as in training. `cost` gives the seconds by which they are ordered."""
    return assign_step(plan, batch, balancing, PricedSteps(plan, cost))


def predict_assigned(
    plan: Plan,
    stages: PlannedProgram,
    assignment: StepAssignment,
    cost: CostModel,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    filler: StepFiller | None = None,
    recomputed: Recomputed | None = None,
    exchange: str = "auto",
) -> Prediction:
    """The Prediction of a step whose examples are already assigned, e.g. by the balancer of training.

    filler:     of `filler_of(stages)`, which is made anew if it is not given. Memory is that of the Plan's own fills:
                those of a step need no more than devices have (simulate/filling/memory.py).
    recomputed: of each microbatch, in place of the Plan's numbers. exchange: as of `Pricing`.
    """
    pricing = Pricing(plan, stages, assignment, cost, recomputed, exchange=exchange)
    timeline, program = _slowest_island(pricing, filler or filler_of(stages), seed, jitter)
    ranks = _ranks_of(plan)
    return Prediction(
        timeline,
        ranks,
        assignment.batch.num_examples,
        int(assignment.batch.sequence.sum()),
        sum(batch_flops(plan.model, assignment.batch).values()),
        pricing.hardware_flops(),
        len(ranks) * plan.cluster.device.peak_flops[plan.precision],
        MemoryOfRanks(pricing, ranks),
        plan.cluster.device.memory_bytes,
        _present(pricing),
        program,
        pricing.layer_pricing.beyond,
    )


def _ranks_of(plan: Plan) -> Int64Array:
    """The ranks of the cluster that a Plan uses, ascending."""
    is_used = np.zeros(plan.cluster.num_ranks, dtype=np.bool_)
    for unit in plan.units:
        is_used[unit.first_rank : unit.first_rank + unit.num_ranks] = True
    ranks: Int64Array = np.flatnonzero(is_used)
    return ranks


def step_s_of(
    plan: Plan, stages: PlannedProgram, assignment: StepAssignment, cost: CostModel, *, exchange: str = "auto"
) -> float:
    """`predict_assigned(...).step_s` alone: without the Timeline, the memory and the operations of the step."""
    pricing, filler = Pricing(plan, stages, assignment, cost, exchange=exchange), filler_of(stages)
    if filler is None and len(islands := list(_simulated(pricing, 0.0))) > 1:
        program = _prepared(program_of_batch(stages, _present(pricing)))
        return float(_makespans(pricing, Traffic(pricing), program, islands).max())
    return _slowest_island(pricing, filler, 0, 0.0)[0].makespan_s


def filler_of(stages: PlannedProgram) -> StepFiller | None:
    """What decides the fills of a Plan's steps; None if its own are those of every step. stages: of the Plan."""
    return StepFiller(stages) if stages.layout.plan.filling == "by_step" else None


def _slowest_island(
    pricing: Pricing, filler: StepFiller | None, seed: int, jitter: float
) -> tuple[Timeline, Program | None]:
    """The Timeline of the slowest island, and its Program where the step decides it.

    Its ranks are named by the ranks of the cluster that they stand for.
    """
    traffic, overlap = Traffic(pricing), pricing.plan.cluster.device.overlaps
    own = _prepared(program_of_batch(pricing.planned, _present(pricing)))

    def named(timeline: Timeline, island: int) -> Timeline:
        return timeline.named(_rank_names(pricing, island), ranks_a_program_rank(pricing.layout).tolist())

    def simulated(island: int, program: Prepared = own) -> Timeline:
        times = stage_times_of(pricing, traffic, island)
        return named(simulate(program, times, overlap=overlap, jitter=jitter, seed=seed + island), island)

    def filled(island: int, filler: StepFiller) -> tuple[Timeline, Program]:
        program = filler.program(pricing.assignment, island).program
        return simulated(island, Prepared(program)), program

    islands = list(_simulated(pricing, jitter))
    if (meeting := met_passes(pricing, islands)) is not None:
        # Islands that meet have one Program, also where each step fills bubbles.
        by_step = None if filler is None else filler.program(pricing.assignment, islands[0]).program
        program = own if by_step is None else Prepared(by_step)
        times, seeds = [stage_times_of(pricing, traffic, island) for island in islands], [seed + i for i in islands]
        found = simulate_together(program, times, meeting, overlap=overlap, jitter=jitter, seeds=seeds)
        timeline, island = max(zip(found, islands), key=lambda one: one[0].makespan_s)
        return named(timeline, island), by_step
    if filler is not None:
        return max((filled(island, filler) for island in islands), key=lambda one: one[0].makespan_s)
    if jitter:
        return max(map(simulated, islands), key=lambda timeline: timeline.makespan_s), None
    if len(islands) == 1:
        return simulated(islands[0]), None
    return simulated(islands[int(np.argmax(_makespans(pricing, traffic, own, islands)))]), None


def _prepared(program: Program) -> Prepared:
    """The Program, prepared. The last ones are kept: a Plan is simulated in several orders and on several batches."""
    found = next((known for known in _last_prepared if known.program is program), None)
    if found is None:
        found = Prepared(program)
        _last_prepared.append(found)
    return found


_last_prepared: deque[Prepared] = deque(maxlen=2)


def _makespans(pricing: Pricing, traffic: Traffic, program: Prepared, islands: Sequence[int]) -> Float64Array:
    """Seconds of a step of each of these islands, [len(islands)]."""
    overlap, times = pricing.plan.cluster.device.overlaps, times_in_islands(pricing, traffic, islands)
    return makespans(program, times, len(islands), overlap, met_passes(pricing, islands))


def _present(pricing: Pricing) -> tuple[Presence, ...]:
    """What each microbatch has, under "data_parallel"; () else, because the Program does not depend on it."""
    return pricing.assignment.present if pricing.plan.schedule == "data_parallel" else ()


def _rank_names(pricing: Pricing, island: int) -> list[str]:
    """For each program rank, the name of the ranks of the cluster that it stands for in an island."""
    first, counts = first_ranks(pricing.layout)[island].tolist(), ranks_a_program_rank(pricing.layout).tolist()
    return [f"rank {rank}" if num == 1 else f"ranks {rank}-{rank + num - 1}" for rank, num in zip(first, counts)]


def _simulated(pricing: Pricing, jitter: float) -> Iterator[int]:
    """The islands to simulate. Without jitter, islands with the same lengths take the same time, so one is enough, of
    those that wait for the same others.
    """
    islands = np.arange(pricing.num_islands)
    if jitter:
        yield from islands.tolist()
        return
    if len(islands) == 1:
        yield 0
        return
    busiest_s, group = pricing.busiest_rank_s(), islands // _islands_that_share_experts(pricing)
    if len(islands) > MAX_ISLANDS:
        # Those that share experts with the busiest come behind it.
        of_group = np.zeros(len(islands))
        np.maximum.at(of_group, group, busiest_s)
        islands = np.lexsort((-busiest_s, group, -of_group[group]))[:MAX_ISLANDS]
    # Only islands that are equally busy can have the same lengths.
    seen: dict[tuple[float, int], list[int]] = {}
    key = cache(lambda island: pricing.assignment.island_key(island, pricing.num_islands))
    for island in islands.tolist():
        others = seen.setdefault((float(busiest_s[island]), int(group[island])), [])
        if not others or all(key(island) != key(other) for other in others):
            yield island
            others.append(island)


def _islands_that_share_experts(pricing: Pricing) -> int:
    """How many islands, one after the other, run layers together; all where none do, as then any are alike."""
    layout, units = pricing.layout, [unit for unit in pricing.plan.units if unit.expert_replicas > 1]
    return max((-(-unit.expert_replicas // layout.num_replicas(unit)) for unit in units), default=pricing.num_islands)
