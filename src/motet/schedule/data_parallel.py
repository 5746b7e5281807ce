"""Colocated data-parallel training: every rank holds a share of every module (FSDP), encoders run one after the other,
then the backbone, and encoder outputs go to the ranks that need them (OrchMLLM sections 4 and 6, post-balancing).

The order is that of `runtime/actions.py` and `runtime/step.py`, and within a module that of FSDP2: the parameters of
the next unit are gathered while one computes, freed after forward, gathered again for backward, and the gradients of a
unit are reduced right after its backward pass. The sum of three numbers that gives the gradient's norm is part of STEP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from motet.core.errors import ArgumentError
from motet.schedule.program import Action, AlikeRows, Kind, Program, Stage


@dataclass(frozen=True)
class ShardedModule:
    """A module whose parameters are gathered and freed in units, in the order of forward.

    trained: per unit, whether anything in it learns. Units are the model's blocks, or several blocks each: a Program
             that is simulated at thousands of ranks need not tell every block apart.
    """

    name: str
    trained: tuple[bool, ...]

    @property
    def num_units(self) -> int:
        return len(self.trained)


@dataclass(frozen=True)
class Sharding:
    """shard_size: ranks that share one copy of the parameters; 0 is all, 1 none. Shard groups of one job are not told
                apart: they go in step, as each exchange and each reduction makes them do.
    reshard_after_forward: gathered parameters are freed after forward and gathered again for backward.
    """

    shard_size: int = 0
    reshard_after_forward: bool = True


def data_parallel(
    modules: Sequence[ShardedModule],
    num_ranks: int,
    num_microbatches: int,
    *,
    exchanged: Collection[str] | None = None,
    sharding: Sharding = Sharding(),
) -> Program:
    """A Program with its communication; stage `rank * len(modules) + place` is the module at a place, on a rank.

    modules:   encoders in the order in which they run, then the backbone; the stages of a module form a group.
    exchanged: encoders whose outputs move between ranks; None is all, () where whole examples are placed.
    A pass has a part a unit. An encoder has a backward pass if anything in it learns, the backbone if anything does.
    Gradients are reduced each microbatch, and where no rank holds all (hybrid) or each does (shard_size 1) summed over
    the replicas once, at the end: a REDUCE of no microbatch. Raises ArgumentError for what is below its least value, a
    shard_size that does not divide num_ranks, or a name that is no encoder. O(stages + actions of one rank).
    """
    _check(modules, num_ranks, num_microbatches, exchanged, sharding)
    moved = {module.name for module in modules[:-1]} if exchanged is None else set(exchanged)
    if num_ranks == 1:
        moved = set()
    row = tuple(_Row(modules, num_ranks, num_microbatches, moved, sharding).actions())
    edges = [(place, len(modules) - 1) for place in range(len(modules) - 1)]
    firsts = range(0, num_ranks * len(modules), len(modules))
    return Program(
        tuple(Stage(rank, module.name, group) for rank in range(num_ranks) for group, module in enumerate(modules)),
        tuple((first + source, first + sink) for first in firsts for source, sink in edges),
        AlikeRows(row, num_ranks, len(modules)),
        num_microbatches,
    )


def _check(
    modules: Sequence[ShardedModule],
    num_ranks: int,
    num_microbatches: int,
    exchanged: Collection[str] | None,
    sharding: Sharding,
) -> None:
    if num_ranks < 1 or num_microbatches < 1:
        raise ArgumentError(f"num_ranks is {num_ranks}, num_microbatches {num_microbatches}; both must be at least 1.")
    if not modules or any(not module.trained for module in modules):
        raise ArgumentError("every module needs at least one unit, and there must be a backbone.")
    size = sharding.shard_size
    if size < 0 or (size and num_ranks % size):
        raise ArgumentError(f"shard_size is {size}; it must divide num_ranks, {num_ranks}, or be 0 for all.")
    encoders = [module.name for module in modules[:-1]]
    for name in exchanged or ():
        if name not in encoders:
            raise ArgumentError(f"exchanged names {name!r}; the encoders are {', '.join(encoders) or 'none'}.")


@dataclass(frozen=True)
class _Row:
    """What rank 0 does; the other ranks do the same on their own stages."""

    modules: Sequence[ShardedModule]
    num_ranks: int
    num_microbatches: int
    moved: Collection[str]
    sharding: Sharding

    @property
    def shard_size(self) -> int:
        return self.sharding.shard_size or self.num_ranks

    def actions(self) -> Iterator[Action]:
        for microbatch in range(self.num_microbatches):
            yield from self.microbatch(microbatch)
        learning = [stage for stage, module in enumerate(self.modules) if any(module.trained)]
        if learning:
            yield Action(learning[-1], Kind.STEP)

    def microbatch(self, microbatch: int) -> Iterator[Action]:
        backbone = len(self.modules) - 1
        learning = [stage for stage in range(backbone) if any(self.modules[stage].trained)]
        for stage in range(backbone):
            yield from self.forward(stage, microbatch)
            if self.modules[stage].name in self.moved:
                yield Action(stage, Kind.EXCHANGE_F, microbatch, peer=backbone)
        yield from self.forward(backbone, microbatch)
        if learning or any(self.modules[backbone].trained):
            yield from self.backward(backbone, microbatch, whole=bool(learning))
        for stage in reversed(learning):
            if self.modules[stage].name in self.moved:
                yield Action(stage, Kind.EXCHANGE_B, microbatch, peer=backbone)
            yield from self.backward(stage, microbatch, whole=False)

    def forward(self, stage: int, microbatch: int) -> Iterator[Action]:
        num_units = self.modules[stage].num_units
        gathers = [Action(stage, Kind.GATHER, microbatch, unit) for unit in range(num_units)]
        passes = [Action(stage, Kind.F, microbatch, unit) for unit in range(num_units)]
        yield from _ahead(gathers if self.shard_size > 1 else [], [[one] for one in passes])

    def backward(self, stage: int, microbatch: int, *, whole: bool) -> Iterator[Action]:
        """whole: its input needs a gradient; else backward ends at the first unit that learns."""
        trained = self.modules[stage].trained
        frees = self.sharding.reshard_after_forward or not any(trained)
        first = 0 if whole else trained.index(True)
        order = range(len(trained) - 1, -1, -1)
        gathers = [Action(stage, Kind.GATHER_B, microbatch, unit) for unit in order if unit >= first]
        passes = []
        for part, unit in enumerate(order):
            reduces = [Action(stage, Kind.REDUCE, of, unit) for of in self.reductions(microbatch) if trained[unit]]
            passes.append([Action(stage, Kind.B, microbatch, part), *reduces])
        yield from _ahead(gathers if frees and self.shard_size > 1 else [], passes)

    def reductions(self, microbatch: int) -> list[int]:
        """The microbatches of the reductions that follow a backward pass; -1 is that of the whole step."""
        over_shards = [microbatch] if self.shard_size > 1 else []
        last = microbatch == self.num_microbatches - 1
        return over_shards + ([-1] if last and self.shard_size < self.num_ranks else [])


def _ahead(gathers: list[Action], passes: list[list[Action]]) -> Iterator[Action]:
    """Each pass with what follows it, after its own gather and the next one's."""
    yield from gathers[:1]
    for place, following in enumerate(passes):
        yield from gathers[place + 1 : place + 2]
        yield from following
