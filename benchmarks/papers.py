"""Numbers that others published beside what Motet predicts from the papers' own inputs, in one table.

    .venv/bin/python benchmarks/papers.py [--only NAME] [--quick] [--json benchmarks/results/papers.json]

Schedules, simulator, operations, balancers, partition and planner are Motet's. Any machine gives the same table, in
minutes, but for the time of Motet's own decisions (MMScale, Tables 2 and 3), which is measured, and not stored. A row
is promised (within how much), or fitted (it agrees by construction, and proves nothing), or shown and not promised; all
are counted. What no row can be made of is listed below them, with the reason. Exits with 1 if a promise is missed.

--only NAME: the tables whose name has NAME in it, such as cornstarch, or "Figure 17"; repeatable.
--quick:     only what takes seconds: nothing is planned.

docs/papers.md says how each number is found, what does not agree, and where a paper cannot be right.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import papers_cornstarch
import papers_cornstarch_plans
import papers_masks
import papers_mmscale
import papers_omnibal
import papers_optimus
import papers_optimus_plans
import papers_orchmllm
from published import Absent, Row, summary, table_of
from rich.console import Console
from rows import commit_of, options

Tables = Mapping[str, Callable[[], Iterable[Row]]]
"""The rows of each table and figure, by its name."""

QUICK: Tables = {
    **papers_cornstarch.TABLES,
    papers_masks.SOURCE: papers_masks.rows,
    **papers_optimus.TABLES,
    **papers_omnibal.TABLES,
    **papers_mmscale.TABLES,
}
PLANNED: Tables = {
    **papers_cornstarch_plans.ROWS,
    **papers_optimus_plans.TABLES,
    **papers_mmscale.PLANNED,
    **papers_orchmllm.PLANNED,
}
MEASURED: Tables = papers_mmscale.MEASURED
ABSENT: tuple[Absent, ...] = (
    *papers_cornstarch.ABSENT,
    *papers_optimus.ABSENT,
    *papers_omnibal.ABSENT,
    *papers_mmscale.ABSENT,
    *papers_orchmllm.ABSENT,
)


def in_order(name: str) -> list[str]:
    """A key by which Table 10 is behind Table 9."""
    return [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def is_asked(name: str, asked: Sequence[str]) -> bool:
    return not asked or any(part.lower() in name.lower() for part in asked)


def main() -> None:
    parser = options(__doc__, reads_lengths=False, draws=False)
    parser.add_argument("--only", action="append", default=[], help="a part of the name of a paper, table or figure")
    parser.add_argument("--quick", action="store_true", help="only what takes seconds")
    asked = parser.parse_args()
    tables = {**QUICK, **({} if asked.quick else {**PLANNED, **MEASURED})}
    tables = {name: tables[name] for name in sorted(tables, key=in_order) if is_asked(name, asked.only)}
    absent = [one for one in ABSENT if is_asked(one.source, asked.only)]
    if not tables and not absent:
        known = sorted({*QUICK, *PLANNED, *MEASURED}, key=in_order)
        parser.error(f"no table has {' or '.join(asked.only)} in its name; there are {', '.join(known)}")
    found: dict[str, list[Row]] = {}
    with Console(stderr=True).status("") as status:
        for name, make in tables.items():
            status.update(name)
            found[name] = list(make())
    rows = [row for own in found.values() for row in own]
    console = Console(width=200)
    console.print(table_of(rows))
    for one in absent:
        console.print(f"{one.source}: {one.why}", highlight=False, markup=False)
    console.print(summary(rows))
    if asked.json:
        write(asked.json, found)
    sys.exit(1 if any(row.missed for row in rows) else 0)


def write(path: Path, found: Mapping[str, Sequence[Row]]) -> None:
    """The rows that do not depend on the machine, in place of those of the same tables."""
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in known if row["source"] not in found]
    own = [row.record() for name, rows in found.items() if name not in MEASURED for row in rows]
    records = sorted([*kept, *own], key=lambda row: in_order(row["source"]))
    about = {"commit": commit_of(), "device": "none", "emulated": False, "rows": records}
    about["absent"] = [one._asdict() for one in ABSENT]
    path.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
