"""Every family: equal to HF on one item, and to itself one by one; nothing leaks, nothing lacks a gradient."""

import numpy as np
import pytest
import torch
from torch.autograd import grad
from transformers import (
    CLIPVisionModel,
    Dinov2Model,
    DINOv3ViTModel,
    PixtralVisionModel,
    Siglip2VisionModel,
    SiglipVisionModel,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet.core.errors import UserError
from motet.models.block import plain_names
from motet.models.build import EncoderConfig, build_modality
from motet.models.exact import keep_float64
from motet.models.families.eva_clip import EvaCLIPVisionModel
from unit.models.wide import InFloat64

HF = {
    "siglip": SiglipVisionModel,
    "siglip2": Siglip2VisionModel,
    "pixtral": PixtralVisionModel,
    "dinov3": DINOv3ViTModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    "qwen3_vl": Qwen3VLVisionModel,
    "clip": CLIPVisionModel,
    "eva_clip": EvaCLIPVisionModel,
    "dinov2": Dinov2Model,
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "whisper": WhisperEncoder,
    "qwen2_audio": Qwen2AudioEncoder,
    "qwen2_5_omni_audio": Qwen2_5OmniAudioEncoder,
}
FAMILIES = list(HF)


def reference(module, family, dtype=torch.float64):
    """HF's own class with the same weights, and HF's own attention."""
    names = plain_names(module.encoder)
    config = module.encoder.model.config.__class__.from_dict(module.encoder.model.config.to_dict())
    config._attn_implementation = "sdpa"
    model = HF[family](config)
    state = {names[k].removeprefix("model."): v for k, v in module.encoder.state_dict().items()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.load_state_dict(state)
    return model.train(module.training)


def like_trained(module):
    """Norms and biases away from 1 and 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))


def picture(rows, height, width):
    """[height * width, 3 * 16] patches -> [1, 3, 4 height, 4 width] pixels."""
    return rows.view(height, width, 3, 4, 4).permute(2, 0, 3, 1, 4).reshape(1, 3, 4 * height, 4 * width)


@pytest.mark.parametrize("family", ["siglip", "clip", "dinov2"])
@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (6, 2), (7, 7)])
def test_image_equals_hf_on_the_pixels(tiny, family, grid):
    module = tiny.encoder(family).eval()
    sizes = torch.tensor([grid])
    values = tiny.values(family, sizes).double()
    options = {} if family == "dinov2" else {"interpolate_pos_encoding": True}
    with InFloat64():  # HF rounds Dinov2's interpolated positions to float32, whatever the dtype.
        expected = reference(module, family)(picture(values, *grid), **options).last_hidden_state[0]
    expected = expected if family == "siglip" else expected[1:]
    torch.testing.assert_close(module.encoder(values, sizes), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["siglip", "clip", "dinov2"])
def test_image_equals_hf_in_float32(tiny, family):
    module = tiny.encoder(family, torch.float32).eval()
    sizes = torch.tensor([[3, 5]])
    values = tiny.values(family, sizes)
    options = {} if family == "dinov2" else {"interpolate_pos_encoding": True}
    expected = reference(module, family, torch.float32)(picture(values, 3, 5), **options).last_hidden_state[0]
    torch.testing.assert_close(module.encoder(values, sizes), expected[-15:], rtol=1e-5, atol=1e-6)


def test_qwen2_vl_equals_hf_on_packed_images(tiny):
    module = tiny.encoder("qwen2_vl").eval()
    sizes = tiny.sizes("qwen2_vl")
    values = tiny.values("qwen2_vl", sizes).double()
    grid = torch.cat([torch.ones(len(sizes), 1, dtype=torch.int64), sizes], dim=1)
    with InFloat64():  # HF turns rows in float32.
        expected = reference(module, "qwen2_vl")(values, grid).pooler_output
    torch.testing.assert_close(module.encoder(values, sizes), expected, rtol=1e-12, atol=1e-12)


def hf_rows(model, family, values, grid):
    """What transformers computes of one image, its patches alone."""
    if family == "siglip2":
        channels_last = values.view(-1, 3, 16).transpose(1, 2).flatten(1)[None]
        return model(channels_last, torch.ones(1, len(values)), torch.tensor([grid])).last_hidden_state[0]
    if family in ("qwen2_5_vl", "qwen3_vl"):
        return model(values, torch.tensor([[1, *grid]])).pooler_output
    return model(picture(values, *grid)).last_hidden_state[0][-len(values) :]


@pytest.mark.parametrize("family", ["siglip2", "pixtral", "dinov3", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("grid", [(4, 4), (2, 6), (6, 10)])
def test_rows_and_gradients_equal_hf_on_one_image(tiny, family, grid):
    """Beside another image in the pack; with weights as if trained."""
    module = tiny.encoder(family)
    like_trained(module)
    model = reference(module, family)
    keep_float64(model)
    sizes = torch.tensor([[2, 2], grid])
    values = tiny.values(family, sizes).double()
    first = int(module.encoder.num_outputs(sizes[:1].numpy())[0])
    # HF turns rows by float32 angles, and resizes tables in float32, by weights that Qwen3-VL's have here, too.
    with InFloat64():
        got, expected = module.encoder(values, sizes)[first:], hf_rows(model, family, values[4:], grid)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(got)
    names, theirs = plain_names(module.encoder.model), dict(model.named_parameters())
    learns = [
        (each, theirs[names[name]]) for name, each in module.encoder.model.named_parameters() if each.requires_grad
    ]
    wanted = grad((expected * weights).sum(), [other for _, other in learns])
    found = grad((got * weights).sum(), [one for one, _ in learns])
    least = 1e-6 * max(float(each.norm()) for each in wanted)
    for one, other in zip(found, wanted):
        assert float((one - other).norm()) < 1e-8 * max(float(other.norm()), least)


@pytest.mark.parametrize("grid", [(6, 1), (1, 9)])
def test_siglip2_equals_hf_on_an_image_one_patch_wide(tiny, grid):
    module, sizes = tiny.encoder("siglip2"), torch.tensor([grid])
    values = tiny.values("siglip2", sizes).double()
    with InFloat64():  # HF resizes the table in float32.
        got, expected = module.encoder(values, sizes), hf_rows(reference(module, "siglip2"), "siglip2", values, grid)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("option", ["pos_embed_rescale", "pos_embed_jitter"])
def test_places_that_are_drawn_for_a_batch_are_refused(tiny, option):
    config = tiny.encoders["dinov3"] | {option: 2.0}
    with pytest.raises(UserError, match=f"{option} is 2.0; it must be 1"):
        build_modality("dinov3", EncoderConfig(family="dinov3", config=config), 8, torch.float32, 0)


@pytest.mark.parametrize("family", ["whisper", "qwen2_audio"])
def test_audio_equals_hf_on_a_clip_of_full_length(tiny, family):
    module = tiny.encoder(family).eval()
    sizes = torch.tensor([[40], [9]])
    values = tiny.values(family, sizes).double()
    expected = reference(module, family)(values[:40].T[None]).last_hidden_state[0]
    torch.testing.assert_close(module.encoder(values, sizes)[: len(expected)], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frames", [40, 16, 23, 35])
def test_chunks_of_a_clip_equal_hf_with_gradients(tiny, frames):
    """Of whole chunks, of one, and with a last one whose rows are odd; beside another clip in the pack."""
    module = tiny.encoder("qwen2_5_omni_audio")
    like_trained(module)
    model = reference(module, "qwen2_5_omni_audio")
    sizes = torch.tensor([[9], [frames]])
    values = tiny.values("qwen2_5_omni_audio", sizes).double()
    got = module.encoder(values, sizes)[2:]
    count = (frames + 1) // 2
    expected = model(values[9:].T, torch.tensor([frames]), torch.tensor([count])).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    weights, names, theirs = torch.randn_like(got), plain_names(module.encoder.model), dict(model.named_parameters())
    learns = {names[name]: each for name, each in module.encoder.model.named_parameters() if each.requires_grad}
    assert theirs.keys() - learns.keys() == {"audio_bos_eos_token.weight"}
    wanted = grad((expected * weights).sum(), [theirs[name] for name in learns])
    for one, other in zip(grad((got * weights).sum(), list(learns.values())), wanted):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_together_equals_one_by_one_with_gradients(tiny, family):
    module = tiny.encoder(family, projector={"downsample": 4})
    sizes = tiny.sizes(family)
    values = tiny.values(family, sizes).double()
    together = module(values, sizes)
    counts = module.num_tokens(sizes.numpy())
    assert len(together) == counts.sum()
    parts = values.split(sizes.prod(1).tolist())
    alone = torch.cat([module(part, size[None]) for part, size in zip(parts, sizes)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-13)
    params = [p for p in module.parameters() if p.requires_grad]
    weights = torch.randn_like(together)
    got, wanted = (torch.autograd.grad((x * weights).sum(), params) for x in (together, alone))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_item_is_bit_identical_whatever_the_others_hold(tiny, family):
    module = tiny.encoder(family).eval()
    sizes = tiny.sizes(family)
    values = tiny.values(family, sizes).double()
    parts = values.split(sizes.prod(1).tolist())
    other = torch.cat([parts[0], torch.randn_like(parts[1]) * 1e3, *parts[2:]])
    counts = module.num_tokens(sizes.numpy()).tolist()
    before, after = (module(x, sizes).split(counts) for x in (values, other))
    for i in (0, 2, 3):
        assert torch.equal(before[i], after[i])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_trainable_parameter_gets_a_gradient_also_from_nothing(tiny, family):
    module = tiny.encoder(family)
    sizes = tiny.sizes(family)
    module(tiny.values(family, sizes), sizes).square().sum().backward()
    assert [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None] == []
    assert [n for n, p in module.named_parameters() if not p.requires_grad and p.grad is not None] == []
    module.zero_grad()
    nothing = module(torch.empty(0, 0), sizes[:0])
    assert nothing.shape == (0, tiny.dim) and nothing.dtype == torch.float64
    nothing.sum().backward()
    assert all((p.grad is not None and not p.grad.any()) == p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_changes_no_gradient(tiny, family):
    module = tiny.encoder(family)
    sizes = tiny.sizes(family)
    values = tiny.values(family, sizes)
    params = [p for p in module.parameters() if p.requires_grad]
    expected = torch.autograd.grad(module(values, sizes).square().sum(), params)
    for block in module.blocks:
        block.recompute = True
    got = torch.autograd.grad(module(values, sizes).square().sum(), params)
    assert all(torch.equal(g, e) for g, e in zip(got, expected))


def test_rows_per_item(tiny):
    images, clips = np.array([[2, 4], [6, 6]]), np.array([[1], [2], [7], [8]])
    assert tiny.encoder("siglip").num_tokens(images).tolist() == [8, 36]
    assert tiny.encoder("qwen2_vl").num_tokens(images).tolist() == [2, 9]
    assert tiny.encoder("qwen2_vl", projector={"downsample": 4}).num_tokens(images).tolist() == [1, 4]
    assert tiny.encoder("clip", projector={"downsample": 4}).num_tokens(np.array([[2, 4], [3, 5]])).tolist() == [2, 6]
    assert tiny.encoder("whisper").num_tokens(clips).tolist() == [1, 1, 4, 4]
    assert tiny.encoder("qwen2_audio").num_tokens(clips).tolist() == [0, 0, 2, 2]
    assert tiny.encoder("qwen2_5_omni_audio").num_tokens(clips).tolist() == [0, 0, 2, 2]
    assert tiny.encoder("whisper").lengths(clips).tolist() == [1, 2, 7, 8]
    assert tiny.encoder("qwen2_vl").lengths(images).tolist() == [8, 36]
    assert (tiny.encoder("whisper").cost, tiny.encoder("clip").cost) == ("padded", "packed")


def test_sizes_that_do_not_fit_are_the_users_error(tiny):
    with pytest.raises(UserError, match="multiples of 2"):
        tiny.encoder("qwen2_vl").num_tokens(np.array([[2, 3]]))
    for family in ("whisper", "qwen2_audio"):
        with pytest.raises(UserError, match="41 frames is longer than the 40"):
            tiny.encoder(family).num_tokens(np.array([[3], [41]]))
