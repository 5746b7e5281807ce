"""A generator with its output projector: the path from the backbone's hidden states to what an answer holds.

    rows at the item's queries ──> projector ──> conditions ──> generator ──> loss
                                   (or, of a share of items, rows that stand for no condition)

The output projector stands at the generator's entrance (MMScale section 2.1). The hidden states are those at learned
query tokens, which stand in the sequence where the item does, and see all that stands before it; or those of the rows
of the turn before the item's. Then the item takes no row of the sequence, and conditions are of any length.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.absent import take_part
from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.item_segments import ItemSegments
from motet.core.spec import Module
from motet.models.block import Block, outside_blocks, wrap_blocks
from motet.models.layers import (
    LayerModules,
    any_trainable,
    as_it_learns,
    as_with_rows,
    frozen_to_eval,
    products_layer,
)
from motet.models.noise_schedule import SamplingConfig
from motet.models.projector import Projector
from motet.noise import uniform_of_items
from motet.on_device import on_device


class OutputProjector(nn.Module):
    """The backbone's rows to conditions; of items without a condition, learned rows in their place.

    num_rows: these rows: the queries of an item; 1 where conditions are turns, in place of each of their rows.
    nothing:  they, [num_rows, condition_dim]; None if no item is without a condition.
    """

    def __init__(self, projector: Projector, num_rows: int, drop: float) -> None:
        super().__init__()
        self.projector, self.drop = projector, drop
        self.nothing = nn.Parameter(torch.zeros(num_rows, projector.output_dim)) if drop else None

    def forward(self, rows: Tensor, dropped: Tensor | None, counts: Int64Array | None = None) -> Tensor:
        """rows [num_items * num_queries, dim], dropped bool [num_items] -> [num_items * num_queries, condition_dim].

        counts: int64 [num_items], the rows of each item where they are not num_queries.
        """
        conditions = self.projector(rows, np.array([len(rows)]))
        if self.nothing is None or dropped is None:
            return conditions
        if counts is not None:
            of_rows = dropped.repeat_interleave(on_device(counts, dropped.device), output_size=len(rows))
            return torch.where(of_rows[:, None], self.nothing, conditions)
        of_items = conditions.unflatten(0, (len(dropped), -1))
        return torch.where(dropped[:, None, None], self.nothing, of_items).flatten(0, 1)


class GeneratorModule(nn.Module):
    """A generator behind its output projector.

    generator: fulfils `contract.Generator`. weight: of its loss in a step, where the loss of tokens has 1.
    max_turn:  the most rows of a turn; num_queries is 0 then. 0: conditions are those at query tokens.
    where:     what messages call it.
    Raises UserError for a generator that pads its items: items are packed.
    """

    cost = "packed"
    cut = None
    has_raster = False  # Its query tokens stand one after the other, as text does.

    def __init__(
        self,
        generator: nn.Module,
        entrance: OutputProjector,
        num_queries: int,
        weight: float = 1.0,
        train_generator: bool = True,
        train_projector: bool = True,
        sampling: SamplingConfig | None = None,
        where: str = "a generator",
        max_turn: int = 0,
    ) -> None:
        super().__init__()
        self.where, self.max_turn = where, max_turn
        self.sampling = sampling or SamplingConfig()
        self.generator, self.entrance = generator, entrance
        self.num_queries, self.weight = num_queries, weight
        if not train_generator:
            generator.requires_grad_(False)
        entrance.requires_grad_(train_projector)
        self._blocks = tuple(wrap_blocks(generator, getattr(generator, "blocks", [])))
        frozen_to_eval(generator, entrance)

    def train(self, mode: bool = True) -> GeneratorModule:
        """`nn.Module.train`, except that a part without trainable parameters stays in eval mode."""
        super().train(mode)
        frozen_to_eval(self.generator, self.entrance)
        return self

    @property
    def divisor(self) -> int:
        """What each size of an item must be a multiple of."""
        return getattr(self.generator, "divisor", 1)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The generator's layers in execution order; each is sharded and recomputed by itself."""
        return self._blocks

    @property
    def trainable(self) -> bool:
        """Whether any part of it learns."""
        return any(p.requires_grad for p in self.parameters())

    def lengths(self, sizes: Int64Array) -> Int64Array:
        """The rows of each item's latents, int64 [num_items]: by them its loss counts, and items are balanced."""
        return np.prod(sizes, axis=1)

    def segments(self, sizes: Int64Array) -> ItemSegments | None:
        """None: an item is computed whole."""
        return None

    def num_tokens(self, sizes: Int64Array) -> Int64Array:
        """The queries of each item in the backbone's sequence, int64 [num_items]; 0 where turns are conditions.

        Raises UserError for sizes that the generator cannot make.
        """
        if check := getattr(self.generator, "check_sizes", None):
            try:
                check(sizes)
            except UserError as error:
                raise UserError(f"{self.where}: {error}.") from None
        return np.full(len(sizes), self.num_queries, dtype=np.int64)

    @property
    def num_conditions(self) -> int:
        """The rows of an item's condition, of a turn the most: as of so many it is priced."""
        return self.max_turn or self.num_queries

    def layers(self) -> list[LayerModules]:
        """The layers in execution order: the output projector's first."""
        projected = self.entrance.projector.described(1)[0].layer
        nothing = 0 if self.entrance.nothing is None else self.entrance.nothing.numel()
        first = replace(projected, item_rows=self.num_conditions, parameters=projected.parameters + nothing)
        first = replace(first, trainable=any_trainable(self.entrance), of_outputs=False)
        described = getattr(self.generator, "layers", None)
        inner = described() if described else [products_layer("products", self.generator, self.generator.condition_dim)]
        return list(map(as_it_learns, [LayerModules(first, (self.entrance,)), *inner]))

    def spec_module(self, name: str) -> Module:
        """The module's part of a ModelSpec."""
        carried = {key: getattr(self.generator, key, 0) for key in ("carried_rows", "carried_divisor")}
        return replace(Module.of(name, (each.layer for each in self.layers())), **carried)

    def __call__(
        self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array | None = None
    ) -> Tensor:
        """As `forward`."""
        # FSDP2 moves each tensor among the arguments to the device, where sizes cannot be read without a wait.
        return super().__call__(values, sizes.numpy(), rows, keys, counts)

    def forward(
        self,
        values: Tensor,
        sizes: Tensor | Int64Array,
        rows: Tensor,
        keys: Int64Array,
        counts: Int64Array | None = None,
    ) -> Tensor:
        """The loss of packed items, summed over their rows, a scalar of at least float32.

        values [sum(rows), row_dim]; sizes int64 [num_items, size_dim] on the host; rows [num_items * num_queries, dim]
        of the backbone; keys int64 [num_items], by which all that is random is drawn; counts int64 [num_items], the
        rows of each item's turn, which are [sum(counts), dim] then; where conditions are at queries it is not read.
        Without items: 0, connected to `rows` and to every trainable parameter. Raises UserError for a generator that
        returns no scalar, or one without a gradient.
        """
        if len(sizes) == 0:
            return self._forward_empty(rows)
        sizes, turns, conditions = torch.as_tensor(sizes), self._turns(counts), self._conditions(rows, keys, counts)
        loss = self.generator(values.to(self._dtype), sizes, conditions, keys, *turns)
        if not isinstance(loss, Tensor) or loss.ndim:
            given = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"{type(self.generator).__name__} returned {given}; a generator must return the sum of its loss over "
                "the rows of its items, a scalar (see motet.models.contract.Generator)"
            )
        learns = torch.is_grad_enabled() and (conditions.requires_grad or any_trainable(self.generator))
        if learns and not loss.requires_grad:
            raise UserError(
                f"{type(self.generator).__name__} returned a loss that depends on neither its weights nor its "
                "conditions, so that nothing would learn from it; return one that was computed with gradients"
            )
        return loss.to(torch.promote_types(loss.dtype, torch.float32))

    @property
    def uncuttable(self) -> str:
        """Why a pipeline cannot cut the module between its blocks, in words; "" if it can."""
        inner = getattr(self.generator, "denoiser", self.generator)
        parts = {self.generator: ("enter", "through", "leave", "steps"), inner: ("enter", "through", "leave")}
        if not all(hasattr(part, name) for part, names in parts.items() for name in names):
            return f"{type(inner).__name__} is computed in one stage"
        return getattr(self.generator, "uncuttable", "")

    def enter(
        self, values: Tensor, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array | None = None
    ) -> Tensor:
        """What stands before the blocks, the output projector included. There is at least one item.

        `enter`, `through` and `leave` do what `forward` does; a stage of a pipeline calls those that it holds. Hidden
        states are [num_unfinished, width]. Arguments: as of `forward`.
        """
        conditions = self._conditions(rows, keys, counts)
        return self.generator.enter(values.to(conditions.dtype), sizes, conditions, keys, *self._turns(counts))

    def through(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None, first: int, stop: int) -> Tensor:
        """Hidden states behind the blocks first ... stop - 1."""
        return self.generator.through(hidden, sizes, self._turns(counts)[0] if self.max_turn else None, first, stop)

    def leave(
        self, hidden: Tensor, values: Tensor, sizes: Tensor, keys: Int64Array, counts: Int64Array | None = None
    ) -> Tensor:
        """The loss of hidden states behind the last block, as of `forward`."""
        loss: Tensor = self.generator.leave(hidden, values.to(hidden.dtype), sizes, keys, *self._turns(counts))
        return loss.to(torch.promote_types(loss.dtype, torch.float32))

    def _conditions(self, rows: Tensor, keys: Int64Array, counts: Int64Array | None) -> Tensor:
        """What the generator is given of rows of the backbone, for which some items get what stands for nothing."""
        rows, dropped = rows.to(self._dtype), None
        if self.entrance.drop and self.training:
            dropped = on_device(uniform_of_items(keys, "condition") < self.entrance.drop, rows.device)
        return self.entrance(rows, dropped, *self._turns(counts))

    def _turns(self, counts: Int64Array | None) -> tuple[Int64Array, ...]:
        """The rows of each item's turn as a further argument; of queries none."""
        if not self.max_turn:
            return ()
        if counts is None:
            raise ValueError("a generator that is given turns needs the rows of each")
        return (counts,)

    @torch.no_grad()
    def sample(
        self,
        sizes: Tensor,
        rows: Tensor,
        keys: Int64Array,
        sampling: SamplingConfig | None = None,
        counts: Int64Array | None = None,
    ) -> Tensor:
        """What the generator makes of hidden states, [sum(rows), row_dim]. sampling: None: as it was built with.

        Others as in `forward`; there is at least one item. Takes `steps` passes, with guidance twice as many.
        Raises UserError for guidance where the model has not learned to go without a condition.
        """
        sampling = sampling or self.sampling
        # FSDP2 has moved sizes to the device, as it enters this as it does `forward`.
        sizes, turns = sizes.cpu(), self._turns(counts)
        conditions = self._sampled_conditions(sizes, rows, sampling, turns)
        given = {"counts": turns[0]} if turns else {}

        def guided(predict: Any) -> Tensor:
            return _guided([predict(each) for each in conditions], sampling)

        return self.generator.sample(sizes, conditions[-1], keys, sampling, guided, **given)

    def sample_in_stages(
        self, sizes: Tensor, rows: Tensor, keys: Int64Array, counts: Int64Array | None = None
    ) -> Generator[Tensor, Tensor, Tensor]:
        """As `sample`, where other stages have further blocks: yields what stands before the blocks, and is sent what
        they predict of it (`predicted`), `num_passes` times. Returns what is made. No gradients may be on.
        """
        turns = self._turns(counts)
        conditions = self._sampled_conditions(sizes, rows, self.sampling, turns)
        steps = self.generator.steps(sizes, keys, self.sampling, conditions[0])
        noised, times = next(steps)
        while True:
            predictions = []
            for given in conditions:
                latents = noised.to(given.dtype)
                hidden = self.generator.entered(latents, times, sizes, given, turns[0] if turns else None, latents)
                predictions.append((yield hidden))
            try:
                noised, times = steps.send(_guided(predictions, self.sampling))
            except StopIteration as ended:
                made: Tensor = ended.value
                return made

    def predicted(self, hidden: Tensor, sizes: Tensor, counts: Int64Array | None) -> Tensor:
        """What is predicted, [sum(rows), row_dim], of hidden states behind the last block; of at least float32."""
        found: Tensor = self.generator.left(hidden, sizes, counts if self.max_turn else None)
        return found.to(torch.promote_types(found.dtype, torch.float32))

    @property
    def num_passes(self) -> int:
        """The passes through all blocks that a sample takes."""
        return len(self.generator.noise.visits(self.sampling)) * (1 if self.sampling.guidance == 1 else 2)

    def _sampled_conditions(
        self, sizes: Tensor, rows: Tensor, sampling: SamplingConfig, turns: tuple[Int64Array, ...]
    ) -> list[Tensor]:
        """Those of which each step of a sample predicts: with guidance what stands for no condition, then the items'.

        Raises UserError for guidance where the model has not learned to go without a condition.
        """
        guidance, rows = sampling.guidance, rows.to(self._dtype)
        if guidance == 1:
            return [self.entrance(rows, None, *turns)]
        if self.entrance.nothing is None:
            raise UserError(f"guidance = {guidance:g} takes a generator with drop_condition above 0; set it to 1.")
        dropped = torch.ones(len(sizes), dtype=torch.bool, device=rows.device)
        return [self.entrance(rows, each, *turns) for each in (dropped, None)]

    @property
    def _dtype(self) -> torch.dtype:
        return next(p.dtype for p in outside_blocks(self) if p.is_floating_point())

    def _forward_empty(self, rows: Tensor) -> Tensor:
        weight = outside_blocks(self)[0]
        x = as_with_rows(weight.new_zeros(0, 1) + rows.sum().to(weight.dtype), self.layers, self._blocks)
        for block in self._blocks:
            x = block(x)
        return take_part(x, outside_blocks(self)).sum(dtype=torch.promote_types(x.dtype, torch.float32))


def _guided(predictions: Sequence[Tensor], sampling: SamplingConfig) -> Tensor:
    """One prediction of those of `_sampled_conditions`."""
    if len(predictions) == 1:
        return predictions[0]
    without, found = predictions
    return without + sampling.guidance * (found - without)
