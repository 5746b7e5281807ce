"""The pass that leaves out what a microbatch does not have: modules without an item, exchanges that move nothing.

What is absent is known to all ranks: it follows from the lengths and the Assignment of the whole microbatch, never from
what one rank holds. So all ranks leave out the same actions, and collectives meet each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from motet.core.errors import ArgumentError
from motet.schedule.program import EXCHANGES, Action, Kind, Program

_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W, Kind.R, Kind.SEND_B, Kind.RECV_B, Kind.EXCHANGE_B})


@dataclass(frozen=True)
class Presence:
    """What a microbatch has.

    modules:   those with an item on any rank; the backbone, where there is any example.
    exchanged: those of which any row leaves its rank.
    """

    modules: frozenset[str]
    exchanged: frozenset[str]


def without_absent(program: Program, present: Sequence[Presence], trainable: Collection[int]) -> Program:
    """Leave out passes of modules that a microbatch does not have, and exchanges of modules of which nothing moves.

    present: of each microbatch. trained: the stages in which anything learns (where rows are all alike, of the first).
    A backward pass stays where its stage learns, or a stage that feeds it has a backward pass and is present.
    Collectives of parameters and gradients follow from the passes that are left, and so are added afterwards: raises
    ArgumentError where there are any, and where `present` has not one entry a microbatch. O(actions + edges).
    """
    if len(present) != program.num_microbatches:
        raise ArgumentError(
            f"without_absent: present is of {len(present)} microbatches; the Program has {program.num_microbatches}."
        )
    stages = program.stages[: program.num_distinct_stages]
    sources: dict[int, list[int]] = {}
    for source, sink in program.edges:
        if sink < len(stages):
            sources.setdefault(sink, []).append(source)

    @cache
    def has_backward(stage: int, microbatch: int) -> bool:
        if stages[stage].module not in present[microbatch].modules:
            return False
        return stage in trainable or any(has_backward(source, microbatch) for source in sources.get(stage, ()))

    def takes_place(action: Action) -> bool:
        stage, kind, microbatch, _, peer = action
        if microbatch < 0:
            return True
        if kind in EXCHANGES and stages[stage].module not in present[microbatch].exchanged:
            return False
        if kind in _BACKWARD:
            return has_backward(stage, microbatch) and (peer < 0 or has_backward(peer, microbatch))
        ends = (stage, peer) if peer >= 0 else (stage,)
        return all(stages[end].module in present[microbatch].modules for end in ends)

    for row in program.distinct_rows:
        for action in row:
            if action.kind in (Kind.GATHER, Kind.GATHER_B, Kind.REDUCE):
                raise ArgumentError(
                    f"without_absent: {action} follows from passes; leave these out before it is added."
                )
    return program.with_rows(lambda row: filter(takes_place, row))
