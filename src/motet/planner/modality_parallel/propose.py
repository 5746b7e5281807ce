"""Every module on ranks of its own, encoders beside each other, in as many stages as make all of them even.

Cornstarch, Algorithm 1 (section 5.2): for each number of stages of the backbone, the seconds of its slowest stage are
the target of every encoder. An encoder gets the number of stages whose slowest one is nearest to the target. The best
number of all wins. "Nearest" is tried on both sides: the fewest stages that are no slower than the target, and one
less.

The seconds are those of forward, of backward, which depends on what is frozen, and of recomputation (section 4.2, with
the erratum that adds recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice, product
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.words import shown_seconds, size_words
from motet.core.workload import BACKBONE
from motet.planner.candidate import MODALITY_PARALLEL, Candidate, Pins, RuledOut
from motet.planner.degrees import allowed_microbatch_sizes, most_replicas
from motet.planner.infeasible import indivisible, not_apart, nothing_divides, tensor_degrees
from motet.planner.job import Job
from motet.planner.modality_parallel.pipeline import ModalityDegrees, ModalityPipeline
from motet.planner.module_pins import backbone_pins, common_pins
from motet.planner.stages.partition import slowest_stages
from motet.planner.stages.recompute import RecomputeMode
from motet.planner.stages.stage_costs import Stages
from motet.planner.stages.step_time import work_s
from motet.planner.stages.unevenness import unevenness

NUM_CANDIDATES = 3
_MAX_CUTS = 16
_MAX_RULED_OUT = 2
_ROUNDING = 1e-9
"""By so much the factor of even microbatches may be below 1."""


class _CutModalities(NamedTuple):
    """A pipeline and its cut. rank_by: seconds of a step if it fits; bytes that it lacks if not."""

    rank_by: float
    pipeline: ModalityPipeline
    stages: Stages


def propose_modality_parallel(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """The best Plans that fit, least estimate first; then the nearest of those that do not."""
    pins = backbone_pins(common_pins(pins))
    if why := not_apart(job, pins) or indivisible(job, pins, len(job.model.module(BACKBONE).blocks)):
        yield RuledOut(MODALITY_PARALLEL, "", why)
        return
    options = modality_degrees(job, pins)
    first = next(options, None)
    if first is None:
        yield RuledOut(MODALITY_PARALLEL, "", _too_few_ranks(job) or nothing_divides(job))
        return
    fitting, lacking = _cut_best(job, pins, chain([first], options))
    for step_s, pipeline, stages in sorted(fitting, key=lambda cut: cut.rank_by)[:NUM_CANDIDATES]:
        bound_s, tell = work_s(pipeline.graph, stages), partial(_facts, pipeline, stages)
        yield Candidate(MODALITY_PARALLEL, pipeline.words, pipeline.plan(stages), step_s, bound_s, tell)
    for shortfall_bytes, pipeline, stages in sorted(lacking, key=lambda cut: cut.rank_by)[:_MAX_RULED_OUT]:
        yield RuledOut(MODALITY_PARALLEL, pipeline.words, _lacks(pipeline, stages, pins), shortfall_bytes)


def _too_few_ranks(job: Job) -> str:
    """Why modules cannot each have a rank, as a sentence; "" if they can."""
    names, num_ranks = [module.name for module in job.model.modules], job.cluster.num_ranks
    if len(names) <= num_ranks:
        return ""
    return f"{', '.join(names)} need {len(names)} ranks, one each; the cluster has {num_ranks:,}."


def _cut_best(
    job: Job, pins: Pins, options: Iterator[tuple[float, ModalityDegrees]]
) -> tuple[list[_CutModalities], list[_CutModalities]]:
    """The degrees that were cut: those that fit, and those that lack memory.

    options: (seconds at best, degrees), fewest seconds first.
    """
    mode: RecomputeMode = pins.recompute or "least"
    fitting: list[_CutModalities] = []
    lacking: list[_CutModalities] = []

    def cut(degrees: ModalityDegrees) -> None:
        pipeline = ModalityPipeline(job, degrees, mode)
        stages = pipeline.settled()
        if stages.shortfall_bytes:
            lacking.append(_CutModalities(stages.shortfall_bytes, pipeline, stages))
        else:
            fitting.append(_CutModalities(pipeline.step_s(stages), pipeline, stages))

    # 1. The fastest at best, until no others can be among the best.
    seen: list[ModalityDegrees] = []
    for at_best_s, degrees in islice(options, _MAX_CUTS):
        seen.append(degrees)
        best_s = sorted(other.rank_by for other in fitting)[:NUM_CANDIDATES]
        if len(best_s) == NUM_CANDIDATES and at_best_s >= best_s[-1]:
            break
        cut(degrees)
    # 2. If none fits, those that spread the model over the most ranks, until one does.
    every = [] if fitting else [*seen, *(degrees for _, degrees in options)]
    widest = sorted(every, key=lambda degrees: (-degrees.tp * sum(degrees.num_stages), degrees.microbatch_size))
    for degrees in widest[:_MAX_CUTS]:
        if fitting:
            break
        cut(degrees)
    return fitting, lacking


def _lacks(pipeline: ModalityPipeline, stages: Stages, pins: Pins) -> str:
    stage = int(np.argmax(stages.fullness))
    module = int(np.searchsorted(pipeline.first, stage, side="right")) - 1
    recomputed = "with nothing recomputed" if pins.recompute == "none" else "with all layers recomputed"
    where = f"stage {stage - pipeline.first[module]} of {pipeline.names[module]}"
    return f"{where} lacks {size_words(stages.shortfall_bytes)} {recomputed}."


def modality_degrees(job: Job, pins: Pins, *, aware: bool = True) -> Iterator[tuple[float, ModalityDegrees]]:
    """Algorithm 1 for each tensor-parallel degree and microbatch size: (seconds at best, degrees), fewest first.

    aware: whether seconds count what is frozen; if not, backward takes twice as long as forward everywhere.
    """
    entries = [
        entry for tp in tensor_degrees(job) if pins.allow(tp=tp) for entry in _with_tensor_degree(job, pins, tp, aware)
    ]
    factor = cache(lambda size, tp, pp, dp: unevenness(job, size, tp, ("1f1b", pp, dp)))
    # Uneven microbatches take long to count and only add seconds: they are counted of what comes up to the front.
    queue = [(even.at_best_s(1 - _ROUNDING), index, False) for index, even in enumerate(entries)]
    heapify(queue)
    known = set[ModalityDegrees]()
    while queue:
        at_best_s, index, is_final = queue[0]
        even = entries[index]
        if not is_final:
            uneven_s = even.at_best_s(factor(even.degrees.microbatch_size, even.degrees.tp, even.pp, even.degrees.dp))
            heapreplace(queue, (uneven_s, index, True))
            continue
        heappop(queue)
        if even.degrees not in known:
            known.add(even.degrees)
            yield at_best_s, even.degrees


class _Even(NamedTuple):
    """Degrees, and what they take where microbatches are alike.

    period_s: the slowest stage. path_s: one microbatch there and back. pp: stages on the longest way.
    """

    degrees: ModalityDegrees
    period_s: float
    path_s: float
    pp: int

    def at_best_s(self, uneven: float) -> float:
        """Seconds at best: (microbatches - 1) * slowest stage, and one microbatch there and back.

        uneven: factor of the former because microbatches differ.
        """
        return (self.degrees.num_microbatches - 1) * self.period_s * uneven + self.path_s


def _with_tensor_degree(job: Job, pins: Pins, tp: int, aware: bool) -> Iterator[_Even]:
    names = [module.name for module in job.model.modules]
    backbone = names.index(BACKBONE)
    others = [module for module in range(len(names)) if module != backbone]
    most, pinned = job.cluster.num_ranks // tp, [pins.of(name).pp for name in names]
    pinned[backbone] = pins.pp
    for size in allowed_microbatch_sizes(job, 1, pins):
        # 1. Seconds of each module: in all, and of its slowest stage for each number of stages.
        block_s = [_block_seconds(job, name, size, tp, pins, aware) for name in names]
        total_s = [float(column.sum()) for column in block_s]
        slowest_s = [slowest_stages(column.tolist(), most) for column in block_s]
        path_s = total_s[backbone] + max(total_s[module] for module in others)
        for num_stages in _stage_counts(slowest_s, backbone, most, pinned):
            # 2. Replicas and microbatches.
            dp = most_replicas(job, tp * sum(num_stages), pins)
            if not dp or size not in allowed_microbatch_sizes(job, dp, pins):
                continue
            num_microbatches = job.batch_size // (dp * size)
            # 3. The slowest stage, and the longest way.
            period_s = max(float(column[number - 1]) for column, number in zip(slowest_s, num_stages))
            pp = num_stages[backbone] + max(num_stages[module] for module in others)
            yield _Even(ModalityDegrees(num_stages, tp, dp, size, num_microbatches), period_s, path_s, pp)


def _block_seconds(job: Job, name: str, size: int, tp: int, pins: Pins, aware: bool) -> Float64Array:
    """[num_blocks]: forward and backward of each block of a module; with recomputation if all is recomputed."""
    cost = job.block_costs(name, size, tp)
    if not aware:
        return 3 * cost.forward_s
    return cost.forward_s + cost.backward_s + (pins.recompute == "full") * cost.recompute_s


def _stage_counts(
    slowest_s: list[Float64Array], backbone: int, most: int, pinned: Sequence[int | None]
) -> Iterator[tuple[int, ...]]:
    """Stages of each module, at most `most` in all, for each number of stages of the backbone.

    slowest_s: of each module, seconds of the slowest stage for 1, 2, ... stages. backbone: its index.
    pinned:    of each module, its number of stages; None is any.
    """
    for number in range(1, min(most, len(slowest_s[backbone])) + 1):
        if pinned[backbone] not in (None, number):
            continue
        target_s = float(slowest_s[backbone][number - 1])
        options = [
            (number,) if module == backbone else (fixed,) if fixed else nearest_stage_counts(column, target_s)
            for module, (column, fixed) in enumerate(zip(slowest_s, pinned))
        ]
        for num_stages in product(*options):
            if sum(num_stages) <= most:
                yield num_stages


def nearest_stage_counts(slowest_s: Float64Array, target_s: float) -> tuple[int, ...]:
    """The fewest stages that are no slower than the target, and one less. If all are slower: the most stages.

    slowest_s: seconds of the slowest stage for 1, 2, ... stages.

    Example:
        >>> nearest_stage_counts(np.array([8.0, 5.0, 3.0, 2.0]), target_s=4.0)
        (3, 2)
    """
    enough = np.flatnonzero(slowest_s <= target_s * (1 + 1e-9))
    number = int(enough[0]) + 1 if len(enough) else len(slowest_s)
    return (number, number - 1) if number > 1 else (number,)


def _facts(pipeline: ModalityPipeline, stages: Stages) -> Iterator[str]:
    slowest_s = [float(stages.seconds[first:stop].max()) for first, stop in zip(pipeline.first, pipeline.first[1:])]
    times = ", ".join(f"{name} {shown_seconds(seconds)}" for name, seconds in zip(pipeline.names, slowest_s))
    yield f"Slowest stage of each unit, forward and backward of a microbatch: {times}."
