"""An encoder with its projector and callbacks: the path of one kind of media into the backbone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from motet.absent import take_part
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError, UserError
from motet.core.item_segments import ItemSegments
from motet.core.spec import Module
from motet.dropout import AFTER, BEFORE, BETWEEN, ENTER, PROJECTOR, arranged
from motet.models.asked import Asked, asked_by
from motet.models.block import Block, is_changed, outside_blocks, wrap_blocks
from motet.models.callbacks import callback_dtype, callback_name, check_callback, check_num_rows
from motet.models.context_items import SharedItemRows
from motet.models.cross_projector import CrossProjector
from motet.models.extents import extents_of
from motet.models.layers import (
    LayerModules,
    any_trainable,
    as_it_learns,
    as_with_rows,
    frozen_to_eval,
    products_layer,
    weighted_callbacks,
)
from motet.models.module_sizes import ModuleSizes
from motet.models.projector import Projector
from motet.models.shared_path import SharedPath
from motet.models.shared_queries import SharedReading
from motet.models.whole.tiles import Newlines, Tiles
from motet.tensor_parallel import RowParts


class ModalityModule(ModuleSizes, nn.Module):
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
        self.row_parts: RowParts | None = None  # On tensor-parallel ranks (`divided.py`).
        self._asked_before: dict[tuple[tuple[int, ...], torch.device, torch.dtype], frozenset[Asked]] = {}
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
        parts = getattr(self.projector, "token_parts", 1)
        return Module.of(name, layers, self.cost == "padded", self.can_share, self.tile_rows, parts)

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
            return SharedPath(self, values, sizes, shared).forward()
        if len(sizes) == 0:
            return self._forward_empty()
        seen, seen_sizes = self._before(values, sizes)
        has_graph = torch.is_grad_enabled() and self.has_graph
        with torch.set_grad_enabled(has_graph), arranged(ENTER, lambda: self._encoder_rows(sizes)):
            rows = self.encoder(self.cast(seen), seen_sizes)
        return self._after(self._project(self._between(rows, seen_sizes, sizes), seen_sizes, sizes), sizes)

    @property
    def can_share(self) -> bool:
        """Whether ranks can share an item: where its rows meet, they get those of each other."""
        own_callbacks = (
            *(() if isinstance(self.before, Tiles) else (self.before,)),
            *(() if isinstance(self.after, Newlines) else (self.after,)),
            self.between,
        )
        # Tiles are whole on each rank, so that any projector joins their rows.
        can_join = self.tile is not None or getattr(self.projector, "shareable", False)
        return hasattr(self.encoder, "spare") and can_join and all(callback is None for callback in own_callbacks)

    @property
    def tile(self) -> Int64Array | None:
        """The size of every tile that `before` makes of items, int64 [1, size_dim], where ranks can share items between
        these. None where they cannot: something else stands behind the tower, or not as many patches make each row.
        """
        if not isinstance(self.before, Tiles) or self.after is not None:
            return None
        tile = self.before.tile
        is_even = tile.prod() % self.projector.num_outputs(self.extents(tile))[0] == 0
        return tile if is_even else None

    @property
    def tile_rows(self) -> int:
        """Rows behind the projector of each tile between which alone ranks share an item; 0: between any rows."""
        if not self.can_share or self.tile is None:
            return 0
        return int(self.projector.num_outputs(self.extents(self.tile))[0])

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
            return SharedPath(self, values, sizes, shared).enter()
        seen, seen_sizes = self._before(values, sizes)
        has_graph = torch.is_grad_enabled() and self.has_graph
        with torch.set_grad_enabled(has_graph), arranged(ENTER, lambda: self._encoder_rows(sizes)):
            return self.encoder.enter(self.cast(seen), seen_sizes)

    def through(
        self, hidden: Tensor, sizes: Tensor, first: int, stop: int, shared: SharedItemRows | None = None
    ) -> Tensor:
        """Hidden states [rows, width] after the blocks first ... stop - 1: the encoder's, then the projector's.

        What stands between the two belongs to the encoder's last block. With `shared` it is a collective.
        """
        if shared is not None:
            return SharedPath(self, hidden, sizes, shared).through(first, stop)
        seen_sizes, end = self._seen_sizes(sizes), self.num_encoder_blocks
        goes_on = first < end and self.goes_on(stop)
        with self.graph_behind(hidden), arranged(2 * first, lambda: self._encoder_rows(sizes)):
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

    def make_ahead(
        self,
        values: Tensor,
        sizes: Tensor,
        shared: SharedItemRows | None,
        blocks: Collection[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make what attention of some blocks asks of the host for items, before a pass through them asks for it.

        values, sizes, shared: on the host, as of `forward`. device, dtype: on which and in which the blocks compute.
        Not a collective. Of encoders without `who_sees` nothing is made.
        """
        if shared is None and not len(sizes):
            return
        path, end = None if shared is None else SharedPath(self, values, sizes, shared), self.num_encoder_blocks

        def of_encoder() -> tuple[Int64Array, SharedItemRows | None]:
            return (self.seen(sizes.numpy())[0], None) if path is None else path.seen_by_encoder()

        def of_projector() -> tuple[Int64Array, SharedReading | None]:
            return (self._projected(self.seen(sizes.numpy())[0]), None) if path is None else path.seen_by_projector()

        for module, seen, layers in (
            (self.encoder, of_encoder, [block for block in blocks if block < end]),
            (self.projector, of_projector, [block for block in blocks if block >= end]),
        ):
            for extents in extents_of(module, *seen()) if layers and hasattr(module, "who_sees") else ():
                for asked in self._asked(tuple(layers), device, dtype):
                    extents.make_ahead(asked)

    def _asked(self, blocks: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> frozenset[Asked]:
        """What the attention of blocks asks. It is read off the blocks once."""
        key = blocks, device, dtype
        if key not in self._asked_before:
            self._asked_before[key] = frozenset(asked_by((self._blocks[block] for block in blocks), device, dtype))
        return self._asked_before[key]

    def goes_on(self, stop: int) -> bool:
        """Whether what stands between the encoder's last block and a projector's belongs to a pass up to `stop`."""
        end = self.num_encoder_blocks
        return end <= stop and bool(self.projector.blocks) and self._blocks[end - 1].half != 0

    def leave(self, hidden: Tensor, sizes: Tensor, shared: SharedItemRows | None = None) -> Tensor:
        """What stands behind the blocks, up to what `forward` returns."""
        if shared is not None:
            return SharedPath(self, hidden, sizes, shared).leave()
        if self.projector.blocks:
            return self._after(self.projector.leave(hidden), sizes)
        seen_sizes = self._seen_sizes(sizes)
        with self.graph_behind(hidden), arranged(2 * self.num_encoder_blocks, lambda: self._encoder_rows(sizes)):
            rows = self.encoder.leave(hidden, seen_sizes)
        return self._after(self._project(self._between(rows, seen_sizes, sizes), seen_sizes, sizes), sizes)

    def cast(self, values: Tensor) -> Tensor:
        """The items' rows in the dtype in which the encoder computes."""
        return values.to(self.weights_dtype(values.dtype))

    def weights_dtype(self, otherwise: torch.dtype) -> torch.dtype:
        """That of the weights, those first that FSDP has gathered here. otherwise: that of a module without any."""
        return _first_dtype(
            chain(outside_blocks(self.encoder), self.projector.parameters(), self.parameters()), otherwise
        )

    def _project(self, rows: Tensor, seen_sizes: Tensor, sizes: Tensor) -> Tensor:
        with arranged(PROJECTOR, lambda: self._projected_rows(sizes)):
            return self.projector(rows, self._projected(seen_sizes.numpy()))

    def _between(self, rows: Tensor, seen_sizes: Tensor, sizes: Tensor) -> Tensor:
        """The encoder's rows through `between`, in the projector's dtype. seen_sizes: sizes behind `before`."""
        on_host, num_items = seen_sizes.numpy(), len(seen_sizes)
        check_num_rows(f"{type(self.encoder).__name__}", rows, self.extents(on_host), num_items, "num_outputs")
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
        rows = rows.to(self.weights_dtype(rows.dtype))  # As on a rank without items: ranks exchange both.
        # FSDP gathers for backward in hooks of outputs. If the output of the projector's Block were that of the module
        # as well, its parameters would be gathered before those outside of Blocks, and after them on a rank without
        # items. FSDP refuses views as outputs.
        return rows.clone() if self.projector.blocks else rows

    @property
    def has_graph(self) -> bool:
        """Whether backward passes through the encoder: it is trained, or what stands before it is."""
        return self.train_encoder or (isinstance(self.before, nn.Module) and any_trainable(self.before))

    def graph_behind(self, hidden: Tensor) -> torch.set_grad_enabled:
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
        expected = self.seen(sizes.numpy())[0]
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
        of_encoder, of_projector = self._blocks[: self.num_encoder_blocks], self._blocks[self.num_encoder_blocks :]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.has_graph):
            x = as_with_rows(x, self.layers, of_encoder)
            for block in of_encoder:
                x = block(x)
        x = as_with_rows(x, self.layers, of_projector)
        for block in of_projector:
            x = block(x)
        return take_part(x.to(self.weights_dtype(x.dtype)), outside_blocks(self))


def _first_dtype(parameters: Iterable[nn.Parameter], otherwise: torch.dtype) -> torch.dtype:
    return next((p.dtype for p in parameters if p.is_floating_point()), otherwise)
