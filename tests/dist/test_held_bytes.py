"""What a rank holds between steps is what `cost/memory.py` says of its stage, under every ZeRO."""

import gc

import pytest
import torch
import torch.distributed as dist

from motet.core.plan import Unit
from motet.cost.memory import FSDP_FP64, mixed_precision, state_bytes
from motet.models.part import names_of_spans
from motet.runtime.sharded_state import SAME_TYPES, ComputeTypes
from parity.planned import PlannedCase, batches_of, build_hf_model, build_step
from ranks import run_ranks

STAGES = ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2})


def storage_bytes(dtypes) -> int:
    """Bytes of all tensors of these types of this process, each storage once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors if each.dtype in dtypes
    }
    return sum(storages.values())


def held_and_predicted(rank: int, num_ranks: int, cases, stored, types, precision) -> list[tuple[int, int]]:
    found, dtypes = [], {stored, types.compute or stored}
    for case in cases:
        case.model()  # What models are copied from stays.
        before = storage_bytes(dtypes)
        step = build_step(case, stored, types)
        step.run(batches_of(case, step.place, build_hf_model(case.frozen, case.tied), 0))
        held, stages = storage_bytes(dtypes) - before, step.place.stages.values()
        del step
        whole = build_hf_model(case.frozen, case.tied)
        shared = next(p for name, p in whole.named_parameters() if name.endswith("embed_tokens.weight"))
        tied = shared.numel() if case.tied else 0
        states = [state_bytes(tied, tied, precision=precision)]
        for stage in stages:
            names, not_own = names_of_spans(whole, stage.layers), tied if "backbone" in stage.layers else 0
            sizes = [(p.numel(), p.requires_grad) for name, p in whole.named_parameters() if name in names]
            counts = sum(size for size, _ in sizes), sum(size for size, is_trainable in sizes if is_trainable)
            own = (count - not_own for count in counts)
            states.append(state_bytes(*own, precision=precision, zero=stage.zero, shard_ranks=stage.shard_size))
        found.append((held, sum(map(sum, states))))
        del whole
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("frozen", "tied"),
    [
        pytest.param((), False, marks=pytest.mark.slow),
        (("image",), False),
        pytest.param(("image",), True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("stored", "types", "precision"),
    [
        pytest.param(torch.float64, SAME_TYPES, FSDP_FP64, marks=pytest.mark.slow),
        (torch.float32, ComputeTypes(torch.bfloat16, torch.float32), mixed_precision("bf16", pipeline=True)),
    ],
    ids=["float64", "bfloat16"],
)
def test_a_rank_holds_what_its_stage_is_said_to_hold(frozen, tied, stored, types, precision):
    """In bfloat16, of a frozen parameter too: what passes compute with, and its rows as they were read. Tied embeddings
    are on both stages, whole (`simulate/predict/tied.py`)."""
    units = [(Unit("all", STAGES, pp=2, dp=2, zero=zero),) for zero in range(4)]
    llm, image = ({"audio": 2, "backbone": 1}, {"backbone": 2}), ({"image": 3},)
    units += [
        (Unit("llm", llm, pp=2, dp=2), Unit("image", image, dp=4, zero=zero, shard_size=2)) for zero in range(1, 4)
    ]
    cases = [PlannedCase(unit, frozen=frozen, tied=tied, batch_size=8) for unit in units]
    for of_rank in run_ranks(held_and_predicted, 4, cases, stored, types, precision):
        for held, predicted in of_rank:
            assert held == pytest.approx(predicted, rel=0.02), of_rank  # Some ranks have fewer rows of a weight.
