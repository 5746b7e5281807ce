"""How much is recomputed so that backbone and encoders fit memory together (Optimus section 4.5).

Unlike section 4.1, activations of encoders count, of all microbatches that a pipeline takes: coarse placement holds
them all at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.plan import Unit
from motet.core.words import size_words
from motet.core.workload import BACKBONE
from motet.cost.memory import Spans, kept_bytes, stage_layers, taken_bytes, unit_spans
from motet.planner.bubble_filling.encoder_plans import EncoderPlan, EncoderPlans
from motet.planner.candidate import BUBBLE_FILLING, RuledOut
from motet.planner.stages.recompute import Fit, StageBytes, fit_rank, stage_bytes
from motet.schedule import fillable
from motet.schedule.layout import Layout
from motet.schedule.program import Kind, Program

_FILLING_MICROBATCHES = 4
"""Microbatches by pipeline rank that fill a pipeline: with more, it holds no more at any moment."""


@dataclass(frozen=True, eq=False)
class FittedPlan:
    """An encoder plan that fits. units: the backbone's, then the encoders', with what is recomputed.
    max_microbatches: how many an encoder pipeline may take. has_halves: whether its blocks may run in halves, of
    which recomputed ones keep more."""

    plan: EncoderPlan
    units: tuple[Unit, ...]
    max_microbatches: int
    has_halves: bool


class EncoderMemory:
    """Fits the encoder plans of one backbone into memory."""

    def __init__(self, plans: EncoderPlans) -> None:
        self._plans, self._job, self._shape = plans, plans.job, plans.shape
        self._bytes: dict[object, StageBytes] = {}
        self._known_spans: dict[object, list[Spans]] = {}
        self._halved: dict[object, Float64Array] = {}

    def fit(self, plan: EncoderPlan, nearest_bytes: float = inf) -> FittedPlan | RuledOut | None:
        """The least recomputation with which the plan fits, and how many microbatches an encoder pipeline may take.

        None: it lacks nearest_bytes or more, so it is not the nearest miss.
        """
        units, shape = self._plans.units(plan), self._shape
        num_pipelines = shape.pp // plan.pp
        num_microbatches = ceil(shape.num_microbatches / num_pipelines)
        by_rank: dict[int, _RankFit] = {}
        for rank in (shape.pp - 1, *range(shape.pp - 1)):  # The last rank, with the output layer, often lacks most.
            by_rank[rank] = self._fit_rank(units, rank, rank // num_pipelines, num_microbatches)
            if by_rank[rank].fit.shortfall_bytes >= nearest_bytes:
                return None
        fits, spare_whole, spare_halved = zip(*(by_rank[rank] for rank in range(shape.pp)))
        worst = max(range(shape.pp), key=lambda rank: fits[rank].shortfall_bytes)
        if fits[worst].shortfall_bytes:
            return self._ruled_out(plan, worst, fits[worst].shortfall_bytes)
        has_halves = min(spare_halved) >= 0
        max_microbatches = num_microbatches + min(spare_halved if has_halves else spare_whole)
        max_microbatches = min(max_microbatches, shape.num_microbatches)
        return FittedPlan(plan, self._recomputed(units, fits), max_microbatches, has_halves)

    def backbone_alone(self) -> Unit | None:
        """The backbone with the least recomputation that it needs without encoders; None if it lacks memory.

        Beside encoders it recomputes no less: recomputing an encoder saves no more than the encoder holds.
        """
        fits = tuple(self._fit_rank((self._plans.backbone,), rank, 0, 0).fit for rank in range(self._shape.pp))
        lacks = any(fit.shortfall_bytes for fit in fits)
        return None if lacks else self._recomputed((self._plans.backbone,), fits)[0]

    def _ruled_out(self, plan: EncoderPlan, rank: int, shortfall_bytes: float) -> RuledOut:
        done = "with nothing recomputed" if self._plans.mode == "none" else "with all layers recomputed"
        why = f"pipeline rank {rank} of {self._shape.pp} lacks {size_words(shortfall_bytes)} {done}."
        return RuledOut(BUBBLE_FILLING, f"{self._shape}; {plan}", why, shortfall_bytes)

    def _recomputed(self, units: tuple[Unit, ...], fits: tuple[Fit, ...]) -> tuple[Unit, ...]:
        """The units with what the fits of the ranks recompute. Ranks that share a pp rank of the encoders all recompute
        as many layers of these as the one that recomputes most."""
        backbone, *encoders = units
        pp, num_chunks = self._shape.pp, self._shape.num_chunks
        by_stage = [fits[stage % pp].recompute[stage // pp] for stage in range(len(backbone.stages))]
        recomputed = [replace(backbone, recompute=_or_none(by_stage))]
        for encoder, unit in enumerate(encoders):
            by_rank = [fit.recompute[num_chunks + encoder].get(unit.name, 0) for fit in fits]
            by_pp_rank = np.array(by_rank).reshape(unit.pp, -1).max(axis=1).tolist()
            recomputed.append(replace(unit, recompute=_or_none([{unit.name: count} for count in by_pp_rank])))
        return tuple(recomputed)

    def _fit_rank(self, units: tuple[Unit, ...], rank: int, pp_rank: int, num_microbatches: int) -> _RankFit:
        """Recomputation on one rank, and how many more of the encoders' microbatches could then be held.

        pp_rank: of the encoders. num_microbatches: of an encoder pipeline. The rank is fitted at the moment at which it
        holds most. With what is then recomputed another moment may hold most; that one must fit as well.
        """
        shape, moments = self._shape, self._in_flight[rank]
        # 1. The stages of the rank, the backbone's chunks first, and what each holds for one microbatch.
        stages = [(units[0], stage) for stage in range(rank, shape.pp * shape.num_chunks, shape.pp)]
        stages += [(unit, pp_rank) for unit in units[1:]]
        one = [self._stage_bytes(unit, stage) for unit, stage in stages]
        recompute_s = [self._recompute_s(unit, stage, num_microbatches) for unit, stage in stages]
        # 2. The moment at which the chunks hold most.
        kept_bytes = np.array([float(stage.kept_bytes) for stage in one[: shape.num_chunks]])
        held = moments[np.argmax(moments @ kept_bytes)]
        if self._plans.mode == "full":  # Also of stages that hold nothing at that moment.
            held = np.maximum(held, 1)
        while True:
            # 3. The fit at that moment, with all microbatches of the encoders.
            counts = [*held.tolist(), *[num_microbatches] * (len(units) - 1)]
            fit = fit_rank(list(map(_times, one, counts)), recompute_s, self._job.capacity_bytes, self._plans.mode)
            # 4. What is spare at the moment that holds most with this recomputation.
            left_bytes = np.array([_kept_bytes(stage, chosen) for stage, chosen in zip(one, fit.recompute)])
            chunk_bytes, encoder_bytes = left_bytes[: shape.num_chunks], float(left_bytes[shape.num_chunks :].sum())
            worst = moments[np.argmax(moments @ chunk_bytes)]
            spare_bytes = self._job.capacity_bytes - fit.peak_bytes - float((worst - held) @ chunk_bytes)
            if fit.shortfall_bytes or spare_bytes >= 0:
                spare_bytes = max(spare_bytes, 0.0)
                encoders = zip(stages[shape.num_chunks :], fit.recompute[shape.num_chunks :])
                halved_bytes = sum(self._halved_bytes(*stage, chosen) for stage, chosen in encoders)
                whole = spare_bytes // max(encoder_bytes, 1.0)
                halved = (spare_bytes - num_microbatches * halved_bytes) // max(encoder_bytes + halved_bytes, 1.0)
                return _RankFit(fit, *(int(min(num, shape.num_microbatches)) for num in (whole, halved)))
            held = np.maximum(held, worst)

    def _stage_bytes(self, unit: Unit, stage: int) -> StageBytes:
        """Bytes of a stage that holds one microbatch. Cached, for stages of the same layers."""
        spans = self._spans(unit)[stage]
        degrees = unit.name, unit.tp, unit.cp, unit.dp
        own = degrees, *spans.items()
        if own not in self._bytes:
            # Alike layers may take in other rows: DeepStack's enter before some blocks.
            alike = (
                degrees,
                *taken_bytes(self._job.model, spans, 1, by_stage=True),
                *(self._layers(name, *span) for name, span in spans.items()),
            )
            if alike not in self._bytes:
                self._bytes[alike] = self._counted_bytes(unit, spans)
            self._bytes[own] = self._bytes[alike]
        return self._bytes[own]

    def _spans(self, unit: Unit) -> list[Spans]:
        """The blocks of each stage of a unit. Cached, as units of the same degrees are cut alike."""
        key = unit.name, unit.pp, unit.tp, unit.cp
        if key not in self._known_spans:
            self._known_spans[key] = [unit_spans(self._job.model, unit, stage) for stage in range(len(unit.stages))]
        return self._known_spans[key]

    def _halved_bytes(self, unit: Unit, stage: int, recompute: Mapping[str, int]) -> float:
        """What the recomputed blocks of an encoder's stage keep of a microbatch beside their inputs, if passes are in
        halves: the inputs of the second ones."""
        ((name, (first, stop)),) = self._spans(unit)[stage].items()
        if not (num_recomputed := recompute.get(name, 0)):
            return 0.0
        key = unit.name, unit.tp, unit.cp, first, stop
        if key not in self._halved:
            self._halved[key] = np.array([self._half_input(unit, name, block) for block in range(first, stop)])
        return float(self._halved[key][:num_recomputed].sum())

    def _half_input(self, unit: Unit, name: str, block: int) -> int:
        module = self._job.model.module(name)
        if (index := module.halved_layer(block)) < 0:
            return 0
        layers = stage_layers(self._job.model, {name: (block, block + 1)}, {name: 1}, whole_rows=True)
        placed = layers[index - module.blocks[block].start]
        rows = self._plans.layer_pricing(unit).largest_rows(name, placed.layer) / unit.cp
        compute = self._job.mixed_precision(pipeline=True).compute
        return kept_bytes(placed, rows, unit.tp, compute)[1] if placed.has_backward else 0

    def _counted_bytes(self, unit: Unit, spans: Spans) -> StageBytes:
        pricing = self._plans.layer_pricing(unit)

        def taken_rows(name: str) -> float:
            return float(self._plans.unscheduled_pricing.layer_pricing.work.taken_in(name).max())

        model, precision = self._job.model, self._job.mixed_precision(pipeline=True)
        # Where sums are not apart, tensor-parallel ranks keep less; which are is not known yet.
        return stage_bytes(
            model,
            unit,
            spans,
            pricing.largest_rows,
            taken_rows,
            1,
            precision,
            copies=pricing.largest_copies,
            whole_rows=True,
        )

    def _layers(self, name: str, first: int, stop: int) -> tuple[object, ...]:
        """What tells apart the layers of some blocks of a module; layers that are one object are the same."""
        module, needs_input = self._job.model.module(name), self._job.model.input_gradients[name]
        blocks = module.blocks[first:stop]
        return tuple((id(module.layers[index]), needs_input[index], len(block)) for block in blocks for index in block)

    def _recompute_s(self, unit: Unit, stage: int, num_microbatches: int) -> dict[str, Float64Array]:
        """Seconds that recomputing each block of a stage adds to a step, by module: [num_blocks].

        num_microbatches: of an encoder pipeline.
        """
        count = self._shape.num_microbatches if unit.name == BACKBONE else num_microbatches
        spans = self._spans(unit)[stage]
        return {name: count * self._plans.costs(unit).recompute_s[slice(*span)] for name, span in spans.items()}

    @cached_property
    def _in_flight(self) -> list[Int64Array]:
        """Per rank: microbatches of each of its stages that are held at once, [num_moments, num_chunks]."""
        shape, num = self._shape, self._shape.num_microbatches
        plan = self._plans.example
        if shape.num_chunks == 1 or num % shape.pp == 0:  # Otherwise chunks take groups that are not alike.
            num = min(num, _FILLING_MICROBATCHES * shape.pp)
        if shape.num_chunks == 1:
            has_backward = Layout(plan).has_backward[BACKBONE]
            return [in_flight_under_1f1b(shape.pp - rank, num, has_backward[rank]) for rank in range(shape.pp)]
        program = fillable(replace(plan, batch_size=shape.dp * shape.microbatch_size * num))[0].program
        return [in_flight(program, rank) for rank in range(shape.pp)]


class _RankFit(NamedTuple):
    """What a rank recomputes, and how many more of the encoders' microbatches it could then hold: if their passes are
    of whole blocks, and in halves; below 0 if it cannot hold those that there are."""

    fit: Fit
    spare_whole: int
    spare_halved: int


def in_flight_under_1f1b(num_behind: int, num_microbatches: int, has_backward: bool) -> Int64Array:
    """`in_flight` of a rank of 1F1B with one stage, without a Program. num_behind: ranks from this one to the last."""
    held = np.arange(num_microbatches + 1)
    return (held[: num_behind + 1] if has_backward else held[1:])[:, None]


def in_flight(program: Program, rank: int) -> Int64Array:
    """How many microbatches of each stage of a rank are held, at all moments that differ: [num_moments, num_stages]."""
    stages = [number for number, stage in enumerate(program.stages) if stage.rank == rank]
    column = {stage: index for index, stage in enumerate(stages)}
    row = [action for action in program.actions[rank] if action.kind in (Kind.F, Kind.B, Kind.W) and action.part <= 0]
    change = np.zeros((len(row), len(stages)), dtype=np.int64)
    for moment, action in enumerate(row):
        change[moment, column[action.stage]] = 1 if action.kind is Kind.F else -1
    return np.unique(change.cumsum(axis=0), axis=0)


def _times(stage: StageBytes, count: int) -> StageBytes:
    """The stage with count microbatches instead of one."""
    saved_bytes = {name: count * column for name, column in stage.saved_bytes.items()}
    return replace(stage, kept_bytes=count * stage.kept_bytes, saved_bytes=saved_bytes)


def _kept_bytes(stage: StageBytes, recompute: Mapping[str, int]) -> float:
    """What a stage still keeps if the first blocks of its modules are recomputed."""
    return stage.kept_bytes - sum(float(stage.saved_bytes[name][:count].sum()) for name, count in recompute.items())


def _or_none(recompute: list[Mapping[str, int]]) -> tuple[Mapping[str, int], ...]:
    """The counts of stages as `Unit.recompute` has them: () where nothing is recomputed."""
    counts = tuple({name: count for name, count in stage.items() if count} for stage in recompute)
    return counts if any(counts) else ()
