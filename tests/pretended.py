"""A device that CPU tensors pretend to be on: `from pretended import pretend, waits`.

Operations refuse to mix its tensors with others, as CUDA does, and what the host would wait for on a GPU is counted.
Values are those of CPU tensors within, so that results can be compared. torch calls it a Python backend.

Not as on a GPU: storages keep their size, and collectives are gloo's.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import motet

NAME = "pretended"
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""CUDA takes indices from the host."""
COPYING = {"aten::copy_", "aten::_to_copy"}
READING = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::bincount"),
    *("aten::_unique2", "aten::unique_consecutive", "aten::unique_dim"),
}
"""Of tensors on the device: the result has a size or a value that the host needs."""

RESIZING = (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)
"""Made empty, and resized then, which a tensor with values within cannot be."""
SOURCE = str(Path(motet.__file__).parent) + "/"
ELSEWHERE = "a line outside of Motet"

waits: Counter[tuple[str, str]] = Counter()
"""How often the host would wait for the device, by file and line, and operation."""


@contextmanager
def waits_of(step: type) -> Iterator[Counter[tuple[str, str]]]:
    """In the block, `waits` of `step.run` alone, of all steps together."""
    found: Counter[tuple[str, str]] = Counter()
    run = step.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        before = waits.copy()
        result = run(*args, **kwargs)
        found.update(waits - before)
        return result

    with mock.patch.object(step, "run", counted):
        yield found


class Pretended(torch.Tensor):
    """A tensor on the device. inner: its values, on the CPU."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        made: Pretended = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})


class Stream(torch.cpu.Stream):
    """All is done at once. FSDP2 wants the event that other devices than the CPU give."""

    def record_event(self) -> torch.cpu.Event:
        return torch.cpu.Event()


def pretend() -> torch.device:
    """Make the device known to this process, once, before its first backward pass, and return it."""

    class Module(backend_registration._DummyBackendModule):
        Stream, Event = Stream, torch.cpu.Event
        stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self):
            return torch._C._autograd.DeviceType.PrivateUse1

        def exchange_device(self, *index):
            return 0

    backend_registration._setup_privateuseone_for_python_backend(NAME, Module(), device_guard=Guard())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda operation, *args, **kwargs: _run(operation, args, kwargs), "PrivateUse1")
    ranges = torch.library.Library("aten", "IMPL")
    for overload in RESIZING:
        ranges.impl(overload.name().partition("::")[2], partial(_run_new, overload), "PrivateUse1")
    _kept.extend((library, ranges))
    torch.Tensor.pin_memory, torch.Tensor.tolist = _pinned, _listed
    torch.UntypedStorage.resize_ = _not_resized
    torch.nn.Module._apply = _swapped
    if (group := dist.group.WORLD) is not None:
        group._register_backend(torch.device(NAME), group.BackendType.GLOO, group._get_backend(torch.device("cpu")))
    return torch.device(NAME, 0)


_kept: list[torch.library.Library] = []


def _pinned(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """A copy that is marked: a CPU has no pinned memory without an accelerator."""
    copy = tensor.clone()
    copy.is_marked = True
    return copy


_APPLY = torch.nn.Module._apply


def _swapped(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Move a module's parameters. They stay the same objects, else tied ones come apart, as on no GPU."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _APPLY(module, *args, **kwargs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _run_new(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(operation, args, kwargs)


_RESIZED = torch.UntypedStorage.resize_


def _not_resized(storage: torch.UntypedStorage, size: int) -> Any:
    """Memory that is freed by it is kept."""
    try:
        return _RESIZED(storage, size)
    except RuntimeError as error:
        if "python storage" not in str(error):
            raise
        return storage


_LISTED = torch.Tensor.tolist


def _listed(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, Pretended):
        waits[_where(), "tolist"] += 1
        return _LISTED(tensor.detach().inner)
    return _LISTED(tensor)


def _run(operation: Any, args: tuple, kwargs: dict) -> Any:
    """The operation on the values within."""
    name, device = operation._schema.name, kwargs.get("device")
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    is_here = any(isinstance(each, Pretended) for each in tensors)
    stays = is_here if device is None else torch.device(device).type == NAME
    _count(name, args, kwargs, stays)
    _check(name, tensors, is_here)
    if name == "aten::_fused_sdp_choice":
        return 0  # Plain operations.
    within: dict[int, Pretended] = {}

    def unwrapped(value: Any) -> Any:
        if isinstance(value, Pretended):
            within[id(value.inner)] = value
            return value.inner
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in within:
            return within.get(id(value), value)
        return Pretended(value) if stays else value

    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    made = operation(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs))
    if name == "aten::copy_":
        return args[0]
    result = tree_map(wrapped, made)
    return return_and_correct_aliasing(operation, args, kwargs, result) if is_here and stays else result


def _check(name: str, tensors: list[torch.Tensor], is_here: bool) -> None:
    """Raise RuntimeError where tensors of the device and of the host meet; numbers may be on the host."""
    if not is_here or name in COPYING or name.startswith("c10d"):
        return
    others = [each for each in tensors if not isinstance(each, Pretended) and each.dim()]
    if name in INDEXING:
        others = [each for each in others if each.dtype not in (torch.int64, torch.bool)]
    if others:
        raise RuntimeError(f"{name} of tensors on two devices, at {_where()}")


def _count(name: str, args: tuple, kwargs: dict, stays: bool) -> None:
    if name == "aten::copy_":
        target, source, *rest = args
        is_free = bool(rest and rest[0]) or kwargs.get("non_blocking", False)
        if isinstance(target, Pretended) == isinstance(source, Pretended):
            return
        is_free &= getattr(source, "is_marked", False)
    elif name == "aten::_to_copy":
        is_free = isinstance(args[0], Pretended) == stays
    elif name in INDEXING:
        # Indices of the host are copied, and of a mask the device says how many are in it.
        indices = [each for each in args[1] if each is not None and each.dim()] if stays else []
        is_free = all(isinstance(each, Pretended) and each.dtype not in (torch.bool, torch.uint8) for each in indices)
    elif name == "aten::repeat_interleave":
        is_free = not isinstance(args[0], Pretended) or kwargs.get("output_size") is not None
    else:
        is_free = not (name in READING and isinstance(args[0], Pretended))
    if not is_free:
        waits[_where(), name] += 1


def _where() -> str:
    """The innermost line of Motet, or ELSEWHERE."""
    frames = [each for each in traceback.extract_stack() if each.filename.startswith(SOURCE)]
    return f"{frames[-1].filename.removeprefix(SOURCE)}:{frames[-1].lineno}" if frames else ELSEWHERE
