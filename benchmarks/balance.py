"""How long each balancing algorithm takes and how even its loads are, beside what else can be installed from PyPI.

    python benchmarks/balance.py [--only packed tokens] [--peers-python peers/bin/python] [--json balance.json]

One core, fixed seeds. Lengths are log-normal, and drawn from a table of real ones where it is at hand (--lengths).
Times are medians over batches, of the whole call from Python. Each row says what its quality is: the less the better.
Peers are measured on up to 3 of the batches; one that takes longer than --limit is stopped, and left out on larger
batches. benchmarks/requirements.txt installs them. The grouping of an epoch's samples has its own table: grouping.py.
"""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import balance_examples
import balance_items
import rows
from balance_items import Sources
from measure import Case, Peers, Row, measure, table_of
from rich.console import Console
from rich.progress import Progress

from motet.analyze.lengths import read_lengths
from motet.analyze.mixture import Mixture

SECTIONS = balance_items.SECTIONS | balance_examples.SECTIONS


def device() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"one core of {model or platform.machine()}"


def main() -> None:
    parser = rows.options(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--repeats", type=int, default=20, help="batches of each size and source")
    parser.add_argument("--limit", type=float, default=10, help="seconds after which a peer is stopped")
    parser.add_argument("--peers-python", default=sys.executable, help="the Python that has the peers installed")
    options = parser.parse_args()
    if shutil.which(options.peers_python) is None:
        parser.error(f"--peers-python {options.peers_python}: there is no such program; it must be a Python")
    console = Console(width=150)
    mixture = Mixture.of(read_lengths(options.lengths)) if options.lengths.is_file() else None
    if mixture is None:
        console.print(f"No table of real lengths at {options.lengths}: sampled ones only.")
    cases = [case for name in options.only for case in SECTIONS[name](Sources.of(mixture))]
    peers = Peers(options.peers_python, options.limit)
    measured: list[Row] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:

            def starts(who: str, case: Case = case) -> None:
                progress.update(task, description=f"{case.algorithm}, {case.size}, {case.source}: {who}")

            measured += measure(case, options.repeats, options.seed, peers, starts)
            progress.advance(task)
    peers.close()
    console.print(table_of(measured, options.limit))
    console.print(device(), *(f"{name}: {what}" for name, what in peers.absent.items()), sep="\n")
    about = {"device": device(), "python": platform.python_version(), "seed": options.seed}
    about |= {"lengths": mixture and options.lengths.name, "repeats": options.repeats, "limit_s": options.limit}
    told = [
        rows.Row(f"{row.algorithm}, {row.size}, {row.source}, {row.who}: ms", row.median_ms)
        for row in measured
        if row.median_ms is not None
    ]
    rows.finish(told, options.json, **about, measured=[asdict(row) for row in measured])


if __name__ == "__main__":
    main()
