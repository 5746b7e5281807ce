"""Floating-point operations of a module on items of given lengths: neither padding nor recomputation is counted.

A matrix product of a row with w weights is 2 w operations; attention of r rows is two products of [r, width] by [width,
r], that is 4 r^2 width a layer, half of it if causal (Kaplan et al. 2020, section 2.1; the convention of MFU in PaLM,
appendix B). Norms, activations, softmax and embedding look-ups are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from motet.core.workload import BACKBONE, BatchLengths


@dataclass(frozen=True)
class FlopStage:
    """A stretch of a module that sees the same rows: an item of length l has ceil(l / divisor) + extra_rows of them.

    weights:    weights that each row meets in matrix products.
    attention:  heads * head_dim, summed over the layers.
    causal:     a row attends to earlier rows only, and, if window > 0, to no more than `window` rows.
    trained:    gradients of the weights are computed.
    returns:    gradients of the input are computed: the stage, or one before it, trains.
    """

    weights: int
    divisor: int = 1
    extra_rows: int = 0
    attention: int = 0
    causal: bool = False
    window: int = 0
    trained: bool = True
    returns: bool = True


@dataclass(frozen=True)
class FlopShape:
    """A module as its stages; head_weights: weights of the output layer, which only rows that predict a target meet."""

    stages: tuple[FlopStage, ...]
    head_weights: int = 0
    head_trained: bool = True


def forward_flops(shape: FlopShape, lengths: NDArray[np.int64], num_targets: int = 0) -> int:
    """Operations of the forward pass on items of `lengths`, int64 [num_items]. O(num_items * num_stages)."""
    return (
        sum(sum(_stage_flops(stage, lengths)) for stage in _merged(shape.stages)) + 2 * shape.head_weights * num_targets
    )


def step_flops(shape: FlopShape, lengths: NDArray[np.int64], num_targets: int = 0) -> int:
    """Operations of forward and backward: each product again for its weights' gradient, and again for its input's."""
    total = 2 * shape.head_weights * num_targets * (2 + shape.head_trained)
    for stage in _merged(shape.stages):
        products, attention = _stage_flops(stage, lengths)
        total += products * (1 + stage.trained + stage.returns) + attention * (1 + 2 * stage.returns)
    return total


def batch_flops(shapes: Mapping[str, FlopShape], lengths: BatchLengths) -> dict[str, int]:
    """Operations of forward and backward of each phase of a microbatch, over all ranks."""
    return {
        phase: step_flops(shape, lengths.sequence, int(lengths.num_targets.sum()))
        if phase == BACKBONE
        else step_flops(shape, lengths.items[phase].length)
        for phase, shape in shapes.items()
    }


def chain(*stages: FlopStage) -> tuple[FlopStage, ...]:
    """The stages in execution order, with `returns` set wherever the stage itself or an earlier one trains.

    A stage without attention is taken for a single product: its input has a gradient only if an earlier stage trains.
    """
    chained, trains = [], False
    for stage in stages:
        chained.append(replace(stage, returns=trains or (stage.trained and stage.attention > 0)))
        trains = trains or stage.trained
    return tuple(chained)


@cache
def _merged(stages: tuple[FlopStage, ...]) -> tuple[FlopStage, ...]:
    """Stages that see the same rows in the same way as one, with the sums of their weights: layers are mostly alike."""
    merged: dict[FlopStage, tuple[int, int]] = {}
    for stage in stages:
        kind = replace(stage, weights=0, attention=0)
        weights, attention = merged.get(kind, (0, 0))
        merged[kind] = (weights + stage.weights, attention + stage.attention)
    return tuple(replace(kind, weights=w, attention=a) for kind, (w, a) in merged.items())


def _stage_flops(stage: FlopStage, lengths: NDArray[np.int64]) -> tuple[int, int]:
    """Operations of the products with weights, and of attention; exact, so the same on every rank."""
    rows = -(-np.asarray(lengths, dtype=np.int64) // stage.divisor) + stage.extra_rows
    pairs = _square_sum(rows)
    if stage.causal:
        pairs -= _square_sum(np.maximum(rows - stage.window, 0)) if stage.window else 0
    return 2 * stage.weights * int(rows.sum()), (2 if stage.causal else 4) * stage.attention * pairs


def _square_sum(rows: NDArray[np.int64]) -> int:
    if len(rows) * int(rows.max(initial=0)) ** 2 < 2**63:
        return int(rows @ rows)
    return sum(count * count for count in rows.tolist())
