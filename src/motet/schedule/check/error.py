"""What is raised for a Program that cannot be executed: a sentence, and the place in the grid of its actions."""

from __future__ import annotations

from motet.core.errors import UserError
from motet.schedule.program import Program


class ScheduleError(UserError):
    """sentence: what is wrong, where. grid: the ranks around, with the place marked. Its text is both, in this order.

    index: of the action in its rank's list; the length of that list is its end.
    """

    def __init__(self, sentence: str, program: Program, rank: int, index: int) -> None:
        self.sentence = sentence
        self.grid = marked_grid(program, rank, index)
        super().__init__(f"{sentence}\n{self.grid}")


def marked_grid(program: Program, rank: int, index: int, *, num_ranks: int = 2, num_actions: int = 8) -> str:
    """The actions around one of a rank, which is marked as >>2B3<<, and those of the ranks beside it.

    num_ranks, num_actions: how many to either side.
    """
    lines = []
    width = len(str(max(program.num_ranks - 1, 0)))
    for shown in range(max(rank - num_ranks, 0), min(rank + num_ranks + 1, program.num_ranks)):
        row = program.actions[shown]
        first, stop = max(index - num_actions, 0), index + num_actions + 1
        names = list(map(str, row[first:stop]))
        if shown == rank:
            names = names if index < len(row) else [*names, "end"]
            names[index - first] = f">>{names[index - first]}<<"
        line = " ".join(["..."] * (first > 0) + names + ["..."] * (stop < len(row)))
        lines.append(f"rank {shown:>{width}}: {line}")
    return "\n".join(lines)
