"""How far the planner's answer is from the fastest Plan of a written space, on random small jobs with real lengths.

    python benchmarks/optimality.py [--num-jobs 200] [--first 0] [--seed 0] [--json FILE] [--only NUMBER]

Each job has 2 to 8 ranks in nodes of 1 to 8, one or two encoders and a backbone of few blocks, lengths of
../shared/data/lengths.csv.gz (or --lengths FILE; sampled ones where there is none), and so much memory that it binds or
does not. `motet plan`'s search answers; `enumerated_plans.py` then looks for a faster Plan by enumeration, with the
same simulator and the same check of memory, and without the planner. Whatever it finds is named.

Rows: the share of jobs whose answer is within 1 % of the best Plan, with the goal 1; the share that equals it, with the
goal 0.95; the largest loss. Of the lower bound that the planner says beside its answer (`planner/step_bound.py`): the
most by which it is above the best Plan found, which must be none; the median of best / bound, with the goal 1.15; and
how many jobs each of its terms binds. Nothing is measured, so any machine gives the same.

    python benchmarks/optimality.py --bounds-of benchmarks/results/optimality-2-cpu-cores.json

bounds the jobs of a stored run anew, in seconds, and holds the best Plans that it found to these bounds.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from costs import of_model, workload_at
from enumerated_plans import Enumerated, SmallJob, enumerate_plans
from rows import Row, finish, options, show

from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan
from motet.core.shapes import Transformer, audio_encoder, connect, language_model, multimodal, vit
from motet.core.workload import Workload
from motet.cost.analytic import Analytic
from motet.planner.candidate import Pins
from motet.planner.job import Job
from motet.planner.search import search
from motet.planner.search_result import SearchResult
from motet.planner.step_bound import StepBound, Term, step_bound
from motet.planner.strategies import STRATEGIES

SHAPES = (
    (1, 2),
    (2, 1),
    (1, 3),
    (1, 4),
    (2, 2),
    (4, 1),
    (3, 1),
    (1, 5),
    (2, 3),
    (1, 6),
    (6, 1),
    (2, 4),
    (1, 8),
    (4, 2),
)
"""Nodes and ranks of each."""
MAX_SIMULATED = 400
NUM_DRAWN = 4
"""Batches of a job that must fit under caps."""
WITHIN, EQUAL = 1.01, 1 + 1e-6
BOUND_GOAL = 1.15


@dataclass(frozen=True)
class Outcome:
    """The planner's answer for a job beside the enumerator's."""

    number: int
    words: str
    planned_s: float
    planned: str
    found: Enumerated
    bound: StepBound
    took_s: tuple[float, float]

    @property
    def loss(self) -> float:
        """Seconds of the answer over those of the best."""
        return self.planned_s / self.found.step_s

    @property
    def over_bound(self) -> float:
        """Seconds of the best over the lower bound of all Plans."""
        return self.found.step_s / self.bound.step_s


def random_job(number: int, seed: int, workload: Workload) -> Job:
    """Job `number`: a function of it and of the seed."""
    rng = np.random.default_rng((seed, number))

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    hidden, width = one_of(512, 1024, 2048), one_of(256, 512, 1024)
    trained = one_of("all", "all", "backbone", "projectors")
    encoder = Transformer(width, 4 * width, 8, window=one_of(0, 0, 64))
    llm = Transformer(hidden, 4 * hidden, 8, one_of(2, 8), gated=one_of(True, False), norm="rms", causal=True)
    makers = one_of((vit,), (audio_encoder,), (vit, audio_encoder), (vit, audio_encoder))
    names = {vit: "image", audio_encoder: "audio"}
    encoders = [make(names[make], encoder, int(rng.integers(1, 5)), trainable=trained == "all") for make in makers]
    spec = multimodal(
        "small",
        language_model(llm, int(rng.integers(2, 6)), one_of(4000, 32000), trainable=trained != "projectors"),
        [connect(one, hidden, one_of("linear", "mlp"), downsample=4) for one in encoders],
    )
    num_nodes, ranks_per_node = SHAPES[int(rng.integers(len(SHAPES)))]
    state_bytes = 18 * sum(module.num_parameters for module in spec.modules)
    memory = max(state_bytes * one_of(0.3, 0.6, 1.2, 4.0, 16.0), 4e8)
    device = Device("small", {"bf16": one_of(2e13, 1e14, 4e14)}, int(memory), 1e12)
    between = one_of(5e9, 2.5e10, 1e11)
    cluster = Cluster(device, num_nodes, ranks_per_node, Link(one_of(5e10, 2e11), 3e-6), Link(between, 1e-5))
    kept = of_model(workload.examples, spec)
    has = np.zeros(kept.num_examples, dtype=bool)
    for items in kept.items.values():
        has[items.example] = True
    text = rng.random(kept.num_examples) < one_of(0.0, 0.05, 1.0)
    own = Workload(workload.source, kept.keep(has | text))
    return Job(spec, cluster, own, one_of(4, 6, 8, 12, 16, 24), Analytic(cluster), seed=number)


def words_of(job: Job) -> str:
    cluster = job.cluster
    modules = ", ".join(f"{module.name} {len(module.blocks)}" for module in job.model.modules)
    gbytes = cluster.device.memory_bytes / 1e9
    return f"{cluster.num_nodes} x {cluster.ranks_per_node} ranks, batch {job.batch_size}, {modules}, {gbytes:.2g} GB"


def words_of_plan(plan: Plan | None) -> str:
    if plan is None:
        return ""
    units = []
    for unit in plan.units:
        degrees = " ".join(
            f"{name.upper()} {value}"
            for name, value in (("tp", unit.tp), ("cp", unit.cp), ("pp", unit.pp), ("dp", unit.dp))
            if value > 1
        )
        cut = "|".join("+".join(f"{count} {name}" for name, count in stage.items()) for stage in unit.stages)
        shard = f"/{unit.shard_size}" if unit.shard_size else ""
        extra = f" replicated {','.join(unit.replicated)}" if unit.replicated else ""
        recompute = sum(sum(stage.values()) for stage in unit.recompute)
        units.append(f"{cut}{extra} [{degrees or 'one rank'}, ZeRO {unit.zero}{shard}, recompute {recompute}]")
    return f"{plan.schedule}, microbatch {plan.microbatch_size}, {plan.balance}/{plan.order}: {'; '.join(units)}"


def answered(job: Job) -> SearchResult:
    """What the planner finds."""
    return search(job, STRATEGIES, Pins())


def outcome_of(number: int, job: Job, result: SearchResult, max_simulated: int) -> Outcome:
    """The enumerator's search for something faster than the planner's answer."""
    best = result.best
    drawn = tuple(job.drawn(number) for number in range(1, NUM_DRAWN))
    small = SmallJob(job.model, job.cluster, job.batch, job.cost, job.capacity_bytes, drawn)
    started = time.process_time()
    found = enumerate_plans(small, best.prediction.step_s, max_simulated)
    took_s = time.process_time() - started
    plan = f"{best.candidate.strategy}: {words_of_plan(best.candidate.plan)}"
    return Outcome(number, words_of(job), best.prediction.step_s, plan, found, result.bound, (0.0, took_s))


def rows_of(outcomes: list[Outcome]) -> list[Row]:
    """The rows with their goals."""
    losses = np.array([one.loss for one in outcomes])
    over_bound = np.array([one.over_bound for one in outcomes])
    terms = Counter(one.bound.term for one in outcomes)
    within, equal = float((losses <= WITHIN).mean()), float((losses <= EQUAL).mean())
    return [
        Row("jobs", len(outcomes)),
        Row("share of jobs whose answer is within 1 % of the best", within, 1.0, within >= 1.0),
        Row("share of jobs whose answer is the best", equal, 0.95, equal >= 0.95),
        Row("largest loss", float(losses.max()) - 1, 0.01),
        *rows_of_bounds(over_bound, terms),
        Row("share of jobs whose space was searched whole", float(np.mean([one.found.is_whole for one in outcomes]))),
    ]


def bounds_of(stored: Path, seed: int, workload: Workload) -> list[Row]:
    """The rows of the bound alone, for the jobs and the best Plans of a stored run.

    Ends the program if that run had other lengths, as its jobs were others.
    """
    run = json.loads(stored.read_text())
    if run["lengths"] != (own := Path(workload.source).name):
        raise SystemExit(f"{stored} has jobs with the lengths {run['lengths']}, not {own}: give them by --lengths.")
    best_s = {one["number"]: one["best_s"] for one in run["jobs"]}
    bounds = {number: step_bound(random_job(number, seed, workload)) for number in best_s}
    return rows_of_bounds(
        np.array([best_s[number] / bound.step_s for number, bound in bounds.items()]),
        Counter(bound.term for bound in bounds.values()),
    )


def rows_of_bounds(over_bound: Float64Array, terms: Counter[Term]) -> list[Row]:
    """over_bound: seconds of the best Plan of each job over its bound, [num_jobs]. terms: what binds how many jobs."""
    quarter, median, most = (float(each) for each in np.quantile(over_bound, (0.25, 0.5, 0.75)))
    return [
        Row("least best / bound", float(over_bound.min()), 1.0, bool((over_bound >= 1).all())),
        Row("median best / bound", median, BOUND_GOAL, median <= BOUND_GOAL),
        Row("a quarter of jobs is below", quarter),
        Row("a quarter of jobs is above", most),
        *(Row(f"jobs whose bound is of {term}", terms[term]) for term in get_args(Term)),
    ]


def told(one: Outcome) -> dict[str, Any]:
    return {
        "number": one.number,
        "job": one.words,
        "planned_s": one.planned_s,
        "planned": one.planned,
        "best_s": one.found.step_s,
        "best": words_of_plan(one.found.plan),
        "loss": one.loss - 1,
        "bound_s": one.bound.step_s,
        "bound_is_of": one.bound.term,
        "structures": one.found.num_structures,
        "simulated": one.found.num_simulated,
        "is_whole": one.found.is_whole,
        "took_s": one.took_s,
    }


def main() -> None:
    parser = options(__doc__, only="one job, by its number")
    parser.add_argument("--num-jobs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max-simulated", type=int, default=MAX_SIMULATED)
    parser.add_argument("--bounds-of", type=Path, help="a stored run, whose jobs are bounded anew, and no more")
    given = parser.parse_args()
    workload = workload_at(given.lengths)
    if given.bounds_of:
        for row in bounds_of(given.bounds_of, given.seed, workload):
            show(row)
        return
    numbers = [int(given.only)] if given.only else range(given.first, given.first + given.num_jobs)
    outcomes: list[Outcome] = []
    for number in numbers:
        job = random_job(number, given.seed, workload)
        started = time.process_time()
        result = answered(job)
        planned_s = time.process_time() - started
        if not result.results:
            print(f"{number:4d} {words_of(job)}: nothing fits", flush=True)
            continue
        one = outcome_of(number, job, result, given.max_simulated)
        one = dataclasses.replace(one, took_s=(planned_s, one.took_s[1]))
        outcomes.append(one)
        print(
            f"{number:4d} {one.words}: loss {one.loss - 1:.2%}, {one.found.num_simulated} of "
            f"{one.found.num_structures} simulated, {one.over_bound:.3f} x bound ({one.bound.term})"
            f"{'' if one.found.is_whole else ', NOT WHOLE'}, "
            f"{planned_s:.1f} + {one.took_s[1]:.1f} s",
            flush=True,
        )
        if one.loss > EQUAL:
            print(f"     answer {one.planned_s:.6f} {one.planned}", flush=True)
            print(f"     best   {one.found.step_s:.6f} {words_of_plan(one.found.plan)}", flush=True)
    rows = rows_of(outcomes)
    for row in rows:
        show(row)
    finish(rows, given.json, jobs=[told(one) for one in outcomes], lengths=Path(workload.source).name)


if __name__ == "__main__":
    main()
