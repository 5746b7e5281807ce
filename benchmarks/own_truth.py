"""Predicted against measured steps of the demo recipe: profiled, trained and simulated on the same ranks.

    python benchmarks/own_truth.py [--ranks 2] [--rounds 3] [--json own_truth.json] [--only off joint]

A round measures layers, messages and optimizer (`motet profile`), then runs real batches of the demo's data in
several settings, in turns. For each setting the recipe's own Plan (`plan_of_recipe`) is simulated from the round's
profile, with the Assignments by which the batches ran. Nothing is fitted to a step. Batches are loaded beforehand, as
training's prefetch thread does, so decoding takes no part. A step lasts from a barrier to the end of its slowest rank.

Settings that begin with "pp" are pipelines on two ranks (`own_truth_plans.py`). They train under a Plan as `motet train
--plan` does, and are predicted from the same profile. The model has more blocks than the demo's, so that it can be cut.
In "cp" and "split" both ranks share sequences; beside each stands what the same profile predicts where fragments are
their share of whole items.

--recipe takes another recipe in place of the demo's, one without files (`own_truth_recipes/`).

One profile, with the recipe's own `[fsdp]`, serves all settings of a round. Prediction and measurement are compared
within a round, since a machine that others use does not keep its speed. Where there are cores enough, each rank is kept
on a core of its own, with all its threads, as ranks that train on a CPU should be. Where there are not, steps take
longer than predicted by what they are delayed: the share of a step in which threads of a rank could have run and had no
core is told beside it, as is the processor time of the slowest rank's main thread, against the computation predicted.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from own_truth_plans import DEEPER, PIPELINES, SHARED, pipeline_plan
from own_truth_report import Sample, compare, show, summary
from rows import Row, write_rows
from rows import options as command_line

from motet.assign.planned_step import by_replica
from motet.core.plan import Plan
from motet.core.timeline import Timeline
from motet.cost.catalogue import cluster
from motet.cost.profile import Profile
from motet.cost.profiled import Profiled
from motet.dispatch.edge_messages import assignment_of
from motet.models.spec import model_spec, spec_of_config
from motet.planning.plan_of_recipe import plan_of_recipe
from motet.profiling.command import profile
from motet.runtime.clock import ActionClock
from motet.schedule import Action, planned
from motet.schedule.program import WHOLE_RANK, action_words
from motet.simulate.predict.predict import predict_assigned
from motet.train.input.feed import Feed, StepRange
from motet.train.job import TrainingJob, build_job
from motet.train.planned_job import ChosenPlan
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import load_recipe
from motet.train.world import World, join_world

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"
WHOLE, SHARDED = ("fsdp.shard_size=1",), ("fsdp.shard_size={ranks}", "fsdp.reshard_after_forward=true")
KEPT = ("fsdp.shard_size={ranks}", "fsdp.reshard_after_forward=false")
SETTINGS = {
    "off": (*WHOLE, "balance.phases=off"),
    "joint": (*WHOLE, "balance.method=joint"),
    "per_phase": (*WHOLE, "balance.method=per_phase"),
    "auto": (*WHOLE, "balance.method=auto"),
    "joint, 2 microbatches": (*WHOLE, "balance.method=joint", "run.microbatches=2"),
    "joint, FSDP": (*SHARDED, "balance.method=joint"),
    "per_phase, FSDP": (*SHARDED, "balance.method=per_phase"),
    "off, FSDP": (*SHARDED, "balance.phases=off"),
    "joint, FSDP, 2 microbatches": (*SHARDED, "balance.method=joint", "run.microbatches=2"),
    "joint, FSDP, kept": (*KEPT, "balance.method=joint"),
}


@dataclass(frozen=True)
class Options:
    rounds: int
    profile_seconds: float
    batches: int
    repeats: int
    batch_size: int
    seed: int
    settings: tuple[str, ...]
    recipe: Path | None = None


@dataclass(frozen=True)
class Run:
    """A setting on one rank: its job, and steps that are ready to run."""

    recipe: Recipe
    job: TrainingJob
    clock: BothClocks
    plan: Plan
    steps: list


def run_rank(rank: int, num_ranks: int, folder: str, options: Options, out: Path | None) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= num_ranks:
        os.sched_setaffinity(0, {cores[rank]})
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=f"file://{folder}/rendezvous")
    with join_world("cpu") as world, ExitStack() as stack:
        hardware = world.gather(cluster("cpu", 1, num_ranks))[0]
        runs = {name: prepared(name, world, folder, options, hardware, stack) for name in options.settings}
        rounds = []
        for number in range(options.rounds):
            load = os.getloadavg()[0]
            with contextlib.redirect_stdout(io.StringIO()):
                own = load_recipe(options.recipe or RECIPE, overrides(folder, options))
                measured = profile(
                    own, own_name(options), out=Path(folder) / f"{number}.json", seconds=options.profile_seconds
                )
            found = measure(runs, options, world)
            everywhere = world.gather(found)
            if world.is_first:
                settings = {}
                for name, run in runs.items():
                    repeats = [list(zip(*ranks, strict=True)) for ranks in zip(*(rank[name] for rank in everywhere))]
                    settings[name] = compare(zip(repeats, predicted(run, Profiled(measured, hardware)), strict=True))
                    if name in SHARED:
                        steps = predicted(run, Profiled(without_runs(measured), hardware))
                        settings[f"{name}, as whole items"] = compare(zip(repeats, steps, strict=True))
                rounds.append({"load": [load, os.getloadavg()[0]], "settings": settings})
                print(
                    f"round {number + 1} of {options.rounds}, load {load:.1f} to {os.getloadavg()[0]:.1f}", flush=True
                )
        if world.is_first:
            figures = summary(rounds)
            print(f"{num_ranks} ranks on {len(cores)} cores")
            show(figures)
            if out is not None:
                rows = [Row(f"{name}: predicted over measured", own["ratio"]) for name, own in figures.items()]
                rows += [
                    Row(f"{name}: the same, processor time", each["processor_ratio"]) for name, each in figures.items()
                ]
                about = {
                    "num_ranks": num_ranks,
                    "num_cores": len(cores),
                    "options": asdict(options) | {"recipe": own_name(options)},
                }
                write_rows(out, rows, **about, seed=options.seed, settings=figures, rounds=rounds)
    dist.destroy_process_group()


def own_name(options: Options) -> str:
    return (options.recipe or RECIPE).stem


def without_runs(measured: Profile) -> Profile:
    """The profile without what attention of runs of shared items takes."""
    modules = [
        module.model_copy(update={"layers": tuple(each.model_copy(update={"runs": None}) for each in module.layers)})
        for module in measured.modules
    ]
    return measured.model_copy(update={"modules": tuple(modules)})


def overrides(folder: str, options: Options) -> list[str]:
    if options.recipe is not None:
        return [
            f"run.batch_size={options.batch_size}",
            f"run.dir={folder}/run",
            f"run.seed={options.seed}",
            "run.steps=2",
        ]
    data = f"{folder}/data"
    return [
        f'data.train=["{data}/train.jsonl"]', "data.heldout=[]", f'data.tokenizer="{data}/tokenizer"',
        f"run.batch_size={options.batch_size}", f"run.dir={folder}/run", "optimizer.lr=1e-9",
        f"run.seed={options.seed}", f"data.seed={options.seed}", *DEEPER,
    ]  # fmt: skip


def prepared(name: str, world: World, folder: str, options: Options, hardware, stack: ExitStack) -> Run:
    own = [text.format(ranks=world.num_ranks) for text in SETTINGS.get(name, ())]
    recipe, chosen = load_recipe(options.recipe or RECIPE, [*overrides(folder, options), *own]), None
    if name in (*PIPELINES, *SHARED):
        spec = spec_of_config(recipe.modules, recipe.vocabulary().vocabulary_size)
        plan = pipeline_plan(name, spec, hardware, recipe.run.batch_size)
        chosen = ChosenPlan(plan, Path(f"{name}.json"), lambda _: "motet plan")
    job = build_job(recipe, world, "never", lambda _: None, stack, chosen)
    job.step.clock = clock = BothClocks(world.rank, world.device)
    schedule = StepRange(0, options.batches, recipe.run.batch_size, job.num_microbatches, 0, 0)
    with Feed(job.order, job.loading, job.mesh.host_group, schedule, recipe.data) as feed:
        steps = [feed.next_step().batches for _ in range(options.batches)]
    plan = chosen.plan if chosen else plan_of_recipe(recipe, model_spec(job.model), hardware)
    return Run(recipe, job, clock, plan, steps)


class BothClocks(ActionClock):
    """Measures the processor time of this thread beside: what other programs take of the core does not count there."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank, device)
        self.processor_s: dict[str, float] = defaultdict(float)
        self._began_s = 0.0

    def begin(self, action: Action) -> None:
        self._began_s = time.thread_time()
        super().begin(action)

    def end(self, action: Action, step: int, module: str) -> None:
        super().end(action, step, module)
        name = action_words(action.kind, "" if action.kind in WHOLE_RANK else module)
        self.processor_s[name] += time.thread_time() - self._began_s

    def taken(self) -> dict[str, float]:
        taken, self.processor_s = dict(self.processor_s), defaultdict(float)
        return taken


def delayed_s() -> float:
    """Seconds that threads of this process could have run and others did."""
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def measure(runs: dict[str, Run], options: Options, world: World) -> dict[str, list[list[Sample]]]:
    """Per setting and batch, a sample a repeat, on this rank."""
    found: dict[str, list[list[Sample]]] = {name: [[] for _ in run.steps] for name, run in runs.items()}
    for _ in range(options.repeats):
        for name, run in runs.items():
            # The first step after another model has run meets cold caches, which training does not.
            run.job.step.run(run.steps[-1])
            for number, batches in enumerate(run.steps):
                run.clock.taken()
                world.barrier()
                delay_s, start_s = delayed_s(), time.perf_counter()
                result = run.job.step.run(batches)
                step_s = time.perf_counter() - start_s
                delay_s, processor_s = delayed_s() - delay_s, run.clock.taken()
                found[name][number].append(Sample(step_s, delay_s, result.seconds_by_action, processor_s))
    return found


def predicted(run: Run, cost: Profiled) -> list[Timeline]:
    stages, found = planned(run.plan), []
    for batches in run.steps:
        assignment = by_replica(run.plan, assignment_of(batches))
        found.append(predict_assigned(run.plan, stages, assignment, cost).timeline)
    return found


def main() -> None:
    parser = command_line(__doc__, reads_lengths=False)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of profiling and measuring")
    parser.add_argument("--profile-seconds", type=float, default=40.0)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="of each batch in each setting, a round")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--recipe", type=Path, help="another recipe, without files")
    every = (*SETTINGS, *SHARED, *PIPELINES)
    parser.add_argument(
        "--only", nargs="+", choices=every, help="settings; all of data parallelism, and on 2 ranks pipelines"
    )
    given = vars(parser.parse_args())
    num_ranks, out, only = given.pop("ranks"), given.pop("json"), given.pop("only")
    settings = only or ((*SETTINGS, *PIPELINES) if num_ranks == 2 and not given["recipe"] else tuple(SETTINGS))
    asked = Options(**given, settings=tuple(settings))
    with tempfile.TemporaryDirectory() as folder:
        making = [
            sys.executable,
            "-m",
            "motet",
            "demo-data",
            f"{folder}/data",
            "--num-train",
            str(asked.batches * asked.batch_size),
            "--seed",
            str(asked.seed),
        ]
        if asked.recipe is None:
            subprocess.run([*making, "--num-heldout", "1"], check=True, stdout=subprocess.DEVNULL)
        mp.spawn(run_rank, (num_ranks, folder, asked, out), nprocs=num_ranks)


if __name__ == "__main__":
    main()
