"""From the lengths of a microbatch to the phases that `choose` compares: what items cost, and what that takes.

Everything is a pure function of lengths and constants, the same on all ranks; nothing is measured while training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from motet.balance.costs import Cost, Packed, Padded
from motet.balance.phases import Phase
from motet.core.arrays import Int64Array
from motet.core.cluster import Link
from motet.core.exchange import Network
from motet.core.workload import BACKBONE, BatchLengths


class ItemWork(Protocol):
    """What each item is to its phase, in whole numbers: its length, its operations, its picoseconds."""

    def __call__(self, lengths: BatchLengths) -> Mapping[str, Int64Array]:
        """Per phase, int64 [num_items], >= 0; of a padded phase, what an item is by itself, more for a longer one."""

    def unit(self, phase: str) -> str:
        """What is counted, as reports name it."""


@dataclass(frozen=True)
class LengthWork:
    """Items are weighed by their lengths, whatever a model does with them. units: of some phases, what is counted."""

    units: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, lengths: BatchLengths) -> dict[str, Int64Array]:
        return {BACKBONE: lengths.sequence, **{name: items.length for name, items in lengths.items.items()}}

    def unit(self, phase: str) -> str:
        return self.units.get(phase, "tokens" if phase == BACKBONE else "length")


@dataclass(frozen=True)
class Speed:
    """What a rank computes and sends in a second, stated and not measured, so that a run can be repeated.

    link: of an exchange inside a node. inter_node: of one between nodes.
    """

    flops_per_s: float
    link: Link
    inter_node: Link

    def network(self, ranks_per_node: int | None) -> Network:
        """Of ranks in such nodes. None: all share one."""
        return Network(self.link, self.inter_node, ranks_per_node)


ASSUMED_SPEEDS: Mapping[str, Speed] = {
    "cuda": Speed(400e12, Link(bytes_per_s=40e9, latency_s=50e-6), Link(bytes_per_s=20e9, latency_s=50e-6)),
    "cpu": Speed(0.04e12, Link(bytes_per_s=1e9, latency_s=300e-6), Link(bytes_per_s=1e9, latency_s=300e-6)),
}
"""Until it is stated or measured, by kind of device: what training reaches on a current data-centre GPU, with four
fifths of a network card of 200 Gbit/s for each rank between nodes; and on a CPU core with a loopback, and an Ethernet
of 10 Gbit/s between nodes. What counts is the ratio between computing and exchanging."""


@dataclass(frozen=True)
class StepTimes:
    """The seconds that ways of balancing are compared by.

    unit_s:      per phase, seconds of a rank, forward and backward, for a unit of the phase's cost.
    link:        what an exchange takes; a Link where all ranks share a node.
    token_bytes: of one row of an encoder's output.
    frozen:      encoders that get no gradient back, as nothing in them trains.
    """

    unit_s: Callable[[BatchLengths], Mapping[str, float]]
    link: Link | Network
    token_bytes: int
    frozen: frozenset[str] = frozenset()

    @property
    def network(self) -> Network:
        """`link`, whichever it is."""
        return Network.of(self.link)

    def shared_by(self, num_ranks: int) -> StepTimes:
        """Where so many ranks share what one would compute: each phase in as much less time, exchanges as they are."""
        whole_s = self.unit_s
        return replace(self, unit_s=lambda lengths: {name: s / num_ranks for name, s in whole_s(lengths).items()})


@dataclass(frozen=True)
class PhaseCosts:
    """What the items of a microbatch cost, phase by phase.

    costs: per phase, backbone included, how the work of the items on a rank makes up its load: `Packed()` adds it up,
           `Padded()` counts each as the largest. Coefficients weigh the work anew.
    """

    costs: Mapping[str, Cost]
    work: ItemWork

    @property
    def names(self) -> tuple[str, ...]:
        """Of the phases: backbone first, the others in the order of the costs."""
        return BACKBONE, *(name for name in self.costs if name != BACKBONE)

    def unit(self, phase: str) -> str:
        """What the loads of a phase are counted in; "cost" where coefficients weigh the work anew."""
        return self.work.unit(phase) if self.costs[phase] in (Packed(), Padded()) else "cost"


@dataclass(frozen=True)
class StepCosts(PhaseCosts):
    """And what that takes, so that ways of balancing can be compared."""

    times: StepTimes

    def phases(self, lengths: BatchLengths, work: Mapping[str, Int64Array] | None = None) -> list[Phase]:
        """The phases of a microbatch, in the order of `names`. work: of its items, where it has been counted before."""
        weights = self.work(lengths) if work is None else work
        unit_s = self.times.unit_s(lengths)

        def phase(name: str) -> Phase:
            items = lengths.of(name)
            return Phase(
                name,
                weights[name],
                self.costs[name],
                items.example,
                unit_s[name],
                None if name == BACKBONE else items.num_tokens * self.times.token_bytes,
                num_exchanges=1 if name in self.times.frozen else 2,
            )

        return [phase(name) for name in self.names]
