"""From the lengths of a microbatch to its phases: the work, cost and seconds of the items, which `choose` compares.

Everything is a pure function of lengths and constants, so it is the same on all ranks. Training measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from motet.balance.costs import Cost, Packed, Padded
from motet.balance.item_bytes import ItemBytes
from motet.balance.phases import KeyExchange, Phase
from motet.core.arrays import Int64Array
from motet.core.cluster import Link
from motet.core.cuts import CutRows
from motet.core.errors import ArgumentError
from motet.core.exchange import Network
from motet.core.nodes import RanksPerNode
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths


class ItemWork(Protocol):
    """The work of each item in its phase, in whole numbers: its length, its operations, or its picoseconds.

    Example:
        >>> class SquaredLength:
        ...     def __call__(self, lengths):
        ...         return {BACKBONE: lengths.sequence**2, **{name: i.length**2 for name, i in lengths.items.items()}}
        ...     def unit(self, phase):
        ...         return "length^2"
        >>> work: ItemWork = SquaredLength()
    """

    def __call__(self, lengths: BatchLengths) -> Mapping[str, Int64Array]:
        """The work of the items of each phase, int64 [num_items], >= 0.

        In a padded phase it is the work of an item alone, and must not fall with the item's length.
        """

    def unit(self, phase: str) -> str:
        """The unit of the work of a phase, as reports print it."""


@dataclass(frozen=True)
class LengthWork:
    """The work of an item is its length, or a polynomial of it: linear * length + quadratic * length^2.

    units:        names of the unit of length, by phase; default "tokens" and "length".
    coefficients: the polynomial, by phase; the squares of an item's segments add up. Default: the length itself.

    Example:
        >>> work = LengthWork({"image": "patches"}, {BACKBONE: Packed(linear=2, quadratic=1)})
        >>> work.unit(BACKBONE), work.unit("image"), work.unit("audio")
        ('cost', 'patches', 'length')
    """

    units: Mapping[str, str] = field(default_factory=dict)
    coefficients: Mapping[str, Packed] = field(default_factory=dict)

    def __call__(self, lengths: BatchLengths) -> dict[str, Int64Array]:
        """Of each sequence and of each item, int64 [num_items], by phase."""
        return {name: self._of(name, lengths.of(name)) for name in (BACKBONE, *lengths.items)}

    def _of(self, phase: str, items: ItemLengths) -> Int64Array:
        cost = self.coefficients.get(phase)
        return items.length if cost is None else items.summed(cost.weights)

    def unit(self, phase: str) -> str:
        """The name of the unit in which the work of a phase is counted."""
        if self.coefficients.get(phase, Packed()) != Packed():
            return "cost"
        return self.units.get(phase, "tokens" if phase == BACKBONE else "length")


class ItemMemory(Protocol):
    """What the items of a microbatch take of a rank's memory, and what they may take.

    Example:
        >>> import numpy as np
        >>> class ByteForEachToken:
        ...     room_bytes = 1000
        ...     def __call__(self, lengths):
        ...         none = np.zeros((lengths.num_examples, 0), int)
        ...         whole = ItemBytes(lengths.sequence, none, none[0], 0 * lengths.sequence, none)
        ...         return {BACKBONE: whole}
        >>> memory: ItemMemory = ByteForEachToken()
    """

    @property
    def room_bytes(self) -> int:
        """What items may take of a rank's memory: what is left beside the model's state."""

    def __call__(self, lengths: BatchLengths) -> Mapping[str, ItemBytes]:
        """What the items of each phase take."""


@dataclass(frozen=True)
class Speed:
    """What a rank computes and sends in a second: stated, not measured, so that a run can be repeated.

    flops_per_s: operations of a rank. link: for exchanges inside a node. inter_node: for exchanges between nodes.

    Example:
        >>> speed = Speed(400e12, Link(40e9, latency_s=0.0), Link(20e9, latency_s=0.0))
        >>> speed.network(ranks_per_node=8).nodes(num_ranks=10).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    """

    flops_per_s: float
    link: Link
    inter_node: Link

    def network(self, ranks_per_node: RanksPerNode | None) -> Network:
        """The links between ranks in nodes of `ranks_per_node`, as of `Network`."""
        return Network(self.link, self.inter_node, ranks_per_node)


ASSUMED_SPEEDS: Mapping[str, Speed] = {
    "cuda": Speed(400e12, Link(bytes_per_s=40e9, latency_s=50e-6), Link(bytes_per_s=20e9, latency_s=50e-6)),
    "cpu": Speed(0.04e12, Link(bytes_per_s=1e9, latency_s=300e-6), Link(bytes_per_s=1e9, latency_s=300e-6)),
}
"""Speeds by kind of device, used until a recipe states them or a profile measures them.

cuda: a current data-centre GPU in training; between nodes, 4/5 of a network card of 200 Gbit/s for each rank.
cpu:  one core, loopback inside a node, Ethernet of 10 Gbit/s between nodes.
Only the ratio of computing to exchanging matters to a choice."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds and bytes, by which methods of balancing are compared.

    unit_s:      from lengths to seconds of a rank, forward and backward, for one unit of each phase's cost.
    link:        the link of exchanges; a Link alone means that all ranks share a node.
    token_bytes: bytes of one row that moves between a phase and the backbone.
    row_bytes:   by phase, the same where it is not `token_bytes`.
    frozen:      phases between which and the backbone no gradient of these rows moves.
    held:        by phase, elements that a unit of an item's length keeps for backward; {}: deferring needs no memory.
    keys:        what ranks that share a sequence exchange; (): sequences stay whole. media_bytes: of the rows of an
                 image that a sequence attends to beside itself; 0: of none.
    item_keys:   encoder -> the same of its items; those of other encoders stay whole.
    cut_rows:    encoder -> between which rows its items can be cut; left out: those that they become.
    tile_rows:   encoder -> as of `Phase`, of those whose items can be cut between tiles alone.
    merges:      whether the rank with most of a sequence's rows merges it whole, and gives others theirs.
    again:       encoders whose rows enter the backbone again behind a merge: they move to their places from there.
    waits:       whether ranks wait for each other in each phase, as of `Phase`.
    memory:      what items take of a rank's memory; None: it is not known, and nothing is placed by it.

    Example:
        >>> times = StepTimes(lambda lengths: {"image": 1e-6}, Link(40e9, latency_s=0.0), token_bytes=8192)
        >>> times.shared_by(4).unit_s(None)
        {'image': 2.5e-07}
    """

    unit_s: Callable[[BatchLengths], Mapping[str, float]]
    link: Link | Network
    token_bytes: int
    frozen: frozenset[str] = frozenset()
    held: Mapping[str, int] = field(default_factory=dict)
    keys: tuple[KeyExchange, ...] = ()
    media_bytes: int = 0
    row_bytes: Mapping[str, int] = field(default_factory=dict)
    item_keys: Mapping[str, tuple[KeyExchange, ...]] = field(default_factory=dict)
    cut_rows: Mapping[str, CutRows] = field(default_factory=dict)
    tile_rows: Mapping[str, int] = field(default_factory=dict)
    merges: bool = False
    again: tuple[str, ...] = ()
    waits: bool = True
    memory: ItemMemory | None = None

    @property
    def room_bytes(self) -> int | None:
        """What items may take of a rank's memory; None: it is not known."""
        return None if self.memory is None else self.memory.room_bytes

    @property
    def network(self) -> Network:
        """`link` as a Network."""
        return Network.of(self.link)

    def shared_by(self, num_ranks: int) -> StepTimes:
        """Times where `num_ranks` ranks share the work of one: unit_s / num_ranks; exchanges take the same."""
        whole_s = self.unit_s
        return replace(self, unit_s=lambda lengths: {name: s / num_ranks for name, s in whole_s(lengths).items()})


@dataclass(frozen=True)
class PhaseCosts:
    """How each phase of a microbatch is balanced: the work of its items, and how work adds up on a rank.

    costs: one Cost for each phase, backbone included. `Packed()` adds the work up; `Padded()` counts each item as the
           largest; other coefficients are applied to the work. Coefficients of the lengths of items with segments
           belong into `LengthWork`, which sees the segments.

    Example:
        >>> costs = PhaseCosts({"image": Padded(), BACKBONE: Packed(linear=2, quadratic=1)}, LengthWork())
        >>> [(phase, costs.unit(phase)) for phase in costs.names]
        [('backbone', 'cost'), ('image', 'length')]
    """

    costs: Mapping[str, Cost]
    work: ItemWork

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the phases: the backbone first, the others in the order of `costs`."""
        return BACKBONE, *(name for name in self.costs if name != BACKBONE)

    def check_segments(self, lengths: BatchLengths) -> None:
        """Raise ArgumentError for a cost that would take an item of several segments for one of their sum."""
        for name, cost in self.costs.items():
            if name in lengths.items and lengths.items[name].segments is not None and cost.quadratic:
                raise ArgumentError(
                    f"{cost} of {name!r} squares whole items, and these have segments; give the coefficients to "
                    "LengthWork, which adds up the squares of segments."
                )

    def unit(self, phase: str) -> str:
        """The unit of the loads of a phase: that of the work, or "cost" where coefficients are applied to it."""
        return self.work.unit(phase) if self.costs[phase] in (Packed(), Padded()) else "cost"


@dataclass(frozen=True)
class StepCosts(PhaseCosts):
    """PhaseCosts with times, so that methods of balancing can be compared.

    defers: whether an example may change its microbatch within its step, where that is predicted to be faster.

    Example:
        >>> import numpy as np
        >>> lengths = BatchLengths(np.array([70, 50]), np.array([35, 25]), np.zeros(2, np.int32), {})
        >>> times = StepTimes(lambda lengths: {BACKBONE: 0.5}, Link(40e9, latency_s=0.0), token_bytes=8192)
        >>> [phase] = StepCosts({BACKBONE: Packed()}, LengthWork(), times).phases(lengths)
        >>> phase.name, phase.lengths.tolist(), phase.seconds_per_cost
        ('backbone', [70, 50], 0.5)
    """

    times: StepTimes
    defers: bool = True

    def phases(self, lengths: BatchLengths, work: Mapping[str, Int64Array] | None = None) -> list[Phase]:
        """The phases of a microbatch, in the order of `names`. work: its items' work, if it is known already."""
        weights = self.work(lengths) if work is None else work
        unit_s, keys = self.times.unit_s(lengths), {**self.times.item_keys, BACKBONE: self.times.keys}
        taken: Mapping[str, ItemBytes] = {} if self.times.memory is None else self.times.memory(lengths)

        def phase(name: str) -> Phase:
            items, rows = lengths.of(name), None
            if keys.get(name) or name in self.times.tile_rows:
                rows = self.times.cut_rows.get(name, CutRows()).num_rows(items.num_tokens, items.length)
            return Phase(
                name,
                weights[name],
                self.costs[name],
                items.example,
                unit_s[name],
                None if name == BACKBONE else items.num_tokens * self.times.row_bytes.get(name, self.times.token_bytes),
                num_exchanges=1 if name in self.times.frozen else 2,
                held=items.length * self.times.held[name] if self.times.held else None,
                bytes=taken.get(name),
                rows=rows,
                keys=keys.get(name, ()),
                key_lengths=items.length,
                beside=None if items.num_media is None else items.num_media * self.times.media_bytes,
                tile_rows=self.times.tile_rows.get(name, 0),
                merged=self._merged(lengths) if name == BACKBONE and self.times.merges else (),
                waits=self.times.waits,
            )

        return [phase(name) for name in self.names]

    def _merged(self, lengths: BatchLengths) -> tuple[tuple[Int64Array, int], ...]:
        """As of `Phase`: rows that are merged, and those of each encoder that enter again. Gradients of these come back
        if it learns.
        """
        times, found = self.times, [(lengths.sequence * self.times.token_bytes, 2)]
        for name in times.again:
            items, size_bytes = lengths.items[name], np.zeros(lengths.num_examples, dtype=np.int64)
            row_bytes = times.row_bytes.get(name, times.token_bytes)
            np.add.at(size_bytes, items.example, items.num_tokens * row_bytes)
            found.append((size_bytes, 1 if name in times.frozen else 2))
        return tuple(found)
