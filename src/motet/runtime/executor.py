"""Walks the row of one rank of a Program: each action in turn, by the handler of its kind, as a span of the Timeline.

It knows no model and no tensor. What an action does is in its handler: forward and backward passes in `passes.py`,
exchanges in `exchanges.py`, the norm and the optimizer in `step.py`. What lives between actions is in `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from motet.core.errors import ArgumentError
from motet.runtime.clock import ActionClock
from motet.schedule.program import Action, Kind, Program, Row

Handler: TypeAlias = Callable[[Action], None]
Hook: TypeAlias = Callable[[int, Action], None]
"""Is told the index of an action in its row, and the action."""


@dataclass(frozen=True)
class RankProgram:
    """What one rank needs to know of a Program.

    row: its actions. modules: of its stages. sources: of its stages, those whose outputs they take in.
    """

    row: Row
    modules: Mapping[int, str]
    sources: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of(program: Program, rank: int) -> RankProgram:
        """Raises ArgumentError where a stage feeds several: the runtime takes an output to one stage."""
        modules = {number: stage.module for number, stage in enumerate(program.stages) if stage.rank == rank}
        sources: dict[int, tuple[int, ...]] = dict.fromkeys(modules, ())
        sinks: dict[int, int] = {}
        for source, sink in program.edges:
            if sink in sources:
                sources[sink] += (source,)
            if source in sources and sinks.setdefault(source, sink) != sink:
                raise ArgumentError(
                    f"stage {source} feeds stages {sinks[source]} and {sink}; the runtime takes an output to one stage."
                )
        return RankProgram(program.actions[rank], modules, sources)

    @cached_property
    def feeding(self) -> frozenset[int]:
        """The stages whose outputs others take in."""
        return frozenset(source for sources in self.sources.values() for source in sources)

    @cached_property
    def last_backward(self) -> Mapping[int, int]:
        """The microbatch of the last backward pass of each stage that has any."""
        return {action.stage: action.microbatch for action in self.row if action.kind is Kind.B}

    @cached_property
    def has_backward(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of all backward passes."""
        return frozenset((action.stage, action.microbatch) for action in self.row if action.kind is Kind.B)


class Executor:
    """Executes a rank's row. Every rank walks its own; which collectives they meet in follows from the Program alone.

    handlers: what an action of a kind does. leave_out: kinds of the row that are not executed.
    Raises ArgumentError, before anything runs, for a row with a kind that has no handler, or with parts.
    """

    def __init__(
        self,
        program: RankProgram,
        handlers: Mapping[Kind, Handler],
        clock: ActionClock,
        *,
        leave_out: Iterable[Kind] = (),
    ) -> None:
        left_out = frozenset(leave_out)
        self._actions = [(index, action) for index, action in enumerate(program.row) if action.kind not in left_out]
        self._modules, self._handlers, self._clock = program.modules, handlers, clock
        for _, action in self._actions:
            if action.kind not in handlers:
                known = ", ".join(handlers)
                raise ArgumentError(
                    f"{action} cannot be executed: the runtime has {known}, but no {action.kind} ({action.kind.words})."
                )
            if action.part >= 0:
                raise ArgumentError(
                    f"{action} cannot be executed: it is a part, and the runtime has whole passes only."
                )

    def run(self, step: int, before: Hook | None = None) -> None:
        """Take every action. step: number of the step, for the Timeline. before: is told of each action beforehand."""
        for index, action in self._actions:
            if before is not None:
                before(index, action)
            with self._clock.span(action, step, self._modules[action.stage]):
                self._handlers[action.kind](action)
