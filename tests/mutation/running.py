"""Cases of the fuzzer on ranks that have a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mutation import seeded
from parity import planned
from parity.fuzzing import Found, run_cases
from parity.planned import PlannedCase, run_planned

DROPOUT = 0.3


def run_faulty(rank: int, num_ranks: int, faults: Sequence[tuple[str, PlannedCase]]) -> list[Found]:
    """What the fuzzer finds of each case, with a fault; "" is none. A collective."""
    found = []
    for name, case in faults:
        with pytest.MonkeyPatch.context() as patch:
            if name:
                getattr(seeded, name)(patch)
            found += run_cases(rank, num_ranks, [case])
    return found


def recomputed_errors(rank: int, num_ranks: int, case: PlannedCase, fault: str) -> float:
    """The largest difference between a case and the same without recomputation, where blocks drop out. A collective."""
    whole = replace(case, units=tuple(replace(unit, recompute=()) for unit in case.units))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "build_hf_model", _dropping_out(planned.build_hf_model))
        if fault:
            getattr(seeded, fault)(patch)
        planned._whole_model.cache_clear()
        planned._whole_model(*case.built)  # What draws its weights changes the state of torch's generator.
        for each in (case, whole):
            torch.manual_seed(rank)
            found.append(run_planned(each)[1])
    planned._whole_model.cache_clear()
    dist.barrier()
    return max(float((found[0][name] - weight).abs().max()) for name, weight in found[1].items())


def _dropping_out(build):
    def built(*args):
        model = build(*args)
        for module in model.modules():
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = DROPOUT
        return model

    return built
