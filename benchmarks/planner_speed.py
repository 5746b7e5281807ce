"""What `motet plan` takes: processor time over that of a fixed loop, and the most memory, for the recipes.

    python benchmarks/planner_speed.py [--repeats 5] [--only PART_OF_NAME]
        [--json benchmarks/results/planner_speed.json] [--plans FOLDER]

Each plan is the whole command with --no-what-if in a process of its own: reading, searching, simulating, drawing and
writing. Its
processor time, of all threads, is divided by that of a loop of 10 million `s += i * i` in Python, which runs in this
process before and after it; so a figure is about the same on other machines. Figures are medians over repeats. Modules
are compiled by the first run alone, also where PYTHONDONTWRITEBYTECODE is set. Memory is the peak of the resident set.
The goals are 2 loops and 1 GB, and 4 loops for 100,000 GPUs. Linux only.

Then one whole prediction of OrchMLLM-84B on 2,560 ranks under FSDP, in this process: drawing the batch, placing its
items (as they come, or balanced as training balances by default), pricing and simulating. The goal is 0.3 loops.

With --plans, the plan of each case and the figures of all that were simulated are kept in a folder, and compared with
those that are there already: run it before a change and after. A case that answers otherwise ends the program. Writing
the figures takes time as well.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rows import ROOT, Row, finish, options, show
from trials import job_of

from motet.core.plan import BalancingMethod, Plan, Unit
from motet.planner.job import Job
from motet.simulate.predict.predict import predict

GOAL_LOOPS, GOAL_GBYTES, GOAL_OF_PREDICTION = 2.0, 1.0, 0.3
RECIPES = (
    "orchmllm_10b", "orchmllm_18b", "orchmllm_84b", "vit22b_gpt175b", "internvl_20b", "mllm_72b", "valm_mm",
)  # fmt: skip


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)


class Case(NamedTuple):
    """A recipe, what of it is changed, and the loops that it may take."""

    recipe: str
    overrides: tuple[str, ...] = ()
    goal_loops: float = GOAL_LOOPS

    @property
    def name(self) -> str:
        """The name of its rows."""
        return " ".join((self.recipe, *self.overrides))


def weak_scaled(num_nodes: int, goal_loops: float = GOAL_LOOPS, *, examples_a_gpu: int = 30) -> Case:
    """OrchMLLM-84B on more or fewer nodes of 8 GPUs; the paper has 30 examples a GPU."""
    overrides = f"cluster.nodes={num_nodes}", f"run.batch_size={8 * examples_a_gpu * num_nodes}"
    return Case("orchmllm_84b", overrides, goal_loops)


# One example for each of 100,000 GPUs: a job has no more than 10^10 examples times ranks (`core/limits.py`).
CASES = (*map(Case, RECIPES), weak_scaled(80), weak_scaled(1280), weak_scaled(12500, 4.0, examples_a_gpu=1))


class Taken(NamedTuple):
    """What one run of the command took."""

    loops: float
    peak_gbytes: float


def loop_s() -> float:
    """Processor time of the fixed loop."""
    started_s = time.process_time()
    s = 0
    for i in range(10_000_000):
        s += i * i
    return time.process_time() - started_s


def run(case: Case, folder: Path, *, writes_figures: bool = False) -> Taken:
    """Run the command once; writes_figures: with --json, too. Ends the program if it fails."""
    command = [sys.executable, "-m", "motet", "plan", str(ROOT / "recipes" / f"{case.recipe}.toml"), "--no-what-if"]
    command += [word for override in case.overrides for word in ("--set", override)]
    before_s = loop_s()
    with (folder / "output.txt").open("wb") as output:
        given = [*command, "--out", str(folder / "plan.json")]
        given += ["--json", str(folder / "figures.json")] if writes_figures else []
        process = subprocess.Popen(given, stdout=output, stderr=output, env=ENVIRONMENT)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{case.name}: {(folder / 'output.txt').read_text(errors='replace')}")
    mean_s = (before_s + loop_s()) / 2
    return Taken((used.ru_utime + used.ru_stime) / mean_s, used.ru_maxrss * 1024 / 1e9)


def compare(case: Case, folder: Path, plans: Path) -> None:
    """Keep what a run wrote, or end the program if it is not what was kept before."""
    for name in ("plan.json", "figures.json"):
        kept, text = plans / f"{case.name.replace(' ', '_')}-{name}", (folder / name).read_text()
        if not kept.exists():
            kept.write_text(text)
        elif kept.read_text() != text:
            raise SystemExit(f"{case.name}: {name} is not what {kept} has.")


def measure(cases: list[Case], repeats: int, plans: Path | None = None) -> Iterator[Row]:
    """The rows of each case: loops, then memory. plans: as of --plans."""
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            taken = [run(case, Path(folder), writes_figures=plans is not None) for _ in range(repeats)]
            if plans is not None:
                compare(case, Path(folder), plans)
            yield Row(f"{case.name}: loops", statistics.median(one.loops for one in taken), case.goal_loops)
            yield Row(f"{case.name}: peak GB", statistics.median(one.peak_gbytes for one in taken), GOAL_GBYTES)


PREDICTIONS: Mapping[str, BalancingMethod] = {
    "prediction of 2,560 ranks, items as they come": "off",
    "prediction of 2,560 ranks, items balanced": "auto",
}


def measure_predictions(only: str, repeats: int) -> Iterator[Row]:
    """A row for each way of placing items whose name contains `only`."""
    job = job_of("orchmllm_84b")
    unit = Unit("all", (dict(job.model.num_blocks),), dp=job.cluster.num_ranks, zero=3)
    for name, balance in PREDICTIONS.items():
        if only in name:
            size = job.batch_size // (2 * unit.dp)
            plan = Plan(job.model, job.cluster, (unit,), job.batch_size, size, "data_parallel", balance=balance)
            loops = statistics.median(prediction_loops(job, plan) for _ in range(repeats))
            yield Row(f"{name}: loops", loops, GOAL_OF_PREDICTION)


def prediction_loops(job: Job, plan: Plan) -> float:
    """What one prediction takes."""
    before_s = loop_s()
    started_s = time.process_time()
    predict(plan, job.workload, job.cost, seed=job.seed)
    taken_s = time.process_time() - started_s
    return 2 * taken_s / (before_s + loop_s())


def main() -> None:
    parser = options(__doc__, "only the cases whose name contains this", reads_lengths=False, draws=False)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plans", type=Path, help="keep the answers there, and compare them with those that are there")
    given = parser.parse_args()
    if given.plans is not None:
        given.plans.mkdir(parents=True, exist_ok=True)
    rows = []
    cases = measure([case for case in CASES if given.only in case.name], given.repeats, given.plans)
    for row in chain(cases, measure_predictions(given.only, given.repeats)):
        rows.append(row)
        show(row)
    finish(rows, given.json, repeats=given.repeats)


if __name__ == "__main__":
    main()
