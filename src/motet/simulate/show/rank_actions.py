"""The actions that one rank executes in a step, with predicted times: `motet simulate PLAN --actions RANK`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.schedule import Action, executed_program, parse_action
from motet.schedule.coordinates import coordinates
from motet.schedule.layout import Layout
from motet.simulate.predict.prediction import Prediction


def rank_actions(plan: Plan, prediction: Prediction, rank: int) -> Iterator[str]:
    """A heading, then a line for each action of a rank, in the order of the runtime's executor: the action as text, its
    predicted start and end in milliseconds, and its module.

    rank: of the cluster. Times are those of its program rank in the island of the prediction. An action that is
          simulated in parts (under FSDP) lasts from its first part to its last.
    Raises UserError for a rank that the Plan does not use.
    """
    program_rank = program_rank_of(plan, rank)
    program = prediction.program or executed_program(plan, prediction.present)
    times = _times(prediction, program_rank)
    row = program.actions[program_rank]
    width = max(map(len, map(str, row)), default=0)
    yield f"# rank {rank}, {len(row)} actions: start and end in ms, module"
    for action in row:
        start_s, end_s = times[action]
        module = program.stages[action.stage].module
        yield f"{action!s:{width}}  {1e3 * start_s:12.4f}  {1e3 * end_s:12.4f}  {module}"


def program_rank_of(plan: Plan, rank: int) -> int:
    """The program rank of a rank of the cluster. Raises UserError for a rank that the Plan does not use."""
    try:
        return coordinates(Layout(plan), rank).program_rank
    except UserError as error:
        raise UserError(f"--actions {rank}: {error}") from None


def _times(prediction: Prediction, program_rank: int) -> dict[Action, tuple[float, float]]:
    """(start_s, end_s) of each action of a program rank. A part of an action also counts for the whole action."""
    timeline, times = prediction.timeline, dict[Action, tuple[float, float]]()
    for span in np.flatnonzero(timeline.rank == program_rank).tolist():
        action = parse_action(timeline.action[span])
        start_s, end_s = float(timeline.start_s[span]), float(timeline.end_s[span])
        for known in {action, action._replace(part=-1)}:
            first_s, last_s = times.get(known, (start_s, end_s))
            times[known] = min(first_s, start_s), max(last_s, end_s)
    return times
