"""What an action waits for, besides the actions before it in its stream. No other file decides this.

A forward pass needs the outputs that feed it. A backward pass needs its own forward pass and the gradients of its
output. An optimizer step needs all gradients. Data crosses ranks by a pair of SEND and RECV or by an exchange. In a
Program without communication, as generators make it, an action needs the pass of the other rank itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from motet.schedule.program import EXCHANGES, Action, Kind, Program

PARTNERS = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}
COLLECTIVES = frozenset({*EXCHANGES, Kind.GATHER, Kind.GATHER_B, Kind.REDUCE, Kind.NORM})
GRADIENTS = (Kind.B, Kind.W, Kind.REDUCE)
"""Kinds that produce gradients. The gradients of a rank are complete once all its actions of these kinds have ended."""
PREFETCH_DEPTH = 1
"""Number of slices of parameters that are gathered ahead of the part that computes, as FSDP does."""


def partner(action: Action) -> Action | None:
    """The other end of a SEND or RECV, which takes place at the same time. None for every other kind."""
    if action.kind not in PARTNERS:
        return None
    return Action(action.peer, PARTNERS[action.kind], action.microbatch, action.part, action.stage)


class Dependencies:
    """The actions that each action of a Program needs. All actions of the Program must be different."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def _parts(self) -> Mapping[tuple[int, Kind, int], list[int]]:
        """The parts of each pass in the Program, ascending; [-1] if the pass is whole."""
        parts: dict[tuple[int, Kind, int], list[int]] = {}
        for actions in self.program.actions:
            for action in actions:
                parts.setdefault((action.stage, action.kind, action.microbatch), []).append(action.part)
        return {key: numbers if len(numbers) == 1 else sorted(set(numbers)) for key, numbers in parts.items()}

    @cached_property
    def _ends(self) -> Mapping[tuple[int, Kind, int], Action]:
        """The last part of each pass in the Program."""
        ends: dict[tuple[int, Kind, int], Action] = {}
        for actions in self.program.actions:
            for action in actions:
                stage, kind, microbatch, part, _ = action
                key = stage, kind, microbatch
                if key not in ends or part > ends[key].part:
                    ends[key] = action
        return ends

    @cached_property
    def _communicates(self) -> bool:
        """Whether the Program has messages or exchanges, which stand between a pass and what it needs."""
        return any(kind in PARTNERS or kind in EXCHANGES for _, kind in self._microbatches)

    @cached_property
    def _present(self) -> frozenset[Action]:
        return frozenset(action for actions in self.program.actions for action in actions)

    @cached_property
    def _sources(self) -> Mapping[int, list[int]]:
        sources: dict[int, list[int]] = {stage: [] for stage in range(self.program.num_stages)}
        for source, sink in self.program.edges:
            sources[sink].append(source)
        return sources

    @cached_property
    def _sinks(self) -> Mapping[int, list[int]]:
        sinks: dict[int, list[int]] = {stage: [] for stage in range(self.program.num_stages)}
        for source, sink in self.program.edges:
            sinks[source].append(sink)
        return sinks

    @cached_property
    def _microbatches(self) -> Mapping[tuple[int, Kind], list[int]]:
        """The microbatches of which a stage has a pass of a kind."""
        microbatches: dict[tuple[int, Kind], list[int]] = {}
        for stage, kind, microbatch in self._parts:
            microbatches.setdefault((stage, kind), []).append(microbatch)
        return microbatches

    def of(self, action: Action) -> Iterator[Action]:
        """The actions that must end before this one starts. One may come twice. O(neighbours of the stage)."""
        stage, kind, microbatch, part, peer = action
        first = part == self._parts[stage, kind, microbatch][0]
        match kind:
            case Kind.F:
                yield from self._inputs(stage, microbatch) if first else [action._replace(part=part - 1)]
                yield from self._gathered(Kind.GATHER, stage, microbatch, part)
            case Kind.R:
                yield from self._last(stage, Kind.F, microbatch) if first else [action._replace(part=part - 1)]
            case Kind.B | Kind.I:
                yield from self._gradients(stage, microbatch) if first else [action._replace(part=part - 1)]
                slice_ = self._num_parts(stage, kind, microbatch) - 1 - part if part >= 0 else -1
                yield from self._gathered(Kind.GATHER_B, stage, microbatch, slice_)
            case Kind.W:
                yield from self._last(stage, Kind.I, microbatch)
                if not first:
                    yield action._replace(part=part - 1)
            case Kind.SEND_F:
                yield from self._last(stage, Kind.F, microbatch)
            case Kind.SEND_B:
                yield from self._backward(stage, microbatch)
            case Kind.EXCHANGE_F:
                yield from self._last(stage, Kind.F, microbatch)
            case Kind.EXCHANGE_B:
                yield from self._backward(peer, microbatch)
            case Kind.GATHER:
                yield from self._freed(stage, Kind.F, microbatch, part - 1 - PREFETCH_DEPTH)
            case Kind.GATHER_B:
                for backward in (Kind.B, Kind.I) if part >= 0 else ():
                    if num_parts := self._num_parts(stage, backward, microbatch):
                        yield from self._freed(stage, backward, microbatch, num_parts - part - 2 - PREFETCH_DEPTH)
            case Kind.REDUCE:
                yield from self._all_gradients(stage, microbatch, part)
            case Kind.NORM:
                yield from self._whole_step(self.program.stages[stage].rank, (Kind.F, *GRADIENTS))
            case Kind.STEP:
                yield from self._whole_step(self.program.stages[stage].rank, (*GRADIENTS, Kind.NORM))

    def _num_parts(self, stage: int, kind: Kind, microbatch: int) -> int:
        return len(self._parts.get((stage, kind, microbatch), ()))

    def _last(self, stage: int, kind: Kind, microbatch: int) -> tuple[Action, ...]:
        """The last part of a pass, if the Program has the pass."""
        end = self._ends.get((stage, kind, microbatch))
        return () if end is None else (end,)

    def _backward(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        """The last part of the pass that computes the gradient of the stage's input."""
        return self._last(stage, Kind.B, microbatch) + self._last(stage, Kind.I, microbatch)

    def _inputs(self, stage: int, microbatch: int) -> Iterator[Action]:
        """The actions that bring the outputs of the stage's sources."""
        for source in self._sources[stage]:
            if not self._communicates:
                yield from self._last(source, Kind.F, microbatch)
                continue
            received = Action(stage, Kind.RECV_F, microbatch, peer=source)
            exchanged = Action(source, Kind.EXCHANGE_F, microbatch, peer=stage)
            if received in self._present:
                yield received
            elif exchanged in self._present:
                yield exchanged
            else:
                yield from self._last(source, Kind.F, microbatch)

    def _gradients(self, stage: int, microbatch: int) -> Iterator[Action]:
        """The stage's own forward pass, and the actions that bring the gradients of its output."""
        yield from self._last(stage, Kind.F, microbatch)
        yield from self._last(stage, Kind.R, microbatch)
        for sink in self._sinks[stage]:
            if not self._communicates:
                yield from self._backward(sink, microbatch)
                continue
            received = Action(stage, Kind.RECV_B, microbatch, peer=sink)
            exchanged = Action(stage, Kind.EXCHANGE_B, microbatch, peer=sink)
            if received in self._present:
                yield received
            elif exchanged in self._present:
                yield exchanged
            else:
                yield from self._backward(sink, microbatch)

    def _gathered(self, kind: Kind, stage: int, microbatch: int, slice_: int) -> Iterator[Action]:
        """The all-gathers of a slice of parameters: of that slice or all, for that microbatch or the step."""
        if (stage, kind) not in self._microbatches:
            return
        for gathered_microbatch in dict.fromkeys((microbatch, -1)):
            for gathered_slice in dict.fromkeys((slice_, -1)):
                gather = Action(stage, kind, gathered_microbatch, gathered_slice)
                if gather in self._present:
                    yield gather

    def _freed(self, stage: int, kind: Kind, microbatch: int, part: int) -> Iterator[Action]:
        """The part of a pass that must end, and free its parameters, before one more slice is gathered."""
        if part >= 0 and (freed := Action(stage, kind, microbatch, part)) in self._present:
            yield freed

    def _all_gradients(self, stage: int, microbatch: int, slice_: int) -> Iterator[Action]:
        """The last parts that add to a gradient: of one microbatch or all (-1), of one slice or all (-1)."""
        for kind in (Kind.B, Kind.W):
            for computed in self._microbatches.get((stage, kind), ()):
                if microbatch not in (-1, computed):
                    continue
                parts = self._parts[stage, kind, computed]
                is_sliced = slice_ >= 0 and parts[-1] >= 0
                yield Action(stage, kind, computed, len(parts) - 1 - slice_ if is_sliced else parts[-1])

    def _whole_step(self, rank: int, kinds: Collection[Kind]) -> Iterator[Action]:
        return (action for action in self.program.actions[rank] if action.kind in kinds)
