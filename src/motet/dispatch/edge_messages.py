"""What each message of a pipeline carries: the rows of modules along an edge of the Program, in one microbatch.

Both ends know it from lengths alone, so a message has no header, and one without rows is not sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motet.assign.context_rows import context_rows
from motet.assign.rows import Dealing, SentRows, edge_rows, num_given_here
from motet.assign.step import ModuleAssignment, StepAssignment, joined
from motet.core.arrays import Int64Array
from motet.core.spec import Layer, Module
from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.schedule import PlannedProgram
from motet.schedule.coordinates import share_of


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
    decisions = [batch.decision for batch in batches]
    return joined(
        [batch.lengths for batch in batches],
        [decision.assignments for decision in decisions],
        cuts=[decision.item_cuts for decision in decisions],
    )


def message_parts(
    planned: PlannedProgram,
    assignment: StepAssignment,
    edge: int,
    island: int,
    microbatch: int,
    shares: tuple[int, int] | None = None,
) -> tuple[MessagePart, ...]:
    """The parts of a message along an edge, those without rows left out. edge, shares: as of `assign.rows.edge_rows`.

    Where other context-parallel ranks have rows of the backbone, a part without any stays: all run its blocks.
    """
    layout, model = planned.layout, planned.layout.plan.model
    source = planned.stages[planned.program.edges[edge][0]]
    rows, parts = edge_rows(planned, assignment, edge, island, microbatch, shares), []
    for name, stop in planned.outputs(edge):
        module, items = model.module(name), assignment.modules[name]
        layer, has_gradient = model.sent(name, stop)
        whose = name if stop else BACKBONE
        replica = share_of(layout, whose, source, island, shares and shares[0])
        if stop:
            computed = items.parts_of(replica, microbatch)
            if name in model.generators:  # Its conditions are of as many rows as the backbone gives of each item.
                num_sent = module.num_carried(stop, items.length[computed], items.num_tokens[computed])
            else:
                num_sent = _num_rows(module, stop, layer, items, computed)
        else:  # What the backbone gives a generator, whose replicas are not the backbone's.
            dealing = Dealing.of(layout.plan, name, shares and shares[0])
            num_sent = num_given_here(assignment, name, replica, microbatch, dealing)
        is_kept = name == BACKBONE and num_sent > 0
        if name == BACKBONE and source.unit.cp > 1 and shares is not None:
            sequences = items.length[items.items_of(replica, microbatch)]
            num_sent = len(context_rows(sequences, source.unit.cp).rows[shares[0]])
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


def _num_rows(module: Module, stop: int, layer: Layer, items: ModuleAssignment, computed: Int64Array) -> int:
    """Rows of a module's output behind its block stop - 1, which `layer` makes. computed: the parts, int64 [n]."""
    parts = items.parts
    if stop == len(module.blocks) and module.name != BACKBONE:
        return int(parts.num_rows[computed].sum())
    segments, of = items.segments, parts.item[computed]
    rows = layer.rows(items.length[of]) if segments is None else segments.summed(layer.rows(segments.length))[of]
    is_cut = parts.is_cut[computed]
    if is_cut.any() and module.tile_rows:
        rows = np.where(is_cut, rows * parts.num_rows[computed] // np.maximum(items.num_tokens[of], 1), rows)
    elif is_cut.any():
        # Of class rows, the rank has them that has the item's first row.
        each = (rows - layer.extra_rows) // np.maximum(items.num_tokens[of], 1)
        is_first = np.append(True, np.diff(parts.item) > 0)[computed]
        rows = np.where(is_cut, each * parts.num_rows[computed] + layer.extra_rows * is_first, rows)
    is_padded = module.padded and module.keys_of(stop) is None
    return int(rows.max(initial=0)) * len(rows) if is_padded else int(rows.sum())
