"""Random Plans against one process: loss, norm, gradients and weights of three steps, in float64, to 1e-10.

    python benchmarks/fuzz_plans.py --seed 0 --seconds 300 --json benchmarks/results/fuzz_plans-2-cpu-cores.json
    python benchmarks/fuzz_plans.py --seed 0 --case 17

Strategy, cuts, schedule, replicas, ZeRO, recomputation, frozen parts, mixture and microbatches are drawn
(`tests/parity/drawn_plans.py`), and in every tenth case which ranks share which sequences and images; a case is made
again from the seed and its number. Ranks are processes on gloo, several jobs at a time, as a job mostly waits. What is
found is stored minute by minute, and a run goes on from what its file has, so that it may be ended at any time. A case
that fails is stored with what differs; the first one is made as small as it can be, the command that repeats it is
printed, and the exit code is 1.
--again runs those that the file says have failed once more, and stores what becomes of them. --replay 200 does so with
200 of its cases, drawn at random: at another commit they show that what was stored still holds.

A model may multiply a rounding beyond 1e-10 by itself. Where that decides, it is held to what one process alone makes
of a shift by the last bit (`tests/parity/planned.py`); `amplified` names these cases, their errors and tolerances.

The file has counts, the largest errors with the numbers of their cases, and all failures. Cases add up over commits:
`runs` says which numbers ran at which commit, where a number means what that commit draws.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rows import ROOT, commit_of

from motet.core.nodes import ranks_by_node
from motet.schedule import planned

sys.path.insert(0, str(ROOT / "tests"))

import ranks
from parity.cut_steps import Cut
from parity.drawn_plans import DrawnCase, draw, plan_of, smaller
from parity.fuzzing import run_cases
from parity.planned import MIXED_TOLERANCE, TOLERANCE, PlannedCase
from ranks import RankFailed, RanksHung, run_ranks

FEWEST, MOST, WINDOW_S = 20, 160, 60.0
"""Cases whose results are stored together, a window: as many as take WINDOW_S. Those of one number of ranks are one
job, so that fewer than FEWEST would be starts of processes for the most part.
"""
CASE_LIMIT_S, START_LIMIT_S = 30, 300
"""A job that takes longer, by its cases, hangs. A machine that does other work may take a minute to start one."""
AnyCase = PlannedCase | Cut
NUM_LARGEST = 20
"""The largest errors that the file names."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case on all ranks. error: the largest, as a share. wrong: what is off, or why it ended."""

    error: float
    wrong: list[str]
    tolerance: float = TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="how many cases the file has in the end; default: as time allows")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin what ends in so many seconds")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="jobs at a time")
    parser.add_argument("--json", type=Path, help="results; those that it has are not run again")
    parser.add_argument("--again", action="store_true", help="run the failures of the file again, and nothing else")
    parser.add_argument("--replay", type=int, metavar="N", help="run N cases of the file again, and nothing else")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--smaller", default="", help="with --case: what is made smaller, as a failure prints it")
    options = parser.parse_args()
    if (options.again or options.replay) and options.json is None:
        parser.error("--again and --replay need --json: the file whose cases run again.")
    _import_once()
    if options.case is not None:
        raise SystemExit(_run_one(options.seed, options.case, options.smaller))
    record = Record.read(options.json, options.seed)
    ranks.start_server()  # Before there are threads that start it, or make the folder.
    _references()
    if options.again:
        raise SystemExit(_run_again(record, options.json))
    if options.replay:
        raise SystemExit(_replay(record, options.json, options.replay, options.jobs))
    began_s, before_s = time.monotonic(), record.begin(commit_of())
    first = record.num_cases

    def in_time(num_begun: int) -> int:
        spent_s = time.monotonic() - began_s
        return window_size(spent_s, options.seconds - spent_s, record.num_cases - first, num_begun)

    for drawn, found in _run(_windows(options.seed, first, options.cases, in_time), options.jobs):
        record.add(drawn, found)
        record.runs[-1]["seconds"] = round(before_s + time.monotonic() - began_s, 1)
        if options.json is not None:
            record.write(options.json)
    record.say()
    if failures := record.failures_here():
        _say_failure(options.seed, failures[0])
    raise SystemExit(1 if failures else 0)


def _run_again(record: Record, path: Path) -> int:
    """Run the failures of a record anew, and store what they are at this commit. Returns the exit code."""
    numbers = [failure["number"] for failure in record.failures]
    for drawn in (draw(record.seed, number) for number in numbers):
        (outcome,) = outcomes([drawn.case])
        print(f"case {drawn.number}: error {outcome.error:.1e}, tolerance {outcome.tolerance:.1e}", flush=True)
        record.replace(drawn, outcome)
    record.again.append({"commit": commit_of(), "numbers": numbers})
    record.write(path)
    record.say()
    return 1 if record.failures else 0


def _replay(record: Record, path: Path, num_cases: int, num_jobs: int) -> int:
    """Run cases of a record anew, drawn by its seed, and store what they are at this commit. Returns the exit code."""
    numbers = Random(record.seed).sample(range(record.num_cases), min(num_cases, record.num_cases))
    record.replays.append({"commit": commit_of(), "numbers": []})
    windows = (numbers[first : first + FEWEST] for first in range(0, len(numbers), FEWEST))
    for drawn, found in _run(([draw(record.seed, number) for number in each] for each in windows), num_jobs):
        for each, outcome in zip(drawn, found, strict=True):
            record.replace(each, outcome)
            record.replays[-1]["numbers"].append(each.number)
        record.write(path)
    record.say()
    return 1 if record.failures else 0


def _import_once() -> None:
    """Let the server that ranks are forked from import what they run."""
    ranks.PRELOADED.append("parity.fuzzing")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])


def window_size(spent_s: float, left_s: float, num_done: int, num_begun: int) -> int:
    """Cases of the next window: as many as take WINDOW_S, and end in time at the pace so far; 0: none would.

    spent_s, left_s: seconds of the run. num_done, num_begun: its cases that have ended, and those that began.
    """
    if not num_done:
        return FEWEST if left_s > 0 else 0
    case_s = spent_s / num_done
    in_time = int(left_s / case_s) - (num_begun - num_done)
    return min(in_time, MOST, max(FEWEST, int(WINDOW_S / case_s))) if in_time >= FEWEST else 0


def _windows(seed: int, first: int, num_cases: int | None, size: Callable[[int], int]) -> Iterator[list[DrawnCase]]:
    """Cases in the order of their numbers, in lists. size: cases that this run has begun -> those of the next list."""
    stop = first
    while wanted := size(stop - first):
        begin, stop = stop, stop + wanted if num_cases is None else min(stop + wanted, num_cases)
        if begin >= stop:
            return
        yield [draw(seed, number) for number in range(begin, stop)]


def _run(windows: Iterable[list[DrawnCase]], num_jobs: int) -> Iterator[tuple[list[DrawnCase], list[Outcome]]]:
    """Windows with their outcomes, in order. The jobs of the next window begin before the last of this one has ended.

    A job is the cases of one number of ranks; the longest begin first.
    """
    ahead: deque[tuple[list[DrawnCase], list[tuple[list[int], Future[list[Outcome]]]]]] = deque()
    with ThreadPoolExecutor(num_jobs) as pool:
        for drawn in windows:
            by_ranks: dict[int, list[int]] = defaultdict(list)
            for index, each in enumerate(drawn):
                by_ranks[each.case.num_ranks].append(index)
            jobs = sorted(by_ranks.values(), key=len, reverse=True)
            # Jobs begin at different models, so that one has what another has computed.
            starts = (number * len(job) // len(jobs) for number, job in enumerate(jobs))
            jobs = [job[start:] + job[:start] for job, start in zip(jobs, starts)]
            ahead.append((drawn, [(job, pool.submit(outcomes, [drawn[index].case for index in job])) for job in jobs]))
            if len(ahead) > 1:
                yield _joined(*ahead.popleft())
        while ahead:
            yield _joined(*ahead.popleft())


def _joined(
    drawn: list[DrawnCase], jobs: list[tuple[list[int], Future[list[Outcome]]]]
) -> tuple[list[DrawnCase], list[Outcome]]:
    found = {index: outcome for job, future in jobs for index, outcome in zip(job, future.result())}
    return drawn, [found[index] for index in range(len(drawn))]


def outcomes(cases: Sequence[AnyCase]) -> list[Outcome]:
    """What becomes of cases of one number of ranks, on the same processes; alone if one of them ends these."""
    try:
        return _on_ranks(cases)
    except (RankFailed, RanksHung) as failure:
        if len(cases) > 1:
            return [outcome for case in cases for outcome in outcomes([case])]
        return [Outcome(0.0, _reasons(failure))]


def _reasons(failure: AssertionError) -> list[str]:
    """What ranks ended with, without the way there."""
    return [line for line in str(failure).splitlines() if line and not line.startswith((" ", "rank", "Traceback"))]


@cache
def _references() -> TemporaryDirectory[str]:
    """What one process computes of the models and examples of this run."""
    return TemporaryDirectory(prefix="motet-fuzz-")


def _on_ranks(cases: Sequence[AnyCase]) -> list[Outcome]:
    limit_s = START_LIMIT_S + CASE_LIMIT_S * len(cases)
    by_rank = run_ranks(run_cases, cases[0].num_ranks, cases, _references().name, timeout_s=limit_s)
    return [
        Outcome(
            max(each.error for each in of_ranks),
            [line for each in of_ranks for line in each.wrong],
            of_ranks[0].tolerance,
        )
        for of_ranks in zip(*by_rank)
    ]


def shrunk(case: AnyCase) -> tuple[AnyCase, list[int]]:
    """The smallest case that fails as well, one step after the other, and the steps: places in `smaller`."""
    steps: list[int] = []
    while True:
        for place, one in enumerate(smaller(case)):
            if outcomes([one])[0].wrong:
                case, steps = one, [*steps, place]
                break
        else:
            return case, steps


def repeated(case: AnyCase, steps: Sequence[int]) -> AnyCase:
    """The case that `shrunk` came to by these steps."""
    for place in steps:
        case = next(islice(smaller(case), place, None))
    return case


def _run_one(seed: int, number: int, steps: str) -> int:
    case = repeated(draw(seed, number).case, [int(place) for place in steps.split(",") if place])
    (outcome,) = outcomes([case])
    print(case)
    print("\n".join(outcome.wrong) or f"as one process: the largest error is {outcome.error:.1e}")
    return 1 if outcome.wrong else 0


def _say_failure(seed: int, failure: dict[str, Any]) -> None:
    number = failure["number"]
    print(f"Case {number} differs from one process:", *failure["wrong"], sep="\n  ", flush=True)
    case, steps = shrunk(draw(seed, number).case)
    print(f"The smallest such case: {case}\nRepeat it:")
    chosen = f" --smaller {','.join(map(str, steps))}" if steps else ""
    print(f"  python benchmarks/fuzz_plans.py --seed {seed} --case {number}{chosen}", flush=True)


def features(case: AnyCase) -> Iterator[str]:
    """What a case has, in words to be counted."""
    yield f"{case.num_ranks} ranks"
    if isinstance(case, Cut):
        yield from _features_of_cut(case)
        return
    for name in (
        "tied",
        "frozen",
        "caps",
        "blocking",
        "deferred_warmup",
        "left_out",
        "is_mixed",
        "dropout",
        "has_large",
    ):
        if getattr(case, name):
            yield name
    for part in case.parts:
        yield f"part {part}"
    for name in case.made:
        yield f"makes {name}"
    for name in ("balance", "example_order"):
        yield f"{name} {getattr(case, name)}"
    units = case.units
    if case.nodes[1]:
        of_nodes = ranks_by_node(plan_of(case).cluster.node_of(rank) for rank in sorted(plan_of(case).ranks))
        yield f"nodes {'unlike' if any(num < max(of_nodes) for num in of_nodes[:-1]) else 'alike'}"
    yield from {f"zero {unit.zero}" for unit in units if unit.dp > 1}
    yield from {f"shard_size {unit.shard_size}" for unit in units if unit.dp > 1 and unit.shard_size > 1}
    yield from {
        f"cp {unit.cp} of {'llm' if 'backbone' in unit.modules else 'encoders'}" for unit in units if unit.cp > 1
    }
    yield from {f"tp {unit.tp}" for unit in units if unit.tp > 1}
    yield from {f"ep {unit.ep}" for unit in units if unit.ep > 1}
    if case.chunks > 1 and not case.blocking and any(unit.tp > 1 for unit in units):
        yield f"tp in {case.chunks} chunks"
    for unit in units:
        if unit.cp > 1 and "backbone" in unit.modules:
            yield f"exchange {case.exchange}"
            yield f"{case.head_groups} groups of heads"
    yield from {"recompute" for unit in units if any(count for of in unit.recompute for count in of.values())}
    yield from {"two blocks or more in a stage" for unit in units if any(sum(of.values()) > 1 for of in unit.stages)}
    yield from {f"dp {unit.dp} beside {units[-1].dp}" for unit in units[:-1] if unit.dp != units[-1].dp}
    if set(case.contents) < {"image", "audio"}:
        yield "absent modality"
    if case.then is not None:
        yield "goes on under another Plan"
    if case.fill_seed >= 0 and any(unit.first_rank == 0 for unit in units[1:]):
        yield f"random fills, {case.filling}"
        stages = planned(plan_of(case)).stages
        if any(stage.num_parts > stage.num_layers and not stage.has_sums for stage in stages):
            yield "fills of halves of blocks"
        if any(stage.has_sums for stage in stages):
            yield "sums of encoders apart"


def _features_of_cut(cut: Cut) -> Iterator[str]:
    yield f"cut items, {cut.tower or 'toy'} tower"
    yield f"cut items, {cut.case.family}"
    for name in ("method", "idle", "dropout", "enters_again", "merges"):
        if getattr(cut, name):
            yield f"cut items, {name}"


@dataclass
class Record:
    """What a file has. Cases are 0 ... num_cases - 1 of the seed.

    runs:  in order, each with its `commit`, the numbers of its cases (`first`, `num_cases`), `seconds` and `written`.
    cells: strategy -> schedule -> cases. features: words -> cases. largest, amplified, failures: by number of the case.
    amplified: above TOLERANCE, though not above what rounding makes of the model. again: failures that ran once more.
    replays: other cases that did, each time with the `commit` and their `numbers`.
    """

    seed: int
    runs: list[dict[str, Any]]
    cells: dict[str, Counter[str]]
    features: Counter[str]
    largest: list[dict[str, Any]]
    amplified: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    again: list[dict[str, Any]]
    replays: list[dict[str, Any]]

    @staticmethod
    def read(path: Path | None, seed: int) -> Record:
        """That of a file of this seed, or an empty one."""
        if path is None or not path.exists():
            return Record(seed, [], {}, Counter(), [], [], [], [], [])
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if stored["seed"] != seed:
            raise SystemExit(f"{path} is of seed {stored['seed']}: name another file, or none.")
        cells = {strategy: Counter(counts) for strategy, counts in stored["cells"].items()}
        kept = (stored.get(name, []) for name in ("largest", "amplified", "failures", "again", "replays"))
        return Record(seed, stored["runs"], cells, Counter(stored["features"]), *kept)

    @property
    def num_cases(self) -> int:
        """Cases of all runs."""
        return sum(run["num_cases"] for run in self.runs)

    def begin(self, commit: str) -> float:
        """Let what follows be of this commit. Returns the seconds that its last run took, if that goes on."""
        if not self.runs or self.runs[-1]["commit"] != commit:
            self.runs.append({"commit": commit, "first": self.num_cases, "num_cases": 0, "seconds": 0.0})
        return self.runs[-1]["seconds"]

    def failures_here(self) -> list[dict[str, Any]]:
        """Those of the last run: a number of another commit may be another case."""
        return [failure for failure in self.failures if failure["number"] >= self.runs[-1]["first"]]

    def add(self, drawn: Sequence[DrawnCase], found: Sequence[Outcome]) -> None:
        """Take in the cases that follow those that are there."""
        for each, outcome in zip(drawn, found, strict=True):
            self.cells.setdefault(each.strategy, Counter())[each.case.schedule] += 1
            self.features.update(features(each.case))
            self._note(each, outcome)
        self.runs[-1]["num_cases"] += len(drawn)
        self.runs[-1]["written"] = datetime.now(UTC).isoformat(timespec="seconds")

    def replace(self, drawn: DrawnCase, found: Outcome) -> None:
        """Take in what became of a case that is there, and failed."""
        for rows in (self.largest, self.amplified, self.failures):
            rows[:] = [row for row in rows if row["number"] != drawn.number]
        self._note(drawn, found)

    def _note(self, drawn: DrawnCase, found: Outcome) -> None:
        row = {"number": drawn.number, "error": found.error, "tolerance": found.tolerance}
        self.largest.append(row)
        if found.wrong:
            self.failures.append({"number": drawn.number, "wrong": found.wrong[:4]})
        elif found.tolerance > (MIXED_TOLERANCE if drawn.case.is_mixed else TOLERANCE):
            self.amplified.append(row)
        self.largest = sorted(self.largest, key=lambda row: -row["error"] / row["tolerance"])[:NUM_LARGEST]

    def write(self, path: Path) -> None:
        """Store it."""
        rows = {"cells": self.cells, "features": dict(sorted(self.features.items()))}
        about = {"device": "cpu", "emulated": False, "seed": self.seed, "num_cases": self.num_cases}
        names = ("runs", "largest", "amplified", "failures", "again", "replays")
        lists = {name: [json.dumps(row) for row in getattr(self, name)] for name in names}
        text = json.dumps(about | rows, indent=1)[:-2]
        for name, lines in lists.items():
            text += f',\n "{name}": [' + ",".join(f"\n  {line}" for line in lines) + "\n ]"
        beside = path.with_name(f"{path.name}.new")
        beside.write_text(text + "\n}\n", encoding="utf-8")
        beside.replace(path)  # A run that is ended here leaves what it had stored.

    def say(self) -> None:
        """Print counts by strategy and schedule, and the largest error."""
        for strategy, counts in self.cells.items():
            print(f"{strategy:<24}", *(f"{schedule} {num}" for schedule, num in counts.items()), sep="  ")
        largest = max((row["error"] for row in self.largest if row["tolerance"] == TOLERANCE), default=0.0)
        counted = f"{self.num_cases} cases of {len(self.runs)} runs, {len(self.failures)} differ"
        print(f"{counted}; the largest error in float64 is {largest:.1e}")
        for row in self.amplified:
            print("case {number}: {error:.1e}, of {tolerance:.1e} that rounding makes of its model".format(**row))


if __name__ == "__main__":
    main()
