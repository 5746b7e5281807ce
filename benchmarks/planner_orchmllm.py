"""OrchMLLM, section 8.1: its three models on 2,560 H100, without balancing and with Megatron-LM. Used by planner.py.

Batches are the paper's: those of its mini-batches a GPU, other ones without balancing ("according to the same
standard", memory), and for Megatron-LM other ones again. Megatron-LM has TP 8 and encoders in the first of PP stages:
only then is DP, 160, 80 or 32, a divisor of its batches. Its microbatches are not given: the fastest of 1 to 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from baselines.chains import chain_plan, encoders_first
from trials import Baseline, Case, Outcome, Subject, job_of, with_any_tp

from motet.core.plan import Plan
from motet.planner.candidate import Pins
from motet.planner.degrees import Degrees
from motet.planner.job import Job

NUM_GPUS = 2560
DATA_PARALLEL = Pins(strategies=("data parallel",), tp=1)


class Published(NamedTuple):
    """Mini-batches a GPU, balanced and not; PP and batch of Megatron-LM."""

    model: str
    balanced: int
    unbalanced: int
    pp: int
    batch_size: int
    over_unbalanced: tuple[float, ...]


TABLE = (
    Published("10B", 80, 65, 2, 5120, (1.5, 2.0)),
    Published("18B", 60, 40, 4, 5120, (1.5, 2.0)),
    Published("84B", 30, 15, 10, 2560, (1.5, 2.0)),
)
OVER_MEGATRON = 3.1, 4.1


def cases() -> Iterator[Case]:
    for row in TABLE:
        name = f"MLLM-{row.model}"
        job = job_of(f"orchmllm_{row.model.lower()}", name=name)
        subject = Subject(job)
        assert job.batch_size == row.balanced * NUM_GPUS
        yield Case(
            "OrchMLLM",
            name,
            subject,
            "data parallel, balanced",
            partial(subject.searched, DATA_PARALLEL),
            (
                Baseline(
                    f"one minibatch of {row.balanced}, balanced",
                    partial(subject.searched, replace(DATA_PARALLEL, microbatch_size=row.balanced)),
                    note="as the paper runs it",
                ),
                Baseline(
                    f"not balanced, {row.unbalanced} a GPU",
                    partial(_unbalanced, job, row),
                    row.over_unbalanced,
                ),
                Baseline(
                    f"Megatron-LM, TP 8, PP {row.pp}",
                    partial(_megatron, job, row),
                    OVER_MEGATRON,
                ),
            ),
        )


def _unbalanced(job: Job, row: Published) -> Outcome:
    own = replace(job, batch_size=row.unbalanced * NUM_GPUS)
    return Subject(own).searched(replace(DATA_PARALLEL, balance="off"))


def _megatron(job: Job, row: Published) -> Outcome:
    own = with_any_tp(replace(job, batch_size=row.batch_size))

    def plans() -> Iterator[tuple[str, Plan]]:
        dp = NUM_GPUS // (8 * row.pp)
        for size in (1, 2, 4, 8):
            degrees = Degrees(8, row.pp, dp, size, row.batch_size // (dp * size))
            yield degrees.words, chain_plan(own, degrees, encoders_first)

    return Subject(own).fastest(plans)
