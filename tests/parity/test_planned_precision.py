"""Steps under a Plan that compute, or sum gradients, in another type than parameters have."""

import pytest
import torch
import torch.distributed as dist

from motet.core.plan import Unit
from motet.runtime.sharded_state import ComputeTypes
from parity.planned import OPTIMIZER, PlannedCase, build_hf_model, run_planned
from parity.tiny import reference_step
from parity.updates import updates_on_rows
from ranks import run_ranks

STAGES = ({"image": 3, "audio": 2, "backbone": 1}, {"backbone": 2})
CASES = [
    PlannedCase((Unit("all", STAGES, pp=2, dp=2, zero=zero),), tied=zero == 2, frozen=frozen)
    for zero, frozen in ((0, ("image encoder",)), (1, ("image encoder",)), (2, ()), (3, ("audio",)))
]
PRECISIONS = {
    "float64 over float32": (ComputeTypes(torch.float64), 1e-6, 1e-12),
    "float32, summed in float64": (ComputeTypes(torch.float32, torch.float64), 1e-6, 1e-6),
    "bf16, summed in float32": (ComputeTypes(torch.bfloat16, torch.float32), 0.02, 1e-2),
    "bf16": (ComputeTypes(torch.bfloat16), 0.02, 1e-2),
}
"""Name -> types, and the largest relative errors of the whole gradient and of the loss (docs/numerics.md).

Each is computed with a state that ranks share and with one that they do not.
"""
CHOSEN = {zero: list(PRECISIONS)[zero in (1, 2) :: 2] for zero in range(4)}
"""ZeRO stage -> the names of its precisions."""


def errors(rank: int, num_ranks: int, case: PlannedCase) -> dict[str, tuple[float, float]]:
    """Relative errors of the gradient of this rank's parameters, and of the loss, of one step from float32 weights."""
    model = build_hf_model(case.frozen, case.tied).to(torch.float32).to(torch.float64)
    loss = reference_step(model, case.examples(0))
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    found = {}
    for name in CHOSEN[case.units[0].zero]:
        types, _, _ = PRECISIONS[name]
        with updates_on_rows():
            (result,), weights, gradients = run_planned(case, 1, torch.float32, types)
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        factor = min(1.0, OPTIMIZER.clip_norm / result.grad_norm)
        off = [(gradients[n].double() / factor - expected[n]).norm() for n in weights if n in expected]
        found[name] = ((torch.stack(off).norm() / norm).item(), abs(result.loss / loss - 1))
        dist.barrier()
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"ZeRO {zero}", marks=pytest.mark.slow if zero in (2, 3) else ())
        for zero, case in enumerate(CASES)
    ],
)
def test_error_is_within_the_stated_limits(case):
    for found in run_ranks(errors, 4, case):
        for name, (of_gradient, of_loss) in found.items():
            _, gradient_limit, loss_limit = PRECISIONS[name]
            assert of_gradient < gradient_limit and of_loss < loss_limit, (name, of_gradient, of_loss)
