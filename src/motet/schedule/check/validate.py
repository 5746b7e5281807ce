"""Proof that a Program can be executed and computes what training needs, or the place where it cannot.

What is proven: each stage makes each of its passes once, in parts that are complete; all data that crosses ranks is
sent and received, and the sends and receives of two ranks match in order; all stages of a group enter the same
collectives in the same order; what an action needs of its own rank stands before it in the list; a dry run by streams
comes to its end (`dry_run` says what that means); activations fit into memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from numpy.typing import ArrayLike

from motet.core.errors import ArgumentError
from motet.schedule.check.dry_run import dry_run, event_of
from motet.schedule.check.error import ScheduleError
from motet.schedule.check.memory import held_table, levels
from motet.schedule.dependencies import COLLECTIVES, PARTNERS, Dependencies, partner
from motet.schedule.program import EXCHANGES, FROM_SOURCE, WHOLE_RANK, Action, Kind, Program

_WITHOUT_MICROBATCH = (Kind.GATHER, Kind.GATHER_B, Kind.REDUCE, Kind.NORM, Kind.STEP)
_NUM_SHOWN = 6
"""Actions of a deadlock that its sentence names."""


def validate(
    program: Program,
    *,
    held_bytes: ArrayLike | None = None,
    cap_bytes: float | Sequence[float] | None = None,
    blocking: bool = False,
) -> None:
    """Prove that a Program can be executed; one without any SEND or RECV is taken as not having been given them yet.

    held_bytes: what a forward pass leaves for backward, as of `high_water`. cap_bytes: what any rank, or each, may hold
                of it at a time. Both or neither.
    blocking:   prove it for ranks that do nothing else while they communicate.
    Raises ScheduleError for a wrong Program, ArgumentError for wrong arguments. O(actions).
    """
    if (held_bytes is None) != (cap_bytes is None):
        raise ArgumentError("validate: held_bytes and cap_bytes belong together; give both or neither.")
    proof = _Proof(program)
    proof.check_stages()
    proof.check_actions()
    proof.check_passes()
    proof.check_edges()
    proof.check_transfers()
    proof.check_collectives()
    proof.check_order()
    proof.check_deadlock(blocking)
    if held_bytes is not None and cap_bytes is not None:
        _check_memory(program, held_bytes, cap_bytes)


def _check_memory(program: Program, held_bytes: ArrayLike, cap_bytes: float | Sequence[float]) -> None:
    held = held_table(program, held_bytes)
    if np.shape(cap_bytes) not in ((), (program.num_ranks,)):
        raise ArgumentError(f"cap_bytes has shape {np.shape(cap_bytes)}; it must be one number, or one a rank.")
    caps = np.broadcast_to(np.asarray(cap_bytes, dtype=np.float64), program.num_ranks).tolist()
    for rank, cap in enumerate(caps):
        for index, level in enumerate(levels(program, rank, held)):
            if level > cap:
                sentence = (
                    f"With {program.actions[rank][index]}, rank {rank} holds {level:.0f} bytes of activations; "
                    f"it may hold {cap:.0f}."
                )
                raise ScheduleError(sentence, program, rank, index)


class _Proof:
    """The checks of one Program; each relies on those before it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.place: dict[Action, tuple[int, int]] = {}
        self.parts: dict[tuple[int, Kind, int], list[int]] = {}
        self.has_backward = [False] * program.num_stages

    def refuse(self, sentence: str, *places: Action) -> ScheduleError:
        """The error, at the first of these actions that is there, or else at the end of the rank of their stage."""
        for action in places:
            if action in self.place:
                return ScheduleError(sentence, self.program, *self.place[action])
        rank = self.program.stages[places[0].stage].rank
        return ScheduleError(sentence, self.program, rank, len(self.program.actions[rank]))

    def check_stages(self) -> None:
        num_ranks, num_stages = self.program.num_ranks, self.program.num_stages
        for number, stage in enumerate(self.program.stages):
            if not 0 <= stage.rank < num_ranks:
                sentence = f"Stage {number} is on rank {stage.rank}; there are {num_ranks} ranks, from 0."
                raise ScheduleError(sentence, self.program, 0, 0)
            if not set(stage.microbatches) <= set(range(self.program.num_microbatches)):
                num_microbatches = self.program.num_microbatches
                sentence = f"Stage {number} takes microbatches {stage.microbatches}; there are {num_microbatches}."
                raise ScheduleError(sentence, self.program, stage.rank, 0)
        for (source, sink), count in Counter(self.program.edges).items():
            if count > 1 or not (0 <= source < num_stages and 0 <= sink < num_stages):
                found = f"is there {count} times" if count > 1 else "names a stage that the Program does not have"
                sentence = f"Edge {source}>{sink} {found}; an edge joins two of the {num_stages} stages, once."
                raise ScheduleError(sentence, self.program, 0, 0)

    def check_actions(self) -> None:
        edges = set(self.program.edges)
        for rank, row in enumerate(self.program.actions):
            for index, action in enumerate(row):
                if wrong := self._wrong_in(action, rank, edges):
                    raise ScheduleError(f"{action} on rank {rank} {wrong}.", self.program, rank, index)
                self.place[action] = (rank, index)
                self.parts.setdefault(action[:3], []).append(action.part)
                self.has_backward[action.stage] |= action.kind in (Kind.B, Kind.I, Kind.W)

    def _wrong_in(self, action: Action, rank: int, edges: set[tuple[int, int]]) -> str:
        stage, kind, microbatch, part, peer = action
        if not 0 <= stage < self.program.num_stages:
            return f"is of a stage that the Program does not have; it has {self.program.num_stages}"
        if self.program.stages[stage].rank != rank:
            return f"is out of place: stage {stage} is on rank {self.program.stages[stage].rank}"
        if action in self.place:
            return "is there twice; once is enough"
        if kind in WHOLE_RANK and any(
            other.kind is kind for other in self.program.actions[rank] if other in self.place
        ):
            return f"is a second {kind} of its rank; one is for all its stages"
        if not (0 <= microbatch < self.program.num_microbatches or (microbatch == -1 and kind in _WITHOUT_MICROBATCH)):
            return f"is of a microbatch that the Program does not have; it has {self.program.num_microbatches}"
        if kind not in PARTNERS and kind not in EXCHANGES:
            return "" if peer == -1 else "has a peer, which only transfers and exchanges have"
        if ((stage, peer) if kind in FROM_SOURCE else (peer, stage)) not in edges:
            return f"is a transfer along an edge that the Program does not have, between stages {stage} and {peer}"
        if kind in PARTNERS and self.program.stages[peer].rank == rank:
            return "is a transfer from a rank to itself, where none is needed"
        return "" if part == -1 else "is a part, which transfers and exchanges are never in"

    def check_passes(self) -> None:
        for source, sink in self.program.edges:
            if self.has_backward[source] and not self.has_backward[sink]:
                sentence = (
                    f"Stage {source} has a backward pass, but gets no gradient from stage {sink}, which it feeds."
                )
                raise self.refuse(sentence, Action(source, Kind.B, 0), Action(source, Kind.I, 0))
        for stage, backward in enumerate(self.has_backward):
            for microbatch in range(self.program.num_microbatches):
                taken = self.program.stages[stage].takes(microbatch)
                self._check_pass(Action(stage, Kind.F, microbatch), taken)
                split = (stage, Kind.I, microbatch) in self.parts or (stage, Kind.W, microbatch) in self.parts
                self._check_pass(Action(stage, Kind.B, microbatch), taken and backward and not split)
                self._check_pass(Action(stage, Kind.I, microbatch), taken and backward and split)
                self._check_pass(Action(stage, Kind.W, microbatch), taken and backward and split)
                recomputed = (stage, Kind.R, microbatch) in self.parts
                self._check_pass(Action(stage, Kind.R, microbatch), taken and backward and recomputed)

    def _check_pass(self, action: Action, needed: bool) -> None:
        found = self.parts.get(action[:3], [])
        if needed and (found == [-1] or (found and sorted(found) == list(range(len(found))))):
            return
        if not needed and not found:
            return
        rank = self.program.stages[action.stage].rank
        if not found:
            sentence = f"{action} is missing on rank {rank}: no pass of its stage may be left out."
        elif not needed:
            sentence = f"{action} on rank {rank} has no place beside the other passes of its microbatch."
        else:
            sentence = f"{action} on rank {rank} is in parts {sorted(found)}; it must be whole, or in all parts from 0."
        raise self.refuse(sentence, *(action._replace(part=part) for part in found), action._replace(kind=Kind.F))

    def check_edges(self) -> None:
        """Where anything is sent, all that crosses ranks is."""
        if not any(action.kind in PARTNERS for action in self.place):
            return
        stages = self.program.stages
        for source, sink in self.program.edges:
            if stages[source].rank == stages[sink].rank:
                continue
            for microbatch in range(self.program.num_microbatches):
                if not (stages[source].takes(microbatch) and stages[sink].takes(microbatch)):
                    continue
                self._check_received(Action(sink, Kind.RECV_F, microbatch, peer=source), Kind.EXCHANGE_F)
                if self.has_backward[source]:
                    self._check_received(Action(source, Kind.RECV_B, microbatch, peer=sink), Kind.EXCHANGE_B)

    def _check_received(self, receive: Action, exchange: Kind) -> None:
        stage, kind, microbatch, _, peer = receive
        source, sink = (peer, stage) if kind is Kind.RECV_F else (stage, peer)
        if receive not in self.place and Action(source, exchange, microbatch, peer=sink) not in self.place:
            consumers = (Kind.F,) if kind is Kind.RECV_F else (Kind.B, Kind.I)
            near = [Action(stage, consumer, microbatch, part) for consumer in consumers for part in (-1, 0)]
            raise self.refuse(f"{receive} is missing on rank {self.program.stages[stage].rank}.", *near)

    def check_transfers(self) -> None:
        """The n-th SEND of a rank to another one belongs to the n-th RECV there."""
        stages = self.program.stages
        sent: dict[tuple[int, int], deque[Action]] = {}
        for action, (rank, _) in self.place.items():
            if other := partner(action):
                if other not in self.place:
                    raise self.refuse(
                        f"{action} on rank {rank} has no {other} on rank {stages[other.stage].rank}.", action
                    )
                if action.kind in (Kind.SEND_F, Kind.SEND_B):
                    sent.setdefault((rank, stages[other.stage].rank), deque()).append(other)
        for action, (rank, _) in self.place.items():
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                sender = stages[action.peer].rank
                expected = sent[sender, rank].popleft()
                if action != expected:
                    sentence = f"{action} on rank {rank} comes where rank {sender} has sent for {expected}."
                    raise self.refuse(sentence, action)

    def check_collectives(self) -> None:
        """All stages of a group enter the same ones, in the same order."""
        entered: dict[int, list[Action]] = {
            number: [] for number, stage in enumerate(self.program.stages) if stage.group >= 0
        }
        for action in self.place:
            if action.kind in COLLECTIVES and action.stage in entered:
                entered[action.stage].append(action)
        first: dict[int, int] = {}
        for number, actions in entered.items():
            model = first.setdefault(self.program.stages[number].group, number)
            for ours, theirs in zip_longest(actions, entered[model]):
                if not (ours and theirs and event_of(ours, self.program) == event_of(theirs, self.program)):
                    sentence = (
                        f"Stage {number} enters {ours or 'no collective'} where stage {model} of its group enters "
                        f"{theirs or 'none'}; all must enter the same collectives in the same order."
                    )
                    raise self.refuse(sentence, *(action for action in (ours, theirs) if action))

    def check_order(self) -> None:
        """What an action needs of its own rank stands before it; gathers alone are held back by what comes later."""
        dependencies = Dependencies(self.program)
        for action, (rank, index) in self.place.items():
            if action.kind in (Kind.GATHER, Kind.GATHER_B):
                continue
            for needed in dependencies.of(action):
                if self.place[needed][0] == rank and self.place[needed][1] > index:
                    raise self.refuse(f"{action} on rank {rank} stands before {needed}, which it needs.", action)

    def check_deadlock(self, blocking: bool) -> None:
        cycle = dry_run(self.program, blocking=blocking).cycle
        if cycle:
            names = [*map(str, cycle[:_NUM_SHOWN]), *["..."] * (len(cycle) > _NUM_SHOWN), str(cycle[0])]
            waits = ", which waits for ".join(names[1:])
            raise self.refuse(f"Deadlock on rank {self.place[cycle[0]][0]}: {names[0]} waits for {waits}.", cycle[0])
