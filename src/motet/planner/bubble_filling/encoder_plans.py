"""Encoders beside a backbone's pipeline: with which parallelism, and how much is recomputed so that both fit memory
(Optimus sections 3.1, 4.1 and 4.5).

PP_enc divides PP_llm and TP_enc divides TP_llm, which gives m = DP_enc / DP_llm pipelines of encoders to each of the
backbone's. Unlike section 4.1, activations of encoders count, of all microbatches that a pipeline takes: coarse
placement holds them all at once. A microbatch is not cut below an example, so TP_enc is TP_llm divided by no more than
the examples of a microbatch. Encoders in one plan have the same PP, and TPs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, inf
from typing import Literal

import numpy as np

from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Fill, Plan, ScheduleKind, Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.memory import unit_spans
from motet.planner.candidate import BUBBLE_FILLING, RuledOut, size_words
from motet.planner.job import BlockCosts, Job
from motet.planner.stages.partition import partition
from motet.planner.stages.recompute import Fit, StageBytes, fit_rank, stage_bytes
from motet.schedule import fillable
from motet.schedule.from_plan import unscheduled
from motet.schedule.layout import Layout
from motet.schedule.program import Kind, Program
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing

_FILLED = 4
"""Microbatches by pipeline rank that fill a pipeline: with more, it holds no more at any moment."""


@dataclass(frozen=True)
class PipelineShape:
    """A backbone on as many ranks as divide. chunks: stages of each pipeline rank. estimate_s: of the step.
    bound_s: of what a rank computes of it and of the encoders, at least.
    """

    tp: int
    pp: int
    dp: int
    chunks: int
    microbatch_size: int
    num_microbatches: int
    estimate_s: float = 0.0
    bound_s: float = 0.0

    @property
    def schedule(self) -> ScheduleKind:
        return "interleaved_1f1b" if self.chunks > 1 else "1f1b"

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return f"TP {self.tp}, PP {self.pp}{chunks}, DP {self.dp}, microbatches of {self.microbatch_size}"


@dataclass(frozen=True)
class EncoderPlan:
    """pp: of all encoders. tp: of each, by name."""

    pp: int
    tp: Mapping[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{name} TP {tp}" for name, tp in self.tp.items()) + f", PP {self.pp} in bubbles"


@dataclass(frozen=True, eq=False)
class Fitted:
    """An encoder plan that fits. units: the backbone's, then the encoders'. most: microbatches of a pipeline."""

    plan: EncoderPlan
    units: tuple[Unit, ...]
    most: int


class EncoderPlans:
    """Of encoders beside one backbone, from all that divide its degrees. mode: what is recomputed."""

    def __init__(self, job: Job, shape: PipelineShape, mode: Literal["none", "least", "full"] = "least") -> None:
        self.job, self.shape, self.mode = job, shape, mode
        self.encoders = encoders_of(job)
        costs = job.block_costs(BACKBONE, shape.microbatch_size, shape.tp)
        counts = partition((costs.forward_s + costs.backward_s).tolist(), shape.pp, num_chunks=shape.chunks)
        stages = tuple({BACKBONE: count} for count in counts)
        self.backbone = Unit(BACKBONE, stages, dp=shape.dp, pp=shape.pp, tp=shape.tp)
        self._bytes: dict[object, StageBytes] = {}
        self._learns: dict[int, Mapping[str, tuple[bool, ...]]] = {}

    def __iter__(self) -> Iterator[EncoderPlan]:
        """What divides the backbone's degrees, and leaves a block to each stage, a microbatch to each pipeline, and
        whole examples to each rank."""
        shape, blocks = self.shape, [len(self.job.model.module(name).blocks) for name in self.encoders]
        for pp in divisors(shape.pp):
            if pp <= min(blocks) and shape.pp // pp <= shape.num_microbatches:
                for degrees in product(encoder_degrees(shape), repeat=len(self.encoders)):
                    yield EncoderPlan(pp, dict(zip(self.encoders, degrees)))

    def units(self, plan: EncoderPlan) -> tuple[Unit, ...]:
        """The backbone and the encoders beside it; nothing is recomputed."""
        found = [self.backbone]
        for name, tp in plan.tp.items():
            costs = self.job.block_costs(name, self.shape.microbatch_size * tp / self.shape.tp, tp)
            counts = partition((costs.forward_s + costs.backward_s).tolist(), plan.pp)
            dp = self.backbone.num_ranks // (plan.pp * tp)
            found.append(Unit(name, tuple({name: count} for count in counts), dp=dp, pp=plan.pp, tp=tp))
        return tuple(found)

    def plan(self, units: tuple[Unit, ...], fills: tuple[Fill, ...] = ()) -> Plan:
        """Of these units, the backbone's first, in the shape of this backbone."""
        job = self.job
        return Plan(
            job.model,
            job.cluster,
            units,
            job.batch_size,
            self.shape.microbatch_size,
            self.shape.schedule,
            deferred_warmup=self.shape.chunks > 1,
            precision=job.precision,
            fills=fills,
        )

    def costs(self, unit: Unit) -> BlockCosts:
        (name,) = unit.modules
        return self.job.block_costs(name, self.shape.microbatch_size * unit.tp / self.shape.tp, unit.tp)

    @cached_property
    def _any(self) -> Plan:
        """With encoders of some plan, and no recomputation."""
        return self.plan(self.units(next(iter(self))))

    @cached_property
    def _pricing(self) -> Pricing:
        """Of the backbone's stages without passes."""
        return Pricing(self._any, unscheduled(Layout(self._any)), self._assignment, self.job.cost)

    def priced(self, units: tuple[Unit, ...]) -> Pricing:
        """Of the backbone's stages alone."""
        plan = self.plan(units)
        return Pricing(plan, fillable(plan)[0], self._assignment, self.job.cost)

    def busiest_s(self, units: tuple[Unit, ...]) -> float:
        """Of the backbone's ranks in all replicas, the one with the most to do: a step takes no less. Rounded down."""
        plan = self.plan(units)
        pricing = Pricing(plan, unscheduled(Layout(plan)), self._assignment, self.job.cost)
        taken_s = np.zeros((self.shape.pp, pricing.num_islands))
        for stage in pricing.planned.stages:
            taken_s[stage.rank] += np.sum(pricing.islands(stage)[:-1], axis=(0, 2))
        return float(taken_s.max()) * (1 - 1e-9)

    @cached_property
    def _assignment(self) -> StepAssignment:
        """The same whatever is recomputed, and beside whichever encoders."""
        return assign_batch(self._any, self.job.batch, self.job.cost)

    @cached_property
    def in_flight(self) -> list[Int64Array]:
        """Per rank: microbatches of each of its stages that are held at once, [num_moments, num_chunks]."""
        own, num = self.shape, self.shape.num_microbatches
        if own.chunks == 1 or num % own.pp == 0:  # Else chunks take groups that are not alike.
            num = min(num, _FILLED * own.pp)
        program = fillable(replace(self._any, batch_size=own.dp * own.microbatch_size * num))[0].program
        return [_in_flight(program, rank) for rank in range(own.pp)]

    def fit(self, plan: EncoderPlan, nearest_bytes: float = inf) -> Fitted | RuledOut | None:
        """The least recomputation with which the plan fits, and how many microbatches an encoder pipeline may take.

        None: it lacks nearest_bytes or more, and is not the nearest miss.
        """
        units, shape = self.units(plan), self.shape
        num_pipelines = shape.pp // plan.pp
        most = ceil(shape.num_microbatches / num_pipelines)
        found: dict[int, tuple[Fit, int]] = {}
        for rank in (shape.pp - 1, *range(shape.pp - 1)):  # The last, with the output layer, often lacks most.
            found[rank] = self._fit_rank(units, rank, rank // num_pipelines, most)
            if found[rank][0].shortfall_bytes >= nearest_bytes:
                return None
        fits, spare = zip(*(found[rank] for rank in range(shape.pp)))
        worst = max(range(shape.pp), key=lambda rank: fits[rank].shortfall_bytes)
        if fits[worst].shortfall_bytes:
            lacks = fits[worst].shortfall_bytes
            done = "with nothing recomputed" if self.mode == "none" else "with all layers recomputed"
            why = f"pipeline rank {worst} of {shape.pp} lacks {size_words(lacks)} {done}."
            return RuledOut(BUBBLE_FILLING, f"{shape}; {plan}", why, lacks)
        backbone = [fits[stage % shape.pp].recompute[stage // shape.pp] for stage in range(len(self.backbone.stages))]
        recomputed = [replace(units[0], recompute=_or_none(backbone))]
        for number, unit in enumerate(units[1:]):
            of_rank = [fit.recompute[shape.chunks + number].get(unit.name, 0) for fit in fits]
            places = [max(of_rank[place * num_pipelines : (place + 1) * num_pipelines]) for place in range(plan.pp)]
            recomputed.append(replace(unit, recompute=_or_none([{unit.name: count} for count in places])))
        return Fitted(plan, tuple(recomputed), min(most + min(spare), shape.num_microbatches))

    def _fit_rank(self, units: tuple[Unit, ...], rank: int, place: int, most: int) -> tuple[Fit, int]:
        """Recomputation on one rank, and how many more of the encoders' microbatches could then be held.

        Where another moment turns out to hold more than the one that was fitted, that one must fit as well.
        """
        shape, moments = self.shape, self.in_flight[rank]
        places = [(units[0], stage) for stage in range(rank, shape.pp * shape.chunks, shape.pp)]
        places += [(unit, place) for unit in units[1:]]
        single = [self._stage_bytes(unit, stage) for unit, stage in places]
        kept = np.array([float(stage.kept_bytes) for stage in single])
        recompute_s = [self._again_s(unit, stage, most) for unit, stage in places]
        encoders = np.full(len(units) - 1, most)
        held = moments[np.argmax(moments @ kept[: shape.chunks])]
        if self.mode == "full":  # also of stages that hold nothing at that moment
            held = np.maximum(held, 1)
        while True:
            count = np.concatenate([held, encoders])
            fit = fit_rank(list(map(_times, single, count.tolist())), recompute_s, self.job.capacity_bytes, self.mode)
            left = np.array([_kept(stage, chosen) for stage, chosen in zip(single, fit.recompute)])
            chunks, beside = left[: shape.chunks], float(left[shape.chunks :].sum())
            worst = moments[np.argmax(moments @ chunks)]
            spare_bytes = self.job.capacity_bytes - fit.peak_bytes - float((worst - held) @ chunks)
            if fit.shortfall_bytes or spare_bytes >= 0:
                return fit, int(min(max(spare_bytes, 0.0) // max(beside, 1.0), shape.num_microbatches))
            held = np.maximum(held, worst)

    def _stage_bytes(self, unit: Unit, stage: int) -> StageBytes:
        """For one microbatch."""
        spans = unit_spans(self.job.model, unit, stage)
        key = unit.name, unit.tp, unit.dp, tuple(spans.items())
        if key not in self._bytes:
            share = unit.tp / self.shape.tp

            def rows(name: str, layer: Layer) -> float:
                return share * self._pricing.largest_rows(name, layer)

            precision = self.job.mixed_precision(pipeline=True)
            self._bytes[key] = stage_bytes(self.job.model, unit, spans, rows, 1, precision)
        return self._bytes[key]

    def _again_s(self, unit: Unit, stage: int, most: int) -> dict[str, Float64Array]:
        """In a step."""
        count = self.shape.num_microbatches if unit.name == BACKBONE else most
        spans = unit_spans(self.job.model, unit, stage)
        return {name: count * self.costs(unit).recompute_s[slice(*span)] for name, span in spans.items()}

    def learns(self, pp: int) -> Mapping[str, tuple[bool, ...]]:
        """Of the encoders' stages, which have backward passes."""
        if pp not in self._learns:
            plan = self.plan(self.units(next(one for one in self if one.pp == pp)))
            has_backward = Layout(plan).has_backward
            self._learns[pp] = {name: has_backward[name] for name in self.encoders}
        return self._learns[pp]


def encoders_of(job: Job) -> list[str]:
    return [module.name for module in job.model.modules if module.name != BACKBONE]


def encoder_degrees(shape: PipelineShape) -> list[int]:
    """Tensor parallelism of encoders that leaves whole examples to each rank."""
    return [tp for tp in divisors(shape.tp) if shape.microbatch_size % (shape.tp // tp) == 0]


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _in_flight(program: Program, rank: int) -> Int64Array:
    """How many microbatches of each stage of a rank are held, at all moments that differ: [num_moments, num_stages]."""
    stages = [number for number, stage in enumerate(program.stages) if stage.rank == rank]
    place = {stage: column for column, stage in enumerate(stages)}
    row = [action for action in program.actions[rank] if action.kind in (Kind.F, Kind.B, Kind.W) and action.part <= 0]
    change = np.zeros((len(row), len(stages)), dtype=np.int64)
    for moment, action in enumerate(row):
        change[moment, place[action.stage]] = 1 if action.kind is Kind.F else -1
    return np.unique(change.cumsum(axis=0), axis=0)


def _times(stage: StageBytes, count: int) -> StageBytes:
    spared = {name: count * column for name, column in stage.saved_bytes.items()}
    return replace(stage, kept_bytes=count * stage.kept_bytes, saved_bytes=spared)


def _kept(stage: StageBytes, recompute: Mapping[str, int]) -> float:
    return stage.kept_bytes - sum(float(stage.saved_bytes[name][:count].sum()) for name, count in recompute.items())


def _or_none(recompute: list[Mapping[str, int]]) -> tuple[Mapping[str, int], ...]:
    """As `Unit.recompute` has it."""
    some = tuple({name: count for name, count in stage.items() if count} for stage in recompute)
    return some if any(some) else ()
