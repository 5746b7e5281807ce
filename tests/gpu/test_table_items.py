"""Attention by a table on CUDA, by flex attention: results and gradients, and that a new length compiles nothing."""

import numpy as np
import pytest
import torch

from motet.core.attention_table import AttentionTable
from motet.models.asked import Asked
from motet.models.flex import has_flex
from motet.models.scores import Scoring
from motet.models.table_items import TableItems
from unit.models.test_table_items import IMAGES, TABLES, dense, draw


def on_device(tensors, dtype):
    return [tensor.detach().to("cuda", dtype).requires_grad_() for tensor in tensors]


def wide(tensors):
    return [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-2), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True)])
def test_equals_the_dense_mask_with_gradients(name, dtype, tolerance, softcap, with_sinks):
    table = TABLES[name]
    tensors = on_device(draw(table, head_dim=64), dtype)
    sinks = torch.linspace(-1, 2, 4, device="cuda").requires_grad_() if with_sinks else None
    inputs = tensors if sinks is None else [*tensors, sinks]
    exact = wide(inputs)
    assert has_flex(Asked.by(*tensors[:2], Scoring(0.1, 0.0, None)))
    out = TableItems(table).attend(*tensors, 0.1, 0.0, None, softcap=softcap, sinks=sinks)
    expected = dense(*exact[:3], table, 0.1, None, softcap, exact[3] if with_sinks else None)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(out.float().sum(), inputs)
    wanted = torch.autograd.grad(expected.sum(), exact)
    for mine, theirs in zip(got, wanted):
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=2 * tolerance, atol=2 * tolerance)


def test_windows_hide_what_stands_too_far_before():
    tensors = on_device(draw(IMAGES, head_dim=64), torch.float32)
    out = TableItems(IMAGES).attend(*tensors, 0.1, 0.0, 50)
    torch.testing.assert_close(out.double().cpu(), dense(*wide(tensors), IMAGES, 0.1, window=50), rtol=1e-2, atol=1e-2)


def test_a_new_length_compiles_nothing_in_forward_and_backward():
    rng = np.random.default_rng(0)

    def step(num_rows):
        table = AttentionTable.packed([num_rows, 100], together=[[3, 20]])
        rows = np.sort(rng.choice(num_rows + 100, num_rows // 2, replace=False))
        for each in (table, table.of(rows, table.keys)):
            tensors = on_device(draw(each, head_dim=64), torch.bfloat16)
            TableItems(each).attend(*tensors, 0.123, 0.0, None).float().sum().backward()

    step(412)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_rows in (60, 700, 1024, 5000):
            step(num_rows)
