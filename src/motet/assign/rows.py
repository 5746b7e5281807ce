"""Which rows of a module's output go from which replica to which: what a runtime's messages are made of.

All follows from the StepAssignment, so both ends of a message know its rows, and their order, without being told.
Gradients come back by the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.assign.step import StepAssignment
from motet.core.arrays import Int64Array
from motet.schedule.coordinates import replica_of
from motet.schedule.edges import takers, under_way
from motet.schedule.from_plan import Planned


@dataclass(frozen=True, eq=False)
class SentRows:
    """The rows that one replica sends to another in a microbatch, in the order of the message: int64 [num_rows] each.

    source: their places in the output of the replica that sends, whose items follow each other by position.
    sink:   their places in the input of the replica that receives: all rows of the module that it takes in, example by
            example by position, and item by item. The places ascend.
    """

    source: Int64Array
    sink: Int64Array


def edge_rows(
    planned: Planned, assignment: StepAssignment, edge: int, island: int, microbatch: int
) -> dict[tuple[str, str], SentRows | None]:
    """The rows that go along an edge of a Program, by the module that they are the output of and the one that takes
    them in.

    edge: a place in `planned.program.edges`. Where a module goes on in the sink, or only passes it, it is named twice,
    and its rows are None: all that there are, in their order.
    """
    source, sink = (planned.stages[stage] for stage in planned.program.edges[edge])
    ends = replica_of(planned.layout, source, island), replica_of(planned.layout, sink, island)
    found: dict[tuple[str, str], SentRows | None] = {}
    for name, stop in under_way(planned.layout, source, sink):
        has_ended = stop == len(planned.layout.plan.model.module(name).blocks)
        here = takers(planned.layout, name, sink) if has_ended else []
        for taker in here:
            found[name, taker] = sent_rows(assignment, (name, ends[0]), (taker, ends[1]), microbatch)
        if not here:
            found[name, name] = None
    return found


def sent_rows(assignment: StepAssignment, source: tuple[str, int], sink: tuple[str, int], microbatch: int) -> SentRows:
    """The rows that a replica of a module has for a replica of one that takes its output in.

    source, sink: (module, replica). A row goes to every replica that computes an item of its example in the sink; an
    example of which the sink computes nothing is not sent. O(items log items).
    """
    (name, sender), (taker, receiver) = source, sink
    items = assignment.modules[name]
    examples = assignment.modules[taker].example[assignment.modules[taker].items_of(receiver, microbatch)]
    arrival = np.full(assignment.batch.num_examples, -1)
    # Backwards, so that of several items of an example the first one counts.
    arrival[examples[::-1]] = np.arange(len(examples))[::-1]
    arriving = np.flatnonzero(arrival[items.example] >= 0)
    arriving = arriving[np.argsort(arrival[items.example[arriving]], kind="stable")]
    sent = arriving[items.replica[arriving] == sender]
    return SentRows(
        row_order(items.items_of(sender, microbatch), sent, items.num_tokens),
        row_order(arriving, sent, items.num_tokens),
    )


def row_order(stored: Int64Array, wanted: Int64Array, rows: Int64Array) -> Int64Array:
    """Rows of items that are stored one after the other, as an index that yields those of some of them in an order.

    stored, wanted: items, int64 [num_stored] and [num_wanted], of which `rows`, int64 [num_items], says how many rows
    each has. Returns int64 [rows of those wanted].
    """
    start = np.zeros(len(rows), dtype=np.int64)
    start[stored] = np.cumsum(rows[stored]) - rows[stored]
    lengths = rows[wanted]
    within: Int64Array = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(start[wanted], lengths) + within
