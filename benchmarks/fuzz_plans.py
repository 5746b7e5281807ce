"""Random Plans against one process: loss, norm, gradients and weights of three steps, in float64, to 1e-10.

    python benchmarks/fuzz_plans.py --seed 0 --seconds 300 --json benchmarks/results/fuzz_plans-2-cpu-cores.json
    python benchmarks/fuzz_plans.py --seed 0 --case 17

Strategy, cuts, schedule, replicas, ZeRO, recomputation, frozen parts, mixture and microbatches are drawn; a case is
made again from the seed and its number (`tests/parity/drawn_plans.py`). A run goes on from what its file has. A case
that fails is made as small as it can be, and the command that repeats it is printed; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from rows import ROOT, commit_of

sys.path.insert(0, str(ROOT / "tests"))

from parity.drawn_plans import DrawnCase, draw, smaller
from parity.fuzzing import run_cases
from parity.planned import PlannedCase
from ranks import RankFailed, RanksHung, run_ranks

NUM_TOGETHER = 12
"""Cases of one number of ranks that the same processes run."""
CASE_LIMIT_S = 60
"""A case that takes longer hangs."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case on all ranks. error: the largest, as a share. wrong: what is off, or why it ended."""

    error: float
    wrong: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="how many cases the file has in the end; default: as time allows")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no case after so many seconds")
    parser.add_argument("--json", type=Path, help="results; those that it has are not run again")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--smaller", default="", help="with --case: what is made smaller, as a failure prints it")
    options = parser.parse_args()
    if options.case is not None:
        raise SystemExit(_run_one(options.seed, options.case, options.smaller))
    stored = _stored(options.json, options.seed)
    began_s, before_s = time.monotonic(), float(stored.get("seconds", 0.0))
    failed = False
    for together in _groups(options.seed, len(stored["cases"]), options.cases):
        if time.monotonic() - began_s > options.seconds or failed:
            break
        for drawn, outcome in zip(together, outcomes([drawn.case for drawn in together])):
            stored["cases"].append(_row(drawn, outcome))
            if outcome.wrong:
                failed = True
                _say_failure(options.seed, drawn, outcome)
        stored["seconds"] = round(before_s + time.monotonic() - began_s, 1)
        if options.json is not None:
            _write(options.json, stored)
    _say_counts(stored["cases"])
    raise SystemExit(1 if failed else 0)


def _groups(seed: int, first: int, num_cases: int | None) -> Iterator[list[DrawnCase]]:
    """Cases in the order of their numbers, in groups that the same processes can run."""
    together: list[DrawnCase] = []
    number = first
    while num_cases is None or number < num_cases:
        drawn = draw(seed, number)
        together.append(drawn)
        number += 1
        if len(together) == NUM_TOGETHER:
            yield together
            together = []
    if together:
        yield together


def outcomes(cases: Sequence[PlannedCase]) -> list[Outcome]:
    """What becomes of cases. Those of a number of ranks share processes, and are run alone if one ends them."""
    found: dict[int, Outcome] = {}
    for num_ranks in sorted({case.num_ranks for case in cases}):
        chosen = [index for index, case in enumerate(cases) if case.num_ranks == num_ranks]
        try:
            found |= zip(chosen, _on_ranks([cases[index] for index in chosen]))
        except (RankFailed, RanksHung) as failure:
            for index in chosen:
                found[index] = outcomes([cases[index]])[0] if len(chosen) > 1 else Outcome(0.0, _reasons(failure))
    return [found[index] for index in range(len(cases))]


def _reasons(failure: AssertionError) -> list[str]:
    """What ranks ended with, without the way there."""
    return [line for line in str(failure).splitlines() if line and not line.startswith((" ", "rank", "Traceback"))]


def _on_ranks(cases: Sequence[PlannedCase]) -> list[Outcome]:
    by_rank = run_ranks(run_cases, cases[0].num_ranks, cases, timeout_s=CASE_LIMIT_S * len(cases))
    return [
        Outcome(max(error for error, _ in of_ranks), [line for _, wrong in of_ranks for line in wrong])
        for of_ranks in zip(*by_rank)
    ]


def shrunk(case: PlannedCase) -> tuple[PlannedCase, list[int]]:
    """The smallest case that fails as well, one step after the other, and the steps: places in `smaller`."""
    steps: list[int] = []
    while True:
        for place, one in enumerate(smaller(case)):
            if outcomes([one])[0].wrong:
                case, steps = one, [*steps, place]
                break
        else:
            return case, steps


def repeated(case: PlannedCase, steps: Sequence[int]) -> PlannedCase:
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


def _say_failure(seed: int, drawn: DrawnCase, outcome: Outcome) -> None:
    print(f"Case {drawn.number} differs from one process:", *outcome.wrong[:8], sep="\n  ", flush=True)
    case, steps = shrunk(drawn.case)
    print(f"The smallest such case: {case}\nRepeat it:")
    chosen = f" --smaller {','.join(map(str, steps))}" if steps else ""
    print(f"  python benchmarks/fuzz_plans.py --seed {seed} --case {drawn.number}{chosen}", flush=True)


def _row(drawn: DrawnCase, outcome: Outcome) -> dict[str, Any]:
    case = drawn.case
    return {
        "number": drawn.number,
        "attempt": drawn.attempt,
        "strategy": drawn.strategy,
        "schedule": case.schedule,
        "ranks": case.num_ranks,
        "dp": [unit.dp for unit in case.units],
        "pp": [unit.pp for unit in case.units],
        "zero": [unit.zero for unit in case.units],
        "microbatches": case.batch_size // case.microbatch_size,
        "recompute": any(unit.recompute for unit in case.units),
        "frozen": list(case.frozen),
        "largest_error": outcome.error,
        "differs": bool(outcome.wrong),
    }


def _stored(path: Path | None, seed: int) -> dict[str, Any]:
    """What a file has, if it is of this seed and this commit."""
    fresh = {"commit": commit_of(), "device": "cpu", "emulated": False, "seed": seed, "cases": []}
    if path is None or not path.exists():
        return fresh
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if (stored["seed"], stored["commit"]) != (seed, fresh["commit"]):
        raise SystemExit(f"{path} is of seed {stored['seed']} at {stored['commit'][:12]}: name another file, or none.")
    return stored


def _write(path: Path, stored: dict[str, Any]) -> None:
    """A line a case."""
    stored["written"] = datetime.now(UTC).isoformat(timespec="seconds")
    about = {name: value for name, value in stored.items() if name != "cases"}
    lines = ",\n".join(json.dumps(row) for row in stored["cases"])
    text = json.dumps(about, indent=1)[:-2] + f',\n "cases": [\n{lines}\n]\n}}\n'
    path.write_text(text, encoding="utf-8")


def _say_counts(rows: Sequence[dict[str, Any]]) -> None:
    for (strategy, schedule), num in sorted(Counter((row["strategy"], row["schedule"]) for row in rows).items()):
        print(f"{strategy:<24} {schedule:<18} {num:6d}")
    largest = max((row["largest_error"] for row in rows), default=0.0)
    print(f"{len(rows)} cases, {sum(row['differs'] for row in rows)} differ; the largest error is {largest:.1e}")


if __name__ == "__main__":
    main()
