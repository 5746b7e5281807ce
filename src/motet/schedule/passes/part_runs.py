"""Neighbouring parts of a pass as one action: a Program of thousands of parts is ordered as one of hundreds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from motet.schedule.program import Action, Kind, Program, Row

JoinedParts = Mapping[Action, tuple[Action, ...]]
"""An action that stands for parts of a pass -> these parts."""


class PartRun(NamedTuple):
    """Parts of one pass that follow each other, or the whole pass.

    before: the index in the row of the action behind them.
    """

    before: int
    parts: tuple[Action, ...]


def with_runs(
    program: Program, runs: Sequence[Sequence[PartRun]]
) -> tuple[dict[int, set[int]], tuple[Row, ...], JoinedParts]:
    """Rows with runs of other stages, an action each. runs: per rank, in order.

    Returns the microbatches of the forward passes of these stages, the rows, and what the actions stand for. A pass in
    several runs is in as many parts in the rows.
    """
    microbatches: dict[int, set[int]] = {}
    rows, parts = [], dict[Action, tuple[Action, ...]]()
    for row, of_rank in zip(program.actions, runs):
        merged, done = list[Action](), 0
        for (before, own), action in zip(of_rank, _numbered([own for _, own in of_rank])):
            merged += row[done:before]
            merged.append(action)
            parts[action], done = own, before
            if action.kind is Kind.F:
                microbatches.setdefault(action.stage, set()).add(action.microbatch)
        rows.append((*merged, *row[done:]))
    return microbatches, tuple(rows), parts


def joined_parts(program: Program) -> tuple[Program, JoinedParts]:
    """The Program with neighbouring parts of a pass as one action, and what these actions stand for."""
    rows, parts = [], dict[Action, tuple[Action, ...]]()
    for row in program.actions:
        runs = [tuple(run) for _, run in groupby(row, key=lambda action: action[:3])]
        rows.append(_numbered(runs))
        parts |= dict(zip(rows[-1], runs))
    return Program(program.stages, program.edges, tuple(rows), program.num_microbatches), parts


def in_parts(program: Program, parts: JoinedParts) -> Program:
    """The Program with each action that stands for parts replaced by them."""
    return program.with_rows(lambda row: (part for action in row for part in parts.get(action, (action,))))


def _numbered(runs: Sequence[tuple[Action, ...]]) -> Row:
    """An action for each run: a whole pass, or a part with the number of the run among those of its pass."""
    counts, seen = Counter(first[:3] for first, *_ in runs), Counter[tuple[int, Kind, int]]()
    actions = []
    for first, *_ in runs:
        key = first[:3]
        actions.append(Action(*key, seen[key] if counts[key] > 1 else -1))
        seen[key] += 1
    return tuple(actions)
