"""Process groups of ranks that share the work of one rank of the Program (context and tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch.distributed as dist

from motet.core.plan import Plan, Unit
from motet.peer_copies import PeerCopies
from motet.runtime.groups import own_group
from motet.runtime.holders import RankGroups
from motet.runtime.place import Place
from motet.schedule.layout import Layout
from motet.schedule.plan_units import backbone_unit, cuts_over_replicas, cuts_sequences, gathering_ranks

_Groups = Mapping[str, dist.ProcessGroup]
OpenCopies = Callable[[dist.ProcessGroup], PeerCopies]
"""Opens the copies of a group. A collective of it, which raises as `peer_copies.open_copies`."""


@dataclass(frozen=True)
class UnitGroups:
    """The groups of one rank by unit: that of its own, and those in its bubbles. They have communicators of their own,
    apart from those of gradients. A unit is left out where the rank is alone.

    context:  ranks that run the same sequences, or share items, by c. tensor: ranks that share the same layers, by t.
    gathered: ranks on which the rows of a unit come together (`plan_units.gathering_ranks`).
    experts:  ranks that share experts. None: it is alone.
    expert_parts: ranks that have all experts between them; None: it has them alone.
    replicas: ranks that share sequences, or items, where replicas of the rank's unit do, by replica, then by c. None:
              they do not.
    copies:   of those of `tensor` whose pieces of products travel by copies.
    sent:     gets the bytes that it sends in collectives of all but `context` and `replicas`.
    """

    context: _Groups = field(default_factory=dict)
    tensor: _Groups = field(default_factory=dict)
    gathered: _Groups = field(default_factory=dict)
    experts: dist.ProcessGroup | None = None
    expert_parts: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    copies: dict[dist.ProcessGroup, PeerCopies] = field(default_factory=dict)
    sent: list[float] = field(default_factory=list)

    def copy(self, opened: OpenCopies) -> None:
        """Let pieces of products of all tensor-parallel ranks travel by copies. A collective."""
        for group in self.tensor.values():
            if group not in self.copies:  # Units whose ranks are divided alike have one.
                self.copies[group] = opened(group)

    def by_ranks(self, place: Place) -> RankGroups:
        """The groups whose ranks cut parameters."""
        # Without `ep`, those that have all experts are the tensor-parallel ranks.
        tensor = {place.tensor_ranks(unit): self.tensor.get(unit.name) for unit, _ in place.units}
        return {place.expert_parts: self.expert_parts} | tensor

    @staticmethod
    def of(place: Place) -> UnitGroups:
        """Make the groups of all ranks of a Plan. A collective, which does nothing where no unit has such ranks."""
        layout, made = place.program.layout, _Made()
        plan = layout.plan
        context, tensor = (
            made.of_units({unit.name: tuple(sets(unit)) for unit in plan.units}) for sets in (_context, _tensor)
        )
        gathered = made.of_units(
            {unit.name: tuple(_gathered(layout, unit)) for unit in plan.units if gathering_ranks(plan, unit) > 1}
        )
        spread = [unit for unit in layout.units if unit.ep > 1]
        experts = own_group(
            ranks for unit in spread for ranks in sorted({unit.expert_ranks(one) for one in unit.ranks})
        )
        parts = own_group(
            ranks for unit in spread for ranks in sorted({unit.expert_parts(one) for one in unit.ranks}) if unit.tp > 1
        )
        replicas = own_group(
            ranks for unit in layout.units if _shares_over_replicas(plan, unit) for ranks in _replicas(unit)
        )
        return UnitGroups(context, tensor, gathered, experts, experts if parts is None else parts, replicas)


class _Made:
    """Groups that are made, once for each of several units whose ranks are divided alike."""

    def __init__(self) -> None:
        self._own: dict[tuple[Sequence[int], ...], dist.ProcessGroup | None] = {}

    def of_units(self, sets: Mapping[str, tuple[Sequence[int], ...]]) -> dict[str, dist.ProcessGroup]:
        """The group of this rank in each unit, of those where it has one."""
        groups = {}
        for name, of_unit in sets.items():
            if of_unit not in self._own:
                self._own[of_unit] = own_group(of_unit)
            if (group := self._own[of_unit]) is not None:
                groups[name] = group
        return groups


def _context(unit: Unit) -> Iterable[Sequence[int]]:
    for p, d, t in product(range(unit.pp), range(unit.dp), range(unit.tp)):
        if unit.cp > 1:
            yield tuple(unit.rank(p, d, c, t) for c in range(unit.cp))


def _shares_over_replicas(plan: Plan, unit: Unit) -> bool:
    is_cut = any(cuts_over_replicas(plan, name) for name in unit.modules)
    return is_cut or (unit == backbone_unit(plan) and cuts_sequences(plan))


def _replicas(unit: Unit) -> Iterable[Sequence[int]]:
    for p, t in product(range(unit.pp), range(unit.tp)):
        yield tuple(unit.rank(p, d, c, t) for d, c in product(range(unit.dp), range(unit.cp)))


def _tensor(unit: Unit) -> Iterable[Sequence[int]]:
    for p, d, c in product(range(unit.pp), range(unit.dp), range(unit.cp)):
        if unit.tp > 1:
            yield tuple(unit.rank(p, d, c, t) for t in range(unit.tp))


def _gathered(layout: Layout, unit: Unit) -> Iterable[Sequence[int]]:
    host, num_ranks = layout.backbone, gathering_ranks(layout.plan, unit)
    for p, d, c, t in product(range(host.pp), range(host.dp), range(host.cp), range(unit.tp)):
        yield tuple(host.rank(p, d, c) + number * unit.tp + t for number in range(num_ranks))
