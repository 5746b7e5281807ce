"""Dropout by item: masks follow from the item, the place and the row, and not from what else is computed beside it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from motet.core.errors import UserError
from motet.dropout import (
    ENTER,
    ItemRows,
    arranged,
    drawing,
    dropped_out,
    drops_out,
    example_keys,
    in_block,
    item_keys,
    some_more_rows,
)
from motet.models.attention import PackedItems, PaddedClips, QueriedItems
from motet.models.block import Block

RATE = 0.3
KEYS = example_keys(0, 7, np.arange(3))
COUNTS = np.array([4, 1, 3])


def packed(items, run, shape=lambda counts: (int(counts.sum()),)):
    """What `run` makes of ones for these of the three items, packed, item by item."""
    counts = COUNTS[items]
    with drawing("image", {"image": KEYS[items]}), arranged(ENTER, lambda: [counts]):
        return run(torch.ones(*shape(counts), 64, dtype=torch.float64)).split(counts.tolist())


def plain(rows):
    return functional.dropout(rows, RATE)


def test_a_mask_does_not_depend_on_the_items_beside_it():
    whole = packed([0, 1, 2], plain)
    for items in ([2, 0], [1], [0, 2, 1]):
        for item, rows in zip(items, packed(items, plain)):
            assert torch.equal(rows, whole[item])


def test_nor_on_padding():
    with drawing("audio", {"audio": KEYS}):
        padded = plain(torch.ones(3, 9, 64, dtype=torch.float64))
    with drawing("audio", {"audio": KEYS[1:2]}):
        assert torch.equal(plain(torch.ones(1, 4, 64, dtype=torch.float64))[0], padded[1, :4])


def test_parts_of_rows_leave_room_for_all_rows_of_whole_items():
    own = ItemRows(np.array([0, 0, 1, 2, 2]), np.array([1, 3, 0, 0, 2]))
    draws = drawing("backbone", {"backbone": KEYS})
    with draws, arranged(ENTER, lambda: [own, COUNTS]), some_more_rows(5, lambda: np.array([1, 4])):
        # Tensor-parallel ranks have parts of a context-parallel rank's rows; Ulysses deals out heads of all rows.
        assert [len(plain(torch.ones(count, 64))) for count in (5, 2, 8)] == [5, 2, 8]
        with pytest.raises(UserError, match=r"\[4\] rows"):
            plain(torch.ones(4, 64))


def test_masks_differ_between_rows_columns_draws_places_modules_examples_and_steps():
    def drawn(module="image", place=0, seed=0, step=0, example=0, draws=1):
        keys = example_keys(seed, step, np.array([example]))
        with drawing(module, {module: keys}), arranged(place, lambda: [np.array([64])]):
            for _ in range(draws):
                mask = plain(torch.ones(64, 64)) == 0
        return mask

    masks = [drawn(), drawn("audio"), drawn(place=1), drawn(seed=1), drawn(step=1), drawn(example=1), drawn(draws=2)]
    masks += [masks[0].t(), masks[0].roll(1, 0), masks[0].roll(1, 1)]
    for mask in masks[1:]:  # Two of 4,096 bits that are set with RATE agree in 58 % of them, and 5 deviations are 4 %.
        assert abs((mask == masks[0]).double().mean() - (RATE**2 + (1 - RATE) ** 2)) < 0.04


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.9])
def test_as_many_are_dropped_as_the_rate_says_and_the_others_are_scaled(rate):
    with drawing("image", {"image": KEYS}), arranged(ENTER, lambda: [np.full(3, 500)]):
        values = torch.ones(1500, 200, requires_grad=True)
        out = functional.dropout(values, rate)
    dropped = (out == 0).double()
    for by in (dropped.mean(), dropped.mean(0), dropped.mean(1)):
        assert (by - rate).abs().max() < 6 * (rate * (1 - rate) / (dropped.numel() / by.numel())) ** 0.5
    assert out.max().item() == pytest.approx(1 / (1 - rate))
    out.sum().backward()
    assert torch.equal(values.grad, out.detach())


def test_items_of_an_example_have_keys_of_their_own():
    example = np.array([0, 0, 2, 2, 2])
    keys = item_keys(KEYS, example, np.arange(5))
    assert len({*keys.tolist(), *KEYS.tolist()}) == 8
    assert item_keys(KEYS[2:], np.zeros(3, np.int64), np.array([1])) == keys[3]


def test_a_block_draws_the_same_in_whatever_part_it_runs_and_when_it_is_recomputed():
    def run(numbers, recompute=False):
        blocks = [Block(nn.Dropout(RATE), recompute) for _ in range(3)]
        rows = torch.ones(8, 64, requires_grad=True)
        out = rows
        with drawing("image", {"image": KEYS}), arranged(2 * numbers[0], lambda: [COUNTS]):
            for number in numbers:
                blocks[number].number = number
                out = blocks[number](out)
        out.sum().backward()
        return out.detach() != 0, rows.grad

    kept = [run([number])[0] for number in range(3)]
    assert not torch.equal(kept[0], kept[1])
    whole, gradient = run([0, 1, 2])
    assert torch.equal(whole, kept[0] & kept[1] & kept[2])
    assert torch.equal(run([0, 1, 2], recompute=True)[1], gradient)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3, 7], [60, 2, 2]])
def test_attention_of_an_item_does_not_depend_on_the_items_beside_it(lengths, causal):
    rows = [torch.randn(1, 2, length, 4, dtype=torch.float64) for length in lengths]
    counts = np.array(lengths)

    def attend(items):
        joined = torch.cat([rows[item] for item in items], 2)
        extents = PackedItems.from_lengths(counts[items], causal)
        with drawing("image", {"image": KEYS[items]}), arranged(1, lambda: [counts[items]]):
            return extents.attend(joined, joined, joined, None, RATE, None)[0].split(counts[items].tolist())

    for item, out in enumerate(attend([0, 1, 2])):
        assert torch.allclose(out, attend([item])[0], rtol=1e-12, atol=1e-12)
        assert not torch.allclose(out, attend([item])[0] * 0 + rows[item][0].transpose(0, 1))


def test_attention_drops_weights_as_the_rate_says():
    """With values of one, an output is the sum of the weights that are left, scaled: one on average."""
    query, value = torch.randn(1, 4, 400, 8), torch.ones(1, 4, 400, 8)
    clips = PaddedClips(np.array([400]))
    with drawing("audio", {"audio": KEYS[:1]}):
        out = clips.attend(query, query * 0, value, None, RATE, None)
    assert out.mean().item() == pytest.approx(1, abs=0.01)
    assert out.std() > 0.01


def test_padded_clips_drop_out_without_keys_too():
    query = torch.randn(1, 2, 20, 4)
    clips = PaddedClips(np.array([20]))
    assert not torch.equal(*(clips.attend(query, query, query, None, RATE, None) for _ in range(2)))


def test_queries_draw_by_the_item_that_they_read():
    counts, queries = np.array([4, 2, 4]), torch.randn(1, 2, 9, 4, dtype=torch.float64)
    rows = torch.randn(1, 2, 10, 4, dtype=torch.float64)

    def attend(items, query, key):
        extents = QueriedItems(counts[items], 3, sees_queries=False)
        with drawing("image", {"image": KEYS[items]}):
            return extents.attend(query, key, key, None, RATE, None)

    whole = attend([0, 1, 2], queries, rows)
    alone = attend([2], queries[:, :, 6:], rows[:, :, 6:])
    assert torch.allclose(whole[:, 6:], alone, rtol=1e-12, atol=1e-12)


def test_without_keys_torch_draws():
    with drawing("image", None):
        torch.manual_seed(0)
        ours = plain(torch.ones(5, 7))
    torch.manual_seed(0)
    assert torch.equal(ours, plain(torch.ones(5, 7)))
    assert in_block(0, plain) is plain


def test_nothing_is_dropped_in_eval_mode():
    with drawing("image", {"image": KEYS}):
        assert (nn.Dropout(RATE).eval()(torch.ones(2, 5, 3)) == 1).all()


def test_rows_that_belong_to_no_item_are_refused():
    with drawing("image", {"image": KEYS}), arranged(0, lambda: [COUNTS]), pytest.raises(UserError, match="whose"):
        plain(torch.ones(9, 4))


@pytest.mark.parametrize(
    "draw",
    [
        nn.Dropout1d(RATE),
        nn.Dropout2d(RATE),
        nn.AlphaDropout(RATE),
        lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=RATE),
        lambda x: nn.MultiheadAttention(4, 2, dropout=RATE)(x[:, 0], x[:, 0], x[:, 0]),
    ],
)
def test_what_drops_out_in_another_way_is_refused(draw):
    with drawing("image", {"image": KEYS}), pytest.raises(UserError, match="cannot draw by item"):
        draw(torch.ones(3, 2, 5, 4))


def test_models_that_drop_out_are_known():
    assert not drops_out(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert drops_out(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    attention = nn.Identity()
    attention.attention_dropout = 0.1
    assert drops_out(nn.Sequential(attention))


def test_masks_of_many_elements_are_drawn_in_parts_that_fit_together(monkeypatch):
    rows = torch.arange(50) * 12345
    whole = dropped_out(torch.ones(50, 8), rows, RATE)
    monkeypatch.setattr("motet.dropout._AT_ONCE", 24)
    assert torch.equal(dropped_out(torch.ones(50, 8), rows, RATE), whole)
