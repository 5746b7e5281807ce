"""What a rank holds between steps is what `cost/memory.py` says of its stage, under every ZeRO."""

import gc

import pytest
import torch
import torch.distributed as dist

from motet.core.plan import Unit
from motet.cost.memory import FSDP_FP64, state_bytes
from motet.models.part import names_of_spans
from parity.planned import PlannedCase, batches_of, build_hf_model, build_step
from ranks import run_ranks

STAGES = ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2})


def storage_bytes() -> int:
    """Bytes of all float64 tensors of this process, each storage once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in tensors
        if each.is_floating_point() and each.dtype == torch.float64
    }
    return sum(storages.values())


def held_and_predicted(rank: int, num_ranks: int, cases) -> list[tuple[int, int]]:
    found = []
    for case in cases:
        before = storage_bytes()
        step = build_step(case)
        step.run(batches_of(case, step.place, build_hf_model(frozen=case.frozen), 0))
        held = storage_bytes() - before
        del step
        (unit,) = case.units
        span = {"backbone": (1, 3)} if rank >= 2 else {"image": (0, 3), "audio": (0, 2), "backbone": (0, 1)}
        whole = build_hf_model(case.frozen)
        names = names_of_spans(whole, span)
        sizes = [(p.numel(), p.requires_grad) for name, p in whole.named_parameters() if name in names]
        counts = sum(size for size, _ in sizes), sum(size for size, is_trainable in sizes if is_trainable)
        found.append((held, sum(state_bytes(*counts, precision=FSDP_FP64, zero=unit.zero, shard_ranks=2))))
        del whole
        dist.barrier()
    return found


@pytest.mark.parametrize("frozen", [(), ("image",)])
def test_a_rank_holds_what_its_stage_is_said_to_hold(frozen):
    units = [(Unit("all", STAGES, pp=2, dp=2, zero=zero),) for zero in range(4)]
    cases = [PlannedCase(unit, frozen=frozen) for unit in units]
    for of_rank in run_ranks(held_and_predicted, 4, cases):
        for held, predicted in of_rank:
            assert held == pytest.approx(predicted, rel=0.02), of_rank  # Some ranks have fewer rows of a weight.
