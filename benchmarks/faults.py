"""What becomes of a job whose rank dies, fails, stops or does not come: real processes, under each kind of Plan.

    python benchmarks/faults.py [--json FILE] [--only NAME] [--stopped-s 120] [--limit-s 15]

Ranks run `motet train --plan` with a tiny model, as torchrun starts them; the store is this process's, and nobody ends
a rank for another. One of them, the victim, meets its fault in its second step, before its first action of a kind, or
in something else that a rank does. Each row is seconds from the fault to the end of the last rank; its goal is met only
if exit codes, sentences and losses are these, too:

dies:     the victim is killed. The others end with code 3, and one sentence in all names the victim.
fails:    the victim raises. Its sentence is the only one, and all ranks end with code 3.
late:     the victim is stopped until the others have ended, --limit-s (run.wait_limit_s) after they began to wait: with
          code 3 and one sentence in all, which names who is missing. Then it goes on, and ends in silence with code 3.
stopped:  the victim is stopped for --stopped-s. The run goes on, and its losses are those of one process.
never:    the victim is not started. The others end as if it were late.
resumed:  under each Plan in turn, the job is killed in the middle of a step, and goes on under the next Plan. Losses
          are those of one process.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

from faults_job import HANGS_S, MEETING, PLACES, PLANS, Ended, Fault, Job
from rows import ROOT, Row, finish, options, show

from motet.runtime.place import Place
from motet.schedule.from_plan import executed_program
from motet.schedule.program import Kind

sys.path.insert(0, str(ROOT / "tests"))

from cli.tiny_job import losses
from ranks import PRELOADED

END_S = 30.0
"""In which ranks end."""
SAME = 1e-9
"""Relative difference of losses in float64: sums have another order under another Plan."""
STARTED = "1f1b"
"""The Plan under which a rank meets faults beside steps, and waits or stops at each kind of action."""
Try = Callable[[Job, str], Iterator[Row]]
"""Rows of a fault, of a job whose run is in a folder of this name."""


def died(name: str, fault: Fault, job: Job, folder: str) -> Iterator[Row]:
    """A rank dies or fails: the others end, and one sentence says why."""
    ended = job.run(name, folder, fault=fault)
    said = f"lost rank {fault.rank}, which died without a word"
    code = -signal.SIGKILL
    if fault.what == "fails":
        said, code = f"rank {fault.rank}: failed with RuntimeError: broken on purpose.", 3
    others = {code for rank, code in enumerate(ended.codes) if rank != fault.rank}
    as_said = (ended.codes[fault.rank], others) == (code, {3}) and len(ended.said) == 1 and said in ended.said[0]
    yield row(f"{name}: rank {fault.rank} {fault.what} at {fault.where}", ended, END_S, as_said)


def late(name: str, fault: Fault, limit_s: float, job: Job, folder: str) -> Iterator[Row]:
    """A rank stops, and the others give up."""
    ended = job.run(name, folder, f"run.wait_limit_s={limit_s}", fault=fault)
    said = rf"waited.* in vain, as rank {fault.rank} has not come( and not ended)?; run.wait_limit_s"
    as_said = set(ended.codes) == {3} and len(ended.said) == 1 and re.search(said, ended.said[0]) is not None
    yield row(f"{name}: rank {fault.rank} is late at {fault.where}", ended, limit_s + END_S, as_said)


def never(name: str, rank: int, limit_s: float, job: Job, folder: str) -> Iterator[Row]:
    """A rank is not started."""
    ended = job.run(name, folder, f"run.wait_limit_s={limit_s}", never=rank)
    said = f"waited {limit_s:g} s, in vain, as rank {rank} has not come; run.wait_limit_s"
    as_said = set(ended.codes) == {3} and len(ended.said) == 1 and said in ended.said[0]
    yield row(f"{name}: rank {rank} is not started", ended, limit_s + END_S, as_said)


def stopped(name: str, fault: Fault, stopped_s: float, job: Job, folder: str) -> Iterator[Row]:
    """A rank stops and goes on."""
    ended = job.run(name, folder, fault=fault, stopped_s=stopped_s)
    as_said = not any(ended.codes) and not ended.said
    as_said = as_said and off(losses(job.folder / folder), job.losses) < SAME
    what = f"{name}: rank {fault.rank} is stopped for {stopped_s:g} s at {fault.where}"
    yield row(what, ended, stopped_s + HANGS_S, as_said)


def resumed(job: Job, folder: str) -> Iterator[Row]:
    """A job is killed under one Plan after another. Each goes on from what the one before it has stored."""
    steps = f"run.steps={2 * len(PLANS)}"
    job.run(None, f"{folder}-alone", steps)
    *others, last = PLANS
    for number, name in enumerate(others):
        ended = job.run(name, folder, steps, fault=Fault("dies", number % 2, "F"))
        yield row(f"{name}: goes on, and dies", ended, END_S, None not in ended.codes)
    yield row(f"{last}: goes on to the end", ended := job.run(last, folder, steps), HANGS_S, not any(ended.codes))
    found, expected = (losses(job.folder / each) for each in (folder, f"{folder}-alone"))
    yield Row("all Plans in turn: losses off those of one process", off(found, expected), SAME)


def off(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def row(name: str, ended: Ended, goal_s: float, as_said: bool) -> Row:
    """Of a job that ended; what it said is shown if it is not as it should be."""
    if not as_said:
        print(f"{name}: {ended}", flush=True)
    return Row(name, ended.seconds, goal_s, as_said and ended.seconds <= goal_s)


def victims(job: Job, name: str) -> Iterator[tuple[Kind, int]]:
    """Each kind of action that ranks execute under a Plan, and one of the ranks that do, in turn."""
    plan = job.plan(name)
    program, num_ranks = executed_program(plan), plan.cluster.num_ranks
    kinds = [
        {action.kind for action in program.actions[Place.of(plan, rank).program_rank]} for rank in range(num_ranks)
    ]
    for number, kind in enumerate(kind for kind in Kind if any(kind in own for own in kinds)):
        having = [rank for rank, own in enumerate(kinds) if kind in own]
        yield kind, having[number % len(having)]


def tries(job: Job, limit_s: float, stopped_s: float) -> Iterator[tuple[str, Try]]:
    """What is tried, by name."""
    for name in PLANS:
        for kind, rank in victims(job, name):
            yield f"{name}, dies", partial(died, name, Fault("dies", rank, kind))
            if kind == Kind.B or (kind == Kind.F and name.startswith("zb")):
                yield f"{name}, fails", partial(died, name, Fault("fails", rank, kind))
            if kind == Kind.F or name == STARTED:
                yield f"{name}, late", partial(late, name, Fault("stops", rank, kind), limit_s)
    for rank, where in enumerate(PLACES):
        if where != MEETING:  # That a rank ends before it meets the others, its launcher alone knows.
            yield f"{STARTED}, {where}, dies", partial(died, STARTED, Fault("dies", rank % 2, where))
            yield f"{STARTED}, {where}, fails", partial(died, STARTED, Fault("fails", rank % 2, where))
        yield f"{STARTED}, {where}, late", partial(late, STARTED, Fault("stops", rank % 2, where), limit_s)
    yield f"{STARTED}, never", partial(never, STARTED, 1, limit_s)
    for name, where in ((STARTED, "F"), ("bubbles", "B"), ("data parallel", "STEP")):
        yield f"{name}, stopped", partial(stopped, name, Fault("stops", 1, where), stopped_s)
    yield "resumed", resumed


def main() -> None:
    parser = options(__doc__, "a part of a Plan's name and a fault's, e.g. '1f1b, dies'", reads_lengths=False)
    parser.add_argument("--limit-s", type=float, default=15.0, help="run.wait_limit_s of ranks that wait in vain")
    parser.add_argument("--stopped-s", type=float, default=120.0)
    asked = parser.parse_args()
    PRELOADED.append("faults_job")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "benchmarks")])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        job, number = Job(Path(folder)), count()
        for name, attempt in tries(job, asked.limit_s, asked.stopped_s):
            for found in attempt(job, f"run-{next(number)}") if asked.only in name else ():
                show(found)
                rows.append(found)
    finish(rows, asked.json, seed=asked.seed, limit_s=asked.limit_s, stopped_s=asked.stopped_s)


if __name__ == "__main__":
    main()
