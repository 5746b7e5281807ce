"""GPipe: all forward passes, then all backward passes (Huang et al. 2019, "GPipe", section 2.3)."""

from __future__ import annotations

from collections.abc import Sequence

from motet.schedule.generators.chain import backward_flags, chain_program, check_counts
from motet.schedule.program import Action, Kind, Program


def gpipe(num_stages: int, num_microbatches: int, *, has_backward: Sequence[bool] | None = None) -> Program:
    """A Program with stage s on rank s, without communication. Every stage holds the activations of all microbatches.

    has_backward: per stage; leading stages that are frozen may have none.
    With equal stage times the makespan is (num_microbatches + num_stages - 1) (forward + backward).
    Raises ArgumentError for counts below 1 and for flags that are not False ... True. O(actions).
    """
    check_counts("gpipe", num_stages=num_stages, num_microbatches=num_microbatches)
    rows = []
    for stage, backward in enumerate(backward_flags("gpipe", has_backward, num_stages)):
        row = [Action(stage, Kind.F, microbatch) for microbatch in range(num_microbatches)]
        if backward:
            row += [Action(stage, Kind.B, microbatch) for microbatch in range(num_microbatches)]
        rows.append(row)
    return chain_program(range(num_stages), rows, num_microbatches)
