"""When each action of a Program starts and ends: the readable engine. The native engine gives the same, to the bit.

1. An action starts when the action before it in its stream and all its `Dependencies` have ended.
2. A SEND and its RECV are one operation, and so is a collective on all stages of a group. An operation starts when all
   its actions can, and takes as long as the longest of them.
3. Tensor-parallel communication in parts of its own starts after the part before it on its rank, of any pass that
   begins with such a part: a rank does not communicate ahead for its next pass.
4. Without overlap, the collectives between two compute actions of a row are posted together when the first ends, and
   the second starts when all of them have ended. A SEND holds nothing up: who sends goes on with its row.
5. Passes that replicas run together are one operation, too, also if they are in different copies of the Program: but
   for what each of them runs before it waits for others, and behind what it runs with them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

from motet.core.errors import ArgumentError
from motet.schedule.dependencies import COLLECTIVES, Dependencies, partner
from motet.schedule.program import MEETING_KINDS, Action, Kind, Program
from motet.simulate.engine.streams import COLLECTIVE, COMPUTE, TENSOR

NEVER = float("nan")


Together = Sequence[Sequence[Sequence[int]]]
"""By copy, stage and microbatch: `meetings.MetPasses.number`."""


def run(
    program: Program,
    stream: Sequence[int],
    seconds: Sequence[float],
    overlap: bool,
    together: Together = (),
    own: tuple[Sequence[float], Sequence[float]] = ((), ()),
) -> tuple[list[float], list[float]]:
    """start_s and end_s of each action, rank by rank; NaN for an action that never runs. O(actions + dependencies).

    Of a pass that is run together there are three: before, together and behind.

    stream, seconds: of each action, rank by rank, copy by copy.
    together: by copy; (): there is one copy, in which stages run passes alone.
    own:      seconds of each action before it waits for others, and behind what it runs with them.
    """
    copies = range(max(len(together), 1))
    of_ranks = [(rank, action) for rank, row in enumerate(program.actions) for action in row]
    actions = [(copy, action) for copy in copies for _, action in of_ranks]
    ranks = [copy * program.num_ranks + rank for copy in copies for rank, _ in of_ranks]
    operations = [_operations(program, *each, together) for each in actions]
    length: dict[Hashable, float] = defaultdict(float)
    needs: dict[Hashable, set[Hashable]] = {one: set() for each in operations for one in each}
    for number, (each, action_s) in enumerate(zip(operations, seconds)):
        of_each = [action_s]
        if len(each) > 1:
            before_s, behind_s = (of_side[number] for of_side in own)
            of_each = [before_s, action_s - (before_s + behind_s), behind_s]
        for operation, operation_s in zip(each, of_each, strict=True):
            length[operation] = max(length[operation], operation_s)
        for first, second in pairwise(each):
            needs[second].add(first)
    operations_of = dict(zip(actions, operations))
    dependencies = Dependencies(program)
    for (copy, action), each in operations_of.items():
        for needed in dependencies.of(action):
            if (copy, needed) not in operations_of:
                raise ArgumentError(f"{action} waits for {needed}, which the program does not have.")
            needs[each[0]].add(operations_of[copy, needed][-1])
    for before, after in (*_ordered(ranks, stream, overlap), *_in_turn(ranks, actions, stream)):
        needs[operations[after][0]].add(operations[before][-1])
    start, end = _times(needs, length)
    rows = [one for each in operations for one in each]
    return [start.get(one, NEVER) for one in rows], [end.get(one, NEVER) for one in rows]


def _operations(program: Program, copy: int, action: Action, together: Together) -> list[Hashable]:
    """The keys of an action's operations, in turn: equal for actions that take place together."""
    if action.kind in (Kind.RECV_F, Kind.RECV_B):
        return [(copy, partner(action))]
    if together and action.kind in MEETING_KINDS and (number := together[copy][action.stage][action.microbatch]) >= 0:
        met = number, action.kind, action.microbatch, action.part
        return [(copy, action, "before"), met, (copy, action, "behind")]
    group = program.stages[action.stage].group
    if action.kind not in COLLECTIVES or group < 0:
        return [(copy, action)]
    peer_group = program.stages[action.peer].group if action.peer >= 0 else -1
    peer = action.peer if peer_group < 0 else -1
    return [(copy, (action.kind, group, peer_group, peer, action.microbatch, action.part))]


def _ordered(rank: Sequence[int], stream: Sequence[int], overlap: bool) -> Iterator[tuple[int, int]]:
    """(first, second): numbers of actions that follow each other by rules 1 (streams) and 4."""
    last: dict[tuple[int, int], int] = {}
    posted: dict[int, list[int]] = defaultdict(list)
    for number, (own_rank, own_stream) in enumerate(zip(rank, stream)):
        held = COMPUTE if own_stream == TENSOR and not overlap else own_stream
        if (own_rank, held) in last:
            yield last[own_rank, held], number
        last[own_rank, held] = number
        if overlap:
            continue
        if held == COMPUTE:
            for communication in posted.pop(own_rank, ()):
                yield communication, number
        elif held == COLLECTIVE:
            posted[own_rank].append(number)
            if (own_rank, COMPUTE) in last:
                yield last[own_rank, COMPUTE], number


def _in_turn(
    ranks: Sequence[int], actions: Sequence[tuple[int, Action]], stream: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(first, second): numbers of actions that follow each other by rule 3."""
    stages = {a.stage for (_, a), own_stream in zip(actions, stream) if own_stream == TENSOR and a.part == 0}
    last: dict[int, int] = {}
    for number, (rank, (_, action), own_stream) in enumerate(zip(ranks, actions, stream)):
        if action.stage in stages and own_stream in (COMPUTE, TENSOR):
            if own_stream == TENSOR and rank in last:
                yield last[rank], number
            last[rank] = number


def _times(
    needs: dict[Hashable, set[Hashable]], length: dict[Hashable, float]
) -> tuple[dict[Hashable, float], dict[Hashable, float]]:
    """Start and end of every operation that can run. needs: what each waits for."""
    needed_by: dict[Hashable, list[Hashable]] = defaultdict(list)
    missing = {operation: len(needed) for operation, needed in needs.items()}
    for operation, needed in needs.items():
        for one in needed:
            needed_by[one].append(operation)
    ready = deque(operation for operation, count in missing.items() if count == 0)
    start: dict[Hashable, float] = {}
    end: dict[Hashable, float] = {}
    while ready:
        operation = ready.popleft()
        start[operation] = max((end[one] for one in needs[operation]), default=0.0)
        end[operation] = start[operation] + length[operation]
        for waiting in needed_by[operation]:
            missing[waiting] -= 1
            if missing[waiting] == 0:
                ready.append(waiting)
    return start, end
