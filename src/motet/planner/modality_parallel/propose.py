"""Every module on ranks of its own, encoders beside each other, in as many stages as make all of them even.

Cornstarch, Algorithm 1 (section 5.2): for each number of stages of the backbone, what its slowest stage takes is the
target of every encoder, which gets the number of stages that comes nearest to it; the best number is taken. Seconds are
of forward and backward, by what is frozen, and where, and of what is recomputed (section 4.2, with the erratum that
adds recomputation). "Nearest" is tried on both sides: the fewest stages that are no slower than the target, and one
less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, product

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Plan, Unit
from motet.core.workload import BACKBONE
from motet.planner.candidate import MODALITY_PARALLEL, Candidate, Pins, RuledOut, size_words
from motet.planner.degrees import allowed_microbatch_sizes, most_replicas
from motet.planner.infeasible import indivisible, not_apart, nothing_divides, tensor_degrees
from motet.planner.job import Job
from motet.planner.stages.blocks import Blocks, blocks_of, join
from motet.planner.stages.partition import partition, slowest_stages
from motet.planner.stages.recompute import RecomputeMode
from motet.planner.stages.stage_costs import StageLimits, Stages, settle, stage_numbers
from motet.planner.stages.step_time import StageGraph, exposed_collectives_s, pipeline_s, work_s
from motet.planner.stages.unevenness import unevenness
from motet.schedule.generators.modality_parallel import modality_parallel as passes
from motet.simulate.show.drawing import shown_seconds

NUM_CANDIDATES = 3
_NUM_CUT = 16
_NUM_RULED_OUT = 2


@dataclass(frozen=True)
class ModalityDegrees:
    """num_stages: of each module."""

    num_stages: tuple[int, ...]
    tp: int
    dp: int
    microbatch_size: int
    num_microbatches: int


@dataclass(frozen=True, eq=False)
class ModalityPipeline:
    """A job with its modules side by side, in a shape. aware: cut by what is frozen; if not, by forward alone."""

    job: Job
    shape: ModalityDegrees
    mode: RecomputeMode = "least"
    aware: bool = True

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(module.name for module in self.job.model.modules)

    @cached_property
    def blocks(self) -> Blocks:
        own = self.shape
        return join(tuple(blocks_of(self.job, (name,), own.microbatch_size, own.tp, own.dp) for name in self.names))

    @cached_property
    def room(self) -> StageLimits:
        number = dict(zip(self.names, self.shape.num_stages))
        before, after = _sides(self.job)
        num_stages = sum(self.shape.num_stages)
        program = passes(
            {name: number[name] for name in before},
            number[BACKBONE],
            min(self.shape.num_microbatches, 2 * num_stages),
            generators={name: number[name] for name in after},
        )
        return StageLimits.of(program, self.job.capacity_bytes, self.mode)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The first stage of each module, and one after the last."""
        return tuple(accumulate(self.shape.num_stages, initial=0))

    @cached_property
    def flow(self) -> StageGraph:
        edges = [
            (stage, stage + 1) for first, stop in zip(self.first, self.first[1:]) for stage in range(first, stop - 1)
        ]
        place = {name: number for number, name in enumerate(self.names)}
        edges += [(self.first[place[source] + 1] - 1, self.first[place[sink]]) for source, sink in self.job.model.edges]
        own = self.shape
        deepest = max(self.shape.num_stages[place[name]] for name in _sides(self.job)[0]) if _sides(self.job)[0] else 0
        pp = deepest + self.shape.num_stages[place[BACKBONE]]
        uneven = unevenness(self.job, own.microbatch_size, own.tp, ("1f1b", pp, own.dp))
        return StageGraph("1f1b", own.num_microbatches, self.room.rank, tuple(edges), uneven)

    def send_s(self, stages: Stages) -> Float64Array:
        """[num_edges]"""
        size = self.shape.dp * self.shape.tp
        cost, sent = self.job.cost, stages.output_bytes
        ends = [(source * size, sink * size) for source, sink in self.flow.edges]
        return np.array([float(cost.send_seconds(sent[edge[:1],], two)[0]) for edge, two in zip(self.flow.edges, ends)])

    def step_s(self, stages: Stages) -> float:
        own = self.shape
        size = own.dp * own.tp
        data_ranks = [range(stage * size, (stage + 1) * size, own.tp) for stage in range(self.first[-1])]
        return pipeline_s(self.flow, stages, self.send_s(stages)) + exposed_collectives_s(
            self.job, stages, self.room.rank, data_ranks
        )

    def cut(self, block_s: Float64Array) -> Int64Array:
        """Each module by itself."""
        counted = block_s if self.aware else self.blocks.forward_s
        parts = [
            first + stage_numbers(partition(counted[self.blocks.owner == place].tolist(), number))
            for place, (first, number) in enumerate(zip(self.first, self.shape.num_stages))
        ]
        return np.concatenate(parts)

    def settled(self) -> Stages:
        return settle(self.blocks, self.room, self.cut, self.step_s)

    def plan(self, stages: Stages) -> Plan:
        job, own = self.job, self.shape
        units, first_rank = [], 0
        for place, (name, number) in enumerate(zip(self.names, own.num_stages)):
            span = slice(self.first[place], self.first[place + 1])
            recompute = stages.recompute[span]
            recompute = recompute if any(recompute) else ()
            layers = stages.layers[span]
            units.append(Unit(name, layers, first_rank, own.dp, number, own.tp, recompute=recompute, zero=1))
            first_rank += units[-1].num_ranks
        return Plan(
            job.model, job.cluster, tuple(units), job.batch_size, own.microbatch_size, "1f1b", precision=job.precision
        )

    @property
    def words(self) -> str:
        stages = ", ".join(f"{name} {number}" for name, number in zip(self.names, self.shape.num_stages))
        return (
            f"stages {stages}; TP {self.shape.tp}, DP {self.shape.dp}, 1F1B, "
            f"microbatches of {self.shape.microbatch_size}"
        )


def propose_modality_parallel(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """The best that fit, best estimate first; then the nearest of those that do not."""
    if why := not_apart(job, pins) or indivisible(job, pins, len(job.model.module(BACKBONE).blocks)):
        yield RuledOut(MODALITY_PARALLEL, "", why)
        return
    mode: RecomputeMode = pins.recompute or "least"
    options = list(modality_degrees(job, pins))
    if not options:
        yield RuledOut(MODALITY_PARALLEL, "", nothing_divides(job))
    found: list[tuple[float, ModalityPipeline, Stages]] = []
    full: list[tuple[float, ModalityPipeline, Stages]] = []

    def cut(shape: ModalityDegrees) -> None:
        own = ModalityPipeline(job, shape, mode)
        stages = own.settled()
        (full if stages.shortfall_bytes else found).append((stages.shortfall_bytes or own.step_s(stages), own, stages))

    for at_best_s, shape in options[:_NUM_CUT]:
        enough = sorted(step_s for step_s, _, _ in found)[:NUM_CANDIDATES]
        if len(enough) == NUM_CANDIDATES and at_best_s >= enough[-1]:
            break
        cut(shape)
    widest = sorted(options, key=lambda entry: (-entry[1].tp * sum(entry[1].num_stages), entry[1].microbatch_size))
    for _, shape in widest[:_NUM_CUT]:
        if found:
            break
        cut(shape)
    for step_s, own, stages in sorted(found, key=lambda entry: entry[0])[:NUM_CANDIDATES]:
        facts = tuple(_facts(own, stages))
        yield Candidate(MODALITY_PARALLEL, own.words, own.plan(stages), step_s, work_s(own.flow, stages), facts)
    for shortfall_bytes, own, stages in sorted(full, key=lambda entry: entry[0])[:_NUM_RULED_OUT]:
        yield RuledOut(MODALITY_PARALLEL, own.words, _lacks(own, stages, pins), shortfall_bytes)


def _lacks(own: ModalityPipeline, stages: Stages, pins: Pins) -> str:
    stage = int(np.argmax(stages.fullness))
    place = int(np.searchsorted(own.first, stage, side="right")) - 1
    recomputed = "with nothing recomputed" if pins.recompute == "none" else "with all layers recomputed"
    where = f"stage {stage - own.first[place]} of {own.names[place]}"
    return f"{where} lacks {size_words(stages.shortfall_bytes)} {recomputed}."


def _sides(job: Job) -> tuple[list[str], list[str]]:
    """The modules that feed the backbone alone, and those that it alone feeds."""
    model = job.model
    before = [source for source, sink in model.edges if sink == BACKBONE and not model.sources(source)]
    after = [sink for source, sink in model.edges if source == BACKBONE and model.sources(sink) == (BACKBONE,)]
    return before, after


def modality_degrees(job: Job, pins: Pins, *, aware: bool = True) -> Iterator[tuple[float, ModalityDegrees]]:
    """Algorithm 1 for each degree of tensor parallelism and microbatch: (seconds at best, shape), fewest first.

    aware: of what is frozen; if not, as if backward took twice as long as forward everywhere.
    """
    found = [
        entry for tp in tensor_degrees(job) if pins.allow(tp=tp) for entry in _of_tensor_degree(job, pins, tp, aware)
    ]
    return iter(sorted(dict.fromkeys(found), key=lambda entry: entry[0]))


def _of_tensor_degree(job: Job, pins: Pins, tp: int, aware: bool) -> Iterator[tuple[float, ModalityDegrees]]:
    names = [module.name for module in job.model.modules]
    most = job.cluster.num_ranks // tp
    uneven = cache(lambda size, pp, dp: unevenness(job, size, tp, ("1f1b", pp, dp)))
    for size in allowed_microbatch_sizes(job, 1, pins):
        costs = [job.block_costs(name, size, tp) for name in names]
        again = pins.recompute == "full"
        times = [
            cost.forward_s + cost.backward_s + again * cost.recompute_s if aware else 3 * cost.forward_s
            for cost in costs
        ]
        totals = [float(column.sum()) for column in times]
        seconds = [slowest_stages(column.tolist(), most) for column in times]
        for num_stages in _counts(seconds, names.index(BACKBONE), most, pins.pp):
            dp = most_replicas(job, tp * sum(num_stages), pins)
            if not dp or size not in allowed_microbatch_sizes(job, dp, pins):
                continue
            num = job.batch_size // (dp * size)
            slowest_s = max(float(column[number - 1]) for column, number in zip(seconds, num_stages))
            beside = [place for place in range(len(names)) if names[place] != BACKBONE]
            longest_s = totals[names.index(BACKBONE)] + max(totals[place] for place in beside)
            deepest = num_stages[names.index(BACKBONE)] + max(num_stages[place] for place in beside)
            steady_s = (num - 1) * slowest_s * uneven(size, deepest, dp)
            yield steady_s + longest_s, ModalityDegrees(num_stages, tp, dp, size, num)


def _counts(seconds: list[Float64Array], backbone: int, most: int, pinned: int | None) -> Iterator[tuple[int, ...]]:
    """Stages of each module, for each number of stages of the backbone; `most` in all."""
    for number in range(1, min(most, len(seconds[backbone])) + 1):
        if pinned not in (None, number):
            continue
        options = [
            (number,) if place == backbone else _nearest(column, float(seconds[backbone][number - 1]))
            for place, column in enumerate(seconds)
        ]
        for num_stages in product(*options):
            if sum(num_stages) <= most:
                yield num_stages


def _nearest(slowest_s: Float64Array, target_s: float) -> tuple[int, ...]:
    """The fewest stages that are no slower than the target, and one less; all there are, where none is as fast."""
    enough = np.flatnonzero(slowest_s <= target_s * (1 + 1e-9))
    number = int(enough[0]) + 1 if len(enough) else len(slowest_s)
    return (number, number - 1) if number > 1 else (number,)


def _facts(own: ModalityPipeline, stages: Stages) -> Iterator[str]:
    slowest = [float(stages.seconds[first:stop].max()) for first, stop in zip(own.first, own.first[1:])]
    times = ", ".join(f"{name} {shown_seconds(second)}" for name, second in zip(own.names, slowest))
    yield f"Slowest stage of each unit, forward and backward of a microbatch: {times}."
