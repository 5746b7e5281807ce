"""The input and the output of `allocate.py`: ways to run each unit, limits, and the ranks that units get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from motet.core.arrays import BoolArray, Float64Array, Int64Array


@dataclass(frozen=True, eq=False)
class UnitOptions:
    """The ways to run one unit, a row each. All columns are [num_options].

    side:          0 for the backbone, -1 for a unit that feeds it, 1 for a unit that it feeds.
    num_examples:  examples of a microbatch of one replica. tp, pp: parallel degrees; dp follows from num_examples.
    pass_s:        seconds of one microbatch through all stages, forward and backward. stage_s: of the slowest stage.
    once_s:        seconds that a step takes whatever its microbatches: collectives of data parallelism, the optimizer.
    fixed_bytes:   bytes of the fullest rank that do not depend on dp: parameters, gradients, transients.
    sharded_bytes: bytes of the fullest rank that are divided by dp: the optimizer (ZeRO-1).
    kept_bytes:    bytes of each microbatch in flight; a unit's first stage holds one for each stage from it to the end.
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
        """The rows of a mask, numbered anew."""
        columns = {key: column[rows] for key, column in vars(self).items() if isinstance(column, np.ndarray)}
        return UnitOptions(self.name, self.side, **columns)


@dataclass(frozen=True)
class Limits:
    """What an allocation must keep to.

    num_ranks:  ranks that may be used. batch_size: examples of a step. capacity_bytes: memory of a rank.
    num_chunks: stages of each pipeline rank (virtual pipeline): they divide the time until the pipeline is full.
    global_microbatch_size: examples of one microbatch of all replicas together; 0 is any number.
    replicas:   those that a unit must have, by its name, also such as do not divide the examples of a microbatch, but
                for the backbone's; other units may have any number that does.
    """

    num_ranks: int
    batch_size: int
    capacity_bytes: float = np.inf
    num_chunks: int = 1
    global_microbatch_size: int = 0
    replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """What one unit gets. row: index of the chosen way in its `UnitOptions`. num_examples: as there.

    filled: examples of a replica's microbatch, on average, over num_examples; below 1 where dp does not divide them.
    """

    name: str
    row: int
    num_examples: int
    tp: int
    dp: int
    pp: int
    filled: float = 1.0

    @property
    def num_ranks(self) -> int:
        """Ranks of the unit."""
        return self.tp * self.dp * self.pp


@dataclass(frozen=True)
class Allocation:
    """What all units get, in the order of the input. A step takes warmup_s + steady_s + once_s."""

    shares: tuple[Share, ...]
    num_microbatches: int
    warmup_s: float
    steady_s: float
    once_s: float

    @property
    def time_s(self) -> float:
        """Seconds of a step."""
        return self.warmup_s + self.steady_s + self.once_s

    @property
    def num_ranks(self) -> int:
        """Ranks of all units."""
        return sum(share.num_ranks for share in self.shares)
