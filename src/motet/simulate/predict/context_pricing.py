"""Prices of what context-parallel ranks, and replicas that share sequences or items, exchange in attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from motet.assign.context_rows import moved_rows, rows_of_replicas
from motet.assign.step import ModuleAssignment
from motet.core.arrays import BoolArray, Float64Array
from motet.core.attention_table import AttentionTable
from motet.core.context_rows import exchanged_heads
from motet.core.plan import Unit
from motet.core.sight import Sight
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.memory import plan_precision
from motet.cost.model import CostModel
from motet.simulate.predict.exchange_seconds import gathers_s
from motet.simulate.predict.layer_work import MAX_DEALT, LayerWork


class ContextPrice(NamedTuple):
    """Seconds of one exchange of rows in a layer's attention, and bytes of the copies that backward reads again.

    by_heads: whether ranks have all rows of some heads meanwhile (Ulysses), and no runs of them.
    """

    seconds: Float64Array
    copied_bytes: Float64Array
    by_heads: BoolArray


def _all_ranks(unit: Unit) -> tuple[int, ...]:
    """The ranks that meet where replicas of a unit share sequences or items."""
    return tuple(unit.rank(0, d, c) for d in range(unit.dp) for c in range(unit.cp))


class ContextPricing:
    """Prices the exchanges of attention of one Plan for the work of one assigned batch.

    exchange: how context-parallel ranks get rows of each other, as of `dispatch.context.ContextShare.method`.
    """

    def __init__(self, work: LayerWork, cost: CostModel, exchange: str) -> None:
        self.work, self.plan, self.assignment = work, work.plan, work.assignment
        self.cost, self.exchange = cost, exchange
        self.number_bytes = plan_precision(work.plan).compute
        self.sight = Sight.of_model(work.plan.model)

    def price(self, name: str, layer: Layer) -> ContextPrice:
        """The exchange of rows between ranks in a layer's attention, [replicas * microbatches] each.

        As executed (`models/context_items.py`): the busiest rank moves what `exchanged_heads` says, of an encoder for
        the items that ranks share, and by group-cast where replicas share sequences.
        """
        items, attention, unit = self.assignment.modules[name], layer.attention, self.plan.unit_of(name)
        cp, num = unit.cp, self.assignment.num_microbatches
        seconds, copied = np.zeros((2, items.num_replicas * num))
        by_heads = np.zeros(len(seconds), dtype=np.bool_)
        if attention is None or (cp == 1 and items.cuts is None):
            return ContextPrice(seconds, copied, by_heads)
        groups: list[Sequence[int]] = list(self.plan.cluster.unlike(unit.ranks, cp, apart=unit.tp))
        # Where the description has no heads, all keys of a row count as one.
        heads, kv_heads = attention.num_heads // unit.tp, max(attention.num_kv_heads // unit.tp, 1)
        head_bytes = attention.kv_width / unit.tp / kv_heads * self.number_bytes
        if self.plan.model.module(name).tile_rows:
            return ContextPrice(seconds, copied, by_heads)
        if name != BACKBONE:
            moved = 2.0 * kv_heads * self.work.moved_of_items(name, layer)
            if cp > 1:
                seconds, copied, _ = self._exchanged(moved, moved, head_bytes, groups)
            if items.cuts is not None:
                is_met = np.isin(np.arange(num), items.microbatch[items.cuts.items])
                every = self._exchanged(moved, moved, head_bytes, [_all_ranks(unit)])
                seconds, copied = (
                    np.where(is_met, of_all.reshape(-1, num), own.reshape(-1, num)).ravel()
                    for of_all, own in zip((every.seconds, every.copied_bytes), (seconds, copied), strict=True)
                )
            return ContextPrice(seconds, copied, by_heads)
        if cp > 1:
            seconds, copied, by_heads = self._of_replicas(items, attention.window, groups, heads, kv_heads, head_bytes)
        if items.cuts is None:
            return ContextPrice(seconds, copied, by_heads)
        together = [_all_ranks(unit)]
        for microbatch in np.unique(items.microbatch[items.cuts.items]).tolist():
            rows = rows_of_replicas(items, microbatch, cp, self.sight)
            table = AttentionTable.packed(rows.lengths).windowed(attention.window or None)
            sent = np.array([2.0 * kv_heads * rows.most_moved(rows.wanted(table))])
            price = self._exchanged(sent, sent, head_bytes, together)
            for prices, of_all in zip((seconds, copied, by_heads), price, strict=True):
                prices.reshape(items.num_replicas, num)[:, microbatch] = of_all[0]
        return ContextPrice(seconds, copied, by_heads)

    def _of_replicas(
        self,
        items: ModuleAssignment,
        window: int,
        groups: Sequence[Sequence[int]],
        heads: int,
        kv_heads: int,
        head_bytes: float,
    ) -> ContextPrice:
        """`price` of the backbone, of sequences that the ranks of a replica share. groups: kinds of these."""
        num, cp = self.assignment.num_microbatches, len(groups[0])
        cells = [items.length[items.items_of(*divmod(index, num))] for index in range(items.num_replicas * num)]
        rows = np.array([lengths.sum() for lengths in cells])
        # Dealing out a pack takes 2 ms; beyond some, packs move the same share of their rows.
        dealt = cells[:: -(-len(cells) // MAX_DEALT)]
        moved = np.array([moved_rows(lengths, cp, window, self.sight) for lengths in dealt])
        if len(dealt) < len(cells):
            moved = np.outer(rows, moved.sum(axis=0) / max(sum(lengths.sum() for lengths in dealt), 1))
        of_keys, of_all = moved.T.astype(np.float64)
        sent, kept, by_heads = exchanged_heads(self.exchange, of_keys, of_all, rows / cp, cp, heads, kv_heads)
        return self._exchanged(sent, kept, head_bytes, groups)._replace(by_heads=by_heads)

    def _exchanged(
        self, sent: Float64Array, kept: Float64Array, head_bytes: float, groups: Sequence[Sequence[int]]
    ) -> ContextPrice:
        """The price of exchanges in the slowest group. sent, kept: rows of heads that the busiest rank moves, and that
        backward finds.
        """
        cp = len(groups[0])
        # As of an all-gather in which each rank gets as much.
        seconds = gathers_s(self.cost, sent * head_bytes * cp / max(cp - 1, 1), groups)
        return ContextPrice(seconds, kept * head_bytes, np.zeros(sent.shape, dtype=np.bool_))
