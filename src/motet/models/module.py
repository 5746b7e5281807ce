"""An encoder with its projector and callbacks: the path of one kind of media into the backbone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from motet.absent import take_part
from motet.core.arrays import Int64Array
from motet.core.context_rows import ContextRows, rows_of_runs
from motet.core.errors import ArgumentError, UserError
from motet.core.grid_positions import NUM_AXES
from motet.core.item_segments import ItemSegments
from motet.core.spec import Module
from motet.dropout import AFTER, BEFORE, BETWEEN, ENTER, PROJECTOR, ItemRows, arranged
from motet.models.block import Block, is_changed, outside_blocks, wrap_blocks
from motet.models.callbacks import callback_dtype, callback_name, check_callback, check_num_rows, checked_counts
from motet.models.context_items import SharedItemRows
from motet.models.contract import item_rows
from motet.models.cross_projector import CrossProjector
from motet.models.layers import (
    LayerModules,
    any_trainable,
    as_it_learns,
    frozen_to_eval,
    products_layer,
    weighted_callbacks,
)
from motet.models.projector import Projector
from motet.models.row_copies import rows_wanted
from motet.models.shared_queries import SharedReading
from motet.models.whole.tiles import Newlines, Tiles


class ModalityModule(nn.Module):
    """The path of items into the backbone: callback `before`, encoder, `between`, projector, `after`.

    encoder:                fulfils `contract.Encoder`. Parameters that it has frozen itself stay frozen.
    before, between, after: callbacks (`models/callbacks.py`).
    cut(sizes):             the segments that the encoder computes of each item; by default the encoder's own, or one
                            for each item that `before` makes of it, so that tiles are weighed as what they are
                            computed as.
    Raises UserError for a callback that cannot be called.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: Projector | CrossProjector,
        train_encoder: bool = True,
        train_projector: bool = True,
        before: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        between: Callable[[Tensor, Tensor], Tensor] | None = None,
        after: Callable[[Tensor, Tensor], Tensor] | None = None,
        cut: Callable[[Int64Array], ItemSegments] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.before, self.between, self.after = before, between, after
        self.cut = cut
        self.train_encoder = train_encoder
        if not train_encoder:
            encoder.requires_grad_(False)
        projector.requires_grad_(train_projector)
        self._check()
        self._wrap()
        self._frozen_to_eval()

    def _check(self) -> None:
        name, downsample = type(self.encoder).__name__, self.projector.downsample
        for kind, callback in (("before", self.before), ("between", self.between), ("after", self.after)):
            if callback is not None:
                check_callback(kind, kind, callback)
        if self.cost not in ("packed", "padded"):
            raise ArgumentError(f"{name}.cost is {self.cost!r}; it must be 'packed' or 'padded'.")
        if self.cost == "padded" and self.cut is not None:
            raise ArgumentError(f"{name}.cost is 'padded', which pads whole items, so its items can have no segments.")
        if getattr(self.encoder, "grid", None) is not None and math.isqrt(downsample) ** 2 != downsample:
            raise ArgumentError(
                f"projector.{self.joins_by} is {downsample}, but {name} gives a raster of rows, of which squares are "
                "joined: it must be 1, 4, 9, 16, ..."
            )

    def _wrap(self) -> None:
        layers = list(getattr(self.encoder, "blocks", []))
        self._blocks = tuple(wrap_blocks(self.encoder, layers))
        if isinstance(vars(self.encoder).get("blocks"), list):
            # A plain list of layers beside the registered submodules would call the layers without their Blocks.
            self.encoder.blocks = list(self._blocks)
        self.num_encoder_blocks = len(self._blocks)
        for block in self._blocks:
            block.halves = getattr(self.encoder, "halves", ())
        self._blocks += tuple(wrap_blocks(self.projector, self.projector.blocks, self.num_encoder_blocks))

    def train(self, mode: bool = True) -> ModalityModule:
        """`nn.Module.train`, except that a part with weights, of which none is trainable, stays in eval mode."""
        super().train(mode)
        self._frozen_to_eval()
        return self

    def _frozen_to_eval(self) -> None:
        frozen_to_eval(self.encoder, self.projector, *weighted_callbacks(self.before, self.between, self.after))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The encoder's layers in execution order, then the projector's; each is sharded and recomputed by itself."""
        return self._blocks

    @property
    def trainable(self) -> bool:
        """Whether the module takes part in backward; the same on every rank, whatever items the rank has."""
        return any(p.requires_grad for p in self.parameters())

    @property
    def cost(self) -> str:
        """How the work of its items adds up: "packed" or "padded"."""
        return getattr(self.encoder, "cost", "packed")

    def lengths(self, sizes: Int64Array) -> Int64Array:
        """The length of each item for balancing, int64 [num_items]: patches, mel frames, over all that it becomes."""
        segments = self.segments(sizes)
        if segments is not None:
            return segments.summed(segments.length)
        seen, counts = self._seen(sizes)
        return _sums(self._seen_lengths(seen), counts)

    def _seen_lengths(self, seen: Int64Array) -> Int64Array:
        """The length of each item that the encoder is given."""
        lengths = getattr(self.encoder, "lengths", None)
        return lengths(seen) if lengths else np.prod(seen, axis=1)

    @property
    def joins_by(self) -> str:
        """The projector's option that says how many rows become one."""
        found: str = getattr(self.projector, "joins_by", "downsample")
        return found

    @property
    def cut(self) -> Callable[[Int64Array], ItemSegments] | None:
        """Sizes of items -> their segments; None: each item is one."""
        if self._cut is not None:
            return self._cut
        makes_tiles = getattr(self.before, "items", None) is not None and self.cost != "padded"
        return self._tiles if makes_tiles else getattr(self.encoder, "segments", None)

    @cut.setter
    def cut(self, cut: Callable[[Int64Array], ItemSegments] | None) -> None:
        self._cut = cut

    def segments(self, sizes: Int64Array) -> ItemSegments | None:
        """The segments of each item; None: each item is one."""
        return self.cut(sizes) if self.cut else None

    def _tiles(self, sizes: Int64Array) -> ItemSegments:
        """The segments of items of which `before` makes several: theirs, or each is one."""
        inner = getattr(self.encoder, "segments", None)
        seen, counts = self._seen(sizes)
        found = inner(seen) if inner else None
        if found is None:
            return ItemSegments.counted(self._seen_lengths(seen), counts)
        # Layers that attend over whole items do so over each that the encoder is given.
        frames = counts if found.frames is None else _sums(found.frames, counts)
        return ItemSegments.counted(found.length, _sums(found.counts, counts), frames)

    def num_tokens(self, sizes: Int64Array) -> Int64Array:
        """Rows that each item takes in the backbone's sequence, int64 [num_items]."""
        if said := getattr(self.after, "num_rows", None):
            return checked_counts("after", self.after, "num_rows", said(sizes), len(sizes), (1,))
        seen, counts = self._seen(sizes)
        return _sums(self.projector.num_outputs(self._projected(seen)), counts)

    def num_values(self, sizes: Int64Array) -> Int64Array:
        """Rows of values of each item as the module is given them, int64 [num_items]."""
        if self.before is None:
            said = getattr(self.encoder, "num_inputs", None)
        else:
            said = getattr(self.before, "num_values", None)
        return said(sizes) if said else np.prod(sizes, axis=1)

    def _seen(self, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The sizes of the items that the encoder is given, and how many of them each item becomes."""
        said = getattr(self.before, "items", None)
        if said is None:
            return sizes, np.ones(len(sizes), dtype=np.int64)
        seen, counts = said(sizes)
        counts = checked_counts("before", self.before, "items", counts, len(sizes), (1,))
        if len(seen) != counts.sum() or (counts < 1).any():
            raise UserError(
                f"before ({callback_name(self.before)}): its items says that {len(sizes)} items become "
                f"{counts.tolist()}, and gives the sizes of {len(seen)}; each must become at least one"
            )
        return seen, counts

    def _seen_sizes(self, sizes: Tensor) -> Tensor:
        """The sizes of the items that the encoder is given, int64 [num_seen, size_dim]."""
        return torch.from_numpy(self._seen(sizes.numpy())[0])

    def _extents(self, seen: Int64Array) -> Int64Array:
        """The arrangement of the encoder's rows of each item: `extents` of `Projector`."""
        counts, grid = self.encoder.num_outputs(seen), getattr(self.encoder, "grid", None)
        if grid is None:
            return counts
        if (grid(seen).prod(axis=1) != counts).any():
            raise UserError(f"{type(self.encoder).__name__}.grid has not as many rows as num_outputs says.")
        return grid(seen)

    def _projected(self, seen: Int64Array) -> Int64Array:
        """The arrangement of the rows that the projector is given."""
        said = getattr(self.between, "num_rows", None)
        if said is None:
            return self._extents(seen)
        extents = checked_counts("between", self.between, "num_rows", said(seen), len(seen), (1, 2))
        if extents.ndim > 1 and math.isqrt(self.projector.downsample) ** 2 != self.projector.downsample:
            raise UserError(
                f"projector.{self.joins_by} is {self.projector.downsample}, but between "
                f"({callback_name(self.between)}) gives a raster of rows, of which squares are "
                "joined: it must be 1, 4, 9, 16, ..."
            )
        return extents

    @property
    def has_raster(self) -> bool:
        """Whether rows of an item in the sequence are a raster, or keys; else they are one after the other, as text."""
        return hasattr(self.projector, "raster") or hasattr(self.encoder, "key_rows")

    def grids(self, sizes: Int64Array) -> Int64Array:
        """Frames, rows and columns of the raster that each item's rows in the sequence are, int64 [num_items, 3].

        Rows of a projector that says no `raster` are a frame each, and so are keys that text sees. There must be no
        callback behind the projector.
        """
        if hasattr(self.encoder, "key_rows"):
            return np.pad(self.encoder.key_rows(sizes)[:, None], ((0, 0), (0, NUM_AXES - 1)), constant_values=1)
        if not self.has_raster:
            return np.pad(self.num_tokens(sizes)[:, None], ((0, 0), (0, NUM_AXES - 1)), constant_values=1)
        raster = self.projector.raster(self._projected(self._seen(sizes)[0]))
        return raster if raster.shape[1] == NUM_AXES else np.insert(raster, 0, 1, axis=1)

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of `lengths(sizes)`.

        A custom encoder without `layers()`, and a callback that is a module, counts as its linear layers and
        convolutions, each applied once to every row. Other callbacks count as nothing, and rows that one leaves out or
        adds as if it had not.
        """
        described = getattr(self.encoder, "layers", None)
        layers = described() if described else [products_layer("products", self.encoder, self.encoder.output_dim)]
        last = layers[-1].layer
        if isinstance(self.between, nn.Module):
            width = self.projector.input_dim
            layers = [*layers, products_layer("between", self.between, width, last.divisor)]
        projected = self.projector.described(last.divisor)
        if getattr(self.after, "num_rows", None) is not None:  # The sequence has other rows than the projector makes.
            projected = [each._replace(layer=replace(each.layer, of_outputs=False)) for each in projected]
        layers = [*layers, *projected]
        if isinstance(self.before, nn.Module):
            # Its output is the input of the first layer, which keeps it for backward.
            layers.insert(0, products_layer("before", self.before, layers[0].layer.activation_width))
        if isinstance(self.after, nn.Module):
            at = projected[-1].layer
            layers.append(products_layer("after", self.after, self.projector.output_dim, at.divisor, at.item_rows))
        return list(map(as_it_learns, layers))

    def spec_module(self, name: str) -> Module:
        """The module's part of a ModelSpec."""
        layers = (each.layer for each in self.layers())
        return Module.of(name, layers, self.cost == "padded", self.can_share, self.tile_rows)

    def __call__(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """As `forward`."""
        # FSDP2 moves each tensor among the arguments to the device, where sizes cannot be read without a wait.
        return super().__call__(values, sizes.numpy(), shared)

    def forward(self, values: Tensor, sizes: Tensor | Int64Array, shared: SharedItemRows | None = None) -> Tensor:
        """values [sum(rows), row_dim], sizes int64 [num_items, size_dim] on the host -> [sum(num_tokens),
        backbone_dim].

        shared: the rows of the items that are in `values`, and come out, where ranks share some; all ranks then call
                it, and it is a collective. For modules with `can_share`.
        Without items: [0, backbone_dim], connected to every trainable parameter. Raises UserError if the number of rows
        is not sum(num_tokens), from which the backbone's sequences were laid out.
        """
        sizes = torch.as_tensor(sizes)
        if shared is not None:
            return self._forward_shared(values, sizes, shared)
        if len(sizes) == 0:
            return self._forward_empty()
        seen, seen_sizes = self._before(values, sizes)
        has_graph = torch.is_grad_enabled() and self._has_graph
        with torch.set_grad_enabled(has_graph), arranged(ENTER, lambda: self._encoder_rows(sizes)):
            rows = self.encoder(self._cast(seen), seen_sizes)
        return self._after(self._project(self._between(rows, seen_sizes, sizes), seen_sizes, sizes), sizes)

    def _forward_shared(self, values: Tensor, sizes: Tensor, shared: SharedItemRows) -> Tensor:
        here = self._here(values, sizes, shared)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._has_graph), here.arranged(ENTER):
            hidden = self.encoder(self._cast(here.values), here.sizes, here.given)
        return self._project_shared(hidden, sizes, shared, here)

    def _enter_shared(self, values: Tensor, sizes: Tensor, shared: SharedItemRows) -> Tensor:
        here = self._here(values, sizes, shared)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._has_graph), here.arranged(ENTER):
            hidden = self.encoder.enter(self._cast(here.values), here.sizes, here.given)
        return hidden[:0] if shared.is_idle else hidden

    def _here(self, values: Tensor, sizes: Tensor, shared: SharedItemRows) -> _ItemsHere:
        """What the encoder is given of items some of which ranks share. values: [n, ...], as far as a rank has any.

        A rank without rows gets a spare item: layers cannot run without rows, and all ranks meet in attention.
        """
        if shared.is_idle:
            values, seen = self.encoder.spare(values)
            if self._tile is not None:
                values, seen = values.new_zeros(int(self._tile.prod()), values.shape[1]), torch.from_numpy(self._tile)
            shared, counts = shared.with_spare(len(values)), np.ones(1, dtype=np.int64)
        else:
            of_items, counts = self._seen(sizes.numpy())
            seen = torch.from_numpy(of_items)
        said = getattr(self.encoder, "num_hidden", None)
        lengths = said(seen.numpy()) if said else self._seen_lengths(seen.numpy())
        rows = shared.with_rows(_sums(lengths, counts))
        if len(lengths) > len(counts):
            rows = rows.in_order(np.arange(lengths.sum()), lengths, int(counts[: shared.num_whole].sum()))
        num_before = getattr(self.encoder, "class_rows", 0)
        made = shared.with_rows(_sums(self.projector.num_outputs(self._extents(seen.numpy())), counts))
        here = _ItemsHere(values, seen, counts, shared, rows, rows.with_class_rows(num_before), made, rows)
        if self._tile is None:
            return here
        tiles = torch.from_numpy(self._tile.repeat(len(rows.own) // int(self._tile.prod()), axis=0))
        return replace(here, sizes=tiles, given=None)

    def _through_shared(self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows) -> Tensor:
        """As `through`, of items some of which ranks share."""
        here, end = self._here(hidden, sizes, shared), self.num_encoder_blocks
        if first < end:
            hidden = self._hidden_here(hidden, len(here.hidden.own))
            with self._graph_behind(hidden), here.arranged(2 * first):
                hidden = self.encoder.through(hidden, here.sizes, first, min(stop, end), here.given)
                if goes_on := self._goes_on(stop):
                    hidden = self.encoder.leave(hidden, here.sizes, here.given)
            if goes_on:
                hidden = self.projector.enter(hidden.to(callback_dtype(self.projector, hidden.dtype)))
        if stop > end:
            extents = self._extents(here.sizes.numpy())
            reading = self._reading(extents, here)
            num_rows = int(item_rows(extents).sum()) if reading is None else len(reading.rows.own)
            with here.arranged_behind(PROJECTOR):
                hidden = self.projector.through(self._hidden_here(hidden, num_rows), extents, reading)
        return hidden[:0] if shared.is_idle else hidden

    def _reading(self, extents: Int64Array, here: _ItemsHere) -> SharedReading | None:
        """Which of the encoder's rows are here, and which of the queries that read them; None where these have whole
        tiles. extents: of the encoder's rows.
        """
        if self._tile is not None:
            return None
        counts, num_queries = item_rows(extents), self.projector.num_outputs(extents)
        num_whole = int(here.counts[: here.shared.num_whole].sum())
        rows = here.shared.with_rows(_sums(counts, here.counts))
        return SharedReading(
            rows.in_order(np.arange(counts.sum()), counts, num_whole),
            here.made.in_order(np.arange(num_queries.sum()), num_queries, num_whole),
        )

    def _project_shared(self, rows: Tensor, sizes: Tensor, shared: SharedItemRows, here: _ItemsHere) -> Tensor:
        """The encoder's rows that are here -> those of the sequence that are. sizes, shared: as of `forward`."""
        projector = self.projector
        extents = self._extents(here.sizes.numpy())
        rows = rows.to(callback_dtype(projector, rows.dtype))
        if projector.blocks:
            with here.arranged_behind(PROJECTOR):
                rows = projector(rows, extents, self._reading(extents, here))
        elif self._tile is not None:
            rows = projector(rows, extents)
        elif getattr(projector, "joins", False):
            encoded = here.shared.with_rows(_sums(item_rows(extents), here.counts))
            made = here.made.rows.rows
            # Of rows that become one, ranks may have some each.
            rows = rows_wanted(rows, encoded, lambda rank: projector.rows_for(extents, made[rank]))
            rows = projector(rows, extents, made[shared.rank])
        else:
            rows = projector(rows, np.array([len(rows)]))
        return self._finished_shared(rows, sizes, shared)

    def _finished_shared(self, rows: Tensor, sizes: Tensor, shared: SharedItemRows) -> Tensor:
        """The projected rows that are here -> what `forward` returns."""
        rows = rows[:0] if shared.is_idle else rows  # Nobody sees the spare item.
        if self.after is not None:
            rows = self._after_shared(rows, sizes, shared)
        if len(rows) != shared.num_rows_out:
            name = type(self.encoder).__name__
            raise ValueError(f"{name} gave {len(rows)} rows of shared items, not {shared.num_rows_out}")
        return rows.clone() if self.projector.blocks or not len(rows) else rows  # As of `_after`.

    def _after_shared(self, rows: Tensor, sizes: Tensor, shared: SharedItemRows) -> Tensor:
        """The projected rows that are here, [n, backbone_dim] -> the own ones of what `after` makes of whole items.

        It sees rows of whole items, so that each rank with a part of one gets all of them. Little is computed twice.
        """
        after, counts = self.after, np.zeros(0, dtype=np.int64)
        if len(sizes):
            seen, num_seen = self._seen(sizes.numpy())
            counts = _sums(self.projector.num_outputs(self._extents(seen)), num_seen)
        projected = shared.with_rows(counts)

        def wanted(rank: int) -> Int64Array:
            has = shared.outputs.num_rows_of(rank) > 0
            return rows_of_runs(projected.rows.starts[has], counts[has])

        rows = rows_wanted(rows, projected, wanted)
        assert isinstance(after, Newlines), "a callback by which `can_share` holds"
        if not shared.num_rows_out:
            return take_part(rows[:0], after.parameters())
        rows = after(rows.to(callback_dtype(after, rows.dtype)), sizes)
        own = torch.from_numpy(shared.outputs.rows[shared.rank]).to(rows.device)
        return rows.index_select(0, own).to(self._dtype(rows.dtype))

    def _hidden_here(self, hidden: Tensor, num_rows: int) -> Tensor:
        """Hidden states of so many rows: on a rank without any, zeros of a spare item, with the graph of none."""
        missing = num_rows - len(hidden)
        return torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])]) if missing else hidden

    @property
    def can_share(self) -> bool:
        """Whether ranks can share an item: where its rows meet, they get those of each other."""
        own_callbacks = (
            *(() if isinstance(self.before, Tiles) else (self.before,)),
            *(() if isinstance(self.after, Newlines) else (self.after,)),
            self.between,
        )
        # Tiles are whole on each rank, so that any projector joins their rows.
        can_join = self._tile is not None or getattr(self.projector, "shareable", False)
        return hasattr(self.encoder, "spare") and can_join and all(callback is None for callback in own_callbacks)

    @property
    def _tile(self) -> Int64Array | None:
        """The size of every tile that `before` makes of items, int64 [1, size_dim], where ranks can share items between
        these. None where they cannot: something else stands behind the tower, or not as many patches make each row.
        """
        if not isinstance(self.before, Tiles) or self.after is not None:
            return None
        tile = self.before.tile
        is_even = tile.prod() % self.projector.num_outputs(self._extents(tile))[0] == 0
        return tile if is_even else None

    @property
    def tile_rows(self) -> int:
        """Rows behind the projector of each tile between which alone ranks share an item; 0: between any rows."""
        if not self.can_share or self._tile is None:
            return 0
        return int(self.projector.num_outputs(self._extents(self._tile))[0])

    @property
    def uncuttable(self) -> str:
        """Why a pipeline cannot cut the module between its blocks, in words; "" if it can."""
        name = type(self.encoder).__name__
        if any(not hasattr(self.encoder, part) for part in ("enter", "through", "leave")):
            return f"{name} has no enter, through and leave (see motet.models.contract)"
        if self.cost == "padded" and getattr(self.before, "items", None) is not None:
            return f"{name} pads what its callback `before` makes of an item, and lengths say only the sum of that"
        if (described := len(self.spec_module("").blocks)) != len(self.blocks):
            return f"{name} has {len(self.blocks)} blocks with its projector, and its layers() describe {described}"
        return ""

    @property
    def unhalvable(self) -> str:
        """Why the module's blocks cannot be cut into halves, in words; "" if they can."""
        if not hasattr(self.encoder, "halves"):
            return f"{type(self.encoder).__name__} has no halves"
        layers = self.blocks[: self.num_encoder_blocks]
        return "" if all(block.halves for block in layers) else "a layer has a hook or a forward of its own"

    def keep_changed_whole(self) -> None:
        """Let layers run whole that have hooks or a `forward` of their own, which their halves would leave out."""
        for block in self.blocks[: self.num_encoder_blocks]:
            if is_changed(block) or is_changed(block.inner):
                block.halves = ()

    def unsendable(self, stop: int) -> str:
        """Why no message can carry what is computed behind the block stop - 1, in words; "" if one can."""
        if not 0 < stop == self.num_encoder_blocks or not self.projector.blocks:
            return ""
        if getattr(self.encoder, "pooled", 1) > 1:
            return f"{type(self.encoder).__name__} averages rows and leaves out some, which layers do not say"
        if hasattr(self.between, "num_rows"):
            return "its callback `between` changes the number of rows (num_rows), which layers do not say"
        if hasattr(self.between, "output_dim") and not isinstance(self.between, nn.Module):
            return "its callback `between` changes the width of rows (output_dim), which layers do not say"
        return ""

    def enter(self, values: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """What stands before the encoder's blocks, callback included. There is at least one item.

        `enter`, `through` and `leave` make up `forward`; a stage of a pipeline calls those that it holds. Each takes
        the sizes of the items themselves; hidden states are [rows, width]. shared: as of `forward`; a rank without rows
        has none of hidden states either.
        """
        if shared is not None:
            return self._enter_shared(values, sizes, shared)
        seen, seen_sizes = self._before(values, sizes)
        has_graph = torch.is_grad_enabled() and self._has_graph
        with torch.set_grad_enabled(has_graph), arranged(ENTER, lambda: self._encoder_rows(sizes)):
            return self.encoder.enter(self._cast(seen), seen_sizes)

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """Hidden states [rows, width] after the blocks first ... stop - 1: the encoder's, then the projector's.

        What stands between the two belongs to the encoder's last block. With `shared` it is a collective.
        """
        if shared is not None:
            return self._through_shared(hidden, sizes, first, stop, shared)
        seen_sizes, end = self._seen_sizes(sizes), self.num_encoder_blocks
        goes_on = first < end and self._goes_on(stop)
        with self._graph_behind(hidden), arranged(2 * first, lambda: self._encoder_rows(sizes)):
            if first < end:
                hidden = self.encoder.through(hidden, seen_sizes, first, min(stop, end))
            if goes_on:
                hidden = self.encoder.leave(hidden, seen_sizes)
        if goes_on:
            hidden = self.projector.enter(self._between(hidden, seen_sizes, sizes))
        if stop <= end:
            return hidden
        with arranged(PROJECTOR, lambda: self._projected_rows(sizes)):
            return self.projector.through(hidden, self._projected(seen_sizes.numpy()))

    def _goes_on(self, stop: int) -> bool:
        """Whether what stands between the encoder's last block and a projector's belongs to a pass up to `stop`."""
        end = self.num_encoder_blocks
        return end <= stop and bool(self.projector.blocks) and self._blocks[end - 1].half != 0

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """What stands behind the blocks, up to what `forward` returns."""
        if shared is not None and self.projector.blocks:
            return self._finished_shared(self.projector.leave(hidden), sizes, shared)
        if shared is not None:
            here = self._here(hidden, sizes, shared)
            hidden = self._hidden_here(hidden, len(here.hidden.own))
            with self._graph_behind(hidden), here.arranged(2 * self.num_encoder_blocks):
                hidden = self.encoder.leave(hidden, here.sizes, here.given)
            return self._project_shared(hidden, sizes, shared, here)
        if self.projector.blocks:
            return self._after(self.projector.leave(hidden), sizes)
        seen_sizes = self._seen_sizes(sizes)
        with self._graph_behind(hidden), arranged(2 * self.num_encoder_blocks, lambda: self._encoder_rows(sizes)):
            rows = self.encoder.leave(hidden, seen_sizes)
        return self._after(self._project(self._between(rows, seen_sizes, sizes), seen_sizes, sizes), sizes)

    def _cast(self, values: Tensor) -> Tensor:
        """The items' rows in the dtype in which the encoder computes."""
        return values.to(self._dtype(values.dtype))

    def _dtype(self, otherwise: torch.dtype) -> torch.dtype:
        """That of the weights, those first that FSDP has gathered here. otherwise: that of a module without any."""
        return _first_dtype(
            chain(outside_blocks(self.encoder), self.projector.parameters(), self.parameters()), otherwise
        )

    def _encoder_rows(self, sizes: Tensor) -> list[Int64Array]:
        """Rows of each item in tensors of the encoder, in each way in which they may be, for `arranged`."""
        seen, counts = self._seen(sizes.numpy())
        outputs = item_rows(self._extents(seen))
        class_rows = getattr(self.encoder, "class_rows", 0)
        return [_sums(rows, counts) for rows in (np.prod(seen, axis=1), outputs, outputs + class_rows)]

    def _projected_rows(self, sizes: Tensor) -> list[Int64Array]:
        """As `_encoder_rows`, behind the projector."""
        seen, counts = self._seen(sizes.numpy())
        return [_sums(self.projector.num_outputs(self._projected(seen)), counts)]

    def _between_rows(self, sizes: Tensor) -> list[Int64Array]:
        """As `_encoder_rows`, before `between` and behind it."""
        seen, counts = self._seen(sizes.numpy())
        return [_sums(item_rows(extents), counts) for extents in (self._extents(seen), self._projected(seen))]

    def _project(self, rows: Tensor, seen_sizes: Tensor, sizes: Tensor) -> Tensor:
        with arranged(PROJECTOR, lambda: self._projected_rows(sizes)):
            return self.projector(rows, self._projected(seen_sizes.numpy()))

    def _between(self, rows: Tensor, seen_sizes: Tensor, sizes: Tensor) -> Tensor:
        """The encoder's rows through `between`, in the projector's dtype. seen_sizes: sizes behind `before`."""
        on_host, num_items = seen_sizes.numpy(), len(seen_sizes)
        check_num_rows(f"{type(self.encoder).__name__}", rows, self._extents(on_host), num_items, "num_outputs")
        if self.between:
            with arranged(BETWEEN, lambda: self._between_rows(sizes)):
                rows = self.between(rows.to(callback_dtype(self.between, rows.dtype)), seen_sizes)
            extents = self._projected(on_host)
            check_num_rows(f"between ({callback_name(self.between)})", rows, extents, num_items, "num_rows beside it")
        return rows.to(callback_dtype(self.projector, rows.dtype))

    def _after(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """The projected rows through `after`. sizes: of the items themselves."""
        if self.after:
            with arranged(AFTER, lambda: [*self._projected_rows(sizes), self.num_tokens(sizes.numpy())]):
                rows = self.after(rows.to(callback_dtype(self.after, rows.dtype)), sizes)
            expected = self.num_tokens(sizes.numpy())
            check_num_rows(f"after ({callback_name(self.after)})", rows, expected, len(sizes), "num_rows beside it")
        rows = rows.to(self._dtype(rows.dtype))  # As on a rank without items: ranks exchange both.
        # FSDP gathers for backward in hooks of outputs. If the output of the projector's Block were that of the module
        # as well, its parameters would be gathered before those outside of Blocks, and after them on a rank without
        # items. FSDP refuses views as outputs.
        return rows.clone() if self.projector.blocks else rows

    @property
    def _has_graph(self) -> bool:
        """Whether backward passes through the encoder: it is trained, or what stands before it is."""
        return self.train_encoder or (isinstance(self.before, nn.Module) and any_trainable(self.before))

    def _graph_behind(self, hidden: Tensor) -> torch.set_grad_enabled:
        """A block in which a part of the encoder runs with a graph if it is trained, or what stands before `hidden`.

        The part may lack `before`, which is on another stage.
        """
        return torch.set_grad_enabled(torch.is_grad_enabled() and (self.train_encoder or hidden.requires_grad))

    def _before(self, values: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        if self.before is None:
            return values, sizes
        who = f"before ({callback_name(self.before)})"
        with arranged(BEFORE, lambda: [self.num_values(sizes.numpy())]):
            given = self.before(values.to(callback_dtype(self.before, values.dtype)), sizes)
        if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, Tensor) for part in given)):
            raise UserError(f"{who} returned {type(given).__name__}; it must return (values, sizes), two tensors")
        seen, seen_sizes = given[0], given[1].cpu()
        expected = self._seen(sizes.numpy())[0]
        if seen_sizes.shape != expected.shape or (seen_sizes.numpy() != expected).any():
            raise UserError(
                f"{who} returned items of sizes {seen_sizes.tolist()} where the encoder was to be given "
                f"{expected.tolist()}; a callback that changes sizes must say so, by items(sizes) beside it"
            )
        return seen, seen_sizes

    def _forward_empty(self) -> Tensor:
        weight = next(iter(outside_blocks(self.projector) or outside_blocks(self)), None)
        weight = next(self.parameters()) if weight is None else weight
        # One in a block may be a DTensor here, whose `new_zeros` would be one, too.
        x = torch.zeros(0, self.projector.output_dim, dtype=weight.dtype, device=weight.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._has_graph):
            for block in self._blocks[: self.num_encoder_blocks]:
                x = block(x)
        for block in self._blocks[self.num_encoder_blocks :]:
            x = block(x)
        return take_part(x.to(self._dtype(x.dtype)), outside_blocks(self))


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
        return self._of_items(ContextRows(_sums(rows.lengths, self.counts), rows.owner, rows.num_ranks))

    def _of_items(self, whole: ContextRows) -> ItemRows:
        own = whole.rows[self.shared.rank]
        return ItemRows(np.repeat(np.arange(len(whole.lengths)), whole.lengths)[own], whole.positions[own])


def _sums(values: Int64Array, counts: Int64Array) -> Int64Array:
    """The sums of the first counts[0] values, of the next counts[1], and so on."""
    ends, stops = np.concatenate([[0], np.cumsum(values)]), np.cumsum(counts)
    return ends[stops] - ends[stops - counts]


def _first_dtype(parameters: Iterable[nn.Parameter], otherwise: torch.dtype) -> torch.dtype:
    return next((p.dtype for p in parameters if p.is_floating_point()), otherwise)
