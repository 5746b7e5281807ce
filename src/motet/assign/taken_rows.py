"""Which of the ranks that share sequences take in which rows of encoders, and which of them merge sequences whole.

Decided from lengths alone, as senders know no places (`rows.Dealing`). Ranks are those of a replica of the backbone, or
those of all replicas in microbatches of which sequences are cut: then a rank is its replica * cp + c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from motet.assign.context_rows import context_rows, pairs_by_sequence
from motet.assign.orchestrator import Decision
from motet.assign.rows import takers
from motet.assign.step import ModuleAssignment
from motet.core.arrays import BoolArray, Float64Array, Int32Array, Int64Array, rows_of_runs
from motet.core.cuts import ItemCuts
from motet.core.plan import Plan
from motet.core.sight import Sight
from motet.core.workload import BACKBONE, BatchLengths
from motet.schedule.plan_units import cuts_beside_sequences, gathering_ranks, on_backbone_ranks


@dataclass(frozen=True)
class Taking:
    """How ranks that share sequences take in the rows of one encoder.

    cp:            the ranks of a replica of the backbone.
    is_here:       whether the encoder runs on the ranks of the backbone's unit: each has encoded some items.
    gathered:      on how many ranks its rows come together before (`plan_units.gathering_ranks`).
    over_replicas: whether replicas share its items beside sequences (`plan_units.cuts_beside_sequences`).
    """

    cp: int
    is_here: bool
    gathered: int = 1
    over_replicas: bool = False

    @staticmethod
    def of(plan: Plan, phase: str) -> Taking:
        """Of an encoder, or of a generator's items, under a Plan."""
        cp, is_here = plan.unit_of(BACKBONE).cp, phase in on_backbone_ranks(plan)
        if phase not in plan.model.sources(BACKBONE):
            return Taking(cp, is_here)
        gathered = gathering_ranks(plan, plan.unit_of(phase))
        return Taking(cp, is_here, gathered, cuts_beside_sequences(plan, phase))

    def taken(
        self, decision: Decision, lengths: BatchLengths, phase: str, listed: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Of each row of the items of a phase: the rank that takes it in, and when among those that this rank takes in,
        int64 [num_rows] each; -1 but for items on the replicas that have the listed ones, int64 [n].
        """
        if decision.cuts is not None and self.over_replicas:
            return _taken_over_replicas(decision, phase, lengths.items[phase].num_tokens)
        encoded_on, cuts = decision.assignments[phase].ranks // self.gathered, decision.cuts_of(phase)
        cuts = cuts and cuts.joined(self.gathered)
        rows, cp = lengths.items[phase].num_tokens, self.cp
        starts = np.cumsum(rows) - rows
        taken, turn = np.full((2, rows.sum()), -1, dtype=np.int64)
        for replica in np.unique(decision.backbone.ranks[lengths.items[phase].example[listed]]).tolist():
            items = items_taken_in(decision, lengths, phase, replica)
            num_tokens = rows[items]
            at = rows_of_runs(starts[items], num_tokens)
            turn[at] = np.arange(len(at))
            if self.is_here and cuts is not None:
                taken_in, is_last = _encoded_on(encoded_on, cuts, items, num_tokens)
                taken[at] = taken_in % cp
                turn[at] += is_last * len(at)
            else:
                taken[at] = np.repeat(takers(encoded_on[items], num_tokens, cp, is_here=self.is_here), num_tokens)
            if decision.cuts is not None:
                taken[at] += replica * cp
        return taken, turn


def items_taken_in(decision: Decision, lengths: BatchLengths, phase: str, replica: int) -> Int64Array:
    """The items of a phase whose sequences are on a replica, in the order in which it takes them in, int64 [n]."""
    ranks, order = decision.backbone.follow(lengths.items[phase].example)
    own: Int64Array = order[ranks[order] == replica]
    return own


def merging_ranks(decision: Decision, replica: int, cp: int) -> Int64Array:
    """The rank that merges the sequence of each example, int64 [num_examples]: those of a replica's sequences in turn,
    and of those that are cut one of the replica with the largest fragment. -1: on another replica.
    """
    own, cuts = decision.whole_on(replica), decision.cuts
    merges_on = np.full(len(decision.backbone.ranks), -1, dtype=np.int64)
    merges_on[own] = np.arange(len(own)) % cp
    if cuts is not None:
        merges_on[own] += replica * cp
        merges_on[cuts.items] = decision.backbone.ranks[cuts.items].astype(np.int64) * cp + cuts.items % cp
    return merges_on


def most_merged(sequences: ModuleAssignment, num_microbatches: int, cp: int) -> Float64Array:
    """Rows of the sequences that the busiest rank of each replica merges whole in each microbatch, as of
    `merging_ranks`, float64 [num_replicas * num_microbatches].
    """
    cell, cuts = sequences.batch_index(num_microbatches), sequences.cuts
    merges_on = _turns(sequences.microbatch, np.arange(len(cell))) % cp
    whole = np.arange(len(cell)) if cuts is None else cuts.whole_among(np.arange(len(cell)))
    merges_on[whole] = _turns(cell[whole], sequences.position[whole]) % cp
    size = sequences.num_replicas * num_microbatches * cp
    rows = np.bincount(cell * cp + merges_on, sequences.length, size).reshape(-1, cp)
    most: Float64Array = rows.max(axis=1)
    return most


def _turns(group: NDArray[np.integer], position: NDArray[np.integer]) -> Int64Array:
    """The number of each item among those of its group, from 0, by position; int64, as both columns [n]."""
    order = np.lexsort((position, group))
    turns = np.empty(len(order), dtype=np.int64)
    turns[order] = np.arange(len(order)) - np.searchsorted(group[order], group[order])
    return turns


@dataclass(frozen=True, eq=False)
class MergeMoves:
    """Rows that ranks which share sequences give each other, of one microbatch, so that each is merged on one of them.

    replicas: of the backbone, all of whose ranks exchange them.
    rows:     by what moves, int64 [num_ranks, num_ranks] from rank to rank: the rows of each encoder, and of the
              backbone those that are merged. Rows that stay are counted, too.
    """

    replicas: range
    rows: dict[str, Int64Array]


def merge_moves(plan: Plan, decision: Decision, lengths: BatchLengths) -> list[MergeMoves]:
    """What moves for merges of a microbatch, by the ranks that exchange it."""
    cuts, cp, num_replicas = decision.cuts, plan.unit_of(BACKBONE).cp, decision.backbone.num_ranks
    if cuts is None and cp == 1:
        return []
    together = [range(num_replicas)] if cuts is not None else [range(first, first + 1) for first in range(num_replicas)]
    return [_merged_together(plan, decision, lengths, replicas) for replicas in together]


def _merged_together(plan: Plan, decision: Decision, lengths: BatchLengths, replicas: range) -> MergeMoves:
    """`MergeMoves` of ranks that share sequences."""
    cuts, cp = decision.cuts, plan.unit_of(BACKBONE).cp
    merges_on, merged, owners = np.full(lengths.num_examples, -1, dtype=np.int64), [], []
    sight = Sight.of_model(plan.model)
    for replica in replicas:
        own, here = decision.whole_on(replica), merging_ranks(decision, replica, cp)
        merges_on = np.maximum(merges_on, here)
        merged.append(own)
        rows = context_rows(lengths.sequence[own], cp, sight.pairs(lengths.sequence[own]))
        owners.append(rows.owner + (0 if cuts is None else replica * cp))
    if cuts is not None:
        fragments, of_cut = cuts.over(cp), lengths.sequence[cuts.items]
        merged.append(cuts.items)
        shared = zip(cuts.items.tolist(), of_cut.tolist(), pairs_by_sequence(of_cut, sight.pairs(of_cut)), strict=True)
        owners += [fragments.owner(*sequence) for sequence in shared]
    examples, num_ranks = np.concatenate(merged), len(replicas) * cp
    merged_by = np.repeat(merges_on[examples], lengths.sequence[examples])
    moved = {BACKBONE: _counted(merged_by, np.concatenate(owners).astype(np.int64), num_ranks)}
    for phase in plan.model.sources(BACKBONE):
        items = lengths.items[phase]
        listed = np.flatnonzero(merges_on[items.example] >= 0)
        taken, _ = Taking.of(plan, phase).taken(decision, lengths, phase, listed)
        taken = taken[rows_of_runs((np.cumsum(items.num_tokens) - items.num_tokens)[listed], items.num_tokens[listed])]
        sinks = np.repeat(merges_on[items.example[listed]], items.num_tokens[listed])
        moved[phase] = _counted(taken, sinks, num_ranks)
    return MergeMoves(replicas, moved)


def _counted(source: Int64Array, sink: Int64Array, num_ranks: int) -> Int64Array:
    """How many rows go from rank to rank, int64 [num_ranks, num_ranks]. source, sink: int64 [num_rows]."""
    return np.bincount(source * num_ranks + sink, minlength=num_ranks**2).reshape(num_ranks, num_ranks)


def _taken_over_replicas(decision: Decision, phase: str, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """As `Taking.taken`, of items that replicas share: each has those that it has encoded, in their order.

    rows: int64 [num_items], of each item.
    """
    placed, cuts, starts = decision.assignments[phase], decision.cuts_of(phase), np.cumsum(rows) - rows
    taken = np.repeat(placed.ranks, rows).astype(np.int64)
    if cuts is not None:
        for item in cuts.items.tolist():
            taken[starts[item] : starts[item] + rows[item]] = cuts.run_owner(item, int(rows[item]))
    turn = np.full(len(taken), -1, dtype=np.int64)
    for rank in range(placed.num_ranks):
        own = decision.items_on(phase, rank)
        at = rows_of_runs(starts[own], rows[own])
        at = at[taken[at] == rank]
        turn[at] = np.arange(len(at))
    return taken, turn


def _encoded_on(
    placed: Int32Array, cuts: ItemCuts, items: Int64Array, num_tokens: Int64Array
) -> tuple[Int64Array, BoolArray]:
    """Of each row of some items: the rank that has encoded it, int64 [num_rows], and whether the item is cut.

    placed: int32 [num_items], the rank of each whole item. items: int64 [n]. num_tokens: int64 [n], rows of each.
    """
    is_cut = np.isin(items, cuts.items)
    ranks = [
        cuts.run_owner(item, rows) if cut else np.full(rows, placed[item])
        for item, rows, cut in zip(items.tolist(), num_tokens.tolist(), is_cut.tolist(), strict=True)
    ]
    return np.concatenate(ranks).astype(np.int64), np.repeat(is_cut, num_tokens)
