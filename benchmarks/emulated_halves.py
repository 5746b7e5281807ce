"""Passes with tensor parallelism that sleep in halves of layers, between collectives that last.

As the simulator has it (`simulate/predict/pass_parts.py`), all halves of a pass take equally long, and so do the four
collectives of a layer. A collective lasts from when it is started, so that what runs beside it takes no time of its
own, as far as it is no longer. What else is priced, of embedding and output layer, comes behind the pass.

Of encoders whose sums are apart, each part sleeps before it starts its sum.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from motet.models import divided
from motet.tensor_parallel import RowParts


class PassSeconds(NamedTuple):
    """Of a forward or backward pass of the backbone: a half of a layer, one collective, and all that is priced."""

    half_s: float
    collective_s: float
    tensor_s: float


class EncoderPart:
    """A part of an encoder's pass that computes, up to its sum. compute_s, sum_s: what both take."""

    def __init__(self, compute_s: float, sum_s: float) -> None:
        self.compute_s, self.sum_s = compute_s, sum_s
        self.began_s, self.has_slept = time.perf_counter(), False

    def sleep(self) -> None:
        if not self.has_slept:
            sleep_until(self.began_s + self.compute_s)
        self.has_slept = True


class SlowRows(RowParts):
    """Rows that tensor-parallel ranks share, whose products and collectives last. now: of the pass that runs.

    of_encoder: the part that runs of an encoder whose sums are apart; None: sums of encoders take no time.
    """

    now: ClassVar[PassSeconds]
    began_s: ClassVar[float]
    behind_s: ClassVar[float]
    of_encoder: ClassVar[EncoderPart | None] = None

    def into_products(self, hidden: Tensor) -> Tensor:
        rows = super().into_products(hidden)
        return _End.apply(rows, True) if self.num_rows else rows

    def from_products(self, products: Tensor) -> Tensor:
        return super().from_products(_End.apply(products, False) if self.num_rows else products)

    def _scattered(self, rows: Tensor) -> Tensor:
        with _collective():
            return super()._scattered(rows)

    def _summed(self, x: Tensor) -> Tensor:
        part = SlowRows.of_encoder
        if part is None or part.has_slept:
            return super()._summed(x)
        part.sleep()
        end_s = time.perf_counter() + part.sum_s
        total = super()._summed(x)
        sleep_until(end_s)
        if (behind := SlowRows.of_encoder) is not None:
            behind.began_s = time.perf_counter()
        return total

    def _gathered(self, part: Tensor, num_rows: int) -> Tensor:
        with _collective():
            return super()._gathered(part, num_rows)


@contextmanager
def passing(seconds: PassSeconds) -> Iterator[None]:
    """In the block, a pass of the backbone runs, and encoders inside it."""
    SlowRows.now, SlowRows.behind_s = seconds, seconds.tensor_s
    yield
    time.sleep(max(SlowRows.behind_s, 0.0))


@contextmanager
def computing(part: EncoderPart) -> Iterator[None]:
    """In the block, a part of an encoder runs."""
    before, SlowRows.of_encoder = SlowRows.of_encoder, part
    yield
    part.sleep()
    SlowRows.of_encoder = before


@contextmanager
def _collective() -> Iterator[None]:
    end_s = time.perf_counter() + SlowRows.now.collective_s
    yield
    SlowRows.behind_s -= SlowRows.now.collective_s
    sleep_until(end_s)


class _End(torch.autograd.Function):
    """What it is given, where the products of a half begin or end. In backward they begin where they end in forward."""

    @staticmethod
    def forward(ctx, hidden: Tensor, begins: bool) -> Tensor:
        ctx.begins = begins
        _at_end(begins)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        _at_end(not ctx.begins)
        return gradient, None


def _at_end(begins: bool) -> None:
    if begins:
        SlowRows.began_s = time.perf_counter()
    else:
        sleep_until(SlowRows.began_s + SlowRows.now.half_s)


def sleep_until(end_s: float) -> None:
    if (left_s := end_s - time.perf_counter()) > 0:
        time.sleep(left_s)


def emulate_halves() -> None:
    """Let models that are divided from here on, in this process, have such rows."""
    divided.RowParts = SlowRows
