"""The collectives of data parallelism around a pipeline's passes, and the optimizer: parameters are gathered before
they are used, gradients reduced once they are complete.

Under ZeRO 0 gradients are all-reduced once a step. Under ZeRO 1 (Megatron's distributed optimizer) updated parameters
are gathered at the start of the step and gradients scattered at its end: a chunk's gather runs beside the computation
of the chunks before it, and only the first one's is exposed (Optimus section 2.2). Under ZeRO 2 gradients are reduced
each microbatch, and under ZeRO 3 parameters are gathered for every pass.

Ranks that share several groups must enter the collectives of these in one order, whatever the order of their passes. So
those of the whole step are entered by number of group, gathers before and reductions after those of a microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, Kind, Program

_ADDED = frozenset({Kind.GATHER, Kind.GATHER_B, Kind.REDUCE, Kind.STEP})


def add_data_parallel(program: Program, zero: Mapping[int, int], trainable: Collection[int]) -> Program:
    """Add GATHER before a stage's parameters are first used, REDUCE after its last gradient, STEP at a rank's end.

    zero:    per stage that has replicas, what is sharded over them (0 to 3); stages not named have none.
    trained: the stages in which anything learns. What does not is never updated: it is gathered only where it is
             sharded (ZeRO 3), and not reduced; a rank with none takes no optimizer step.
    Raises ArgumentError for a stage or level that does not exist, or a Program that has such actions. O(actions).
    """
    for stage, level in zero.items():
        if not 0 <= stage < program.num_stages or level not in (0, 1, 2, 3):
            raise ArgumentError(
                f"stage {stage} under ZeRO {level}: stages go to {program.num_stages - 1}, levels from 0 to 3."
            )
    if any(action.kind in _ADDED for row in program.actions for action in row):
        raise ArgumentError("the Program has collectives of data parallelism already; add them once.")
    rule = _Rule([stage.group for stage in program.stages], zero, frozenset(trainable))
    return replace(program, actions=tuple(tuple(rule.row(row)) for row in program.actions))


@dataclass(frozen=True)
class _Rule:
    groups: Sequence[int]
    zero: Mapping[int, int]
    trainable: frozenset[int]

    def row(self, row: Sequence[Action]) -> Iterator[Action]:
        first: dict[Action, int] = {}
        last: dict[Action, int] = {}
        for place, action in enumerate(row):
            for gather in self.gathers(action):
                first.setdefault(gather, place)
            for reduction in self.reductions(action):
                last[reduction] = place
        self.put_in_order(first, last)
        before = _by_place(first, sorted(first, key=lambda one: (one.microbatch >= 0, self.groups[one.stage])))
        after = _by_place(last, sorted(last, key=lambda one: (one.microbatch < 0, self.groups[one.stage])))
        for place, action in enumerate(row):
            yield from before.get(place, ())
            yield action
            yield from after.get(place, ())
        learning = [action.stage for action in row if self.is_gradient(action)]
        if learning:
            yield Action(min(learning), Kind.STEP)

    def put_in_order(self, first: dict[Action, int], last: dict[Action, int]) -> None:
        """Move the whole step's gathers forward and its reductions back, of stages that have a group."""
        shared = [action for action in (*first, *last) if self.groups[action.stage] >= 0]
        places = [place[a] for place in (first, last) for a in shared if a.microbatch >= 0 and a in place]
        whole = sorted((one for one in shared if one.microbatch < 0), key=lambda one: self.groups[one.stage])
        for gather in reversed([one for one in whole if one in first]):
            first[gather] = min([first[gather], *places])
            places.append(first[gather])
        for reduction in [one for one in whole if one in last]:
            last[reduction] = max([last[reduction], *places])
            places.append(last[reduction])

    def gathers(self, action: Action) -> Iterator[Action]:
        """What a pass needs to have gathered."""
        level = self.zero.get(action.stage, 0)
        if action.kind is Kind.F and (level == 3 or (level > 0 and action.stage in self.trainable)):
            yield Action(action.stage, Kind.GATHER, action.microbatch if level == 3 else -1)
        if action.kind in (Kind.R, Kind.B, Kind.I) and level == 3:
            yield Action(action.stage, Kind.GATHER_B, action.microbatch)

    def reductions(self, action: Action) -> Iterator[Action]:
        """What takes in the gradients that a pass makes."""
        if self.is_gradient(action) and action.stage in self.zero:
            yield Action(action.stage, Kind.REDUCE, action.microbatch if self.zero[action.stage] >= 2 else -1)

    def is_gradient(self, action: Action) -> bool:
        return action.kind in (Kind.B, Kind.W) and action.stage in self.trainable


def _by_place(places: Mapping[Action, int], order: Sequence[Action]) -> dict[int, list[Action]]:
    found: dict[int, list[Action]] = {}
    for action in order:
        found.setdefault(places[action], []).append(action)
    return found
