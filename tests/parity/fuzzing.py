"""What a rank does for the fuzzer: many cases in one process, each against one process."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest
import torch.distributed as dist

from motet.runtime import groups, holders, mesh, p2p
from parity import planned
from parity.cut_steps import Cut, errors_of_cut
from parity.planned import TOLERANCE, PlannedCase, differences, errors_of, tolerance_of
from parity.updates import updates_on_rows


@dataclass(frozen=True)
class Found:
    """What a rank finds of a case. error: its largest, as a share. tolerance: of all ranks. wrong: in words."""

    error: float
    tolerance: float
    wrong: list[str]


_made: dict[object, dist.ProcessGroup] = {}


def run_cases(rank: int, num_ranks: int, cases: Sequence[PlannedCase | Cut], references: str = "") -> list[Found]:
    """What this rank finds of each case. A collective.

    references: a folder in which jobs of other numbers of ranks find what one process computes; "" is none.
    """
    found = []
    for case in cases:
        if isinstance(case, Cut):
            errors, tolerance = errors_of_cut(case), TOLERANCE  # Of one step, whose gradients are all that is compared.
        else:
            with _groups_of_before(), updates_on_rows(), _expected_in(references):
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
        key = (case.built, case.drawn_by, case.optimizer, num_steps)
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
def _groups_of_before() -> Iterator[None]:
    """Let a case have the groups of cases before it: thousands would be left, and DTensor remembers its first ones."""
    asked: Counter[object] = Counter()
    new = groups.new_group

    def again(ranks: Sequence[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup:
        key = None if ranks is None else tuple(ranks), backend
        asked[key] += 1
        if (key, asked[key]) not in _made:
            _made[key, asked[key]] = new(ranks, backend=backend)
        return _made[key, asked[key]]

    with pytest.MonkeyPatch.context() as patch:
        for module in (groups, p2p, holders, mesh):
            patch.setattr(module, "new_group", again)
        yield
