"""What ranks do of each layer in each microbatch of a step: rows and pairs of whole replicas, and of the busiest rank.

Nothing of it depends on a cost model. Columns are [num_replicas * num_microbatches] of the layer's unit, replica by
replica.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from motet.assign.context_rows import num_runs
from motet.assign.dealt_items import dealt_items
from motet.assign.item_shares import shares_of_cells
from motet.assign.step import StepAssignment
from motet.assign.taken_rows import most_merged
from motet.core.arrays import BoolArray, Float64Array, Int64Array
from motet.core.cuts import shares_between
from motet.core.plan import Plan
from motet.core.sight import Sight
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.flops import like_layer, work_of_items
from motet.cost.model import Runs, Work
from motet.schedule.plan_units import cuts_beside_sequences, on_backbone_ranks, sharing_ranks

MAX_DEALT = 32
"""Packs of a step whose rows are dealt out to be priced, where context-parallel ranks share them: each takes 2 ms."""


@dataclass(frozen=True, eq=False)
class _Shares:
    """Items of an encoder on the ranks that share those of a replica.

    Ranks are numbered by replica, microbatch and context-parallel rank.

    whole, rank:    int64 [num_whole], items, and the rank of each.
    item, cut_rank: int64 [num_fragments], of items that are cut. share: float64, of the item's rows. is_first: bool.
    made:           int64 [num_fragments], rows in the backbone's sequence that each makes.
    """

    whole: Int64Array
    rank: Int64Array
    item: Int64Array
    cut_rank: Int64Array
    share: Float64Array
    is_first: BoolArray
    made: Int64Array


class LayerWork:
    """The work of the layers of one Plan for one assigned batch. Layers that are like each other share it."""

    def __init__(self, plan: Plan, assignment: StepAssignment) -> None:
        self.plan, self.assignment = plan, assignment
        self._known_work: dict[tuple[str, Layer], Work] = {}
        self._known_items: dict[tuple[str, Layer], Work] = {}
        self._known_shares: dict[str, _Shares] = {}
        self._known_runs: dict[int, Float64Array] = {}

    def of_replicas(self, name: str, layer: Layer) -> Work:
        """What all ranks compute that share a replica's work: keys whole on each of them."""
        like = like_layer(layer)
        if (name, like) not in self._known_work:
            is_cut, times = self.assignment.modules[name].cuts is not None, self._num_ranks(name)
            work = (self._of_fragments if is_cut else self._of_whole)(name, like)
            self._known_work[name, like] = Work(work.rows * times, work.pairs * times) if like.makes_keys else work
        return self._known_work[name, like]

    def of_busiest(self, name: str, layer: Layer) -> Work:
        """What the busiest of the ranks does that share a replica's work."""
        num_ranks = self._num_ranks(name)
        if name != BACKBONE and num_ranks > 1:
            dealt = self._dealt(name, layer)
            rows, pairs = (_most_of_ranks(column, num_ranks) for column in (dealt.rows, dealt.pairs))
            if dealt.runs is None:
                return Work(rows, pairs)
            of_ranks = dealt.pairs.reshape(-1, num_ranks)
            fullest = np.arange(len(of_ranks)), of_ranks.argmax(axis=1)
            runs = Runs(*(column.reshape(-1, num_ranks)[fullest] for column in dealt.runs))
            return Work(rows, pairs, runs)
        whole = self.of_replicas(name, layer)
        if self.plan.model.takes_whole(name, layer):
            rows = most_merged(self.assignment.modules[name], self.assignment.num_microbatches, num_ranks)
            return Work(rows, 0.0 * rows)
        if num_ranks == 1:
            return whole
        rows, pairs = whole.rows / num_ranks, whole.pairs / num_ranks
        # A fragment that replicas share is dealt out as it is cut: each rank has as many runs of it.
        of_cut = 0.0 if whole.runs is None else whole.runs.number
        return Work(rows, pairs, Runs(self._num_runs(num_ranks) + of_cut, rows, pairs) if _has_runs(layer) else None)

    def _num_runs(self, cp: int) -> Float64Array:
        """Runs of rows that a context-parallel rank has of the sequences that its replica has whole, by replica and
        microbatch; beyond some packs, as many of their rows as in those.
        """
        if cp not in self._known_runs:
            items, num = self.assignment.modules[BACKBONE], self.assignment.num_microbatches
            cells = [
                items.length[items.whole_items_of(*divmod(index, num))] for index in range(items.num_replicas * num)
            ]
            rows = np.array([lengths.sum() for lengths in cells], dtype=np.float64)
            step = -(-len(cells) // MAX_DEALT)
            sight = Sight.of_model(self.plan.model)
            runs = np.array([num_runs(lengths, cp, sight) if len(lengths) else 0.0 for lengths in cells[::step]])
            self._known_runs[cp] = runs if step == 1 else rows * runs.sum() / max(rows[::step].sum(), 1.0)
        return self._known_runs[cp]

    def moved_of_items(self, name: str, layer: Layer) -> Float64Array:
        """The most rows that a rank gives or gets in a layer's attention over items that ranks share, by replica and
        microbatch. Where rows attend within segments or windows, about: those of two of them, at the fragment's ends.
        """
        items, shares, num_ranks = self.assignment.modules[name], self._shares(name), self._num_ranks(name)
        own, whole = self._fragments(name, layer)
        others = np.bincount(shares.item, minlength=len(items.example))[shares.item] - 1
        got, given = whole - own, own * others
        attention, segments, within = layer.attention, items.segments, 0
        if attention is not None and not attention.whole:
            longest = 0 if segments is None else int(segments.length.max(initial=0)) // layer.divisor
            within = min(filter(None, (attention.window, longest)), default=0)
        if within:
            got, given = (np.minimum(rows, 2 * within) for rows in (got, given))
        size = items.num_replicas * self.assignment.num_microbatches * num_ranks
        moved = np.maximum(*(np.bincount(shares.cut_rank, rows, size) for rows in (got, given)))
        return _most_of_ranks(moved, num_ranks)

    def taken_in(self, name: str) -> Float64Array:
        """The most rows of an encoder that any of the ranks of a replica of the backbone takes in, by replica and
        microbatch.
        """
        plan, num, cp = self.plan, self.assignment.num_microbatches, self.plan.unit_of(BACKBONE).cp
        items, sequences = self.assignment.modules[name], self.assignment.modules[BACKBONE]
        size, home = sequences.num_replicas * num, np.zeros(self.assignment.batch.num_examples, dtype=np.int64)
        home[sequences.example] = sequences.batch_index(num)
        cell, is_here = home[items.example], name in on_backbone_ranks(plan)
        if cp > 1 and is_here:
            rows = self._dealt_rows(name).reshape(size, cp, -1).sum(axis=2)
        elif cp > 1:
            dealt = shares_of_cells(cell, items.num_tokens, items.num_tokens, cp, can_cut=False)
            rows = np.bincount(cell * cp + dealt.ranks, items.num_tokens, size * cp).reshape(size, cp)
        else:
            rows = np.bincount(cell, items.num_tokens, size).reshape(size, 1)
        if sequences.cuts is not None and cuts_beside_sequences(plan, name):  # Where some are cut, rows stay.
            is_cut = np.isin(np.arange(size) % num, sequences.microbatch[sequences.cuts.items])
            rows = np.where(is_cut[:, None], self._dealt_rows(name)[:, None], rows)
        most: Float64Array = rows.max(axis=1).astype(np.float64)
        return most

    def _dealt_rows(self, name: str) -> Float64Array:
        """Rows of an encoder that each of the ranks made that share its items, by replica, microbatch and rank."""
        rows, shares = self.assignment.modules[name].num_tokens, self._shares(name)
        return self._on_ranks(name, rows[shares.whole], shares.made)

    def _on_ranks(
        self, name: str, of_whole: Float64Array | Int64Array, of_fragments: Float64Array | Int64Array
    ) -> Float64Array:
        """Figures of whole items and of fragments summed over those of each rank, by replica, microbatch and rank."""
        shares, num_ranks = self._shares(name), self._num_ranks(name)
        size = self.assignment.modules[name].num_replicas * self.assignment.num_microbatches * num_ranks
        rank, column = np.concatenate([shares.rank, shares.cut_rank]), np.concatenate([of_whole, of_fragments])
        return np.bincount(rank, column, size).astype(np.float64, copy=False)

    def _num_ranks(self, name: str) -> int:
        """The ranks that share a replica's items of a module, or its sequences."""
        return sharing_ranks(self.plan, self.plan.unit_of(name))

    def _of_whole(self, name: str, like: Layer) -> Work:
        """`of_replicas` where each replica has whole sequences."""
        num, items = self.assignment.num_microbatches, self.assignment.modules[name]
        size, batch_index, targets = items.num_replicas * num, items.batch_index(num), None
        if name == BACKBONE:
            targets = np.bincount(batch_index, self.assignment.batch.num_targets, size).astype(np.int64)
        padded = self.plan.model.module(name).padded
        return work_of_items(like, items, batch_index, size, padded=padded, num_targets=targets)

    def _of_fragments(self, name: str, like: Layer) -> Work:
        """`of_replicas` where replicas share some items: a fragment has its share of the rows and pairs of all.

        Where some of a microbatch are shared, none of its items is padded.
        """
        items, num = self.assignment.modules[name], self.assignment.num_microbatches
        cuts, of_each = items.cuts, self._of_each(name, like)
        assert cuts is not None, "replicas share sequences"
        whole = cuts.whole_among(np.arange(len(items.example)))
        cell = np.concatenate([items.batch_index(num)[whole], cuts.rank * num + items.microbatch[cuts.item]])
        item = np.concatenate([whole, cuts.item])
        of_cut = np.ones(len(cuts.item)) if like.makes_keys else (cuts.end - cuts.begin) / cuts.units
        share = np.concatenate([np.ones(len(whole)), of_cut])
        columns = tuple(column[item] * share for column in (of_each.rows, of_each.pairs))
        size = items.num_replicas * num
        rows, pairs = (np.bincount(cell, column, size).astype(np.float64) for column in columns)
        runs = None
        if _has_runs(like) and (name == BACKBONE or items.segments is None):
            of_cuts = slice(len(whole), None)
            # Of a sequence a fragment is two runs, which are mirror images. Those in its middle are one.
            num_runs_each = np.ones(len(cuts.item))
            if name == BACKBONE:
                num_runs_each = 2.0 - (cuts.end == cuts.units) / self._num_ranks(name)
            counts = num_runs_each, *(each[of_cuts] for each in columns)
            runs = Runs(*(np.bincount(cell[of_cuts], each, size).astype(np.float64) for each in counts))
        work = Work(rows, pairs, runs)
        if not self.plan.model.module(name).padded:
            return work
        is_cut = np.isin(np.arange(size) % num, items.microbatch[cuts.items])
        padded = self._of_whole(name, like)
        return Work(np.where(is_cut, work.rows, padded.rows), np.where(is_cut, work.pairs, padded.pairs), work.runs)

    def _of_each(self, name: str, like: Layer) -> Work:
        """Work of each item of a module in layers that are like this one, [num_items] each."""
        if (name, like) not in self._known_items:
            items = self.assignment.modules[name]
            count, targets = len(items.example), self.assignment.batch.num_targets if name == BACKBONE else None
            self._known_items[name, like] = work_of_items(like, items, np.arange(count), count, num_targets=targets)
        return self._known_items[name, like]

    def _dealt(self, name: str, layer: Layer) -> Work:
        """Work of the ranks that share items of an encoder, by replica, microbatch and rank."""
        items, shares = self.assignment.modules[name], self._shares(name)
        if not len(shares.item):
            size = items.num_replicas * self.assignment.num_microbatches * self._num_ranks(name)
            padded = self.plan.model.module(name).padded
            return work_of_items(layer, items, shares.rank, size, padded=padded)
        of_each, (own, whole) = self._of_each(name, like_layer(layer)), self._fragments(name, layer)
        # A row of a fragment attends to as many as any of its item.
        pairs = of_each.pairs[shares.item] * own / np.maximum(whole, 1)
        # Ranks that share an item in segments have whole ones, but for those at the ends.
        is_whole = items.segments is None or (layer.attention is not None and layer.attention.whole)
        none = np.zeros(len(shares.whole))
        runs = None
        if is_whole and _has_runs(layer) and not self.plan.model.module(name).tile_rows:
            runs = Runs(*(self._on_ranks(name, none, each) for each in (np.ones(len(own)), own, pairs)))
        return Work(
            self._on_ranks(name, of_each.rows[shares.whole], own),
            self._on_ranks(name, of_each.pairs[shares.whole], pairs),
            runs,
        )

    def _fragments(self, name: str, layer: Layer) -> tuple[Float64Array, Float64Array]:
        """(rows of each fragment of a cut item in a layer, rows of the whole item), about.

        The first one has class rows; segments, such as tiles, have some each, and all fragments have queries.
        """
        shares, rows = self._shares(name), self._of_each(name, like_layer(layer)).rows
        whole = rows[shares.item]
        is_read = layer.attention is not None and layer.attention.queries > 0
        if is_read or self.assignment.modules[name].segments is not None:
            return whole * shares.share, whole
        return (whole - layer.extra_rows) * shares.share + layer.extra_rows * shares.is_first, whole

    def _shares(self, name: str) -> _Shares:
        """Which of the ranks that share a replica's items has what of each item of an encoder, as training deals it."""
        if name not in self._known_shares:
            self._known_shares[name] = self._dealt_shares(name)
        return self._known_shares[name]

    def _dealt_shares(self, name: str) -> _Shares:
        items, module, num_ranks = self.assignment.modules[name], self.plan.model.module(name), self._num_ranks(name)
        dealt = dealt_items(items, module, num_ranks, self.plan.unit_of(name).cp)
        rows = module.cut_rows.num_rows(items.num_tokens, items.length)

        def on_rank(rank: Int64Array, item: Int64Array) -> Int64Array:
            cell: Int64Array = rank // num_ranks * self.assignment.num_microbatches + items.microbatch[item]
            return cell * num_ranks + rank % num_ranks

        whole = np.flatnonzero(~np.isin(np.arange(len(rows)), dealt.item))
        cuts = dealt.begin, dealt.end, dealt.units
        return _Shares(
            whole,
            on_rank(dealt.ranks[whole], whole),
            dealt.item,
            on_rank(dealt.rank, dealt.item),
            shares_between(rows[dealt.item], *cuts) / rows[dealt.item],
            dealt.begin == 0,
            shares_between(items.num_tokens[dealt.item], *cuts),
        )


def _most_of_ranks(column: Float64Array, num_ranks: int) -> Float64Array:
    """The most of each `num_ranks` neighbours. numpy's maximum over an axis of a few takes several times as long."""
    of_rank = column.reshape(-1, num_ranks).T
    most: Float64Array = of_rank[0].copy()
    for other in of_rank[1:]:
        np.maximum(most, other, out=most)
    return most


def _has_runs(layer: Layer) -> bool:
    """Whether rows of a layer attend to rows of their own item: not queries, nor to images beside their sequence."""
    return layer.attention is not None and not (layer.attention.queries or layer.attention.keys)
