"""What leaves its node when a microbatch is balanced, decided without knowledge of the nodes and with it.

    python benchmarks/topology.py [--seed N] [--json FILE] [--only NAME]

With nodes known, inputs are either loaded before (exchange mode), or by whoever computes on them (index mode).

Real lengths (../shared/data/lengths.csv.gz, or --lengths FILE), each kind of example equally often, on MLLM-10B of
OrchMLLM, 128 ranks with 60 examples each, nodes of 8. Two decisions of one microbatch are compared: by an Orchestrator
that takes all ranks to share a node, and by the one of training. Inputs move where they were loaded before anything
was decided (balance.mode = "exchange"); image patches count 588 bytes, audio frames 512, tokens 8. OrchMLLM Algorithm 3
and Figure 12 are about the same bytes. Decisions are real; nothing is moved.

Padded clips are batched with clips of like length from everywhere, so they have no goal. With the joint assignment,
1.6 % of the balance is what keeping inputs may cost (`balance.assign_jointly`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from rows import ROOT, Row, finish, options, show

from motet.analyze.lengths import read_lengths
from motet.assign.balancing import operation_costs
from motet.assign.orchestrator import Decision, Orchestrator
from motet.balance import ASSUMED_SPEEDS, METHODS, Method
from motet.core.arrays import Int64Array
from motet.core.workload import BACKBONE, BatchLengths, home_ranks
from motet.planning.planned_recipe import read_job_recipe

NUM_RANKS, PER_RANK, RANKS_PER_NODE = 128, 60, 8
NUM_BATCHES = 5
BYTES = {"image": 588, "audio": 512, BACKBONE: 8}
WAYS: Mapping[str, tuple[Method, ...]] = {"joint": ("joint",), "per phase": ("per_phase",), "auto": METHODS}


KINDS = {
    "unknown": "nodes unknown",
    "held": "inputs loaded before",
    "index": "any rank can load any example",
}
"""What a decision knows: no nodes; nodes, and who has loaded what (exchange mode); nodes alone (index mode)."""
Found: TypeAlias = Mapping[str, list[tuple[Decision, BatchLengths]]]
"""Kind -> decisions of batches."""


def input_bytes(lengths: BatchLengths) -> Int64Array:
    """Of each example, int64 [num_examples]."""
    total = lengths.sequence * BYTES[BACKBONE]
    for name, items in lengths.items.items():
        np.add.at(total, items.example, items.length * BYTES[name])
    return total


def crossing_inputs(decision: Decision, lengths: BatchLengths, *, padded: bool = True) -> float:
    """The share of input bytes whose rank is of another node than their example's home. padded: clips count, too."""
    crossed = whole = 0
    for name, placed in decision.assignments.items():
        if name == "audio" and not padded:
            continue
        items = lengths.of(name)
        size_bytes = items.length * BYTES[name]
        away = placed.ranks // RANKS_PER_NODE != lengths.home[items.example] // RANKS_PER_NODE
        crossed, whole = crossed + int(size_bytes[away].sum()), whole + int(size_bytes.sum())
    return crossed / whole


def crossing_outputs(decision: Decision, lengths: BatchLengths, name: str) -> float:
    """The share of an encoder's output rows that go to a sequence of another node."""
    items, placed = lengths.items[name], decision.assignments[name].ranks
    away = placed // RANKS_PER_NODE != decision.backbone.ranks[items.example] // RANKS_PER_NODE
    return int(items.num_tokens[away].sum()) / int(items.num_tokens.sum())


def measure(path: Path, seed: int, only: str) -> list[Row]:
    model = read_job_recipe(ROOT / "recipes" / "orchmllm_10b.toml").model
    workload = read_lengths(path).workload(even=True)
    speed, names = ASSUMED_SPEEDS["cuda"], [module.name for module in model.modules]
    costs = {per_node: operation_costs(model, {}, speed, 2, per_node) for per_node in (None, RANKS_PER_NODE)}
    rng, rows = np.random.default_rng(seed), []
    drawn = [workload.draw(NUM_RANKS * PER_RANK, rng) for _ in range(NUM_BATCHES)]
    batches = [replace(lengths, home=home_ranks(lengths.num_examples, NUM_RANKS)) for lengths in drawn]
    for way, methods in WAYS.items():
        if only not in way:
            continue
        found: Found = {kind: [] for kind in KINDS}
        for lengths in batches:
            for kind, decided in found.items():
                of = costs[None if kind == "unknown" else RANKS_PER_NODE]
                orchestrator = Orchestrator(of.costs, NUM_RANKS, names, work=of.work, times=of.times, methods=methods)
                held = input_bytes(lengths) if kind == "held" else None
                decided.append((orchestrator.decide(lengths, held), lengths))
        rows += list(compared(way, found))
    return rows


def compared(way: str, found: Found) -> list[Row]:
    def median(kind: str, figure) -> float:
        return float(np.median([figure(*pair) for pair in found[kind]]))

    def load(decision: Decision, lengths: BatchLengths) -> float:
        return float(sum(placed.loads.max() / max(placed.loads.mean(), 1) for placed in decision.assignments.values()))

    def unpadded(decision: Decision, lengths: BatchLengths) -> float:
        return crossing_inputs(decision, lengths, padded=False)

    rows = [
        Row(f"{way}: inputs that leave their node, nodes unknown", median("unknown", crossing_inputs)),
        Row(f"{way}: inputs that leave their node", median("held", crossing_inputs)),
        Row(f"{way}: inputs but padded clips that leave their node", median("held", unpadded), 0.06),
    ]
    if way != "joint":
        for name in ("image", "audio"):
            outputs = lambda decision, lengths, name=name: crossing_outputs(decision, lengths, name)  # noqa: E731
            rows += [
                Row(f"{way}: {name} outputs that leave their node, {what}", median(kind, outputs))
                for kind, what in KINDS.items()
            ]
    ratio = median("held", load) / median("unknown", load)
    rows.append(Row(f"{way}: busiest over mean, summed over phases, with nodes over without", ratio, 1.016))
    slower = median("held", lambda d, _: d.decide_s) / median("unknown", lambda d, _: d.decide_s)
    rows.append(Row(f"{way}: time of the decision, with nodes over without", slower))
    rows.append(Row(f"{way}: time of the decision with nodes, ms", 1e3 * median("held", lambda d, _: d.decide_s)))
    return rows


def main() -> None:
    parser = options(__doc__, "ways whose name holds this")
    asked = parser.parse_args()
    rows = measure(asked.lengths, asked.seed, asked.only)
    for row in rows:
        show(row)
    finish(rows, asked.json, seed=asked.seed)


if __name__ == "__main__":
    main()
