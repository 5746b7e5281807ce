"""Numbers that others published beside what Motet predicts from the papers' own inputs, in one table.

    .venv/bin/python benchmarks/papers.py [--json benchmarks/results/papers.json]

Schedules, simulator, operations and partition are Motet's; nothing is measured, so any machine gives the same table, in
seconds. What was fitted is marked on the row that it was fitted to. Exits with 1 if a promised tolerance is missed.
docs/papers.md says how each number is found, and what does not agree.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import papers_cornstarch
import papers_omnibal
import papers_optimus
from published import Row, table_of
from rich.console import Console

PAPERS = (papers_cornstarch, papers_optimus, papers_omnibal)


def rows() -> list[Row]:
    return [row for paper in PAPERS for row in paper.rows()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all rows to this JSON file")
    options = parser.parse_args()
    found = rows()
    missed = [row for row in found if row.missed]
    console = Console(width=185)
    console.print(table_of(found))
    num_promised = sum(row.promised is not None for row in found)
    console.print(f"{num_promised - len(missed)} of {num_promised} promised tolerances are met.")
    if options.json:
        options.json.write_text(json.dumps({"rows": [row.record() for row in found]}, indent=1) + "\n")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
