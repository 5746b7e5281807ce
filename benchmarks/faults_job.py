"""What faults.py runs: a tiny job under Plans, as real processes, one of which meets a fault."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch.distributed as dist
from PIL import Image
from rows import ROOT

from motet.cli import main as motet
from motet.core.plan import Plan, ScheduleKind, Unit
from motet.core.plan_file import write_plan
from motet.cost.catalogue import cluster
from motet.planning.planned_recipe import read_job_recipe
from motet.runtime.executor import Executor

sys.path.insert(0, str(ROOT / "tests"))

from cli.tiny_job import losses, write_tiny_job
from ranks import start_server

HANGS_S = 300.0
"""After which a rank that meets no fault, or whose job does not end, is taken to hang."""
NUM_STEPS, FAULTY_STEP = 4, 2
RECIPE = """
[model.generators.draw]
makes = "image"
family = "dit"
num_queries = 3
config = { row_dim = 16, hidden = 16, num_layers = 2, num_heads = 2 }

[transforms.draw]
patch_size = 4
merge_size = 1
channels = 1
"""
DEEPER = (
    "data.heldout=[]",
    "run.dtype=float64",
    f"run.steps={NUM_STEPS}",
    "optimizer.warmup_steps=2",
    "run.report_to=[]",
    "checkpoint.every_steps=1",
    "model.encoders.image.config.depth=2",
    "model.encoders.audio.config.encoder_layers=2",
    "model.backbone.config.num_hidden_layers=4",
)
_ENCODERS = {"image": 2, "audio": 2}
_HALF, _DRAWN = {"backbone": 2}, {"backbone": 2, "draw": 2}
_TWO = (_ENCODERS | _HALF, _DRAWN)
_FOUR = (_ENCODERS, {"backbone": 1}, {"backbone": 1}, _DRAWN)


def _chain(stages: tuple[Mapping[str, int], ...], **others: object) -> tuple[Unit, ...]:
    return (Unit("all", stages, pp=2, **others),)  # type: ignore[arg-type]


PLANS: dict[str, tuple[tuple[Unit, ...], ScheduleKind]] = {
    "gpipe": (_chain(_TWO, recompute=({"backbone": 1}, {})), "gpipe"),
    "1f1b": (_chain(_TWO), "1f1b"),
    "replicated": (_chain((_HALF, _DRAWN), replicated=("image", "audio")), "1f1b"),
    "zb_h1": (_chain(_TWO), "zb_h1"),
    "zb_v": (_chain(_FOUR), "zb_v"),
    "interleaved_1f1b": (_chain(_FOUR), "interleaved_1f1b"),
    "zero 3": (_chain(_TWO, dp=2, zero=3), "1f1b"),
    "disaggregated": (
        (Unit("encoders", (_ENCODERS,), dp=2), Unit("llm", (_HALF, _DRAWN), first_rank=2, pp=2)),
        "1f1b",
    ),
    "bubbles": (
        (
            Unit("llm", (_HALF, _DRAWN), pp=2, zero=0),
            Unit("image", ({"image": 2},), dp=2, zero=0),
            Unit("audio", ({"audio": 1}, {"audio": 1}), pp=2, zero=0),
        ),
        "1f1b",
    ),
    "generator beside": ((Unit("llm", (_ENCODERS | {"backbone": 4},)), Unit("draw", ({"draw": 2},), 1)), "1f1b"),
    "data parallel": (
        (Unit("all", (_ENCODERS | {"backbone": 4, "draw": 2},), dp=2, zero=3),),
        "data_parallel",
    ),
}
"""Name -> units and schedule."""
MEETING = "the ranks meet"
PLACES = {
    MEETING: "motet.train.world:_meeting",
    "the model is built": "motet.train.trainer:build_job",
    "what is read ahead": "motet.train.input.feed:Feed._joined",
    "a checkpoint": "motet.train.trainer:_Run._save",
    "the end of the run": "motet.train.trainer:_Run._write_trace",
}
"""What a rank does beside steps -> the function that does it."""


@dataclass(frozen=True)
class Fault:
    """What befalls a rank: "dies", "fails", or "stops". where: a kind of action, or a name of PLACES."""

    what: str
    rank: int
    where: str

    def begin(self, folder: Path) -> None:
        """On the rank itself, before anything runs."""
        if self.where not in PLACES:
            self._begin_in_step(folder)
            return
        module, _, path = PLACES[self.where].partition(":")
        *owners, name = path.split(".")
        owner = functools.reduce(getattr, owners, import_module(module))
        function = getattr(owner, name)

        @functools.wraps(function)
        def faulty(*given, **named):
            self.befall(folder)
            return function(*given, **named)

        setattr(owner, name, faulty)

    def _begin_in_step(self, folder: Path) -> None:
        run, num_steps = Executor.run, 0

        def faulty(executor: Executor, step: int, before=None) -> None:
            nonlocal num_steps
            num_steps += 1

            def hook(index, action):
                if num_steps == FAULTY_STEP and action.kind == self.where:
                    self.befall(folder)
                if before is not None:
                    before(index, action)

            run(executor, step, hook)

        Executor.run = faulty  # type: ignore[method-assign]

    def befall(self, folder: Path) -> None:
        """Let it happen, once."""
        if (folder / "fault").exists():
            return
        (folder / "fault").touch()
        if self.what == "fails":
            raise RuntimeError("broken on purpose")
        os.kill(os.getpid(), signal.SIGKILL if self.what == "dies" else signal.SIGSTOP)


@dataclass(frozen=True)
class Ended:
    """How a job has ended. codes: of its ranks; None where one hangs. said: sentences of all ranks.

    seconds: from the fault, or the start if there was none, to the end of the last rank but one that was stopped.
    """

    codes: list[int | None]
    said: list[str]
    seconds: float


class Job:
    """A recipe and its data in a folder, and one process's losses."""

    def __init__(self, folder: Path) -> None:
        self.recipe, self.folder = write_tiny_job(folder / "data", num_train=20), folder
        rng = np.random.default_rng(0)
        records = []
        for number, (width, height) in enumerate(((8, 8), (12, 8), (8, 20), (4, 4), (24, 12))):
            image = f"media/drawn-{number}.png"
            pixels = rng.integers(0, 256, (height, width), np.uint8)
            Image.fromarray(pixels).save(self.recipe.parent / image)
            turns = [{"from": "human", "value": f"draw {'abcde'[number]}"}, {"from": "gpt", "value": "see: <image>"}]
            records.append({"conversations": turns, "image": [image]})
        with (self.recipe.parent / "train.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        with self.recipe.open("a") as file:
            file.write(RECIPE)
        self.run(None, "alone")
        self.losses = losses(folder / "alone")

    def plan(self, name: str) -> Plan:
        """That of PLANS."""
        units, schedule = PLANS[name]
        where = cluster("h100", 1, max(unit.ranks.stop for unit in units))
        device = replace(where.device, peak_flops={**where.device.peak_flops, "fp64": 1e12}, overlaps=False)
        model = read_job_recipe(self.recipe, DEEPER).model
        size = 3 if schedule == "data_parallel" else 1
        return Plan(model, replace(where, device=device), units, 6, size, schedule, precision="fp64")

    def run(
        self,
        name: str | None,
        run: str,
        *more: str,
        fault: Fault | None = None,
        never: int | None = None,
        stopped_s: float = 0.0,
    ) -> Ended:
        """Train under a Plan of PLANS, or None, in a folder of that name.

        fault: meets its rank. stopped_s: after which a rank that stops goes on; 0: when all others have ended.
        never: a rank that is not started.
        """
        arguments = ["train", str(self.recipe)]
        for each in (*DEEPER, f"run.dir={self.folder / run}", *more):
            arguments += ["--set", each]
        num_ranks = 1
        if name is not None:
            write_plan(self.plan(name), self.folder / "plan.json")
            arguments += ["--plan", str(self.folder / "plan.json")]
            num_ranks = self.plan(name).cluster.num_ranks
        with tempfile.TemporaryDirectory(dir=self.folder) as own:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            processes = {
                rank: start_server().Process(
                    target=_run_rank, args=(arguments, Path(own), rank, num_ranks, store.port, fault)
                )
                for rank in range(num_ranks)
                if rank != never
            }
            start_s = time.monotonic()
            for process in processes.values():
                process.start()
            try:
                return _wait(processes, Path(own), start_s, fault, stopped_s)
            finally:
                for process in processes.values():
                    process.kill()
                    process.join()


def _run_rank(arguments: list[str], folder: Path, rank: int, num_ranks: int, port: int, fault: Fault | None) -> None:
    os.dup2(os.open(folder / f"out-{rank}", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(folder / f"err-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    if num_ranks > 1:
        meeting = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {name: str(value) for name, value in meeting.items()}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if fault is not None and fault.rank == rank:
        fault.begin(folder)
    sys.argv = ["motet", *arguments]
    motet()


def _wait(
    processes: Mapping[int, BaseProcess], folder: Path, start_s: float, fault: Fault | None, stopped_s: float
) -> Ended:
    """Wait until all ranks have ended, or are taken to hang; let one that is stopped go on."""
    stops = fault if fault is not None and fault.what == "stops" else None
    fault_s = None
    limit_s = start_s + HANGS_S
    end_s = {}
    while len(end_s) < len(processes) and time.monotonic() < limit_s:
        time.sleep(0.02)
        now_s = time.monotonic()
        end_s |= {rank: now_s for rank, process in processes.items() if rank not in end_s and not process.is_alive()}
        if fault_s is None and (folder / "fault").exists():
            fault_s = now_s
            limit_s = now_s + stopped_s + HANGS_S
        if fault_s is None or stops is None:
            continue
        is_due = now_s > fault_s + stopped_s if stopped_s else len(end_s) == len(processes) - 1
        if is_due:
            pid = processes[stops.rank].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            stops = None
    others = [moment for rank, moment in end_s.items() if fault is None or fault.what != "stops" or rank != fault.rank]
    codes = [processes[rank].exitcode if rank in end_s else None for rank in processes]
    said = [
        line
        for rank in processes
        for line in (folder / f"err-{rank}").read_text().splitlines()
        if line.startswith("motet") or "Traceback" in line or "terminate" in line
    ]
    return Ended(codes, said, max(others, default=time.monotonic()) - (fault_s or start_s))
