"""A dry run of a Program: an order in which its actions can take place, or the reason why they cannot.

The model of execution is the simulator's. A rank has four streams: compute, sends, receives and collectives. A stream
takes its actions in the order of the rank's row. An action starts when the action before it in its stream and all its
`Dependencies` have ended. A SEND and its RECV are one event, on the sender's send stream and the receiver's receive
stream. A collective is one event on the collective streams of all stages of its group. If collectives hold up compute,
they are on the compute stream; if all communication blocks, a rank has a single stream. A pass of stages that meet is
one event, on the compute streams of all of them.

One rule is stricter than the simulator's: a SEND or RECV also waits for the compute before it in the row. So a Program
that completes here also completes on ranks that walk their rows and wait for each pass. Collectives do not wait for
that compute: a rank must enter them ahead of it, as FSDP's prefetching does.

A host that waits is stricter still, as ranks on CPUs are whatever the Plan's device overlaps: it takes its row in
order, and waits in a RECV, and before what needs a collective; it starts SENDs and collectives, and goes on. So a
collective that stands behind a RECV is not started before the message is there.

Durations are nominal: backward takes twice as long as forward, communication takes 0. Encoders in bubbles take almost
0, because they must not delay the backbone or change the order in which it communicates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from motet.schedule.dependencies import COLLECTIVES, PARTNERS, Dependencies, partner
from motet.schedule.program import COMPUTE_KINDS, MEETING_KINDS, Action, Kind, Program, Stage

NOMINAL_DURATIONS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0, Kind.R: 1.0, Kind.STEP: 1.0}
BUBBLE_SHARE = 1e-3
"""Nominal duration of encoders in bubbles, as a share of a pass. It is above 0, so that their consumers come later."""


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run.

    start, end: of every action that takes place, in nominal forward passes.
    cycle:      a deadlock: each action waits for the next, the last for the first. Empty if there is none.
    """

    start: Mapping[Action, float]
    end: Mapping[Action, float]
    cycle: tuple[Action, ...]


_JOINED = COLLECTIVES | {Kind.RECV_F, Kind.RECV_B}
"""Kinds whose actions may be part of another action's event."""


def stream_of(kind: Kind) -> str:
    """The stream of a rank that actions of a kind occupy."""
    if kind in COMPUTE_KINDS:
        return "compute"
    if kind in COLLECTIVES:
        return "collective"
    return "send" if kind in (Kind.SEND_F, Kind.SEND_B) else "receive"


def event_of(action: Action, program: Program) -> tuple[object, ...]:
    """The key of the event that an action is part of: equal for both ends of a transfer, and for all stages of a
    collective, or of passes that meet.
    """
    if action.kind in (Kind.RECV_F, Kind.RECV_B):
        return partner(action) or action
    stage = program.stages[action.stage]
    group = stage.group
    if action.kind in COLLECTIVES and group >= 0:
        peer_group = program.stages[action.peer].group if action.peer >= 0 else -1
        return (action.kind, group, action.microbatch, action.part, peer_group)
    if action.kind in MEETING_KINDS and stage.meets:
        return (action.kind, group, action.microbatch, action.part)
    return action


def dry_run(program: Program, *, blocking: bool = False, holds_up: bool = False, host_waits: bool = False) -> DryRun:
    """Run a Program, whose actions must all be different. O(actions).

    blocking: communication occupies the compute stream. holds_up: collectives do, and transfers do not.
    host_waits: a rank is one host that waits, as above; with holds_up, in collectives too.
    """
    held = COLLECTIVES | PARTNERS.keys() if blocking else COLLECTIVES if holds_up else ()
    graph = _Graph(program, held, host_waits)
    start = [0.0] * len(graph.members)
    end = list(graph.duration)
    waiting = [len(before) for before in graph.before]
    ready = [event for event, count in enumerate(waiting) if not count]
    for event in ready:  # grows while it is walked
        end[event] += start[event]
        for after in graph.after[event]:
            start[after] = max(start[after], end[event])
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return DryRun(
        {action: start[event] for event in ready for action in graph.members[event]},
        {action: end[event] for event in ready for action in graph.members[event]},
        graph.cycle(waiting) if len(ready) < len(waiting) else (),
    )


class _Graph:
    """The events of a Program, by number.

    members: the actions of an event. before, after: the events that it waits for, and those that wait for it.
    """

    def __init__(self, program: Program, held: Collection[Kind], host_waits: bool) -> None:
        """held: kinds of communication that occupy the compute stream."""
        number: dict[tuple[object, ...], int] = {}
        event_by_action: dict[Action, int] = {}
        self.members: list[list[Action]] = []
        joined = COLLECTIVES if host_waits else _JOINED
        meeting = frozenset(number for number, stage in enumerate(program.stages) if stage.meets)
        for actions in program.actions:
            for action in actions:
                is_joined = action.kind in joined or (action.stage in meeting and action.kind in MEETING_KINDS)
                key = event_of(action, program) if is_joined else action
                event = event_by_action[action] = number.setdefault(key, len(number))
                if event == len(self.members):
                    self.members.append([action])
                else:
                    self.members[event].append(action)
        self.before: list[list[int]] = [[] for _ in self.members]
        self.after: list[list[int]] = [[] for _ in self.members]
        dependencies = Dependencies(program)
        if host_waits:
            self._walk(program, event_by_action, dependencies, held)
        else:
            self._run_in_streams(program, event_by_action, dependencies, held)
        self.duration = _durations(self.members, program)

    def _run_in_streams(
        self, program: Program, event_by_action: dict[Action, int], dependencies: Dependencies, held: Collection[Kind]
    ) -> None:
        """Each stream takes its actions in order; a message starts once the compute before it has ended."""
        streams = {kind: "compute" if kind in held else stream_of(kind) for kind in Kind}
        for actions in program.actions:
            last: dict[str, int] = {}
            for action in actions:
                event = event_by_action[action]
                stream = streams[action.kind]
                for needed in dependencies.of(action):
                    self._add(event_by_action[needed], event)
                if stream in last:
                    self._add(last[stream], event)
                if stream in ("send", "receive") and "compute" in last:
                    self._add(last["compute"], event)
                last[stream] = event

    def _walk(
        self, program: Program, event_by_action: dict[Action, int], dependencies: Dependencies, held: Collection[Kind]
    ) -> None:
        """Each host takes its row in order. A collective ends once all hosts of its group have started it."""
        for row in program.actions:
            before, reductions = -1, dict[int, int]()
            for action in row:
                event = event_by_action[action]
                needed = [event_by_action[each] for each in dependencies.of(action)]
                if action.kind in (Kind.RECV_F, Kind.RECV_B) and (sent := partner(action)) in event_by_action:
                    needed.append(event_by_action[sent])
                if action.kind is Kind.REDUCE and action.stage in reductions:  # Its message is used again.
                    needed.append(reductions[action.stage])
                if before >= 0:
                    needed.append(before)
                is_started = action.kind in COLLECTIVES and action.kind not in held
                start = self._started() if is_started else event
                for each in needed:
                    self._add(each, start)
                if is_started:
                    self._add(start, event)
                if action.kind is Kind.REDUCE:
                    reductions[action.stage] = event
                before = start

    def _started(self) -> int:
        """A new event without actions: that a host starts a collective."""
        for lists in (self.members, self.before, self.after):
            lists.append([])
        return len(self.members) - 1

    def _add(self, before: int, after: int) -> None:
        self.before[after].append(before)
        self.after[before].append(after)

    def cycle(self, waiting: list[int]) -> tuple[Action, ...]:
        """A ring of events that wait for each other, from its lowest number on. waiting: unfinished predecessors."""
        seen: dict[int, None] = {}
        event = next(event for event, count in enumerate(waiting) if count)
        while event not in seen:
            seen[event] = None
            event = next(before for before in self.before[event] if waiting[before])
        path = list(seen)
        ring = path[path.index(event) :]
        first = ring.index(min(ring))
        return tuple(self.members[event][0] for event in ring[first:] + ring[:first] if self.members[event])


def nominal_share(stage: Stage) -> float:
    """The nominal duration of a stage's pass, as a share of that of others of its kind."""
    return BUBBLE_SHARE if stage.microbatches else 1.0


def _durations(members: list[list[Action]], program: Program) -> list[float]:
    """The nominal duration of each event. The parts of a pass share its duration evenly."""
    num_parts = Counter(action[:3] for event in members for action in event)
    share = list(map(nominal_share, program.stages))

    def duration(action: Action) -> float:
        of_stage = 1.0 if action.kind is Kind.STEP else share[action.stage]
        return NOMINAL_DURATIONS.get(action.kind, 0.0) * of_stage / num_parts[action[:3]]

    return [duration(event[0]) if event else 0.0 for event in members]
