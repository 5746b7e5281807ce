"""MMScale's Figures 15 to 21 and Tables 2 and 3 on planner and simulator, and its frozen settings measured.

    python benchmarks/mmscale.py [--only "Figure 15"] [--json benchmarks/results/mmscale-2-cpu-cores.json]

Jobs are those of planner_mmscale.py and papers_mmscale.py, with the generator: the catalogue's A800, no efficiency
fitted, so no row is; what the paper publishes are ranges that its text says of bars ("1.2" is 1.15 to 1.25). A row
inside its range is met, all others are shown as missed. Figures 15 to 20 are predicted, and the same on any machine.
Tables 2 and 3 are processor time of Motet's own decisions here. Figure 21 was measured, with steps that sleep
(preprocessing.py), and so are the frozen settings in real steps of a small model on two ranks (mmscale_frozen.py).
Exits with 1 if anything is missed.

--only: tables whose name has this in it; repeatable. Others stay in the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import mmscale_frozen
import papers_mmscale
import planner_mmscale
import rows
from published import Range, Row
from rich.console import Console
from trials import Outcome

Found = Row | rows.Row
STORED = Path(__file__).parent / "results" / "preprocessing-2-cpu-cores.json"


@cache
def _outcomes(place: int) -> tuple[str, Outcome, dict[str, Outcome]]:
    """A job of sections 7.1 (0 to 2) and 7.2.1 (3 to 5): its name, MMScale's Plan, and those it is compared with."""
    case = list(planner_mmscale.cases())[place]
    return case.name, case.attempt(), {each.name.partition(",")[0]: each.attempt() for each in case.baselines}


def figure_15() -> Iterator[Row]:
    for place in range(3):
        name, own, others = _outcomes(place)
        source = "MMScale, Figure 15"
        yield Row(source, f"{name}: MFU", "%", Range(51.8, 54.7), 100 * own.mfu, note=own.what)
        stated = Range(1.15, 1.25) if "72B" in name else Range(1.7, 2.8)
        yield Row(source, f"{name}: over Megatron-LM", "times the MFU", stated, own.mfu / others["Megatron-LM"].mfu)


def figure_16() -> Iterator[Row]:
    for place in range(3):
        name, own, others = _outcomes(place)
        megatron = others["Megatron-LM"]
        stated = Range(1.25, 1.35) if "72B" in name else Range(1.7, 2.2)
        gain = own.rate * own.num_ranks / (megatron.rate * megatron.num_ranks)
        note = f"{own.num_ranks:,} GPUs, Megatron-LM {megatron.num_ranks:,}"
        yield Row("MMScale, Figure 16", f"{name}: over Megatron-LM", "samples a second", stated, gain, note=note)


def figure_17() -> Iterator[Row]:
    source = "MMScale, Figure 17"
    for place in range(3, 6):
        name, own, others = _outcomes(place)
        megatron, shared = others["Megatron-LM"], others["proportional to operations"]
        yield Row(source, f"{name}: over Megatron-LM", "times the MFU", Range(1.3, 2.7), own.mfu / megatron.mfu)
        gain = own.rate * own.num_ranks / (megatron.rate * megatron.num_ranks)
        note = f"{own.num_ranks} GPUs, Megatron-LM {megatron.num_ranks}"
        yield Row(source, f"{name}: over Megatron-LM", "samples a second", Range(1.4, 2.7), gain, note=note)
        note = "which the paper has between the two"
        yield Row(source, f"{name}: over the ratio of operations", "times a GPU", Range(low=1.0), own.times(shared))
        gain = shared.times(megatron)
        yield Row(source, f"{name}: that over Megatron-LM", "times a GPU", Range(low=1.0), gain, note=note)


@cache
def _figure_20() -> tuple[Row, ...]:
    return tuple(papers_mmscale.PLANNED["MMScale, Figure 20"]())


def figure_19() -> Iterator[Row]:
    """MFU is throughput a GPU times operations of one job, so gains are those of Figure 20, with a range of its own."""
    for row in _figure_20():
        yield replace(row, source="MMScale, Figure 19", unit="times the MFU", published=Range(1.4, 2.9), note="")


def figure_21() -> Iterator[rows.Row]:
    """As preprocessing.py has stored it last: a part of it that runs here would be timed beside all else of this."""
    for row in json.loads(STORED.read_text())["rows"]:
        if "emulated step" in row["name"]:
            yield rows.Row(**row | {"name": f"Figure 21: {row['name']}"})


TABLES: Mapping[str, Callable[[], Iterable[Found]]] = {
    "Figure 15": figure_15,
    "Figure 16": figure_16,
    "Figure 17": figure_17,
    "Figure 18": papers_mmscale.PLANNED["MMScale, Figure 18"],
    "Figure 19": figure_19,
    "Figure 20": _figure_20,
    "Figure 21": figure_21,
    "Table 2": papers_mmscale.MEASURED["MMScale, Table 2"],
    "Table 3": papers_mmscale.MEASURED["MMScale, Table 3"],
    "frozen, measured": mmscale_frozen.rows,
}


def is_met(row: Found) -> bool:
    return bool(row.met) if isinstance(row, rows.Row) else row.difference == 0


def show(row: Found) -> None:
    if isinstance(row, rows.Row):
        rows.show(row)
        return
    said = "met" if is_met(row) else f"MISSED by {row.difference:+.1%}"
    line = f"{row.source.removeprefix('MMScale, ')}: {row.what}, {row.unit}"
    print(f"{line:<80} {row.predicted:10.4g}   published {row.published}, {said}", flush=True)


def record(row: Found) -> dict[str, Any]:
    """For JSON. A row that is shown in papers.py, where nothing is promised of it, is met or missed here."""
    if isinstance(row, rows.Row):
        return asdict(row)
    assert isinstance(row.predicted, float)
    about = {"name": f"{row.source}: {row.what}, {row.unit}", "value": float(f"{row.predicted:.4g}")}
    return about | {"goal": str(row.published), "met": is_met(row), "note": row.note}


def write(path: Path, found: Mapping[str, list[Found]]) -> None:
    """The rows by table, in place of those of the same tables."""
    known = json.loads(path.read_text())["tables"] if path.exists() else {}
    kept = known | {name: list(map(record, each)) for name, each in found.items()}
    about = {"commit": rows.commit_of(), "device": "cpu", "emulated": "steps of Figure 21"}
    tables = {name: kept[name] for name in TABLES if name in kept}
    every = [row for each in tables.values() for row in each]
    path.write_text(json.dumps(about | {"tables": tables, "rows": every}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = rows.options(__doc__, reads_lengths=False, draws=False)
    parser.add_argument("--only", action="append", default=[], help="a part of the name of a table")
    given = parser.parse_args()
    chosen = [name for name in TABLES if not given.only or any(one.lower() in name.lower() for one in given.only)]
    if not chosen:
        parser.error(f"no table has {' or '.join(given.only)} in its name; there are {', '.join(TABLES)}")
    found: dict[str, list[Found]] = {}
    for name in chosen:
        with Console(stderr=True).status(name):
            found[name] = list(TABLES[name]())
        for row in found[name]:
            show(row)
    every = [row for each in found.values() for row in each]
    judged = [row for row in every if isinstance(row, Row) or row.goal is not None]
    met = sum(map(is_met, judged))
    print(
        f"{len(every)} rows, none fitted. {len(judged)} have a goal or a published range: {met} are met or inside it, "
        f"and {len(judged) - met} are not."
    )
    if given.json:
        write(given.json, found)
    sys.exit(0 if met == len(judged) else 1)


if __name__ == "__main__":
    main()
