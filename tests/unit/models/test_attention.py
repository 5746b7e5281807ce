import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from motet.models.attention import ATTENTION, PackedItems, PaddedClips
from motet.models.kernel_calls import plan_calls

LENGTHS = [
    [5],
    [150, *[20, 3] * 20, 149],
    [3, 3, 3],
    [1, 9, 2, 2, 30, 1],
    [70, 3, 64, 65, 2, 140],
    [4, 0, 6],
    list(range(1, 40)),
]


def one_by_one(query, key, value, lengths, causal, scale=None, window=None):
    """Attention of each segment by itself, with the dense mask that defines it."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    outputs = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value))):
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        mask = (distance >= 0) & (distance < (window or len(distance) + 1)) if causal else None
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def draw(lengths, kv_heads=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 4)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_attention_of_each_segment_with_gradients(lengths, causal, window, kv_heads):
    tensors = draw(lengths, kv_heads)
    out = PackedItems.from_lengths(np.array(lengths), causal).attend(*tensors, 0.3, 0.0, window)
    expected = one_by_one(*tensors, lengths, causal, 0.3, window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(out)
    got, wanted = (torch.autograd.grad((x * weights).sum(), tensors) for x in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_a_segment_is_bit_identical_whatever_the_others_hold(causal):
    lengths = [6, 40, 5, 17]
    query, key, value = (x.detach() for x in draw(lengths))
    segments = PackedItems.from_lengths(np.array(lengths), causal)
    before = segments.attend(query, key, value, None, 0.0, None)
    for x in (query, key, value):
        x[:, :, 6:46] = torch.randn(1, 4, 40, 8) * 1e6
    after = segments.attend(query, key, value, None, 0.0, None)
    changed = (before != after).flatten(2).any(2)[0]
    assert not changed[:6].any() and not changed[46:].any() and changed[6:46].all()


def test_short_segments_share_kernel_calls_and_long_ones_are_views():
    lengths = np.random.default_rng(0).integers(1, 30, 500)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assert len(plan_calls(offsets, torch.device("cpu")).calls) < 5
    plan = plan_calls(offsets + 64 * np.arange(501), torch.device("cpu"))
    assert [(call.count, call.longest) for call in plan.calls] == [(1, length + 64) for length in lengths]
    assert plan.gather is None and plan.restore is None


def test_dropout_is_applied():
    tensors = draw([6, 9])
    segments = PackedItems.from_lengths(np.array([6, 9]))
    kept, dropped = (segments.attend(*tensors, None, p, None) for p in (0.0, 0.5))
    assert (kept != dropped).any()


def test_padding_is_not_seen():
    query, key, value = (torch.randn(3, 2, 7, 8, dtype=torch.float64) for _ in range(3))
    lengths = np.array([7, 2, 5])
    packed = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    out = PaddedClips(lengths).attend(*packed, None, 0.0, None)[0].unflatten(0, (3, 7))
    for i, n in enumerate(lengths):
        alone = scaled_dot_product_attention(*(x[i : i + 1, :, :n] for x in (query, key, value)))
        torch.testing.assert_close(out[i : i + 1, :n], alone.transpose(1, 2), rtol=1e-13, atol=1e-13)


def test_refuses_rows_without_extents():
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping[ATTENTION]
    with pytest.raises(TypeError, match="needs the extents of its items"):
        function(torch.nn.Linear(1, 1), *draw([3]), None)
    with pytest.raises(ValueError, match="segments have 4"):
        PackedItems.from_lengths(np.array([4])).attend(*draw([3]), None, 0.0, None)


def test_refuses_what_it_does_not_compute():
    from transformers import AttentionInterface

    function = AttentionInterface._global_mapping[ATTENTION]
    module, segments = torch.nn.Linear(1, 1), PackedItems.from_lengths(np.array([3]), causal=True)
    harmless = {"position_ids": torch.arange(3)[None], "use_cache": False, "output_attentions": False, "softcap": None}
    out, _ = function(module, *draw([3]), None, segments=segments, **harmless)
    assert out.shape == (1, 3, 4, 8)
    for name, given in {"position_bias": torch.zeros(3), "sinks": 1}.items():
        with pytest.raises(TypeError, match=f"does not compute '{name}'"):
            function(module, *draw([3]), None, segments=segments, **{name: given})
    for name, given in {"softcap": 50.0, "s_aux": torch.zeros(4)}.items():
        with pytest.raises(TypeError, match=f"does not compute '{name}'"):
            function(module, *draw([3]), PaddedClips(np.array([3])), **{name: given})
    with pytest.raises(ValueError, match="in both directions has no sliding window"):
        function(module, *draw([3]), PackedItems.from_lengths(np.array([3]), causal=False), sliding_window=2)
    module.is_causal = False
    with pytest.raises(TypeError, match="Linear is not causal"):
        function(module, *draw([3]), None, segments=segments)
    with pytest.raises(TypeError, match="is causal"):
        function(module, *draw([3]), PackedItems.from_lengths(np.array([3])), is_causal=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 16)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_kernel_equals_the_other_branch(causal, window, kv_heads):
    lengths = [70, 3, 64, 65, 2, 140]
    tensors = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in draw(lengths, kv_heads)]
    out = PackedItems.from_lengths(np.array(lengths), causal).attend(*tensors, 0.3, 0.0, window)
    wide = [x.detach().double().cpu().requires_grad_() for x in tensors]
    expected = one_by_one(*wide, lengths, causal, 0.3, window)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-2, atol=2e-2)
    got = torch.autograd.grad(out.float().sum(), tensors)
    wanted = torch.autograd.grad(expected.sum(), wide)
    for g, w in zip(got, wanted):
        torch.testing.assert_close(g.double().cpu(), w, rtol=5e-2, atol=5e-2)
