"""Times work on a device, and calls of modules as they are in a pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Float64Array

_Result = TypeVar("_Result")
TimedCall = Callable[[], Tensor | tuple[Any, ...]]
Calls = dict[nn.Module, list[tuple[tuple[Any, ...], dict[str, Any]]]]
"""The positional and keyword arguments of each module's calls."""
_CACHED_BYTES = 2**26
"""More than the caches of a core or a device hold."""


class Stopwatch:
    """Seconds of work on a device: by its events on CUDA; else by the clock if the work waits for messages, or by the
    processor time of this thread, which other programs on the core do not lengthen.

    evicts: caches are filled with other data before work that says so.
    """

    def __init__(self, device: torch.device, *, waits: bool = True, evicts: bool = False) -> None:
        self._on_device = device.type == "cuda"
        self._clock = time.perf_counter if waits else time.thread_time
        self._other_data = torch.zeros(_CACHED_BYTES // 4, device=device) if evicts else None

    def __call__(self, work: Callable[[], _Result], near: Sequence[Tensor] | None = None) -> tuple[float, _Result]:
        """near: what alone the work finds in the caches; None: whatever is there."""
        if self._other_data is not None and near is not None:
            self._other_data.add_(1)
            for tensor in near:
                tensor.detach().sum()
        if not self._on_device:
            start_s = self._clock()
            result = work()
            return self._clock() - start_s, result
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result


def time_passes(
    watch: Stopwatch,
    call: TimedCall,
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> Float64Array:
    """Seconds of forward, of backward for `inputs`, and of backward for `inputs` and `parameters`, float64 [3]."""
    forward_s, outputs, gradients = time_forward(watch, call)
    both = [*inputs, *parameters]
    if not outputs or not both:
        return np.array([forward_s, 0.0, 0.0])

    def backward(of: Sequence[Tensor], keep: bool) -> float:
        work = partial(torch.autograd.grad, outputs, of, gradients, retain_graph=keep, allow_unused=True)
        return watch(work, gradients)[0]

    input_s = backward(inputs, True) if inputs else 0.0
    return np.array([forward_s, input_s, backward(both, False)])


def time_forward(
    watch: Stopwatch, call: TimedCall, near: Sequence[Tensor] | None = None
) -> tuple[float, list[Tensor], list[Tensor]]:
    """Seconds of a call, what it made that has a graph, and a gradient of ones for each. near: as of Stopwatch."""
    with torch.enable_grad():
        forward_s, result = watch(call, near)
    made = result if isinstance(result, tuple) else (result,)
    outputs = [each for each in made if isinstance(each, Tensor) and each.requires_grad]
    return forward_s, outputs, [torch.ones_like(output) for output in outputs]


@contextmanager
def kept_calls(modules: Sequence[nn.Module]) -> Iterator[Calls]:
    """The arguments with which each of the modules is called in the block, in order."""
    calls: Calls = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, []).append((args, kwargs))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def again(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TimedCall, Tensor]:
    """A call of a layer with the arguments that it had, and the first tensor of these, which needs a gradient where it
    can have one.
    """
    given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
    name = next(name for name, value in given.items() if isinstance(value, Tensor))
    first = given[name] = given[name].detach()
    places = [given[place] for place in range(len(args))]
    named = {key: given[key] for key in kwargs}
    return partial(module, *places, **named), first.requires_grad_(first.is_floating_point())
