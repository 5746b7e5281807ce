"""Products of tensor-parallel ranks in chunks equal undivided ones bit by bit, and whole models to 1e-10.

Chunks travel by collectives and by copies, over memory that CPU ranks share. Copies add up in the order of ranks, which
with more than two is not gloo's.

On some processors what BLAS rounds of a row hangs on the rows that stand beside it. There bits are compared of small
whole numbers alone, whose products and sums are exact in any order, and others to 1e-12.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from dist.test_tensor_parallel import CASES, build, compare, divided, run
from motet.chunked import ColumnLinear, ColumnProducts
from motet.models.lora import LoraConfig, add_lora
from motet.runtime.deferred import DeferredWeights
from motet.tensor_parallel import RowLinear, RowParts, TensorRanks
from peer_memory import copies
from ranks import run_ranks

FAMILIES = [case for case in CASES if case[0] in ("qwen3", "gemma3", "phi3", "olmo2")]
NUM_ROWS, WIDTH, INNER = 64, 24, (20, 12, 8)
"""Of the branch. All chunks have at least four rows, which MKL multiplies, in float64, as it does among many."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{case[0]} {case[2]}", marks=pytest.mark.slow if number % 2 else ())
        for number, case in enumerate(FAMILIES)
    ],
)
def test_models_in_chunks_equal_whole_ones(case):
    run_ranks(compare, 2, [case], 3)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case[0], marks=pytest.mark.slow if number else ()) for number, case in enumerate(FAMILIES)],
)
def test_models_whose_chunks_are_copied_equal_whole_ones(case):
    run_ranks(compare, 2, [case], 3, (0.001, 0.0))


@pytest.mark.slow
def test_four_ranks_and_more_chunks_than_rows():
    run_ranks(compare, 4, [("qwen3", {"num_key_value_heads": 4}, "siglip")], 1000)
    run_ranks(compare, 4, [("qwen3", {"num_key_value_heads": 4}, "siglip")], 1000, ())


def _rows_are_alike():
    """Whether this processor multiplies a run of four rows or more as among NUM_ROWS, by a branch's matrices."""
    runs = [slice(start, stop) for start, stop in itertools.combinations(range(NUM_ROWS + 1), 2) if stop - start >= 4]
    for width in (*INNER, sum(INNER)):
        for shape in ((width, WIDTH), (WIDTH, width)):
            rows, weight = _drawn((NUM_ROWS, shape[0]), 1, False), _drawn(shape, 2, False)
            whole = rows @ weight
            if not all(torch.equal(rows[run] @ weight, whole[run]) for run in runs):
                return False
    return True


def _drawn(shape, seed, whole_numbers):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(-3, 4, shape, generator=generator).double()
        if whole_numbers
        else (torch.randn(shape, generator=generator, dtype=torch.float64))
    )


def _branch(rank, num_ranks, num_chunks, in_parts, defers, whole_numbers, by_copies=None, num_rows=NUM_ROWS):
    """What a branch of three first products makes, the gradients of its input and weights, and the bytes sent."""
    ranks = TensorRanks(dist.group.WORLD, rank, num_ranks, [], num_chunks, by_copies)
    parts = RowParts(ranks)
    columns = [nn.Linear(WIDTH, inner, bias=inner != 12, dtype=torch.float64) for inner in INNER]
    row = RowLinear(nn.Linear(sum(INNER), WIDTH, dtype=torch.float64), parts)
    into_products = parts.into_products
    if num_chunks > 1:
        columns = [ColumnLinear(column) for column in columns]
        into_products = ColumnProducts(parts, columns).of
    layers = nn.ModuleList([*columns, row])
    with torch.no_grad():
        for number, parameter in enumerate(layers.parameters()):
            parameter.copy_(_drawn(parameter.shape, 100 * rank + number, whole_numbers))
    deferred, products = DeferredWeights([layers]), []
    whole = _drawn((num_rows, WIDTH), 99, whole_numbers)
    own = pad(whole, (0, 0, 0, -num_rows % num_ranks)).chunk(num_ranks)[rank] if in_parts else whole
    hidden = own[None].clone().requires_grad_()
    with parts.of(num_rows) if in_parts else nullcontext(), deferred.into(products) if defers else nullcontext():
        rows = into_products(hidden)
        sums = row(torch.cat([column(rows) for column in columns], -1).relu())
        sums.square().sum().backward()
    assert len(products) == (len(layers) if defers else 0)
    for product in products:
        product.add()
    return [sums, hidden.grad, *(parameter.grad for parameter in layers.parameters())], sum(ranks.sent)


def _branch_is_the_same(rank, num_ranks):
    bounds = {"rtol": 0, "atol": 0} if _rows_are_alike() else {"rtol": 1e-12, "atol": 1e-9}
    for in_parts, defers, whole_numbers in itertools.product((True, False), repeat=3):
        expected, expected_bytes = _branch(rank, num_ranks, 1, in_parts, defers, whole_numbers)
        for num_chunks in (2, 3, 4):
            found, found_bytes = _branch(rank, num_ranks, num_chunks, in_parts, defers, whole_numbers)
            exact = {"rtol": 0, "atol": 0} if whole_numbers else bounds
            torch.testing.assert_close(found, expected, **exact, msg=str((in_parts, defers, whole_numbers, num_chunks)))
            assert found_bytes == expected_bytes


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_chunks_change_no_bit_of_a_branch(num_ranks):
    run_ranks(_branch_is_the_same, num_ranks)


def _copied_branch_is_the_same(rank, num_ranks, delays):
    """In steps of several sizes, over the same memory, as a run has them."""
    by_copies, exact = copies(dist.group.WORLD, delays), {"rtol": 0, "atol": 0}
    for num_rows, in_parts, defers in itertools.product((NUM_ROWS, 61, 5), (True, False), (True, False)):
        for whole_numbers in (True, False):
            step = in_parts, defers, whole_numbers
            undivided, _ = _branch(rank, num_ranks, 1, *step, num_rows=num_rows)
            for num_chunks in (2, 3) if num_ranks > 2 else (3,):
                case = str((num_rows, *step, num_chunks))
                sent, sent_bytes = _branch(rank, num_ranks, num_chunks, *step, num_rows=num_rows)
                found, found_bytes = _branch(rank, num_ranks, num_chunks, *step, by_copies, num_rows)
                bounds = exact if whole_numbers else {"rtol": 1e-12, "atol": 1e-9}
                torch.testing.assert_close(found, undivided, **bounds, msg=case)
                # With two ranks there is one order of a sum.
                torch.testing.assert_close(found, sent, **exact if num_ranks == 2 else bounds, msg=case)
                assert found_bytes == sent_bytes, case


@pytest.mark.parametrize(
    "delays", [(0.0005, 0.0), pytest.param((0.0, 0.0, 0.0, 0.001), marks=pytest.mark.slow)], ids=str
)
def test_chunks_that_are_copied_change_no_bit_of_a_branch(delays):
    """Also where a rank reads late."""
    run_ranks(_copied_branch_is_the_same, len(delays), delays)


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
        assert found[0] == pytest.approx(expected[0], rel=1e-12) and found[2] == expected[2]
        for name, gradient in expected[1].items():
            if gradient is None:
                assert found[1][name] is None
            else:
                torch.testing.assert_close(found[1][name], gradient, rtol=1e-10, atol=1e-12)


def test_each_product_of_a_model_is_made_once_and_the_model_is_the_same():
    run_ranks(_models_are_the_same, 2)
