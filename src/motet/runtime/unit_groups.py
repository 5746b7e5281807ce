"""Process groups of ranks that share the work of one rank of the Program (context and tensor parallelism)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch.distributed as dist

from motet.runtime.groups import own_group
from motet.runtime.holders import RankGroups
from motet.runtime.place import Place


@dataclass(frozen=True)
class UnitGroups:
    """The groups of one rank inside its unit. They have communicators of their own, apart from those of gradients.

    context: ranks that run the same sequences, by c. tensor: ranks that share the same layers, by t.
    experts: ranks that share experts. None: it is alone.
    expert_parts: ranks that have all experts between them; None: it has them alone.
    sent:    gets the bytes that it sends in collectives of `tensor` and `experts`.
    """

    context: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    expert_parts: dist.ProcessGroup | None = None
    sent: list[float] = field(default_factory=list)

    def by_ranks(self, place: Place) -> RankGroups:
        """The groups whose ranks cut parameters."""
        # Without `ep`, those that have all experts are the tensor-parallel ranks.
        return {place.expert_parts: self.expert_parts, place.tensor_ranks: self.tensor}

    @staticmethod
    def of(place: Place) -> UnitGroups:
        """Make the groups of all ranks of a Plan. A collective, which does nothing where no unit has such ranks."""
        units = place.program.layout.units
        replicas = [(unit, p, d) for unit in units for p, d in product(range(unit.pp), range(unit.dp))]
        context = own_group(
            [unit.rank(p, d, c, t) for c in range(unit.cp)]
            for unit, p, d in replicas
            for t in range(unit.tp)
            if unit.cp > 1
        )
        tensor = own_group(
            [unit.rank(p, d, c, t) for t in range(unit.tp)]
            for unit, p, d in replicas
            for c in range(unit.cp)
            if unit.tp > 1
        )
        spread = [unit for unit in units if unit.ep > 1]
        experts = own_group(
            ranks for unit in spread for ranks in sorted({unit.expert_ranks(one) for one in unit.ranks})
        )
        parts = own_group(
            ranks for unit in spread for ranks in sorted({unit.expert_parts(one) for one in unit.ranks}) if unit.tp > 1
        )
        return UnitGroups(context, tensor, experts, experts if parts is None else parts)
