"""When each action of a Program starts and ends: the readable truth, which the native engine equals to the bit.

An action starts when the one before it in its stream and all that `Dependencies` names have ended. A SEND and its RECV,
and a collective of all stages of a group, are one operation: it starts when all its actions can, and is as long as the
longest of them. Tensor-parallel communication in parts of its own begins when the part before it on its rank, of any
pass that has such parts, has ended: a rank does not communicate ahead for its next pass. Where communication does not
overlap, what stands between two actions of compute is posted together when the first has ended, and the second starts
when all of it has (as batched P2P does, so that a SEND and a RECV of two neighbours do not block each other).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence

from motet.core.errors import ArgumentError
from motet.schedule.dependencies import COLLECTIVES, Dependencies, partner
from motet.schedule.program import Action, Kind, Program
from motet.simulate.engine.streams import COMPUTE, TENSOR

NEVER = float("nan")


def run(
    program: Program, stream: Sequence[int], seconds: Sequence[float], overlap: bool
) -> tuple[list[float], list[float]]:
    """start_s and end_s of each action, rank by rank; NaN where it never runs. O(actions + dependencies).

    stream, seconds: of each action, rank by rank.
    """
    actions = [(rank, action) for rank, row in enumerate(program.actions) for action in row]
    of = [_operation(program, action) for _, action in actions]
    length: dict[Hashable, float] = defaultdict(float)
    for operation, took in zip(of, seconds):
        length[operation] = max(length[operation], took)
    needs: dict[Hashable, set[Hashable]] = {operation: set() for operation in of}
    operations = dict(zip([action for _, action in actions], of))
    dependencies = Dependencies(program)
    for action, operation in operations.items():
        for needed in dependencies.of(action):
            if needed not in operations:
                raise ArgumentError(f"{action} waits for {needed}, which the program does not have.")
            needs[operation].add(operations[needed])
    for first, second in (*_ordered([rank for rank, _ in actions], stream, overlap), *_in_turn(actions, stream)):
        needs[of[second]].add(of[first])
    start, end = _times(needs, length)
    return [start.get(operation, NEVER) for operation in of], [end.get(operation, NEVER) for operation in of]


def _operation(program: Program, action: Action) -> Hashable:
    """What tells an action from all that do not take place together with it."""
    if action.kind in (Kind.RECV_F, Kind.RECV_B):
        return partner(action)
    group = program.stages[action.stage].group
    if action.kind not in COLLECTIVES or group < 0:
        return action
    to = program.stages[action.peer].group if action.peer >= 0 else -1
    peer = action.peer if to < 0 else -1
    return (action.kind, group, to, peer, action.microbatch, action.part)


def _ordered(rank: Sequence[int], stream: Sequence[int], overlap: bool) -> Iterator[tuple[int, int]]:
    """Which action comes right after which, by number."""
    last: dict[tuple[int, int], int] = {}
    posted: dict[int, list[int]] = defaultdict(list)
    for number, (on, of) in enumerate(zip(rank, stream)):
        held = COMPUTE if of == TENSOR and not overlap else of
        if (on, held) in last:
            yield last[on, held], number
        last[on, held] = number
        if overlap:
            continue
        if held == COMPUTE:
            for communication in posted.pop(on, ()):
                yield communication, number
        else:
            posted[on].append(number)
            if (on, COMPUTE) in last:
                yield last[on, COMPUTE], number


def _in_turn(actions: Sequence[tuple[int, Action]], stream: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Which part of a pass each one that is tensor-parallel communication comes after, by number."""
    parted = {action.stage for (_, action), of in zip(actions, stream) if of == TENSOR}
    last: dict[int, int] = {}
    for number, ((rank, action), of) in enumerate(zip(actions, stream)):
        if action.stage in parted and of in (COMPUTE, TENSOR):
            if of == TENSOR and rank in last:
                yield last[rank], number
            last[rank] = number


def _times(
    needs: dict[Hashable, set[Hashable]], length: dict[Hashable, float]
) -> tuple[dict[Hashable, float], dict[Hashable, float]]:
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
