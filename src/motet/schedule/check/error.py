"""The error for a Program that cannot be executed: a sentence, and the grid of actions with the wrong one marked."""

from __future__ import annotations

from motet.core.errors import UserError
from motet.schedule.program import Program


class ScheduleError(UserError):
    """A Program cannot be executed. The text of the error is `sentence`, then `grid`.

    sentence: what is wrong, and where.
    grid:     the rows of the ranks around, with the wrong action marked.
    index:    the index of that action in its rank's row; the length of the row stands for its end.

    Example:
        >>> from motet.schedule import loads, validate
        >>> validate(loads('microbatches 1\\nstage 0 rank 0 "backbone"\\nrank 0: 0B0 0F0\\n'))
        Traceback (most recent call last):
        ...
        motet.schedule.check.error.ScheduleError: 0B0 on rank 0 stands before 0F0, which it needs.
        rank 0: >>0B0<< 0F0
    """

    def __init__(self, sentence: str, program: Program, rank: int, index: int) -> None:
        self.sentence = sentence
        self.grid = marked_grid(program, rank, index)
        super().__init__(f"{sentence}\n{self.grid}")


def marked_grid(program: Program, rank: int, index: int, *, num_ranks: int = 2, num_actions: int = 8) -> str:
    """The actions around an action of a rank, which is marked as >>2B3<<, and those of neighbouring ranks.

    num_ranks, num_actions: how many to either side.
    """
    lines = []
    width = len(str(max(program.num_ranks - 1, 0)))
    for neighbour in range(max(rank - num_ranks, 0), min(rank + num_ranks + 1, program.num_ranks)):
        row = program.actions[neighbour]
        first, stop = max(index - num_actions, 0), index + num_actions + 1
        names = list(map(str, row[first:stop]))
        if neighbour == rank:
            names = names if index < len(row) else [*names, "end"]
            names[index - first] = f">>{names[index - first]}<<"
        line = " ".join(["..."] * (first > 0) + names + ["..."] * (stop < len(row)))
        lines.append(f"rank {neighbour:>{width}}: {line}")
    return "\n".join(lines)
