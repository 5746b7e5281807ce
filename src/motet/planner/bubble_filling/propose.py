"""Encoders on the ranks of the backbone's pipeline, their work in its bubbles (Optimus, Algorithm 1).

The backbone is 3D-parallel, in 1F1B or in interleaved 1F1B with deferred warm-up; the encoders beside it have a
parallelism of their own.

1. Backbones are ranked by an estimate in closed form (`backbone_shapes.py`). The next steps take the best ones.
2. Encoder plans are kept that fit memory beside the backbone (`encoder_plans.py`, `encoder_memory.py`).
3. The backbone is simulated once, without encoders (`backbone_alone.py`), which gives a lower bound of the step.
4. Backbones follow in the order of their bounds. The encoder plans that could be best are placed in their bubbles
   (`fills.py`). The best is proposed with slices of passes in all bubbles (fine), if some of these are inside passes,
   beside tensor-parallel communication, also in the others alone, and with whole passes before and after the backbone's
   (coarse). If ranks share the encoders' products, it is also proposed with their sums beside the backbone's compute.

Placing takes longest, so a backbone that cannot be the fastest is left out as early as that shows: by the least that
its ranks compute; by what its busiest rank computes with the recomputation that memory needs; by its passes and
messages without a Program (`one_f_one_b_bound.py`); by its simulated step if all bubbles were filled; by the step of
the best placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from motet.core.module_degrees import ModuleDegrees
from motet.core.workload import BACKBONE
from motet.cost.memory import unit_spans
from motet.planner.bubble_filling.backbone_alone import MAX_TIMED_ISLANDS, BackboneAlone
from motet.planner.bubble_filling.backbone_bubbles import BackbonePipeline
from motet.planner.bubble_filling.backbone_shapes import PipelineShape, backbone_shapes, encoders_of
from motet.planner.bubble_filling.encoder_memory import EncoderMemory, FittedPlan
from motet.planner.bubble_filling.encoder_plans import EncoderPlan, EncoderPlans
from motet.planner.bubble_filling.encoder_times import encoders_beside
from motet.planner.bubble_filling.fills import (
    Filling,
    PlacedFills,
    before_whole_passes,
    fill,
    is_inside_pass,
    with_sums_apart,
)
from motet.planner.bubble_filling.one_f_one_b_bound import one_f_one_b_s
from motet.planner.candidate import BUBBLE_FILLING, Candidate, Pins, RuledOut
from motet.planner.infeasible import indivisible, nothing_divides
from motet.planner.job import Job
from motet.planner.module_pins import backbone_pins

_MAX_TRIED, _MIN_FITTING, _MAX_PASSES = 12, 3, 6_000
"""So many backbones are tried, the best by estimate: until so many of them fit, and then those whose passes, together
with all before, are no more than this."""
_MAX_FILLED, _NUM_PROPOSED = 5, 2
"""Encoders are placed beside so many backbones, the least bound first; and so many are proposed."""
_MAX_PLACED = 8
"""So many encoder plans of a backbone are placed."""
_HALVES, _WHOLE = 2, 1
"""Slices of an encoder's layer and pass: attention and MLP, or both as one. Training runs no finer ones; Optimus
(section 2.3) cuts down to kernels, as tensor-parallel communication leaves room for about one at a time."""
_THINNING_COST = 0.002
"""A step may take longer by this share if a Plan needs no halves of layers."""
_ESTIMATE_ERROR = 1.1
"""The factor by which the simulated step may be shorter than the estimate."""


def propose_bubble_filling(job: Job, pins: Pins, faster_than_s: float = math.inf) -> Iterator[Candidate | RuledOut]:
    """Encoders in the bubbles of the best backbones, finely and coarsely placed, if a step can then take less than
    faster_than_s."""
    pins = backbone_pins(pins)
    if why := _never(job, pins):
        yield RuledOut(BUBBLE_FILLING, "", why)
        return
    shapes = sorted(backbone_shapes(job, pins), key=lambda shape: shape.estimate_s)
    if not shapes:
        yield RuledOut(BUBBLE_FILLING, "", _no_shape(job, pins))
    bounded: list[_Bounded] = []
    num_fitting, num_passes = 0, 0
    for shape in shapes[:_MAX_TRIED]:
        if num_fitting >= _MIN_FITTING and num_passes + shape.num_passes > _MAX_PASSES:
            continue
        outcome = _bounded_backbone(job, pins, shape, faster_than_s)
        yield from outcome.ruled_out
        num_fitting += outcome.fits
        num_passes += shape.num_passes * outcome.fits
        if outcome.bounded is not None:
            bounded.append(outcome.bounded)
    filled: list[list[Candidate]] = []
    for one in sorted(bounded, key=lambda one: one.bound_s)[:_MAX_FILLED]:
        placed = _placed(one, faster_than_s)
        if isinstance(placed, RuledOut):
            yield placed
        else:
            filled.append(placed)
            faster_than_s = min(faster_than_s, placed[0].estimate_s)
    for candidates in sorted(filled, key=lambda candidates: candidates[0].estimate_s)[:_NUM_PROPOSED]:
        yield from candidates


def _never(job: Job, pins: Pins) -> str:
    """Why the strategy has no Plan for this model or with these pins, whatever the cluster; "" if it may have one."""
    encoders = encoders_of(job)
    if not encoders:
        return "the model has no encoders to run in bubbles."
    if set(job.model.edges) != {(name, BACKBONE) for name in encoders}:
        return "bubbles are filled with modules that feed the backbone alone, and the model has others."
    if not (pins.allow(schedule="interleaved_1f1b") or pins.allow(schedule="1f1b")):
        return f"the schedule is pinned to {pins.schedule!r}; bubbles are filled under 'interleaved_1f1b' and '1f1b'."
    return ""


def _no_shape(job: Job, pins: Pins) -> str:
    if pins.pp == 1:
        return "PP is pinned to 1; a pipeline has bubbles from PP 2 on."
    if job.cluster.num_ranks == 1:
        return "a pipeline has bubbles from 2 ranks on; the cluster has one."
    if len(job.model.module(BACKBONE).blocks) == 1:
        return "a pipeline has bubbles from 2 stages on; the backbone has one layer."
    return indivisible(job, pins, len(job.model.module(BACKBONE).blocks), modules=(BACKBONE,)) or nothing_divides(job)


class _BoundedPlan(NamedTuple):
    """An encoder plan, the least that a step takes with it, and what its encoders take of a microbatch.

    apart_s: that least, if all sums of encoders are beside other work.
    """

    bound_s: float
    encoders_s: float
    apart_s: float
    fitted: FittedPlan


class _Bounded(NamedTuple):
    """A backbone whose encoder plans are bounded. plans: the least bound first."""

    bound_s: float
    filler: _Filler
    plans: list[_BoundedPlan]


class _Outcome(NamedTuple):
    """What came of one backbone. fits: whether an encoder plan fits memory beside it. bounded: None if ruled out."""

    fits: bool
    ruled_out: list[RuledOut]
    bounded: _Bounded | None = None


def _bounded_backbone(job: Job, pins: Pins, shape: PipelineShape, faster_than_s: float) -> _Outcome:
    """The encoder plans beside a backbone with their bounds, if a step can take less than faster_than_s."""
    # 1. The least that its ranks compute.
    if shape.bound_s >= faster_than_s:
        return _Outcome(False, [_too_slow(shape)])
    # 2. What its busiest rank computes with the memory of all encoders to itself.
    plans = EncoderPlans(job, shape, pins.recompute or "least")
    memory = EncoderMemory(plans)
    has_plans = next(iter(plans), None) is not None
    alone = memory.backbone_alone() if has_plans and faster_than_s < math.inf else None
    if alone is not None and plans.least_s(alone) >= faster_than_s:
        return _Outcome(True, [_too_slow(shape)])
    # 3. The encoder plans that fit.
    fitting, nearest = _fitting(memory, plans, pins)
    ruled_out = [nearest] if nearest is not None else []
    if not fitting:
        pinned = ", and is as pinned" if pins.modules or pins.fields else ""
        why = f"no encoder plan leaves each stage a block and each pipeline a microbatch{pinned}."
        return _Outcome(False, ruled_out or [RuledOut(BUBBLE_FILLING, str(shape), why)])
    # 4. What its busiest rank computes.
    least = min(fitting, key=_num_recomputed)
    least_s = plans.least_s(least.units[0])
    if least_s >= faster_than_s:
        return _Outcome(True, [*ruled_out, _too_slow(shape, least)])
    # 5. Its passes and messages in their order.
    if faster_than_s < math.inf and one_f_one_b_s(plans, least.units[0], MAX_TIMED_ISLANDS) >= faster_than_s:
        return _Outcome(True, [*ruled_out, _too_slow(shape, least)])
    # 6. Its simulated step, if all bubbles were filled.
    filler = _Filler(plans)
    bounded = filler.bounded(fitting)
    bound_s = max(min(one.apart_s for one in bounded), least_s)
    if bound_s >= faster_than_s:
        return _Outcome(True, [*ruled_out, _too_slow(shape, bounded[0].fitted)])
    return _Outcome(True, ruled_out, _Bounded(bound_s, filler, bounded))


def _placed(bounded: _Bounded, faster_than_s: float) -> list[Candidate] | RuledOut:
    """The best encoder plan beside a backbone, placed, finely first, if a step can then take less than
    faster_than_s."""
    filler, shape = bounded.filler, bounded.filler.plans.shape
    if bounded.bound_s >= faster_than_s:
        return _too_slow(shape, bounded.plans[0].fitted)
    fitted, filling = filler.best(bounded.plans)
    fine_s = filling.fine_s * filler.alone.slowdown(fitted.units)
    limit_s = _ESTIMATE_ERROR * faster_than_s
    if fine_s >= limit_s:
        why = f"finely placed, a step is estimated to take {fine_s:.3g} s: longer than the fastest."
        return RuledOut(BUBBLE_FILLING, f"{shape}; {fitted.plan}", why)
    return filler.candidates(fitted, filling, limit_s)


def _fitting(memory: EncoderMemory, plans: EncoderPlans, pins: Pins) -> tuple[list[FittedPlan], RuledOut | None]:
    """The encoder plans as pinned that fit memory, and the one that lacks least of those that do not."""
    fitting: list[FittedPlan] = []
    nearest: RuledOut | None = None
    allowed: dict[object, EncoderPlan] = {}
    for plan in plans:
        if all(_is_allowed(pins.of(name), **degrees) for name, degrees in plans.degrees(plan).items()):
            # Groups that share items deal them out as replicas would, and cut those that dominate: these come first.
            allowed.setdefault((plan.pp, *(one.tp for one in plan.groups.values())), plan)
    for plan in allowed.values():
        outcome = memory.fit(plan, math.inf if nearest is None else nearest.shortfall_bytes)
        if isinstance(outcome, FittedPlan):
            fitting.append(outcome)
        elif outcome is not None:
            nearest = outcome
    return fitting, nearest


def _is_allowed(pinned: ModuleDegrees, tp: int, cp: int, pp: int, dp: int) -> bool:
    """Whether an encoder may have these degrees. pinned: a dp of all its replicas, before `cp` takes ranks of them, as
    it may from groups that are replicas (`field_pins.py`).
    """
    return pinned.allow(tp=tp, pp=pp, dp=dp * cp) and (cp == 1 or pinned.cp in (None, cp))


def _filled_s(backbone: BackbonePipeline, encoders_s: float) -> float:
    """The step, if all bubbles could be filled to the last, and encoders waited for no collective. encoders_s: what
    these take of a microbatch.
    """
    idle_s = sum(backbone.end_s - row.computing_s for row in backbone.rows)
    return backbone.end_s + max(0.0, encoders_s * backbone.num_microbatches - idle_s) / backbone.num_ranks


def _num_recomputed(fitted: FittedPlan) -> int:
    """Layers of the backbone that are recomputed."""
    return sum(sum(stage.values()) for stage in fitted.units[0].recompute)


def _too_slow(shape: PipelineShape, fitted: FittedPlan | None = None) -> RuledOut:
    what = str(shape) if fitted is None else f"{shape}; {fitted.plan}"
    return RuledOut(BUBBLE_FILLING, what, "even with all bubbles filled, a step would take longer than the fastest.")


class _Filler:
    """Places the encoder plans of one backbone."""

    def __init__(self, plans: EncoderPlans) -> None:
        self.plans, self.alone = plans, BackboneAlone(plans)

    def bounded(self, fitting: list[FittedPlan]) -> list[_BoundedPlan]:
        """The plans by their bounds, the least first.

        All are judged beside the backbone that recomputes least: no other is faster alone. None is faster than that
        backbone is with the microbatches that there are.
        """
        by_recomputed = sorted(fitting, key=_num_recomputed)
        units = by_recomputed[0].units
        backbone = self.alone.pipeline(units, parted=True)
        backbone_s = backbone.end_s * self.alone.slowdown(units)
        bounded = []
        for fitted in by_recomputed:
            encoders_s = encoders_beside(self.plans, fitted, 0).microbatch_s
            sums_s = sum(float(self.plans.costs(unit).sums_s.sum()) for unit in fitted.units[1:])
            bound_s, apart_s = (
                max(_filled_s(backbone, each_s), backbone_s) for each_s in (encoders_s, encoders_s - sums_s)
            )
            bounded.append(_BoundedPlan(bound_s, encoders_s, apart_s, fitted))
        return sorted(bounded, key=lambda one: one[:2])

    def best(self, bounded: list[_BoundedPlan]) -> tuple[FittedPlan, Filling]:
        """The plan whose fine placement ends first, of the few that could be best."""
        best, filling = bounded[0].fitted, self._fill(bounded[0].fitted, _HALVES)
        for bound_s, _, _, fitted in bounded[1:_MAX_PLACED]:
            if bound_s < filling.fine_s:
                other = self._fill(fitted, _HALVES)
                if other.fine_s < filling.fine_s:
                    best, filling = fitted, other
        return best, filling

    def candidates(self, fitted: FittedPlan, filling: Filling, limit_s: float) -> list[Candidate]:
        """The plan finely placed, and otherwise if that differs and is estimated to take less than limit_s: with sums
        apart, between passes of the backbone alone, which ragged microbatches may like better, and coarsely."""
        fine, others = self._thinned(fitted, filling), {"coarse": self._fill(fitted, 0).coarse}
        if num_halves := self._halves_with_sums(fitted):
            apart = with_sums_apart(filling.fine.fills, num_halves, in_turns=fitted.plan.pp == 1)
            if apart != filling.fine.fills:
                others = {"fine, sums apart": replace(filling.fine, fills=apart)} | others
        if any(map(is_inside_pass, fine.fills)):
            between = self._fill(fitted, _HALVES, is_inside=False)
            others = {"fine, between passes": self._thinned(fitted, between)} | others
        candidates = [self._candidate(fitted, fine, "fine")]
        for how, placed in others.items():
            is_other = all(before_whole_passes(placed.fills) != one.plan.fills for one in candidates)
            if is_other and placed.step_s * self.alone.slowdown(fitted.units) < limit_s:
                candidates.append(self._candidate(fitted, placed, how))
        return candidates

    def _fill(self, fitted: FittedPlan, num_slices: int, *, is_inside: bool = True) -> Filling:
        """num_slices: of a layer's pass; 0: passes stay whole. is_inside: slices may run inside the backbone's."""
        backbone = self.alone.pipeline(fitted.units, parted=is_inside and num_slices > 0)
        encoders = encoders_beside(self.plans, fitted, num_slices)
        return fill(backbone, encoders, len(self.plans.backbone.stages))

    def _halves_with_sums(self, fitted: FittedPlan) -> dict[int, int]:
        """Halves of a pass, by stage of encoders whose sums can be beside the backbone's compute; none where a device
        computes nothing beside collectives.
        """
        job, pp, num_ranks = self.plans.job, fitted.plan.pp, self.plans.shape.pp
        model, found = job.model, dict[int, int]()
        for number, unit in enumerate(fitted.units[1:]):
            if unit.tp == 1 or not job.cluster.runs_beside_sums:
                continue
            first = len(self.plans.backbone.stages) + number * num_ranks
            for stage in range(num_ranks):
                pieces = model.module(unit.name).pieces(*unit_spans(model, unit, stage % pp)[unit.name])
                if all(half >= 0 for _, half in pieces):
                    found[first + stage] = len(pieces)
        return found

    def _thinned(self, fitted: FittedPlan, filling: Filling) -> PlacedFills:
        """The same placement in whole layers, if it then takes about as long: Plans are shorter, and kernels larger."""
        whole = filling.sliced(encoders_beside(self.plans, fitted, _WHOLE))
        return (whole if whole.fine_s <= filling.fine_s * (1 + _THINNING_COST) else filling).fine

    def _candidate(self, fitted: FittedPlan, placed: PlacedFills, how: str) -> Candidate:
        backbone = self.alone.pipeline(fitted.units, parted=True)
        bound_s = max(row.computing_s for row in backbone.rows)
        estimate_s = placed.step_s * self.alone.slowdown(fitted.units)
        what = f"{self.plans.shape}; {fitted.plan}, {how}"
        plan = self.plans.plan(fitted.units, before_whole_passes(placed.fills))
        return Candidate(BUBBLE_FILLING, what, plan, estimate_s, bound_s)
