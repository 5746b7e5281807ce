"""1F1B: after a warm-up, every forward pass is followed by a backward pass (Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters", section 2.2.1; there PipeDream-Flush).
"""

from __future__ import annotations

from collections.abc import Sequence

from motet.schedule.generators.chain import backward_flags, chain_program, check_counts
from motet.schedule.program import Action, Kind, Program


def one_f_one_b(num_stages: int, num_microbatches: int, *, has_backward: Sequence[bool] | None = None) -> Program:
    """A Program with stage s on rank s, without communication.

    Stage s holds the activations of min(num_microbatches, num_stages - s) microbatches.

    has_backward: per stage; leading stages that are frozen may have none.
    With equal stage times the makespan is GPipe's, (num_microbatches + num_stages - 1) (forward + backward).
    Raises ArgumentError for counts below 1 and for flags that are not False ... True. O(actions).
    """
    check_counts("one_f_one_b", num_stages=num_stages, num_microbatches=num_microbatches)
    rows = []
    for stage, backward in enumerate(backward_flags("one_f_one_b", has_backward, num_stages)):
        num_ahead = min(num_stages - stage - 1, num_microbatches) if backward else num_microbatches
        rows.append(alternate(stage, num_ahead, num_microbatches, backward))
    return chain_program(range(num_stages), rows, num_microbatches)


def alternate(stage: int, num_ahead: int, num_microbatches: int, backward: bool = True) -> list[Action]:
    """`num_ahead` forward passes, then one forward and one backward pass in turn, then the remaining backward passes.

    With backward False, the forward passes alone.
    """
    row = [Action(stage, Kind.F, microbatch) for microbatch in range(num_ahead)]
    for microbatch in range(num_microbatches if backward else 0):
        if microbatch + num_ahead < num_microbatches:
            row.append(Action(stage, Kind.F, microbatch + num_ahead))
        row.append(Action(stage, Kind.B, microbatch))
    return row
