"""The rows of a module's output that each replica sends to each other one: the content of a runtime's messages.

The rows and their order follow from the StepAssignment, so both ends of a message know them without communication.
Gradients return along the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.assign.item_shares import item_shares
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import Float64Array, Int64Array, rows_of_runs
from motet.core.plan import Plan
from motet.core.workload import BACKBONE
from motet.schedule.coordinates import Shares, sender_of, share_of
from motet.schedule.edges import consumers_in
from motet.schedule.from_plan import PlannedProgram
from motet.schedule.plan_units import cuts_beside_sequences, on_backbone_ranks


@dataclass(frozen=True, eq=False)
class SentRows:
    """The rows that one replica sends to another in a microbatch, in the order of the message: int64 [num_rows] each.

    source: indexes into the sender's output, whose items are ordered by position, fragments behind whole ones.
    sink:   indexes into the receiver's input: all rows of the module that the receiver takes in, ordered by the
            position of their example, then by item (`Dealing`: of those that stay, fragments last). Ascending.
    num_taken: rows of the receiver's input, from all senders.
    """

    source: Int64Array
    sink: Int64Array
    num_taken: int


@dataclass(frozen=True)
class Dealing:
    """How context-parallel ranks of the backbone take in items of an encoder, or give away what a generator is given.

    Where tokens stand that items belong to, other units do not know. So the ranks that share sequences get items by
    length, each whole on one rank, and then give rows to each other (`dispatch/context.py`); of a generator's items
    they do so before.

    c, cp:   of the rank of the backbone, and how many there are.
    is_here: whether the module runs on the ranks of the backbone's unit: then items, and fragments of items, stay with
             the ranks that have the number c of the one that computes them; whole ones come first.
    """

    c: int
    cp: int
    is_here: bool

    @staticmethod
    def of(plan: Plan, name: str, c: int | None) -> Dealing | None:
        """Of the items of a module; None if all of a replica are meant. c: of the rank of the backbone, if of one."""
        unit = plan.unit_of(BACKBONE)
        if c is None or unit.cp == 1:
            return None
        return Dealing(c, unit.cp, name in on_backbone_ranks(plan))

    def taken(self, items: ModuleAssignment, arriving: Int64Array) -> Int64Array:
        """The parts that this rank takes in, or gives, int64 [n]. items: of the step. arriving: items, int64 [m]."""
        if not self.is_here:
            ranks = takers(items.replica[arriving], items.num_tokens[arriving], self.cp, is_here=False)
            return parts_in(items, arriving[ranks == self.c])
        parts = parts_in(items, arriving)
        own = parts[items.parts.replica[parts].astype(np.int64) % self.cp == self.c]
        in_order: Int64Array = own[np.argsort(items.parts.is_cut[own], kind="stable")]
        return in_order


def takers(computed_on: NDArray[np.integer], num_tokens: Int64Array, cp: int, *, is_here: bool) -> Int64Array:
    """The context-parallel rank of the backbone that takes in each whole item of an encoder, or gives a generator what
    it is given of one, int64 [num_items].

    computed_on: int [num_items], the rank of its unit that computes each item.
    num_tokens:  int64 [num_items]. is_here: as of `Dealing`.
    """
    if is_here:
        here: Int64Array = computed_on.astype(np.int64) % cp
        return here
    return item_shares(num_tokens, num_tokens, cp, can_cut=False).ranks


def parts_in(items: ModuleAssignment, chosen: Int64Array) -> Int64Array:
    """The parts of some items, in the order of these, int64 [n]."""
    if items.cuts is None:
        return chosen
    first, stop = (np.searchsorted(items.parts.item, chosen, side=side) for side in ("left", "right"))
    return rows_of_runs(first, stop - first)


def edge_rows(
    planned: PlannedProgram,
    assignment: StepAssignment,
    edge: int,
    island: int,
    microbatch: int,
    shares: Shares | None = None,
) -> dict[tuple[str, str], SentRows | None]:
    """The rows that go along an edge of a Program, by (module whose output they are, module that takes them in).

    edge:   index into `planned.program.edges`.
    shares: those of its ends, where items are numbered as in training (`coordinates.share_of`); None: rows go from
            replica to replica, whatever ranks share them.
    A module that continues in the sink stage, or only passes through it, has the key (module, module) and the value
    None: all of its rows go, in their order. So they do to a later stage of the module that has taken them in.
    (generator, generator) is what the backbone gives it.
    """
    layout = planned.layout
    source, sink = planned.ends(edge)
    rows: dict[tuple[str, str], SentRows | None] = {}
    for name, stop in planned.outputs(edge):
        if stop == 0:
            rows[name, name] = None
            if name in sink.layers:
                sender = BACKBONE, share_of(layout, BACKBONE, source, island, shares and shares[0])
                receiver = name, share_of(layout, name, sink, island, shares and shares[1])
                dealing = Dealing.of(layout.plan, name, shares and shares[0])
                rows[name, name] = given_rows(assignment, sender[1], receiver, microbatch, dealing)
            continue
        sender = name, sender_of(layout, name, source, sink, island, shares and shares[0])
        has_ended = stop == len(layout.plan.model.module(name).blocks)
        consumers = consumers_in(layout, name, sink) if has_ended else []
        consumers = [consumer for consumer in consumers if consumer not in source.layers]
        for consumer in consumers:
            receiver = consumer, share_of(layout, consumer, sink, island, shares and shares[1])
            dealing = Dealing.of(layout.plan, name, shares and shares[1]) if consumer == BACKBONE else None
            stays = consumer == BACKBONE and cuts_beside_sequences(layout.plan, name)
            rows[name, consumer] = sent_rows(assignment, sender, receiver, microbatch, dealing, stays=stays)
        if not consumers:
            rows[name, name] = None
    return rows


def sent_rows(
    assignment: StepAssignment,
    source: tuple[str, int],
    sink: tuple[str, int],
    microbatch: int,
    dealing: Dealing | None = None,
    *,
    stays: bool = False,
) -> SentRows:
    """The rows that a replica of one module sends to a replica of a module that takes its output in.

    source, sink: (module, replica). A row goes to every replica of the sink that computes an item of the row's example.
    dealing:      which of these rows one rank of the replica takes in; None: all.
    stays:        whether rows stay with the replica that computes them where replicas share sequences.
    O(items log items).
    """
    name, sender = source
    items = assignment.modules[name]
    if stays and assignment.modules[sink[0]].is_shared(sink[1], microbatch, items.num_replicas):
        arriving = items.parts_of(sink[1], microbatch)
    else:
        arriving = _arriving_parts(assignment, name, sink, microbatch, dealing)
    parts = items.parts
    sent = arriving[parts.replica[arriving] == sender]
    return SentRows(
        row_order(items.parts_of(sender, microbatch), sent, parts.num_rows),
        row_order(arriving, sent, parts.num_rows),
        int(parts.num_rows[arriving].sum()),
    )


def given_rows(
    assignment: StepAssignment,
    sender: int,
    sink: tuple[str, int],
    microbatch: int,
    dealing: Dealing | None = None,
) -> SentRows:
    """The rows that a replica of the backbone gives a replica of a generator: those at the queries of its items.

    They stand in the sequences as an encoder's would, so they are an encoder's rows sent the other way.
    dealing: which of the rows one rank of the replica gives; None: all.
    """
    rows = sent_rows(assignment, sink, (BACKBONE, sender), microbatch, dealing)
    num_taken = assignment.modules[sink[0]].num_tokens[assignment.modules[sink[0]].items_of(sink[1], microbatch)].sum()
    order = np.argsort(rows.source, kind="stable")
    return SentRows(rows.sink[order], rows.source[order], int(num_taken))


def num_given_here(
    assignment: StepAssignment, name: str, sender: int, microbatch: int, dealing: Dealing | None = None
) -> int:
    """How many rows a replica of the backbone gives a generator, all that take them together. Others: `given_rows`."""
    given = _arriving_parts(assignment, name, (BACKBONE, sender), microbatch, dealing)
    return int(assignment.modules[name].parts.num_rows[given].sum())


def num_given_rows(assignment: StepAssignment, name: str, receiver: int | None, num_islands: int = 1) -> Int64Array:
    """How many rows each replica of the backbone gives a generator, int64 [num_replicas, num_microbatches].

    receiver: those alone that go to this replica, by its number in its island; None: to any.
    """
    items, sequences = assignment.modules[name], assignment.modules[BACKBONE]
    source, count = np.zeros(assignment.batch.num_examples, dtype=np.int64), assignment.num_microbatches
    source[sequences.example] = sequences.replica
    goes = slice(None) if receiver is None else items.replica % (items.num_replicas // num_islands) == receiver
    cell = (source[items.example] * count + items.microbatch)[goes]
    num = np.bincount(cell, items.num_tokens[goes], sequences.num_replicas * count)
    return num.astype(np.int64).reshape(sequences.num_replicas, count)


def _arriving_parts(
    assignment: StepAssignment, name: str, sink: tuple[str, int], microbatch: int, dealing: Dealing | None
) -> Int64Array:
    """The parts of a module that a replica takes in, by the position of their example, then by item, int64 [n].

    Arguments: as of `sent_rows`.
    """
    taker, receiver = sink
    items = assignment.modules[name]
    examples = assignment.modules[taker].example[assignment.modules[taker].items_of(receiver, microbatch)]
    arrival = np.full(assignment.batch.num_examples, -1)
    # Assigned in reverse order, so that the first of several items of an example wins.
    arrival[examples[::-1]] = np.arange(len(examples))[::-1]
    arriving = np.flatnonzero(arrival[items.example] >= 0)
    arriving = arriving[np.argsort(arrival[items.example[arriving]], kind="stable")]
    return parts_in(items, arriving) if dealing is None else dealing.taken(items, arriving)


def sent_shares(assignment: StepAssignment, name: str, taker: str, receiver: int, num_islands: int = 1) -> Float64Array:
    """The share of the output of each replica of a module that goes to one replica, in its island, of a taker.

    receiver: the replica of the first island. `sent_rows` lists the rows of these shares.
    Returns [num_replicas of the module, num_microbatches]. O(items).
    """
    items, taken, count = assignment.modules[name], assignment.modules[taker], assignment.num_microbatches
    senders, receivers = items.num_replicas // num_islands, taken.num_replicas // num_islands
    # The island in which the receiver takes an example in; none is island -1.
    taken_in = np.full(assignment.batch.num_examples, -1)
    received = taken.replica % receivers == receiver
    taken_in[taken.example[received]] = taken.replica[received] // receivers
    parts = items.parts
    cell = parts.replica.astype(np.int64) * count + items.microbatch[parts.item]
    goes = taken_in[items.example[parts.item]] == parts.replica // senders
    sent, whole = (
        np.bincount(cell[these], parts.num_rows[these], items.num_replicas * count) for these in (goes, slice(None))
    )
    shares: Float64Array = (sent / np.maximum(whole, 1)).reshape(items.num_replicas, count)
    return shares


def row_order(stored: Int64Array, wanted: Int64Array, rows: Int64Array) -> Int64Array:
    """Indexes of the rows of the items `wanted`, in that order, in an array that has the rows of the items `stored`.

    stored, wanted: int64 [num_stored] and [num_wanted], numbers of items, or of parts.
    rows:           int64 [num_items], the number of rows of each.
    Returns int64 [rows of the wanted items].
    """
    start = np.zeros(len(rows), dtype=np.int64)
    start[stored] = np.cumsum(rows[stored]) - rows[stored]
    return rows_at(start, wanted, rows)


def rows_at(start: Int64Array, wanted: Int64Array, rows: Int64Array) -> Int64Array:
    """Indexes of the rows of the items `wanted`, in that order. start: int64 [num_items], each item's first row."""
    lengths = rows[wanted]
    row_in_item: Int64Array = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(start[wanted], lengths) + row_in_item
