"""UNets of diffusers as generators: their loss and samples are those of diffusers, their size and work what is said."""

import json
import shutil
import sys

import diffusers
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from motet.core.errors import UserError
from motet.core.shapes import Transformer, language_model, multimodal
from motet.cost.flops import layer_flops, step_flops, work_of
from motet.cost.memory import FSDP_FP32, LayerBytes, stage_layers
from motet.models.diffusion import Diffusion
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.generator_build import build_generator
from motet.models.generator_config import GeneratorConfig
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.projector import Projector, ProjectorConfig
from motet.models.scheduler_noise import SchedulerNoise
from motet.models.unet import UNet
from motet.noise import normal_of_rows
from unit.models.test_generator import kept_bytes

QUERIES, DIM = 4, 32
TINY = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 6,
    "attention_head_dim": 2,
    "norm_num_groups": 2,
}
STABLE_DIFFUSION_2_1 = {
    "sample_size": 96,
    "attention_head_dim": (5, 10, 20, 20),
    "cross_attention_dim": 1024,
    "use_linear_projection": True,
}


def tiny_unet():
    """The same in each call; its last convolution is as large as the others."""
    torch.manual_seed(3)
    return diffusers.UNet2DConditionModel(**TINY).double()


def scheduler(kind="DDPMScheduler", **options):
    return getattr(diffusers, kind)(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, **options)


SIZES = torch.tensor([[4, 4], [2, 6], [4, 4], [2, 2]])


def drawn(seed=0):
    """Values, noise, timesteps and conditions of items of SIZES."""
    torch.manual_seed(seed)
    rows = int(SIZES.prod(1).sum())
    values, noise = torch.randn(2, rows, 3, dtype=torch.float64)
    conditions = torch.randn(len(SIZES) * QUERIES, 6, dtype=torch.float64)
    return values, noise, torch.tensor([0, 999, 500, 20]), conditions


def as_image(rows, size):
    return rows.unflatten(0, size.tolist()).permute(2, 0, 1)[None]


@pytest.mark.parametrize("min_snr", [None, 5.0])
@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_the_loss_is_that_of_diffusers(predicts, min_snr):
    """Of a training script's steps: noise added by the scheduler, the model, squared errors, weights of min-SNR."""
    unet, noised_by = tiny_unet(), scheduler(prediction_type=predicts)
    values, noise, times, conditions = drawn()
    expected = 0.0
    starts = np.cumsum([0, *SIZES.prod(1).tolist()])
    for item, size in enumerate(SIZES):
        rows, time = slice(*starts[item : item + 2].tolist()), times[item : item + 1]
        latents, added = as_image(values[rows], size), as_image(noise[rows], size)
        given = conditions.unflatten(0, (-1, QUERIES))[item][None]
        predicted = unet(noised_by.add_noise(latents, added, time), time, given).sample
        target = added if predicts == "epsilon" else noised_by.get_velocity(latents, added, time)
        loss = torch.nn.functional.mse_loss(predicted, target)
        if min_snr:
            snr = compute_snr(noised_by, time)
            weight = torch.minimum(snr, torch.tensor(min_snr))
            loss = loss * (weight / (snr if predicts == "epsilon" else snr + 1)).item()
        expected += loss.item() * int(size.prod())
    model = Diffusion(UNet(QUERIES, unet), SchedulerNoise.of(noised_by, NoiseConfig(min_snr=min_snr)))
    found = model.loss(values, noise, times, SIZES, conditions).item()
    # Of the weights, diffusers computes the SNR in float32.
    assert found == pytest.approx(expected, rel=1e-7 if min_snr else 1e-8)


def test_items_of_several_sizes_are_computed_as_if_alone():
    values, noise, times, conditions = drawn()
    model = Diffusion(UNet(QUERIES, tiny_unet()), NoiseConfig())
    together = model.loss(values, noise, times, SIZES, conditions).item()
    alone, start = 0.0, 0
    for item, size in enumerate(SIZES):
        rows = slice(start, start := start + int(size.prod()))
        own = conditions[item * QUERIES : (item + 1) * QUERIES]
        alone += model.loss(values[rows], noise[rows], times[item : item + 1], size[None], own).item()
    assert together == pytest.approx(alone, rel=1e-13)


def predicted_of(noised, time):
    return torch.tanh(noised / 2 + time.double() / 300)


class Remembering(torch.nn.Module):
    """Predicts a function of what is given, that differs by timestep."""

    condition_dim, row_dim = 6, 3

    def forward(self, noised, times, sizes, conditions):
        return predicted_of(noised, times)


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("DDIMScheduler", {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
        ("DDIMScheduler", {"clip_sample": True, "clip_sample_range": 0.5}),
        ("DDPMScheduler", {"clip_sample": False}),
        ("DDPMScheduler", {"clip_sample": True}),
    ],
)
def test_samples_are_those_of_diffusers(monkeypatch, kind, options, predicts, spacing):
    theirs = scheduler(kind, prediction_type=predicts, timestep_spacing=spacing, **options)
    ours = Diffusion(Remembering(), SchedulerNoise.of(theirs))
    sizes, keys, conditions = torch.tensor([[2, 3]]), np.array([4]), torch.zeros(1, 6, dtype=torch.float64)
    noises = []

    def normal(*arguments):
        noises.append(normal_of_rows(*arguments))
        return noises[-1]

    monkeypatch.setattr("motet.models.diffusion.normal_of_rows", normal)
    sampler = "ddim" if kind == "DDIMScheduler" else "ddpm"
    found = ours.sample(sizes, conditions, keys, SamplingConfig(sampler=sampler, steps=7))
    latents, *added = noises
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_ddpm.randn_tensor", lambda *_, **__: added.pop(0) if added else 0.0
    )
    theirs.set_timesteps(7)
    for time in theirs.timesteps:
        latents = theirs.step(predicted_of(latents, time), time, latents).prev_sample
    # diffusers computes the factors of DDPM in float32.
    assert torch.allclose(found, latents, rtol=1e-5, atol=1e-5)


def test_stable_diffusion_2_1_has_its_published_size():
    with torch.device("meta"):
        unet = UNet(77, diffusers.UNet2DConditionModel(**STABLE_DIFFUSION_2_1))
    assert sum(p.numel() for p in unet.parameters()) == 865_910_724
    assert sum(each.layer.parameters for each in unet.layers()) == 865_910_724


def module_of(**options):
    torch.manual_seed(0)
    config = TINY | {"block_out_channels": (32, 64), "cross_attention_dim": 24, "norm_num_groups": 8} | options
    net = UNet(QUERIES, diffusers.UNet2DConditionModel(**config))
    entrance = OutputProjector(Projector(DIM, net.condition_dim, ProjectorConfig()), QUERIES, drop=0.1)
    return GeneratorModule(Diffusion(net, NoiseConfig()), entrance, QUERIES)


@pytest.mark.parametrize(
    "options", [{"attention_head_dim": 8}, {"use_linear_projection": True, "layers_per_block": 2}], ids=str
)
def test_work_and_memory_are_what_is_predicted(options):
    module, sizes = module_of(**options), torch.tensor([[16, 16], [24, 16], [16, 16], [8, 8]])
    spec = multimodal("tiny", language_model(Transformer(DIM, 64, 2), 1, 10), [], [module.spec_module("draw")])
    made, lengths = spec.module("draw"), module.lengths(sizes.numpy())
    assert made.num_parameters == sum(p.numel() for p in module.parameters())
    assert len(made.blocks) == 1
    kept = sum(
        LayerBytes.of(placed, float(work_of(placed.layer, lengths).rows[0]), 1, FSDP_FP32).saved
        for placed in stage_layers(spec, {"draw": (0, 1)}, {})
    )
    assert kept == pytest.approx(kept_bytes(module, sizes, 3), rel=0.02)

    rows = torch.randn(len(sizes) * QUERIES, DIM, requires_grad=True)
    values, keys = torch.randn(int(lengths.sum()), 3), np.arange(len(sizes))
    # torch counts no operations of the kernel that CPUs have for attention.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = module(values, sizes, rows, keys)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    counted = sum(float(layer_flops(layer, work_of(layer, lengths)).forward[0]) for layer in made.layers)
    assert counted == forward.get_total_flops()
    # No gradient is needed of what is noised, nor of the timestep.
    total = forward.get_total_flops() + backward.get_total_flops()
    assert step_flops(made, lengths, reached=True) == pytest.approx(total, rel=2e-3)


@pytest.fixture
def pipeline(tmp_path):
    """A directory as a pipeline of diffusers has it: the model and the scheduler."""
    folder = tmp_path / "pipeline"
    torch.manual_seed(5)
    diffusers.UNet2DConditionModel(**TINY).save_pretrained(folder / "unet")
    scheduler("DDIMScheduler", prediction_type="v_prediction", clip_sample=False).save_pretrained(folder / "scheduler")
    return folder


def built(**options):
    return build_generator("draw", GeneratorConfig(num_queries=QUERIES, **options), DIM, torch.float32, 0)


@pytest.mark.parametrize("inside", ["", "unet"])
def test_a_directory_of_diffusers_is_read(pipeline, inside):
    module = built(path=pipeline / inside, noise={"schedule": "path", "min_snr": 5.0})
    stored = diffusers.UNet2DConditionModel.from_pretrained(pipeline / "unet").state_dict()
    read = module.generator.denoiser.unet.state_dict()
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], value) for name, value in stored.items())
    assert (module.generator.noise.predicts, module.generator.noise.min_snr) == ("v", 5.0)
    with torch.device("meta"):
        assert built(path=pipeline).spec_module("draw") == module.spec_module("draw")


def changed(file, **options):
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


UNET, SCHEDULER = "unet/config.json", "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        (UNET, {"_class_name": "UNet1DModel"}, "is of class 'UNet1DModel'; it must be UNet2DConditionModel"),
        (UNET, {"cross_attention_dim": 7}, "size mismatch for down_blocks.0"),
        (UNET, {"dropout": 0.1}, "dropout is 0.1, of which only 0.0 is computed"),
        (UNET, {"addition_embed_type": "text"}, "addition_embed_type is 'text', of which only None"),
        (UNET, {"mid_block_type": "UNetMidBlock2D"}, "mid_block_type has 'UNetMidBlock2D', which is not computed"),
        (UNET, {"of_tomorrow": 1}, "has of_tomorrow, which UNet2DConditionModel does not know"),
        (UNET, {"block_out_channels": [8, 10**9]}, "block_out_channels is 1000000000; it must be"),
        (SCHEDULER, {"_class_name": "EulerDiscreteScheduler"}, "it must be DDPMScheduler or DDIMScheduler or"),
        (SCHEDULER, {"prediction_type": "sample"}, "prediction_type is 'sample'; it must be epsilon or v_prediction"),
        (SCHEDULER, {"beta_schedule": "spiral"}, "no scheduler can be made of"),
        (SCHEDULER, {"thresholding": True}, "thresholding is true"),
        (SCHEDULER, {"rescale_betas_zero_snr": True, "prediction_type": "epsilon"}, 'must be "v_prediction"'),
        (SCHEDULER, {"num_train_timesteps": 40}, "sampling.steps is 50, but there are 40 timesteps"),
        (SCHEDULER, {"num_train_timesteps": 50, "steps_offset": 1}, "begin at timestep 50"),
        (SCHEDULER, {"trained_betas": [0.1, 0.2]}, "trained_betas has 2 values"),
    ],
)
def test_a_directory_that_is_not_computed_is_refused(pipeline, file, options, said):
    changed(pipeline / file, **options)
    with pytest.raises(UserError) as refused:
        built(path=pipeline)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_missing_is_said(pipeline, tmp_path, monkeypatch):
    shutil.rmtree(pipeline / "scheduler")
    with pytest.raises(UserError, match=r"there is no .*scheduler_config.json, which says the noise"):
        built(path=pipeline)
    assert built(path=pipeline, noise={"schedule": "cosine"}).generator.noise.schedule == "cosine"
    with pytest.raises(UserError, match="give a local directory that diffusers wrote"):
        built(path=tmp_path / "stabilityai")
    (pipeline / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        built(path=pipeline, noise={"schedule": "cosine"})
    with pytest.raises(UserError, match="unexpected keyword argument 'depth'"):
        built(family="unet", config=TINY | {"depth": 3})
    with pytest.raises(ValueError, match="has no effect beside"):
        GeneratorConfig(num_queries=1, path=pipeline, noise={"schedule": "path", "predicts": "v"})
    with pytest.raises(ValueError, match=r"`noise.schedule` must be said beside `path`"):
        GeneratorConfig(num_queries=1, path=pipeline, noise={"min_snr": 5.0})
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r"pip install 'motet\[diffusion\]'"):
        built(family="unet", config=TINY)


@pytest.mark.parametrize(("sizes", "said"), [([[3, 4]], "cannot be halved 1 times"), ([[8]], "and not sequences")])
def test_sizes_that_halving_does_not_divide_are_refused(sizes, said):
    with pytest.raises(UserError, match=said):
        built(family="unet", config=TINY).num_tokens(np.array(sizes))
