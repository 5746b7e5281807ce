"""Optimizers that update rows of DTensors at once: what they leave is the same, and a case takes half of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

_BY_ELEMENT = ("abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "copy", "div", "lerp", "maximum")
_BY_ELEMENT += ("minimum", "mul", "neg", "pow", "reciprocal", "rsqrt", "sign", "sqrt", "sub", "zero")
"""What optimizers do with each element of lists of tensors, `torch._foreach_*`."""


@contextmanager
def updates_on_rows() -> Iterator[None]:
    """Let optimizers update the rows of DTensors at once.

    torch looks for a placement of all parameters anew in each case, a quarter to a half of a case's time. What users
    have: `assert_planned` with `is_torchs`, and tests/parity/test_optimizer.py, of every optimizer.
    """

    def on_rows(call: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        rows = tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
        made = call(*rows[0], **rows[1])
        # What is updated in place is none that was made.
        return [as_made_of(*pair) for pair in zip(made, args[0], strict=True)] if made else made

    def as_made_of(rows: torch.Tensor, whole: object) -> torch.Tensor:
        if not isinstance(whole, DTensor):
            return rows
        like = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(rows, whole.device_mesh, whole.placements, run_check=False, **like)

    handlers = DTensor._op_dispatcher._custom_op_handlers
    with pytest.MonkeyPatch.context() as patch:
        for call in _calls_by_element():
            patch.setitem(handlers, call, on_rows)
        yield


@cache
def _calls_by_element() -> list[torch._ops.OpOverload]:
    packets = [torch.ops.aten._fused_adamw_]
    for name in _BY_ELEMENT:
        packets += [getattr(torch.ops.aten, f"_foreach_{name}{end}", None) for end in ("", "_")]
    return [getattr(packet, overload) for packet in packets if packet for overload in packet.overloads()]
