import torch
from torch import nn

from motet.absent import take_part


def test_taking_part_gives_zero_gradients_to_what_trains():
    layer, frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
    x = torch.empty(0, 3, requires_grad=True)
    out = take_part(x, nn.ModuleList([layer, frozen]).parameters())
    assert out.shape == (0, 3)
    out.sum().backward()
    assert x.grad.shape == (0, 3)
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
    assert all(p.grad is None for p in frozen.parameters())


def test_taking_part_changes_neither_value_nor_gradient():
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)
    out = take_part(x, layer.parameters())
    assert torch.equal(out, x)
    out.square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())
