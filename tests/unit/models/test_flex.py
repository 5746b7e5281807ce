"""What a CPU can show of flex attention by a table: its blocks, its results without gradients, and its compilations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from motet.balance import Segments
from motet.core.attention_table import AttentionTable
from motet.core.block_table import BlockTable
from motet.models import flex as flex_module
from motet.models import table_items
from motet.models.asked import Asked
from motet.models.flex import FlexTable, attend_by, compiled, has_flex
from motet.models.scores import Scoring
from unit.balance.test_tokens import tables
from unit.models.test_table_items import CAUSAL, TABLES, dense, draw

COLUMNS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
COLUMNS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
CPU = torch.device("cpu")


def by_torch(table, block):
    mask = torch.from_numpy(table.dense())
    return create_block_mask(
        lambda batch, head, row, key: mask[row, key], None, None, *mask.shape, device="cpu", BLOCK_SIZE=block
    )


def check_blocks(table, block):
    made, wanted = BlockTable.of(table, block), by_torch(table, block)
    lists = (made.partial, made.full, made.partial_of_keys, made.full_of_keys)
    for name, own in zip(COLUMNS, [column for each in lists for column in (each.counts, each.indices)]):
        theirs = getattr(wanted, name)[0, 0].numpy()
        np.testing.assert_array_equal(own, theirs, err_msg=name)
        assert own.dtype == theirs.dtype


@settings(max_examples=60)
@given(segments=tables(), block=st.integers(1, 9), window=st.integers(0, 20), chosen=st.sets(st.integers(0, 40)))
def test_blocks_are_those_of_torch(segments, block, window, chosen):
    table = segments.table()
    table = table.windowed(window) if window else table
    rows = np.array(sorted(chosen & set(range(table.num_rows))), dtype=np.int64)
    for each in (table, table.of(rows, table.keys)):
        if each.num_rows and each.num_keys:
            check_blocks(each, block)


@pytest.mark.parametrize("name", ["images", "skipping", "rows and keys of a rank"])
def test_blocks_of_long_tables_are_those_of_torch(name):
    check_blocks(TABLES[name], 128)
    check_blocks(TABLES[name].windowed(200), 128)


def flex(run, table, tensors, sinks=None):
    return FlexTable(table, CPU).attend_by(run, *tensors, sinks).transpose(1, 2)


@pytest.mark.parametrize("name", ["images", "skipping", "rows and keys of a rank"])
@pytest.mark.parametrize(
    ("softcap", "with_sinks"),
    [pytest.param(None, False, marks=pytest.mark.slow), pytest.param(2.0, False, marks=pytest.mark.slow), (2.0, True)],
)
def test_equals_the_dense_mask(name, softcap, with_sinks):
    table = TABLES[name]
    tensors = [x.detach() for x in draw(table, kv_heads=4, head_dim=16, dtype=torch.float32)]
    sinks = torch.linspace(-1, 2, 4) if with_sinks else None
    got = flex(attend_by(0.3, softcap, 128), table, tensors, sinks)
    torch.testing.assert_close(got, dense(*tensors, table, 0.3, None, softcap, sinks), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "softcap", "with_sinks"), [(None, None, False), (0.25, 2.0, True)])
def test_a_new_length_compiles_nothing(scale, softcap, with_sinks):
    counter, num_rows = CompileCounter(), []
    compiled_once = compiled(attend_by(scale, softcap, 128), counter)

    def run(query, *rest):
        num_rows.append(query.shape[2])
        return compiled_once(query, *rest)

    sinks = torch.linspace(-1, 2, 4) if with_sinks else None
    rows = np.arange(400)
    shapes = [
        AttentionTable.packed([300, 212], together=[[20, 90]]),  # as many rows as keys, as many blocks as heads
        AttentionTable.packed([300, 700, 20]),
        AttentionTable.packed([50], together=[[3, 9]]),
        AttentionTable.packed([900, 77]).of(rows, rows),
        AttentionTable.packed([2000], together=[[3, 9]]).of(rows + 100, np.arange(600)),
    ]
    for table in shapes:
        tensors = [x.detach() for x in draw(table, head_dim=16, dtype=torch.float32)]
        expected = dense(*tensors, table, 0.25, None, softcap, sinks)
        torch.testing.assert_close(flex(run, table, tensors, sinks), expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    assert min(num_rows) == 128  # On a GPU torch takes fewer rows for a case of their own.


@pytest.mark.slow
def test_few_numbers_of_intervals_are_compiled():
    """Text that does not see images has an interval for each text before it."""
    counter = CompileCounter()
    run = compiled(attend_by(None, None, 128), counter)
    for num_images in (2, 3, 6, 7):
        modality = np.arange(2 * num_images + 1) % 2
        instance = np.where(modality, np.arange(len(modality)) + 1, 0)
        table = Segments(modality * 0 + 30, modality * 0, modality, instance, 1 - modality).table()
        assert len(table.start) == num_images + 1
        tensors = [x.detach() for x in draw(table, head_dim=16, dtype=torch.float32)]
        torch.testing.assert_close(flex(run, table, tensors), dense(*tensors, table, 0.25), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2


def test_table_items_take_it(monkeypatch):
    """As on CUDA, but not compiled."""
    monkeypatch.setattr(table_items, "has_flex", lambda asked: True)
    monkeypatch.setattr(flex_module, "_of_constants", attend_by)
    table, sinks = TABLES["rows and keys of a rank"], torch.linspace(-1, 2, 4)
    tensors = [x.detach() for x in draw(table, head_dim=16, dtype=torch.float32)]
    items = table_items.TableItems(table)
    for window in (None, 50, None):
        got = items.attend(*tensors, 0.3, 0.0, window, softcap=2.0, sinks=sinks)
        torch.testing.assert_close(got, dense(*tensors, table, 0.3, window, 2.0, sinks), rtol=1e-4, atol=1e-5)
    nothing = [x.detach() for x in draw(TABLES["no rows"], head_dim=16, dtype=torch.float32)]
    assert table_items.TableItems(TABLES["no rows"]).attend(*nothing, 0.3, 0.0, None).shape == (1, 0, 4, 16)


def test_is_for_cuda_alone():
    query, key, _ = draw(CAUSAL)
    assert not has_flex(Asked.by(query, key, Scoring(None, 0.0, None)))
    assert len(FlexTable(Segments.of_documents([[("text", 3)]]).table(), CPU).blocks) == 8
