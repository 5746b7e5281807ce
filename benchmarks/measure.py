"""Time and quality of one balancing algorithm on drawn batches, by Motet and by peers. Used by balance.py."""

from __future__ import annotations

import json
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from peers import PEERS
from rich.table import Table

from motet.balance import Cost, Packed, score
from motet.core.arrays import Int64Array

SECONDS_TO_IMPORT = 120
PEER_BATCHES = 3
ENOUGH_S = 0.3
"""Of a peer that takes longer, one batch tells enough."""


def over_bound(found: Any, _: Any) -> dict[str, float]:
    return {"max / bound - 1": float(found.imbalance) - 1}


@dataclass(frozen=True)
class Case:
    """One algorithm on batches of one size and source. A batch is an array of lengths, or whatever `solve` takes.

    quality:     figures of a result for a batch, by what they are; the less the better.
    max_batches: of those that are slow.
    peers:       names in PEERS: given `weights(batch)` to balance, and judged by `quality` as scored with `cost`.
    """

    algorithm: str
    size: str
    source: str
    draw: Callable[[np.random.Generator], Any]
    solve: Callable[[Any], Any]
    quality: Callable[[Any, Any], dict[str, float]] = over_bound
    max_batches: int = 1000
    who: str = "motet"
    num_ranks: int = 0
    peers: Sequence[str] = ()
    weights: Callable[[Any], Int64Array] = lambda batch: batch
    cost: Cost = Packed()  # noqa: RUF009, immutable


@dataclass(frozen=True)
class Row:
    """A line of the table; median_ms is None where a peer was stopped.

    quality: the median and the worst of the batches, by what they are.
    """

    algorithm: str
    size: str
    source: str
    who: str
    num_batches: int = 0
    median_ms: float | None = None
    quality: dict[str, tuple[float, float]] = field(default_factory=dict)


class Peers:
    """The peers' processes, each started when it is first asked and stopped when it takes too long.

    absent: what is wrong with each peer that cannot be used.
    """

    def __init__(self, python: str, limit_s: float) -> None:
        self.limit_s = limit_s
        self.absent: dict[str, str] = {}
        self._python = python
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def there(self, name: str) -> bool:
        """Whether the peer is installed and has answered in time so far."""
        if name not in self._processes:
            command = [self._python, str(Path(__file__).with_name("peers.py")), name]
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            started = self._answer(name, SECONDS_TO_IMPORT)
            if started is not None and started["missing"]:
                self.absent[name] = f"not installed: pip install {PEERS[name].install}"
                self._stop(name)
        return self._processes[name].poll() is None

    def balance(self, name: str, lengths: list[int], weights: list[int], num_ranks: int) -> dict | None:
        """{"seconds", "ranks"}; None if it fails or takes too long: it is then not there any more."""
        job = {"lengths": lengths, "weights": weights, "num_ranks": num_ranks}
        print(json.dumps(job), file=self._processes[name].stdin, flush=True)
        return self._answer(name, self.limit_s)

    def close(self) -> None:
        for name in self._processes:
            self._stop(name)

    def _answer(self, name: str, limit_s: float) -> dict | None:
        output = self._processes[name].stdout
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            in_time = bool(selector.select(limit_s))
        line = output.readline() if in_time else ""
        if line:
            return json.loads(line)
        if in_time:
            self.absent[name] = "failed; benchmarks/peers.py alone shows why"
        self._stop(name)
        return None

    def _stop(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()


def measure(case: Case, repeats: int, seed: int, peers: Peers, starts: Callable[[str], None]) -> Iterator[Row]:
    """Rows of Motet and of every peer that is there, on batches of the seeds from `seed * repeats` on.

    starts: is told the name of what is measured next.
    """
    starts(case.who)
    seconds, judged = [], []
    for number in range(min(repeats, case.max_batches)):
        batch = case.draw(np.random.default_rng(seed * repeats + number))
        start = time.perf_counter()
        found = case.solve(batch)
        seconds.append(time.perf_counter() - start)
        judged.append(case.quality(found, batch))
    yield _row(case, case.who, seconds, judged)
    for name in case.peers:
        starts(name)
        if peers.there(name):
            row = _measure_peer(case, range(seed * repeats, seed * repeats + min(repeats, PEER_BATCHES)), name, peers)
            if name not in peers.absent:
                yield row


def _measure_peer(case: Case, seeds: Sequence[int], name: str, peers: Peers) -> Row:
    seconds: list[float] = []
    judged: list[dict[str, float]] = []
    for seed in seeds:
        batch = case.draw(np.random.default_rng(seed))
        weights = case.weights(batch)
        lengths = batch if isinstance(batch, np.ndarray) else weights
        answer = peers.balance(name, lengths.tolist(), weights.tolist(), case.num_ranks)
        if answer is None:
            return Row(case.algorithm, case.size, case.source, name)
        seconds.append(answer["seconds"])
        judged.append(case.quality(score(answer["ranks"], lengths, case.num_ranks, case.cost), batch))
        if seconds[-1] > ENOUGH_S:
            break
    return _row(case, name, seconds, judged)


def _row(case: Case, who: str, seconds: Sequence[float], judged: Sequence[dict[str, float]]) -> Row:
    figures: dict[str, list[float]] = {}
    for one in judged:
        for name, figure in one.items():
            figures.setdefault(name, []).append(figure)
    quality = {name: (float(np.median(of)), max(of)) for name, of in figures.items()}
    return Row(case.algorithm, case.size, case.source, who, len(seconds), 1e3 * float(np.median(seconds)), quality)


def table_of(rows: Sequence[Row], limit_s: float) -> Table:
    table = Table("algorithm", "ranks x items", "lengths", "who")
    table.add_column("median ms", justify="right")
    table.add_column("quality")
    for heading in ("median", "worst"):
        table.add_column(heading, justify="right")
    last = None
    for row in rows:
        case = (row.algorithm, row.size, row.source)
        if last is not None and case != last:
            table.add_section()
        figures = (f"> {1e3 * limit_s:g}",)
        if row.median_ms is not None:
            pairs = row.quality.values()
            medians, worst = ("\n".join(f"{pair[i]:.3g}" for pair in pairs) for i in (0, 1))
            figures = (f"{row.median_ms:.3f}", "\n".join(row.quality), medians, worst)
        table.add_row(*(("", "", "") if case == last else case), row.who, *figures)
        last = case
    return table
