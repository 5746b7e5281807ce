"""What a benchmark measured: rows with their goals, how they are shown and stored, and what a missed goal ends with."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """goal: None where there is none. met: whether it is; where it is not given, the value is to be no more."""

    name: str
    value: float
    goal: float | None = None
    met: bool | None = None

    def __post_init__(self) -> None:
        if self.met is None:
            object.__setattr__(self, "met", self.goal is None or self.value <= self.goal)


LENGTHS = ROOT.parent / "shared" / "data" / "lengths.csv.gz"
"""The table of real lengths, where it is at hand."""
OF_ROWS = "rows whose name holds this; all are measured"
"""What `--only` takes where no part can be measured by itself."""


def options(
    description: str | None, only: str | Collection[str] = "", *, reads_lengths: bool = True, draws: bool = True
) -> argparse.ArgumentParser:
    """A parser with what these programs take alike: --seed, --json and, where they have a use for it, --lengths and
    --only.

    only: what --only takes, in words, or all that it takes. draws: whether anything depends on the seed.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if reads_lengths:
        parser.add_argument("--lengths", type=Path, default=LENGTHS, help="a table of real lengths (csv.gz)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn" if draws else "nothing is drawn here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    if isinstance(only, str):
        if only:
            parser.add_argument("--only", default="", metavar="NAME", help=only)
    else:
        parser.add_argument("--only", default="", metavar="NAME", choices=only, help=f"one of {', '.join(only)}")
    return parser


def commit_of(tree: Path = ROOT) -> str:
    """The commit that a checkout is at; "" where git does not say."""
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def write_rows(path: Path, rows: Sequence[Row], **about: Any) -> None:
    """Write rows that were measured on CPUs, at this commit, as JSON. about: what else is stored beside them."""
    document = {"commit": commit_of(), "device": "cpu", "emulated": False, **about}
    document["rows"] = [asdict(row) for row in rows]
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def show(row: Row) -> None:
    """Print a row, and whether its goal is met."""
    goal = "" if row.goal is None else f"   goal {row.goal:g}, {'met' if row.met else 'MISSED'}"
    print(f"{row.name:<80} {row.value:10.4g}{goal}", flush=True)


def table_line(name: str, figures: Mapping[str, float]) -> str:
    """A line of a table in Markdown. figures: by column; whole numbers as they are, others to one digit."""
    cells = (str(each) if isinstance(each, int) else f"{each:.0e}".replace("0e+00", "0") for each in figures.values())
    return f"| `{name}` | {' | '.join(cells)} |"


def finish(rows: Sequence[Row], path: Path | None, **about: Any) -> NoReturn:
    """Store the rows, if there is a path, and end the program: with exit code 1 if a goal is missed, else 0."""
    if path is not None:
        write_rows(path, rows, **about)
    raise SystemExit(0 if all(row.met for row in rows) else 1)
