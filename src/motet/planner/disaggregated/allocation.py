"""What ranks are allocated from, and what is allocated: plain data of `allocate.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array


@dataclass(frozen=True, eq=False)
class UnitOptions:
    """The ways to run one unit, a row each: columns [num_options].

    side:          0 for the backbone, -1 for what feeds it, 1 for what it feeds.
    num_examples:  of a microbatch of one replica. tp, pp: parallel degrees; dp follows from num_examples.
    pass_s:        one microbatch through all stages, forward and backward. stage_s: through the slowest stage.
    once_s:        of a step, whatever its microbatches: collectives of data parallelism, the optimizer.
    fixed_bytes:   of the fullest rank: parameters, gradients, transients. sharded_bytes: more, divided by dp (ZeRO-1).
    kept_bytes:    of each microbatch in flight: the first stage of a unit holds as many as there are stages to the end.
    """

    name: str
    side: Literal[-1, 0, 1]
    num_examples: Int64Array
    tp: Int64Array
    pp: Int64Array
    pass_s: Float64Array
    stage_s: Float64Array
    once_s: Float64Array
    fixed_bytes: Float64Array
    sharded_bytes: Float64Array
    kept_bytes: Float64Array

    def take(self, rows: BoolArray) -> UnitOptions:
        """Some of the rows; rows are numbered anew."""
        columns = {key: own[rows] for key, own in vars(self).items() if isinstance(own, np.ndarray)}
        return UnitOptions(self.name, self.side, **columns)


@dataclass(frozen=True)
class Limits:
    """num_ranks: that may be used. batch_size: examples of a step. capacity_bytes: of a rank.

    num_chunks: of each pipeline rank (virtual pipeline): they divide the time until the pipeline is full.
    num_taken:  examples that the backbone's replicas take at a time, together; 0 is free.
    """

    num_ranks: int
    batch_size: int
    capacity_bytes: float = np.inf
    num_chunks: int = 1
    num_taken: int = 0


@dataclass(frozen=True)
class Share:
    """What one unit gets. row: of its options."""

    name: str
    row: int
    num_examples: int
    tp: int
    dp: int
    pp: int

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp


@dataclass(frozen=True)
class Allocation:
    """shares: of the units, as they were given. warmup_s + steady_s + once_s is what a step takes."""

    shares: tuple[Share, ...]
    num_microbatches: int
    warmup_s: float
    steady_s: float
    once_s: float

    @property
    def time_s(self) -> float:
        return self.warmup_s + self.steady_s + self.once_s

    @property
    def num_ranks(self) -> int:
        return sum(share.num_ranks for share in self.shares)
