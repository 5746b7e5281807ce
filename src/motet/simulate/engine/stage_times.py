"""Tables of seconds for the actions of a Program, from a cost model or from measured stage times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from motet.core.arrays import Float64Array
from motet.core.errors import ArgumentError


class Part(NamedTuple):
    """A part of a pass: its share of the pass's compute seconds, or of its tensor-parallel communication.

    The shares of compute sum to 1. What no part has of the communication is at the ends of the parts that compute.

    Example:
        >>> from motet.schedule import one_f_one_b, split_parts
        >>> from motet.simulate import simulate
        >>> times = StageTimes(*np.ones((3, 1, 1)), forward_parts={0: (Part(0.25), Part(0.75))})
        >>> program = split_parts(one_f_one_b(1, 1), 0, num_forward_parts=2, num_backward_parts=1)
        >>> simulate(program, times).end_s.tolist()
        [0.25, 1.0, 3.0]
    """

    share: float
    stream: Literal["compute", "tensor"] = "compute"


class AlikeParts(Mapping[int, tuple[Part, ...]]):
    """The parts of the stages of ranks that are alike. first: those of rank 0. num_stages: of a rank."""

    def __init__(self, first: Mapping[int, tuple[Part, ...]], num_stages: int, num_ranks: int) -> None:
        self.first, self.num_stages, self.num_ranks = first, num_stages, num_ranks

    def __getitem__(self, stage: int) -> tuple[Part, ...]:
        if not 0 <= stage < self.num_stages * self.num_ranks:
            raise KeyError(stage)
        return self.first[stage % self.num_stages]

    def __iter__(self) -> Iterator[int]:
        return (rank * self.num_stages + stage for rank in range(self.num_ranks) for stage in self.first)

    def __len__(self) -> int:
        return len(self.first) * self.num_ranks


@dataclass(frozen=True, eq=False)
class StageTimes:
    """Seconds of a Program's actions. Tables are float64 and broadcast to the shapes below.

    [num_stages, num_microbatches]:
        forward_s:   compute of F.
        input_s:     I. B takes input_s + weight_s.
        weight_s:    W.
        recompute_s: R. If the Program has no R, it is added to B or I.
        forward_tensor_s, backward_tensor_s: tensor-parallel communication in F, and in B or I. The compute stream waits
                     for it: TP bubbles.
    [num_edges, num_microbatches]:
        send_s:      F's output from rank to rank.
        return_s:    the gradient of that output.
        exchange_s:  all-to-all from the stages of a group, in either direction.
    [num_stages]; a slice of the parameters takes its share:
        gather_s:    all-gather of a stage's parameters.
        reduce_s:    reduction of its gradients.
        replicas_s:  sum of gradients over copies of the parameters (hybrid sharding): a REDUCE of no microbatch in a
                     stage that also has one for each microbatch.
    [num_ranks]:
        norm_s:      NORM.
        step_s:      optimizer.
    forward_parts, backward_parts: per stage, the parts of a pass, for Programs whose actions have parts.

    Example:
        >>> from motet.schedule import one_f_one_b
        >>> from motet.simulate import simulate
        >>> times = StageTimes(forward_s=np.array([[1.0], [2.0]]), input_s=np.ones((2, 1)), weight_s=np.ones((2, 1)))
        >>> simulate(one_f_one_b(2, num_microbatches=3), times).makespan_s
        15.0
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
    """StageTimes from measured seconds of stages.

    forward_s, backward_s: [num_stages] or [num_stages, num_microbatches]. backward_s includes recomputation.
    weight_s:              the part of backward_s for gradients of weights (zero-bubble schedules); half by default.
    send_s:                seconds of a stage's output to the next stage, and of its gradient back: one number, or
                           [num_edges].
    Raises ArgumentError for seconds that are negative, not finite or of another shape.
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
