"""The pass that leaves out what a microbatch does not have: modules without an item, exchanges that move nothing.

All ranks leave out the same actions, so their collectives match: what is absent follows from the lengths and the
Assignment of the whole microbatch, never from what one rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

from motet.core.errors import ArgumentError
from motet.core.workload import BACKBONE
from motet.schedule.program import EXCHANGES, Action, Kind, Program

_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W, Kind.R, Kind.SEND_B, Kind.RECV_B, Kind.EXCHANGE_B})


@dataclass(frozen=True)
class Presence:
    """The modules that a microbatch has.

    modules:   modules with an item on any rank. The backbone is one if there is any example.
    exchanged: modules with an output row that leaves its rank; generators to which such a row goes.

    Example:
        >>> from motet.schedule import data_parallel, without_absent
        >>> program = data_parallel({"image": True, "backbone": True}, num_ranks=1, num_microbatches=1)
        >>> text_only = Presence(modules=frozenset({"backbone"}), exchanged=frozenset())
        >>> print(without_absent(program, [text_only], trainable=[0, 1]))
        rank 0: 1F0 1B0 1NORM 1STEP
    """

    modules: frozenset[str]
    exchanged: frozenset[str]


def without_absent(program: Program, present: Sequence[Presence], trainable: Collection[int]) -> Program:
    """Leave out passes of absent modules, and exchanges that move nothing.

    present:   one entry a microbatch.
    trainable: the stages of which any parameter is updated; of the first row if rows are `AlikeRows`.
    A backward pass stays if its stage is present, and is trainable or fed by a stage whose backward pass stays.
    Collectives of parameters and gradients depend on the passes that remain, so they must be added later: raises
    ArgumentError for a Program that has any, and if `present` has not one entry a microbatch. O(actions + edges).
    """
    if len(present) != program.num_microbatches:
        raise ArgumentError(
            f"without_absent: present is of {len(present)} microbatches; the Program has {program.num_microbatches}."
        )
    stages = program.stages[: program.num_distinct_stages]
    sources: dict[int, list[int]] = {}
    for source, sink in program.distinct_edges:
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
        if kind in EXCHANGES:
            # The backbone gives each generator other rows: what says whether they move is the generator.
            end = peer if stages[stage].module == BACKBONE else stage
            if stages[end].module not in present[microbatch].exchanged:
                return False
        if kind in _BACKWARD:
            return has_backward(stage, microbatch) and (peer < 0 or has_backward(peer, microbatch))
        ends = (stage, peer) if peer >= 0 else (stage,)
        return all(stages[end].module in present[microbatch].modules for end in ends)

    for row in program.distinct_rows:
        for action in row:
            if action.kind in (Kind.GATHER, Kind.GATHER_B, Kind.REDUCE):
                raise ArgumentError(
                    f"without_absent: the Program has {action}; leave out passes before collectives are added."
                )
    return program.with_rows(lambda row: filter(takes_place, row))
