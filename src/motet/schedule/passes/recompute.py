"""The pass that adds R: activations that are not kept are computed again before backward."""

from __future__ import annotations

from collections.abc import Collection

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, Kind, Program, Row

_BACKWARD = (Kind.B, Kind.I)


def add_recompute(program: Program, stages: Collection[int]) -> Program:
    """Put R, the forward pass again, before every backward pass of the given stages: a rank recomputes while it waits
    for the gradient, so R stands before the RECV of it. What has an R is left as it is.

    Where rows are all alike, stages are those of the first row. FSDP recomputes unit by unit inside backward, between
    the unit's gather and its gradients: Programs of data parallelism have no R, and B is priced with it.
    Raises ArgumentError for a stage that the Program does not have, or that has no backward pass. O(actions).
    """
    served = {action.stage for row in program.distinct_rows for action in row if action.kind in _BACKWARD}
    for stage in stages:
        if stage not in served:
            raise ArgumentError(f"add_recompute: stage {stage} has no backward pass that recomputation could serve.")
    present = {action[:3] for row in program.distinct_rows for action in row if action.kind is Kind.R}

    def recomputed(row: Row) -> list[Action]:
        new: list[Action] = []
        for action in row:
            again = (action.stage, Kind.R, action.microbatch)
            if action.stage in stages and action.kind in _BACKWARD and action.part <= 0 and again not in present:
                at = len(new)
                while at and new[at - 1].kind is Kind.RECV_B and new[at - 1].stage == action.stage:
                    at -= 1
                new.insert(at, Action(*again))
            new.append(action)
        return new

    return program.with_rows(recomputed)
