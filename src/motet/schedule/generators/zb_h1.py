"""ZB-H1: 1F1B with backward split into I and W, and with W deferred into the cool-down (Qi et al. 2024, "Zero Bubble
Pipeline Parallelism", section 2.1, Figure 2).
"""

from __future__ import annotations

from motet.schedule.generators.chain import chain_program, check_counts
from motet.schedule.program import Action, Kind, Program


def zb_h1(num_stages: int, num_microbatches: int) -> Program:
    """A Program with stage s on rank s, without communication. Stage s runs W of a microbatch s microbatches after I.

    Every stage holds the activations of at most min(num_microbatches, num_stages) microbatches, as 1F1B's first stage
    does. With equal stage times and num_microbatches >= num_stages, the bubble of a rank is
    (num_stages - 1) max(F, F + I - W): the last stage waits (num_stages - 1) F at first.
    Raises ArgumentError for counts below 1. O(actions).
    """
    check_counts("zb_h1", num_stages=num_stages, num_microbatches=num_microbatches)
    rows = []
    for stage in range(num_stages):
        num_ahead = min(num_stages - stage - 1, num_microbatches)
        row = [Action(stage, Kind.F, microbatch) for microbatch in range(num_ahead)]
        for microbatch in range(num_microbatches):
            if microbatch + num_ahead < num_microbatches:
                row.append(Action(stage, Kind.F, microbatch + num_ahead))
            row.append(Action(stage, Kind.I, microbatch))
            if microbatch >= stage:
                row.append(Action(stage, Kind.W, microbatch - stage))
        num_done = max(num_microbatches - stage, 0)
        row += [Action(stage, Kind.W, microbatch) for microbatch in range(num_done, num_microbatches)]
        rows.append(row)
    return chain_program(range(num_stages), rows, num_microbatches)
