"""Executes one rank's row of a Program: calls the handler of each action's kind, and records a span of the Timeline.

The executor knows no model and no tensor. The handlers of F and B are in `passes.py`, those of exchanges in
`exchanges.py`, those of NORM and STEP in `step.py`. `tensors.py` keeps the tensors that live between actions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from motet.core.errors import ArgumentError, complete_origin
from motet.runtime.clock import ActionClock
from motet.schedule.program import Action, Kind, Program, Row

Handler: TypeAlias = Callable[[Action], None]
Hook: TypeAlias = Callable[[int, Action], None]
"""A function of an action's index in its row, and the action."""
_Bound: TypeAlias = tuple[int, Action, str, Handler]
"""An action's index in its row, the action, its module and its handler."""


@dataclass(frozen=True)
class RankProgram:
    """The part of a Program that one rank executes.

    row:     the rank's actions, in order.
    modules: stage -> module, for the rank's stages.
    sources: stage -> the stages whose outputs it takes in, for the rank's stages.
    """

    row: Row
    modules: Mapping[int, str]
    sources: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of(program: Program, rank: int) -> RankProgram:
        """The part of `rank`."""
        modules = {number: stage.module for number, stage in program.stages_on(rank).items()}
        sources: dict[int, tuple[int, ...]] = dict.fromkeys(modules, ())
        for source, sink in program.edges_near(rank):
            if sink in sources:
                sources[sink] += (source,)
        return RankProgram(program.actions[rank], modules, sources)

    @cached_property
    def feeding(self) -> frozenset[int]:
        """The stages that feed another stage."""
        return frozenset(source for sources in self.sources.values() for source in sources)

    @cached_property
    def last_backward(self) -> Mapping[int, int]:
        """Stage -> microbatch of its last backward pass, for stages that have one."""
        return {action.stage: action.microbatch for action in self.row if action.kind is Kind.B}

    @cached_property
    def has_backward(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) of every backward pass in the row."""
        return frozenset((action.stage, action.microbatch) for action in self.row if action.kind is Kind.B)


class Executor:
    """Executes a rank's row. The Program alone decides in which collectives the ranks meet.

    handlers:  kind -> function that executes an action of this kind.
    leave_out: kinds that are not executed.
    in_parts:  kinds whose handlers execute parts of passes too.
    Raises ArgumentError, before anything runs, if the row has a kind without a handler, or a part of a pass that is
    executed whole.

    Example:
        >>> import torch
        >>> program = RankProgram((Action(0, Kind.F, 0), Action(0, Kind.B, 0)), {0: "backbone"}, {0: ()})
        >>> clock = ActionClock(0, torch.device("cpu"))
        >>> Executor(program, {Kind.F: print, Kind.B: print}, clock).run(step=0)
        0F0
        0B0
        >>> [span.action for span in clock.take()]
        ['0F0', '0B0']
    """

    def __init__(
        self,
        program: RankProgram,
        handlers: Mapping[Kind, Handler],
        clock: ActionClock,
        *,
        leave_out: Iterable[Kind] = (),
        in_parts: Collection[Kind] = (),
    ) -> None:
        left_out = frozenset(leave_out)
        self._clock, actions = clock, [each for each in enumerate(program.row) if each[1].kind not in left_out]
        for _, action in actions:
            if action.kind not in handlers:
                known = ", ".join(handlers)
                raise ArgumentError(
                    f"{action} cannot be executed: the runtime has {known}, but no {action.kind} ({action.kind.words})."
                )
            if action.part >= 0 and action.kind not in in_parts:
                raise ArgumentError(f"{action} cannot be executed: it is a part, and {action.kind} is executed whole.")
        self._bound: list[_Bound] = [(index, a, program.modules[a.stage], handlers[a.kind]) for index, a in actions]
        self._left: Iterator[_Bound] = iter(self._bound)
        self._step = 0
        self._before: Hook | None = None
        self._running: _Bound | None = None

    def run(self, step: int, before: Hook | None = None) -> None:
        """Execute every action. step: number of the step in the Timeline. before: called before each action."""
        self._left, self._step, self._before = iter(self._bound), step, before
        for bound in self._left:
            self._execute(bound)

    def reach(self, part: Action) -> None:
        """Go on with the row up to a later part of the pass that runs, and let that part begin.

        A handler calls it that runs a pass in one call: what stands between its parts runs inside. Parts of the pass
        have no handler called.
        """
        assert self._running is not None, "a pass runs"
        self._end()
        for bound in self._left:
            if bound[1][:3] != part[:3]:
                self._execute(bound)
                continue
            self._begin(bound)
            if bound[1] == part:
                return
            self._end()
        raise ArgumentError(f"{part} does not stand behind {self._running[1]} in the row.")

    def _execute(self, bound: _Bound) -> None:
        index, action, module, handler = bound
        if self._before is not None:
            self._before(index, action)
        try:
            self._begin(bound)
            handler(action)
            self._end()
        except Exception as error:
            # What ran inside a pass may have noted itself.
            complete_origin(error, action=f"{action} of step {self._step + 1}", module=module)
            raise

    def _begin(self, bound: _Bound) -> None:
        self._running = bound
        self._clock.begin(bound[1])

    def _end(self) -> None:
        assert self._running is not None, "what ends has begun"
        _, action, module, _ = self._running
        self._clock.end(action, self._step, module)
