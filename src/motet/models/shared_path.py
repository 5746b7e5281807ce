"""The path through a module of items some of which ranks share: each has some of their rows, or of their tiles."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from motet.absent import take_part
from motet.core.arrays import Int64Array, rows_of_runs
from motet.core.context_rows import ContextRows
from motet.dropout import ENTER, PROJECTOR, ItemRows, arranged
from motet.models.callbacks import callback_dtype
from motet.models.context_items import SharedItemRows
from motet.models.contract import item_rows
from motet.models.module_sizes import sums
from motet.models.row_copies import rows_wanted
from motet.models.shared_queries import SharedReading
from motet.models.whole.tiles import Newlines
from motet.on_device import on_device

if TYPE_CHECKING:
    from motet.models.module import ModalityModule


class SharedPath:
    """One pass over items some of which ranks share, through a module or some of its blocks. Methods are collectives.

    values: rows of the items that are here, or hidden states of them, as of `enter`, `through` and `leave` of the
            module; a rank without rows has none. sizes, shared: as of its `forward`.

    Example: `SharedPath(module, values, sizes, shared).forward()` are the rows of sequences that this rank makes.
    """

    def __init__(self, module: ModalityModule, values: Tensor, sizes: Tensor, shared: SharedItemRows) -> None:
        self._module, self._values, self._sizes, self._shared = module, values, sizes, shared

    @cached_property
    def _here(self) -> _ItemsHere:
        return _items_here(self._module, self._values, self._sizes, self._shared)

    def forward(self) -> Tensor:
        """What the module makes of the items' rows."""
        module, here = self._module, self._here
        with torch.set_grad_enabled(torch.is_grad_enabled() and module.has_graph), here.arranged(ENTER):
            hidden = module.encoder(module.cast(here.values), here.sizes, here.given)
        return self._project(hidden)

    def enter(self) -> Tensor:
        """What stands before the encoder's blocks makes of the items' rows."""
        module, here = self._module, self._here
        with torch.set_grad_enabled(torch.is_grad_enabled() and module.has_graph), here.arranged(ENTER):
            hidden = module.encoder.enter(module.cast(here.values), here.sizes, here.given)
        return hidden[:0] if self._shared.is_idle else hidden

    def through(self, first: int, stop: int) -> Tensor:
        """What the blocks first ... stop - 1 make of hidden states."""
        module, hidden, here = self._module, self._values, self._here
        end, parts = module.num_encoder_blocks, module.row_parts
        if first < end:
            if parts is None or not parts.come_in_parts:  # A part of a spare item's rows is there.
                hidden = self._hidden_here(hidden, len(here.hidden.own))
            with module.graph_behind(hidden), here.arranged(2 * first):
                hidden = module.encoder.through(hidden, here.sizes, first, min(stop, end), here.given)
                if goes_on := module.goes_on(stop):
                    hidden = module.encoder.leave(hidden, here.sizes, here.given)
            if goes_on:
                hidden = module.projector.enter(hidden.to(callback_dtype(module.projector, hidden.dtype)))
        if stop > end:
            extents, reading = self.seen_by_projector()
            num_rows = int(item_rows(extents).sum()) if reading is None else len(reading.rows.own)
            with here.arranged_behind(PROJECTOR):
                hidden = module.projector.through(self._hidden_here(hidden, num_rows), extents, reading)
        goes_on_in_parts = parts is not None and parts.stay_in_parts
        return hidden[:0] if self._shared.is_idle and not goes_on_in_parts else hidden

    def leave(self) -> Tensor:
        """What the module makes of hidden states behind all blocks."""
        module = self._module
        if module.projector.blocks:
            return self._finished(module.projector.leave(self._values))
        here = self._here
        hidden = self._hidden_here(self._values, len(here.hidden.own))
        with module.graph_behind(hidden), here.arranged(2 * module.num_encoder_blocks):
            hidden = module.encoder.leave(hidden, here.sizes, here.given)
        return self._project(hidden)

    def seen_by_encoder(self) -> tuple[Int64Array, SharedItemRows | None]:
        """The sizes that the encoder is given, and the rows that are here."""
        return self._here.sizes.numpy(), self._here.given

    def seen_by_projector(self) -> tuple[Int64Array, SharedReading | None]:
        """The arrangements that the projector is given, and the rows that are here."""
        extents = self._module.extents(self._here.sizes.numpy())
        return extents, self._reading(extents)

    def _reading(self, extents: Int64Array) -> SharedReading | None:
        """Which of the encoder's rows are here, and which of the queries that read them; None where these have whole
        tiles. extents: of the encoder's rows.
        """
        if self._module.tile is not None:
            return None
        here = self._here
        counts, num_queries = item_rows(extents), self._module.projector.num_outputs(extents)
        num_whole = int(here.counts[: here.shared.num_whole].sum())
        rows = here.shared.with_rows(sums(counts, here.counts))
        return SharedReading(
            rows.in_order(np.arange(counts.sum()), counts, num_whole),
            here.made.in_order(np.arange(num_queries.sum()), num_queries, num_whole),
        )

    def _project(self, rows: Tensor) -> Tensor:
        """The encoder's rows that are here -> those of the sequence that are."""
        projector, here = self._module.projector, self._here
        extents = self._module.extents(here.sizes.numpy())
        rows = rows.to(callback_dtype(projector, rows.dtype))
        if projector.blocks:
            with here.arranged_behind(PROJECTOR):
                rows = projector(rows, extents, self._reading(extents))
        elif self._module.tile is not None:
            rows = projector(rows, extents)
        elif getattr(projector, "joins", False):
            encoded = here.shared.with_rows(sums(item_rows(extents), here.counts))
            made = here.made.rows.rows
            # Of rows that become one, ranks may have some each.
            rows = rows_wanted(projector.of_each(rows), encoded, lambda rank: projector.rows_for(extents, made[rank]))
            rows = projector(rows, extents, made[self._shared.rank])
        else:
            rows = projector(rows, np.array([len(rows)]))
        return self._finished(rows)

    def _finished(self, rows: Tensor) -> Tensor:
        """The projected rows that are here -> what the module returns."""
        rows = rows[:0] if self._shared.is_idle else rows  # Nobody sees the spare item.
        if self._module.after is not None:
            rows = self._after(rows)
        if len(rows) != self._shared.num_rows_out:
            name = type(self._module.encoder).__name__
            raise ValueError(f"{name} gave {len(rows)} rows of shared items, not {self._shared.num_rows_out}")
        # As of `ModalityModule._after`.
        return rows.clone() if self._module.projector.blocks or not len(rows) else rows

    def _after(self, rows: Tensor) -> Tensor:
        """The projected rows that are here, [n, backbone_dim] -> the own ones of what `after` makes of whole items.

        It sees rows of whole items, so that each rank with a part of one gets all of them. Little is computed twice.
        """
        module, sizes, shared = self._module, self._sizes, self._shared
        after, counts = module.after, np.zeros(0, dtype=np.int64)
        if len(sizes):
            seen, num_seen = module.seen(sizes.numpy())
            counts = sums(module.projector.num_outputs(module.extents(seen)), num_seen)
        projected = shared.with_rows(counts)

        def wanted(rank: int) -> Int64Array:
            has = shared.outputs.num_rows_of(rank) > 0
            return rows_of_runs(projected.rows.starts[has], counts[has])

        rows = rows_wanted(rows, projected, wanted)
        assert isinstance(after, Newlines), "a callback by which `can_share` holds"
        if not shared.num_rows_out:
            return take_part(rows[:0], after.parameters())
        rows = after(rows.to(callback_dtype(after, rows.dtype)), sizes)
        own = on_device(shared.outputs.rows[shared.rank], rows.device)
        return rows.index_select(0, own).to(module.weights_dtype(rows.dtype))

    @staticmethod
    def _hidden_here(hidden: Tensor, num_rows: int) -> Tensor:
        """Hidden states of so many rows: on a rank without any, zeros of a spare item, with the graph of none."""
        missing = num_rows - len(hidden)
        return torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])]) if missing else hidden


@dataclass(frozen=True, eq=False)
class _ItemsHere:
    """What an encoder is given of items some of which ranks share.

    values: rows of the items, or some tensor like it on stages behind the first. sizes: of items as the encoder sees
            them, of whole ones. counts: int64 [num_items], how many of these each item is.
    shared: rows of the items, or of a spare one. rows: those of layers. hidden: with class rows. made: those that the
            projector makes.
    given:  `rows`, or None: the encoder is given what is here as whole items.
    """

    values: Tensor
    sizes: Tensor
    counts: Int64Array
    shared: SharedItemRows
    rows: SharedItemRows
    hidden: SharedItemRows
    made: SharedItemRows
    given: SharedItemRows | None

    def arranged(self, place: int) -> AbstractContextManager[None]:
        """As `dropout.arranged`: rows have the numbers that they have in whole items."""
        return arranged(place, lambda: [self._numbered(each.rows) for each in (self.hidden, self.rows)])

    def arranged_behind(self, place: int) -> AbstractContextManager[None]:
        """As `arranged`, of the rows that the projector makes."""
        return arranged(place, lambda: [self._of_items(self.made.rows)])

    def _numbered(self, rows: ContextRows) -> ItemRows:
        return self._of_items(ContextRows(sums(rows.lengths, self.counts), rows.owner, rows.num_ranks))

    def _of_items(self, whole: ContextRows) -> ItemRows:
        own = whole.rows[self.shared.rank]
        return ItemRows(np.repeat(np.arange(len(whole.lengths)), whole.lengths)[own], whole.positions[own])


def _items_here(module: ModalityModule, values: Tensor, sizes: Tensor, shared: SharedItemRows) -> _ItemsHere:
    """What the encoder is given of items some of which ranks share. values: [n, ...], as far as a rank has any.

    A rank without rows gets a spare item: layers cannot run without rows, and all ranks meet in attention.
    """
    if shared.is_idle:
        values, seen = module.encoder.spare(values)
        if module.tile is not None:
            values, seen = values.new_zeros(int(module.tile.prod()), values.shape[1]), torch.from_numpy(module.tile)
        shared, counts = shared.with_spare(len(values)), np.ones(1, dtype=np.int64)
    else:
        of_items, counts = module.seen(sizes.numpy())
        seen = torch.from_numpy(of_items)
    said = getattr(module.encoder, "num_hidden", None)
    lengths = said(seen.numpy()) if said else module.seen_lengths(seen.numpy())
    rows = shared.with_rows(sums(lengths, counts))
    if len(lengths) > len(counts):
        rows = rows.in_order(np.arange(lengths.sum()), lengths, int(counts[: shared.num_whole].sum()))
    num_before = getattr(module.encoder, "class_rows", 0)
    made = shared.with_rows(sums(module.projector.num_outputs(module.extents(seen.numpy())), counts))
    here = _ItemsHere(values, seen, counts, shared, rows, rows.with_class_rows(num_before), made, rows)
    if module.tile is None:
        return here
    tiles = torch.from_numpy(module.tile.repeat(len(rows.own) // int(module.tile.prod()), axis=0))
    return replace(here, sizes=tiles, given=None)
