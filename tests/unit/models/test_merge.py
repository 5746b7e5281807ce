"""Rows of encoders that are added to hidden states are not kept for backward."""

import pytest
import torch

from motet.models.merge import added_at


@pytest.mark.parametrize("shape", [(5, 3), (1, 5, 3)])
@pytest.mark.parametrize("count", [0, 4])
def test_rows_are_added_as_by_index_add_and_not_kept(shape, count):
    torch.manual_seed(0)
    hidden, rows = torch.randn(shape, dtype=torch.float64), torch.randn(count, 3, dtype=torch.float64)
    leaves = [each.requires_grad_() for each in (hidden, rows)]
    places, weights, kept = torch.tensor([3, 0, 3, 1])[:count], torch.randn(shape, dtype=torch.float64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        added = added_at(hidden, places, rows)
    assert all(tensor.data_ptr() == places.data_ptr() for tensor in kept)
    expected = hidden.index_add(-2, places, rows.reshape(*shape[:-2], count, 3))
    assert torch.equal(added, expected)
    for own, its in zip(*(torch.autograd.grad((each * weights).sum(), leaves) for each in (added, expected))):
        assert torch.equal(own, its)


def test_frozen_rows_get_no_gradient():
    hidden, rows = torch.zeros(2, 3, requires_grad=True), torch.ones(1, 3)
    added_at(hidden, torch.tensor([1]), rows).sum().backward()
    assert torch.equal(hidden.grad, torch.ones(2, 3)) and rows.grad is None
