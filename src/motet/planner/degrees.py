"""The degrees of parallelism of a chain and of any Plan, and the replicas and microbatch sizes that divide a batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isqrt

from motet.core.plan import Plan, ScheduleKind, Unit
from motet.planner.candidate import Pins
from motet.planner.job import Job

MICROBATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
SCHEDULE_NAMES = {"1f1b": "1F1B", "interleaved_1f1b": "interleaved 1F1B", "zb_h1": "ZB-H1", "zb_v": "ZB-V"}


@dataclass(frozen=True)
class Degrees:
    """The degrees of a chain. num_chunks: stages of each pipeline rank.

    Example:
        >>> Degrees(tp=2, pp=4, dp=1, microbatch_size=1, num_microbatches=8).words
        'TP 2, PP 4, DP 1, 1F1B, microbatches of 1'
    """

    tp: int
    pp: int
    dp: int
    microbatch_size: int
    num_microbatches: int
    schedule: ScheduleKind = "1f1b"
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        """The stages of all pipeline ranks together."""
        return self.pp * self.num_chunks

    @property
    def words(self) -> str:
        """The degrees in words."""
        chunks = f" of {self.num_chunks} chunks" if self.schedule == "interleaved_1f1b" else ""
        return (
            f"TP {self.tp}, PP {self.pp}, DP {self.dp}, {SCHEDULE_NAMES[self.schedule]}{chunks}, "
            f"microbatches of {self.microbatch_size}"
        )


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def prime_divisors(number: int) -> list[int]:
    """The primes that divide a positive number, ascending.

    Example:
        >>> prime_divisors(12)
        [2, 3]
    """
    return [size for size in divisors(number) if len(divisors(size)) == 2]


def most_replicas(job: Job, num_ranks: int, pins: Pins) -> int:
    """The most replicas of num_ranks ranks each that fit on the cluster and divide the batch; 0 if there are none.

    If dp is pinned: the pinned number, or 0 if it does not fit or divide.
    """
    most = job.cluster.num_ranks // num_ranks
    if pins.dp is not None:
        return pins.dp if pins.dp <= most and job.batch_size % pins.dp == 0 else 0
    return max((dp for dp in divisors(job.batch_size) if dp <= most), default=0)


def allowed_microbatch_sizes(job: Job, dp: int, pins: Pins) -> list[int]:
    """The microbatch sizes that divide the batch over dp replicas."""
    sizes = MICROBATCH_SIZES if pins.microbatch_size is None else (pins.microbatch_size,)
    return [size for size in sizes if job.batch_size % (dp * size) == 0]


def plan_words(plan: Plan) -> str:
    """The degrees of a Plan of any kind in words: those of each unit, the schedule and the microbatch."""
    schedule = SCHEDULE_NAMES.get(plan.schedule, "")
    parts = [*map(_unit_words, plan.units), schedule, f"microbatches of {plan.microbatch_size}"]
    return "; ".join(part for part in parts if part)


def plan_degrees(plan: Plan) -> tuple[object, ...]:
    """What `plan_words` says of a Plan."""
    units = [(unit.tp, unit.cp, unit.pp, unit.dp, unit.ep, unit.zero, unit.shard_size) for unit in plan.units]
    return plan.schedule, plan.microbatch_size, *units


def _unit_words(unit: Unit) -> str:
    sizes = {"TP": unit.tp, "CP": unit.cp, "PP": unit.pp, "DP": unit.dp, "EP": unit.ep}
    words = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name not in ("CP", "EP"))
    groups = f" in groups of {unit.shard_size}" if unit.shard_size else ""
    return f"{unit.name} {words}, ZeRO {unit.zero}{groups}"
