"""How long the actions of a Program take: tables of seconds, from a cost model or from measured stage times alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import Float64Array
from motet.core.errors import ArgumentError


class Part(NamedTuple):
    """A slice of a pass: its share of the pass's compute seconds, or of its tensor-parallel communication."""

    share: float
    stream: Literal["compute", "tensor"] = "compute"


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Seconds. Tables are float64 and broadcast to [num_stages, num_microbatches], or to [num_edges, num_microbatches].

    forward_s:      F, compute.
    input_s:        I, backward for the input: what B takes is input_s + weight_s.
    weight_s:       W, backward for the weights.
    recompute_s:    R, or what B or I take in addition where the Program has no R.
    forward_tensor_s, backward_tensor_s: tensor-parallel communication inside F, and inside B or I, during which the
                    compute stream of the rank waits: TP bubbles.
    send_s:         [num_edges, num_microbatches] of the Program's edges: F's output from rank to rank.
    return_s:       the same for its gradient.
    exchange_s:     [num_edges, num_microbatches], all-to-all from the stages of a group (either direction).
    gather_s, reduce_s: [num_stages], collectives of a stage's parameters and gradients; a part takes its share.
    replicas_s:     [num_stages], a REDUCE of no microbatch beside those of each: the sum over copies (hybrid sharding).
    norm_s:         [num_ranks], NORM: the sum of the gradient's norm, the loss and the targets over all ranks.
    step_s:         [num_ranks], optimizer.
    forward_parts, backward_parts: per stage, the slices of a pass, for Programs whose actions have parts.
    """

    forward_s: Float64Array
    input_s: Float64Array
    weight_s: Float64Array
    recompute_s: Float64Array = field(default_factory=lambda: np.zeros((1, 1)))
    forward_tensor_s: Float64Array = field(default_factory=lambda: np.zeros((1, 1)))
    backward_tensor_s: Float64Array = field(default_factory=lambda: np.zeros((1, 1)))
    send_s: Float64Array = field(default_factory=lambda: np.zeros((1, 1)))
    return_s: Float64Array = field(default_factory=lambda: np.zeros((1, 1)))
    exchange_s: Float64Array = field(default_factory=lambda: np.zeros((1, 1)))
    gather_s: Float64Array = field(default_factory=lambda: np.zeros(1))
    reduce_s: Float64Array = field(default_factory=lambda: np.zeros(1))
    replicas_s: Float64Array = field(default_factory=lambda: np.zeros(1))
    norm_s: Float64Array = field(default_factory=lambda: np.zeros(1))
    step_s: Float64Array = field(default_factory=lambda: np.zeros(1))
    forward_parts: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    backward_parts: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)


def stage_times(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    weight_s: ArrayLike | None = None,
    send_s: ArrayLike = 0.0,
) -> StageTimes:
    """Times from measurements of the stages alone.

    forward_s, backward_s: seconds, one a stage, or [num_stages, num_microbatches]; backward with recomputation.
    weight_s:              the part of backward_s that computes gradients of weights (zero-bubble); half by default.
    send_s:                of a stage's output to the next, and of its gradient back; one for all, or one an edge.
    Raises ArgumentError for what is negative, not finite, or of another shape.
    """
    forward, backward = _table("forward_s", forward_s), _table("backward_s", backward_s)
    weight = backward / 2 if weight_s is None else _table("weight_s", weight_s)
    if len(forward) != len(backward) or len(weight) not in (1, len(backward)):
        raise ArgumentError(
            f"forward_s has {len(forward)} stages, backward_s {len(backward)}, weight_s {len(weight)}; "
            "they must have equally many."
        )
    if (weight > backward).any():
        raise ArgumentError("weight_s is above backward_s, of which it must be a part.")
    send = _table("send_s", send_s)
    return StageTimes(forward, backward - weight, weight, send_s=send, return_s=send)


def _table(name: str, seconds: ArrayLike) -> Float64Array:
    table = np.asarray(seconds, dtype=np.float64)
    if table.ndim > 2:
        raise ArgumentError(f"{name} has {table.ndim} axes; it must be one number a stage, or a stage and microbatch.")
    if not np.isfinite(table).all() or (table < 0).any():
        raise ArgumentError(f"{name} has seconds that are negative or not finite.")
    return table.reshape(-1, 1) if table.ndim < 2 else table
