"""float32 and bf16: how far gradients are from the float64 reference, and that balancing does not make it more.

The limits are those of docs/numerics.md; running this file prints what it measures:
    PYTHONPATH=tests python -m parity.test_precision
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from motet.runtime.fsdp import FSDPConfig
from parity.test_gradients import Case, reference, run_case
from ranks import run_ranks

PRECISIONS = {
    "float32": FSDPConfig(),
    "bf16, summed in float32": FSDPConfig(param_dtype="bfloat16", reduce_dtype="float32"),
    "bf16": FSDPConfig(param_dtype="bfloat16"),
    "bf16, whole copies": FSDPConfig(param_dtype="bfloat16", shard_size=1),
    "bf16, whole copies summed in float32": FSDPConfig(param_dtype="bfloat16", reduce_dtype="float32", shard_size=1),
}
LIMITS = {"float32": 1e-6, **dict.fromkeys([*PRECISIONS][1:], 0.02)}
"""Largest relative error of the gradient of all parameters, in the Euclidean norm."""


def measure(rank: int, num_ranks: int) -> dict[tuple[str, str], tuple[float, float, float]]:
    """(precision, balanced phases) -> relative error of the whole gradient, of its worst parameter, and of the loss."""
    found = {}
    for name, fsdp in PRECISIONS.items():
        for phases in ("off", "all"):
            case = Case(phases=phases, num_examples=24, fsdp=fsdp, num_microbatches=2)
            result, gradients = run_case(case, torch.float32)
            loss = result.loss
            if rank == 0:
                expected_loss, expected = reference(
                    case.frozen, case.num_examples, case.seed, case.contents, case.readers, case.family
                )
                errors = {p: (gradients[p].double() - g).norm() for p, g in expected.items()}
                norm = torch.stack([g.norm() for g in expected.values()]).norm()
                # Gradients that are zero but for rounding (a key's bias, say) have no relative error.
                worst = max(errors[p] / g.norm() for p, g in expected.items() if g.norm() > 1e-6 * norm)
                total = torch.stack(list(errors.values())).norm() / norm
                found[name, phases] = (total.item(), worst.item(), abs(loss / expected_loss - 1))
            dist.barrier()
    return found


@pytest.mark.parametrize("num_ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_error_is_within_the_stated_limits(num_ranks):
    found = run_ranks(measure, num_ranks)[0]
    for (name, phases), (total, _, _) in found.items():
        assert total < LIMITS[name], (name, phases, total)
        assert total < 2 * found[name, "off"][0], f"balancing {phases} doubles the error of {name}"


def difference(rank: int, num_ranks: int, fsdp: FSDPConfig) -> float:
    """The largest between gradients of several microbatches without a `reduce_dtype`, and with float32."""
    case = Case(phases="off", num_examples=24, num_microbatches=3)
    found = [
        run_case(replace(case, fsdp=fsdp.model_copy(update={"reduce_dtype": dtype})), torch.float32)[1]
        for dtype in (None, "float32")
    ]
    return max((found[0][name] - found[1][name]).abs().max().item() for name in found[0]) if rank == 0 else 0.0


@pytest.mark.parametrize(
    ("num_ranks", "sharing"),
    [
        (2, {"once_a_step": True, "reshard_after_forward": False}),
        pytest.param(4, {"shard_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["once a step", "hybrid"],
)
def test_microbatches_are_added_up_in_the_type_of_the_parameters(num_ranks, sharing):
    """Also of parameters that the first microbatches of a rank do not use, beside others that they do."""
    assert run_ranks(difference, num_ranks, FSDPConfig(param_dtype="bfloat16", **sharing))[0] == 0


if __name__ == "__main__":
    for num_ranks in (1, 4):
        for (name, phases), errors in run_ranks(measure, num_ranks)[0].items():
            print(f"{num_ranks} ranks  {name:24} balance {phases:4}", *(f"{error:9.1e}" for error in errors))
