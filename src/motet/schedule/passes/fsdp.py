"""The pass that adds FSDP's collectives to the passes of modules, slice by slice of their parameters.

- The next slice is gathered while one computes.
- A slice is freed after its forward part, and gathered again for backward.
- The gradients of a slice are reduced right after its backward part.

The simulator prices these actions one by one. FSDP2 runs them itself, in hooks of its modules. So the Program that the
runtime executes has none of them, and its passes are whole.
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
    """How FSDP shards parameters.

    shard_size: number of ranks that share one copy of the parameters; 0 is all ranks, 1 shards nothing. The Program has
                one collective for all shard groups: exchanges and reductions keep them in step.
    reshard_after_forward: parameters are freed after forward and gathered again for backward.
    once_a_step: trainable modules are gathered before their first pass of a step and reduced after their last, and are
                 whole in between.

    Example:
        >>> from motet.schedule import add_fsdp, data_parallel
        >>> program = data_parallel({"backbone": True}, num_ranks=2, num_microbatches=1)
        >>> print(add_fsdp(program, {0: [True]}, Sharding(reshard_after_forward=False)))
        rank 0: 0GATHER0 0F0 0B0 0REDUCE0 0NORM 0STEP
        rank 1: 1GATHER0 1F0 1B0 1REDUCE0 1NORM 1STEP
    """

    shard_size: int = 0
    reshard_after_forward: bool = True
    once_a_step: bool = False


def add_fsdp(
    program: Program, trainable_slices: Mapping[int, Sequence[bool]], sharding: Sharding = Sharding()
) -> Program:
    """Add GATHER, GATHER_B and REDUCE around the passes of a Program of data parallelism.

    trainable_slices: per stage (of the first row), for each slice of its parameters in the order of forward, whether
                      any of it is updated. A pass has a part for each slice (`split_parts`), or is whole. A slice is a
                      block of the model, or several blocks: thousands of simulated ranks need not distinguish each.
    Sharded gradients are reduced in each microbatch (`once_a_step`: in the last one). If there are several copies of
    the parameters (hybrid sharding, or shard_size 1), gradients are also summed over the copies once, after the stage's
    last backward pass, by a REDUCE of no microbatch.
    Raises ArgumentError for a shard_size that does not divide the number of ranks, and for passes in another number of
    parts than slices. O(actions).
    """
    size = sharding.shard_size
    if size < 0 or (size and program.num_ranks % size):
        raise ArgumentError(f"shard_size is {size}; it must divide num_ranks, {program.num_ranks}, or be 0 for all.")
    if program.num_ranks == 1:
        return program
    for row in program.distinct_rows:
        _check_parts(row, trainable_slices)
    sources: dict[int, list[int]] = {}
    for source, sink in program.distinct_edges:
        if sink in trainable_slices:
            sources.setdefault(sink, []).append(source)
    return program.with_rows(lambda row: _Rule(row, trainable_slices, sources, sharding, program.num_ranks).row(row))


def _check_parts(row: Row, trainable_slices: Mapping[int, Sequence[bool]]) -> None:
    parts = Counter(action[:3] for action in row if action.kind in (Kind.F, Kind.B) and action.part >= 0)
    for (stage, kind, microbatch), count in parts.items():
        if stage in trainable_slices and count != (num_slices := len(trainable_slices[stage])):
            whole = Action(stage, kind, microbatch)
            raise ArgumentError(f"add_fsdp: {whole} is in {count} parts; stage {stage} has {num_slices} slices.")


class _Rule:
    """The collectives before and after each pass of one row."""

    def __init__(
        self,
        row: Row,
        trainable_slices: Mapping[int, Sequence[bool]],
        sources: Mapping[int, Sequence[int]],
        sharding: Sharding,
        num_ranks: int,
    ) -> None:
        self.trainable_slices, self.sources = trainable_slices, sources
        self.reshard_after_forward, self.once_a_step = sharding.reshard_after_forward, sharding.once_a_step
        shard_size = sharding.shard_size or num_ranks
        self.is_sharded, self.is_replicated = shard_size > 1, shard_size < num_ranks
        self.first_forward = {action.stage: action.microbatch for action in reversed(row) if action.kind is Kind.F}
        self.last_backward = {action.stage: action.microbatch for action in row if action.kind is Kind.B}
        self.has_backward = {(action.stage, action.microbatch) for action in row if action.kind is Kind.B}

    def row(self, row: Row) -> Iterator[Action]:
        """The row with its collectives."""
        for action in row:
            is_pass = action.kind in (Kind.F, Kind.B) and action.stage in self.trainable_slices
            if is_pass and self.is_sharded:
                yield from self.gathers(action)
            yield action
            if is_pass and action.kind is Kind.B:
                yield from self.reductions(action)

    def gathers(self, action: Action) -> Iterator[Action]:
        """The gathers before a part. The first part gathers its own slice and the PREFETCH_DEPTH slices after it; every
        other part gathers the slice PREFETCH_DEPTH ahead.
        """
        stage, kind, microbatch, part, _ = action
        slices = self.forward_slices(stage, microbatch) if kind is Kind.F else self.backward_slices(stage, microbatch)
        gather = Kind.GATHER if kind is Kind.F else Kind.GATHER_B
        if part < 0:
            slices = [-1] if slices else []
        for slice_ in slices[part + PREFETCH_DEPTH if part > 0 else 0 : max(part, 0) + PREFETCH_DEPTH + 1]:
            yield Action(stage, gather, microbatch, slice_)

    def forward_slices(self, stage: int, microbatch: int) -> list[int]:
        """The slices that forward gathers, in order. FSDP2 frees frozen modules after forward in any case."""
        trainable = self.trainable_slices[stage]
        if self.once_a_step and any(trainable) and microbatch != self.first_forward[stage]:
            return []
        return list(range(len(trainable)))

    def backward_slices(self, stage: int, microbatch: int) -> list[int]:
        """The slices that backward gathers again, in order. Backward ends at the first trainable slice, or at the first
        of all slices if the stage's input needs a gradient.
        """
        trainable = self.trainable_slices[stage]
        # FSDP2 frees frozen parameters after forward in any case (`runtime/fsdp.py`).
        if any(trainable) and (self.once_a_step or not self.reshard_after_forward):
            return []
        needs_input = any((source, microbatch) in self.has_backward for source in self.sources.get(stage, ()))
        first = 0 if needs_input else list(trainable).index(True)
        return list(range(len(trainable) - 1, first - 1, -1))

    def reductions(self, action: Action) -> Iterator[Action]:
        """The reductions after a part of a backward pass."""
        stage, _, microbatch, part, _ = action
        trainable = self.trainable_slices[stage]
        slice_ = len(trainable) - 1 - part if part >= 0 else -1
        if not (any(trainable) if part < 0 else trainable[slice_]):
            return
        is_last = microbatch == self.last_backward[stage]
        if self.is_sharded and (is_last or not self.once_a_step):
            yield Action(stage, Kind.REDUCE, microbatch, slice_)
        if self.is_replicated and is_last:
            yield Action(stage, Kind.REDUCE, -1, slice_)
