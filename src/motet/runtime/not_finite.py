"""Finds the first module and the examples that make a step not finite, by running the step again.

Such a step changed neither weights nor optimizer (`runtime/step.py`), so the same passes give the same numbers again.
Only this second run has hooks on all modules.

The rows of a tensor show which examples they belong to: an encoder's tensor has the rows of its items one after the
other, or one row an item; the backbone's has the rows of its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from motet.core.arrays import Int64Array
from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.runtime.planned_step import PlannedStep
from motet.runtime.step import TrainStep
from motet.schedule.program import Action


class Moment(NamedTuple):
    """A time in a step that ranks can compare, as all ranks execute the same actions in the same order.

    action: index in the rank's row.
    call:   number of tensors that were checked before, during the action.
    """

    microbatch: int
    action: int
    call: int


@dataclass(frozen=True)
class Finding:
    """The first tensor on a rank that is not finite.

    what:       "output" of a module, or the "gradient" of that output.
    module:     name of the module.
    examples:   indices in the microbatch of the examples whose rows are not finite.
    is_certain: False if rows could not be matched to examples; `examples` is then all that the rank computed.
    """

    what: Literal["output", "gradient"]
    module: str
    moment: Moment
    examples: tuple[int, ...]
    is_certain: bool


def first_not_finite(step: TrainStep, batches: Sequence[RankBatch]) -> Finding | None:
    """Run a step again and find its first tensor that is not finite; None if all are on this rank. A collective.

    Random number generators must be as they were before the step. Leaves the step's gradients, not clipped.
    """
    watch = _Watch(batches, step.mesh.rank, step.program(batches).modules)
    hooks = [
        child.register_forward_hook(partial(watch.check_output, f"{phase}.{name}" if name else phase))
        for phase, module in step.modules.items()
        if isinstance(module, nn.Module)
        for name, child in module.named_modules()
    ]
    try:
        step.accumulate(batches, before=watch.begin)
    finally:
        for hook in hooks:
            hook.remove()
    step.clock.take()  # Drops the spans: this run is no part of the measurement.
    return watch.finding


def weight_not_finite(step: TrainStep | PlannedStep) -> str:
    """Name of the first parameter whose part on this rank is not finite; "" if all are finite."""
    for name, parameter in _named_parameters(step):
        if not _local(parameter.detach()).isfinite().all():
            return name
    return ""


def gradient_not_finite(step: TrainStep | PlannedStep) -> tuple[int, str]:
    """(index, name) of the last parameter whose gradient is not finite on this rank; (-1, "") if all are finite.

    Backward passes begin with the last module and its last layer, so the last parameter comes first in time.
    """
    for index, (name, parameter) in reversed([*enumerate(_named_parameters(step))]):
        if parameter.grad is not None and not _local(parameter.grad).isfinite().all():
            return index, name
    return -1, ""


def _named_parameters(step: TrainStep | PlannedStep) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{phase}.{name}", parameter)
        for phase, module in step.modules.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    ]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Watch:
    """Checks outputs and gradients of outputs while a step runs; keeps the first that is not finite in `finding`."""

    def __init__(self, batches: Sequence[RankBatch], rank: int, modules: Mapping[int, str]) -> None:
        self._batches, self._rank, self._modules = batches, rank, modules
        self._microbatch, self._action, self._phase, self._calls = 0, 0, "", 0
        self.finding: Finding | None = None

    def begin(self, index: int, action: Action) -> None:
        """Note the action that comes next: a Hook of the executor."""
        self._microbatch, self._action, self._phase = action.microbatch, index, self._modules[action.stage]
        self._calls = 0

    def check_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Check a module's output, and later its gradient: a forward hook of the module."""
        for tensor in _tensors(output):
            self._check("output", name, tensor)
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(partial(self._check, "gradient", name))

    def _check(self, what: Literal["output", "gradient"], name: str, tensor: Tensor) -> None:
        self._calls += 1
        if self.finding is not None or not tensor.is_floating_point():
            return
        is_bad = ~_local(tensor).detach().isfinite()
        if not is_bad.any():
            return
        batch = self._batches[self._microbatch]
        example_of, row_counts = _examples_and_rows(batch, self._phase, self._rank)
        bad_items = _bad_items(is_bad, row_counts)
        examples = example_of if bad_items is None else example_of[bad_items]
        moment = Moment(self._microbatch, self._action, self._calls)
        self.finding = Finding(what, name, moment, tuple(sorted(set(examples.tolist()))), bad_items is not None)


def _tensors(output: Any) -> list[Tensor]:
    """All tensors in a module's output, which may be nested."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, list | tuple) else []


def _examples_and_rows(batch: RankBatch, phase: str, rank: int) -> tuple[Int64Array, list[Int64Array]]:
    """What a rank computes in a phase, an entry an item (in the backbone: a sequence), each array int64 [num_items].

    Returns the example of each item, and the numbers of rows that the items may have: an array for each kind of tensor.
    """
    if phase == BACKBONE:
        lengths, computed = batch.lengths, batch.decision.sequences_on(rank)
        if (context := batch.sequences.context) is not None:
            of_row = np.repeat(np.arange(len(computed)), context.rows.lengths)[context.own]
            counted = of_row, of_row[context.predicted.cpu().numpy()]
            return computed, [np.bincount(each, minlength=len(computed)) for each in counted]
        return computed, [lengths.sequence[computed], lengths.num_targets[computed]]
    computed = batch.decision.items_on(phase, rank)
    items, sizes = batch.lengths.items[phase], batch.media[phase][1].numpy()
    if (shared := batch.shared.get(phase)) is not None:
        counts = (each.num_rows_of(shared.rank) for each in (shared.outputs, shared.rows))
        return items.example[computed], [*counts]
    one_row_each = np.ones(len(computed), dtype=np.int64)
    num_tokens, num_rows = items.num_tokens[computed], sizes.prod(axis=1)
    # Blocks of a generator have the rows of conditions and of latents together.
    counts = [num_tokens, num_rows, items.length[computed], one_row_each, num_tokens + num_rows]
    return items.example[computed], counts


def _bad_items(is_bad: Tensor, row_counts: Sequence[Int64Array]) -> Int64Array | None:
    """Indices of the items with a row that is bad; None if the tensor's rows match none of `row_counts`.

    is_bad: bool, [num_rows, ...] or [1, num_rows, ...]. row_counts: as `_examples_and_rows` returns them.
    """
    for axis in range(min(is_bad.ndim, 2)):
        if axis == 1 and is_bad.shape[0] != 1:
            return None
        for num_rows in row_counts:
            if is_bad.shape[axis] == num_rows.sum():
                is_bad_row = is_bad.movedim(axis, 0).flatten(1).any(1) if is_bad.ndim > 1 else is_bad
                item_of_row = np.repeat(np.arange(len(num_rows)), num_rows)
                return np.unique(item_of_row[is_bad_row.cpu().numpy()])
    return None
