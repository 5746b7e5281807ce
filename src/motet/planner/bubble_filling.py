"""Encoders on the ranks of the backbone's pipeline, their work in its bubbles (Optimus sections 3.1, 4.1 and 4.5).

Algorithm 1: a 3D-parallel backbone (interleaved 1F1B with deferred warm-up, or 1F1B), and beside it encoders with a
parallelism of their own, PP_enc dividing PP_llm and TP_enc dividing TP_llm, which gives m = DP_enc / DP_llm pipelines
of encoders to each of the backbone's. Backbones are ranked in closed form; the best are simulated, alone and once.
Encoder plans that do not fit memory are dropped: unlike section 4.1, activations of encoders count, of all microbatches
that a pipeline takes, since coarse placement holds them all at once. Of the others the one whose work is best placed
(`bubbles.py`) is proposed, with the slices where they were placed, and, beside it, with whole passes before and after
the backbone's.

A microbatch is not cut below an example, so TP_enc is TP_llm divided by no more than the examples of a microbatch.
Encoders in one plan have the same PP, and TPs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from motet.core.plan import Fill, Plan, Unit
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.memory import unit_spans
from motet.planner.backbone_bubbles import Backbone, Slices, backbone_of
from motet.planner.bubbles import Encoders, Filling, Placement, fill
from motet.planner.candidate import Candidate, Pins, RuledOut
from motet.planner.job import BlockCosts, Column, Job
from motet.planner.partition import partition
from motet.planner.recompute import Fit, StageBytes, fit_rank, stage_bytes
from motet.schedule import PlannedStage, add_communication, add_data_parallel, fillable, planned, split_parts
from motet.schedule.layout import LAYER_PARTS
from motet.schedule.program import Kind, Program
from motet.simulate import simulate
from motet.simulate.predict import place_batch, stage_times_of
from motet.simulate.pricing import Pricing
from motet.simulate.times import Part, StageTimes
from motet.simulate.traffic import Traffic

STRATEGY = "bubble filling"
MAX_BACKBONES = 2
"""That are simulated and filled: the best by estimate of those that fit."""
SLICES = 8
"""Of an encoder's layer and pass: it has some 15 kernels, and tensor-parallel communication leaves room for about one
of ViT-22B's slices at a time (Optimus section 2.3)."""
HARDLY = 0.002
"""By which a step may take longer for fewer slices."""
MAX_FILLS, MAX_PARTS = 60_000, 200_000
"""Slices of encoders, and parts of the backbone's passes, above which layers are cut into fewer, and passes are not."""
_ISLANDS = 8
"""Replicas of the backbone over whose microbatches seconds are averaged."""


@dataclass(frozen=True)
class _Shape:
    """A backbone. estimate_s: of the step."""

    tp: int
    pp: int
    dp: int
    chunks: int
    microbatch_size: int
    num_microbatches: int
    estimate_s: float

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return f"TP {self.tp}, PP {self.pp}{chunks}, DP {self.dp}, microbatches of {self.microbatch_size}"


def bubble_filling(job: Job, pins: Pins) -> Iterator[Candidate | RuledOut]:
    """Encoders in the bubbles of the best backbones, finely and coarsely placed."""
    if why := _never(job, pins):
        yield RuledOut(STRATEGY, "encoders beside the backbone", why)
        return
    shapes = sorted(_shapes(job, pins), key=lambda shape: shape.estimate_s)
    if not shapes:
        why = f"no TP, PP of at least 2 and microbatch size take {job.batch_size} examples on {job.cluster.num_ranks} "
        yield RuledOut(STRATEGY, "any degrees", why + "ranks in equal microbatches.")
    num_proposed = 0
    for shape in shapes:
        proposed = list(_Filler(job, pins, shape).proposals())
        yield from proposed
        num_proposed += any(isinstance(one, Candidate) for one in proposed)
        if num_proposed == MAX_BACKBONES:
            return


def _never(job: Job, pins: Pins) -> str:
    encoders = _encoders(job)
    if not encoders:
        return "the model has no encoders to run in bubbles."
    if set(job.model.edges) != {(name, BACKBONE) for name in encoders}:
        return "bubbles are filled with modules that feed the backbone alone, and the model has others."
    if not (pins.allow(schedule="interleaved_1f1b") or pins.allow(schedule="1f1b")):
        return f"the schedule is pinned to {pins.schedule!r}; bubbles are filled under 'interleaved_1f1b' and '1f1b'."
    if not pins.allow(balance="off"):
        return f"balance is pinned to {pins.balance!r}; in a pipeline it is 'off'."
    return ""


def _encoders(job: Job) -> list[str]:
    return [module.name for module in job.model.modules if module.name != BACKBONE]


def _shapes(job: Job, pins: Pins) -> Iterator[_Shape]:
    """The backbones that use all ranks, each with the number of chunks that is estimated best."""
    num_ranks, num_blocks = job.cluster.num_ranks, len(job.model.module(BACKBONE).blocks)
    for tp, pp in product(_divisors(job.cluster.ranks_per_node), _divisors(num_ranks)):
        dp, left = divmod(num_ranks, tp * pp)
        if left or not 2 <= pp <= num_blocks or tp > 8 or not pins.allow(tp=tp, pp=pp, dp=dp):
            continue
        for microbatch_size in (1, 2, 4, 8):
            count, left = divmod(job.batch_size, dp * microbatch_size)
            if left or not count or not pins.allow(microbatch_size=microbatch_size):
                continue
            chunks = [n for n in range(1, num_blocks // pp + 1) if num_blocks % (pp * n) == 0 or n == 1]
            chunks = [n for n in chunks if pins.allow(schedule=_schedule(n))]
            sized = [_estimated(job, _Shape(tp, pp, dp, n, microbatch_size, count, 0.0)) for n in chunks]
            yield from sorted(sized, key=lambda shape: shape.estimate_s)[:1]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _schedule(chunks: int) -> str:
    return "interleaved_1f1b" if chunks > 1 else "1f1b"


def _estimated(job: Job, shape: _Shape) -> _Shape:
    """The backbone's passes, and its bubbles or the encoders' work, whichever is more.

    What lacks of memory for a whole model's activations in flight is recomputed; a backbone without room for its own
    parameters comes last.
    """
    costs = job.block_costs(BACKBONE, shape.microbatch_size, shape.tp)
    precision, devices = job.mixed_precision(pipeline=True), shape.pp * shape.tp
    encoder_s = sum(
        float((own.forward_s + own.backward_s).sum())
        for own in (job.block_costs(name, shape.microbatch_size, shape.tp) for name in _encoders(job))
    )
    learning = sum(module.num_parameters for module in job.model.modules) / devices
    state_bytes = learning * (precision.stored + precision.gradient + precision.optimizer / shape.dp)
    lacking = state_bytes + float(costs.kept_bytes.sum()) - job.capacity_bytes
    again = min(max(lacking / max(float(costs.spared_bytes.sum()), 1.0), 0.0), 1.0)
    pass_s = float((costs.forward_s + costs.backward_s + again * costs.again_s).sum()) / shape.pp
    chunk_bytes = float(costs.parameters.sum()) / (shape.pp * shape.chunks)
    ranks = range(0, shape.dp * shape.tp, shape.tp)
    data_s = job.cost.gather_seconds(chunk_bytes * precision.compute, ranks)
    data_s += job.cost.gather_seconds(chunk_bytes * precision.gradient, ranks)
    ends = 0, (shape.pp - 1) * shape.dp * shape.tp
    sends_s = 2 * shape.pp * shape.chunks * float(job.cost.send_seconds(costs.output_bytes.max(keepdims=True), ends)[0])
    bubbles_s = (shape.pp - 1) * pass_s / shape.chunks + data_s + sends_s
    step_s = shape.num_microbatches * pass_s + max(bubbles_s, shape.num_microbatches * encoder_s / shape.pp)
    return replace(shape, estimate_s=step_s * (1 if state_bytes < job.capacity_bytes else 1e3))


@dataclass(frozen=True)
class _EncoderPlan:
    """pp: of all encoders. tp: of each, by name. what: for messages."""

    pp: int
    tp: Mapping[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{name} TP {tp}" for name, tp in self.tp.items()) + f", PP {self.pp} in bubbles"


@dataclass(frozen=True, eq=False)
class _Fitted:
    """An encoder plan that fits. units: the backbone's, then the encoders'. most: microbatches of a pipeline."""

    plan: _EncoderPlan
    units: tuple[Unit, ...]
    most: int


class _Timed(NamedTuple):
    """The backbone without encoders: its stages, what they take, and its Program."""

    stages: tuple[PlannedStage, ...]
    times: StageTimes
    program: Program


class _Filler:
    """Proposes encoders beside one backbone."""

    def __init__(self, job: Job, pins: Pins, shape: _Shape) -> None:
        self.job, self.pins, self.shape = job, pins, shape
        self.encoders = _encoders(job)
        costs = job.block_costs(BACKBONE, shape.microbatch_size, shape.tp)
        counts = partition((costs.forward_s + costs.backward_s).tolist(), shape.pp, num_chunks=shape.chunks)
        stages = tuple({BACKBONE: count} for count in counts)
        self.backbone = Unit(BACKBONE, stages, dp=shape.dp, pp=shape.pp, tp=shape.tp)
        self._bytes: dict[object, StageBytes] = {}
        self._learns: dict[int, Mapping[str, tuple[bool, ...]]] = {}
        self._timed: dict[object, _Timed] = {}
        self._alone: dict[object, Backbone] = {}

    def proposals(self) -> Iterator[Candidate | RuledOut]:
        fitted: list[_Fitted] = []
        missed: list[RuledOut] = []
        for plan in self.encoder_plans():
            found = self.fit(plan)
            (fitted if isinstance(found, _Fitted) else missed).append(found)  # type: ignore[arg-type]
        if missed:
            yield min(missed, key=lambda one: one.lacks_bytes)
        if not fitted:
            if not missed:
                why = "no encoder plan leaves each stage a block and each pipeline a microbatch."
                yield RuledOut(STRATEGY, str(self.shape), why)
            return
        finest, best = self.best(fitted)
        placed, coarse = self.thinned(best, finest), self.fill(best, 0).coarse
        facts = (
            f"{placed.hidden:.1%} of the encoders' computation runs in bubbles of the backbone; "
            f"{coarse.hidden:.1%} where passes stay whole, before and after the backbone's.",
        )
        yield self.candidate(best, placed, f"{self.shape}; {best.plan}, fine", facts)
        if coarse.step_s > placed.step_s or coarse.fills != placed.fills:
            yield self.candidate(best, coarse, f"{self.shape}; {best.plan}, coarse", ())

    def best(self, fitted: list[_Fitted]) -> tuple[Filling, _Fitted]:
        """Of the encoder plans, the one whose finest placement ends first; those that cannot are not placed.

        Those that recompute least of the backbone come first: what recomputes more cannot be faster alone.
        """
        order = sorted(fitted, key=lambda one: sum(sum(stage.values()) for stage in one.units[0].recompute))
        base = self.alone(order[0], parted=True)
        found: tuple[Filling, _Fitted] | None = None
        for least_s, _, one in sorted((self.least_s(base, one), place, one) for place, one in enumerate(order)):
            if found is None or least_s < found[0].fine_s:
                filling = self.fill(one, SLICES)
                if found is None or filling.fine_s < found[0].fine_s:
                    found = filling, one
        assert found is not None
        return found

    def least_s(self, alone: Backbone, fitted: _Fitted) -> float:
        """The step, if all bubbles could be filled to the last."""
        encoders = self._encoders(fitted, 0)
        idle_s = sum(alone.end_s - row.computing_s for row in alone.rows)
        over_s = max(0.0, encoders.microbatch_s * alone.num_microbatches - idle_s) / alone.num_ranks
        return encoders.gather_s + alone.end_s + over_s + encoders.finish_s

    def encoder_plans(self) -> Iterator[_EncoderPlan]:
        """What divides the backbone's degrees, and leaves a block to each stage, a microbatch to each pipeline, and
        whole examples to each rank."""
        shape, blocks = self.shape, [len(self.job.model.module(name).blocks) for name in self.encoders]
        sizes = [tp for tp in _divisors(shape.tp) if shape.microbatch_size % (shape.tp // tp) == 0]
        for pp in _divisors(shape.pp):
            if pp <= min(blocks) and shape.pp // pp <= shape.num_microbatches:
                for degrees in product(sizes, repeat=len(self.encoders)):
                    yield _EncoderPlan(pp, dict(zip(self.encoders, degrees)))

    def units(self, plan: _EncoderPlan) -> tuple[Unit, ...]:
        """The backbone and the encoders beside it; nothing is recomputed."""
        found = [self.backbone]
        for name, tp in plan.tp.items():
            costs = self.job.block_costs(name, self.shape.microbatch_size * tp / self.shape.tp, tp)
            counts = partition((costs.forward_s + costs.backward_s).tolist(), plan.pp)
            dp = self.backbone.num_ranks // (plan.pp * tp)
            found.append(Unit(name, tuple({name: count} for count in counts), dp=dp, pp=plan.pp, tp=tp))
        return tuple(found)

    def plan(self, units: tuple[Unit, ...], fills: tuple[Fill, ...] = ()) -> Plan:
        job, chunks = self.job, self.shape.chunks
        return Plan(
            job.model,
            job.cluster,
            units,
            job.batch_size,
            self.shape.microbatch_size,
            "interleaved_1f1b" if chunks > 1 else "1f1b",
            deferred_warmup=chunks > 1,
            precision=job.precision,
            fills=fills,
        )

    def candidate(self, fitted: _Fitted, placed: Placement, what: str, facts: tuple[str, ...]) -> Candidate:
        bound_s = max(row.computing_s for row in self.alone(fitted, parted=True).rows)
        return Candidate(STRATEGY, what, self.plan(fitted.units, placed.fills), placed.step_s, bound_s, facts)

    @cached_property
    def pricing(self) -> Pricing:
        """With encoders of some plan, and no recomputation."""
        return self._priced(self.units(next(self.encoder_plans())))

    def _priced(self, units: tuple[Unit, ...]) -> Pricing:
        plan = self.plan(units)
        return Pricing(plan, planned(plan), place_batch(plan, self.job.batch, self.job.cost), self.job.cost)

    @cached_property
    def in_flight(self) -> list[NDArray[np.int64]]:
        """Per rank: microbatches of each of its stages that are held at once, [num_moments, num_chunks]."""
        program, _ = fillable(self.plan(self.units(next(self.encoder_plans()))))
        return [_in_flight(program, rank) for rank in range(self.shape.pp)]

    def fit(self, plan: _EncoderPlan) -> _Fitted | RuledOut:
        """The least recomputation with which the plan fits, and how many microbatches an encoder pipeline may take."""
        units, shape = self.units(plan), self.shape
        num_pipelines = shape.pp // plan.pp
        most = ceil(shape.num_microbatches / num_pipelines)
        fits, spare = zip(*(self._fit_rank(units, rank, rank // num_pipelines, most) for rank in range(shape.pp)))
        worst = max(range(shape.pp), key=lambda rank: fits[rank].lacks_bytes)
        if fits[worst].lacks_bytes:
            lacks = fits[worst].lacks_bytes
            why = f"pipeline rank {worst} lacks {lacks / 1e9:.1f} GB"
            why += (
                " with all activations recomputed."
                if self.mode != "none"
                else " without recomputation, which is pinned."
            )
            mends = ("more tensor or pipeline parallelism", "smaller microbatches")
            return RuledOut(STRATEGY, f"{shape}; {plan}", why, lacks, mends)
        backbone = [fits[stage % shape.pp].recompute[stage // shape.pp] for stage in range(len(self.backbone.stages))]
        recomputed = [replace(units[0], recompute=_or_none(backbone))]
        for number, unit in enumerate(units[1:]):
            of_rank = [fit.recompute[shape.chunks + number].get(unit.name, 0) for fit in fits]
            places = [max(of_rank[place * num_pipelines : (place + 1) * num_pipelines]) for place in range(plan.pp)]
            recomputed.append(replace(unit, recompute=_or_none([{unit.name: count} for count in places])))
        return _Fitted(plan, tuple(recomputed), min(most + min(spare), shape.num_microbatches))

    @property
    def mode(self) -> Literal["none", "least", "full"]:
        return self.pins.recompute or "least"

    def _fit_rank(self, units: tuple[Unit, ...], rank: int, place: int, most: int) -> tuple[Fit, int]:
        """Recomputation on one rank, and how many more of the encoders' microbatches could then be held.

        Where another moment turns out to hold more than the one that was fitted, that one must fit as well.
        """
        shape, moments = self.shape, self.in_flight[rank]
        places = [(units[0], stage) for stage in range(rank, shape.pp * shape.chunks, shape.pp)]
        places += [(unit, place) for unit in units[1:]]
        single = [self._stage_bytes(unit, stage) for unit, stage in places]
        kept = np.array([float(stage.kept_bytes) for stage in single])
        again_s = [self._again_s(unit, stage, most) for unit, stage in places]
        encoders = np.full(len(units) - 1, most)
        held = moments[np.argmax(moments @ kept[: shape.chunks])]
        while True:
            count = np.concatenate([held, encoders])
            fit = fit_rank(list(map(_times, single, count.tolist())), again_s, self.job.capacity_bytes, self.mode)
            left = np.array([_kept(stage, chosen) for stage, chosen in zip(single, fit.recompute)])
            chunks, beside = left[: shape.chunks], float(left[shape.chunks :].sum())
            worst = moments[np.argmax(moments @ chunks)]
            spare_bytes = self.job.capacity_bytes - fit.peak_bytes - float((worst - held) @ chunks)
            if fit.lacks_bytes or spare_bytes >= 0:
                return fit, int(min(max(spare_bytes, 0.0) // max(beside, 1.0), shape.num_microbatches))
            held = np.maximum(held, worst)

    def _stage_bytes(self, unit: Unit, stage: int) -> StageBytes:
        """For one microbatch."""
        spans = unit_spans(self.job.model, unit, stage)
        key = unit.name, unit.tp, unit.dp, tuple(spans.items())
        if key not in self._bytes:
            share = unit.tp / self.shape.tp

            def rows(name: str, layer: Layer) -> float:
                return share * self.pricing.largest_rows(name, layer)

            precision = self.job.mixed_precision(pipeline=True)
            self._bytes[key] = stage_bytes(self.job.model, unit, spans, rows, 1, precision)
        return self._bytes[key]

    def _costs(self, unit: Unit) -> BlockCosts:
        (name,) = unit.modules
        return self.job.block_costs(name, self.shape.microbatch_size * unit.tp / self.shape.tp, unit.tp)

    def _again_s(self, unit: Unit, stage: int, most: int) -> dict[str, Column]:
        """In a step."""
        count = self.shape.num_microbatches if unit.name == BACKBONE else most
        spans = unit_spans(self.job.model, unit, stage)
        return {name: count * self._costs(unit).again_s[slice(*span)] for name, span in spans.items()}

    def fill(self, fitted: _Fitted, num_slices: int) -> Filling:
        """num_slices: of a layer's pass, beside parts of the backbone's passes; 0: all passes stay whole."""
        alone, encoders = self.alone(fitted, parted=num_slices > 0), self._encoders(fitted, num_slices)
        return fill(alone, encoders, len(self.backbone.stages))

    def thinned(self, fitted: _Fitted, finest: Filling) -> Placement:
        """The same in fewer slices, where that takes hardly longer: Plans are then shorter, and kernels larger."""
        for num_slices in (1, 2, 4):
            fewer = self.fill(fitted, num_slices)
            if fewer.fine_s <= finest.fine_s * (1 + HARDLY):
                return fewer.fine
        return finest.fine

    def _encoders(self, fitted: _Fitted, num_slices: int) -> Encoders:
        units, costs = fitted.units[1:], [self._costs(unit) for unit in fitted.units[1:]]
        num_layers = self.shape.num_microbatches * sum(own.num_blocks for own in costs)
        num_slices = min(num_slices, max(MAX_FILLS // (2 * num_layers), 1))
        passes = [[self._slices(unit, place, num_slices) for unit in units] for place in range(fitted.plan.pp)]
        learns = self.learns(fitted.plan.pp)
        forward = tuple(tuple(forward for forward, _ in place) for place in passes)
        backward = tuple(
            tuple(back if learns[unit.name][place] else back._replace(num=0) for unit, (_, back) in zip(units, row))
            for place, row in enumerate(passes)
        )
        gather_s, finish_s = self._data_s(fitted)
        ends = 0, (self.shape.pp - 1) * self.shape.dp * self.shape.tp
        sent = np.array([max(float(own.output_bytes.max()) for own in costs)])
        send_s = float(self.job.cost.send_seconds(sent, ends)[0])
        return Encoders(forward, backward, send_s, gather_s, finish_s, fitted.most)

    def _slices(self, unit: Unit, place: int, num_slices: int) -> tuple[Slices, Slices]:
        """Of a microbatch's forward pass and of its backward pass at a place."""
        own, (first, stop) = self._costs(unit), unit_spans(self.job.model, unit, place)[unit.name]
        again = first + (unit.recompute[place].get(unit.name, 0) if unit.recompute else 0)
        back_s = float(own.backward_s[first:stop].sum() + own.again_s[first:again].sum())
        num = max(num_slices * (stop - first), 1)
        return Slices(float(own.forward_s[first:stop].sum()) / num, num), Slices(back_s / num, num)

    def learns(self, pp: int) -> Mapping[str, tuple[bool, ...]]:
        """Of the encoders' stages, which have backward passes."""
        if pp not in self._learns:
            plan = self.plan(self.units(next(one for one in self.encoder_plans() if one.pp == pp)))
            self._learns[pp] = {one.module: one.has_backward for one in fillable(plan)[1]}
        return self._learns[pp]

    def _data_s(self, fitted: _Fitted) -> tuple[float, float]:
        """Before the encoders' first pass and after their last: gathering parameters; reducing gradients, and the
        optimizer for all that a rank updates."""
        cost, precision = self.job.cost, self.job.mixed_precision(pipeline=True)
        gather_s = finish_s = updated = 0.0
        for unit in fitted.units:
            own, num_places = self._costs(unit), unit.pp
            trained = float(own.trained.sum()) / num_places
            updated += trained / unit.dp
            if unit.name == BACKBONE or not trained or unit.dp == 1:
                continue
            ranks = range(0, unit.dp * unit.tp, unit.tp)
            gather_s += cost.gather_seconds(float(own.parameters.sum()) / num_places * precision.compute, ranks)
            finish_s += cost.gather_seconds(trained * precision.gradient, ranks)
        return gather_s, finish_s + cost.step_seconds(round(updated))

    def alone(self, fitted: _Fitted, *, parted: bool) -> Backbone:
        """The backbone without encoders, the same for all plans that leave it to recompute as much.

        parted: with its passes in parts, if tensor parallelism leaves bubbles between them.
        """
        recompute = tuple(tuple(stage.items()) for stage in fitted.units[0].recompute)
        if recompute not in self._timed:
            self._timed[recompute] = self._time(fitted)
        if (recompute, parted) not in self._alone:
            run = self._timed[recompute]
            run = self._parted(run) if parted else run
            self._alone[recompute, parted] = backbone_of(simulate(run.program, run.times), run.program.num_microbatches)
        return self._alone[recompute, parted]

    def _time(self, fitted: _Fitted) -> _Timed:
        pricing = self._priced(fitted.units) if fitted.units[0].recompute else self.pricing
        traffic, stages = Traffic(pricing), pricing.planned.stages[: len(self.backbone.stages)]
        islands = [stage_times_of(pricing, traffic, n) for n in range(min(pricing.num_islands, _ISLANDS))]
        zero = {n: stage.zero for n, stage in enumerate(stages) if len(stage.data_ranks) > 1}
        trained = [n for n, stage in enumerate(stages) if stage.trained]
        program, _ = fillable(pricing.plan)
        times = _mean(islands, len(stages), len(program.edges))
        return _Timed(stages, times, add_communication(add_data_parallel(program, zero, trained)))

    def _parted(self, run: _Timed) -> _Timed:
        """In the parts that `fillable` makes."""
        stages, times, program = run
        num_parts = LAYER_PARTS * sum(stage.num_layers for stage in stages)
        if not times.forward_tensor_s.any() or 2 * num_parts * self.shape.num_microbatches > MAX_PARTS:
            return run
        forward = {n: _halves(stage.num_layers) for n, stage in enumerate(stages)}
        backward = {n: parts for n, parts in forward.items() if stages[n].has_backward}
        for stage, parts in forward.items():
            program = split_parts(program, stage, len(parts), len(backward.get(stage, "1")))
        return _Timed(stages, replace(times, forward_parts=forward, backward_parts=backward), program)


def _halves(num_layers: int) -> tuple[Part, ...]:
    half = 1 / (2 * num_layers)
    return (Part(half, "tensor"), Part(half)) * (2 * num_layers)


def _mean(islands: list[StageTimes], num_stages: int, num_edges: int) -> StageTimes:
    """Of all microbatches alike, and of the first stages and edges alone."""

    def mean(name: str, count: int) -> Column:
        tables = [getattr(times, name)[:count].reshape(count, -1) for times in islands]
        averaged: Column = np.mean([table.mean(axis=1, keepdims=True) for table in tables], axis=0)
        return averaged

    return StageTimes(
        forward_s=mean("forward_s", num_stages),
        input_s=mean("input_s", num_stages),
        weight_s=mean("weight_s", num_stages),
        recompute_s=mean("recompute_s", num_stages),
        forward_tensor_s=mean("forward_tensor_s", num_stages),
        backward_tensor_s=mean("backward_tensor_s", num_stages),
        send_s=mean("send_s", num_edges),
        return_s=mean("return_s", num_edges),
        gather_s=islands[0].gather_s[:num_stages],
        reduce_s=islands[0].reduce_s[:num_stages],
    )


def _in_flight(program: Program, rank: int) -> NDArray[np.int64]:
    """How many microbatches of each stage of a rank are held, at all moments that differ: [num_moments, num_stages]."""
    stages = [number for number, stage in enumerate(program.stages) if stage.rank == rank]
    place = {stage: column for column, stage in enumerate(stages)}
    row = [action for action in program.actions[rank] if action.kind in (Kind.F, Kind.B, Kind.W) and action.part <= 0]
    change = np.zeros((len(row), len(stages)), dtype=np.int64)
    for moment, action in enumerate(row):
        change[moment, place[action.stage]] = 1 if action.kind is Kind.F else -1
    return np.unique(change.cumsum(axis=0), axis=0)


def _times(stage: StageBytes, count: int) -> StageBytes:
    spared = {name: count * column for name, column in stage.spared_bytes.items()}
    return replace(stage, kept_bytes=count * stage.kept_bytes, spared_bytes=spared)


def _kept(stage: StageBytes, recompute: Mapping[str, int]) -> float:
    return stage.kept_bytes - sum(float(stage.spared_bytes[name][:count].sum()) for name, count in recompute.items())


def _or_none(recompute: list[Mapping[str, int]]) -> tuple[Mapping[str, int], ...]:
    """As `Unit.recompute` has it."""
    some = tuple({name: count for name, count in stage.items() if count} for stage in recompute)
    return some if any(some) else ()
