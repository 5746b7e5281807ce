"""A lower bound of the step of every Plan of a job, whatever its strategy: how far an answer can be from the best.

Every Plan computes all items once, in whole examples of the backbone, and updates every trainable parameter. For each
shape of the backbone's unit (TP, CP, PP, DP on at most the ranks of the cluster), with encoders on its ranks or on
others, a step takes at least each of these:

- `work`: a rank's even share of all rows, merged into one microbatch, and of the optimizer's update;
- `item`: the longest example, which one replica computes, or, of the j * dp + 1 longest, the least j + 1: some replica
  has as many of them;
- `bubbles`: the slowest stage of the best cut of the backbone; before its first pass, the stages before it compute the
  smallest example, and after its last pass they do so again. Not where a rank may have several chunks;
- `communication`: gradients are reduced after the forward passes of all microbatches, or gathered before and reduced
  after them.

The bound is the least, over shapes, of the largest of these. `memory` binds where shapes that would be faster cannot
hold the state of the model, or only under ZeRO 3, which gathers parameters for every pass.

Rows that context-parallel ranks give each other are in none of them: how many they are depends on the window, on whole
sequences that a rank has, and on the way in which they go.

It is proven where a layer's seconds rise with its rows and pairs, and where one microbatch takes no more than several
with the same rows. Both hold of `cost.analytic`, and of a profile but for its noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, combinations
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from motet.core.arrays import Float64Array, Int64Array
from motet.core.errors import UserError
from motet.core.spec import Layer
from motet.core.workload import BACKBONE
from motet.cost.flops import like_layer, work_of_items
from motet.cost.memory import StageLayer, stage_layers, state_bytes
from motet.cost.model import Work, backward_seconds
from motet.planner.degrees import divisors
from motet.planner.infeasible import tensor_degrees
from motet.planner.job import Job

Term = Literal["work", "item", "memory", "bubbles", "communication"]
MAX_RANKS_BY_SHAPE = 64
"""On more ranks, replicas need not divide the batch here: each rank has an even share."""
_MAX_SHARED = 4
"""`item` looks at so many examples on one replica, at most."""
_PRECISION = 1e-3
"""The relative precision of the best cut."""


class StepBound(NamedTuple):
    """step_s: seconds that no Plan's step is below; infinite where no Plan fits. term: what binds.

    Example: a step of 0.3 s is at most 20 % above the best.
        >>> bound_s, term = StepBound(0.25, "work")
        >>> f"{0.3 / bound_s - 1:.0%}, by {term}"
        '20%, by work'
    """

    step_s: float
    term: Term


class _Shape(NamedTuple):
    """Degrees of the backbone's unit. apart: the encoders on ranks of their own."""

    tp: int
    cp: int
    pp: int
    dp: int
    apart: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def num_copies(self) -> int:
        return self.cp * self.dp


class _Passes(NamedTuple):
    """Seconds of a rank: forward, backward for the input's gradients, and all of backward."""

    forward_s: float
    input_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, eq=False)
class _Rows:
    """float64 [2, 2, num_examples]: rows and pairs of a layer, forward; and those with a backward pass."""

    of_examples: Float64Array

    @cached_property
    def total(self) -> Float64Array:
        """[2, 2]: over all examples."""
        summed: Float64Array = self.of_examples.sum(axis=2)
        return summed


_Share = Callable[[_Rows], Float64Array]
"""[2, 2]: rows and pairs of one replica, forward and backward."""


class ExampleRows:
    """Rows and pairs of each example of a job's batch in each layer. Jobs on other clusters (`Job.on`) share them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._known: dict[tuple[str, Layer], _Rows] = {}

    def of(self, name: str, layer: Layer) -> _Rows:
        """Those of a layer of a module. Cached."""
        key = name, like_layer(layer)
        if key not in self._known:
            self._known[key] = self._counted(*key)
        return self._known[key]

    def _counted(self, name: str, layer: Layer) -> _Rows:
        batch, items = self.job.batch, self.job.batch.of(name)
        targets = batch.num_targets if name == BACKBONE else None
        each = work_of_items(layer, items, items.example, batch.num_examples, num_targets=targets)
        every = np.stack([each.rows, each.pairs])
        # A microbatch without items of what learns has no backward pass under data parallelism.
        return _Rows(np.stack([every, every * batch.has_any(self.job.model.learners(name))]))


def step_bound(
    job: Job, *, without: Collection[Term] = (), rows: ExampleRows | None = None, up_to_s: float = math.inf
) -> StepBound:
    """The bound of a job on its own batch; 0 where a profile lacks times without TP. Kept for each job.

    without: terms to leave out. rows: of the batch, where several clusters are bounded.
    up_to_s: a larger bound is not looked for; it is this then, which takes a fraction of the time.
    """
    is_whole = not without and up_to_s == math.inf
    if is_whole and job in _known_bounds:
        return _known_bounds[job]
    try:
        bound = _Bounds(job, frozenset(without), rows or ExampleRows(job)).least(up_to_s)
    except UserError:
        bound = StepBound(0.0, "work")
    if is_whole:
        _known_bounds[job] = bound
    return bound


_known_bounds: WeakKeyDictionary[Job, StepBound] = WeakKeyDictionary()
"""Whole results of `step_bound`: a search, its refinement and its report all need that of their job."""


class _Bounds:
    """The bounds of all shapes of a job."""

    def __init__(self, job: Job, without: frozenset[Term], rows: ExampleRows) -> None:
        self.job, self.without, self.cost = job, without, job.cost.unwrapped()
        self.num_ranks, self.batch_size = job.cluster.num_ranks, job.batch.num_examples
        self.encoders = tuple(module.name for module in job.model.modules if module.name != BACKBONE)
        self.num_blocks = {name: len(job.model.module(name).blocks) for name in (*self.encoders, BACKBONE)}
        self.parameters = {name: self._parameters(name) for name in self.num_blocks}
        self.held = {name: self._parameters(name, spread=True) for name in self.num_blocks}
        self._rows = rows.of
        self._share = cache(self._even_share)
        self._longest = cache(self._longest_on_one)
        self._blocks = cache(self._block_seconds)
        self._reduced = cache(self._reduced_s)
        self._sent_bytes = cache(self._bytes_sent)
        self._backbone = cache(self._backbone_s)
        self._layers = cache(self._layers_of)
        self._step = cache(self._step_s)

    def least(self, up_to_s: float = math.inf) -> StepBound:
        """The least bound of a shape, and what binds. up_to_s: as of `step_bound`."""
        best, free_s = StepBound(math.inf, "memory"), math.inf
        for floor_s, shape in sorted(
            ((self._floor_s(shape), shape) for shape in self._shapes()), key=lambda one: one[0]
        ):
            if floor_s >= min(best.step_s, up_to_s):
                break
            terms = self._terms(shape, best.step_s)
            if max(terms.values()) >= best.step_s:
                continue
            if "bubbles" not in self.without and shape.pp > 1 and not self._may_have_chunks(shape):
                terms["bubbles"] = self._bubbles_s(shape, max(terms.values()), best.step_s)
            free_s = min(free_s, max(terms.values()))
            if "memory" not in self.without:
                if not self._fits(shape, (0, 1, 2, 3)):
                    continue
                if not self._fits(shape, (0, 1, 2)):
                    terms["memory"] = self._gathered_s(shape)
            term = max(terms, key=lambda name: terms[name])
            if terms[term] < best.step_s:
                best = StepBound(terms[term], term)
        if best.step_s > up_to_s:
            return StepBound(up_to_s, best.term)
        return best if best.step_s <= free_s else StepBound(best.step_s, "memory")

    # ---------------------------------------------------------------------------------------------------- shapes

    def _shapes(self) -> Iterator[_Shape]:
        """All of them; of those that take equally long, the first with the most ranks counts."""
        degrees = tensor_degrees(self.job, BACKBONE, on_fewer=True)
        most_stages = sum(self.num_blocks.values())
        if self.num_ranks > MAX_RANKS_BY_SHAPE:
            for tp in degrees:
                for pp in range(1, min(self.num_ranks // tp, most_stages) + 1):
                    yield _Shape(tp, 1, pp, self.num_ranks // (tp * pp), ())
            return
        replicas = [dp for dp in divisors(self.batch_size) if dp <= self.num_ranks]
        found = [
            _Shape(tp, cp, pp, dp, apart)
            for tp in degrees
            for cp in range(1, self.num_ranks + 1)
            for dp in replicas
            for pp in range(1, min(self.num_ranks // (tp * cp * dp), most_stages) + 1)
            for apart in self._parted()
            if tp * cp * dp * pp + len(apart[:1]) <= self.num_ranks
        ]
        yield from sorted(found, key=lambda shape: (-shape.num_ranks, shape.tp, shape.pp))

    def _parted(self) -> list[tuple[str, ...]]:
        return list(chain.from_iterable(combinations(self.encoders, count) for count in range(len(self.encoders) + 1)))

    def _may_have_chunks(self, shape: _Shape) -> bool:
        """Whether interleaved schedules and ZB-V have the shape, which hide almost all of the bubbles bounded here."""
        hosted = [name for name in self.num_blocks if name not in shape.apart]
        return 2 * shape.pp <= sum(self.num_blocks[name] for name in hosted)

    # ----------------------------------------------------------------------------------------------------- terms

    def _terms(self, shape: _Shape, most_s: float) -> dict[Term, float]:
        """The terms of a shape, up to the first that is not below most_s."""
        terms: dict[Term, float] = {"work": self._work_s(shape)}
        if "item" not in self.without and terms["work"] < most_s:
            terms["item"] = self._item_s(shape)
        if "communication" not in self.without and max(terms.values()) < most_s:
            terms["communication"] = self._communication_s(shape)
        return terms

    def _floor_s(self, shape: _Shape) -> float:
        """`_work_s` in one microbatch on one rank, divided: no more, as several microbatches take no less than one."""
        hosted = [name for name in self.encoders if name not in shape.apart]
        own_s = self._share(BACKBONE, shape.tp, shape.cp, 1).total_s / (shape.dp * shape.pp)
        own_s += (sum(self._share(name, 1, 1, 1).total_s for name in hosted) + self._step(*hosted, BACKBONE)) / (
            shape.num_ranks
        )
        return max(own_s, self._apart_s(shape))

    def _apart_s(self, shape: _Shape) -> float:
        """The even share of the ranks of encoders apart; 0 if there are none."""
        if not shape.apart:
            return 0.0
        others_s = sum(self._share(name, 1, 1, 1).total_s for name in shape.apart) + self._step(*shape.apart)
        return others_s / (self.num_ranks - shape.num_ranks)

    def _work_s(self, shape: _Shape) -> float:
        """The even share of a rank of the backbone's unit, or of those apart."""
        per_rank = shape.pp * shape.tp
        hosted = [name for name in self.encoders if name not in shape.apart]
        own_s = self._backbone(shape.tp, shape.cp, shape.dp, shape.pp)
        own_s += sum(self._share(name, 1, 1, shape.num_copies).total_s for name in hosted) / per_rank
        own_s += self._step(*hosted, BACKBONE) / shape.num_ranks
        return max(own_s, self._apart_s(shape))

    def _backbone_s(self, tp: int, cp: int, dp: int, pp: int) -> float:
        """The even share of one of the backbone's ranks, in the best number of microbatches.

        A pipeline needs several: the largest has at least the mean rows, and passes stage after stage.
        """
        whole = self._share(BACKBONE, tp, cp, dp)
        if pp == 1 or self.num_ranks > MAX_RANKS_BY_SHAPE:
            return whole.total_s / pp
        best_s = math.inf
        for number in range(1, self.batch_size // dp + 1):
            mean = self._share(BACKBONE, tp, cp, dp * number)
            best_s = min(best_s, max(number * mean.total_s / pp, mean.forward_s + mean.input_s))
            if number * mean.total_s / pp >= best_s:
                break
        return best_s

    def _step_s(self, *names: str) -> float:
        trainable = sum(self.parameters[name][1] for name in names)
        return self.cost.step_seconds(trainable) if trainable else 0.0

    def _item_s(self, shape: _Shape) -> float:
        if self.num_ranks > MAX_RANKS_BY_SHAPE:
            shared = self._longest(shape.tp, self.num_ranks // shape.tp, 1, 0)
            return shared.forward_s + shared.input_s
        alone, *together = (
            self._longest(shape.tp, shape.cp, shape.dp, count)
            for count in range(min(_MAX_SHARED, (self.batch_size - 1) // shape.dp + 1))
        )
        # One example passes stage after stage; the gradients of weights may come beside it.
        alone_s = alone.total_s if shape.pp == 1 else alone.forward_s + alone.input_s
        return max(alone_s, *(passes.total_s / shape.pp for passes in together), 0.0)

    def _communication_s(self, shape: _Shape) -> float:
        if self.num_ranks > MAX_RANKS_BY_SHAPE:
            return 0.0
        return max(self._reduction_s(shape), self._sending_s(shape))

    def _sending_s(self, shape: _Shape) -> float:
        """What the stage that sends least sends forward, or what encoders apart send to the backbone.

        Its ranks send over the faster link, but for one boundary of a pipeline that is longer than a node.
        """
        node, seconds = self.job.cluster.ranks_per_node, [0.0]
        per_stage = shape.num_ranks // shape.pp
        if shape.pp > 1:
            least = min(self._sent_bytes(name, is_cut=True) for name in self.num_blocks if name not in shape.apart)
            peer = node if (shape.pp - 1) * per_stage >= node else 1
            seconds.append(self._send_s(least / per_stage, peer))
        if shape.apart:
            outputs = sum(self._sent_bytes(name, is_cut=False) for name in shape.apart)
            seconds.append(self._send_s(outputs / per_stage, 1))
        return max(seconds)

    def _send_s(self, size_bytes: float, peer: int) -> float:
        return float(self.cost.send_seconds(np.array([size_bytes]), (0, peer))[0]) if size_bytes else 0.0

    def _bytes_sent(self, name: str, *, is_cut: bool) -> float:
        """Bytes of the batch behind a module; or behind the block of it that has the fewest."""
        module, element_bytes = self.job.model.module(name), self.job.mixed_precision(pipeline=True).compute
        if not is_cut and name not in {source for source, _ in self.job.model.edges}:
            return 0.0
        stops = range(1, len(module.blocks) + (name != BACKBONE)) if is_cut else (len(module.blocks),)
        sent = {module.sent(stop) for stop in stops}
        rows = [self._rows(name, layer).total[0, 0] * layer.output_width for layer in sent]
        return min(rows, default=math.inf) * element_bytes

    def _reduction_s(self, shape: _Shape) -> float:
        trainable = self.held[BACKBONE][1] / shape.tp
        if shape.num_copies == 1 or not trainable:
            return 0.0
        passes = self._share(BACKBONE, shape.tp, shape.cp, shape.dp)
        choices = self._reduced(trainable, shape.tp, shape.num_copies, shape.pp > 1)
        if shape.pp == 1:  # FSDP reduces a slice while others compute backward.
            return min(max(passes.forward_s, gathered_s) + reduced_s for gathered_s, reduced_s in choices)
        beside_s = 0.0 if self._may_have_chunks(shape) else passes.total_s
        return min(beside_s + gathered_s + reduced_s for gathered_s, reduced_s in choices) / shape.pp

    def _reduced_s(self, number: float, tp: int, num_copies: int, pipeline: bool) -> list[tuple[float, float]]:
        """Seconds to gather parameters and to reduce gradients on one rank, by how many ranks share them."""
        precision = self.job.mixed_precision(pipeline=pipeline)
        gradients, choices = number * precision.gradient, []
        for sharing in divisors(num_copies):
            inside, across = range(0, sharing * tp, tp), range(0, num_copies * tp, sharing * tp)
            gathered_s = reduced_s = 0.0
            if sharing > 1:
                gathered_s = self.cost.gather_seconds(number * precision.compute, inside)
                reduced_s = self.cost.reduce_scatter_seconds(gradients, inside)
            if len(across) > 1:
                reduced_s += self.cost.all_reduce_seconds(gradients / sharing, across)
            choices.append((gathered_s, reduced_s))
        return choices

    def _bubbles_s(self, shape: _Shape, least_s: float, most_s: float) -> float:
        """The slowest stage of the best cut of the backbone, between two bounds; most_s for that or more.

        Stages before and after it may have encoders, or nothing of the backbone.
        """
        total, passing = self._blocks(shape.tp, shape.cp, shape.dp)
        before = np.concatenate([[0.0], total.cumsum()])
        waited = np.concatenate([[0.0], passing.cumsum()])

        def can_take(limit_s: float) -> bool:
            first = 0
            for _ in range(shape.pp):
                room_s = limit_s - float(waited[first])
                first = int(np.searchsorted(before, before[first] + room_s, side="right")) - 1
                if first >= len(total):
                    return True
            return False

        if can_take(least_s):
            return least_s
        high_s = most_s if most_s < math.inf else float(before[-1] + waited[-1])
        if not can_take(high_s):
            return high_s
        while high_s - least_s > _PRECISION * least_s:
            middle_s = (least_s + high_s) / 2
            least_s, high_s = (least_s, middle_s) if can_take(middle_s) else (middle_s, high_s)
        return least_s

    # ---------------------------------------------------------------------------------------------------- memory

    def _fits(self, shape: _Shape, stages: tuple[int, ...]) -> bool:
        """Whether a mean rank can hold its share of the state under one of the ZeRO stages."""
        hosted = [name for name in self.num_blocks if name not in shape.apart]
        own = self._state_bytes(hosted, shape.tp * shape.pp, shape.num_copies, shape.pp > 1, stages)
        left = self.num_ranks - shape.num_ranks
        others = self._state_bytes(shape.apart, 1, left, True, (3,)) if shape.apart else 0.0
        return max(own, others) <= self.job.capacity_bytes

    def _state_bytes(
        self, names: Collection[str], parts: int, num_copies: int, pipeline: bool, stages: tuple[int, ...]
    ) -> float:
        total, trainable = (sum(self.held[name][index] for name in names) // parts for index in (0, 1))
        kinds = (True,) if pipeline else (False, True)
        return min(
            sum(state_bytes(total, trainable, precision=precision, zero=zero, shard_ranks=num_copies))
            for precision in (self.job.mixed_precision(pipeline=kind) for kind in kinds)
            for zero in stages
        )

    def _gathered_s(self, shape: _Shape) -> float:
        """Messages of ZeRO 3 on a rank: parameters are gathered at least once, gradients reduced once."""
        if "communication" in self.without or shape.num_copies == 1 or self.num_ranks > MAX_RANKS_BY_SHAPE:
            return 0.0
        total, trainable = (number / shape.tp for number in self.held[BACKBONE])
        precision = self.job.mixed_precision(pipeline=shape.pp > 1)
        ranks = range(0, 2 * shape.tp, shape.tp)
        gathered_s = self.cost.gather_seconds(total * precision.compute, ranks)
        reduced_s = self.cost.reduce_scatter_seconds(trainable * precision.gradient, ranks) if trainable else 0.0
        return (gathered_s + reduced_s) / shape.pp

    def _parameters(self, name: str, *, spread: bool = False) -> tuple[int, int]:
        """All and trainable ones. spread: those of a rank where one expert of each layer is on each rank."""
        layers = [_spread(layer) if spread else layer for layer in self.job.model.module(name).layers]
        total = sum(layer.parameters for layer in layers)
        return total, sum(layer.updated_parameters for layer in layers)

    # --------------------------------------------------------------------------------------------------- seconds

    def _even_share(self, name: str, tp: int, cp: int, num_groups: int) -> _Passes:
        """A module on one of num_groups equal parts of the batch."""
        return self._summed(name, tp, cp, lambda rows: rows.total / num_groups)

    def _longest_on_one(self, tp: int, cp: int, dp: int, count: int) -> _Passes:
        """count + 1 examples that are on one replica: of the count * dp + 1 longest, the shortest."""
        longest = self._by_length[: count * dp + 1]

        def share(rows: _Rows) -> Float64Array:
            least = np.sort(rows.of_examples[:, :, longest], axis=2)[:, :, : count + 1]
            summed: Float64Array = least.sum(axis=2)
            return summed

        return self._summed(BACKBONE, tp, cp, share)

    @cached_property
    def _by_length(self) -> Int64Array:
        """Examples, the longest first."""
        return np.argsort(-self.job.batch.sequence, kind="stable")

    def _block_seconds(self, tp: int, cp: int, dp: int) -> tuple[Float64Array, Float64Array]:
        """By block of the backbone, [num_blocks] each: its even share, and the smallest example passing both ways."""
        total, passing = np.zeros((2, self.num_blocks[BACKBONE]))
        for number in range(len(total)):
            layers = Counter(stage_layers(self.job.model, {BACKBONE: (number, number + 1)}, {}))
            for placed, count in layers.items():
                share = self._priced(placed, tp, cp, lambda rows: rows.total / dp)
                least = self._priced(placed, tp, cp, lambda rows: rows.of_examples.min(axis=2))
                total[number] += count * share.total_s
                passing[number] += count * (least.forward_s + least.input_s)
        return total, passing

    def _summed(self, name: str, tp: int, cp: int, share: _Share) -> _Passes:
        passes = [(count, self._priced(placed, tp, cp, share)) for placed, count in self._layers(name).items()]
        return _Passes(*(sum(count * each[index] for count, each in passes) for index in range(3)))

    def _layers_of(self, name: str) -> Counter[StageLayer]:
        """How often a module has each of its layers."""
        return Counter(stage_layers(self.job.model, {name: (0, self.num_blocks[name])}, {}))

    def _priced(self, placed: StageLayer, tp: int, cp: int, share: _Share) -> _Passes:
        """One layer, on each of tp * cp ranks. share: of one replica."""
        rows, layer = self._rows(placed.module, placed.layer), placed.layer
        whole_rows, pairs = share(rows).T
        work = Work(whole_rows / cp, pairs / cp)
        seconds = self.cost.layer_seconds(placed.module, _spread(layer), work, tp)
        messages_s = self.cost.tensor_seconds(layer, work, range(tp)) if tp > 1 else np.zeros(2)
        backward_s = backward_seconds(seconds, layer, placed.needs_input) + placed.has_backward * messages_s
        input_s = float(seconds.input_s[1] + messages_s[1]) if placed.needs_input else 0.0
        return _Passes(float(seconds.forward_s[0] + messages_s[0]), input_s, float(backward_s[1]))


def _spread(layer: Layer) -> Layer:
    """The layer as a rank has the least of it: where ranks share its experts, one expert each."""
    return layer.with_experts_of(layer.num_experts)
