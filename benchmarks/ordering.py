"""`order` under every schedule, on real lengths: steps as they are simulated, and the time of the decision.

    python benchmarks/ordering.py [--lengths FILE] [--seed 0] [--json FILE] [--only NAME]

gain:     given / ordered step of each Plan, schedule and order, the median over batches; goal: 1 or more on each batch.
worse:    the steps that are slower than in the given order: goal 0.
decision: processor time of a step's decision on MMScale's largest job, 1,296 GPUs and 1,920 examples (its Table 3:
          4 to 8 ms), interleaved and 1F1B: goal 10 ms; and of 10 million `s += i * i` in the same process, for scale.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from order import Case, cases
from rows import Row, finish, options, show

from motet.assign.plan import assign_step
from motet.core.errors import UserError
from motet.core.plan import Plan, ScheduleKind, Unit
from motet.core.workload import BatchLengths
from motet.cost.model import CostModel
from motet.planner.candidate import Candidate
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.step_seconds import PricedSteps

NUM_BATCHES = 3
ORDERS = ("intra", "inter", "both")
SCHEDULES: tuple[tuple[str, ScheduleKind, int, bool], ...] = (
    ("gpipe", "gpipe", 1, False),
    ("1f1b", "1f1b", 1, False),
    ("interleaved_1f1b, 2 stages a rank", "interleaved_1f1b", 2, False),
    ("interleaved_1f1b, 4 stages a rank", "interleaved_1f1b", 4, False),
    ("interleaved_1f1b, 2 stages a rank, deferred warm-up", "interleaved_1f1b", 2, True),
    ("zb_h1", "zb_h1", 1, False),
    ("zb_v", "zb_v", 2, False),
)
"""Name, schedule, stages a rank of the backbone, and deferred warm-up."""
MOST_MS = 10.0
ROUNDING = 1e-7


def recut(unit: Unit, chunks: int) -> Unit:
    """The unit with its blocks in even stages, so many a rank."""
    blocks = [name for stage in unit.stages for name, count in stage.items() for _ in range(count)]
    cuts = np.linspace(0, len(blocks), unit.pp * chunks + 1).round().astype(int).tolist()
    stages = tuple(dict(Counter(blocks[first:stop])) for first, stop in pairwise(cuts))
    return replace(unit, stages=stages, recompute=())


def under(plan: Plan, kind: ScheduleKind, chunks: int, deferred: bool) -> Plan:
    units = tuple(recut(unit, chunks if "backbone" in unit.modules else 1) for unit in plan.units)
    return replace(plan, units=units, schedule=kind, deferred_warmup=deferred, fills=(), order="given")


def found_plans(path: Path) -> Iterator[tuple[Case, Plan]]:
    """Pipelines of the papers' models: InternVL-20B in a chain, MLLM-72B disaggregated, MLLM-10B modality parallel."""
    for case in cases(path):
        leader = next(one for one in case.strategy(case.job, case.pins) if isinstance(one, Candidate))
        if leader.plan.unit_of("backbone").pp > 1:
            yield case, leader.plan


def simulated_s(steps: PricedSteps, plan: Plan, batch: BatchLengths, cost: CostModel) -> float:
    assignment = assign_step(plan, batch, seconds=steps)
    return predict_assigned(plan, steps.planned, assignment, cost).step_s


def gains(case: Case, plan: Plan, batches: list[BatchLengths]) -> dict[str, list[float]]:
    """Given / ordered step, by order and batch. Orders have one Program."""
    steps = PricedSteps(plan, case.job.cost)
    given_s = [simulated_s(steps, plan, batch, case.job.cost) for batch in batches]
    return {
        order: [
            before / simulated_s(steps, replace(plan, order=order), batch, case.job.cost)
            for before, batch in zip(given_s, batches)
        ]
        for order in ORDERS
    }


def schedule_rows(path: Path, seed: int, only: str) -> Iterator[Row]:
    worse = total = 0
    for case, plan in found_plans(path):
        rng = np.random.default_rng(seed)
        batches = [case.job.workload.draw(case.job.batch_size, rng) for _ in range(NUM_BATCHES)]
        for name, kind, chunks, deferred in SCHEDULES:
            try:
                found = gains(case, under(plan, kind, chunks, deferred), batches) if only in name else {}
            except UserError:
                continue  # A schedule that the units cannot have.
            for order, ratios in found.items():
                worse += sum(ratio < 1 - ROUNDING for ratio in ratios)
                total += len(ratios)
                never_worse = min(ratios) >= 1 - ROUNDING
                yield Row(f"{case.name}; {name}; {order}", statistics.median(ratios), 1.0, never_worse)
    yield Row(f"of {total} steps, slower than in the given order", worse, 0)


def decision_rows(path: Path, seed: int) -> Iterator[Row]:
    case, plan = next(islice(found_plans(path), 1, None))
    rng = np.random.default_rng(seed)
    batches = [case.job.workload.draw(case.job.batch_size, rng) for _ in range(15)]
    for kind, chunks in (("interleaved_1f1b", 4), ("1f1b", 1)):
        made = replace(under(plan, kind, chunks, False), order="both")
        steps, taken_ms = PricedSteps(made, case.job.cost), []
        for batch in batches:
            began_s = time.process_time()
            assign_step(made, batch, seconds=steps)
            taken_ms.append(1e3 * (time.process_time() - began_s))
        yield Row(
            f"decision, {case.name}, {kind}: ms, median of steps 2 to 15", statistics.median(taken_ms[1:]), MOST_MS
        )
        yield Row(f"decision, {case.name}, {kind}: ms, first step", taken_ms[0])
    began_s, total = time.process_time(), 0
    for i in range(10_000_000):
        total += i * i
    yield Row("10 million s += i * i: s", time.process_time() - began_s)


def main() -> None:
    asked = options(__doc__, "a part of a schedule's name, or 'decision'").parse_args()
    if not asked.lengths.exists():
        print(f"{asked.lengths} is not there: --lengths must name the table of lengths.")
        return
    rows: list[Row] = []
    if asked.only != "decision":
        rows += _shown(schedule_rows(asked.lengths, asked.seed, asked.only))
    if asked.only in ("", "decision"):
        rows += _shown(decision_rows(asked.lengths, asked.seed))
    finish(rows, asked.json, seed=asked.seed)


def _shown(rows: Iterator[Row]) -> list[Row]:
    found = []
    for row in rows:
        show(row)
        found.append(row)
    return found


if __name__ == "__main__":
    main()
