"""Whether the planner contradicts itself: a pin that finds a faster Plan, or more hardware that makes a step slower.

    python benchmarks/contradictions.py [--num-jobs 24] [--first 0] [--max-ranks 4] [--json FILE] [--only NUMBER]

The jobs are those of `optimality.py`, as far as they have at most --max-ranks ranks. Each is planned freely; then with
one thing pinned, of which the answer must not be faster, as every Plan that a pin allows is allowed without it; then
with more of one thing (memory, links, devices, a node), of which the answer must not be slower. Nothing is measured, so
any machine gives the same.

Rows: how many answers contradict the free one by more than rounding, and by how much at most; the goal is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from costs import workload_at
from optimality import random_job, words_of, words_of_plan
from rows import Row, finish, options, show

from motet.core.cluster import Cluster, Link
from motet.core.errors import UserError
from motet.cost.analytic import Analytic
from motet.planner.candidate import Pins
from motet.planner.job import Job
from motet.planner.search import NO_PINS, search
from motet.planner.strategies import STRATEGIES

ROUNDING = 1 + 1e-9
PINS: Mapping[str, Pins] = {
    **{f"strategy={name}": Pins(strategies=(name,)) for name in STRATEGIES},
    "schedule=1f1b": Pins(schedule="1f1b"),
    "schedule=interleaved_1f1b": Pins(schedule="interleaved_1f1b"),
    "schedule=zb_h1": Pins(schedule="zb_h1"),
    "schedule=zb_v": Pins(schedule="zb_v"),
    **{f"tp={tp}": Pins(tp=tp) for tp in (1, 2)},
    **{f"dp={dp}": Pins(dp=dp) for dp in (1, 2)},
    **{f"microbatch_size={size}": Pins(microbatch_size=size) for size in (1, 2)},
}


@dataclass(frozen=True)
class Compared:
    """One answer beside the free one of the same job. excess: by which share it contradicts it; 0 if it does not."""

    number: int
    job: str
    what: str
    free_s: float
    other_s: float
    excess: float
    plan: str


def more(cluster: Cluster) -> dict[str, Cluster]:
    """Clusters with more of one thing."""
    device, inside, between = cluster.device, cluster.intra_node, cluster.inter_node
    peak = {name: 1.5 * flops for name, flops in device.peak_flops.items()}
    return {
        "memory x 1.3": replace(cluster, device=replace(device, memory_bytes=int(1.3 * device.memory_bytes))),
        "links x 2": replace(cluster, intra_node=_faster(inside), inter_node=_faster(between)),
        "devices x 1.5": replace(cluster, device=replace(device, peak_flops=peak)),
        "a node more": replace(cluster, num_nodes=cluster.num_nodes + 1),
    }


def _faster(link: Link) -> Link:
    return Link(2 * link.bytes_per_s, link.latency_s)


def step_of(job: Job, pins: Pins = NO_PINS) -> tuple[float, str]:
    """Seconds of the answer's step, and its Plan in words; infinite where nothing fits."""
    try:
        found = search(job, STRATEGIES, pins)
    except UserError:  # A pin that no Plan of the job has.
        return math.inf, ""
    if not found.results:
        return math.inf, ""
    return found.best.prediction.step_s, words_of_plan(found.best.candidate.plan)


def compared(number: int, job: Job) -> list[Compared]:
    """A job's answers under pins and with more hardware."""
    free_s, _ = step_of(job)
    found = []
    for what, pins in PINS.items():
        other_s, plan = step_of(job, pins)
        excess = free_s / other_s - 1 if other_s * ROUNDING < free_s else 0.0
        found.append(Compared(number, words_of(job), what, free_s, other_s, excess, plan))
    for what, cluster in more(job.cluster).items():
        other_s, plan = step_of(replace(job, cluster=cluster, cost=Analytic(cluster)))
        excess = other_s / free_s - 1 if other_s > free_s * ROUNDING else 0.0
        found.append(Compared(number, words_of(job), what, free_s, other_s, excess, plan))
    return found


def rows_of(all_compared: list[Compared]) -> list[Row]:
    """The rows with their goals."""
    pinned = [one for one in all_compared if one.what in PINS]
    rows = [Row("jobs", len({one.number for one in all_compared}))]
    kinds = {"a pin": pinned} | {
        what: [one for one in all_compared if one.what == what]
        for what in dict.fromkeys(one.what for one in all_compared if one.what not in PINS)
    }
    for what, ones in kinds.items():
        verb = "finds a faster Plan" if what == "a pin" else "makes the answer slower"
        wrong = [one.excess for one in ones if one.excess]
        rows.append(Row(f"answers where {what} {verb}, of {len(ones)}", len(wrong), 0))
        rows.append(Row(f"the most by which {what} {verb}", max(wrong, default=0.0), 0))
    return rows


def main() -> None:
    parser = options(__doc__, only="one job, by its number")
    parser.add_argument("--num-jobs", type=int, default=24)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max-ranks", type=int, default=4)
    given = parser.parse_args()
    workload = workload_at(given.lengths)
    numbers = [int(given.only)] if given.only else range(given.first, given.first + given.num_jobs)
    found: list[Compared] = []
    for number in numbers:
        job = random_job(number, given.seed, workload)
        if job.cluster.num_ranks > given.max_ranks:
            continue
        ones = compared(number, job)
        if math.isinf(ones[0].free_s):
            print(f"{number:4d} {words_of(job)}: nothing fits", flush=True)
            continue
        found += ones
        print(f"{number:4d} {words_of(job)}: {sum(one.excess > 0 for one in ones)} contradictions", flush=True)
        for one in ones:
            if one.excess:
                print(f"     {one.what}: {one.free_s:.6f}, {one.other_s:.6f} ({one.excess:.2%}) {one.plan}", flush=True)
    rows = rows_of(found)
    for row in rows:
        show(row)
    told = [asdict(one) for one in found if one.excess]
    finish(rows, given.json, contradictions=told, max_ranks=given.max_ranks, lengths=Path(workload.source).name)


if __name__ == "__main__":
    main()
