"""The phases of a microbatch: items, costs, seconds and bytes. `choose` decides from these and the link alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from motet.balance.backend import Backend
from motet.balance.checks import checked_integers, checked_ranks
from motet.balance.costs import Cost, Packed
from motet.balance.home import assign_from_home, renamed
from motet.balance.item_bytes import ItemBytes
from motet.balance.placement import assign, lower_bound, score
from motet.balance.weights import item_weights
from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.assignment import Assignment
from motet.core.errors import ArgumentError
from motet.core.exchange import NS_PER_S
from motet.core.nodes import RanksPerNode, node_sizes

_JOINT_TOTAL = 2**50
"""The sum of the largest phase in joint costs. It is low enough for exact sums in float64 and in int64."""


@dataclass(frozen=True)
class KeyExchange:
    """An exchange of keys and values between ranks that share items (`cutting.py`).

    window:    as of `core.spec.Attention`. row_bytes: of a row's keys and values, in one layer.
    count:     how often such an exchange takes place in a microbatch: in each layer forward, backward, and recomputed.
    divisor:   the length of an item that makes one row there; 0: its length makes none. queries: rows of each item
               besides, which read it.

    Example:
        >>> exchange = KeyExchange(window=0, row_bytes=4096, count=3 * 24, divisor=2, queries=16)
        >>> exchange.count, exchange.rows(np.array([7, 100])).tolist()
        (72, [20, 66])
    """

    window: int
    row_bytes: int
    count: int
    divisor: int = 1
    queries: int = 0

    def rows(self, lengths: Int64Array) -> Int64Array:
        """The rows of each item that have keys, int64 [num_items]. lengths: int64 [num_items]."""
        return self.queries + (-(-lengths // self.divisor) if self.divisor else 0 * lengths)


@dataclass(frozen=True, eq=False)
class Phase:
    """One phase of a microbatch: its items, their cost, the bytes of their outputs, and what they hold.

    lengths:          int64 [num_items], the lengths (or any other work) that `cost` is computed from.
    owner:            int64 [num_items], the example of each item; the backbone's items are the examples themselves.
    seconds_per_cost: seconds of a rank, forward and backward, for one unit of the cost.
    output_bytes:     int64 [num_items], bytes of an item's output if another rank needs it; None for the backbone,
                      whose outputs never move.
    num_exchanges:    how often these bytes are sent: 2 (the output, and its gradient back), or 1 in a frozen phase.
    held:             int64 [num_items], >= 0, what an item takes of its rank's memory from its forward to its backward
                      pass, in a unit that all phases share; None: nothing.
    bytes:            what its items take of a rank's memory; None: it is not known.
    rows:             int64 [num_items], rows of items between which they can be cut over ranks: of the backbone's
                      sequences, or of an encoder's outputs; None: they stay whole. keys: what the ranks that share them
                      exchange. key_lengths: int64 [num_items], the lengths of items by which keys count; None: as rows.
    beside:           int64 [num_items], bytes of what rows of a sequence attend to beside it. Each further rank that
                      shares the sequence gets a copy, and sends back a gradient; None: nothing.
    tile_rows:        how many of these rows stay together, as tiles that do not see each other; 0: any can be apart.
    merged:           what others that share a sequence get of it from the rank with most of its rows, which merges it
                      whole, and to which all goes that moves to it: by exchange the bytes of each sequence, int64
                      [num_items], and how often they move; (): sequences are not merged whole.
    waits:            whether ranks wait for each other in the phase, as those that shard a module gather its weights
                      layer by layer. Else they meet where rows are exchanged, and at the end.

    Example:
        >>> lengths, owner = np.array([30, 10, 20]), np.array([0, 0, 1])  # example 0 has two images
        >>> images = Phase("image", lengths, Packed(), owner, seconds_per_cost=0.001)
        >>> placed = assign(lengths, 2)
        >>> placed.loads.tolist(), images.compute_ns(placed)
        ([30, 30], 30000000)
    """

    name: str
    lengths: Int64Array
    cost: Cost
    owner: Int64Array
    seconds_per_cost: float
    output_bytes: Int64Array | None = None
    num_exchanges: int = 2
    held: Int64Array | None = None
    bytes: ItemBytes | None = None
    rows: Int64Array | None = None
    keys: tuple[KeyExchange, ...] = ()
    key_lengths: Int64Array | None = None
    beside: Int64Array | None = None
    tile_rows: int = 0
    merged: tuple[tuple[Int64Array, int], ...] = ()
    waits: bool = True
    _bounds: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def bound(self, num_ranks: int) -> int:
        """`lower_bound` of its items on so many ranks, which is kept, as many placements of them are scored."""
        if num_ranks not in self._bounds:
            self._bounds[num_ranks] = lower_bound(self.lengths, num_ranks, self.cost)
        return self._bounds[num_ranks]

    def learn_bound(self, placed: Assignment) -> None:
        """Take the bound of its items that `assign` has found."""
        self._bounds[placed.num_ranks] = int(placed.bound)

    def take(self, has_item: BoolArray, owner: Int64Array) -> Phase:
        """Of some of its items. has_item: bool [num_items]. owner: int64 [n], the example of each that is left."""
        columns = ("lengths", "output_bytes", "held", "rows", "key_lengths", "beside")
        taken = {name: column[has_item] for name in columns if (column := getattr(self, name)) is not None}
        return replace(
            self,
            owner=owner,
            bytes=None if self.bytes is None else self.bytes.take(has_item),
            merged=tuple((size[has_item], times) for size, times in self.merged),
            **taken,
        )

    def compute_ns(self, assignment: Assignment) -> int:
        """Compute time of the busiest rank, in nanoseconds."""
        return round(int(assignment.loads.max(initial=0)) * self.seconds_per_cost * NS_PER_S)


def computing_ns(phases: Sequence[Phase], assignments: Sequence[Assignment], meets: Sequence[bool]) -> int:
    """Nanoseconds of computing all phases: of the busiest rank in each phase, and of the busiest in what is left.

    meets: whether ranks exchange rows in or behind a phase. In phases in which they neither meet nor wait a rank goes
    on when it is ready, so that its seconds add up.
    """
    total_ns, left_s = 0, np.zeros(assignments[0].num_ranks)
    for phase, placed, meeting in zip(phases, assignments, meets, strict=True):
        if phase.waits or meeting:
            total_ns += phase.compute_ns(placed)
        else:
            left_s += placed.loads * phase.seconds_per_cost
    return total_ns + round(float(left_s.max()) * NS_PER_S)


def scored_phase(phase: Phase, ranks: Int32Array, num_ranks: int) -> Assignment:
    """The Assignment that puts the items of a phase on the given ranks, int32 [num_items]."""
    return score(ranks, phase.lengths, num_ranks, phase.cost, bound=phase.bound(num_ranks))


def follow(phase: Phase, backbone: Assignment) -> Assignment:
    """Each item of a phase on the rank that runs its example; items of a rank are in the order of their examples."""
    ranks, order = backbone.follow(phase.owner)
    return replace(scored_phase(phase, ranks, backbone.num_ranks), items=order)


@dataclass(frozen=True, eq=False)
class Held:
    """Inputs that ranks have loaded before it is decided who computes on them.

    home:           int [num_examples], the rank that holds an example's inputs.
    input_bytes:    int [num_examples], what they take.
    ranks_per_node: of the nodes that inputs are to stay on, as of `Network`.
    """

    home: ArrayLike
    input_bytes: ArrayLike
    ranks_per_node: RanksPerNode | None


def assign_backbone(
    lengths: Int64Array, cost: Cost, num_ranks: int, held: Held | None = None, backend: Backend = "native"
) -> Assignment:
    """Sequences balanced by themselves. held: where their inputs are, few of which then leave their node."""
    if held is None or not isinstance(cost, Packed):
        return assign(lengths, num_ranks, cost, backend=backend)
    groups = kept_within(held.ranks_per_node, num_ranks)
    return assign(lengths, num_ranks, cost, home=held.home, ranks_per_node=groups, backend=backend)


def assign_apart(
    lengths: Int64Array,
    cost: Cost,
    owner: Int64Array,
    backbone: Assignment,
    backend: Backend = "native",
    *,
    output_bytes: Int64Array | None = None,
    ranks_per_node: RanksPerNode | None = None,
    alone: Callable[[], Assignment] | None = None,
) -> Assignment:
    """Balance the items of an encoder by themselves; few of their outputs leave the node that runs their example.

    owner: int64 [num_items], the example of each item.
    output_bytes: int64 [num_items], the size of an item's output; None: all outputs count alike.
    ranks_per_node: as of `Network`; if all ranks share a node, outputs stay on their rank if they can.
    alone: gives the placement wherever examples are, `assign(lengths, num_ranks, cost)`, if the caller keeps it.
    Packed items start on the rank of their example, and a rank sends away only its excess, inside its node if it can.
    Padded items are put beside items of like length, so nearly all of them move; each batch is computed on the node
    that most of its outputs go to.
    """
    home, num_ranks = backbone.ranks[owner], backbone.num_ranks
    groups = kept_within(ranks_per_node, num_ranks)
    find_alone = alone or partial(assign, lengths, num_ranks, cost, backend=backend)
    if isinstance(cost, Packed):
        weights = item_weights(lengths, cost)
        return assign_from_home(weights, num_ranks, cost, home, groups, find_alone, backend)
    placed = find_alone()
    sizes = np.ones(len(owner), dtype=np.int64) if output_bytes is None else output_bytes
    return renamed(placed, home, sizes, groups, backend)


def kept_within(ranks_per_node: RanksPerNode | None, num_ranks: int) -> RanksPerNode:
    """The sizes of the groups of ranks that items are to stay in: nodes, or single ranks if all share a node."""
    return 1 if ranks_per_node is None or len(node_sizes(ranks_per_node, num_ranks)) < 2 else ranks_per_node


def joint_costs(phases: Sequence[Phase]) -> tuple[Int64Array, float]:
    """Costs of the examples in one unit for all phases, int64 [num_examples, num_phases], and the unit in seconds.

    An item of a padded phase costs what it would cost alone on a rank.
    """
    num_examples = len(phases[0].lengths)
    weights = [phase.cost.alone(phase.lengths) for phase in phases]
    totals_s = [int(w.sum()) * phase.seconds_per_cost for w, phase in zip(weights, phases, strict=True)]
    unit_s = max(totals_s) / _JOINT_TOTAL or 1.0
    columns = [
        # Whole numbers whose sum is below 2^53: floats add them exactly, in any order.
        np.bincount(phase.owner, np.rint(w * (phase.seconds_per_cost / unit_s)), num_examples)
        for w, phase in zip(weights, phases, strict=True)
    ]
    return np.stack(columns, axis=1).astype(np.int64), unit_s


def check_phases(phases: Sequence[Phase]) -> None:
    """Raises ArgumentError for malformed phases, and where the items of the first phase are not the examples."""
    if not phases:
        raise ArgumentError("phases is empty; it must hold the backbone at least.")
    num_examples = len(phases[0].lengths)
    if not np.array_equal(phases[0].owner, np.arange(num_examples)):
        raise ArgumentError(f"owner of {phases[0].name!r} must be 0, 1, 2, ...: the first phase's items are examples.")
    for phase in phases:
        num_items = len(checked_integers(phase.lengths, f"lengths of {phase.name!r}"))
        phase.cost.weights(phase.lengths)  # raises where they do not fit int64
        checked_ranks(phase.owner, f"owner of {phase.name!r}", num_items, num_examples)
        if phase.output_bytes is not None and len(phase.output_bytes) != num_items:
            raise ArgumentError(
                f"output_bytes of {phase.name!r} has {len(phase.output_bytes)} entries; it must have {num_items}."
            )
        if phase.held is not None and len(checked_integers(phase.held, f"held of {phase.name!r}")) != num_items:
            raise ArgumentError(f"held of {phase.name!r} has {len(phase.held)} entries; it must have {num_items}.")
        if phase.bytes is not None and len(phase.bytes.kept) != num_items:
            raise ArgumentError(f"bytes of {phase.name!r} has {len(phase.bytes.kept)} items; it must have {num_items}.")
        if phase.rows is not None and len(checked_integers(phase.rows, f"rows of {phase.name!r}")) != num_items:
            raise ArgumentError(f"rows of {phase.name!r} has {len(phase.rows)} entries; it must have {num_items}.")
        if not 0 <= phase.seconds_per_cost < math.inf:
            raise ArgumentError(
                f"seconds_per_cost of {phase.name!r} is {phase.seconds_per_cost}; it must be finite and at least 0."
            )
