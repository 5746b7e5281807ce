"""Products of tensor-parallel ranks in chunks equal undivided ones bit by bit, and whole models to 1e-10."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dist.test_tensor_parallel import CASES, build, compare, divided, run
from motet.chunked import ColumnLinear, ColumnProducts
from motet.models.lora import LoraConfig, add_lora
from motet.runtime.deferred import DeferredWeights
from motet.tensor_parallel import RowLinear, RowParts, TensorRanks
from ranks import run_ranks

FAMILIES = [case for case in CASES if case[0] in ("qwen3", "gemma3", "phi3", "olmo2")]
NUM_ROWS, WIDTH, INNER = 64, 24, (20, 12, 8)
"""Of the branch. All chunks have at least four rows, which MKL multiplies, in float64, as it does among many."""


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: f"{case[0]} {case[2]}")
def test_models_in_chunks_equal_whole_ones(case):
    run_ranks(compare, 2, [case], 3)


def test_four_ranks_and_more_chunks_than_rows():
    run_ranks(compare, 4, [("qwen3", {"num_key_value_heads": 4}, "siglip")], 1000)


def _branch(rank, num_ranks, num_chunks, in_parts, defers):
    """What a branch of three first products makes, the gradients of its input and weights, and the bytes sent."""
    ranks = TensorRanks(dist.group.WORLD, rank, num_ranks, [], num_chunks)
    parts = RowParts(ranks)
    torch.manual_seed(rank)
    columns = [nn.Linear(WIDTH, inner, bias=inner != 12, dtype=torch.float64) for inner in INNER]
    row = RowLinear(nn.Linear(sum(INNER), WIDTH, dtype=torch.float64), parts)
    into_products = parts.into_products
    if num_chunks > 1:
        columns = [ColumnLinear(column) for column in columns]
        into_products = ColumnProducts(parts, columns).of
    layers = nn.ModuleList([*columns, row])
    deferred, products = DeferredWeights([layers]), []
    whole = torch.randn(NUM_ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    hidden = (whole.chunk(num_ranks)[rank] if in_parts else whole)[None].clone().requires_grad_()
    with parts.of(NUM_ROWS) if in_parts else nullcontext(), deferred.into(products) if defers else nullcontext():
        rows = into_products(hidden)
        sums = row(torch.cat([column(rows) for column in columns], -1).tanh())
        sums.square().sum().backward()
    assert len(products) == (len(layers) if defers else 0)
    for product in products:
        product.add()
    return [sums, hidden.grad, *(parameter.grad for parameter in layers.parameters())], sum(ranks.sent)


def _branch_is_the_same(rank, num_ranks):
    for in_parts in (True, False):
        for defers in (True, False):
            expected, expected_bytes = _branch(rank, num_ranks, 1, in_parts, defers)
            for num_chunks in (2, 3, 4):
                found, found_bytes = _branch(rank, num_ranks, num_chunks, in_parts, defers)
                same = [torch.equal(*pair) for pair in zip(found, expected, strict=True)]
                assert all(same), (in_parts, defers, num_chunks, same)
                assert found_bytes == expected_bytes


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_chunks_change_no_bit_of_a_branch(num_ranks):
    run_ranks(_branch_is_the_same, num_ranks)


def _never(x):
    raise AssertionError("a product was computed alone, though it had been made in chunks")


def _result(rank, num_ranks, num_chunks, has_adapters):
    """As of `run`: (loss, gradients by name, next tokens)."""
    family, options, encoder = CASES[8 if not has_adapters else 2]
    model = build(family, options, encoder)
    if has_adapters:
        add_lora(model, dict.fromkeys(("item", "backbone"), LoraConfig(rank=3, dropout=0.2)), seed=0)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    divided(model, TensorRanks(dist.group.WORLD, rank, num_ranks, [], num_chunks))
    deferred = DeferredWeights([model])
    columns = [module for module in model.modules() if isinstance(module, ColumnLinear)]
    for column in columns:
        column.product = _never
    assert bool(columns) == (num_chunks > 1)
    return run(model, encoder, deferred, recomputes=False)


def _models_are_the_same(rank, num_ranks):
    for has_adapters in (False, True):
        expected, found = (_result(rank, num_ranks, num_chunks, has_adapters) for num_chunks in (1, 2))
        assert found[0] == expected[0] and found[2] == expected[2]
        for name, gradient in expected[1].items():
            if has_adapters and gradient is not None:  # The gradients of A and of the weight beside it are added up.
                torch.testing.assert_close(found[1][name], gradient, rtol=1e-10, atol=1e-12)
            else:
                assert found[1][name] is gradient is None or torch.equal(found[1][name], gradient), name


def test_chunks_change_no_bit_of_a_model_and_each_product_is_made_once():
    run_ranks(_models_are_the_same, 2)
