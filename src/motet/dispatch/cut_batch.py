"""What a rank runs of a microbatch in which several ranks share some sequences (`core/cuts.py`), all others whole.

A rank has its whole sequences first, then its rows of shared ones. Rows of encoders go straight to the ranks of their
places, in the exchange that takes all other rows: where a placeholder stands in a shared sequence, its tokens tell,
which every rank reads of sequences with items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from motet.assign.orchestrator import Decision
from motet.core.arrays import Int64Array
from motet.core.context_rows import ContextRows
from motet.core.cuts import SequenceCuts
from motet.core.workload import BatchLengths
from motet.dispatch.context import share_sequences
from motet.dispatch.route import Route, route_of_parts

if TYPE_CHECKING:
    from motet.dispatch.batch import PackedSequences


def examples_to_lay_out(cuts: SequenceCuts | None, lengths: BatchLengths) -> Int64Array:
    """The shared examples whose tokens every rank reads: those with items, ascending, int64 [n]."""
    if cuts is None:
        return np.zeros(0, dtype=np.int64)
    has_items = [np.isin(cuts.examples, items.example) for items in lengths.items.values()]
    return cuts.examples[np.any(has_items, axis=0)] if has_items else cuts.examples[:0]


def shared_out(packed: PackedSequences, decision: Decision, rank: int) -> PackedSequences:
    """The rows of one rank. packed: all rows of the sequences `decision.sequences_on(rank)`."""
    cuts, num_ranks, num_whole = decision.cuts, decision.backbone.num_ranks, len(decision.whole_on(rank))
    assert cuts is not None, "a decision that shares sequences"
    lengths = np.diff(packed.offsets.numpy()).astype(np.int64)
    examples = decision.sequences_on(rank)[num_whole:]
    shared = zip(examples.tolist(), lengths[num_whole:].tolist(), strict=True)
    owners = [cuts.owner(example, num_rows) for example, num_rows in shared]
    owner = np.concatenate([np.full(lengths[:num_whole].sum(), rank, dtype=np.int32), *owners])
    rows = ContextRows(lengths, owner, num_ranks)
    share = share_sequences(rows, rank, packed)
    own = torch.from_numpy(share.own)
    places = {phase: positions.numpy() for phase, positions in packed.feature_positions.items()}
    return replace(
        packed,
        tokens=packed.tokens[own],
        targets=packed.targets[own],
        feature_positions={
            phase: torch.from_numpy(np.searchsorted(share.own, at[owner[at] == rank])) for phase, at in places.items()
        },
        # A rank knows no sequence that it has no row of, so that ranks could not compare ways of exchange alike.
        context=replace(
            share,
            num_whole=num_whole,
            numbers=np.searchsorted(cuts.examples, examples),
            num_shared=len(cuts.examples),
            method="group_cast",
        ),
    )


def route_to_fragments(
    decision: Decision,
    lengths: BatchLengths,
    phase: str,
    rank: int,
    layouts: Mapping[int, PackedSequences],
    ranks_per_node: int | None,
) -> Route:
    """The Route of one rank from an encoder's outputs to the ranks that have the rows' places.

    layouts: example -> its sequence, packed by itself, of `examples_to_lay_out`.
    """
    cuts, encoder, items = decision.cuts, decision.assignments[phase], lengths.items[phase]
    assert cuts is not None, "a decision that shares sequences"
    is_cut = np.isin(items.example, cuts.examples)
    whole = np.flatnonzero(~is_cut)
    backbone = decision.backbone
    # A part is a whole item, or a run of its rows with places on one rank.
    columns = [(whole, backbone.ranks[items.example[whole]].astype(np.int64), items.num_tokens[whole])]
    for example in np.unique(items.example[is_cut]).tolist():
        own = np.flatnonzero(items.example == example)
        layout = layouts[example]
        owner = cuts.owner(example, layout.num_tokens)[layout.feature_positions[phase].numpy()].astype(np.int64)
        item = np.repeat(own, items.num_tokens[own])
        first = np.flatnonzero((np.diff(item, prepend=-1) != 0) | (np.diff(owner, prepend=-1) != 0))
        columns.append((item[first], owner[first], np.diff(first, append=len(item))))
    part, destination, rows = (np.concatenate(each) for each in zip(*columns, strict=True))
    in_order = np.argsort(part, kind="stable")
    part, destination, rows = part[in_order], destination[in_order], rows[in_order]
    # A rank has its whole sequences first, in their order, then those that it shares.
    sequence = np.where(is_cut[part], backbone.num_items + items.example[part], backbone.slots[items.example[part]])
    arrival = np.lexsort((sequence, destination))
    source = encoder.ranks[part].astype(np.int64)
    here = np.flatnonzero(source == rank)
    leaving = here[np.argsort(encoder.slots[part[here]], kind="stable")]
    return route_of_parts(leaving, arrival, source, destination, rows, rank, encoder.num_ranks, ranks_per_node)
