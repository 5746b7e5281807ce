"""UNets of diffusers as generators: their loss and samples are those of diffusers, their size and work what is said."""

import shutil
import sys

import diffusers
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr

import denoiser_shapes
from motet.core.errors import UserError
from motet.models.diffusion import Diffusion
from motet.models.generator_config import GeneratorConfig
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.scheduler_noise import SchedulerNoise
from motet.models.unet import UNet
from motet.noise import normal_of_rows
from unit.models.denoisers import (
    QUERIES,
    built,
    check_directory_is_read,
    check_directory_is_refused,
    check_items_are_computed_as_if_alone,
    check_size,
    check_work_and_memory,
    loss_of,
    loss_of_a_script,
)

TINY = denoiser_shapes.UNET | {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (8, 16),
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


@pytest.mark.parametrize("min_snr", [None, 5.0])
@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_the_loss_is_that_of_diffusers(predicts, min_snr):
    """Of a training script's steps: noise added by the scheduler, the model, squared errors, weights of min-SNR."""
    unet, noised_by = tiny_unet(), scheduler(prediction_type=predicts)

    def loss_of_item(latents, added, time, conditions):
        predicted = unet(noised_by.add_noise(latents, added, time), time, conditions[None]).sample
        target = added if predicts == "epsilon" else noised_by.get_velocity(latents, added, time)
        loss = torch.nn.functional.mse_loss(predicted, target)
        if not min_snr:
            return loss
        snr = compute_snr(noised_by, time)
        weight = torch.minimum(snr, torch.tensor(min_snr)) / (snr if predicts == "epsilon" else snr + 1)
        return loss * weight.item()

    expected = loss_of_a_script(loss_of_item, 6)
    found = loss_of(UNet(QUERIES, unet), SchedulerNoise.of(noised_by, NoiseConfig(min_snr=min_snr)))
    # Of the weights, diffusers computes the SNR in float32.
    assert found == pytest.approx(expected, rel=1e-7 if min_snr else 1e-8)


def test_items_of_several_sizes_are_computed_as_if_alone():
    check_items_are_computed_as_if_alone(UNet(QUERIES, tiny_unet()), NoiseConfig())


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
        check_size(UNet(77, diffusers.UNet2DConditionModel(**STABLE_DIFFUSION_2_1)), 865_910_724)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_head_dim": 8},
        pytest.param({"use_linear_projection": True, "layers_per_block": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_work_and_memory_are_what_is_predicted(options):
    torch.manual_seed(0)
    config = TINY | {"block_out_channels": (32, 64), "cross_attention_dim": 24, "norm_num_groups": 8} | options
    unet = UNet(QUERIES, diffusers.UNet2DConditionModel(**config))
    check_work_and_memory(unet, NoiseConfig(), torch.tensor([[16, 16], [24, 16], [16, 16], [8, 8]]))


@pytest.fixture
def pipeline(tmp_path):
    """A directory as a pipeline of diffusers has it: the model and the scheduler."""
    folder = tmp_path / "pipeline"
    torch.manual_seed(5)
    diffusers.UNet2DConditionModel(**TINY).save_pretrained(folder / "unet")
    scheduler("DDIMScheduler", prediction_type="v_prediction", clip_sample=False).save_pretrained(folder / "scheduler")
    return folder


@pytest.mark.parametrize("inside", ["", "unet"])
def test_a_directory_of_diffusers_is_read(pipeline, inside):
    module = check_directory_is_read(diffusers.UNet2DConditionModel, pipeline, {"min_snr": 5.0}, inside)
    assert (module.generator.noise.predicts, module.generator.noise.min_snr) == ("v", 5.0)


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
    check_directory_is_refused(pipeline, file, options, said)


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


@pytest.mark.parametrize(
    ("sizes", "said"), [([[3, 4]], "not what a UNet makes; .* multiples of 2"), ([[8]], "and not sequences")]
)
def test_sizes_that_halving_does_not_divide_are_refused(sizes, said):
    with pytest.raises(UserError, match=said):
        built(family="unet", config=TINY).num_tokens(np.array(sizes))
