"""The pass that adds R: activations that forward did not keep are recomputed before backward."""

from __future__ import annotations

from collections.abc import Collection

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, Kind, Program, Row

_BACKWARD = (Kind.B, Kind.I)


def add_recompute(program: Program, stages: Collection[int]) -> Program:
    """Put R before every backward pass of the given stages and before the RECV of its gradient, so that a rank
    recomputes while it waits. A backward pass that already has an R gets no second one.

    If rows are `AlikeRows`, stages are those of the first row. Programs of data parallelism have no R: FSDP recomputes
    block by block inside backward, and B is priced with it.
    Raises ArgumentError for a stage that the Program does not have, or that has no backward pass. O(actions).
    """
    with_backward = {action.stage for row in program.distinct_rows for action in row if action.kind in _BACKWARD}
    for stage in stages:
        if stage not in with_backward:
            raise ArgumentError(f"add_recompute: stage {stage} has no backward pass that recomputation could serve.")
    present = {action[:3] for row in program.distinct_rows for action in row if action.kind is Kind.R}

    def recomputed(row: Row) -> list[Action]:
        new: list[Action] = []
        for action in row:
            recompute = (action.stage, Kind.R, action.microbatch)
            if action.stage in stages and action.kind in _BACKWARD and action.part <= 0 and recompute not in present:
                index = len(new)
                while index and new[index - 1].kind is Kind.RECV_B and new[index - 1].stage == action.stage:
                    index -= 1
                new.insert(index, Action(*recompute))
            new.append(action)
        return new

    return program.with_rows(recomputed)
