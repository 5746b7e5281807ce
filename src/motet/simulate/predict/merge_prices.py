"""Seconds of what ranks that share sequences give each other so that a merge of the user's own has each of them whole.

The rows of items go to the rank that merges their sequence, and what is merged to the ranks that run it. Lengths alone
say both (`assign/taken_rows.py`), so that bytes are those of training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motet.assign.planned_step import microbatches_of
from motet.assign.rows import num_given_rows
from motet.assign.taken_rows import MergeMoves, merge_moves
from motet.core.arrays import Float64Array, Int64Array
from motet.core.exchange import moved
from motet.core.workload import BACKBONE
from motet.simulate.predict.exchange_seconds import evenly_moved_s
from motet.simulate.predict.layer_work import MAX_DEALT

if TYPE_CHECKING:
    from motet.simulate.predict.stage_pricing import Pricing


def merge_seconds(pricing: Pricing) -> dict[str, Float64Array]:
    """Seconds of one way of each exchange, [num_replicas of the backbone, num_microbatches], by what moves: rows of
    each encoder, and of the backbone what is merged. Of a step with more than MAX_DEALT such exchanges rows are taken
    to lie evenly on the ranks.
    """
    plan, step = pricing.plan, pricing.assignment
    sequences, cp = step.modules[BACKBONE], pricing.backbone.cp
    cut = set() if sequences.cuts is None else set(sequences.microbatch[sequences.cuts.items].tolist())
    shape = sequences.num_replicas, step.num_microbatches
    num_exchanges = len(cut) + (shape[1] - len(cut)) * shape[0] * (cp > 1)
    entering = (name for name in plan.model.sources(BACKBONE) if 0 in plan.model.entries(name, BACKBONE))
    names = (BACKBONE, *entering)
    if num_exchanges > MAX_DEALT:
        return {name: evenly_moved_s(pricing, _rows_of(pricing, name), row_bytes(pricing, name)) for name in names}
    seconds = {name: np.zeros(shape) for name in names}
    for number, part in enumerate(microbatches_of(plan, step)):
        for each in merge_moves(plan, part.decision, part.lengths):
            for name in names:
                seconds[name][each.replicas, number] = _exchange_s(pricing, each, name)
    return seconds


def row_bytes(pricing: Pricing, name: str) -> int:
    """Bytes of a row of an encoder, or of one that is merged."""
    model = pricing.plan.model
    layer = model.module(BACKBONE).layers[0] if name == BACKBONE else model.moved(name)[0]
    return layer.output_width * pricing.precision.compute


def _exchange_s(pricing: Pricing, of_ranks: MergeMoves, name: str) -> float:
    """Seconds of one exchange."""
    unit, rows = pricing.backbone, of_ranks.rows[name]
    ranks = [unit.rank(0, replica, c) for replica in of_ranks.replicas for c in range(unit.cp)]
    node = np.array([pricing.plan.cluster.node_of(rank) for rank in ranks])
    source, sink = np.nonzero(rows)
    moved_bytes = moved(source, sink, rows[source, sink] * row_bytes(pricing, name), node)
    return float(pricing.cost.exchange_seconds(moved_bytes, ranks)[0])


def _rows_of(pricing: Pricing, name: str) -> Int64Array:
    """Rows of whole sequences, or of their items, int64 [num_replicas of the backbone, num_microbatches]."""
    step = pricing.assignment
    if name != BACKBONE:
        return num_given_rows(step, name, None)
    sequences, num = step.modules[BACKBONE], step.num_microbatches
    rows = np.bincount(sequences.batch_index(num), sequences.length, sequences.num_replicas * num)
    return rows.astype(np.int64).reshape(-1, num)
