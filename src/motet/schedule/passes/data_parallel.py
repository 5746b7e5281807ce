"""The pass that adds the collectives of data parallelism to a pipeline, and the optimizer.

- ZeRO 0: gradients are all-reduced once a step.
- ZeRO 1 (Megatron's distributed optimizer): updated parameters are gathered at the start of a step, gradients are
  reduce-scattered at its end. A chunk's gather runs beside the compute of the chunks before it; only the first gather
  is exposed (Optimus section 2.2).
- ZeRO 2: as 1, but gradients are reduced in each microbatch. Of several sharded copies each is reduced by itself, and
  the sum over copies is a REDUCE of the whole step.
- ZeRO 3: as 2, but parameters are gathered for every pass.

Ranks that share several groups must enter the collectives of these groups in the same order, whatever the order of
their passes. So collectives of the whole step are ordered by group: gathers before those of any microbatch, reductions
after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, Kind, Program

_ADDED = frozenset({Kind.GATHER, Kind.GATHER_B, Kind.REDUCE, Kind.STEP})


def add_data_parallel(
    program: Program,
    zero: Mapping[int, int],
    trainable: Collection[int],
    *,
    copied: Collection[int] = (),
    at_ends: bool = False,
    gathers_first: bool = False,
    islands_differ: bool = False,
) -> Program:
    """Add GATHER before the first use of a stage's parameters, REDUCE after its last gradient, STEP at a rank's end.

    zero:      ZeRO stage (0 to 3) of each stage that has replicas. Stages that are not named have no replicas.
    trainable: the stages of which any parameter is updated. A frozen stage is gathered only if its parameters are
               sharded (ZeRO 3), and is never reduced. A rank without trainable stages has no STEP.
    copied:    the stages whose sharded state has several copies (hybrid sharding).
    at_ends:   collectives of the whole step stand before all passes of a rank and after all of them. Where they hold up
               compute, and ranks of a group take different microbatches (encoders in bubbles), ranks could otherwise
               wait for each other in a ring: one in a collective, one for a message that comes after it.
    gathers_first: gathers of the whole step stand before all passes of a rank, which may come in an order of its own
               (encoders in bubbles). A rank whose thread waits in a receive starts none that comes after it, whatever
               its device overlaps, and others would wait for it in a ring; nothing in a step waits for reductions.
    islands_differ: other islands have their passes in orders of their own (bubbles filled by step). Stages without a
               group have replicas there, so their reductions stand before those of a group, which all islands share.
    Raises ArgumentError for a stage or level that does not exist, and for a Program that has such actions. O(actions).
    """
    for stage, level in zero.items():
        if not 0 <= stage < program.num_stages or level not in (0, 1, 2, 3):
            raise ArgumentError(
                f"stage {stage} under ZeRO {level}: stages go to {program.num_stages - 1}, levels from 0 to 3."
            )
    if any(action.kind in _ADDED for row in program.actions for action in row):
        raise ArgumentError("the Program has collectives of data parallelism already; add them once.")
    groups = [stage.group for stage in program.stages]
    rule = _Rule(groups, zero, frozenset(trainable), frozenset(copied), at_ends, gathers_first, islands_differ)
    return replace(program, actions=tuple(tuple(rule.row(row)) for row in program.actions))


@dataclass(frozen=True)
class _Rule:
    """Where collectives stand in a row. groups: of each stage."""

    groups: Sequence[int]
    zero: Mapping[int, int]
    trainable: frozenset[int]
    copied: frozenset[int]
    at_ends: bool
    gathers_first: bool
    islands_differ: bool

    def row(self, row: Sequence[Action]) -> Iterator[Action]:
        """A row with its collectives and STEP."""
        # 1. A gather stands before the first pass that needs it, a reduction after the last pass that feeds it.
        gather_index: dict[Action, int] = {}
        reduce_index: dict[Action, int] = {}
        known: dict[tuple[int, Kind], tuple[Action | None, tuple[Action, ...]]] = {}
        for index, action in enumerate(row):
            stage, kind, microbatch, *_ = action
            if (stage, kind) not in known:
                known[stage, kind] = self.gather(stage, kind), self.reductions(stage, kind)
            gather, reductions = known[stage, kind]
            if gather is not None:
                gather_index.setdefault(gather if gather.microbatch < 0 else _of(gather, microbatch), index)
            for reduction in reductions:
                reduce_index[reduction if reduction.microbatch < 0 else _of(reduction, microbatch)] = index
        # 2. Those of the whole step move outwards, so that groups come in one order.
        if self.at_ends or self.gathers_first:
            gather_index |= {gather: 0 for gather in gather_index if gather.microbatch < 0}
        if self.at_ends:
            reduce_index |= {reduction: len(row) - 1 for reduction in reduce_index if reduction.microbatch < 0}
        self.put_in_order(gather_index, reduce_index)
        # Encoders in bubbles have the higher groups, and run first.
        sign = -1 if self.gathers_first else 1
        gathers = sorted(gather_index, key=lambda one: (one.microbatch >= 0, sign * self.groups[one.stage]))
        in_order = sorted(reduce_index, key=lambda one: (one.microbatch < 0, self.groups[one.stage]))
        # 3. The new row.
        before, after = _by_index(gather_index, gathers), _by_index(reduce_index, in_order)
        start = 0
        for index in sorted(before.keys() | after.keys()):
            yield from row[start:index]
            yield from before.get(index, ())
            yield row[index]
            yield from after.get(index, ())
            start = index + 1
        yield from row[start:]
        updated = [stage for stage, kind in known if self.is_gradient(stage, kind)]
        if updated:
            yield Action(min(updated), Kind.STEP)

    def put_in_order(self, gather_index: dict[Action, int], reduce_index: dict[Action, int]) -> None:
        """Move gathers of the whole step forward and its reductions back, for stages that have a group.

        A gather must stand before every collective of a microbatch and every gather of a higher group; a reduction
        after every collective of a microbatch and every reduction of a lower group. Collectives of a microbatch count
        whatever stage has them: those of a stage without a group join ranks of other islands.
        """
        every = (*gather_index, *reduce_index)
        grouped = [action for action in every if self.groups[action.stage] >= 0]
        of_microbatches = [action for action in every if action.microbatch >= 0]
        bounds = [index[a] for index in (gather_index, reduce_index) for a in of_microbatches if a in index]
        of_step = sorted((one for one in grouped if one.microbatch < 0), key=lambda one: self.groups[one.stage])
        for gather in reversed([one for one in of_step if one in gather_index]):
            gather_index[gather] = min([gather_index[gather], *bounds])
            bounds.append(gather_index[gather])
        if self.islands_differ:
            bounds += [index for action, index in reduce_index.items() if self.groups[action.stage] < 0]
        for reduction in [one for one in of_step if one in reduce_index]:
            reduce_index[reduction] = max([reduce_index[reduction], *bounds])
            bounds.append(reduce_index[reduction])

    def gather(self, stage: int, kind: Kind) -> Action | None:
        """The gather that a pass needs: of microbatch -1 if it is of the whole step, else of 0 for each one's."""
        level = self.zero.get(stage, 0)
        if kind is Kind.F and (level == 3 or (level > 0 and stage in self.trainable)):
            return Action(stage, Kind.GATHER, 0 if level == 3 else -1)
        if kind in (Kind.R, Kind.B, Kind.I) and level == 3:
            return Action(stage, Kind.GATHER_B, 0)
        return None

    def reductions(self, stage: int, kind: Kind) -> tuple[Action, ...]:
        """The reductions that take in the gradients of a pass, as in `gather`."""
        if not self.is_gradient(stage, kind) or stage not in self.zero:
            return ()
        of_step = Action(stage, Kind.REDUCE, -1)
        if self.zero[stage] < 2:
            return (of_step,)
        return (Action(stage, Kind.REDUCE, 0), *[of_step] * (stage in self.copied))

    def is_gradient(self, stage: int, kind: Kind) -> bool:
        """Whether a pass makes gradients of trainable parameters."""
        return kind in (Kind.B, Kind.W) and stage in self.trainable


def _of(action: Action, microbatch: int) -> Action:
    """The collective of another microbatch."""
    return Action(action.stage, action.kind, microbatch)


def _by_index(index: Mapping[Action, int], order: Sequence[Action]) -> dict[int, list[Action]]:
    """The actions at each index, in the given order."""
    actions: dict[int, list[Action]] = {}
    for action in order:
        actions.setdefault(index[action], []).append(action)
    return actions
