"""Bad inputs to every command: each ends in one sentence and exit code 2, and good ones next to them are accepted.

Settings, command lines and Plans are generated from their schemas (`bad.settings`, `bad.commands`,
`bad.documents`): every key with a wrong type, at its bounds and past them, with nan, inf and huge numbers; files are
damaged ones that were whole (`bad.files`). Each case has its verdict, refuse or accept. Wrong is a verdict that does
not hold, a traceback, a refusal that is not one sentence or loses a file, and what takes over 20 s or 4 GB.

    python benchmarks/bad_inputs.py --only '^train/settings' --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bad import commands, documents, files, settings
from bad.run import LIMIT_S, WRONG_INPUT, Case, Outcome, run_cases
from rich.console import Console
from rich.table import Table
from rows import commit_of

KINDS = ("verdict", "traceback", "over its limit of time", "over its limit of memory", "not one sentence")


def all_cases(seed: int) -> list[Case]:
    """The cases of all modules, the same for a seed."""
    of_schemas = [*commands.cases(seed), *documents.cases(seed), *settings.cases(seed)]
    return [*of_schemas, *files.file_cases(seed)]


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """A line a command and group."""
    table = Table("command", "group")
    for name in ("cases", "refused", "accepted", "wrong verdicts", "tracebacks", "over 20 s", "over 4 GB"):
        table.add_column(name, justify="right")
    table.add_column("not one sentence", justify="right")
    table.add_column("else", justify="right")
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for each in outcomes:
        command, group, _ = each.case.name.split("/", 2)
        groups[command, group].append(each)
    for key, of in sorted(groups.items()):
        table.add_row(*key, *map(str, counts(of).values()))
    table.add_section()
    table.add_row("all", "", *map(str, counts(outcomes).values()))
    return table


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Figures of some cases, by what they are."""
    codes = [each.code for each in outcomes]
    found = {"cases": len(codes), "refused": codes.count(WRONG_INPUT), "accepted": codes.count(0)}
    found |= {kind: sum(kind in each.wrong for each in outcomes) for kind in KINDS}
    return found | {"else": sum(bool(set(each.wrong) - set(KINDS)) for each in outcomes)}


def described(outcome: Outcome) -> str:
    """What is wrong, how to repeat it, and what the command said."""
    name = shlex.quote(f"^{re.escape(outcome.case.name)}$")
    said = "\n".join(f"    {line}" for line in (outcome.stderr or outcome.stdout).strip().splitlines()[-25:])
    return (
        f"{outcome.case.name}: {', '.join(outcome.wrong)} (should {outcome.case.verdict}; exit code {outcome.code}, "
        f"{outcome.seconds:.1f} s, {outcome.peak_bytes / 1e9:.1f} GB)\n"
        f"    motet {shlex.join(outcome.case.arguments)}\n"
        f"    python benchmarks/bad_inputs.py --keep . --only {name}\n{said}"
    )


def stored(outcomes: Sequence[Outcome], seed: int) -> dict[str, Any]:
    """What is written as JSON."""
    rows = [
        {
            "name": each.case.name,
            "verdict": each.case.verdict,
            "code": each.code,
            "seconds": round(each.seconds, 1),
            "wrong": list(each.wrong),
            "said": each.stderr.strip().rpartition("\n")[2][:300],
        }
        for each in sorted(outcomes, key=lambda each: each.case.name)
    ]
    return {
        "commit": commit_of(),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "emulated": False,
        "python": platform.python_version(),
        "seed": seed,
        "counts": counts(outcomes),
        "cases": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--json", type=Path, help="write all outcomes to this JSON file")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name this is found in")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="cases at a time")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a case; more on a slow or busy machine")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the cases' folders there")
    options = parser.parse_args()
    cases = [case for case in all_cases(options.seed) if re.search(options.only, case.name)]
    outcomes: list[Outcome] = []
    for outcome in run_cases(cases, workers=options.workers, limit_s=options.limit_s, keep=options.keep):
        outcomes.append(outcome)
        end = "\r" if sys.stderr.isatty() else "\n"
        if outcome.wrong or len(outcomes) % 25 == 0 or end == "\r":
            print(f"{len(outcomes)} of {len(cases)}: {outcome.case.name} {', '.join(outcome.wrong)}"[:150].ljust(150),
                  end=end, file=sys.stderr, flush=True)  # fmt: skip
    wrong = [each for each in outcomes if each.wrong]
    Console(width=170).print(table_of(outcomes))
    for each in sorted(wrong, key=lambda each: each.case.name):
        print(described(each))
    print(f"{len(wrong)} of {len(outcomes)} cases ended wrongly.")
    if options.json:
        options.json.write_text(json.dumps(stored(outcomes, options.seed), indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
