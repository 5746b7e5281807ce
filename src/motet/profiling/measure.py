"""Times the layers of a module in rounds over all batches: forward, backward for the input, backward for the weights.

A round measures every batch of every module once, so that a slow moment of the machine does not fall on one of them
alone. Rounds go on until the medians have settled or the time is up. For each batch the module runs whole, and then
each layer alone, on the inputs that it had in the module. The difference between the module and the sum of its layers
(positions, gathering of rows, caches that another module has filled) is added to one layer (`Subject.rest`), so that
layers add up to the module.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from motet.core.arrays import Float64Array
from motet.core.spec import Layer
from motet.cost.flops import work_of
from motet.cost.profile import Batch, LayerTimes, ModuleTimes, Points
from motet.profiling.kept import kept_once
from motet.profiling.runs import MeasuredRuns
from motet.profiling.stopwatch import Stopwatch, TimedCall, again, kept_calls, time_forward, time_passes
from motet.profiling.subjects import MAX_BATCH_ROWS, Subject, grid_of, items
from motet.runtime.deferred import DeferredWeights, WeightProduct
from motet.train.world import World

MIN_ROUNDS = 3
"""Rounds that are measured in any case."""
_AIMED_ROUNDS = (8, 3)
"""Batches are made so small that the time is enough for about so many rounds; for the fewer where batches would else be
smaller than the job's."""
_PASSES_A_ROUND = 20
"""Time of a round of a module, in passes of its largest batch: the whole and each layer, on some 20 batches."""
_SETTLED = 0.02
"""A median has settled if its standard error is below this share of it."""
_WAITS_REPEATS = 3
"""Repeats of a layer in `waits_once`, of which the quickest counts."""
_LEAST_S = 0.02
"""A batch that is quicker is never too large: in it the cost of a row would be small beside that of a call."""
FORWARD, INPUT, BOTH = range(3)
"""Columns of measured seconds: forward, backward for the input, backward for input and weights."""
WEIGHTS = BOTH
"""The same column, once backward for the input is subtracted."""


def measure_once(subject: Subject, batch: Batch, watch: Stopwatch) -> Float64Array:
    """Seconds of the whole module (row 0) and of each layer: [1 + num_layers, 3], columns as `FORWARD` says.

    In row 0, INPUT is 0 and BOTH is all of backward. The whole module, and the blocks by which parameters are sharded,
    run under FSDP, as they train.
    """
    seconds = np.zeros((1 + len(subject.layers), 3))
    seconds[0] = _time_trained(subject.sharded, subject.prepare(batch, subject.sharded), watch)
    with kept_calls([module for layer in subject.layers for module in layer.modules]) as calls, torch.no_grad():
        subject.prepare(batch, subject.module)()
    blocks = dict(zip(subject.module.blocks, subject.sharded.blocks, strict=True))
    for number, (layer, modules) in enumerate(subject.layers, start=1):
        for module in modules:
            for args, kwargs in calls.get(module, ()):
                alone = _alone(subject, layer, module, args, kwargs, watch)
                if module in blocks:
                    call = partial(blocks[module], args[0].detach(), *args[1:], **kwargs)
                    alone[[FORWARD, BOTH]] = _time_trained(subject.sharded, call, watch, None)[[FORWARD, BOTH]]
                seconds[number] += alone
        if subject.is_inside(number - 1):
            seconds[number - 1] -= seconds[number]
    return seconds


def hooks_once(subject: Subject, batch: Batch, watch: Stopwatch) -> Float64Array:
    """What FSDP's hooks add to forward and to backward of each layer, [num_layers, 2]; 0 without FSDP.

    Pipelines have no hooks. They take as long in any batch, so that a small one tells them best. What is not of a block
    is put to the first layer.
    """
    added = np.zeros((1 + len(subject.layers), 2))
    if not isinstance(subject.sharded, FSDPModule):
        return added[1:]
    roots = subject.module, subject.sharded

    def add(row: int, calls: Sequence[Callable[[], Tensor]]) -> None:
        plain, hooked = (_time_trained(root, call, watch) for root, call in zip(roots, calls, strict=True))
        added[row] += (hooked - plain)[[FORWARD, BOTH]]

    add(0, [subject.prepare(batch, root) for root in roots])
    with kept_calls(list(subject.module.blocks)) as calls, torch.no_grad():
        subject.prepare(batch, subject.module)()
    blocks = dict(zip(subject.module.blocks, subject.sharded.blocks, strict=True))
    for row, (_, modules) in enumerate(subject.layers, start=1):
        for module in modules:
            for args, kwargs in calls.get(module, ()):
                first = args[0].detach().requires_grad_()
                add(row, [partial(one, first, *args[1:], **kwargs) for one in (module, blocks[module])])
    added[1] += added[0] - added[1:].sum(axis=0)
    return added[1:]


def waits_once(subject: Subject, batch: Batch, watch: Stopwatch) -> Float64Array:
    """What forward, backward for the input and backward for the weights of each layer take more where gradients of
    weights wait, [num_layers, 3]; 0 of a layer whose do not.

    It takes about as long in any batch, but that biases and norms get their gradients in backward for the input. Of
    some repeats in turns the quickest count: what is told is a small difference, of calls that have become warm.
    """
    added = np.zeros((len(subject.layers), 3))
    deferring = [(row, each) for row, each in enumerate(subject.layers) if each.layer.defers_weights]
    with kept_calls([module for _, each in deferring for module in each.modules]) as calls, torch.no_grad():
        subject.prepare(batch, subject.module)()
    for row, (_, modules) in deferring:
        for module in modules:
            waiting = copy.deepcopy(module)
            for parameter in waiting.parameters():
                parameter.grad = torch.zeros_like(parameter)
            deferred = DeferredWeights([waiting])
            for args, kwargs in calls.get(module, ()):
                least = np.full((2, 3), np.inf)
                for _ in range(_WAITS_REPEATS):
                    plain = _time_halves(*again(module, args, kwargs), watch)
                    least = np.minimum(least, [plain, _time_halves(*again(waiting, args, kwargs), watch, deferred)])
                added[row] += least[1] - least[0]
        if subject.is_inside(row):
            added[row - 1] -= added[row]
    return added


def _time_halves(
    call: TimedCall, first: Tensor, watch: Stopwatch, deferred: DeferredWeights | None = None
) -> Float64Array:
    """Seconds [3] of forward, of backward for the input, and of the rest of backward. first: the input of `call`.

    It differs from `time_passes` in that gradients are added to those of an earlier pass, as what waits is.
    deferred: what makes the products of weights wait.
    """
    forward_s, outputs, gradients = time_forward(watch, call)
    if deferred is None:
        inputs = [first] if first.requires_grad else []
        of_input = partial(torch.autograd.grad, outputs, inputs, gradients, retain_graph=True, allow_unused=True)
        input_s = watch(of_input)[0] if inputs else 0.0
        return np.array([forward_s, input_s, watch(lambda: torch.autograd.backward(outputs, gradients))[0] - input_s])
    products: list[WeightProduct] = []
    with deferred.into(products):
        input_s = watch(lambda: torch.autograd.backward(outputs, gradients))[0]
    return np.array([forward_s, input_s, watch(lambda: [product.add() for product in products])[0]])


def entry_once(subject: Subject, batch: Batch, watch: Stopwatch) -> float:
    """What a forward pass through the blocks alone takes beside its layers; 0 of a module that cannot be cut.

    The pass begins behind other data, and each layer behind the one before it.
    """
    if subject.through is None:
        return 0.0
    call = subject.through(batch)
    with torch.enable_grad():
        seconds, _ = watch(call, ())
    layers = [layer for number, layer in enumerate(subject.layers) if not subject.is_inside(number)]
    with kept_calls([module for layer in layers for module in layer.modules]) as calls, torch.no_grad():
        call()
    for module, of_module in calls.items():
        for args, kwargs in of_module:
            alone = partial(module, args[0].detach().requires_grad_(), *args[1:], **kwargs)
            with torch.enable_grad():
                seconds -= watch(alone)[0]
    return seconds


def _time_trained(
    root: nn.Module, call: TimedCall, watch: Stopwatch, near: Sequence[Tensor] | None = ()
) -> Float64Array:
    """Seconds [3] of a call to a module of `root`, or to itself, whose parameters get their gradients as in training.

    FSDP reduces then. Without FSDP gradients are added to those of an earlier pass, so they stay from call to call.
    """
    forward_s, outputs, gradients = time_forward(watch, call, near)
    backward_s, _ = watch(lambda: torch.autograd.backward(outputs, gradients), gradients)
    if isinstance(root, FSDPModule):
        for parameter in root.parameters():
            parameter.grad = None
    return np.array([forward_s, 0.0, backward_s])


def _alone(
    subject: Subject, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Stopwatch
) -> Float64Array:
    """Seconds [3] of a layer on the arguments of one call, of which the first tensor is the layer's input."""
    call, first = again(module, args, kwargs)
    inputs = [first] if first.requires_grad and not layer.reads_data else []
    if layer.targets_only and subject.head is not None:
        call = partial(subject.head, first)
    return time_passes(watch, call, inputs, _trainable(module))


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@dataclass(eq=False)
class MeasuredSubject:
    """A subject, its batches, and what was measured on them.

    grid: the batches to interpolate between. held_out: those that predictions are compared with.
    samples: per batch, what `measure_once` returned in each round.
    hooks, waits, entries: what `hooks_once`, `waits_once` and `entry_once` returned in each round.
    runs: what attention takes of items that ranks share; None: it is not measured.
    kept: per batch, what `kept_once` returned.
    """

    subject: Subject
    grid: list[Batch]
    held_out: list[Batch]
    samples: list[list[Float64Array]] = field(default_factory=list)
    hooks: list[Float64Array] = field(default_factory=list)
    waits: list[Float64Array] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)
    runs: MeasuredRuns | None = None
    kept: list[Float64Array] = field(default_factory=list)

    @property
    def batches(self) -> list[Batch]:
        """Those of the grid, then those that are held out."""
        return [*self.grid, *self.held_out]

    def is_settled(self) -> bool:
        """Whether the medians of all batches have settled."""
        return all(_spread(np.array([sample[0, FORWARD] for sample in samples])) < _SETTLED for samples in self.samples)

    def times(self, world: World) -> ModuleTimes:
        """Medians over rounds, then over ranks; a collective."""
        passes = [_passes(np.stack(samples), self.subject.rest) for samples in self.samples]
        medians = np.stack([np.median(each, axis=0) for each in passes])
        seconds = np.maximum(np.median(np.stack(world.gather(medians)), axis=0), 0)
        hooks, waits = (
            np.median(np.stack(world.gather(np.median(each, axis=0))), axis=0) if each else None
            for each in (self.hooks, self.waits)
        )
        layers: list[LayerTimes] = []
        for number, (layer, _) in enumerate(self.subject.layers):
            reach = None if layer.attention is None else layer.attention.reach
            told_apart = (layer.kind, layer.weights, reach)
            if not any((times.kind, times.weights, times.reach) == told_apart for times in layers):
                points = self._with_kept(number, self.points(number, seconds[:, number]))
                hooks_s = (0.0, 0.0) if hooks is None else tuple(np.maximum(hooks[number], 0).tolist())
                layers.append(
                    LayerTimes(
                        kind=layer.kind,
                        weights=layer.weights,
                        reach=reach,
                        hooks_s=hooks_s,
                        waits_s=(0.0, 0.0, 0.0) if waits is None else tuple(waits[number].tolist()),
                        grid=points[0],
                        held_out=points[1],
                        runs=None if self.runs is None else self.runs.times(number, world.gather),
                    )
                )
        squares = {"grid_squares": self._squares(self.grid), "held_out_squares": self._squares(self.held_out)}
        entry_s = max(float(np.median(world.gather(float(np.median(self.entries or [0.0]))))), 0.0)
        return ModuleTimes(
            name=self.subject.name,
            grid=self.grid,
            held_out=self.held_out,
            layers=layers,
            entry_s=entry_s,
            **squares,
        )

    def _with_kept(self, number: int, points: tuple[Points, Points]) -> tuple[Points, Points]:
        """Points of a layer, of the grid and held out, with the bytes that it keeps."""
        if not self.kept:
            return points
        kept, split = [float(of_batch[number]) for of_batch in self.kept], len(self.grid)
        grid, held_out = (
            part.model_copy(update={"kept_bytes": tuple(column)})
            for part, column in zip(points, (kept[:split], kept[split:]), strict=True)
        )
        return grid, held_out

    def _squares(self, batches: Sequence[Batch]) -> list[float]:
        """The sum of squared lengths of each batch's segments; none of a module without segments."""
        cut = [self.subject.segments(batch) for batch in batches]
        return [float((segments.length**2).sum()) for segments in cut if segments is not None]

    def points(self, number: int, seconds: Float64Array) -> tuple[Points, Points]:
        """One layer's seconds, [num_batches, 3], as points of the grid and held-out points. number: of the layer."""
        layer = self.subject.layers[number].layer
        rows, pairs = [], []
        for batch in self.batches:
            lengths = items(batch)
            # A feature row begins each sequence, and no loss is taken on it.
            num_targets = int(lengths.sum()) - len(lengths) if layer.targets_only else None
            work = work_of(
                layer,
                lengths,
                padded=self.subject.spec.padded,
                num_targets=num_targets,
                segments=self.subject.segments(batch),
                num_media=self.subject.media(batch),
                num_tokens=self.subject.num_tokens(batch),
            )
            rows.append(float(work.rows[0]))
            pairs.append(float(work.pairs[0]))
        columns = [rows, pairs, *seconds.T.tolist()]
        split = len(self.grid)
        names = ("rows", "pairs", "forward_s", "input_s", "weight_s")
        grid, held_out = (
            Points(**dict(zip(names, (column[part] for column in columns), strict=True)))
            for part in (slice(split), slice(split, None))
        )
        return grid, held_out


def _passes(seconds: Float64Array, rest: int) -> Float64Array:
    """Forward, input and weights of each layer, [..., num_layers, 3], from samples of `measure_once`. rest: of Subject.

    Differences are taken within a sample, because its parts met the same state of the machine; they may be below 0.
    """
    whole, layers = seconds[..., 0, :], seconds[..., 1:, :].copy()
    layers[..., WEIGHTS] = layers[..., BOTH] - layers[..., INPUT]
    # Nothing before the first layer needs a gradient, and none was computed in the whole.
    layers[..., 0, INPUT] = 0
    total = layers.sum(axis=-2)
    layers[..., rest, FORWARD] += whole[..., FORWARD] - total[..., FORWARD]
    layers[..., rest, WEIGHTS] += whole[..., BOTH] - total[..., INPUT] - total[..., WEIGHTS]
    return layers


def _spread(samples: Float64Array) -> float:
    """Estimate of the median's standard error over the median."""
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return float((high - low) / middle / np.sqrt(len(samples)))


def measure(
    subjects: Sequence[Subject], watch: Stopwatch, world: World, seconds: float, show: Callable[[float], None]
) -> list[MeasuredSubject]:
    """Measure all subjects on all ranks at the same time, as they would train. A collective.

    seconds: the time for all of it; MIN_ROUNDS are measured in any case.
    show:    is called with the share of the time that is spent.
    """
    start_s = time.perf_counter()
    measured = []
    for subject in subjects:
        for num_rounds in _AIMED_ROUNDS:
            most_s = seconds / len(subjects) / num_rounds / _PASSES_A_ROUND
            max_rows = min(world.gather(_max_rows(subject, watch, most_s)))
            if max_rows >= subject.job_rows:
                break
        batches = grid_of(subject.lengths, max_rows, padded=subject.spec.padded)
        measured.append(MeasuredSubject(subject, *batches, runs=MeasuredRuns(subject, max_rows)))
    for each in measured:
        each.samples = [[] for _ in each.batches]
        each.kept = [kept_once(each.subject, batch) for batch in each.batches]
    num_rounds = 0
    while True:
        # In turns, as in a step: no module finds its own weights in the caches.
        for index in range(max(len(each.batches) for each in measured)):
            for each in measured:
                if index < len(each.batches):
                    each.samples[index].append(measure_once(each.subject, each.batches[index], watch))
                    show(min((time.perf_counter() - start_s) / seconds, 1.0))
        for each in measured:
            by_rows = sorted(each.batches, key=lambda batch: items(batch).sum())
            each.hooks.append(hooks_once(each.subject, by_rows[0], watch))
            each.waits.append(waits_once(each.subject, by_rows[0], watch))
            each.entries.append(entry_once(each.subject, by_rows[len(by_rows) // 2], watch))
            if each.runs is not None:
                each.runs.measure(watch)
        num_rounds += 1
        spent_s = time.perf_counter() - start_s
        is_over = spent_s * (num_rounds + 1) / num_rounds > seconds or all(each.is_settled() for each in measured)
        if num_rounds >= MIN_ROUNDS and any(world.gather(is_over)):
            return measured


def _max_rows(subject: Subject, watch: Stopwatch, most_s: float) -> int:
    """The largest sum of lengths, found by doubling, that a rank computes within most_s, has memory for, and needs."""
    rows = int(subject.lengths[0])
    while rows < (subject.job_rows or MAX_BATCH_ROWS):
        length = int(subject.lengths[subject.lengths <= 2 * rows][-1])
        batch = ((max(2 * rows // length, 1), length),)
        try:
            # The first call of a size is slower, and any call may be.
            seconds = min(measure_once(subject, batch, watch)[0, [FORWARD, BOTH]].sum() for _ in range(3))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        if seconds > max(most_s, _LEAST_S):
            break
        rows *= 2
    return rows
