"""Floating-point operations of a module on items of given lengths: neither padding nor recomputation is counted.

A matrix product of a row with w weights is 2 w operations; attention of r rows is two products of [r, width] by [width,
r], that is 4 r^2 width a layer, half of it if causal (Kaplan et al. 2020, section 2.1; the convention of MFU in PaLM,
appendix B). Norms, activations, softmax and embedding look-ups are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


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
    return sum(sum(_stage_flops(stage, lengths)) for stage in shape.stages) + 2 * shape.head_weights * num_targets


def step_flops(shape: FlopShape, lengths: NDArray[np.int64], num_targets: int = 0) -> int:
    """Operations of forward and backward: each product again for its weights' gradient, and again for its input's."""
    total = 2 * shape.head_weights * num_targets * (2 + shape.head_trained)
    for stage in shape.stages:
        products, attention = _stage_flops(stage, lengths)
        total += products * (1 + stage.trained + stage.returns) + attention * (1 + 2 * stage.returns)
    return total


def chain(*stages: FlopStage) -> tuple[FlopStage, ...]:
    """The stages in execution order, with `returns` set wherever the stage itself or an earlier one trains.

    A stage without attention is taken for a single product: its input has a gradient only if an earlier stage trains.
    """
    chained, trains = [], False
    for stage in stages:
        chained.append(replace(stage, returns=trains or (stage.trained and stage.attention > 0)))
        trains = trains or stage.trained
    return tuple(chained)


def _stage_flops(stage: FlopStage, lengths: NDArray[np.int64]) -> tuple[int, int]:
    """Operations of the products with weights, and of attention."""
    rows = -(-np.asarray(lengths, dtype=np.int64) // stage.divisor) + stage.extra_rows
    # Pairs in float64 lose nothing that matters and cannot overflow.
    pairs = rows.astype(np.float64) ** 2
    if stage.causal:
        beyond = np.maximum(rows - stage.window, 0) if stage.window else 0
        pairs = (pairs - np.square(beyond, dtype=np.float64)) / 2
    return 2 * stage.weights * int(rows.sum()), int(4 * stage.attention * pairs.sum())
