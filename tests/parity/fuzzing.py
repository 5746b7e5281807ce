"""What a rank does for the fuzzer: many cases in one process, each against one process."""

from __future__ import annotations

import gc
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from motet.runtime import groups, holders, mesh, p2p, unit_groups
from parity import planned
from parity.cut_steps import Cut, errors_of_cut
from parity.planned import TOLERANCE, PlannedCase, differences, errors_of, tolerance_of


@dataclass(frozen=True)
class Found:
    """What a rank finds of a case. error: its largest, as a share. tolerance: of all ranks. wrong: in words."""

    error: float
    tolerance: float
    wrong: list[str]


_made: dict[object, dist.ProcessGroup] = {}
_BY_ELEMENT = (
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "clamp_max",
    "clamp_min",
    "copy",
    "div",
    "lerp",
    "maximum",
    "minimum",
)
_BY_ELEMENT += ("mul", "neg", "pow", "reciprocal", "rsqrt", "sign", "sqrt", "sub", "zero")
"""What optimizers do with each element of lists of tensors, `torch._foreach_*`."""


def run_cases(rank: int, num_ranks: int, cases: Sequence[PlannedCase | Cut], references: str = "") -> list[Found]:
    """What this rank finds of each case. A collective.

    references: a folder in which jobs of other numbers of ranks find what one process computes; "" is none.
    """
    found = []
    gc.freeze()  # Imports are a hundred times what a case leaves.
    for case in cases:
        if isinstance(case, Cut):
            errors, tolerance = errors_of_cut(case), TOLERANCE  # Of one step, whose gradients are all that is compared.
        else:
            with _groups_of_before(), _updates_on_rows(), _expected_in(references):
                errors = errors_of(case)
            tolerance = tolerance_of(case, errors)
        wrong = differences(errors, tolerance)
        found.append(Found(max(errors.values(), default=0.0), tolerance, [f"rank {rank}: {line}" for line in wrong]))
        dist.barrier()
    return found


@contextmanager
def _expected_in(folder: str) -> Iterator[None]:
    """Let what one process computes be stored, and read where another job has stored it."""
    compute = planned.expected

    def stored(case: PlannedCase, num_steps: int = planned.NUM_STEPS) -> planned.Expected:
        key = (case.built, case.contents, case.batch_size, case.left_out, case.seed, case.optimizer, num_steps)
        path = Path(folder, sha256(repr(key).encode()).hexdigest())
        if not path.exists():
            beside = path.with_name(f"{path.name}.{os.getpid()}")
            beside.write_bytes(pickle.dumps(planned.in_numpy(compute(case, num_steps))))
            beside.replace(path)
        return planned.in_tensors(pickle.loads(path.read_bytes()))

    with pytest.MonkeyPatch.context() as patch:
        if folder:
            patch.setattr(planned, "expected", stored)
        yield


@contextmanager
def _updates_on_rows() -> Iterator[None]:
    """Let optimizers update the rows of DTensors at once.

    torch looks for a placement of all parameters anew in each case, half of a case's time; parity tests have it so.
    """

    def on_rows(call: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return call(*tree_map_only(DTensor, DTensor.to_local, args), **tree_map_only(DTensor, DTensor.to_local, kwargs))

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


@contextmanager
def _groups_of_before() -> Iterator[None]:
    """Let a case have the groups of cases before it: thousands would be left, and DTensor remembers its first ones."""
    asked: Counter[object] = Counter()

    def again(ranks: Sequence[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup:
        key = None if ranks is None else tuple(ranks), backend
        asked[key] += 1
        if (key, asked[key]) not in _made:
            _made[key, asked[key]] = groups.new_group(ranks, backend=backend)
        return _made[key, asked[key]]

    with pytest.MonkeyPatch.context() as patch:
        for module in (p2p, holders, mesh, unit_groups):
            patch.setattr(module, "new_group", again)
        yield
