"""Which ranks hold a parameter under a Plan, and how they share it: the ZeRO stage, and the ranks of one sharded copy.

A parameter that one stage of each holder uses is shared as the stage's unit says. One that several stages of a Plan use
(tied embeddings, on two stages) is whole on all its holders, as its REDUCE belongs to no stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from motet.core.plan import expert_shard_size
from motet.core.workload import BACKBONE
from motet.runtime.groups import new_group
from motet.runtime.place import Place
from motet.schedule import PlannedProgram

RankGroups = Mapping[tuple[int, ...], dist.ProcessGroup | None]
"""Ranks -> their process group, on these ranks; None of a single rank."""


@dataclass(frozen=True)
class Holders:
    """ranks: the ranks of the job that hold a parameter; of tensor-parallel ranks the first of each group.

    stages: the stages of the Program that use it.
    cut:    the dimension in which tensor-parallel ranks cut it; None: each of them holds all of it.
    is_spread: whether it is of experts, which expert-parallel ranks cut in the first dimension.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    cut: int | None = None
    is_spread: bool = False


@dataclass(frozen=True)
class Sharing:
    """How the ranks that hold a parameter share it.

    module:      the module that it belongs to.
    ranks:       those that hold it; of experts, those that hold the same ones as this rank.
    stages:      the stages of the Program that use it.
    is_of_stage: whether one stage of each of these ranks uses it, whose GATHER and REDUCE are for it too.
    zero:        the ZeRO stage; 0 where every rank holds all of the state.
    shard_size:  the number of ranks that share one copy of the sharded state: consecutive ones.
    cut:         the dimension in which `cut_ranks` cut it; None: each of them holds all of it.
    cut_ranks:   this rank's tensor-parallel ranks, or of experts those that have all of them between them.

    Example:
        >>> sharing = Sharing("image", ranks=(4, 5, 6, 7), stages=(1,), is_of_stage=True, zero=1, shard_size=2)
        >>> sharing.shards(6), sharing.copies(6)
        ((6, 7), (4, 6))
    """

    module: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    is_of_stage: bool
    zero: int = 0
    shard_size: int = 1
    cut: int | None = None
    cut_ranks: tuple[int, ...] = (0,)

    @property
    def is_shared_out(self) -> bool:
        """Whether a rank stores a part of the parameter alone."""
        return self.shard_size > 1 or self.cut is not None

    @property
    def num_tensor_copies(self) -> int:
        """Tensor-parallel ranks that hold the same."""
        return len(self.cut_ranks) if self.cut is None else 1

    @staticmethod
    def of(name: str, parameter: nn.Parameter, holders: Holders, place: Place, *, casts: bool) -> Sharing:
        """The sharing of a parameter on the rank of a Place. casts: whether passes compute with a copy of it.

        Frozen parameters are shared out under ZeRO 3, and where passes have a copy: there is no GATHER for them else.
        What has no dimension, and whole numbers, are never shared out.
        """
        module = BACKBONE if name.startswith(f"{BACKBONE}.") else name.split(".")[1]
        number, *others = (number for number in holders.stages if number in place.stages)
        stage = place.stages[number]
        is_of_stage = not others and stage.data_ranks == holders.ranks
        ranks, cut_ranks, shard_size = (
            place.held_by(holders.ranks, stage),
            place.tensor_ranks(stage.unit),
            stage.shard_size,
        )
        cut = holders.cut if len(cut_ranks) > 1 else None
        if holders.is_spread and (ep := stage.unit.ep) > 1:
            ranks, cut, cut_ranks = ranks[ranks.index(place.rank) % ep :: ep], 0, place.expert_parts
            shard_size = expert_shard_size(shard_size, ep)
        is_shared = stage.zero == 3 or (stage.zero > 0 and (parameter.requires_grad or casts))
        is_whole = parameter.ndim == 0 or not parameter.is_floating_point()
        if not is_of_stage or not is_shared or shard_size == 1 or is_whole:
            return Sharing(module, ranks, holders.stages, is_of_stage, cut=cut, cut_ranks=cut_ranks)
        return Sharing(module, ranks, holders.stages, is_of_stage, stage.zero, shard_size, cut, cut_ranks)

    def shards(self, rank: int) -> tuple[int, ...]:
        """The ranks that share one copy with `rank`."""
        first = self.ranks.index(rank) // self.shard_size * self.shard_size
        return self.ranks[first : first + self.shard_size]

    def copies(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same share as `rank`, one in each copy."""
        return self.ranks[self.ranks.index(rank) % self.shard_size :: self.shard_size]


def sharing_groups(program: PlannedProgram, holders: Iterable[Holders]) -> RankGroups:
    """A process group for each set of ranks that hold the same parameters, or share them out. A collective.

    holders: of all parameters of the whole model, the same on all ranks.
    """
    sets = {
        tuple(rank + t for rank in each.ranks)
        for each in holders
        for t in range(program.stages[each.stages[0]].unit.tp)
    }
    for stage in program.stages:
        ep = stage.unit.ep
        held = [(tuple(rank + t for rank in stage.data_ranks), stage.shard_size) for t in range(stage.unit.tp)]
        if ep > 1:
            of_copy = expert_shard_size(stage.shard_size, ep)
            held += [(ranks[index::ep], of_copy) for ranks, _ in tuple(held) for index in range(ep)]
            sets |= {ranks for ranks, _ in held}
        for ranks, shard_size in held:
            if shard_size > 1:
                whole = Sharing("", ranks, (), True, stage.zero, shard_size)
                sets |= {of(rank) for rank in ranks for of in (whole.shards, whole.copies)}
    return {ranks: new_group(ranks) if len(ranks) > 1 else None for ranks in sorted(sets)}
