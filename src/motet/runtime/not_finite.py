"""Finds where a step that is not finite goes wrong: the first module and the examples, by running the step again.

The step changed neither weights nor optimizer (`runtime/step.py`), so the same forwards and backwards give the same
numbers again, now with hooks on all modules. Hooks cost nothing in other steps, which have none.

Rows of a tensor tell whose they are: encoders work on the rows of their items one after the other, or on one row an
item, and the backbone on the rows of its sequences.
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
from motet.runtime.step import TrainStep
from motet.schedule.program import Action


class Moment(NamedTuple):
    """When something was seen: comparable between ranks, which take the same actions in the same order.

    action: its index in the rank's row. call: of a module, during the action.
    """

    microbatch: int
    action: int
    call: int


@dataclass(frozen=True)
class Finding:
    """The first thing on a rank that is not finite.

    what:       "output" of a module, or the "gradient" of its output. module: its name.
    examples:   numbers in the microbatch of those whose rows are not finite; where rows do not tell, of all that the
                rank computed then (`is_certain` is False).
    """

    what: Literal["output", "gradient"]
    module: str
    moment: Moment
    examples: tuple[int, ...]
    is_certain: bool


def find(step: TrainStep, batches: Sequence[RankBatch]) -> Finding | None:
    """Run a step that was not finite again, and find where; None where all is finite on this rank. A collective.

    Random numbers must be as they were before the step. Leaves its gradients, not clipped.
    """
    watch = _Watch(batches, step.mesh.rank, step.program(batches).modules)
    hooks = [
        child.register_forward_hook(partial(watch.saw_output, f"{phase}.{name}" if name else phase))
        for phase, module in step.modules.items()
        if isinstance(module, nn.Module)
        for name, child in module.named_modules()
    ]
    try:
        step.accumulate(batches, before=watch.begin)
    finally:
        for hook in hooks:
            hook.remove()
    step.clock.take()  # Of a step that is not to be measured.
    return watch.found


def weight_not_finite(step: TrainStep) -> str:
    """Name of the first parameter whose part on this rank is not finite; empty if all are."""
    for name, parameter in _named_parameters(step):
        if not _local(parameter.detach()).isfinite().all():
            return name
    return ""


def gradient_not_finite(step: TrainStep) -> tuple[int, str]:
    """Number and name of the last parameter whose gradient's part on this rank is not finite; (-1, "") if all are.

    The last, as backward passes begin with the last module and its last layer.
    """
    for number, (name, parameter) in reversed([*enumerate(_named_parameters(step))]):
        if parameter.grad is not None and not _local(parameter.grad).isfinite().all():
            return number, name
    return -1, ""


def _named_parameters(step: TrainStep) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{phase}.{name}", parameter)
        for phase, module in step.modules.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    ]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Watch:
    """Keeps the first output, or gradient of an output, that is not finite."""

    def __init__(self, batches: Sequence[RankBatch], rank: int, modules: Mapping[int, str]) -> None:
        self._batches, self._rank, self._modules = batches, rank, modules
        self._microbatch, self._action, self._phase, self._calls = 0, 0, "", 0
        self.found: Finding | None = None

    def begin(self, index: int, action: Action) -> None:
        self._microbatch, self._action, self._phase = action.microbatch, index, self._modules[action.stage]
        self._calls = 0

    def saw_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self._look("output", name, tensor)
            if tensor.requires_grad and tensor.is_floating_point():
                tensor.register_hook(partial(self._look, "gradient", name))

    def _look(self, what: Literal["output", "gradient"], name: str, tensor: Tensor) -> None:
        self._calls += 1
        if self.found is not None or not tensor.is_floating_point():
            return
        is_bad = ~_local(tensor).detach().isfinite()
        if not is_bad.any():
            return
        batch = self._batches[self._microbatch]
        owner, partitions = _owners(batch, self._phase, self._rank)
        rows = _bad_rows(is_bad, partitions)
        mine = owner if rows is None else owner[rows]
        moment = Moment(self._microbatch, self._action, self._calls)
        self.found = Finding(what, name, moment, tuple(sorted(set(mine.tolist()))), rows is not None)


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, list | tuple) else []


def _owners(batch: RankBatch, phase: str, rank: int) -> tuple[Int64Array, list[Int64Array]]:
    """The example of each item (or sequence) that a rank computes, and how many rows each may have, [num_items]."""
    own = batch.decision.assignments[phase].on_rank(rank)
    if phase == BACKBONE:
        lengths = batch.lengths
        return own, [lengths.sequence[own], lengths.num_targets[own]]
    items, sizes = batch.lengths.items[phase], batch.media[phase][1].numpy()
    return items.example[own], [items.num_tokens[own], sizes.prod(axis=1), np.ones(len(own), dtype=np.int64)]


def _bad_rows(is_bad: Tensor, partitions: Sequence[Int64Array]) -> Int64Array | None:
    """Numbers of the items with a row that is bad; None where the tensor has not the rows of any partition."""
    for axis in range(min(is_bad.ndim, 2)):
        if axis == 1 and is_bad.shape[0] != 1:
            return None
        for num_rows in partitions:
            if is_bad.shape[axis] == num_rows.sum():
                rows = is_bad.movedim(axis, 0).flatten(1).any(1) if is_bad.ndim > 1 else is_bad
                owner = np.repeat(np.arange(len(num_rows)), num_rows)
                return np.unique(owner[rows.cpu().numpy()])
    return None
