"""Encoders on the ranks of the backbone's pipeline, their work in its bubbles (Optimus, Algorithm 1).

A 3D-parallel backbone, interleaved 1F1B with deferred warm-up or 1F1B, and beside it encoders with a parallelism of
their own (`encoder_plans.py`). Backbones are ranked in closed form; the best are simulated, alone, and not again for
each encoder plan. Of the encoder plans that fit memory, the one whose work is best placed (`bubbles.py`) is proposed:
with slices of passes where they were placed, and, beside it, with whole passes before and after the backbone's.
Placements are decided on microbatches that are all as long as the mean, since a Plan is for every step; where lengths
differ, the estimate is longer by as much as the backbone's own step is.

Placing takes longest, so a backbone that cannot be the fastest is left out before: by what its ranks compute in all,
by what the busiest of them computes with the recomputation that memory needs, then, simulated alone, by the step that
it would take if all its bubbles were filled; and so is what was placed, where its estimate is not near the fastest
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from motet.core.arrays import Float64Array
from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.cost.memory import unit_spans
from motet.planner.bubble_filling.backbone_bubbles import BackbonePipeline, Slices, backbone_of
from motet.planner.bubble_filling.encoder_plans import (
    EncoderPlans,
    Fitted,
    PipelineShape,
    divisors,
    encoder_degrees,
    encoders_of,
)
from motet.planner.bubble_filling.fills import Encoders, Filling, PlacedFills, fill
from motet.planner.candidate import BUBBLE_FILLING, Candidate, Pins, RuledOut
from motet.planner.degrees import most_replicas
from motet.planner.infeasible import indivisible, nothing_divides, tensor_degrees
from motet.planner.job import BlockCosts, Job
from motet.schedule import PlannedStage, add_communication, add_data_parallel, split_parts
from motet.schedule.layout import LAYER_PARTS
from motet.schedule.program import Program
from motet.simulate import simulate
from motet.simulate.engine.stage_times import Part, StageTimes
from motet.simulate.predict.predict import stage_times_of
from motet.simulate.predict.traffic import Traffic

MAX_BACKBONES, MAX_TRIED, NUM_PROPOSED = 3, 12, 2
"""Backbones that are simulated and filled, the best by estimate of those that fit; that are tried for it; and of which
Plans are proposed."""
MAX_PLACED = 3
"""Encoder plans of a backbone that are placed."""
SLICES = 8
"""Of an encoder's layer and pass: it has some 15 kernels, and tensor-parallel communication leaves room for about one
of ViT-22B's slices at a time (Optimus section 2.3)."""
HARDLY = 0.002
"""By which a step may take longer for fewer slices."""
MAX_FILLS, MAX_PARTS = 60_000, 200_000
"""Slices of encoders, and parts of the backbone's passes, above which layers are cut into fewer, and passes are not."""
_EXPOSED = 2.0
"""Of the encoders' passes of a microbatch: what no bubble hides of the first and the last ones. Fitted to placements of
ViT-22B beside GPT-175B on 1,536 and 2,048 GPUs."""
_NEAR = 1.1
"""By which the simulated step may be longer or shorter than the estimate."""
_ISLANDS = 8
"""Replicas of the backbone over whose microbatches seconds are averaged."""


def propose_bubble_filling(job: Job, pins: Pins, faster_than_s: float = math.inf) -> Iterator[Candidate | RuledOut]:
    """Encoders in the bubbles of the best backbones, finely and coarsely placed, where that can take less than
    faster_than_s."""
    if why := _never(job, pins):
        yield RuledOut(BUBBLE_FILLING, "", why)
        return
    shapes = sorted(_shapes(job, pins), key=lambda shape: shape.estimate_s)
    if not shapes:
        yield RuledOut(BUBBLE_FILLING, "", _indivisible(job, pins))
    found: list[list[Candidate]] = []
    num_fitting, to_beat_s = 0, faster_than_s
    for shape in shapes[:MAX_TRIED]:
        if num_fitting == MAX_BACKBONES:
            break
        if shape.bound_s >= to_beat_s:
            yield _too_slow(str(shape))
            continue
        filler = _Filler(job, EncoderPlans(job, shape, pins.recompute or "least"), to_beat_s)
        proposals = list(filler.proposals())
        num_fitting += filler.fits
        yield from (one for one in proposals if isinstance(one, RuledOut))
        if placed := [one for one in proposals if isinstance(one, Candidate)]:
            found.append(placed)
            to_beat_s = min(to_beat_s, placed[0].estimate_s)
    for placed in sorted(found, key=lambda placed: placed[0].estimate_s)[:NUM_PROPOSED]:
        yield from placed


def _too_slow(what: str) -> RuledOut:
    return RuledOut(BUBBLE_FILLING, what, "even with all bubbles filled, a step would take longer than the fastest.")


def _never(job: Job, pins: Pins) -> str:
    encoders = encoders_of(job)
    if not encoders:
        return "the model has no encoders to run in bubbles."
    if set(job.model.edges) != {(name, BACKBONE) for name in encoders}:
        return "bubbles are filled with modules that feed the backbone alone, and the model has others."
    if not (pins.allow(schedule="interleaved_1f1b") or pins.allow(schedule="1f1b")):
        return f"the schedule is pinned to {pins.schedule!r}; bubbles are filled under 'interleaved_1f1b' and '1f1b'."
    if not pins.allow(balance="off"):
        return f"balance is pinned to {pins.balance!r}; in a pipeline it is 'off'."
    return ""


def _indivisible(job: Job, pins: Pins) -> str:
    if pins.pp == 1:
        return "PP is pinned to 1; a pipeline has bubbles from PP 2 on."
    return indivisible(job, pins, len(job.model.module(BACKBONE).blocks)) or nothing_divides(job)


def _shapes(job: Job, pins: Pins) -> Iterator[PipelineShape]:
    """The backbones whose pipelines divide the ranks, with the most replicas that the batch divides among, each with
    the number of chunks that is estimated best."""
    num_ranks, num_blocks = job.cluster.num_ranks, len(job.model.module(BACKBONE).blocks)
    for tp, pp in product(tensor_degrees(job), divisors(num_ranks)):
        dp = 0 if num_ranks % (tp * pp) else most_replicas(job, tp * pp, pins)
        if not dp or not 2 <= pp <= num_blocks or not pins.allow(tp=tp, pp=pp):
            continue
        for microbatch_size in (1, 2, 4, 8):
            count, left = divmod(job.batch_size, dp * microbatch_size)
            if left or not count or not pins.allow(microbatch_size=microbatch_size):
                continue
            chunks = [n for n in range(1, num_blocks // pp + 1) if num_blocks % (pp * n) == 0 or n == 1]
            sized = [PipelineShape(tp, pp, dp, n, microbatch_size, count) for n in chunks]
            sized = [_estimated(job, shape) for shape in sized if pins.allow(schedule=shape.schedule)]
            yield from sorted(sized, key=lambda shape: shape.estimate_s)[:1]


def _estimated(job: Job, shape: PipelineShape) -> PipelineShape:
    """The backbone's passes, its bubbles or the encoders' work, whichever is more, and what no bubble hides.

    What lacks of memory for a whole model's activations in flight is recomputed; a backbone without room for its own
    parameters comes last.
    """
    costs = job.block_costs(BACKBONE, shape.microbatch_size, shape.tp)
    encoders = [job.block_costs(name, shape.microbatch_size, shape.tp) for name in encoders_of(job)]
    encoder_s = sum(map(_passes_s, encoders))
    precision = job.mixed_precision(pipeline=True)
    learning_bytes = precision.gradient + precision.optimizer / shape.dp
    state_bytes = sum(
        float((precision.stored * own.parameters + learning_bytes * own.trainable).sum()) / shape.pp
        for own in (costs, *encoders)
    )
    lacking = state_bytes + float(costs.kept_bytes.sum()) - job.capacity_bytes
    again = min(max(lacking / max(float(costs.saved_bytes.sum()), 1.0), 0.0), 1.0)
    pass_s = float((costs.forward_s + costs.backward_s + again * costs.recompute_s).sum()) / shape.pp
    chunk_bytes = float(costs.parameters.sum()) / (shape.pp * shape.chunks)
    ranks = range(0, shape.dp * shape.tp, shape.tp)
    data_s = job.cost.gather_seconds(chunk_bytes * precision.compute, ranks)
    data_s += job.cost.reduce_scatter_seconds(chunk_bytes * precision.gradient, ranks)
    ends = 0, (shape.pp - 1) * shape.dp * shape.tp
    sends_s = 2 * shape.pp * shape.chunks * float(job.cost.send_seconds(costs.output_bytes.max(keepdims=True), ends)[0])
    bubbles_s = (shape.pp - 1) * pass_s / shape.chunks + data_s + sends_s
    step_s = shape.num_microbatches * pass_s + max(bubbles_s, shape.num_microbatches * encoder_s / shape.pp)
    step_s += _EXPOSED * encoder_s
    degrees = encoder_degrees(shape)
    least_s = _passes_s(costs) + sum(
        min(_passes_s(job.block_costs(name, shape.microbatch_size * own / shape.tp, own)) for own in degrees)
        for name in encoders_of(job)
    )
    estimate_s = step_s * (1 if state_bytes < job.capacity_bytes else 1e3)
    return replace(shape, estimate_s=estimate_s, bound_s=shape.num_microbatches * least_s / shape.pp)


def _passes_s(costs: BlockCosts) -> float:
    """Of a microbatch, forward and backward, without recomputation."""
    return float((costs.forward_s + costs.backward_s).sum())


class _Timed(NamedTuple):
    """The backbone without encoders: its stages, what they take for microbatches that are all alike, its Program, and
    how many times as long the slowest replica takes for those that there are."""

    stages: tuple[PlannedStage, ...]
    times: StageTimes
    program: Program
    slower: float


class _Filler:
    """Proposes encoders beside one backbone. fits: whether an encoder plan does, once there are proposals."""

    def __init__(self, job: Job, plans: EncoderPlans, faster_than_s: float) -> None:
        self.job, self.plans, self.shape, self.faster_than_s = job, plans, plans.shape, faster_than_s
        self.fits = False
        self._timed: dict[object, _Timed] = {}
        self._alone: dict[object, BackbonePipeline] = {}

    def proposals(self) -> Iterator[Candidate | RuledOut]:
        """The encoder plan that is best when finely placed, so and coarsely; and the nearest of those without room."""
        fitted: list[Fitted] = []
        nearest: RuledOut | None = None
        for plan in self.plans:
            found = self.plans.fit(plan, math.inf if nearest is None else nearest.shortfall_bytes)
            if isinstance(found, Fitted):
                fitted.append(found)
            else:
                nearest = found or nearest
        if nearest is not None:
            yield nearest
        if not fitted:
            if nearest is None:
                why = "no encoder plan leaves each stage a block and each pipeline a microbatch."
                yield RuledOut(BUBBLE_FILLING, str(self.shape), why)
            return
        self.fits = True
        least = min(fitted, key=_recomputed)
        if self.plans.busiest_s(least.units) >= self.faster_than_s:
            yield _too_slow(f"{self.shape}; {least.plan}")
            return
        bounds, order = self.bounds(fitted)
        if bounds[0] >= self.faster_than_s:
            yield _too_slow(f"{self.shape}; {order[0].plan}")
            return
        finest, best = self.best(bounds, order)
        slower = self._timed[_recompute(best)].slower
        if finest.fine_s * slower >= _NEAR * self.faster_than_s:
            why = f"finely placed, a step is estimated to take {finest.fine_s * slower:.3g} s: longer than the fastest."
            yield RuledOut(BUBBLE_FILLING, f"{self.shape}; {best.plan}", why)
            return
        placed, coarse = self.thinned(best, finest), self.fill(best, 0).coarse
        facts = (
            f"{placed.hidden:.1%} of the encoders' computation runs in bubbles of the backbone; "
            f"{coarse.hidden:.1%} where passes stay whole, before and after the backbone's.",
        )
        yield self.candidate(best, placed, f"{self.shape}; {best.plan}, fine", facts)
        if placed.fills != coarse.fills and coarse.step_s * slower < _NEAR * self.faster_than_s:
            yield self.candidate(best, coarse, f"{self.shape}; {best.plan}, coarse", ())

    def bounds(self, fitted: list[Fitted]) -> tuple[list[float], list[Fitted]]:
        """What a step takes at least with each encoder plan, and these, the least first.

        Judged beside the backbone that recomputes least: what recomputes more cannot be faster alone. Nor can any be
        faster than that backbone is with the microbatches that there are.
        """
        order = sorted(fitted, key=_recomputed)
        base = self.alone(order[0], parted=True)
        alone_s = base.end_s * self._timed[_recompute(order[0])].slower
        bounds = sorted((max(self.least_s(base, one), alone_s), place) for place, one in enumerate(order))
        return [least_s for least_s, _ in bounds], [order[place] for _, place in bounds]

    def best(self, bounds: list[float], order: list[Fitted]) -> tuple[Filling, Fitted]:
        """Of the few encoder plans that could be best, the one whose finest placement ends first."""
        found = self.fill(order[0], SLICES), order[0]
        for least_s, one in list(zip(bounds, order))[1:MAX_PLACED]:
            if least_s < found[0].fine_s:
                found = min(found, (self.fill(one, SLICES), one), key=lambda entry: entry[0].fine_s)
        return found

    def least_s(self, alone: BackbonePipeline, fitted: Fitted) -> float:
        """The step, if all bubbles could be filled to the last, and no collective of the encoders were waited for."""
        encoders = self._encoders(fitted, 0)
        idle_s = sum(alone.end_s - row.computing_s for row in alone.rows)
        over_s = max(0.0, encoders.microbatch_s * alone.num_microbatches - idle_s) / alone.num_ranks
        return alone.end_s + over_s

    def candidate(self, fitted: Fitted, placed: PlacedFills, what: str, facts: tuple[str, ...]) -> Candidate:
        bound_s = max(row.computing_s for row in self.alone(fitted, parted=True).rows)
        estimate_s = placed.step_s * self._timed[_recompute(fitted)].slower
        return Candidate(BUBBLE_FILLING, what, self.plans.plan(fitted.units, placed.fills), estimate_s, bound_s, facts)

    def fill(self, fitted: Fitted, num_slices: int) -> Filling:
        """num_slices: of a layer's pass, beside parts of the backbone's passes; 0: all passes stay whole."""
        alone, encoders = self.alone(fitted, parted=num_slices > 0), self._encoders(fitted, num_slices)
        return fill(alone, encoders, len(self.plans.backbone.stages))

    def thinned(self, fitted: Fitted, finest: Filling) -> PlacedFills:
        """The same in fewer slices, where that takes hardly longer: Plans are then shorter, and kernels larger."""
        for num_slices in (1, 2, 4):
            fewer = finest.sliced(self._encoders(fitted, num_slices))
            if fewer.fine_s <= finest.fine_s * (1 + HARDLY):
                return fewer.fine
        return finest.fine

    def _encoders(self, fitted: Fitted, num_slices: int) -> Encoders:
        units, costs = fitted.units[1:], [self.plans.costs(unit) for unit in fitted.units[1:]]
        num_layers = self.shape.num_microbatches * sum(own.num_blocks for own in costs)
        num_slices = min(num_slices, max(MAX_FILLS // (2 * num_layers), 1))
        passes = [[self._slices(unit, place, num_slices) for unit in units] for place in range(fitted.plan.pp)]
        learns = self.plans.learns(fitted.plan.pp)
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
        own, (first, stop) = self.plans.costs(unit), unit_spans(self.job.model, unit, place)[unit.name]
        again = first + (unit.recompute[place].get(unit.name, 0) if unit.recompute else 0)
        back_s = float(own.backward_s[first:stop].sum() + own.recompute_s[first:again].sum())
        num = max(num_slices * (stop - first), 1)
        return Slices(float(own.forward_s[first:stop].sum()) / num, num), Slices(back_s / num, num)

    def _data_s(self, fitted: Fitted) -> tuple[float, tuple[float, ...]]:
        """Gathering the encoders' parameters, before their first pass; per place, reducing their gradients after the
        last, and the optimizer for all that a rank of the place updates."""
        cost, precision, pp = self.job.cost, self.job.mixed_precision(pipeline=True), fitted.plan.pp
        learning = self._by_stage(fitted.units[0])
        updated = learning.reshape(-1, pp, self.shape.pp // pp).sum(axis=0).max(axis=1) / self.shape.dp
        gather_s, finish_s = 0.0, np.zeros(pp)
        for unit in fitted.units[1:]:
            ranks = range(0, unit.dp * unit.tp, unit.tp)
            learning = self._by_stage(unit)
            updated += learning / unit.dp
            if unit.dp > 1:
                gather_s += cost.gather_seconds(float(learning.max()) * precision.compute, ranks)
                sizes = (learning * precision.gradient).tolist()
                finish_s += [cost.reduce_scatter_seconds(size, ranks) for size in sizes]
        finish_s += [cost.step_seconds(round(number)) for number in updated.tolist()]
        return gather_s, tuple(finish_s.tolist())

    def _by_stage(self, unit: Unit) -> Float64Array:
        """Parameters of a tensor-parallel rank that learn: no others are updated, and so gathered."""
        first = np.cumsum([0, *(sum(stage.values()) for stage in unit.stages[:-1])])
        learning: Float64Array = np.add.reduceat(self.plans.costs(unit).trainable, first)
        return learning

    def alone(self, fitted: Fitted, *, parted: bool) -> BackbonePipeline:
        """The backbone without encoders, the same for all plans that leave it to recompute as much.

        parted: with its passes in parts, if tensor parallelism leaves bubbles between them.
        """
        recompute = _recompute(fitted)
        if recompute not in self._timed:
            self._timed[recompute] = self._time(fitted)
        if (recompute, parted) not in self._alone:
            run = self._timed[recompute]
            run = self._parted(run) if parted else run
            self._alone[recompute, parted] = backbone_of(simulate(run.program, run.times), run.program.num_microbatches)
        return self._alone[recompute, parted]

    def _time(self, fitted: Fitted) -> _Timed:
        pricing = self.plans.priced(fitted.units)
        traffic, stages = Traffic(pricing), pricing.planned.stages
        islands = [stage_times_of(pricing, traffic, n) for n in range(min(pricing.num_islands, _ISLANDS))]
        zero = {n: stage.zero for n, stage in enumerate(stages) if len(stage.data_ranks) > 1}
        trainable = [n for n, stage in enumerate(stages) if stage.trainable]
        program = add_communication(add_data_parallel(pricing.planned.program, zero, trainable))
        times = _mean(islands)
        alike = {pricing.assignment.island_key(n, pricing.num_islands): own for n, own in enumerate(islands)}
        slowest_s = max(simulate(program, own).makespan_s for own in alike.values())
        return _Timed(stages, times, program, slowest_s / simulate(program, times).makespan_s)

    def _parted(self, run: _Timed) -> _Timed:
        """In the parts that `fillable` makes."""
        stages, times, program, _ = run
        num_parts = LAYER_PARTS * sum(stage.num_layers for stage in stages)
        if not times.forward_tensor_s.any() or 2 * num_parts * self.shape.num_microbatches > MAX_PARTS:
            return run
        forward = {n: _halves(stage.num_layers) for n, stage in enumerate(stages)}
        backward = {n: parts for n, parts in forward.items() if stages[n].has_backward}
        for stage, parts in forward.items():
            program = split_parts(program, stage, len(parts), len(backward.get(stage, "1")))
        return _Timed(stages, replace(times, forward_parts=forward, backward_parts=backward), program, run.slower)


def _halves(num_layers: int) -> tuple[Part, ...]:
    half = 1 / (2 * num_layers)
    return (Part(half, "tensor"), Part(half)) * (2 * num_layers)


def _recomputed(fitted: Fitted) -> int:
    """Layers of the backbone."""
    return sum(sum(stage.values()) for stage in fitted.units[0].recompute)


def _recompute(fitted: Fitted) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Of the backbone, to tell Plans apart by."""
    return tuple(tuple(stage.items()) for stage in fitted.units[0].recompute)


def _mean(replicas: list[StageTimes]) -> StageTimes:
    """Over replicas and microbatches."""

    def mean(name: str) -> Float64Array:
        averaged: Float64Array = np.mean(
            [getattr(times, name).mean(axis=1, keepdims=True) for times in replicas], axis=0
        )
        return averaged

    return StageTimes(
        mean("forward_s"),
        mean("input_s"),
        mean("weight_s"),
        mean("recompute_s"),
        mean("forward_tensor_s"),
        mean("backward_tensor_s"),
        mean("send_s"),
        mean("return_s"),
        gather_s=replicas[0].gather_s,
        reduce_s=replicas[0].reduce_s,
        step_s=replicas[0].step_s,
    )
