"""The pass that adds a SEND and a RECV to edges between ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np

from motet.core.errors import ArgumentError
from motet.schedule.check.dry_run import NOMINAL_DURATIONS, DryRun, dry_run, nominal_share
from motet.schedule.dependencies import PARTNERS
from motet.schedule.program import EXCHANGES, Action, Kind, Program, Row

try:
    _native: ModuleType | None = import_module("motet.schedule._communication")
except ModuleNotFoundError:  # Any other ImportError is a broken core, and must not be hidden.
    _native = None

_KINDS = tuple(Kind)


class _Transfer(NamedTuple):
    """producer: the last part of the pass whose output is sent. consumer: the first part of the pass that needs it."""

    send: Action
    receive: Action
    producer: Action
    consumer: Action


def add_communication(program: Program, *, blocking: bool = False, holds_up: bool = False) -> Program:
    """Give every edge between ranks a SEND and a RECV for each microbatch, in forward and, if it exists, in backward.

    A RECV stands right before its consumer, a SEND right after its producer or later. All streams of all ranks have
    their transfers in one order, by the start of the consumer in a dry run; a SEND stands later where this order
    demands it. So the sends and receives of two ranks match. They cannot deadlock: the first transfer that has not
    taken place is at the head of both its streams, and what its producer needs came before it. This holds if a SEND
    does not hold up the compute of its rank (`dry_run` describes streams).

    blocking: for ranks that do nothing else while they send or receive. Both ends of a transfer then stand where the
              producer ends in a common order of all actions. A receiver may wait earlier than it needs to.
    holds_up: for ranks whose collectives hold up compute, and whose SENDs do not: they are ordered by a dry run in
              which that is so. What stands before a SEND then ends, in that dry run, before the consumer starts.

    Existing SEND and RECV are placed anew. Edges with an EXCHANGE get none.
    Raises ArgumentError for a Program that deadlocks without them. O(actions log actions).
    """
    rows = _native_rows(program, blocking, holds_up)
    if rows is None:
        return place_messages(program, blocking=blocking, holds_up=holds_up)
    return replace(program, actions=rows)


def _native_rows(program: Program, blocking: bool, holds_up: bool) -> tuple[Row, ...] | None:
    """The rows from the native core: those of `place_messages`, 10 times as fast. None where it is not built, for
    stages that meet, of which it knows nothing, and for a Program that cannot run or has numbers beyond int32: the
    reference says why.
    """
    if _native is None or any(stage.meets for stage in program.stages):
        return None
    edges = np.array(program.edges, dtype=np.int32).reshape(-1, 2)
    try:
        rows: tuple[Row, ...] | None = _native.communicate(
            tuple(program.actions),
            _KINDS,
            Action,
            np.array([stage.rank for stage in program.stages], dtype=np.int32),
            np.array([stage.group for stage in program.stages], dtype=np.int32),
            np.array([nominal_share(stage) for stage in program.stages], dtype=np.float64),
            np.array([NOMINAL_DURATIONS.get(kind, 0.0) for kind in _KINDS]),
            edges[:, 0].copy(),
            edges[:, 1].copy(),
            program.num_microbatches,
            blocking or holds_up,
            blocking,
        )
    except (ValueError, OverflowError):  # a number that no int32 holds
        return None
    return rows


def place_messages(program: Program, *, blocking: bool = False, holds_up: bool = False) -> Program:
    """What `add_communication` returns, in Python: the reference of the native core."""
    bare = replace(program, actions=tuple(tuple(a for a in row if a.kind not in PARTNERS) for row in program.actions))
    run = dry_run(bare, blocking=blocking, holds_up=holds_up)
    if run.cycle:
        raise ArgumentError(f"add_communication: {run.cycle[0]} can never start, whatever is sent; see validate().")
    inserted: list[list[tuple[int, int, Action]]] = [[] for _ in bare.actions]
    for action, index, turn in (_at_producers if blocking else _at_both_passes)(bare, run):
        inserted[bare.stages[action.stage].rank].append((index, turn, action))
    rows = []
    for row, new in zip(bare.actions, inserted):
        rows.append(_merged(row, sorted(new, key=lambda entry: entry[:2])))
    return replace(bare, actions=tuple(rows))


def _at_both_passes(program: Program, run: DryRun) -> Iterator[tuple[Action, int, int]]:
    """(SEND or RECV, index of the action in its row before which it stands, sort key among those at that index)."""
    index = {action: index for row in program.actions for index, action in enumerate(row)}
    sent = [0] * program.num_ranks  # where the last SEND of each rank stands
    transfers = sorted(_transfers(program), key=lambda transfer: (run.start[transfer.consumer], transfer.send))
    for turn, (send, receive, producer, consumer) in enumerate(transfers):
        rank = program.stages[send.stage].rank
        sent[rank] = max(sent[rank], index[producer] + 1)
        yield send, sent[rank], turn - len(transfers)  # before a RECV at the same index
        yield receive, index[consumer], turn


def _at_producers(program: Program, run: DryRun) -> Iterator[tuple[Action, int, int]]:
    """As `_at_both_passes`, for ranks that block: both ends stand before all that starts after the producer's end."""
    starts = [[run.start[action] for action in row] for row in program.actions]
    transfers = sorted(_transfers(program), key=lambda transfer: (run.end[transfer.producer], transfer.send))
    for turn, (send, receive, producer, _) in enumerate(transfers):
        for end in (send, receive):
            yield end, bisect_left(starts[program.stages[end.stage].rank], run.end[producer]), turn


def _transfers(program: Program) -> Iterator[_Transfer]:
    """The transfers that the Program's edges need, in no particular order."""
    first: dict[tuple[int, Kind, int], Action] = {}
    last: dict[tuple[int, Kind, int], Action] = {}
    exchanges = set()
    for row in program.actions:
        for action in row:
            stage, kind, microbatch, _, _ = action
            first.setdefault((stage, kind, microbatch), action)
            last[stage, kind, microbatch] = action
            if kind in EXCHANGES:
                exchanges.add(action)

    def is_exchanged(kind: Kind, source: int, sink: int, microbatch: int) -> bool:
        return bool(exchanges) and Action(source, kind, microbatch, peer=sink) in exchanges

    def end(ends: dict[tuple[int, Kind, int], Action], stage: int, microbatch: int) -> Action | None:
        return ends.get((stage, Kind.B, microbatch)) or ends.get((stage, Kind.I, microbatch))

    for source, sink in program.edges:
        if program.stages[source].rank == program.stages[sink].rank:
            continue
        for microbatch in range(program.num_microbatches):
            made, taken = last.get((source, Kind.F, microbatch)), first.get((sink, Kind.F, microbatch))
            if made and taken and not is_exchanged(Kind.EXCHANGE_F, source, sink, microbatch):
                send = Action(source, Kind.SEND_F, microbatch, peer=sink)
                yield _Transfer(send, Action(sink, Kind.RECV_F, microbatch, peer=source), made, taken)
            made, taken = end(last, sink, microbatch), end(first, source, microbatch)
            if made and taken and not is_exchanged(Kind.EXCHANGE_B, source, sink, microbatch):
                send = Action(sink, Kind.SEND_B, microbatch, peer=source)
                yield _Transfer(send, Action(source, Kind.RECV_B, microbatch, peer=sink), made, taken)


def _merged(row: tuple[Action, ...], inserted: list[tuple[int, int, Action]]) -> tuple[Action, ...]:
    """A row with new actions. inserted: (index before which it stands, sort key, action), sorted."""
    merged: list[Action] = []
    done = 0
    for index, _, action in inserted:
        merged += row[done:index]
        merged.append(action)
        done = index
    return tuple(merged) + row[done:]
