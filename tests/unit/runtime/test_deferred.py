"""Backward in two halves gives the gradients of one backward pass, and leaves to W what can wait."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from motet.models.experts import RoutedExperts
from motet.runtime.deferred import DeferredWeights


class Model(nn.Module):
    """A linear layer that is called twice, one without a bias, one that is frozen, a norm and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.bare, self.frozen = nn.Linear(6, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 6)
        self.normed, self.norm = weight_norm(nn.Linear(6, 6)), nn.LayerNorm(6)
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x):
        hidden = self.twice(self.norm(self.twice(x)).tanh())
        hidden = self.frozen(self.bare(hidden + x).tanh()) + hidden
        return self.normed(self.convolution(hidden.transpose(-1, -2)).transpose(-1, -2))


def rows(seed):
    return torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gradients(model, x):
    return {**{name: p.grad for name, p in model.named_parameters() if p.grad is not None}, "x": x.grad}


def test_a_layer_with_a_forward_of_its_own_computes_it():
    """As code that is put around single layers sets it; the gradient of its weight does not wait."""
    model, x = Model(), rows(1)
    model.bare.forward = lambda rows: 2 * nn.functional.linear(rows, model.bare.weight)
    expected = model(x)
    deferred, products = DeferredWeights([model]), []
    assert DeferredWeights([model]) and torch.equal(model(x), expected)
    with deferred.into(products):
        model(x).sum().backward()
    assert model.bare.weight.grad is not None
    assert all(product.weight is not model.bare.weight for product in products)


@pytest.mark.parametrize("recomputed", [False, True])
def test_two_halves_are_one_backward_pass(recomputed):
    model = Model()
    expected, seeds = deepcopy(model), (1, 2)
    deferred, waiting = DeferredWeights([model]), []
    given = [[rows(seed) for seed in seeds] for _ in range(2)]
    for x in given[0]:
        expected(x).sin().sum().backward()
    for x in given[1]:
        products = []
        output = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
        with deferred.into(products):
            output.sin().sum().backward()
        assert [product.weight is model.twice.weight for product in products].count(True) == 2 and len(products) == 3
        waiting.append(products)
    linear = {"twice.weight", "bare.weight"}
    assert gradients(expected, given[0][0]).keys() - gradients(model, given[1][0]).keys() == linear
    for products in reversed(waiting):
        for product in products:
            product.add()
    for ours, theirs in zip(given[1], given[0]):
        found, wanted = gradients(model, ours), gradients(expected, theirs)
        assert found.keys() == wanted.keys() and "frozen.weight" not in found
        assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-12) for name in wanted)


def test_nothing_waits_outside_of_the_block():
    model, x = Model(), rows(1)
    expected, other = deepcopy(model), rows(1)
    DeferredWeights([model])
    model(x).sum().backward()
    expected(other).sum().backward()
    found, wanted = gradients(model, x), gradients(expected, other)
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-12) for name in wanted)


def test_a_subclass_with_its_own_forward_is_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer, products = Doubled(2, 2), []
    deferred = DeferredWeights([layer])
    with deferred.into(products):
        layer(torch.ones(1, 2)).sum().backward()
    assert not products and layer.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_under_autocast_nothing_waits():
    layer, products = nn.Linear(2, 2), []
    deferred = DeferredWeights([layer])
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(torch.ones(1, 2))
    with deferred.into(products):
        output.float().sum().backward()
    assert output.dtype == torch.bfloat16 and not products and layer.weight.grad is not None


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("frozen", [(), ("gate_up_proj",)])
def test_experts_wait(recomputed, frozen):
    """Their matrices' gradients come in W, as `Layer.defers_weights` says of the layer; an expert may have no row."""
    config = MixtralConfig(hidden_size=6, intermediate_size=4, num_local_experts=5, num_experts_per_tok=2)
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    for name in frozen:
        getattr(block.experts, name).requires_grad_(False)
    expected = RoutedExperts(0, deepcopy(block))
    model, x, other = RoutedExperts(0, block), rows(1)[:1, :1], rows(1)[:1, :1]
    deferred, products = DeferredWeights([model]), []
    for each in (x, other):
        each.retain_grad()
    expected(other).sin().sum().backward()
    output = checkpoint(model, x, use_reentrant=False) if recomputed else model(x)
    with deferred.into(products):
        output.sin().sum().backward()
    waiting = {"experts.gate_up_proj", "experts.down_proj"} - {f"experts.{name}" for name in frozen}
    assert gradients(expected, other).keys() - gradients(model, x).keys() == waiting
    assert len(products) == len(waiting) and min(products[0].counts) == 0
    for _ in range(2):  # What is there is added to.
        for product in products:
            product.add()
    found, wanted = gradients(model, x), gradients(expected, other)
    factors = {name: 2 if name in waiting else 1 for name in wanted}
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], factors[name] * wanted[name], rtol=0, atol=1e-12) for name in wanted)
