"""The pass that adds what FSDP does within a module's passes: the parameters of the next unit are gathered while one
computes, freed after forward, gathered again for backward, and the gradients of a unit are reduced right after its
backward pass.

The simulator prices these actions one by one. FSDP2 runs them by itself, in hooks of its modules, so the Program that
the runtime executes is without this pass, and its passes are whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from motet.core.errors import ArgumentError
from motet.schedule.dependencies import PREFETCH_DEPTH
from motet.schedule.program import Action, Kind, Program, Row


@dataclass(frozen=True)
class Sharding:
    """shard_size: ranks that share one copy of the parameters; 0 is all, 1 none. Shard groups of one job are not told
                apart: they go in step, as each exchange and each reduction makes them do.
    reshard_after_forward: gathered parameters are freed after forward and gathered again for backward.
    """

    shard_size: int = 0
    reshard_after_forward: bool = True


def add_fsdp(program: Program, units: Mapping[int, Sequence[bool]], sharding: Sharding = Sharding()) -> Program:
    """Add GATHER, GATHER_B and REDUCE around the passes of a Program of data parallelism.

    units: per stage (of the first row), whether anything learns in each of the units in which its parameters are
           gathered and freed, in the order of forward. A pass of several units is in a part a unit (`split_parts`).
           Units are the model's blocks, or several blocks each: a Program that is simulated at thousands of ranks need
           not tell every block apart.
    Gradients are reduced each microbatch, and where no rank holds all (hybrid) or each does (shard_size 1) summed over
    the replicas once, after the stage's last backward pass: a REDUCE of no microbatch.
    Raises ArgumentError for a shard_size that does not divide the number of ranks, and for passes that are not in as
    many parts as there are units. O(actions).
    """
    size = sharding.shard_size
    if size < 0 or (size and program.num_ranks % size):
        raise ArgumentError(f"shard_size is {size}; it must divide num_ranks, {program.num_ranks}, or be 0 for all.")
    if program.num_ranks == 1:
        return program
    for row in program.distinct_rows:
        _check_parts(row, units)
    sources: dict[int, list[int]] = {}
    for source, sink in program.edges:
        if sink in units:
            sources.setdefault(sink, []).append(source)
    return program.with_rows(lambda row: _Rule(row, units, sources, sharding, program.num_ranks).row(row))


def _check_parts(row: Row, units: Mapping[int, Sequence[bool]]) -> None:
    parts = Counter(action[:3] for action in row if action.kind in (Kind.F, Kind.B) and action.part >= 0)
    for (stage, kind, microbatch), count in parts.items():
        if stage in units and count != len(units[stage]):
            whole = Action(stage, kind, microbatch)
            raise ArgumentError(f"add_fsdp: {whole} is in {count} parts; stage {stage} has {len(units[stage])} units.")


class _Rule:
    """What stands before and after each pass of one row."""

    def __init__(
        self,
        row: Row,
        units: Mapping[int, Sequence[bool]],
        sources: Mapping[int, Sequence[int]],
        sharding: Sharding,
        num_ranks: int,
    ) -> None:
        self.units, self.sources, self.reshard_after_forward = units, sources, sharding.reshard_after_forward
        shard_size = sharding.shard_size or num_ranks
        self.is_sharded, self.is_replicated = shard_size > 1, shard_size < num_ranks
        self.last_backward = {action.stage: action.microbatch for action in row if action.kind is Kind.B}
        self.has_backward = {(action.stage, action.microbatch) for action in row if action.kind is Kind.B}

    def row(self, row: Row) -> Iterator[Action]:
        for action in row:
            is_pass = action.kind in (Kind.F, Kind.B) and action.stage in self.units
            if is_pass and self.is_sharded:
                yield from self.gathers(action)
            yield action
            if is_pass and action.kind is Kind.B:
                yield from self.reductions(action)

    def gathers(self, action: Action) -> Iterator[Action]:
        """Of the first part: its own unit and those ahead of it; of every other part, the one that comes ahead."""
        stage, kind, microbatch, part, _ = action
        order = self.gathered(stage) if kind is Kind.F else self.gathered_again(stage, microbatch)
        gather = Kind.GATHER if kind is Kind.F else Kind.GATHER_B
        if part < 0:
            order = order[:1] and [-1]
        for unit in order[part + PREFETCH_DEPTH if part > 0 else 0 : max(part, 0) + PREFETCH_DEPTH + 1]:
            yield Action(stage, gather, microbatch, unit)

    def gathered(self, stage: int) -> list[int]:
        return list(range(len(self.units[stage])))

    def gathered_again(self, stage: int, microbatch: int) -> list[int]:
        """In the order of backward, which ends at the first unit that learns, unless the input needs a gradient."""
        trainable = self.units[stage]
        # What is frozen is freed after forward in any case (`runtime/fsdp.py`).
        if any(trainable) and not self.reshard_after_forward:
            return []
        feeds_back = any((source, microbatch) in self.has_backward for source in self.sources.get(stage, ()))
        first = 0 if feeds_back else list(trainable).index(True)
        return list(range(len(trainable) - 1, first - 1, -1))

    def reductions(self, action: Action) -> Iterator[Action]:
        stage, _, microbatch, part, _ = action
        trainable = self.units[stage]
        unit = len(trainable) - 1 - part if part >= 0 else -1
        if not (any(trainable) if part < 0 else trainable[unit]):
            return
        if self.is_sharded:
            yield Action(stage, Kind.REDUCE, microbatch, unit)
        if self.is_replicated and microbatch == self.last_backward[stage]:
            yield Action(stage, Kind.REDUCE, -1, unit)
