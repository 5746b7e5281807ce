"""Attention by a table, against attention with the dense mask of the same table."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from motet.balance import Segments
from motet.core.attention_table import AttentionTable
from motet.dropout import arranged, drawing
from motet.models.attention import ATTENTION, PackedItems
from motet.models.table_items import TableItems, plan_tiles

CAUSAL = AttentionTable.packed([9, 300, 1, 700, 30, 6])
IMAGES = AttentionTable.packed([9, 300, 1, 700, 30, 6], together=[[2, 7], [20, 290], [400, 420], [420, 800]])
SEGMENTS = AttentionTable.packed([9, 300, 1, 80], causal=False)
SKIPPING = Segments.of_documents([[("text", 30), ("image", 300), ("text", 40), ("audio", 20), ("text", 9)]] * 2).table()
SOME = np.flatnonzero(np.arange(1046) // 64 % 3 == 1)
TABLES = {
    "causal": CAUSAL,
    "images": IMAGES,
    "segments": SEGMENTS,
    "skipping": SKIPPING,
    "rows of a rank": IMAGES.of(SOME, np.arange(1046)),
    "rows and keys of a rank": IMAGES.of(SOME, IMAGES.of(SOME, np.arange(1046)).seen),
    "no rows": IMAGES.of([], np.arange(1046)),
    "no rows and no keys": IMAGES.of([], []),
}


def draw(table, kv_heads=2, head_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, table.num_rows), (kv_heads, table.num_keys), (kv_heads, table.num_keys))
    made = (torch.randn(1, *shape, head_dim, dtype=dtype, generator=generator) for shape in shapes)
    return [tensor.requires_grad_() for tensor in made]


def dense(query, key, value, table, scale, window=None, softcap=None, sinks=None):
    """What defines it: one softmax over all keys that a row sees, and its sink."""
    table = table if window is None else table.windowed(window)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores) * torch.from_numpy(table.dense())
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks)[:, None, None]
    weights = weights / torch.where(total == 0, 1, total)
    return (weights @ value).transpose(1, 2)


def check(table, window=None, softcap=None, sinks=None, kv_heads=2):
    tensors = draw(table, kv_heads)
    options = {"softcap": softcap, "sinks": sinks}
    out = TableItems(table).attend(*tensors, 0.3, 0.0, window, **options)
    expected = dense(*tensors, table, 0.3, window, **options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    inputs = tensors if sinks is None else [*tensors, sinks]
    got, wanted = (torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 50])
def test_equals_the_dense_mask_with_gradients(table, window):
    check(table, None if table is SEGMENTS else window)


@pytest.mark.parametrize("name", ["causal", "images", "rows and keys of a rank", "no rows", "no rows and no keys"])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_soft_caps_and_sinks(name, softcap, with_sinks):
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_() if with_sinks else None
    check(TABLES[name], 50, softcap, sinks, kv_heads=4)


def test_rows_that_see_nothing_get_zero():
    rows = np.arange(6)
    table = AttentionTable(np.array([[0, 0, 2, 0, 4, 4]]), np.array([[1, 2, 2, 0, 5, 6]]), rows, rows, rows * 0)
    out = TableItems(table).attend(*draw(table), 0.3, 0.0, None)
    assert (out[0, 2:4] == 0).all() and (out[0, [0, 1, 4, 5]] != 0).all()
    check(table)
    check(table, sinks=torch.zeros(4, dtype=torch.float64).requires_grad_())


@settings(max_examples=40)
@given(st.data())
def test_random_tables(data):
    lengths = data.draw(st.lists(st.integers(1, 400), min_size=1, max_size=6))
    ends = np.cumsum(lengths)
    runs = []
    for start, end in zip(ends - lengths, ends):
        first, last = sorted(data.draw(st.tuples(st.integers(start, end), st.integers(start, end))))
        runs.append([first, last])
    table = AttentionTable.packed(lengths, together=runs)
    block = data.draw(st.integers(1, 128))
    rows = np.flatnonzero(np.isin(np.arange(ends[-1]) // block, data.draw(st.lists(st.integers(0, 9), min_size=1))))
    some = table.of(rows, table.of(rows, np.arange(ends[-1])).seen)
    tiles = plan_tiles(some)
    assert [tile.first for tile in tiles] == [0, *(tile.last for tile in tiles[:-1])]
    assert tiles[-1].last == some.num_rows
    check(some, data.draw(st.sampled_from([None, 7])))


def test_masks_stay_small():
    """Those of a causal document of n rows together have little more than n^2 / 2 entries, and none has many rows."""
    tiles = plan_tiles(AttentionTable.packed([5000, *[20] * 100]))
    assert max(tile.last - tile.first for tile in tiles) <= 256
    assert sum((tile.last - tile.first) * (tile.high - tile.low) for tile in tiles) < 0.56 * 5000**2
    assert len(tiles) < 60


def test_dropout_is_drawn_by_row_and_key_of_the_item():
    """A pack, its table, and some rows against the keys that they see drop the same weights."""
    lengths = np.array([9, 30, 1, 70])
    table = AttentionTable.packed(lengths)
    tensors = draw(table)
    drawn = {"backbone": np.arange(4) + 7}

    def attend(extents, counts, query, key, value):
        with drawing("backbone", drawn), arranged(0, lambda: [counts]):
            return extents.attend(query, key, value, 0.3, 0.4, None)

    whole = attend(PackedItems.from_lengths(lengths, causal=True), lengths, *tensors)
    # A soft cap that changes nothing: the table by itself, which else hands plain packs on.
    with drawing("backbone", drawn), arranged(0, lambda: [lengths]):
        own = TableItems(table).attend(*tensors, 0.3, 0.4, None, softcap=1e9)
    torch.testing.assert_close(own, whole, rtol=1e-7, atol=1e-7)
    rows = np.r_[9:39, 40:110]  # documents 1 and 3
    query, key, value = (tensor[:, :, rows] for tensor in tensors)
    drawn = {"backbone": drawn["backbone"][[1, 3]]}
    some = attend(TableItems(table.of(rows, rows)), lengths[[1, 3]], query, key, value)
    torch.testing.assert_close(some, whole[:, rows], rtol=1e-12, atol=1e-12)


def test_refuses_other_numbers_of_rows_and_keys():
    query, key, value = draw(CAUSAL)
    with pytest.raises(ValueError, match="got 1046 rows and 5 keys, its table has 1046 and 1046"):
        TableItems(CAUSAL).attend(query, key[:, :, :5], value[:, :, :5], None, 0.0, None)


def test_refuses_a_window_in_both_directions():
    """It would hide keys on one side alone, as no encoder has it; with a soft cap, too, which packs leave to tables."""
    tensors = draw(SEGMENTS, kv_heads=4)
    for items in (
        TableItems(SEGMENTS, causal=False),
        PackedItems.from_lengths(np.array([9, 300, 1, 80])).with_scores(),
    ):
        with pytest.raises(ValueError, match="both directions has no sliding window"):
            items.attend(*tensors, None, 0.0, 50, softcap=2.0)


def test_sinks_are_those_of_gpt_oss():
    table = IMAGES.of(SOME, np.arange(1046))
    query, key, value = draw(table)
    layer = SimpleNamespace(sinks=torch.linspace(-1, 2, 4, dtype=torch.float64), num_key_value_groups=2, training=False)
    mask = torch.zeros(1, 1, *table.dense().shape, dtype=torch.float64)
    mask.masked_fill_(~torch.from_numpy(table.dense()), -torch.inf)
    expected, _ = gpt_oss_attention(layer, query, key, value, mask, scaling=0.3)
    function, module = AttentionInterface._global_mapping[ATTENTION], torch.nn.Linear(1, 1)
    out, _ = function(module, query, key, value, None, scaling=0.3, segments=TableItems(table), s_aux=layer.sinks)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_layers_of_transformers_give_soft_caps_and_sinks():
    function = AttentionInterface._global_mapping[ATTENTION]
    module, sinks = torch.nn.Linear(1, 1), torch.linspace(-1, 2, 4, dtype=torch.float64)
    table = AttentionTable.packed([3, 5])
    tensors = draw(table)
    for extents in (PackedItems.from_lengths(np.array([3, 5]), causal=True), TableItems(table)):
        out, _ = function(module, *tensors, None, scaling=0.3, segments=extents, softcap=2.0, s_aux=sinks)
        torch.testing.assert_close(out, dense(*tensors, table, 0.3, None, 2.0, sinks), rtol=1e-12, atol=1e-12)
