"""What each message of a pipeline carries: the rows of modules along an edge of the Program, in one microbatch.

Both ends know it from lengths, and from the rows that they have of shared sequences, so a message has no header, and
one without rows is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from motet.assign.orchestrator import joined_decisions
from motet.assign.rows import Dealing, SentRows, edge_rows, num_given_here
from motet.assign.step import ModuleAssignment, StepAssignment
from motet.core.arrays import Int64Array
from motet.core.cuts import CutRows
from motet.core.item_segments import ItemSegments
from motet.core.spec import Layer, Module
from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.schedule import PlannedProgram
from motet.schedule.coordinates import Shares, sender_of


@dataclass(frozen=True, eq=False)
class MessagePart:
    """The rows of one module in a message. A message has its parts one after the other.

    width:        elements of a row.
    rows:         which rows of the sender's output go, and where they arrive; None: all of them, in their order.
    num_sent, num_taken: rows of the sender's output, and of the receiver's input, which may come in several messages.
    has_gradient: whether the gradient of the rows comes back.
    """

    module: str
    width: int
    rows: SentRows | None
    num_sent: int
    num_taken: int
    has_gradient: bool

    @property
    def num_rows(self) -> int:
        """Rows in the message."""
        return self.num_sent if self.rows is None else len(self.rows.source)

    @property
    def num_elements(self) -> int:
        """Elements in the message."""
        return self.num_rows * self.width


def assignment_of(batches: Sequence[RankBatch]) -> StepAssignment:
    """The StepAssignment of a step from its microbatches, without the examples that were left out."""
    return joined_decisions([batch.lengths for batch in batches], [batch.decision for batch in batches])


def message_parts(
    planned: PlannedProgram,
    assignment: StepAssignment,
    edge: int,
    island: int,
    microbatch: int,
    shares: Shares | None = None,
    own_rows: int | None = None,
) -> tuple[MessagePart, ...]:
    """The parts of a message along an edge, those without rows left out. edge, shares: as of `assign.rows.edge_rows`.

    own_rows: how many rows of the backbone's sequences the rank has, as both ends of a message between its stages have
              the same; None: no rank shares them.
    Where other ranks share sequences of the backbone with this one, a part without rows stays: all run its blocks.
    """
    layout, model = planned.layout, planned.layout.plan.model
    source, sink = planned.ends(edge)
    rows, parts = edge_rows(planned, assignment, edge, island, microbatch, shares), []
    for name, stop in planned.outputs(edge):
        module, items = model.module(name), assignment.modules[name]
        layer, has_gradient = model.sent(name, stop)
        whose = name if stop else BACKBONE
        replica = sender_of(layout, whose, source, sink, island, shares and shares[0])
        is_kept = False
        if stop and name == BACKBONE:
            num_rows = int(items.length[items.items_of(replica, microbatch)].sum())
            num_sent = num_rows if own_rows is None else own_rows
            is_kept = items.is_shared(replica, microbatch, items.num_replicas) or num_rows > 0
        elif stop:
            computed = items.parts_of(replica, microbatch)
            if name in model.generators:  # Its conditions are of as many rows as the backbone gives of each item.
                num_sent = module.num_carried(stop, items.length[computed], items.num_tokens[computed])
            else:
                is_shared = items.is_shared(replica, microbatch, layout.plan.unit_of(name).cp)
                num_sent = _num_rows(module, stop, layer, items, computed, is_shared)
        else:  # What the backbone gives a generator, whose replicas are not the backbone's.
            dealing = Dealing.of(layout.plan, name, shares and shares[0])
            num_sent = num_given_here(assignment, name, replica, microbatch, dealing)
        for (source_module, _), sent in rows.items():
            if source_module == name:
                num_taken = num_sent if sent is None else sent.num_taken
                moved = None if sent is None or _are_all(sent, num_sent, num_taken) else sent
                part = MessagePart(name, layer.output_width, moved, num_sent, num_taken, has_gradient)
                if part.num_rows or is_kept:
                    parts.append(part)
    return tuple(parts)


def _are_all(sent: SentRows, num_sent: int, num_taken: int) -> bool:
    """Whether all rows of the sender become all rows of the receiver, in their order."""
    in_order = np.arange(len(sent.source))
    return (
        num_sent == num_taken == len(in_order)
        and np.array_equal(sent.source, in_order)
        and np.array_equal(sent.sink, in_order)
    )


def _num_rows(
    module: Module, stop: int, layer: Layer, items: ModuleAssignment, computed: Int64Array, is_shared: bool
) -> int:
    """Rows of a module's output behind its block stop - 1, which `layer` makes. computed: the parts, int64 [n].

    is_shared: whether ranks share any of the items, of which none is padded then.
    """
    parts = items.parts
    if stop == len(module.blocks) and module.name != BACKBONE:
        return int(parts.num_rows[computed].sum())
    segments, of = items.segments, parts.item[computed]
    rows = layer.rows(items.length[of]) if segments is None else segments.summed(layer.rows(segments.length))[of]
    if items.cuts is not None and not module.tile_rows:
        rows = _rows_of_parts(layer, module.cut_rows, items, computed)
    elif items.cuts is not None:
        rows = rows * parts.num_rows[computed] // np.maximum(items.num_tokens[of], 1)
    is_padded = module.padded and module.keys_of(stop) is None and not is_shared
    return int(rows.max(initial=0)) * len(rows) if is_padded else int(rows.sum())


def _rows_of_parts(layer: Layer, cut_rows: CutRows, items: ModuleAssignment, computed: Int64Array) -> Int64Array:
    """Rows of parts of items in a layer, int64 [n]. Of class rows, the rank has them that has the first row behind.
    cut_rows: of the module.
    """
    plain, of = replace(layer, extra_rows=0), items.parts.item[computed]
    segments = items.segments or ItemSegments.whole(items.length)
    lengths = plain.rows(segments.length)
    num_before, read = segments.summed(lengths)[of], cut_rows.read(items.length[of])
    begin, stop = items.parts.rows_before(computed, num_before, read, cut_rows.parts)
    firsts = np.cumsum(lengths) - lengths
    before = np.cumsum(segments.counts) - segments.counts  # Segments of the items before.
    starts = np.append(firsts, 0)[before[of]]  # Of each part's item.
    num_firsts = np.searchsorted(firsts, starts + stop) - np.searchsorted(firsts, starts + begin)
    return stop - begin + layer.extra_rows * num_firsts
