"""Proof that a Program can be executed and computes what training needs, or the action where it fails.

The proof covers:

- each stage runs each of its passes once, whole or in complete parts;
- all data that crosses ranks is sent and received, and the sends and receives of two ranks match in order;
- all stages of a group enter the same collectives in the same order, and two ranks those of all groups that they share;
- an action stands after all actions of its own rank that it needs;
- a dry run comes to its end (`dry_run.py`);
- activations fit into memory.
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
_Entered = dict[tuple[object, ...], Action]
"""Event of a collective -> the action by which a rank enters it, in order."""
_NUM_SHOWN = 6
"""Number of actions of a deadlock that the error names."""


def validate(
    program: Program,
    *,
    held_bytes: ArrayLike | None = None,
    cap_bytes: float | Sequence[float] | None = None,
    blocking: bool = False,
    holds_up: bool = False,
    host_waits: bool = False,
) -> None:
    """Prove that a Program can be executed. A Program without any SEND or RECV may still get them later.

    held_bytes: bytes that a forward pass keeps for backward, as for `high_water`.
    cap_bytes:  bytes that a rank may hold at a time: one number, or one a rank. Give both or neither.
    blocking:   prove it for ranks that do nothing else while they communicate.
    holds_up:   prove it for ranks that do nothing else while they take part in collectives.
    host_waits: prove it also for ranks whose host waits in each RECV, and for collectives (`dry_run`).
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
    proof.check_deadlock(blocking, holds_up)
    if host_waits:
        proof.check_deadlock(False, holds_up, host_waits=True)
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
    """The checks of one Program. Each check relies on those before it.

    position:     (rank, index in its row) of each action.
    parts:        the parts of each pass, by (stage, kind, microbatch).
    has_backward: whether a stage has any backward pass.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.position: dict[Action, tuple[int, int]] = {}
        self.parts: dict[tuple[int, Kind, int], list[int]] = {}
        self.has_backward = [False] * program.num_stages

    def refuse(self, sentence: str, *actions: Action) -> ScheduleError:
        """The error, at the first of these actions that the Program has, else at the end of the row of their stage."""
        for action in actions:
            if action in self.position:
                return ScheduleError(sentence, self.program, *self.position[action])
        rank = self.program.stages[actions[0].stage].rank
        return ScheduleError(sentence, self.program, rank, len(self.program.actions[rank]))

    def check_stages(self) -> None:
        """Stages are on ranks that exist, and edges join stages that exist, once."""
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
                wrong = f"is there {count} times" if count > 1 else "names a stage that the Program does not have"
                sentence = f"Edge {source}>{sink} {wrong}; an edge joins two of the {num_stages} stages, once."
                raise ScheduleError(sentence, self.program, 0, 0)

    def check_actions(self) -> None:
        """Every action is on the rank of its stage, occurs once, and has a microbatch, a part and a peer that exist."""
        edges = set(self.program.edges)
        for rank, row in enumerate(self.program.actions):
            for index, action in enumerate(row):
                if wrong := self._wrong_in(action, rank, edges):
                    raise ScheduleError(f"{action} on rank {rank} {wrong}.", self.program, rank, index)
                self.position[action] = (rank, index)
                self.parts.setdefault(action[:3], []).append(action.part)
                self.has_backward[action.stage] |= action.kind in (Kind.B, Kind.I, Kind.W)

    def _wrong_in(self, action: Action, rank: int, edges: set[tuple[int, int]]) -> str:
        """What is wrong with an action, as the rest of a sentence; "" if nothing is."""
        stage, kind, microbatch, part, peer = action
        if not 0 <= stage < self.program.num_stages:
            return f"is of a stage that the Program does not have; it has {self.program.num_stages}"
        if self.program.stages[stage].rank != rank:
            return f"is out of place: stage {stage} is on rank {self.program.stages[stage].rank}"
        if action in self.position:
            return "is there twice; once is enough"
        if kind in WHOLE_RANK and any(
            other.kind is kind for other in self.program.actions[rank] if other in self.position
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
        """Every stage has each of its passes once, and gets the gradients that its backward pass needs."""
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
        """A needed pass is whole or in parts 0, 1, ...; a pass that is not needed is absent."""
        parts = self.parts.get(action[:3], [])
        is_complete = parts == [-1] or (bool(parts) and sorted(parts) == list(range(len(parts))))
        if is_complete if needed else not parts:
            return
        rank = self.program.stages[action.stage].rank
        if not parts:
            sentence = f"{action} is missing on rank {rank}: no pass of its stage may be left out."
        elif not needed:
            sentence = f"{action} on rank {rank} has no place beside the other passes of its microbatch."
        else:
            sentence = f"{action} on rank {rank} is in parts {sorted(parts)}; it must be whole, or in all parts from 0."
        raise self.refuse(sentence, *(action._replace(part=part) for part in parts), action._replace(kind=Kind.F))

    def check_edges(self) -> None:
        """If the Program has any SEND or RECV, all data that crosses ranks is received or exchanged."""
        if not any(action.kind in PARTNERS for action in self.position):
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
        """The Program has a RECV, or an exchange in its stead."""
        stage, kind, microbatch, _, peer = receive
        source, sink = (peer, stage) if kind is Kind.RECV_F else (stage, peer)
        if receive not in self.position and Action(source, exchange, microbatch, peer=sink) not in self.position:
            consumers = (Kind.F,) if kind is Kind.RECV_F else (Kind.B, Kind.I)
            near = [Action(stage, consumer, microbatch, part) for consumer in consumers for part in (-1, 0)]
            raise self.refuse(f"{receive} is missing on rank {self.program.stages[stage].rank}.", *near)

    def check_transfers(self) -> None:
        """The n-th SEND of a rank to another rank is the other end of the n-th RECV there."""
        stages = self.program.stages
        sent: dict[tuple[int, int], deque[Action]] = {}
        for action, (rank, _) in self.position.items():
            if other := partner(action):
                if other not in self.position:
                    raise self.refuse(
                        f"{action} on rank {rank} has no {other} on rank {stages[other.stage].rank}.", action
                    )
                if action.kind in (Kind.SEND_F, Kind.SEND_B):
                    sent.setdefault((rank, stages[other.stage].rank), deque()).append(other)
        for action, (rank, _) in self.position.items():
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                sender = stages[action.peer].rank
                expected = sent[sender, rank].popleft()
                if action != expected:
                    sentence = f"{action} on rank {rank} comes where rank {sender} has sent for {expected}."
                    raise self.refuse(sentence, action)

    def check_collectives(self) -> None:
        """All stages of a group enter the same collectives, in the same order. Pipelines of an encoder in bubbles take
        different microbatches: what is of a microbatch they enter with those that take it, too.
        """
        stages = self.program.stages
        entered: dict[int, list[Action]] = {number: [] for number, stage in enumerate(stages) if stage.group >= 0}
        for action in self.position:
            if action.kind in COLLECTIVES and action.stage in entered:
                entered[action.stage].append(action)
        first: dict[tuple[int, tuple[int, ...]], int] = {}
        for number, actions in entered.items():
            group, microbatches = stages[number].group, stages[number].microbatches
            self._check_same(number, actions, other := first.setdefault((group, microbatches), number), entered[other])
            other = first.setdefault((group, ()), number)
            self._check_same(number, _of_step(actions), other, _of_step(entered[other]))
        self._check_shared_groups()

    def _check_same(self, number: int, entered: list[Action], other: int, expected: list[Action]) -> None:
        """Two stages of a group enter the same collectives."""
        for ours, theirs in zip_longest(entered, expected):
            if not (ours and theirs and event_of(ours, self.program) == event_of(theirs, self.program)):
                sentence = (
                    f"Stage {number} enters {ours or 'no collective'} where stage {other} of its group enters "
                    f"{theirs or 'none'}; all must enter the same collectives in the same order."
                )
                raise self.refuse(sentence, *(action for action in (ours, theirs) if action))

    def _check_shared_groups(self) -> None:
        """Two ranks with several groups in common enter the collectives of all of them in one order."""
        stages = self.program.stages
        entered: list[list[Action]] = [[] for _ in self.program.actions]
        ranks_of: dict[int, set[int]] = {}
        for action, (rank, _) in self.position.items():
            if action.kind in COLLECTIVES and (group := stages[action.stage].group) >= 0:
                entered[rank].append(action)
                ranks_of.setdefault(group, set()).add(rank)
        pairs: dict[tuple[int, int], set[int]] = {}
        for group, ranks in ranks_of.items():
            for rank in ranks:
                pairs.setdefault((min(ranks), rank), set()).add(group)
        for (first, rank), groups in pairs.items():
            if len(groups) > 1:
                ours, theirs = (
                    {event_of(one, self.program): one for one in entered[each] if stages[one.stage].group in groups}
                    for each in (rank, first)
                )
                self._check_alike(ours, theirs, rank, first)

    def _check_alike(self, ours: _Entered, theirs: _Entered, rank: int, first: int) -> None:
        """Two ranks enter the collectives that both of them enter in one order. Keys: events, in order."""
        both = ours.keys() & theirs.keys()
        for our, their in zip((one for one in ours if one in both), (one for one in theirs if one in both)):
            if our != their:
                sentence = (
                    f"{ours[our]} on rank {rank} comes where rank {first} enters {theirs[their]}; the two ranks share "
                    "these groups, and must enter their collectives in one order."
                )
                raise self.refuse(sentence, ours[our])

    def check_order(self) -> None:
        """An action stands after all actions of its own rank that it needs. Gathers are excepted: a gather stands ahead
        of the pass that frees its memory.
        """
        dependencies = Dependencies(self.program)
        for action, (rank, index) in self.position.items():
            if action.kind in (Kind.GATHER, Kind.GATHER_B):
                continue
            for needed in dependencies.of(action):
                if self.position[needed][0] == rank and self.position[needed][1] > index:
                    raise self.refuse(f"{action} on rank {rank} stands before {needed}, which it needs.", action)

    def check_deadlock(self, blocking: bool, holds_up: bool, host_waits: bool = False) -> None:
        """A dry run comes to its end."""
        cycle = dry_run(self.program, blocking=blocking, holds_up=holds_up, host_waits=host_waits).cycle
        if cycle:
            names = [*map(str, cycle[:_NUM_SHOWN]), *["..."] * (len(cycle) > _NUM_SHOWN), str(cycle[0])]
            waits = ", which waits for ".join(names[1:])
            raise self.refuse(f"Deadlock on rank {self.position[cycle[0]][0]}: {names[0]} waits for {waits}.", cycle[0])


def _of_step(actions: list[Action]) -> list[Action]:
    """Those of no microbatch."""
    return [action for action in actions if action.microbatch < 0]
