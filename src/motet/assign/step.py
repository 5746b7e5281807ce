"""The assignment of a whole step: which replica computes which item, in which microbatch, at which position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from motet.core.arrays import BoolArray, Int32Array, Int64Array
from motet.core.assignment import Assignment
from motet.core.cuts import ItemCuts
from motet.core.errors import ArgumentError
from motet.core.exchange import Moved, moved
from motet.core.item_segments import ItemSegments
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule.passes import Presence


@dataclass(frozen=True, eq=False)
class ItemParts:
    """Whole items and fragments of others, ascending by item, then by row: columns [num_parts].

    item:       int64, of which it has rows.
    replica:    int, that computes it.
    begin, end, units: int64, as of `ItemCuts`; a whole item is one unit.
    num_tokens: int64, rows of the whole item in the backbone's sequence.
    """

    item: Int64Array
    replica: NDArray[np.integer]
    begin: Int64Array
    end: Int64Array
    units: Int64Array
    num_tokens: Int64Array

    @property
    def is_cut(self) -> BoolArray:
        """Whether it is a fragment, bool."""
        return self.units > 1

    @cached_property
    def first_row(self) -> Int64Array:
        """The first of its rows among those of the item in the backbone's sequence, int64."""
        return self.begin * self.num_tokens // self.units

    @cached_property
    def num_rows(self) -> Int64Array:
        """How many these are, int64."""
        return self.end * self.num_tokens // self.units - self.first_row

    def rows_before(
        self, chosen: Int64Array, num_before: Int64Array, read: Int64Array | None = None, num_parts: int = 1
    ) -> tuple[Int64Array, Int64Array]:
        """The rows that some parts have of a tensor before those of the sequence, as of `cuts.rows_behind`: the first,
        and behind the last, int64 [n] each. chosen: parts, int64 [n]. num_before: rows of their whole items, int64 [n].
        read: of these, int64 [n], those that queries read; None: none do. num_parts: as of `CutRows`.
        """
        units, is_cut, num_rows = self.units[chosen], self.is_cut[chosen], self.num_tokens[chosen] * num_parts
        begin, end = (edge[chosen] * num_rows // units for edge in (self.begin, self.end))
        whole = np.maximum(num_rows, 1)
        if read is not None:
            begin, end, whole = begin * read // whole, end * read // whole, np.maximum(read, 1)
        begin = np.where(is_cut, begin * num_before // whole, 0)
        return begin, np.where(is_cut, end * num_before // whole, num_before)


@dataclass(frozen=True, eq=False)
class ModuleAssignment:
    """The items of one module, ordered by example, and who computes them: columns [num_items].

    example:    int64, the example that the item belongs to.
    length:     int64, what the module computes on: patches, mel frames, tokens.
    num_tokens: int64, rows of the item in the backbone's sequence.
    replica:    int32, the replica of the module's unit. Encoders in bubbles run on the backbone's ranks, so it is a
                replica of the backbone's unit.
    microbatch: int32.
    ordered:    int64, the position of each item among those of the same replica and microbatch, from 0; or what finds
                them when they are first read, as whoever prices items does not ask for their order.
    segments, num_media: as in `core.workload.ItemLengths`.
    cuts:       the items that several replicas share, which `replica` has on the one with their largest fragment, where
                replicas are numbered as in training (`coordinates.share_of`); None: all are whole.
    """

    example: Int64Array
    length: Int64Array
    num_tokens: Int64Array
    replica: Int32Array
    microbatch: Int32Array
    ordered: Int64Array | Callable[[], Int64Array]
    num_replicas: int
    segments: ItemSegments | None = None
    num_media: Int64Array | None = None
    cuts: ItemCuts | None = None

    @cached_property
    def position(self) -> Int64Array:
        """The position of each item among those of the same replica and microbatch, from 0, int64 [num_items]."""
        return self.ordered() if callable(self.ordered) else self.ordered

    @cached_property
    def parts(self) -> ItemParts:
        """Its items, those that are cut in fragments."""
        cuts, whole = self.cuts, np.arange(len(self.example))
        if cuts is not None:
            whole = cuts.whole_among(whole)
        one = np.ones(len(whole), np.int64)
        parts = ItemParts(whole, self.replica[whole], one - 1, one, one, self.num_tokens[whole])
        if cuts is None:
            return parts
        item, begin = np.concatenate([whole, cuts.item]), np.concatenate([parts.begin, cuts.begin])
        order = np.lexsort((begin, item))
        return ItemParts(
            item[order],
            np.concatenate([parts.replica, cuts.rank])[order],
            begin[order],
            np.concatenate([one, cuts.end])[order],
            np.concatenate([one, cuts.units])[order],
            self.num_tokens[item[order]],
        )

    def take(self, items: Int64Array) -> ModuleAssignment:
        """Some of the items, int64 [n], ascending: of a replica and a microbatch all or none, and none that is cut."""
        assert self.cuts is None, "cut items belong to several replicas"
        return replace(
            self,
            example=self.example[items],
            length=self.length[items],
            num_tokens=self.num_tokens[items],
            replica=self.replica[items],
            microbatch=self.microbatch[items],
            ordered=lambda: self.position[items],
            segments=None if self.segments is None else self.segments.take(items),
            num_media=None if self.num_media is None else self.num_media[items],
        )

    def parts_of(self, replica: int, microbatch: int) -> Int64Array:
        """The parts that a replica computes in a microbatch, whole items in their order, then fragments, int64 [n]."""
        whole = self.whole_items_of(replica, microbatch)
        if self.cuts is None:
            return whole
        of_fragments = [
            np.flatnonzero((self.parts.item == item) & (self.parts.replica == replica))
            for item in self.shared_items_of(replica, microbatch)
        ]
        return np.concatenate([np.searchsorted(self.parts.item, whole), *of_fragments])

    def by_replica(self, num_ranks: int) -> ModuleAssignment:
        """The same items by replicas, of which each deals its items out over so many ranks, or by some of these ranks,
        which then may share some.
        """
        if num_ranks == 1:
            return self
        cuts = self.cuts and self.cuts.joined(num_ranks)
        return replace(self, replica=self.replica // num_ranks, num_replicas=self.num_replicas // num_ranks, cuts=cuts)

    def is_shared(self, replica: int, microbatch: int, num_sharing: int) -> bool:
        """Whether a replica shares an item of a microbatch, or one of those does that share items with it.

        num_sharing: how many replicas, one after the other, share items; all do where some item is on more of them.
        """
        if self.cuts is None:
            return False
        is_near = self.cuts.rank // num_sharing == replica // num_sharing
        is_near |= self.cuts.is_across(num_sharing)
        return bool((is_near & (self.microbatch[self.cuts.item] == microbatch)).any())

    def batch_index(self, num_microbatches: int) -> Int64Array:
        """replica * num_microbatches + microbatch of each item, int64 [num_items]."""
        return self.replica.astype(np.int64) * num_microbatches + self.microbatch

    def items_of(self, replica: int, microbatch: int) -> Int64Array:
        """The items that a replica computes in a microbatch, in its order, int64 [n]. O(1) behind the first call."""
        order, starts, num_microbatches = self._ordered
        if not 0 <= microbatch < num_microbatches:
            return order[:0]
        cell = replica * num_microbatches + microbatch
        return order[starts[cell] : starts[cell + 1]]

    def whole_items_of(self, replica: int, microbatch: int) -> Int64Array:
        """Those of `items_of` that the replica shares with no other, int64 [n]."""
        items = self.items_of(replica, microbatch)
        return items if self.cuts is None else self.cuts.whole_among(items)

    def shared_items_of(self, replica: int, microbatch: int) -> Int64Array:
        """The items of a microbatch of which a replica has a fragment, in the order of the cuts, int64 [n]."""
        own = np.zeros(0, np.int64) if self.cuts is None else self.cuts.on_rank(replica)
        here: Int64Array = own[self.microbatch[own] == microbatch]
        return here

    @cached_property
    def _ordered(self) -> tuple[Int64Array, list[int], int]:
        """(items by replica, microbatch and position; where those of each replica and microbatch begin; microbatches).

        Runs ask for the items of every replica and microbatch: looking through all items for each would be quadratic.
        """
        num_microbatches = int(self.microbatch.max(initial=-1)) + 1
        cell = self.batch_index(num_microbatches)
        order = np.lexsort((self.position, cell))
        order.flags.writeable = False
        counts = np.bincount(cell, minlength=self.num_replicas * num_microbatches)
        return order, [0, *np.cumsum(counts).tolist()], num_microbatches


@dataclass(frozen=True, eq=False)
class StepAssignment:
    """Where every item of a step is computed: item -> (replica, microbatch, position).

    batch:   the lengths of the whole step.
    modules: per module, the columns of its items.
    methods: the balancing method of each microbatch; () if nothing was balanced.

    Example:
        Two ranks; each of two microbatches was decided by itself:
        >>> from motet.balance import Packed, assign
        >>> lengths, home = np.array([[5, 3, 2], [1, 1, 2]]), np.zeros(3, np.int32)
        >>> parts = [BatchLengths(row, row, home, {}) for row in lengths]
        >>> step = joined(parts, [{"backbone": assign(part.sequence, 2, Packed())} for part in parts])
        >>> [step.modules["backbone"].items_of(replica=0, microbatch=number).tolist() for number in (0, 1)]
        [[0], [5]]
    """

    batch: BatchLengths
    num_microbatches: int
    modules: dict[str, ModuleAssignment]
    methods: tuple[str, ...] = ()

    def moved_rows(self, module: str, node: NDArray[np.integer], *, merges: bool = False) -> Moved:
        """Rows of a module's output that move to the replicas of the backbone, [num_microbatches, 2, num_replicas].

        The module and the backbone must be on the same ranks. node: [num_replicas], the node of each replica.
        merges: rows of a sequence that is cut go to the replica with its largest fragment; else to all that have some,
                as if they stood all over it.
        """
        items, sequences = self.modules[module], self.modules[BACKBONE]
        source: NDArray[np.integer] = items.replica
        num_rows, example, microbatch = items.num_tokens, items.example, items.microbatch
        if items.cuts is not None:
            parts = items.parts
            source, num_rows = parts.replica, parts.num_rows
            example, microbatch = example[parts.item], microbatch[parts.item]
        sink = sequences.replica[example]
        if sequences.cuts is not None and not merges:
            part, fragment = sequences.cuts.fragments_of(example)
            is_whole = ~np.isin(example, sequences.cuts.items)
            source, microbatch = (np.concatenate([each[is_whole], each[part]]) for each in (source, microbatch))
            sink = np.concatenate([sink[is_whole], sequences.cuts.rank[fragment]])
            shares = sequences.cuts.shares_of(fragment, num_rows[part])
            num_rows = np.concatenate([num_rows[is_whole], shares])
        return moved(source, sink, num_rows, node, microbatch, self.num_microbatches)

    def exchanged_rows(self, module: str) -> Int64Array:
        """Rows of a module's output that the busiest replica sends or receives, int64 [num_microbatches]."""
        one_node = np.zeros(self.modules[module].num_replicas, dtype=np.int64)
        return self.moved_rows(module, one_node).busiest.astype(np.int64)

    @cached_property
    def present(self) -> tuple[Presence, ...]:
        """Per microbatch, the modules that have an item, and those whose rows move, on any replica."""
        num_items = {
            name: np.bincount(items.microbatch, minlength=self.num_microbatches) for name, items in self.modules.items()
        }
        num_moved = {name: self.exchanged_rows(name) for name in self.modules if name != BACKBONE}
        return tuple(
            Presence(
                frozenset(name for name, counts in num_items.items() if counts[microbatch]),
                frozenset(name for name, counts in num_moved.items() if counts[microbatch]),
            )
            for microbatch in range(self.num_microbatches)
        )

    def has_any(self, modules: Iterable[str]) -> BoolArray:
        """Whether a microbatch has an item of any of these modules, bool [num_microbatches]."""
        found = np.zeros(self.num_microbatches, dtype=np.bool_)
        for name in modules:
            found[self.modules[name].microbatch] = True
        return found

    def island_key(self, island: int, num_islands: int) -> bytes:
        """A key that is equal for islands whose replicas compute items of the same lengths: they take the same time."""
        parts: list[bytes] = []
        for items in self.modules.values():
            num_replicas = items.num_replicas // num_islands
            in_island = items.replica // num_replicas == island
            columns = [
                items.replica[in_island] % num_replicas,
                items.microbatch[in_island],
                items.length[in_island],
                items.num_tokens[in_island],
                self.batch.num_targets[items.example[in_island]],
            ]
            if items.segments is not None:
                columns.append(items.segments.pattern[in_island])
            if items.num_media is not None:
                columns.append(items.num_media[in_island])
            if items.cuts is not None:
                in_island = items.cuts.rank // num_replicas == island
                cut = items.cuts.item[in_island]
                ranges = (getattr(items.cuts, name)[in_island] for name in ("begin", "end", "units"))
                place = items.cuts.rank[in_island] % num_replicas, items.microbatch[cut], items.length[cut]
                parts.append(np.stack([*place, *ranges]).astype(np.int64).tobytes())
            rows = np.stack(columns)
            parts.append(rows[:, np.lexsort(rows[::-1])].tobytes())
        return b"|".join(parts)


def joined(
    microbatches: Sequence[BatchLengths],
    assignments: Sequence[Mapping[str, Assignment]],
    methods: tuple[str, ...] = (),
    cuts: Sequence[Mapping[str, ItemCuts | None]] = (),
) -> StepAssignment:
    """The assignment of a step whose microbatches an `Orchestrator` decided one by one.

    microbatches: the lengths of each. assignments: per microbatch, the Assignment of each module. Modules keep the
    order of the first microbatch's assignments. cuts: per microbatch, module -> its items that are cut. Raises
    ArgumentError unless both have the same length, at least 1.
    """
    if len(microbatches) != len(assignments) or not microbatches:
        raise ArgumentError(
            f"{len(microbatches)} microbatches have {len(assignments)} assignments; each must have one."
        )
    batch = BatchLengths.joined(microbatches)
    modules = {}
    for name in assignments[0]:
        items, of_microbatches = batch.of(name), [assigned[name] for assigned in assignments]
        modules[name] = ModuleAssignment(
            items.example,
            items.length,
            items.num_tokens,
            of_microbatches[0].ranks
            if len(assignments) == 1
            else np.concatenate([one.ranks for one in of_microbatches]),
            np.repeat(np.arange(len(microbatches), dtype=np.int32), [one.num_items for one in of_microbatches]),
            partial(_joined_positions, of_microbatches),
            of_microbatches[0].num_ranks,
            items.segments,
            items.num_media,
            _joined_cuts([one.num_items for one in of_microbatches], [each.get(name) for each in cuts]),
        )
    return StepAssignment(batch, len(microbatches), modules, methods)


def _joined_positions(of_microbatches: Sequence[Assignment]) -> Int64Array:
    return np.concatenate([one.positions for one in of_microbatches])


def _joined_cuts(counts: Sequence[int], cuts: Sequence[ItemCuts | None]) -> ItemCuts | None:
    """Cuts of microbatches as those of the step. counts: items of each microbatch."""
    before = np.cumsum(counts) - counts
    found = [replace(each, item=each.item + before[number]) for number, each in enumerate(cuts) if each is not None]
    if not found:
        return None
    return ItemCuts(*(np.concatenate([getattr(each, name) for each in found]) for name in ItemCuts.columns))
