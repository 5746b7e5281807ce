"""What a rank runs of a microbatch in which several ranks share some items (`core/cuts.py`), all others whole.

A rank has its whole sequences first, then its rows of shared ones, and so it has the items of encoders
(`shared_items.py`). Rows of encoders go straight to the ranks of their
places, in the exchange that takes all other rows: where a placeholder stands in a shared sequence, its tokens tell,
which every rank reads of sequences with items. Where a merge of the user's own takes sequences whole, the rank with
most of a shared one's rows takes these in, merges it, and gives the others what they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from motet.assign.context_rows import pairs_by_sequence
from motet.assign.orchestrator import Decision
from motet.core.arrays import Int64Array
from motet.core.context_rows import ContextRows
from motet.core.cuts import ItemCuts
from motet.core.nodes import node_of_ranks
from motet.core.workload import BatchLengths
from motet.dispatch.context import ContextShare, MergeShare, pairs_of_rows, route_to_places, share_sequences
from motet.dispatch.route import Route, route_of_parts

if TYPE_CHECKING:
    from motet.dispatch.batch import PackedSequences


def examples_to_lay_out(cuts: ItemCuts | None, lengths: BatchLengths) -> Int64Array:
    """The shared examples whose tokens every rank reads: those with items, ascending, int64 [n]."""
    if cuts is None:
        return np.zeros(0, dtype=np.int64)
    has_items = [np.isin(cuts.items, items.example) for items in lengths.items.values()]
    return cuts.items[np.any(has_items, axis=0)] if has_items else cuts.items[:0]


def examples_to_read(decision: Decision, rank: int) -> list[int]:
    """The examples whose tokens a rank reads, ascending: those of its sequences, and all that are shared.

    Once some have been left out, it may meet the others in any of these.
    """
    cuts = decision.cuts
    return sorted({*decision.sequences_on(rank).tolist(), *([] if cuts is None else cuts.items.tolist())})


def shared_out(packed: PackedSequences, decision: Decision, rank: int, lengths: BatchLengths) -> PackedSequences:
    """The rows of one rank. packed: all rows of the sequences `decision.sequences_on(rank)`. lengths: of all."""
    cuts, num_ranks, num_whole = decision.cuts, decision.backbone.num_ranks, len(decision.whole_on(rank))
    assert cuts is not None, "a decision that shares sequences"
    of_sequences = np.diff(packed.offsets.numpy()).astype(np.int64)
    examples = decision.sequences_on(rank)[num_whole:]
    pairs = pairs_by_sequence(of_sequences, pairs_of_rows(packed, decision.sight))[num_whole:]
    shared = zip(examples.tolist(), of_sequences[num_whole:].tolist(), pairs, strict=True)
    owners = [cuts.owner(*sequence) for sequence in shared]
    owner = np.concatenate([np.full(of_sequences[:num_whole].sum(), rank, dtype=np.int32), *owners])
    rows = ContextRows(of_sequences, owner, num_ranks)
    share = share_sequences(rows, rank, packed)
    if decision.merges:
        share = _merging(share, decision, packed, lengths)
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
            numbers=np.searchsorted(cuts.items, examples),
            num_shared=len(cuts.items),
            method="group_cast",
        ),
    )


def _merging(share: ContextShare, decision: Decision, packed: PackedSequences, lengths: BatchLengths) -> ContextShare:
    """A rank's share of sequences with what it merges. packed: all rows.

    The rows of encoders come to the ranks that merge. They go on to their places where they enter again.
    """
    cuts, rows, rank = decision.cuts, share.rows, share.rank
    assert cuts is not None, "a decision that shares sequences"
    owner, merges_on = rows.owner.astype(np.int64), decision.backbone.ranks[decision.sequences_on(rank)]
    merged_by, routes = np.repeat(merges_on.astype(np.int64), rows.lengths), {}
    for phase, places in packed.feature_positions.items():
        items, at = lengths.items[phase], places.numpy()
        if num_rows := int(items.num_tokens[np.isin(items.example, cuts.items)].sum()):
            route = route_to_places(owner[at], merged_by[at], rank, rows.num_ranks)
            routes[phase] = replace(route, moved_rows=num_rows)  # The same on all ranks.
    merging = MergeShare.of(packed, rows, rank, merges_on, {})
    return replace(share, merging=merging, routes=routes, trained=None)


def route_to_fragments(
    decision: Decision,
    lengths: BatchLengths,
    phase: str,
    rank: int,
    layouts: Mapping[int, PackedSequences],
) -> Route:
    """The Route of one rank from an encoder's outputs to the ranks that have the rows' places, or merge sequences.

    layouts: example -> its sequence, packed by itself, of `examples_to_lay_out`.
    """
    cuts, item_cuts = decision.cuts, decision.cuts_of(phase)
    encoder, backbone, items = decision.assignments[phase], decision.backbone, lengths.items[phase]
    is_cut, goes_to_cut = (
        np.zeros(len(of), dtype=bool) if own is None else np.isin(of, own.items)
        for of, own in ((np.arange(items.num_items), item_cuts), (items.example, cuts))
    )
    owners = {}
    if cuts is not None and not decision.merges:
        for example, layout in layouts.items():
            owners[example] = cuts.owner(example, layout.num_rows, pairs_of_rows(layout, decision.sight))
    whole = np.flatnonzero(~is_cut & ~goes_to_cut)
    # A part is a whole item, or a run of its rows that are on one rank and have places on one rank.
    columns = [
        (
            whole,
            encoder.ranks[whole].astype(np.int64),
            backbone.ranks[items.example[whole]].astype(np.int64),
            items.num_tokens[whole],
        )
    ]
    for item in np.flatnonzero(is_cut | goes_to_cut).tolist():
        example, num_rows = int(items.example[item]), int(items.num_tokens[item])
        source = np.full(num_rows, encoder.ranks[item], dtype=np.int64)
        destination = np.full(num_rows, backbone.ranks[example], dtype=np.int64)
        if item_cuts is not None and is_cut[item]:
            source = item_cuts.run_owner(item, num_rows).astype(np.int64)
        if goes_to_cut[item] and not decision.merges:
            begin = int(np.searchsorted(items.example, example))
            before = int(items.num_tokens[begin:item].sum())
            places = layouts[example].feature_positions[phase].numpy()[before : before + num_rows]
            destination = owners[example][places].astype(np.int64)
        first = np.flatnonzero((np.diff(source, prepend=-1) != 0) | (np.diff(destination, prepend=-1) != 0))
        run = np.full(len(first), item), source[first], destination[first], np.diff(first, append=num_rows)
        columns.append(run)
    part, source, destination, rows = (np.concatenate(each) for each in zip(*columns, strict=True))
    in_order = np.argsort(part, kind="stable")
    part, source, destination, rows = part[in_order], source[in_order], destination[in_order], rows[in_order]
    # A rank has its whole items first, in their order, then those that it shares; and so it has sequences.
    place = np.where(is_cut[part], items.num_items + part, encoder.slots[part])
    example = items.example[part]
    sequence = np.where(goes_to_cut[part], backbone.num_items + example, backbone.slots[example])
    arrival = np.lexsort((sequence, destination))
    here = np.flatnonzero(source == rank)
    leaving = here[np.argsort(place[here], kind="stable")]
    node = node_of_ranks(decision.ranks_per_node, encoder.num_ranks)
    return route_of_parts(leaving, arrival, source, destination, rows, rank, node)
