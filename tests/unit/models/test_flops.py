"""Operations against torch's counter, which does not know of causality and counts SDPA only as plain products."""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.flops import FlopShape, FlopStage, batch_flops, chain, forward_flops, step_flops


def counted(function) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["siglip", "clip", "dinov2", "qwen2_vl", "whisper", "qwen2_audio"])
@pytest.mark.parametrize("train", [True, False])
def test_encoder(tiny, family, train):
    module = tiny.encoder(family, torch.float32, train_encoder=train, projector={"kind": "linear", "downsample": 2})
    sizes = torch.tensor([[40]]) if family in ("whisper", "qwen2_audio") else torch.tensor([[8, 6]])
    values = tiny.values(family, sizes)
    lengths = module.lengths(sizes.numpy())
    assert forward_flops(module.flop_shape(), lengths) == pytest.approx(
        counted(lambda: module(values, sizes)), rel=0.01
    )
    expected = counted(lambda: module(values, sizes).sum().backward())
    assert step_flops(module.flop_shape(), lengths) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("train", [True, False])
def test_backbone(tiny, family, train):
    backbone = tiny.backbone(family, train, torch.float32)
    packed = tiny.Packed.of([64])
    num_targets = backbone(packed, {})[1]
    shape = backbone.flop_shape()
    lengths = np.array([64])
    causal_half = forward_flops(
        FlopShape(tuple(FlopStage(0, attention=s.attention, causal=True) for s in shape.stages)), lengths
    )
    expected = counted(lambda: backbone(packed, {})) - causal_half
    assert forward_flops(shape, lengths, num_targets) == pytest.approx(expected, rel=0.01)
    expected = counted(lambda: backbone(packed, {})[0].mul(1).backward()) - 3 * causal_half
    assert step_flops(shape, lengths, num_targets) == pytest.approx(expected, rel=0.02)


def test_a_window_bounds_attention():
    lengths = np.array([5, 100])
    pairs = [sum(min(row + 1, 8) for row in range(length)) for length in lengths]
    window = forward_flops(FlopShape((FlopStage(0, attention=1, causal=True, window=8),)), lengths)
    # The continuous count leaves out half of the diagonal.
    assert window == pytest.approx(4 * sum(pairs) - 2 * lengths.sum(), rel=0.1)
    far = FlopShape((FlopStage(0, attention=3, causal=True, window=1000),))
    assert forward_flops(far, lengths) == 6 * (lengths**2).sum()


def test_layers_that_are_alike_add_up():
    lengths = np.array([3, 70, 2**33])
    layers = [FlopStage(10, attention=2, causal=True), FlopStage(5, window=8, causal=True, attention=1)] * 3
    whole = step_flops(FlopShape(tuple(layers)), lengths)
    assert whole == sum(step_flops(FlopShape((layer,)), lengths) for layer in layers)
    # Exact beyond float64, so that all ranks count the same.
    assert forward_flops(FlopShape((FlopStage(0, attention=1),)), lengths) == 4 * sum(n**2 for n in lengths.tolist())


def test_a_microbatch_is_the_sum_of_its_items():
    shapes = {"image": FlopShape((FlopStage(7, attention=1),)), BACKBONE: FlopShape((FlopStage(3),), head_weights=5)}
    images = ItemLengths(np.array([0, 0]), np.array([4, 6]), np.array([1, 2]))
    batch = BatchLengths(np.array([9, 2]), np.array([3, 1]), np.array([0, 1], dtype=np.int32), {"image": images})
    assert batch_flops(shapes, batch) == {
        "image": step_flops(shapes["image"], images.length),
        BACKBONE: step_flops(shapes[BACKBONE], batch.sequence, 4),
    }


def test_gradients_that_nobody_needs_cost_nothing():
    frozen, trained = FlopStage(10, attention=2, trained=False), FlopStage(10, attention=2)
    lengths = np.array([3])
    one = forward_flops(FlopShape((frozen,)), lengths)
    assert step_flops(FlopShape(chain(frozen)), lengths) == one
    assert step_flops(FlopShape(chain(frozen, trained)), lengths) == one + 3 * one
    assert step_flops(FlopShape(chain(trained, frozen)), lengths) == 3 * one + (one + 60 + 2 * 72)
