"""The RankBatch of a rank that holds a part of the model: what its stages need of one microbatch, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch

from motet.assign.context_rows import context_rows, rows_of_replica
from motet.assign.orchestrator import Decision
from motet.assign.taken_rows import items_taken_in, merging_ranks
from motet.core.arrays import Int64Array, rows_of_runs
from motet.core.cuts import ItemCuts
from motet.core.example import Media, TokenSequence
from motet.core.sight import Sight
from motet.core.workload import BACKBONE, BatchLengths
from motet.dispatch.batch import (
    PackedSequences,
    RankBatch,
    check_lengths,
    pack,
    packed_alone,
    rows_of_rank,
    stacked_media,
)
from motet.dispatch.context import ContextPlace, MergeShare, pairs_of_rows, route_to_places, share_sequences
from motet.dispatch.cut_batch import examples_to_lay_out
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
    laid_out: Mapping[int, TokenSequence] = MappingProxyType({}),
) -> RankBatch:
    """The RankBatch of a rank whose stages run parts of modules. It has no routes: the Program's messages move rows.

    replicas:  module -> the replica that this rank is part of, for the modules that it runs a part of.
    sequences: those of the replica, in its order; None if the rank embeds no tokens and takes no loss. Its sequences
               have their extents then, and neither tokens nor targets.
    media:     items `decision.items_on(phase, replicas[phase])` of the encoders whose first block the rank has.
    sizes:     phase -> sizes of all items of the microbatch, int64 [num_items, size_dim].
    context:   where the rank stands among those that share the replica's sequences; None: it shares them with none.
    laid_out:  the sequences that `examples_to_lay_out` names, by example, if `sequences` are given.
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
    examples = decision.sequences_on(replicas[BACKBONE]) if BACKBONE in replicas else np.zeros(0, np.int64)
    if sequences is None:
        packed = _extents(lengths.sequence[examples])
    else:
        of_sequences = lengths.take(examples)
        packed = pack(sequences, {phase: items.num_tokens for phase, items in of_sequences.items.items()})
        check_lengths(packed, lengths, examples)
    packed = replace(packed, num_targets=torch.from_numpy(lengths.num_targets[examples].astype(np.int64)))
    if context is not None and BACKBONE in replicas and (context.cp > 1 or decision.cuts is not None):
        to_lay_out = examples_to_lay_out(decision.cuts, lengths).tolist() if sequences is not None else []
        layouts = {example: packed_alone(laid_out[example], example, lengths) for example in to_lay_out}
        packed = _shared_out(packed, decision, lengths, replicas[BACKBONE], context, layouts)
    return RankBatch(packed, values, {}, lengths, decision, item_rows=item_rows, shared=shared)


def _shared_out(
    packed: PackedSequences,
    decision: Decision,
    lengths: BatchLengths,
    replica: int,
    place: ContextPlace,
    layouts: Mapping[int, PackedSequences],
) -> PackedSequences:
    """The rows of one rank in sequences of its replica. packed: all rows. layouts: as of `route_to_fragments`."""
    cuts, cp, rank, num_ranks = decision.cuts, place.cp, place.c, place.cp
    of_sequences, num_whole = np.diff(packed.offsets.numpy()).astype(np.int64), 0
    pairs = pairs_of_rows(packed, place.sight)
    if cuts is None:
        rows, fragments = context_rows(of_sequences, cp, pairs), None
        numbers = np.arange(len(of_sequences))
    else:
        numbers, num_whole = decision.sequences_on(replica), len(decision.whole_on(replica))
        by_whole = of_sequences[:num_whole], of_sequences[num_whole:], numbers[num_whole:]
        rows = rows_of_replica(*by_whole, cuts, replica, decision.backbone.num_ranks, cp, pairs)
        fragments = cuts.over(cp)
        rank, num_ranks = rank + replica * cp, rows.num_ranks
    share = share_sequences(rows, rank, packed)
    own, routes, given, positions = share.own, dict[str, Route](), dict[str, Route](), {}
    merges_on, to_merge = merging_ranks(decision, replica, cp), dict[str, Route]()
    for phase in packed.feature_positions:
        places = packed.feature_positions[phase].numpy()
        owner = rows.owner[places].astype(np.int64)
        positions[phase] = torch.from_numpy(np.searchsorted(own, places[owner == rank]))
        if phase not in place.sources | place.sinks:
            continue
        listed, rows_of = items_taken_in(decision, lengths, phase, replica), lengths.items[phase].num_tokens
        if fragments is None:
            has_moved = len(places) > 0
        else:
            is_cut = np.isin(lengths.items[phase].example, fragments.items)
            has_moved = bool(rows_of[is_cut | (cp > 1)].any())  # The same on all ranks.
            # Items of whole sequences come first, then those of all that are cut, on any ranks.
            listed = np.concatenate([listed[~is_cut[listed]], np.flatnonzero(is_cut)])
            of_whole = owner[places < np.append(0, np.cumsum(of_sequences))[num_whole]]
            owner = np.concatenate([of_whole, *_owners_of_cut(fragments, phase, layouts, place.sight)])
        if not has_moved:
            continue
        taken_in, turn = place.taking[phase].taken(decision, lengths, phase, listed)
        at = rows_of_runs((np.cumsum(rows_of) - rows_of)[listed], rows_of[listed])
        route = route_to_places(owner, taken_in[at], rank, num_ranks, turn[at])
        if cuts is not None and cp > 1:  # What moves inside a replica, others do not see.
            route = replace(route, moved_rows=int(rows_of.sum()))
        if phase in place.sinks:
            given[phase] = route.transpose
            continue
        routes[phase] = route
        if place.merges:
            # In the order of sequences as in that of places, so that a merge finds its rows as it would alone.
            merges = np.repeat(merges_on[lengths.items[phase].example[listed]], rows_of[listed])
            to_merge[phase] = replace(
                route_to_places(merges, taken_in[at], rank, num_ranks, turn[at]), moved_rows=int(rows_of.sum())
            )
    tokens, targets = (each[own] if len(each) else each for each in (packed.tokens, packed.targets))
    num_alone = num_whole if cp == 1 else 0
    merging = None
    if place.merges and len(packed.tokens):
        merging = MergeShare.of(packed, rows, rank, merges_on[decision.sequences_on(replica)], to_merge)
    share = replace(
        share,
        num_whole=num_alone,
        numbers=numbers[num_alone:],
        num_shared=len(numbers) if cuts is None else lengths.num_examples,
        routes=routes,
        given=given,
        trained=place.trained,
        # A rank knows no sequence that it has no row of, so that ranks could not compare ways of exchange alike.
        method=place.config.exchange if cuts is None else "group_cast",
        head_groups=place.config.head_groups,
        merging=merging,
    )
    return PackedSequences(tokens, targets, packed.offsets, positions, share)


def _owners_of_cut(
    fragments: ItemCuts, phase: str, layouts: Mapping[int, PackedSequences], sight: Sight
) -> list[Int64Array]:
    """The rank of each row of a phase in each sequence that is cut, int64 [rows of the phase]."""
    found = []
    for example, layout in layouts.items():
        owner = fragments.owner(example, layout.num_rows, pairs_of_rows(layout, sight))
        found.append(owner[layout.feature_positions[phase].numpy()].astype(np.int64))
    return found


def _extents(rows: Int64Array) -> PackedSequences:
    """Sequences of these lengths without tokens. rows: int64 [num_sequences]."""
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(rows)]).astype(np.int32))
    return PackedSequences(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool), offsets, {})
