"""An encoder with its projector and hooks: the path of one modality into the backbone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from motet.absent import take_part
from motet.core.arrays import Int64Array
from motet.core.errors import ArgumentError, UserError
from motet.core.item_segments import ItemSegments
from motet.core.shapes import projector
from motet.core.spec import Module
from motet.models.block import Block, outside_blocks, wrap_blocks
from motet.models.layers import LayerModules, any_trainable, frozen_to_eval, products_layer
from motet.models.projector import Projector


class ModalityModule(nn.Module):
    """The path of one modality into the backbone: hook `before`, encoder, projector, hook `after`.

    encoder:                fulfils `contract.Encoder`. Parameters that it has frozen itself stay frozen.
    before(values, sizes):  returns other (values, sizes) in place of the items, for example the tiles of images.
    after(features, sizes): returns the items' rows, for example merged tiles. `features` are the projected rows of the
                            items that `before` returned; `sizes` are those that `before` received.
    count(sizes):           rows of each item after all steps, numpy int64 [num_items]; needed if hooks change them.
    cut(sizes):             the segments that the encoder computes of each item, for example the lengths of the tiles
                            that `before` cuts images into; needed if `before` cuts items, so that they are weighed as
                            what they are computed as.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: Projector,
        train_encoder: bool = True,
        train_projector: bool = True,
        before: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        after: Callable[[Tensor, Tensor], Tensor] | None = None,
        count: Callable[[Int64Array], Int64Array] | None = None,
        cut: Callable[[Int64Array], ItemSegments] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.before = before
        self.after = after
        self.count = count
        self.cut = cut or getattr(encoder, "segments", None)
        self.train_encoder = train_encoder
        if not train_encoder:
            encoder.requires_grad_(False)
        projector.requires_grad_(train_projector)
        self._check()
        self._wrap()
        frozen_to_eval(encoder, projector)

    def _check(self) -> None:
        name, downsample = type(self.encoder).__name__, self.projector.downsample
        if self.cost not in ("packed", "padded"):
            raise ArgumentError(f"{name}.cost is {self.cost!r}; it must be 'packed' or 'padded'.")
        if self.cost == "padded" and self.cut is not None:
            raise ArgumentError(f"{name}.cost is 'padded', which pads whole items, so its items can have no segments.")
        if getattr(self.encoder, "grid", None) is not None and math.isqrt(downsample) ** 2 != downsample:
            raise ArgumentError(
                f"projector.downsample is {downsample}, but {name} gives a raster of rows, of which squares are "
                "joined: it must be 1, 4, 9, 16, ..."
            )

    def _wrap(self) -> None:
        layers = list(getattr(self.encoder, "blocks", []))
        self._blocks = tuple(wrap_blocks(self.encoder, layers))
        if isinstance(vars(self.encoder).get("blocks"), list):
            # A plain list of layers beside the registered submodules would call the layers without their Blocks.
            self.encoder.blocks = list(self._blocks)

    def train(self, mode: bool = True) -> ModalityModule:
        """`nn.Module.train`, except that an encoder or projector without trainable parameters stays in eval mode."""
        super().train(mode)
        frozen_to_eval(self.encoder, self.projector)
        return self

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The encoder's layers in execution order; each is sharded and recomputed by itself."""
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
        """The length of each item for balancing, int64 [num_items]: patches, mel frames."""
        segments = self.segments(sizes)
        if segments is not None:
            return segments.summed(segments.length)
        lengths = getattr(self.encoder, "lengths", None)
        return lengths(sizes) if lengths else np.prod(sizes, axis=1)

    def segments(self, sizes: Int64Array) -> ItemSegments | None:
        """The segments of each item; None: each item is one."""
        return self.cut(sizes) if self.cut else None

    def num_tokens(self, sizes: Int64Array) -> Int64Array:
        """Rows that each item takes in the backbone's sequence, int64 [num_items]."""
        return self.count(sizes) if self.count else self.projector.num_outputs(self._extents(sizes))

    def _extents(self, sizes: Int64Array) -> Int64Array:
        """The arrangement of the encoder's rows of each item: `extents` of `Projector`."""
        counts, grid = self.encoder.num_outputs(sizes), getattr(self.encoder, "grid", None)
        if grid is None:
            return counts
        if (grid(sizes).prod(axis=1) != counts).any():
            raise UserError(f"{type(self.encoder).__name__}.grid has not as many rows as num_outputs says.")
        return grid(sizes)

    def layers(self) -> list[LayerModules]:
        """The layers in execution order, on items of `lengths(sizes)`.

        A custom encoder without `layers()`, and a hook that is a module, counts as its linear layers and convolutions,
        each applied once to every row.
        """
        described = getattr(self.encoder, "layers", None)
        layers = described() if described else [products_layer("products", self.encoder, self.encoder.output_dim)]
        last, to = layers[-1].layer, self.projector
        joining = projector(
            to.input_dim, to.output_dim, to.kind, to.downsample, divisor=last.divisor, trainable=any_trainable(to)
        )
        layers = [*layers, LayerModules(joining, (to,))]
        if isinstance(self.before, nn.Module):
            # Its output is the input of the first layer, which keeps it for backward.
            layers.insert(0, products_layer("before", self.before, layers[0].layer.activation_width))
        if isinstance(self.after, nn.Module):
            layers.append(products_layer("after", self.after, to.output_dim, joining.divisor))
        return layers

    def spec_module(self, name: str) -> Module:
        """The module's part of a ModelSpec."""
        return Module.of(name, (each.layer for each in self.layers()), padded=self.cost == "padded")

    def forward(self, values: Tensor, sizes: Tensor) -> Tensor:
        """values [sum(rows), row_dim], sizes int64 [num_items, size_dim] on the host -> [sum(num_tokens),
        backbone_dim].

        Without items: [0, backbone_dim], connected to every trainable parameter. Raises UserError if the number of rows
        is not sum(num_tokens), from which the backbone's sequences were laid out.
        """
        if len(sizes) == 0:
            return self._forward_empty()
        seen, seen_sizes = self.before(values, sizes) if self.before else (values, sizes)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_encoder):
            features = self.encoder(self._cast(seen), seen_sizes)
        return self._projected(features, sizes, seen_sizes)

    @property
    def uncuttable(self) -> str:
        """Why a pipeline cannot cut the module between its blocks, in words; "" if it can."""
        name = type(self.encoder).__name__
        if any(not hasattr(self.encoder, part) for part in ("enter", "through", "leave")):
            return f"{name} has no enter, through and leave (see motet.models.contract)"
        return "its hook `before` changes the items, which later stages do not see" if self.before else ""

    def enter(self, values: Tensor, sizes: Tensor) -> Tensor:
        """What stands before the encoder's blocks. There is at least one item.

        `enter`, `through` and `leave` make up `forward`; a stage of a pipeline calls those that it holds. Each takes
        all sizes; hidden states are [rows, width].
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_encoder):
            return self.encoder.enter(self._cast(values), sizes)

    def through(self, hidden: Tensor, sizes: Tensor, first: int, stop: int) -> Tensor:
        """Hidden states [rows, width] after the encoder's blocks first ... stop - 1."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_encoder):
            return self.encoder.through(hidden, sizes, first, stop)

    def leave(self, hidden: Tensor, sizes: Tensor) -> Tensor:
        """What stands behind the encoder's blocks, projector and hook `after` included: what `forward` returns."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_encoder):
            features = self.encoder.leave(hidden, sizes)
        return self._projected(features, sizes, sizes)

    def _cast(self, values: Tensor) -> Tensor:
        """The items' rows in the dtype in which the encoder computes."""
        parameters = [*outside_blocks(self.encoder), *self.projector.parameters()]
        return values.to(next(p.dtype for p in parameters if p.is_floating_point()))

    def _projected(self, features: Tensor, sizes: Tensor, seen_sizes: Tensor) -> Tensor:
        """The encoder's rows through the projector and the hook `after`. seen_sizes: sizes behind the hook `before`."""
        projected = next(self.projector.parameters()).dtype
        features = self.projector(features.to(projected), self._extents(seen_sizes.numpy()))
        if self.after:
            features = self.after(features, sizes)
        expected = int(self.num_tokens(sizes.numpy()).sum())
        if len(features) != expected:
            raise UserError(
                f"{type(self.encoder).__name__} gave {len(features)} rows for {len(sizes)} items where num_tokens "
                f"says {expected}; num_outputs, or `count` beside a hook, must say what forward returns"
            )
        return features

    def _forward_empty(self) -> Tensor:
        weight = next(self.projector.parameters())
        x = weight.new_zeros(0, self.projector.output_dim)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_encoder):
            for block in self._blocks:
                x = block(x)
        return take_part(x, outside_blocks(self))
