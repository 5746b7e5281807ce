"""Process groups of ranks that share the work of one rank of the Program (context and tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch.distributed as dist

from motet.runtime.groups import new_group
from motet.runtime.holders import RankGroups
from motet.runtime.place import Place


@dataclass(frozen=True)
class UnitGroups:
    """The groups of one rank inside its unit. They have communicators of their own, apart from those of gradients.

    context: ranks that run the same sequences, by c. tensor: ranks that share the same layers, by t.
    experts: ranks that share experts. None: it is alone.
    expert_parts: ranks that have all experts between them; None: none do, or those of `experts` alone.
    sent:    gets the bytes that it sends in collectives of `tensor` and `experts`.
    """

    context: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    expert_parts: dist.ProcessGroup | None = None
    sent: list[float] = field(default_factory=list)

    def by_ranks(self, place: Place) -> RankGroups:
        """The groups whose ranks cut parameters."""
        of_parts = {} if self.expert_parts is None else {place.expert_parts: self.expert_parts}
        return {place.expert_ranks: self.experts, place.tensor_ranks: self.tensor} | of_parts

    @staticmethod
    def of(place: Place) -> UnitGroups:
        """Make the groups of all ranks of a Plan. A collective, which does nothing where no unit has such ranks."""
        context = tensor = experts = expert_parts = None
        for unit in place.program.layout.units:
            for p, d in product(range(unit.pp), range(unit.dp)):
                for t in range(unit.tp) if unit.cp > 1 else ():
                    ranks = [unit.rank(p, d, c, t) for c in range(unit.cp)]
                    group = new_group(ranks)
                    context = group if place.rank in ranks else context
                for c in range(unit.cp) if unit.tp > 1 else ():
                    ranks = [unit.rank(p, d, c, t) for t in range(unit.tp)]
                    group = new_group(ranks)
                    tensor = group if place.rank in ranks else tensor
            for ranks in sorted({unit.expert_ranks(rank) for rank in unit.ranks}) if unit.ep > 1 else ():
                group = new_group(ranks)
                experts = group if place.rank in ranks else experts
            shares_both = unit.ep > 1 < unit.tp
            for ranks in sorted({unit.expert_parts(rank) for rank in unit.ranks}) if shares_both else ():
                group = new_group(ranks)
                expert_parts = group if place.rank in ranks else expert_parts
        return UnitGroups(context, tensor, experts, expert_parts)
