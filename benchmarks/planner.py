"""What the planner makes of five papers' jobs: every strategy's step, and what the papers' methods gain, beside theirs.

    .venv/bin/python benchmarks/planner.py [--only PAPER] [--job PART_OF_NAME] [--json benchmarks/results/planner.json]

Per job: the processor seconds of a full search, and the predicted step of the best Plan of every strategy; then that of
the paper's own method in the degrees that it gives, and of what it is compared with. Gains are in samples a second and
GPU, over the Plan of the row: those of the paper's method, of the best Plan that the planner finds, and what the paper
says of its method. Nothing is measured and no efficiency is fitted; devices are the catalogue's. Lengths that a paper
does not give, and that were found from its other numbers, are marked. Minutes on one core. docs/papers.md explains what
does not agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planner_cornstarch
import planner_mmscale
import planner_omnibal
import planner_optimus
import planner_orchmllm
from published import NEAR, Range, Row
from rich.console import Console
from rich.table import Table
from rows import Row as Figure
from rows import options, write_rows
from trials import Baseline, Outcome, Tried

PAPERS = {
    "orchmllm": planner_orchmllm,
    "mmscale": planner_mmscale,
    "optimus": planner_optimus,
    "cornstarch": planner_cornstarch,
    "omnibal": planner_omnibal,
}
STRATEGIES = {
    "data parallel": "data par.",
    "chain": "chain",
    "modality parallel": "modality",
    "disaggregated": "disaggr.",
    "bubble filling": "bubbles",
}

NONE = "-"


def table_of(tried: list[Tried]) -> Table:
    table = Table(title="What the planner makes of the papers' jobs: seconds of a step (as published); * lacks memory")
    table.add_column("job", no_wrap=True)
    for name in ("GPUs", "search s", *STRATEGIES.values()):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("as the paper has it")
    for name in ("step", "method's gain", "planner's", "published"):
        table.add_column(name, justify="right")
    last = ""
    for one in tried:
        if one.case.paper != last:
            table.add_section()
        last = one.case.paper
        for row in _rows(one):
            table.add_row(*row)
    return table


def _rows(one: Tried) -> Iterator[list[str]]:
    """One of the method, and one of each baseline."""
    case, best = one.case, one.planned.best
    steps = []
    for name in STRATEGIES:
        shown = _seconds(one.planned.strategies[name])
        steps.append(f"[bold]{shown}[/]" if name == one.planned.strategy else shown)
    mark = " †" if case.fitted else ""
    first = [f"{case.name}{mark}", f"{case.subject.job.cluster.num_ranks:,}", f"{one.planned.took_s:.1f}", *steps]
    over_method = _gain(best, one.method)
    yield [*first, f"[bold]{case.method}[/]", _seconds(one.method, case.published_s), "", over_method, ""]
    for baseline, outcome in zip(case.baselines, one.baselines):
        gains = _gain(one.method, outcome), _gain(best, outcome), _published(baseline)
        yield [*[""] * len(first), baseline.name, _seconds(outcome, baseline.published_s), *gains]


def _seconds(outcome: Outcome, published_s: float | None = None) -> str:
    if outcome.step_s is None:
        return NONE
    shown = f"{outcome.step_s:.3g}" + ("*" if outcome.why else "")
    return f"{shown} ({published_s:.3g})" if published_s else shown


def _gain(own: Outcome, other: Outcome) -> str:
    gain = own.over(other)
    return NONE if gain is None else f"{gain:.2f}"


def _published(baseline: Baseline) -> str:
    return " to ".join(f"{number:.2f}" for number in baseline.published)


def reasons(tried: list[Tried]) -> Iterator[str]:
    """Why there is a dash or a star."""
    for one in tried:
        case = one.case
        named = list(one.planned.strategies.items())
        named += [(case.method, one.method)]
        named += [(baseline.name, outcome) for baseline, outcome in zip(case.baselines, one.baselines)]
        for name, outcome in named:
            if outcome.why:
                yield f"{case.name}, {name}: {outcome.why}"


def summary(tried: list[Tried]) -> str:
    """How many gains the papers publish of these jobs, and how many of ours are near them."""
    rows = [
        Row(one.case.paper, baseline.name, "", Range(min(baseline.published), max(baseline.published)), gain)
        for one in tried
        for baseline, outcome in zip(one.case.baselines, one.baselines)
        if baseline.published and (gain := one.method.over(outcome)) is not None
    ]
    inside, near = sum(not row.difference for row in rows), sum(row.is_near for row in rows)
    return (
        f"{len(tried)} jobs, {len(rows)} published gains of the papers' methods, none of which is promised here: "
        f"{inside} are met or in the published range, {near - inside} more within {NEAR:.0%}, and {len(rows) - near} "
        "are not."
    )


def write(path: Path, tried: list[Tried]) -> None:
    """The figures, in place of those of the same jobs; in the order of the table."""
    known = json.loads(path.read_text())["jobs"] if path.exists() else []
    records = {_key(record): record for record in (*known, *(one.record() for one in tried))}
    cases = [case for paper in PAPERS.values() for case in paper.cases()]
    every = [(case.paper, case.name, case.subject.job.cluster.num_ranks) for case in cases]
    jobs = [records[key] for key in every if key in records]
    found = {f"{job['paper']}, {job['job']}, {job['num_gpus']} GPUs": job["planner"]["step_s"] for job in jobs}
    rows = [Figure(f"{name}: seconds of a step", step_s) for name, step_s in found.items() if step_s is not None]
    write_rows(path, rows, device="none", jobs=jobs)


def _key(record: dict[str, Any]) -> tuple[str, str, int]:
    return record["paper"], record["job"], record["num_gpus"]


def main() -> None:
    parser = options(__doc__, reads_lengths=False, draws=False)
    parser.add_argument("--only", choices=PAPERS, action="append", help="one paper; repeatable")
    parser.add_argument("--job", default="", help="those alone whose name has this in it")
    asked = parser.parse_args()
    console, errors = Console(width=200), Console(stderr=True)
    tried: list[Tried] = []
    with errors.status("reading") as status:
        for name in asked.only or PAPERS:
            for case in PAPERS[name].cases():
                if asked.job not in case.name:
                    continue
                tried.append(Tried.of(case, status.update))
                errors.print(f"{case.paper}: {case.name}, {tried[-1].planned.took_s:.1f} s", highlight=False)
    console.print(table_of(tried))
    if any(one.case.fitted for one in tried):
        found = dict.fromkeys(f"{one.case.paper}: {one.case.fitted}" for one in tried if one.case.fitted)
        console.print(f"† found from other numbers of the paper: {'; '.join(found)}.", highlight=False)
    console.print(summary(tried), highlight=False)
    for sentence in reasons(tried):
        console.print(sentence, style="dim", highlight=False, markup=False)
    if asked.json:
        write(asked.json, tried)


if __name__ == "__main__":
    main()
