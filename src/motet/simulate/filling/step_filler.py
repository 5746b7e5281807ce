"""The Program of a step whose bubbles are filled from the step's own lengths (`Plan.filling` is "by_step").

Lengths give the seconds of each pass by the figures of the Plan's devices. Seconds become ticks, so that ranks agree.
Messages and collectives take no time where fills are decided, as where microbatches are ordered. The step is simulated
with them before its fills are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np

from motet.assign.step import StepAssignment
from motet.core.arrays import Float64Array, Int64Array
from motet.core.exchange import NS_PER_S
from motet.cost.source import cost_model
from motet.schedule import PlannedProgram
from motet.schedule.from_plan import BubbleProgram
from motet.schedule.passes.part_runs import PartRun, joined_parts
from motet.schedule.program import Action, Kind
from motet.simulate.engine.simulate import Prepared, simulate_together
from motet.simulate.engine.table import PASSES
from motet.simulate.filling.memory import fits
from motet.simulate.filling.pass_order import PassOrder
from motet.simulate.filling.placement import (
    FAR,
    ChosenPipelines,
    PassParts,
    PlacedRun,
    Placement,
    RankBubbles,
    StepEncoder,
)
from motet.simulate.filling.search import shortest
from motet.simulate.predict.met_passes import met_passes
from motet.simulate.predict.program_times import stage_times_of
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.traffic import Traffic

_TICK_BITS = 30
"""The longest pass of a step takes between 2^29 and 2^30 ticks."""


@dataclass(frozen=True)
class _PlannedEncoder:
    """One encoder beside one pipeline of the backbone.

    stages: per pipeline, the numbers of its stages. sink: the stage that it feeds.
    own:    per microbatch, the pipeline that takes it by the Plan's own fills.
    """

    stages: tuple[tuple[int, ...], ...]
    sink: int
    own: list[int]


class StepFiller:
    """Decides the fills of the steps of one Plan. What does not depend on lengths is made once.

    own: the Program of the Plan's own fills, which hold for steps that gain nothing.
    has_one_program: whether all islands have one Program in a step, as their ranks meet in each microbatch.
    """

    def __init__(self, own: PlannedProgram) -> None:
        self.own, plan = own, own.layout.plan
        self._cost = cost_model(plan.cluster, plan.precision, moments=plan.moments)
        self._bubbles = BubbleProgram(own.layout)
        self._backbone = PassOrder(self._bubbles.program)
        self._bare, _ = self._bubbles.bare(plan.fills)
        self._simulated = Prepared(own.program)
        self._joined = replace(own, program=joined_parts(own.program)[0])
        self._static = PassOrder(self._bare)
        self._recomputes = {action.stage for action in self._static.actions if action.kind is Kind.R}
        self._num_parts = Counter[tuple[int, Kind]]()
        for row in self._bare.actions:
            for stage, kind, _, part, _ in row:
                self._num_parts[stage, kind] = max(self._num_parts[stage, kind], part + 1, 1)
        self._encoders = tuple(self._found_encoders())
        self._parts_of_pass = cache(self._all_parts)
        self.has_one_program = plan.balance == "split" or any(unit.ep > 1 or unit.zero > 1 for unit in plan.units)
        self._joint = lru_cache(maxsize=1)(self._decided)

    def program(self, assignment: StepAssignment, island: int) -> PlannedProgram:
        """The Program of an island in a step; `own` if nothing is predicted to be faster. Deterministic.

        Replicas that share experts or sequences meet in passes, and those of ZeRO 2 and 3 in collectives of each
        microbatch, so that all islands have one Program then, made for the longest pass of any. The last step's is
        kept.
        """
        if self.has_one_program:
            return self._joint(assignment, range(self.own.layout.num_islands))
        return self._decided(assignment, (island,))

    def _decided(self, assignment: StepAssignment, islands: Sequence[int]) -> PlannedProgram:
        pricing = Pricing(self.own.layout.plan, self._joined, assignment, self._cost)
        runs = self.runs(pricing, islands)
        if not runs:
            return self.own
        filled = self._bubbles.refilled(self.own, runs)
        if filled is None or not all(fits(filled, pricing, island) for island in islands):
            return self.own
        return filled if self._is_shorter(filled, pricing, islands) else self.own

    def runs(self, pricing: Pricing, islands: Sequence[int]) -> list[list[PartRun]]:
        """Per program rank, where encoders run; [] if the Plan's own fills are predicted to be as fast.

        islands: those of one Program.
        """
        ticks = self._ticks(pricing, islands)
        placement = self._placement(ticks)
        pipelines, taken = shortest(placement, [encoder.own for encoder in self._encoders])
        if taken >= max(self._static.ends(ticks)[1]):
            return []
        return [
            [self._run(placement.bubbles[rank], run, pipelines) for run in of_rank]
            for rank, of_rank in enumerate(placement.runs(pipelines))
        ]

    def _is_shorter(self, filled: PlannedProgram, pricing: Pricing, islands: Sequence[int]) -> bool:
        """Whether a step is shorter with its messages and collectives too, on the slowest island."""
        traffic = Traffic(pricing)
        times = [stage_times_of(pricing, traffic, island) for island in islands]
        programs, overlap = (Prepared(filled.program), self._simulated), self.own.layout.plan.cluster.device.overlaps
        meeting = met_passes(pricing, islands)
        takes_s = [
            max(timeline.makespan_s for timeline in simulate_together(program, times, meeting, overlap=overlap))
            for program in programs
        ]
        return round(takes_s[0] * NS_PER_S) < round(takes_s[1] * NS_PER_S)

    def _found_encoders(self) -> Iterator[_PlannedEncoder]:
        """The encoders in bubbles, by unit and replica of the backbone."""
        layout, first = self.own.layout, self._bubbles.program.num_stages
        numbers: dict[tuple[str, int], dict[int, list[int]]] = {}
        for number, stage in enumerate(self.own.stages[first:], first):
            replica, pipeline = divmod(stage.replica, layout.backbone.pp // stage.unit.pp)
            numbers.setdefault((stage.unit.name, replica), {}).setdefault(pipeline, []).append(number)
        # Of several sinks the first takes a microbatch in before the others, and gives its gradient back behind them.
        sinks = dict(reversed(self._bare.edges[len(self._bubbles.program.edges) :]))
        for by_pipeline in numbers.values():
            stages = tuple(map(tuple, by_pipeline.values()))
            own = [0] * layout.num_microbatches
            for pipeline, (begun, *_) in enumerate(stages):
                for microbatch in self.own.stages[begun].microbatches:
                    own[microbatch] = pipeline
            yield _PlannedEncoder(stages, sinks[stages[0][-1]], own)

    def _ticks(self, pricing: Pricing, islands: Sequence[int]) -> Int64Array:
        """Ticks of passes, int64 [len(PASSES), num_stages, num_microbatches], at least 1: the most of any island."""
        passes = [
            [self._passes_s(pricing, island, number) for number in range(len(self.own.stages))] for island in islands
        ]
        seconds = np.stack(passes).max(axis=0).swapaxes(0, 1)
        longest = float(seconds.max())
        scale = 2.0 ** (_TICK_BITS - int(np.frexp(longest)[1])) if longest > 0 else 1.0
        ticks: Int64Array = np.maximum(np.rint(seconds * scale), 1).astype(np.int64)
        return ticks

    def _passes_s(self, pricing: Pricing, island: int, number: int) -> Float64Array:
        prices = pricing.stage(self.own.stages[number], island)
        backward = prices.input + prices.backward_tensor
        if number not in self._recomputes:
            backward = backward + prices.recompute
        forward = prices.forward + prices.forward_tensor
        passes = {
            Kind.F: forward,
            Kind.R: prices.recompute,
            Kind.B: backward + prices.weight,
            Kind.I: backward,
            Kind.W: prices.weight,
        }
        return np.stack([passes[kind] for kind in PASSES])

    def _placement(self, ticks: Int64Array) -> Placement:
        order = self._backbone
        starts, ends = order.ends(ticks)
        bubbles = []
        for row in order.rows:
            idle = list(zip([-FAR, *(ends[number] for number in row)], [*(starts[number] for number in row), FAR]))
            kept = [index for index, (start, end) in enumerate(idle) if start < end]
            bubbles.append(RankBubbles([idle[index][0] for index in kept], [idle[index][1] for index in kept], kept))
        needed, ready = self._edges(starts, ends)
        encoders = [
            StepEncoder(
                tuple(tuple(self.own.stages[number].rank for number in pipeline) for pipeline in encoder.stages),
                tuple(tuple(self._parts(ticks, n, Kind.F) for n in pipeline) for pipeline in encoder.stages),
                tuple(tuple(self._parts(ticks, n, Kind.B) for n in pipeline) for pipeline in encoder.stages),
                needed[encoder.sink],
                ready[encoder.sink],
            )
            for encoder in self._encoders
        ]
        return Placement(bubbles, encoders, max(ends))

    def _parts(self, ticks: Int64Array, number: int, kind: Kind) -> PassParts:
        """The parts of the passes of a stage. Parts of a pass take equally long, rounded up."""
        num = self._num_parts[number, kind]
        return PassParts(num, (-(-ticks[PASSES.index(kind), number] // num)).tolist() if num else [])

    def _edges(self, starts: list[int], ends: list[int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """For each stage that encoders feed: when it takes in each microbatch, and when its gradient is there."""
        num = self.own.layout.num_microbatches
        needed = {encoder.sink: [0] * num for encoder in self._encoders}
        ready = {encoder.sink: [0] * num for encoder in self._encoders}
        for number, (stage, kind, microbatch, _, _) in enumerate(self._backbone.actions):
            if stage in needed and kind is Kind.F:
                needed[stage][microbatch] = starts[number]
            elif stage in needed and kind in (Kind.B, Kind.I):
                ready[stage][microbatch] = ends[number]
        return needed, ready

    def _run(self, bubbles: RankBubbles, run: PlacedRun, pipelines: ChosenPipelines) -> PartRun:
        pipeline = pipelines[run.encoder][run.microbatch]
        number, kind = self._encoders[run.encoder].stages[pipeline][run.stage], Kind.B if run.is_backward else Kind.F
        parts = self._parts_of_pass(number, kind, run.microbatch)
        return PartRun(bubbles.before[run.bubble], parts[run.part : run.part + run.num])

    def _all_parts(self, number: int, kind: Kind, microbatch: int) -> tuple[Action, ...]:
        num = self._num_parts[number, kind]
        return tuple(Action(number, kind, microbatch, part) for part in (range(num) if num > 1 else (-1,)))
