"""What one rank executes in a step, action by action, with predicted times: `motet simulate PLAN --actions RANK`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from motet.core.errors import UserError
from motet.core.plan import Plan
from motet.schedule import Action, executed, parse_action
from motet.schedule.coordinates import coordinates
from motet.schedule.layout import Layout
from motet.simulate.predict.prediction import Prediction


def rank_actions(plan: Plan, prediction: Prediction, rank: int) -> Iterator[str]:
    """A heading, then a line an action, in the order in which the runtime's executor walks the row of a rank: the
    action as in the text of a Program, the start and end that are predicted for it in milliseconds, and its module.

    rank: of the cluster. Times are of its like in the island that the prediction shows. An action that is simulated in
    parts (a module under FSDP, unit by unit) lasts from the first to the last.
    Raises UserError for a rank that the Plan does not use.
    """
    program_rank = program_rank_of(plan, rank)
    program = executed(plan, prediction.present)
    times = _times(prediction, program_rank)
    row = program.actions[program_rank]
    width = max(map(len, map(str, row)), default=0)
    yield f"# rank {rank}, {len(row)} actions: start and end in ms, module"
    for action in row:
        start_s, end_s = times[action]
        module = program.stages[action.stage].module
        yield f"{action!s:{width}}  {1e3 * start_s:12.4f}  {1e3 * end_s:12.4f}  {module}"


def program_rank_of(plan: Plan, rank: int) -> int:
    """The program rank whose row a rank of the cluster walks. Raises UserError for one that the Plan does not use."""
    try:
        return coordinates(Layout(plan), rank).program_rank
    except UserError as error:
        raise UserError(f"--actions {rank}: {error}") from None


def _times(prediction: Prediction, program_rank: int) -> dict[Action, tuple[float, float]]:
    """Start and end of the spans of a program rank by action, each also as a part of the whole that it belongs to."""
    timeline, times = prediction.timeline, dict[Action, tuple[float, float]]()
    for span in np.flatnonzero(timeline.rank == program_rank).tolist():
        action = parse_action(timeline.action[span])
        start_s, end_s = float(timeline.start_s[span]), float(timeline.end_s[span])
        for known in {action, action._replace(part=-1)}:
            first_s, last_s = times.get(known, (start_s, end_s))
            times[known] = min(first_s, start_s), max(last_s, end_s)
    return times
