"""The pass that cuts F, B, I, W and R of a stage into parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, Kind, Program, Row

_BACKWARD = (Kind.B, Kind.I)


def split_parts(program: Program, stage: int, num_forward_parts: int, num_backward_parts: int) -> Program:
    """Cut the passes of a stage into parts that follow each other: F and R into num_forward_parts, B, I and W into
    num_backward_parts. 1 leaves them whole. A pass that already has that number of parts stays.

    If rows are `AlikeRows`, stage is one of the first row, and the same stage of every rank is cut.
    Raises ArgumentError for a stage that the Program does not have, for counts below 1, for parts of a backward pass
    that the stage does not have, and for passes with another number of parts. O(actions of the stage's rank).
    """
    if not 0 <= stage < program.num_distinct_stages:
        raise ArgumentError(f"split_parts: there is no stage {stage}; the Program has {program.num_distinct_stages}.")
    if min(num_forward_parts, num_backward_parts) < 1:
        raise ArgumentError(f"split_parts: parts are {num_forward_parts}, {num_backward_parts}; the least is 1.")
    num_parts = dict.fromkeys((Kind.F, Kind.R), num_forward_parts)
    num_parts |= dict.fromkeys((Kind.B, Kind.I, Kind.W), num_backward_parts)
    counts: Counter[tuple[int, Kind, int]] = Counter()
    for action in program.distinct_rows[program.stages[stage].rank]:
        if action.stage == stage and action.kind in num_parts:
            counts[action[:3]] += action.part >= 0
    if num_backward_parts > 1 and not any(kind in _BACKWARD for _, kind, _ in counts):
        raise ArgumentError(f"split_parts: stage {stage} has no backward pass; num_backward_parts must be 1.")
    for (_, kind, microbatch), count in counts.items():
        if count not in (0, num_parts[kind]):
            whole = Action(stage, kind, microbatch)
            raise ArgumentError(f"split_parts: {whole} is in {count} parts already, not {num_parts[kind]}.")

    def parts(row: Row) -> Iterator[Action]:
        for action in row:
            num = num_parts.get(action.kind, 1) if action.stage == stage and action.part < 0 else 1
            if num == 1:
                yield action
            else:
                _, kind, microbatch, _, peer = action
                yield from (Action(stage, kind, microbatch, part, peer) for part in range(num))

    return program.with_row(program.stages[stage].rank, parts)
