"""Operations of each item: the same as those of the whole phase, item by item, to half a unit; and never too large."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core import shapes
from motet.core.spec import Attention, Layer, ModelSpec, Module
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.flops import batch_flops, step_flops
from motet.cost.operations import Operations

GEMMA = shapes.Transformer(64, 128, 4, gated=True, causal=True)


def model(scale: int = 1, **frozen: bool) -> ModelSpec:
    """Images with a class row and windows, clips with strides, a backbone with some windows."""
    trainable = {name: not frozen.get(name, False) for name in ("image", "audio", BACKBONE)}
    shape = shapes.Transformer(32 * scale, 64 * scale, 4, window=16)
    image = shapes.vit("image", shape, 2, class_row=True, trainable=trainable["image"])
    clip = shapes.Transformer(32 * scale, 64 * scale, 4)
    audio = shapes.audio_encoder("audio", clip, 2, num_mel_bins=8, trainable=trainable["audio"])
    text = replace(GEMMA, hidden=64 * scale, mlp=128 * scale)
    layers = [text.layer(trainable=trainable[BACKBONE]), replace(text, window=24).layer(trainable=trainable[BACKBONE])]
    head = shapes.head(500 * scale, text.hidden, trainable=trainable[BACKBONE])
    backbone = Module.of(BACKBONE, [shapes.embedding(500, text.hidden), *layers, head])
    return shapes.multimodal("it", backbone, [shapes.connect(each, text.hidden) for each in (image, audio)])


def draw(seed: int, num_examples: int, longest: int = 90) -> BatchLengths:
    rng = np.random.default_rng(seed)
    items = {}
    for name in ("image", "audio"):
        example = np.repeat(np.arange(num_examples), rng.integers(0, 3, num_examples))
        items[name] = ItemLengths(example, rng.integers(1, longest, len(example)), np.ones(len(example), np.int64))
    sequence = rng.integers(1, longest, num_examples)
    return BatchLengths(sequence, sequence // 3, np.zeros(num_examples, np.int32), items)


@given(st.integers(0, 99), st.integers(0, 8), st.sampled_from([(), ("image",), ("audio", BACKBONE)]), st.booleans())
def test_items_add_up_to_their_phase(seed, num_examples, frozen, recompute):
    spec, lengths = model(**dict.fromkeys(frozen, True)), draw(seed, num_examples)
    blocks = {module.name: len(module.blocks) for module in spec.modules if recompute}
    operations = Operations(spec, blocks)
    work, exact = operations(lengths), batch_flops(spec, lengths, recomputed=blocks)
    assert work.keys() == exact.keys()
    for name, of_items in work.items():
        assert of_items.dtype == np.int64
        assert (
            abs(int(of_items.sum()) * operations.unit_flops - exact[name]) <= len(of_items) * operations.unit_flops / 2
        )


def test_an_item_is_what_it_takes_alone():
    spec, lengths = model(), draw(1, 6)
    work, unit = Operations(spec)(lengths), Operations(spec).unit_flops
    for item, length in enumerate(lengths.items["audio"].length):
        alone = step_flops(spec.module("audio"), np.array([length]), num_tokens=np.ones(1, dtype=np.int64))
        assert work["audio"][item] == (alone + unit // 2) // unit
    for example in range(6):
        alone = step_flops(
            spec.module(BACKBONE), lengths.sequence[[example]], int(lengths.num_targets[example]), reached=True
        )
        assert work[BACKBONE][example] == (alone + unit // 2) // unit


def test_blocks_that_are_recomputed_count_again():
    spec, lengths = model(), draw(2, 3)
    none, one, all_of_it = (Operations(spec, {BACKBONE: count})(lengths)[BACKBONE].sum() for count in (0, 1, 2))
    assert none < one < all_of_it


@pytest.mark.parametrize(("scale", "unit", "flops"), [(1, "FLOP", 1), (4, "kFLOP", 10**3), (400, "MFLOP", 10**6)])
def test_units_are_of_the_size_of_the_model(scale, unit, flops):
    operations = Operations(model(scale))
    assert {operations.unit(phase) for phase in ("image", BACKBONE)} == {unit}
    assert operations.unit_flops == flops
    one = BatchLengths(np.array([1]), np.array([0]), np.zeros(1, np.int32), draw(0, 0).items)
    assert flops == 1 or operations(one)[BACKBONE][0] >= 100


@given(st.integers(0, 99))
def test_a_longer_item_is_never_less(seed):
    lengths = np.sort(np.random.default_rng(seed).integers(0, 200, 40))
    nothing = np.zeros(40, np.int64)
    items = {name: ItemLengths(nothing, lengths, nothing) for name in ("image", "audio")}
    work = Operations(model())(BatchLengths(lengths, nothing, nothing.astype(np.int32), items))
    assert all((np.diff(of_items) >= 0).all() for of_items in work.values())


def test_a_mask_that_leaves_a_share_of_the_pairs_counts_that_share():
    def of(density):
        layer = Layer("attention", 10, 10, 1, 1, Attention(4, 4, density=density))
        spec = shapes.multimodal("it", Module.of(BACKBONE, [layer]), [])
        lengths = BatchLengths(np.array([50]), np.array([0]), np.zeros(1, np.int32), {})
        return int(Operations(spec)(lengths)[BACKBONE][0])

    assert of(1.0) - of(0.0) == 2 * (of(0.5) - of(0.0)) > 0


def test_what_is_longer_than_int64_counts_is_counted_exactly():
    spec = model(400)
    sequence = np.array([3, 10**7, 10**8])
    none = draw(0, 0).items
    lengths = BatchLengths(sequence, sequence // 3, np.zeros(3, np.int32), none)
    work, unit = Operations(spec)(lengths), Operations(spec).unit_flops
    exact = batch_flops(spec, lengths)[BACKBONE]
    assert exact > 2**63
    assert abs(sum(work[BACKBONE].tolist()) - exact // unit) <= 3
