"""The RankBatch of a rank that holds a part of the model: what its stages need of one microbatch, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from motet.assign.context_rows import context_rows
from motet.assign.orchestrator import Decision
from motet.assign.rows import takers
from motet.core.arrays import BoolArray, Int64Array
from motet.core.assignment import Assignment
from motet.core.cuts import ItemCuts
from motet.core.example import Media, TokenSequence
from motet.core.workload import BACKBONE, BatchLengths
from motet.dispatch.batch import PackedSequences, RankBatch, check_lengths, pack, rows_of_rank, stacked_media
from motet.dispatch.context import ContextPlace, route_to_places, share_sequences
from motet.dispatch.route import Route
from motet.dispatch.shared_items import shared_items


def assemble_stages(
    decision: Decision,
    lengths: BatchLengths,
    replicas: Mapping[str, int],
    sequences: Sequence[TokenSequence] | None,
    media: Mapping[str, Sequence[Media]],
    sizes: Mapping[str, Int64Array],
    context: ContextPlace | None = None,
) -> RankBatch:
    """The RankBatch of a rank whose stages run parts of modules. It has no routes: the Program's messages move rows.

    replicas:  module -> the replica that this rank is part of, for the modules that it runs a part of.
    sequences: those of the replica, in its order; None if the rank embeds no tokens and takes no loss. Its sequences
               have their extents then, and neither tokens nor targets.
    media:     items `decision.items_on(phase, replicas[phase])` of the encoders whose first block the rank has.
    sizes:     phase -> sizes of all items of the microbatch, int64 [num_items, size_dim].
    context:   where the rank stands among those that share the replica's sequences; None: it shares them with none.
    Raises ValueError where what was loaded differs from what `lengths` says.
    """
    values, item_rows, shared = {}, {}, {}
    for phase in lengths.items:
        if phase in replicas:
            of_replica = decision.items_on(phase, replicas[phase])
            item_rows[phase] = lengths.items[phase].num_tokens[of_replica]
            if phase in media and len(media[phase]) != len(of_replica):
                raise ValueError(f"{len(media[phase])} items of phase {phase!r} were loaded, not {len(of_replica)}")
            values[phase] = (
                stacked_media(media[phase])
                if phase in media
                else (torch.empty(0, 0), torch.from_numpy(np.ascontiguousarray(sizes[phase][of_replica])))
            )
            if (of_rank := shared_items(decision, phase, lengths.items[phase], replicas[phase])) is not None:
                shared[phase] = of_rank
                if phase in media:
                    values[phase] = rows_of_rank(*values[phase], of_rank, media[phase])
    examples = decision.backbone.on_rank(replicas[BACKBONE]) if BACKBONE in replicas else np.zeros(0, np.int64)
    if sequences is None:
        packed = _extents(lengths.sequence[examples])
    else:
        packed = pack(
            sequences, {phase: _rows(decision, lengths, phase, replicas[BACKBONE]) for phase in lengths.items}
        )
        check_lengths(packed, lengths, examples)
    packed = replace(packed, num_targets=torch.from_numpy(lengths.num_targets[examples].astype(np.int64)))
    if context is not None and BACKBONE in replicas:
        packed = _shared_out(packed, decision, lengths, replicas[BACKBONE], context)
    return RankBatch(packed, values, {}, lengths, decision, item_rows=item_rows, shared=shared)


def _rows(decision: Decision, lengths: BatchLengths, phase: str, replica: int) -> Int64Array:
    """Rows of each item of a phase in the sequences of a replica, in their order."""
    return lengths.items[phase].num_tokens[_items(decision, lengths, phase, replica)]


def _items(decision: Decision, lengths: BatchLengths, phase: str, replica: int) -> Int64Array:
    """The items of a phase in the sequences of a replica, in their order, int64 [n]."""
    ranks, order = decision.backbone.follow(lengths.items[phase].example)
    return order[ranks[order] == replica]


def _shared_out(
    packed: PackedSequences, decision: Decision, lengths: BatchLengths, replica: int, place: ContextPlace
) -> PackedSequences:
    """The rows of one rank in sequences of its replica. packed: all rows."""
    rows = context_rows(np.diff(packed.offsets.numpy()).astype(np.int64), place.cp)
    share = share_sequences(rows, place.c, packed)
    own, routes, given, positions = share.own, dict[str, Route](), dict[str, Route](), {}
    for phase in packed.feature_positions:
        owner = rows.owner[places := packed.feature_positions[phase].numpy()].astype(np.int64)
        positions[phase] = torch.from_numpy(np.searchsorted(own, places[owner == place.c]))
        if len(places) and phase in place.sources | place.sinks:
            items = _items(decision, lengths, phase, replica)
            num_tokens, is_here = lengths.items[phase].num_tokens[items], phase in place.here
            assignment, is_last, num_together = decision.assignments[phase], None, place.gathered.get(phase, 1)
            if is_here and num_together == 1 and (cuts := decision.cuts_of(phase)) is not None:
                taken_in, is_last = _encoded_on(assignment, cuts, items, num_tokens)
                taken_in = taken_in % place.cp
            else:
                encoded_on = assignment.ranks[items] // num_together
                taken_in = np.repeat(takers(encoded_on, num_tokens, place.cp, is_here=is_here), num_tokens)
            route = route_to_places(owner, taken_in, place.c, place.cp, is_last)
            if phase in place.sinks:
                given[phase] = route.transpose
            else:
                routes[phase] = route
    tokens, targets = (each[own] if len(each) else each for each in (packed.tokens, packed.targets))
    how = {"method": place.config.exchange, "head_groups": place.config.head_groups}
    share = replace(share, routes=routes, given=given, trained=place.trained, **how)
    return PackedSequences(tokens, targets, packed.offsets, positions, share)


def _encoded_on(
    placed: Assignment, cuts: ItemCuts, items: Int64Array, num_tokens: Int64Array
) -> tuple[Int64Array, BoolArray]:
    """Of each row of some items: the rank that has encoded it, int64 [num_rows], and whether the item is cut.

    items: int64 [n]. num_tokens: int64 [n], rows of each.
    """
    is_cut = np.isin(items, cuts.items)
    ranks = [
        cuts.run_owner(item, rows) if cut else np.full(rows, placed.ranks[item])
        for item, rows, cut in zip(items.tolist(), num_tokens.tolist(), is_cut.tolist(), strict=True)
    ]
    return np.concatenate(ranks).astype(np.int64), np.repeat(is_cut, num_tokens)


def _extents(rows: Int64Array) -> PackedSequences:
    """Sequences of these lengths without tokens. rows: int64 [num_sequences]."""
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(rows)]).astype(np.int32))
    return PackedSequences(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool), offsets, {})
