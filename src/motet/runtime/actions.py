"""What a step consists of: named actions in the order in which every rank takes them.

The order follows from which modules learn and from which phases have an item on any rank, both of which all ranks know.
It never depends on what one rank holds, so collectives meet each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from motet.core.workload import BACKBONE
from motet.schedule.program import Kind as ProgramKind


class Kind(StrEnum):
    FORWARD = "forward"
    EXCHANGE = "exchange"
    BACKWARD = "backward"
    EXCHANGE_GRADIENTS = "exchange gradients"

    @property
    def of_program(self) -> ProgramKind:
        """What a Program calls it."""
        return _OF_PROGRAM[self]


_OF_PROGRAM = {
    Kind.FORWARD: ProgramKind.F,
    Kind.EXCHANGE: ProgramKind.EXCHANGE_F,
    Kind.BACKWARD: ProgramKind.B,
    Kind.EXCHANGE_GRADIENTS: ProgramKind.EXCHANGE_B,
}


@dataclass(frozen=True)
class Action:
    """One action on one module; its text, e.g. "forward image", names it in the Timeline."""

    kind: Kind
    phase: str

    def __str__(self) -> str:
        return f"{self.kind} {self.phase}"


def microbatch_actions(encoders: Sequence[str], present: Collection[str], trainable: Collection[str]) -> list[Action]:
    """The actions of one microbatch: all forwards, then all backwards in reverse.

    encoders:  phases in the order in which they run. present: those that have an item on any rank, and the backbone
               where there is any example; what is not present is left out on all ranks.
    trainable: phases with a parameter that learns. Where nothing present learns there is no backward pass.
    """
    if BACKBONE not in present:
        return []
    running = [phase for phase in encoders if phase in present]
    learning = [phase for phase in running if phase in trainable]
    actions = []
    for phase in running:
        actions += [Action(Kind.FORWARD, phase), Action(Kind.EXCHANGE, phase)]
    actions.append(Action(Kind.FORWARD, BACKBONE))
    if learning or BACKBONE in trainable:
        actions.append(Action(Kind.BACKWARD, BACKBONE))
    for phase in reversed(learning):
        actions += [Action(Kind.EXCHANGE_GRADIENTS, phase), Action(Kind.BACKWARD, phase)]
    return actions
