"""The fastest Plan of a small job by enumeration of a written space: what the planner's answer is held against.

Nothing here is of `motet.planner`. Seconds and bytes of a Plan are the simulator's, as they are for the planner.

The space, for N ranks:

- data parallelism: TP 1, 2, 4, 8 and every DP that divides the batch; every microbatch size that divides a rank's
  examples; ZeRO 0, and ZeRO 1, 2 and 3 over groups of every divisor of DP; every way of balancing.
- pipelines: the modules in every partition into units. A unit with the backbone is a chain of its encoders and the
  backbone. Encoders alone, or together in one unit, are on ranks of their own; or all are on the backbone's ranks
  before and after its passes; or some are replicated in its stages. Each unit has TP 1, 2, 4, 8, and CP, PP and DP of
  its own, whether or not they divide each other or the examples; every cut of its blocks; every microbatch size; 1F1B,
  interleaved 1F1B with 2 and 3 chunks, ZB-H1 and ZB-V where the schedule allows it. Ranks may be left over.
- a unit's ZeRO stage, orders of examples, ways of balancing pipelines, and groups under caps of the backbone and an
  encoder, the least under which no batch that is drawn has more groups than microbatches.

Tensor-parallel groups are inside a node or whole nodes, as the units with the largest TP come first.

What does not fit is recomputed whole; then each module of each stage recomputes as few blocks as fit, those that take
the longest first.

What is left out:

1. Structures (all but the last line of the space) whose bound is not below the best step so far. The bound is below
   every order and balance: a stage computes all its blocks' work in microbatches of mean size, which is least as
   seconds are convex in rows; before its first and after its last pass, the stages before it compute the smallest
   microbatch.
2. A structure is simulated with ZeRO 1, as given. The last line of the space is enumerated for those within MARGIN of
   the best, one field after the other, until none gains.
3. Of an encoder's unit all but the NUM_CUTS cuts with the least slowest stages for given degrees, and all but the
   NUM_CHOICES degrees and cuts with the least for a number of ranks; of the backbone's unit beside others, all but the
   NUM_CHOICES cuts for given degrees.
4. What would be too slow even if it fitted without recomputation, which only adds to a step.
5. What is left after `max_simulated`, the least bounds first; `Enumerated.is_whole` says whether any was.
6. Groups under other caps, and caps of structures that are left out by their bound, which is of equally many examples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise, product

import numpy as np

from motet.assign.groups import groups_under
from motet.core.arrays import Float64Array
from motet.core.cluster import Cluster
from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.core.spec import ModelSpec
from motet.core.workload import BACKBONE, BatchLengths, total_lengths
from motet.cost.flops import work_of
from motet.cost.memory import stage_layers
from motet.cost.model import CostModel, Work, backward_seconds
from motet.schedule import check_fit, planned
from motet.simulate.predict.memory import memory_of
from motet.simulate.predict.predict import assign_batch, predict_assigned
from motet.simulate.predict.stage_pricing import Pricing

TENSOR_DEGREES, CHUNKS = (1, 2, 4, 8), (2, 3)
NUM_CUTS, NUM_CHOICES = 2, 4
MARGIN = 1.06
BALANCES = ("off", "joint", "per_phase", "auto")
ORDERS = ("intra", "inter", "both")
CAP_GROWTH = 1.02
"""The factor by which caps that are too small grow at a time."""


@dataclass(frozen=True)
class SmallJob:
    """A job to enumerate. capacity_bytes: that a Plan may fill on a rank; drawn: batches that must fit under caps."""

    model: ModelSpec
    cluster: Cluster
    batch: BatchLengths
    cost: CostModel
    capacity_bytes: float
    drawn: tuple[BatchLengths, ...] = ()


@dataclass
class Enumerated:
    """What came of it. step_s, plan: the best below the step to beat; None if there is none."""

    step_s: float
    plan: Plan | None = None
    num_structures: int = 0
    num_simulated: int = 0
    is_whole: bool = True
    wins: list[tuple[float, Plan]] = field(default_factory=list)


def enumerate_plans(job: SmallJob, to_beat_s: float, max_simulated: int) -> Enumerated:
    """The fastest Plan of the space that takes less than to_beat_s."""
    found = Enumerated(to_beat_s)
    structures = sorted(_Structures(job, to_beat_s), key=lambda one: one[0])
    found.num_structures = len(structures)
    near: list[tuple[float, Plan]] = []
    for bound_s, plan in structures:
        if bound_s >= found.step_s:
            break
        if found.num_simulated >= max_simulated:
            found.is_whole = False
            break
        if (simulated := _fitted(job, found, plan)) is not None:
            near.append(simulated)
    for step_s, plan in sorted(near, key=lambda one: one[0]):
        if step_s > MARGIN * found.step_s:
            break
        if found.num_simulated >= 2 * max_simulated:
            found.is_whole = False
            break
        _varied(job, found, step_s, plan)
    return found


# ------------------------------------------------------------------------------------------------- simulated Plans


def _simulate(job: SmallJob, found: Enumerated, plan: Plan) -> tuple[float, float]:
    """Seconds of a step, and the bytes that the fullest rank lacks."""
    prediction = predict_assigned(plan, planned(plan), assign_batch(plan, job.batch, job.cost), job.cost)
    found.num_simulated += 1
    return prediction.step_s, max(float(prediction.peak_bytes.max()) - job.capacity_bytes, 0.0)


def _fitted(job: SmallJob, found: Enumerated, plan: Plan) -> tuple[float, Plan] | None:
    """The step with the least recomputation that fits; with more sharding if nothing fits otherwise."""
    try:
        check_fit(plan)
        for zero in (None, 2, 3):
            sharded = plan if zero is None else _with_zero(plan, zero)
            if sharded is None or (zero is not None and sharded == plan):
                continue
            step_s, chosen = _with_recomputation(job, found, sharded)
            if chosen is not None:
                if step_s < found.step_s:
                    _note(found, step_s, chosen)
                return step_s, chosen
    except UserError:
        return None
    return None


def _note(found: Enumerated, step_s: float, plan: Plan) -> None:
    found.step_s, found.plan = step_s, plan
    found.wins.append((step_s, plan))


def _with_zero(plan: Plan, zero: int) -> Plan | None:
    units = tuple(replace(unit, zero=zero) if unit.dp * unit.cp > 1 and unit.zero else unit for unit in plan.units)
    return None if units == plan.units else replace(plan, units=units)


def _with_recomputation(job: SmallJob, found: Enumerated, plan: Plan) -> tuple[float, Plan | None]:
    step_s, lacking = _simulate(job, found, plan)
    if lacking <= 0:
        return step_s, plan
    if step_s >= found.step_s:
        return math.inf, None  # Recomputation only adds.
    # The state alone: with everything recomputed.
    full = replace(
        plan, units=tuple(replace(unit, recompute=tuple(dict(stage) for stage in unit.stages)) for unit in plan.units)
    )
    step_s, lacking = _simulate(job, found, full)
    if lacking > 0:
        return math.inf, None
    best, best_s = full, step_s
    # As little of it as fits: of each stage in turn, by halves.
    for index, unit in enumerate(full.units):
        for stage, counts in enumerate(unit.recompute):
            for name in sorted(counts, key=lambda name: -_recompute_s(job, name, unit.tp)):
                low, high = 0, counts[name]  # It fits with `high`.
                while low < high:
                    middle = (low + high) // 2
                    if _lacks(job, _recomputing(best, index, stage, name, middle)):
                        low = middle + 1
                    else:
                        high = middle
                best = _recomputing(best, index, stage, name, high)
    if best is not full:
        best_s, lacking = _simulate(job, found, best)
        if lacking > 0:
            return math.inf, None
    return best_s, best


def _recompute_s(job: SmallJob, name: str, tp: int) -> float:
    return float(_Blocks.of(job, name, tp, 1, 1).forward_s.max())


def _recomputing(plan: Plan, index: int, stage: int, name: str, count: int) -> Plan:
    unit = plan.units[index]
    recompute = list(unit.recompute)
    recompute[stage] = {**recompute[stage], name: count}
    return replace(
        plan, units=(*plan.units[:index], replace(unit, recompute=tuple(recompute)), *plan.units[index + 1 :])
    )


def _lacks(job: SmallJob, plan: Plan) -> bool:
    pricing = Pricing(plan, planned(plan), assign_batch(plan, job.batch, job.cost), job.cost)
    return float(sum(memory_of(pricing).values()).max()) > job.capacity_bytes


def _varied(job: SmallJob, found: Enumerated, step_s: float, plan: Plan) -> None:
    """ZeRO stages by unit, orders and ways of balancing, and groups, one field after the other."""
    best_s, best = step_s, plan
    for variants in (_zeros, _dealt, lambda best: _grouped(job, best)):
        for variant in list(variants(best)):
            try:
                check_fit(variant)
                variant_s, lacking = _simulate(job, found, variant)
            except UserError:
                continue
            if lacking <= 0 and variant_s < best_s:
                best_s, best = variant_s, variant
    if best_s < found.step_s:
        _note(found, best_s, best)


def _zeros(plan: Plan) -> Iterator[Plan]:
    if plan.schedule == "data_parallel":
        return
    choices = [(0, 1, 2, 3) if unit.dp * unit.cp > 1 else (unit.zero,) for unit in plan.units]
    for zeros in product(*choices):
        units = tuple(replace(unit, zero=zero) for unit, zero in zip(plan.units, zeros))
        if units != plan.units:
            yield replace(plan, units=units)


def _dealt(plan: Plan) -> Iterator[Plan]:
    if plan.schedule == "data_parallel":
        for balance in BALANCES:
            if balance != plan.balance:
                yield replace(plan, balance=balance)
        return
    for order in ORDERS:
        yield replace(plan, order=order)
    for balance in ("joint", "per_phase"):
        yield replace(plan, balance=balance)


def _grouped(job: SmallJob, plan: Plan) -> Iterator[Plan]:
    """Microbatches that are groups under caps, as they come and in the best order."""
    if plan.schedule == "data_parallel" or plan.microbatch_size == 1:
        return
    for module in job.model.modules:
        if module.name != BACKBONE:
            caps = _least_caps(job, (module.name, BACKBONE), plan.batch_size // plan.microbatch_size)
            for order in ("given", "both"):
                yield replace(plan, balance="off", order=order, microbatch_caps=caps)


def _least_caps(job: SmallJob, names: tuple[str, str], most: int) -> dict[str, int]:
    """Caps of two modules in the ratio of their lengths, the least under which each batch is `most` groups or fewer."""
    sizes = [{name: total_lengths(batch, name) for name in names} for batch in (job.batch, *job.drawn)]
    factor, caps = 1.0, dict[str, int]()
    while not caps or any(groups_under(caps, size, most) is None for size in sizes):
        caps = {name: max(round(factor * max(size[name].sum() for size in sizes) / most), 1) for name in names}
        factor *= CAP_GROWTH
    return caps


# ------------------------------------------------------------------------------------------------------ structures


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Bounds of a module's blocks, [num_blocks] each: seconds of all microbatches together, over all replicas."""

    forward_s: Float64Array
    input_s: Float64Array
    total_s: Float64Array

    @classmethod
    def of(cls, job: SmallJob, name: str, tp: int, cp: int, num_groups: int, size: int = 0) -> _Blocks:
        """num_groups: microbatches that have an item, at least. size: of the smallest `size` examples instead."""
        module, items = job.model.module(name), job.batch.of(name)
        columns = np.zeros((3, len(module.blocks)))
        starts = {block.start for block in module.blocks}
        targets, block = job.batch.num_targets if name == BACKBONE else None, -1
        priced: dict[object, Float64Array] = {}
        for index, placed in enumerate(stage_layers(job.model, {name: (0, len(module.blocks))}, {})):
            block += index in starts
            if placed not in priced:
                count = job.batch.num_examples
                each = work_of(
                    placed.layer, items.length, items.example, count, num_targets=targets, segments=items.segments
                )
                rows, pairs = each.rows, each.pairs
                if size:
                    rows, pairs = np.sort(rows)[:size], np.sort(pairs)[:size]
                share = cp * max(num_groups, 1)
                work = Work(rows.sum(keepdims=True) / share, pairs.sum(keepdims=True) / share)
                seconds = job.cost.layer_seconds(name, placed.layer, work, tp)
                tensor = float(job.cost.tensor_seconds(placed.layer, work, range(tp))[0]) if tp > 1 else 0.0
                forward = float(seconds.forward_s[0]) + tensor
                backward = float(backward_seconds(seconds, placed.layer, placed.needs_input)[0])
                backward += tensor * placed.has_backward
                through = float(seconds.input_s[0]) if placed.needs_input else 0.0
                priced[placed] = num_groups * np.array([forward, through, forward + backward])
            columns[:, block] += priced[placed]
        return cls(*columns)


@dataclass(frozen=True)
class _UnitChoice:
    """A unit's degrees and cut. bound_s: of its busiest stage with what passes before and after it."""

    modules: tuple[str, ...]
    tp: int
    cp: int
    pp: int
    dp: int
    stages: tuple[Mapping[str, int], ...]
    bound_s: float

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


class _Structures:
    """All structures whose bound is below to_beat_s, as (bound, Plan)."""

    def __init__(self, job: SmallJob, to_beat_s: float) -> None:
        self.job, self.to_beat_s = job, to_beat_s
        self.num_ranks, self.batch_size = job.cluster.num_ranks, job.batch.num_examples
        self.encoders = tuple(module.name for module in job.model.modules if module.name != BACKBONE)
        self._blocks = cache(lambda *key: _Blocks.of(job, *key))
        self._encoder_choices = cache(self._all_choices)
        self.num_with = {name: len(np.unique(job.batch.of(name).example)) for name in (*self.encoders, BACKBONE)}

    def __iter__(self) -> Iterator[tuple[float, Plan]]:
        yield from self._data_parallel()
        for hosted in _subsets(self.encoders):  # in the backbone's chain
            apart = tuple(name for name in self.encoders if name not in hosted)
            for groups in _partitions(apart):
                yield from self._pipelines(hosted, groups)
        for replicated in _subsets(self.encoders):
            if replicated:
                yield from self._replicated(replicated)
        if self.encoders:
            yield from self._in_bubbles()

    def _tensor_degrees(self) -> list[int]:
        node = self.job.cluster.ranks_per_node
        return [tp for tp in TENSOR_DEGREES if tp <= self.num_ranks and (node % tp == 0 or tp % node == 0)]

    # ------------------------------------------------------------------------------------------- data parallelism

    def _data_parallel(self) -> Iterator[tuple[float, Plan]]:
        names = (*self.encoders, BACKBONE)
        stage = {name: len(self.job.model.module(name).blocks) for name in names}
        for tp in self._tensor_degrees():
            for dp in range(1, self.num_ranks // tp + 1):
                if self.batch_size % dp:
                    continue
                for size in _divisors(self.batch_size // dp):
                    count = self.batch_size // (dp * size)
                    bound_s = sum(
                        self._colocated_s(name, tp, min(count, self._groups(name, dp * size))) / dp for name in names
                    )
                    if bound_s >= self.to_beat_s:
                        continue
                    for zero, shard in self._shardings(dp):
                        unit = Unit("all", (stage,), dp=dp, tp=tp, zero=zero, shard_size=shard)
                        balance = "auto" if dp > 1 else "off"
                        yield bound_s, self._plan((unit,), size, "data_parallel", balance)

    def _colocated_s(self, name: str, tp: int, num_groups: int) -> float:
        """Seconds of a module. A frozen backbone has no backward pass in microbatches without items of what is
        trained."""
        blocks = self._blocks(name, tp, 1, num_groups)
        is_frozen = name == BACKBONE and not self.job.model.module(name).trainable
        return float((blocks.forward_s if is_frozen else blocks.total_s).sum())

    def _shardings(self, dp: int) -> Iterator[tuple[int, int]]:
        yield 0, 0
        if dp > 1:
            for zero in (1, 2, 3):
                yield zero, 0
                for size in _divisors(dp):
                    if 1 < size < dp:
                        yield zero, size

    def _groups(self, name: str, size: int) -> int:
        """Microbatches of `size` examples that have an item of a module, at least."""
        return -(-self.num_with[name] // size)

    # --------------------------------------------------------------------------------------------------- pipelines

    def _pipelines(self, hosted: tuple[str, ...], groups: tuple[tuple[str, ...], ...]) -> Iterator[tuple[float, Plan]]:
        for tp, cp, pp, dp, size in self._degrees():
            left = self.num_ranks - tp * cp * pp * dp
            if left < len(groups):
                continue
            for schedule, chunks in self._schedules(pp, self.batch_size // (dp * size), alone=not groups):
                choices = self._cuts((*hosted, BACKBONE), tp, cp, pp, dp, size, chunks, schedule)
                if groups:
                    choices = sorted(choices, key=lambda one: one.bound_s)[:NUM_CHOICES]
                for choice in choices:
                    for others in self._beside(groups, left, dp * size):
                        bound_s = max(choice.bound_s, *(other.bound_s for other in others), 0.0)
                        yield bound_s, self._plan(_placed((*others, choice)), size, schedule)

    def _degrees(self) -> Iterator[tuple[int, int, int, int, int]]:
        num_blocks = sum(len(module.blocks) for module in self.job.model.modules)
        for tp in self._tensor_degrees():
            for cp in range(1, self.num_ranks // tp + 1):
                for pp in range(1, min(self.num_ranks // (tp * cp), num_blocks) + 1):
                    for dp in range(1, self.num_ranks // (tp * cp * pp) + 1):
                        for size in _divisors(self.batch_size // dp) if self.batch_size % dp == 0 else ():
                            yield tp, cp, pp, dp, size

    def _schedules(self, pp: int, num_microbatches: int, *, alone: bool) -> Iterator[tuple[str, int]]:
        yield "1f1b", 1
        if pp == 1:
            return
        if alone:
            yield "zb_h1", 1
            yield "zb_v", 2
        if not alone or num_microbatches % pp == 0:
            for chunks in CHUNKS:
                yield "interleaved_1f1b", chunks

    def _beside(self, groups: tuple[tuple[str, ...], ...], left: int, size: int) -> Iterator[tuple[_UnitChoice, ...]]:
        """A choice for each further unit, on `left` ranks together. size: examples of a global microbatch."""
        if not groups:
            yield ()
            return
        for choice in self._encoder_choices(groups[0], size):
            if choice.num_ranks <= left - (len(groups) - 1):
                for others in self._beside(groups[1:], left - choice.num_ranks, size):
                    yield (choice, *others)

    def _all_choices(self, names: tuple[str, ...], size: int) -> list[_UnitChoice]:
        num_blocks = sum(len(self.job.model.module(name).blocks) for name in names)
        most = self.num_ranks - 1
        found = []
        for tp in self._tensor_degrees():
            for cp in range(1, self.num_ranks // tp + 1):
                for pp in range(1, min(most // (tp * cp), num_blocks) + 1):
                    for dp in range(1, most // (tp * cp * pp) + 1):
                        cuts = self._cuts(names, tp, cp, pp, dp, size, 1, "1f1b")
                        found += sorted(cuts, key=lambda one: one.bound_s)[:NUM_CUTS]
        best: dict[int, list[_UnitChoice]] = {}
        for choice in sorted(found, key=lambda one: one.bound_s):
            best.setdefault(choice.num_ranks, []).append(choice)
        return [choice for of_size in best.values() for choice in of_size[:NUM_CHOICES]]

    def _cuts(
        self,
        names: tuple[str, ...],
        tp: int,
        cp: int,
        pp: int,
        dp: int,
        size: int,
        chunks: int,
        schedule: str,
    ) -> list[_UnitChoice]:
        """Every cut whose bound is below the step to beat. size: of a microbatch; of encoders, of the global one."""
        is_backbone = BACKBONE in names
        parts, smallest = [], []
        for name in names:
            groups = self._groups(name, size)
            parts.append(self._blocks(name, tp, cp, max(groups, 1)))
            smallest.append(self._blocks(name, tp, cp, 1, size) if is_backbone else None)
        total = np.concatenate([part.total_s for part in parts]) / dp
        if is_backbone:
            through = np.concatenate([part.forward_s + part.input_s for part in smallest])
        else:
            through = np.zeros(len(total))
        owner = [name for name, part in zip(names, parts) for _ in part.total_s]
        prefix = [0.0, *accumulate(total.tolist())]
        passing = [0.0, *accumulate(through.tolist())]
        num_stages, num_blocks = pp * chunks, len(owner)
        found: list[_UnitChoice] = []

        def extend(bounds: list[int], busy: list[float]) -> None:
            stage = len(bounds) - 1
            if stage == num_stages:
                bound = max(busy)
                if chunks == 1:
                    bound = max(
                        prefix[bounds[n + 1]] - prefix[bounds[n]] + passing[bounds[n]] for n in range(num_stages)
                    )
                if bound < self.to_beat_s:
                    stages = tuple(dict(Counter(owner[start:stop])) for start, stop in pairwise(bounds))
                    found.append(_UnitChoice(names, tp, cp, pp, dp, stages, bound))
                return
            rank = stage % pp if schedule != "zb_v" or stage < pp else 2 * pp - 1 - stage
            last = num_blocks - (num_stages - stage - 1)
            for stop in (last,) if stage == num_stages - 1 else range(bounds[-1] + 1, last + 1):
                added = busy[rank] + prefix[stop] - prefix[bounds[-1]]
                if added >= self.to_beat_s:
                    break
                extend([*bounds, stop], [*busy[:rank], added, *busy[rank + 1 :]])

        if num_stages <= num_blocks:
            extend([0], [0.0] * pp)
        return found

    def _replicated(self, replicated: tuple[str, ...]) -> Iterator[tuple[float, Plan]]:
        hosted = tuple(name for name in self.encoders if name not in replicated)
        for tp, cp, pp, dp, size in self._degrees():
            if pp == 1:
                continue
            added = sum(
                float(self._blocks(name, tp, cp, max(self._groups(name, size), 1)).total_s.sum()) / dp
                for name in replicated
            )
            for schedule in ("1f1b", "zb_h1"):
                for choice in self._cuts((*hosted, BACKBONE), tp, cp, pp, dp, size, 1, schedule):
                    if choice.bound_s + added < self.to_beat_s:
                        (unit,) = _placed((choice,))
                        plan = self._plan((replace(unit, replicated=replicated),), size, schedule)
                        yield choice.bound_s + added, plan

    def _in_bubbles(self) -> Iterator[tuple[float, Plan]]:
        """All encoders on the backbone's ranks, with its TP or less, before and after its passes."""
        for tp, cp, pp, dp, size in self._degrees():
            if pp == 1 or cp > 1:
                continue
            count = self.batch_size // (dp * size)
            for pp_encoder, tp_encoder in product(_divisors(pp), _divisors(tp)):
                if pp // pp_encoder > count or size % (tp // tp_encoder):
                    continue
                units = []
                for name in self.encoders:
                    num_blocks = len(self.job.model.module(name).blocks)
                    if pp_encoder > num_blocks:
                        break
                    cut = [num_blocks // pp_encoder + (n < num_blocks % pp_encoder) for n in range(pp_encoder)]
                    replicas = pp * tp * dp // (pp_encoder * tp_encoder)
                    stages = tuple({name: number} for number in cut)
                    units.append(Unit(name, stages, dp=replicas, pp=pp_encoder, tp=tp_encoder))
                else:
                    encoders_s = sum(
                        float(self._blocks(name, 1, 1, 1).total_s.sum()) / (pp * tp * dp) for name in self.encoders
                    )
                    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2)):
                        if schedule == "interleaved_1f1b" and count % pp:
                            continue
                        for choice in self._cuts((BACKBONE,), tp, cp, pp, dp, size, chunks, schedule):
                            mean_s = self._mean_s(choice, size) + encoders_s
                            bound_s = max(choice.bound_s, mean_s)
                            if bound_s < self.to_beat_s:
                                (unit,) = _placed((choice,))
                                yield bound_s, self._plan((unit, *units), size, schedule)

    def _mean_s(self, choice: _UnitChoice, size: int) -> float:
        blocks = self._blocks(BACKBONE, choice.tp, choice.cp, self._groups(BACKBONE, size))
        return float(blocks.total_s.sum()) / (choice.dp * choice.pp)

    def _plan(self, units: Sequence[Unit], size: int, schedule: str, balance: str = "off") -> Plan:
        job = self.job
        return Plan(job.model, job.cluster, tuple(units), self.batch_size, size, schedule, balance=balance)


def _placed(choices: Sequence[_UnitChoice]) -> tuple[Unit, ...]:
    """Units in the order of their TP, the largest first, so that their groups keep to nodes."""
    first, next_rank = {}, 0
    for index in sorted(range(len(choices)), key=lambda index: -choices[index].tp):
        first[index] = next_rank
        next_rank += choices[index].num_ranks
    return tuple(
        Unit("+".join(one.modules), one.stages, first[index], one.dp, one.pp, one.tp, one.cp)
        for index, one in enumerate(choices)
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _subsets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [
        tuple(name for name, taken in zip(names, choice) if taken)
        for choice in product((False, True), repeat=len(names))
    ]


def _partitions(names: tuple[str, ...]) -> list[tuple[tuple[str, ...], ...]]:
    if not names:
        return [()]
    first, *rest = names
    found = []
    for groups in _partitions(tuple(rest)):
        found.append(((first,), *groups))
        found += [(*groups[:index], (first, *group), *groups[index + 1 :]) for index, group in enumerate(groups)]
    return found
