"""Products of routed experts: one kernel computes what a loop over matrices does, forward and backward."""

import pytest
import torch

from motet import grouped
from motet.grouped import GroupedLinear, add_weight_gradients

COUNTS = [[3, 0, 5, 1, 0], [0, 0, 0, 9, 0], [9, 0, 0, 0, 0]]
"""Rows of each matrix; some have none."""


@pytest.fixture
def kernel_calls(monkeypatch):
    """Gets an entry for each call of the kernel."""
    calls, kernel = [], grouped.grouped_mm
    monkeypatch.setattr(grouped, "grouped_mm", lambda *args, **options: calls.append(args) or kernel(*args, **options))
    return calls


def one_kernel_is_the_loop(device, counts, waits):
    """Holds both to float64. waits: the gradient of the weights is computed later, as W does."""
    generator = torch.Generator().manual_seed(3)
    rows, of_made, weights = (
        torch.randn(shape, generator=generator).bfloat16().to(device)
        for shape in ((9, 16), (9, 24), (len(counts), 24, 16))
    )
    results, kept = [], []

    def keep(*product):
        kept.append(product)
        return True

    for dtype in (torch.float64, torch.bfloat16):
        x, w = rows.to(dtype).requires_grad_(), torch.nn.Parameter(weights.to(dtype))
        layer = GroupedLinear()
        layer.waits = keep if waits else None
        made = layer(x, w, counts)
        made.backward(of_made.to(dtype))
        if waits:
            assert w.grad is None
            w.grad = torch.zeros_like(w)
            with torch.no_grad():
                add_weight_gradients(w.grad, *kept.pop()[1:])
        results.append([made.detach(), x.grad, w.grad])
    for found, expected in zip(results[1], results[0], strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("waits", [False, True])
def test_one_kernel_is_the_loop(monkeypatch, kernel_calls, counts, waits):
    """On a CPU torch computes the kernel's function, too; products in float64 are those of the loop."""
    monkeypatch.setattr(grouped, "is_one_kernel", lambda rows, weights: rows.dtype == torch.bfloat16)
    one_kernel_is_the_loop("cpu", counts, waits)
    assert len(kernel_calls) == 3


def test_a_cpu_keeps_the_loop():
    assert not grouped.is_one_kernel(
        torch.zeros(8, 8, dtype=torch.bfloat16), torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    )
