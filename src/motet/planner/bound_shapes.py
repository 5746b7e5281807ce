"""The shapes of a job's Plans, over which `step_bound.py` takes the least: degrees of the backbone's unit, the encoders
with ranks of their own, and how a step runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Literal, NamedTuple

from motet.core.workload import BACKBONE
from motet.planner.degrees import divisors
from motet.planner.infeasible import tensor_degrees
from motet.planner.job import Job

MAX_RANKS_BY_SHAPE = 64
"""On more ranks, replicas need not divide the batch here: each rank has an even share."""
ShapeKind = Literal["data_parallel", "chain", "bubbles"]
"""How encoders that are not apart run: colocated, phase after phase; in the backbone's pipeline; or beside it."""


class Shape(NamedTuple):
    """Degrees of the backbone's unit. apart: the encoders on ranks of their own.

    A replicated encoder counts as in the chain: no rank computes less for it than the first one of such a chain.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    apart: tuple[str, ...] = ()
    kind: ShapeKind = "chain"

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def num_copies(self) -> int:
        return self.cp * self.dp


def shapes_of(job: Job) -> Iterator[Shape]:
    """All of them; of those that take equally long, the first with the most ranks counts."""
    num_ranks, num_blocks = job.cluster.num_ranks, job.model.num_blocks
    encoders = [name for name in num_blocks if name != BACKBONE]
    degrees = tensor_degrees(job, BACKBONE, on_fewer=True)
    if num_ranks > MAX_RANKS_BY_SHAPE:
        for tp in degrees:
            for pp in range(1, min(num_ranks // tp, sum(num_blocks.values())) + 1):
                yield Shape(tp, 1, pp, num_ranks // (tp * pp), (), "data_parallel")
        return
    parted = list(chain.from_iterable(combinations(encoders, count) for count in range(len(encoders) + 1)))
    found = []
    for apart in parted:
        hosted = [name for name in encoders if name not in apart]
        together = tensor_degrees(job, *hosted, BACKBONE, on_fewer=True)
        most_stages = {"chain": sum(num_blocks[name] for name in (*hosted, BACKBONE)), "bubbles": num_blocks[BACKBONE]}
        for tp in degrees:
            kinds: list[ShapeKind] = ["data_parallel", "chain"] if tp in together else []
            kinds += ["bubbles"] if hosted else []
            for kind in kinds:
                for cp in range(1, num_ranks // tp + 1):
                    for dp in (dp for dp in divisors(job.batch.num_examples) if tp * cp * dp <= num_ranks):
                        for pp in range(1, min(num_ranks // (tp * cp * dp), most_stages.get(kind, 1)) + 1):
                            if tp * cp * dp * pp + bool(apart) > num_ranks:
                                break
                            if kind != "data_parallel" or (cp == 1 and not apart):
                                found.append(Shape(tp, cp, pp, dp, apart, kind))
    yield from sorted(found, key=lambda shape: (-shape.num_ranks, shape.tp, shape.pp))
