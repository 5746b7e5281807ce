"""Operations of layers and modules: closed forms, exactness, what is frozen, recomputed or padded, MFU and HFU."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core import shapes
from motet.core.spec import Attention, Layer, ModelSpec, Module
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.flops import batch_flops, hfu, layer_flops, like_layer, mfu, step_flops, work_of
from motet.cost.operations import Operations
from unit.cost.forward_flops import forward_flops


def layer(weights=0, width=0, *, kind="attention", **options) -> Layer:
    mask = {name: options.pop(name) for name in ("causal", "window", "density") if name in options}
    attention = Attention(width, width, **mask) if width else None
    return Layer(kind, weights, weights, 1, 1, attention, **options)


def module(*layers: Layer, name="it", padded=False) -> Module:
    return Module.of(name, layers, padded)


lengths_of = st.lists(st.integers(1, 60), min_size=1, max_size=8).map(lambda values: np.array(values, dtype=np.int64))


@given(lengths_of, st.integers(0, 70), st.booleans())
def test_pairs_are_those_that_the_mask_leaves(lengths, window, causal):
    def attends(row, column):
        if causal:
            return row - (window or 10**9) < column <= row
        return not window or row // window == column // window

    pairs = sum(attends(q, k) for length in lengths.tolist() for q in range(length) for k in range(length))
    work = work_of(layer(width=1, window=window, causal=causal), lengths)
    assert (work.rows.tolist(), work.pairs.tolist()) == ([lengths.sum()], [pairs])
    half = work_of(layer(width=1, window=window, causal=causal, density=0.5), lengths)
    assert abs(half.pairs[0] - pairs / 2) <= 0.5


@given(lengths_of, st.integers(1, 4), st.integers(0, 2), st.booleans(), st.data())
def test_microbatches_are_summed_apart(lengths, divisor, extra_rows, padded, data):
    microbatch = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    it = layer(width=2, divisor=divisor, extra_rows=extra_rows)
    work = work_of(it, lengths, microbatch, 4, padded=padded)
    for number in range(4):
        rows = [-(-length // divisor) + extra_rows for length in lengths[microbatch == number].tolist()]
        rows = [max(rows)] * len(rows) if padded and rows else rows
        assert (work.rows[number], work.pairs[number]) == (sum(rows), sum(row * row for row in rows))


def test_only_the_output_layer_sees_targets():
    lengths, microbatch = np.array([5, 7, 9]), np.array([0, 1, 1])
    head = layer(3, targets_only=True)
    assert work_of(head, lengths, microbatch, 2, num_targets=np.array([2, 4])).rows.tolist() == [2, 4]
    assert work_of(head, lengths, microbatch, 2).rows.tolist() == [5, 16]
    assert work_of(layer(3), lengths, num_targets=2).rows.tolist() == [21]
    assert forward_flops(module(layer(5), replace(head, weights=7)), lengths, 4) == 2 * (5 * 21 + 7 * 4)


def test_a_layer_is_its_products_and_its_pairs():
    it = layer(10, width=2)
    forward, inputs, weight = layer_flops(it, work_of(it, np.array([3, 4])))
    assert (forward.tolist(), inputs.tolist(), weight.tolist()) == ([340], [540], [140])
    assert step_flops(module(it), np.array([3, 4]), reached=True) == 340 + 540 + 140


@pytest.mark.parametrize("multiple", [1, 3])
def test_layers_that_are_like_one_have_its_rows_and_pairs(multiple):
    causal = Attention(64, 32, causal=True, window=5)
    layers = [
        Layer("embedding", 0, 4000, 64, 64),
        Layer("norm", 0, 64, 64, 64),
        Layer("attention", 9000, 9100, 64, 80, causal),
        Layer("attention", 9000, 9100, 128, 80, causal, carried_width=64),
        Layer("attention", 90, 91, 8, 9, Attention(8, 4, window=5), continues=True, trainable=False),
        Layer("attention", 90, 91, 8, 9, Attention(8, 4), divisor=2, extra_rows=1, multiple=multiple),
        Layer("queries", 90, 91, 8, 9, Attention(8, 4), item_rows=7),
        Layer("head", 64000, 64000, 1000, 64, targets_only=True),
    ]
    lengths, microbatch, targets = np.array([3, 9, 14, 2]), np.array([0, 1, 1, 0]), np.array([4, 8])
    for layer in layers:
        own, like = (work_of(one, lengths, microbatch, 2, num_targets=targets) for one in (layer, like_layer(layer)))
        assert np.array_equal(own.rows, like.rows) and np.array_equal(own.pairs, like.pairs)
    assert len({like_layer(layer) for layer in layers}) == 6


def test_layers_that_are_alike_add_up():
    lengths = np.array([3, 70, 2**33])
    layers = [layer(10, width=2, causal=True), layer(5, width=1, causal=True, window=8)] * 3
    whole = step_flops(module(*layers), lengths, reached=True)
    assert whole == sum(step_flops(module(each), lengths, reached=True) for each in layers)
    # Exact beyond float64, so that all ranks count the same.
    assert forward_flops(module(layer(width=1)), lengths) == 4 * sum(length**2 for length in lengths.tolist())


def test_gradients_that_nobody_needs_cost_nothing():
    frozen, trainable = layer(10, width=2, trainable=False), layer(10, width=2)
    product = layer(10, kind="patches")
    lengths = np.array([3])
    one, weights, attention = forward_flops(module(frozen), lengths), 60, 72
    assert one == weights + attention
    assert step_flops(module(frozen), lengths) == one
    assert step_flops(module(frozen, frozen), lengths, reached=True) == 2 * (one + weights + 2 * attention)
    assert step_flops(module(frozen, trainable), lengths) == one + 3 * one
    assert step_flops(module(trainable, frozen), lengths) == 3 * one + (one + weights + 2 * attention)
    # The first product of all gives no gradient to its input; within a transformer layer gradients pass all the same.
    assert step_flops(module(product, trainable), lengths) == 2 * weights + 3 * one


def test_what_has_no_backward_is_not_recomputed():
    frozen, trainable, product = layer(10, width=2, trainable=False), layer(10, width=2), layer(10, kind="projector")
    lengths = np.array([3])
    one = forward_flops(module(frozen), lengths)
    for layers, again in (((frozen, trainable), 1), ((trainable, frozen), 2), ((frozen, frozen, product), 0)):
        plain = step_flops(module(*layers), lengths)
        assert step_flops(module(*layers), lengths, recomputed=True) == plain + again * one


@pytest.mark.parametrize(
    ("trainable", "reached", "recomputed", "ratio"),
    [(True, True, True, 3), (False, True, True, 2), (False, False, True, 0)]
    + [(True, True, False, 2), (False, True, False, 1), (False, False, False, 0)],
)
def test_backward_over_forward(trainable, reached, recomputed, ratio):
    """Cornstarch section 4.2, with the erratum: what training, freezing and recomputation make of it."""
    it = replace(layer(10, trainable=trainable), attention=Attention(0, 0))
    once = forward_flops(module(it), np.array([3]))
    assert step_flops(module(it), np.array([3]), reached=reached, recomputed=recomputed) == (1 + ratio) * once


def image_and_text(**options) -> ModelSpec:
    image = module(layer(7, width=1), name="image", **options)
    backbone = module(layer(3, width=2, causal=True), layer(5, kind="head", targets_only=True), name=BACKBONE)
    return shapes.multimodal("model", backbone, [image])


IMAGES = ItemLengths(np.array([0, 0, 1]), np.array([4, 6, 5]), np.array([1, 2, 1]))
BATCH = BatchLengths(np.array([9, 2]), np.array([3, 1]), np.array([0, 1], dtype=np.int32), {"image": IMAGES})


def test_a_microbatch_is_the_sum_of_its_items():
    spec = image_and_text()
    assert batch_flops(spec, BATCH) == {
        "image": step_flops(spec.module("image"), IMAGES.length),
        BACKBONE: step_flops(spec.module(BACKBONE), BATCH.sequence, 4, reached=True),
    }


def test_no_gradient_is_needed_of_an_example_without_items_of_what_learns():
    """Example 1 has an image, example 0 none; the backbone is frozen but for its last layer."""
    image = module(layer(7, width=1), name="image")
    frozen, last = layer(3, width=2, causal=True, trainable=False), layer(5, kind="head", targets_only=True)
    lengths = replace(BATCH, items={"image": ItemLengths(np.array([1]), np.array([4]), np.array([1]))})
    for learns, stacks in (("head", (frozen, last)), ("nothing", (frozen, replace(last, trainable=False)))):
        spec = shapes.multimodal(learns, module(*stacks, name=BACKBONE), [image])
        text, backbone = lengths.take(np.array([0])), spec.module(BACKBONE)
        of_each = [step_flops(backbone, np.array([n]), k, reached=k == 1) for n, k in ((9, 3), (2, 1))]
        assert batch_flops(spec, lengths)[BACKBONE] == sum(of_each)
        assert batch_flops(spec, text)[BACKBONE] == of_each[0]
        assert batch_flops(spec, text, backward_of="microbatch") == batch_flops(spec, text)
        whole = step_flops(backbone, lengths.sequence, 4, reached=True)
        for backward_of in ("microbatch", "all"):
            assert batch_flops(spec, lengths, backward_of=backward_of)[BACKBONE] == whole > sum(of_each)
        alone = batch_flops(spec, text, backward_of="all")[BACKBONE]
        assert alone == step_flops(backbone, text.sequence, 3, reached=True) > of_each[0]


def test_padding_counts_only_as_far_as_the_longest_of_a_rank():
    spec, computed_on = image_and_text(padded=True), {"image": np.array([0, 0, 1])}
    plain, padded = batch_flops(spec, BATCH), batch_flops(spec, BATCH, computed_on=computed_on)
    assert plain == batch_flops(image_and_text(), BATCH)
    assert padded == plain | {"image": step_flops(spec.module("image"), np.array([6, 6, 5]))}


def test_a_number_of_recomputed_blocks_is_of_the_first():
    spec = image_and_text()
    plain = batch_flops(spec, BATCH)
    for blocks in ({}, {"image": 1}, dict.fromkeys(plain, 1), spec.num_blocks):
        work = Operations(spec, blocks)
        counted = {name: int(flops.sum()) * work.unit_flops for name, flops in work(BATCH).items()}
        assert batch_flops(spec, BATCH, recomputed=blocks) == counted
    assert batch_flops(spec, BATCH, recomputed=spec.num_blocks) == batch_flops(spec, BATCH, recomputed=list(plain))


def test_mfu_is_of_the_model_and_hfu_of_the_hardware():
    spec, computed_on = image_and_text(padded=True), {"image": np.array([0, 0, 1])}
    needed = sum(batch_flops(spec, BATCH).values())
    assert mfu(spec, [BATCH, BATCH], 0.5, 8.0 * needed) == 0.5
    done = sum(batch_flops(spec, BATCH, recomputed=["image"], computed_on=computed_on).values())
    assert hfu(spec, [(BATCH, computed_on)], 2.0, 1.0 * done, ["image"]) == 0.5
    assert done - needed == (
        forward_flops(spec.module("image"), np.array([6, 6, 5]))
        + step_flops(spec.module("image"), np.array([6, 6, 5]))
        - step_flops(spec.module("image"), np.array([6, 4, 5]))
    )


@pytest.mark.parametrize("vocab_size", [50_257, 51_200])
def test_optimus_iteration(vocab_size):
    """Optimus Tables 8 and 9, ViT-22B + GPT-175B, batch 1536: an iteration of 5.12e18 operations (its Table 5: 34.4 %
    of 1,536 GPUs at 989 TFLOP/s in 9.80 s). Every transformer layer is recomputed, all pairs of the causal mask count,
    as in Megatron's formula, and encoder and backbone both see 2,048 rows.
    """
    image = shapes.vit("image", shapes.Transformer(6144, 24576, 48), 48)
    backbone = shapes.language_model(shapes.Transformer(12288, 4 * 12288, 96), 96, vocab_size)
    spec = shapes.multimodal("ViT-22B + GPT-175B", backbone, [shapes.connect(image, 12288)])
    assert image.num_parameters == pytest.approx(22e9, rel=0.015)
    assert backbone.num_parameters == pytest.approx(175e9, rel=0.015)
    each = np.full(1536, 2048)
    items = {"image": ItemLengths(np.arange(1536), each, each)}
    batch = BatchLengths(each, each, np.zeros(1536, dtype=np.int32), items)
    flops = batch_flops(spec, batch, recomputed=["image", BACKBONE])
    assert sum(flops.values()) == pytest.approx(5.12e18, rel=0.01)
    published = 0.344 * 1536 * 989e12 * 9.80
    assert sum(flops.values()) == pytest.approx(published, rel=0.01)
    assert hfu(spec, [(batch, {})], 9.80, 1536 * 989e12, ["image", BACKBONE]) == pytest.approx(0.344, abs=0.003)
    # The formula of Narayanan et al. 2021, section 3.3; for the encoder's layers, without an output layer.
    megatron = 96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + vocab_size / (16 * 96 * 12288))
    assert flops[BACKBONE] == pytest.approx(megatron, rel=1e-12)
    layers = 96 * 1536 * 2048 * 48 * 6144**2 * (1 + 2048 / (6 * 6144))
    alone = replace(image, stacks=image.stacks[1:2])
    assert step_flops(alone, each, recomputed=True) == pytest.approx(layers, rel=1e-12)
