"""Transformers of PixArt as generators: their loss and samples are those of diffusers, their work what is said."""

from copy import deepcopy

import diffusers
import numpy as np
import pytest
import torch

from motet.core.errors import UserError
from motet.models.diffusion import Diffusion
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.pixart import PixArt
from motet.models.scheduler_noise import SchedulerNoise
from motet.noise import normal_of_rows
from unit.models.denoisers import (
    QUERIES,
    as_image,
    built,
    check_directory_is_read,
    check_directory_is_refused,
    check_items_are_computed_as_if_alone,
    check_size,
    check_work_and_memory,
    drawn,
    loss_of,
    loss_of_a_script,
)

TINY = {
    "in_channels": 3,
    "out_channels": 6,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 7,
    "sample_size": 4,
}
UNPROJECTED = {"caption_channels": None, "cross_attention_dim": 7, "out_channels": 3, "attention_bias": False}
NOISE = NoiseConfig(schedule="linear", beta_start=1e-4, beta_end=0.02)


def tiny(**options):
    """The same in each call."""
    torch.manual_seed(3)
    return diffusers.PixArtTransformer2DModel(**TINY | options)


def scheduler(kind="DPMSolverMultistepScheduler", **options):
    return getattr(diffusers, kind)(beta_schedule="linear", beta_start=1e-4, beta_end=0.02, **options)


@pytest.mark.parametrize("options", [{}, UNPROJECTED], ids=str)
def test_the_loss_is_that_of_a_script_of_diffusers(options):
    """Noise added by the scheduler of PixArt's pipelines; the model; squared errors of the half that is noise."""
    model, noised_by = tiny(**options).double(), scheduler("DDPMScheduler")

    def loss_of_item(latents, added, time, conditions):
        noised = noised_by.add_noise(latents, added, time)
        predicted = model(noised, encoder_hidden_states=conditions[None], timestep=time).sample
        return torch.nn.functional.mse_loss(predicted[:, :3], added)

    expected = loss_of_a_script(loss_of_item, 7)
    for noise in (SchedulerNoise.of(scheduler()), SchedulerNoise.of(noised_by)):
        assert loss_of(PixArt(QUERIES, deepcopy(model)), noise) == pytest.approx(expected, rel=1e-8)


def test_items_of_several_sizes_are_computed_as_if_alone():
    check_items_are_computed_as_if_alone(PixArt(QUERIES, tiny().double()), NOISE)


def test_samples_are_those_of_diffusers():
    model, theirs, sizes, keys = tiny().double(), scheduler("DDIMScheduler"), torch.tensor([[4, 6]]), np.array([4])
    conditions = drawn(7)[-1][:QUERIES]
    latents = as_image(normal_of_rows(keys, np.array([24]), 3, "noise", torch.device("cpu")), sizes[0])
    theirs.set_timesteps(5)
    for time in theirs.timesteps:
        with torch.no_grad():
            predicted = model(latents, encoder_hidden_states=conditions[None], timestep=time[None]).sample[:, :3]
        latents = theirs.step(predicted, time, latents).prev_sample
    noise = SchedulerNoise.of(theirs)
    found = Diffusion(PixArt(QUERIES, tiny().double()), noise).sample(sizes, conditions, keys, SamplingConfig(steps=5))
    assert torch.allclose(as_image(found, sizes[0]), latents, rtol=1e-5, atol=1e-5)


def test_the_learned_variance_has_no_gradient_and_no_part_in_the_loss():
    model = PixArt(QUERIES, tiny().double())
    values, noise, times, conditions = drawn(7)
    sizes = torch.tensor([[4, 4], [2, 6], [4, 4], [2, 2]])
    Diffusion(model, NOISE).loss(values, noise, times, sizes, conditions).backward()
    # The product of a patch has its channels side by side for each latent.
    of_channels = model.model.proj_out.weight.grad.unflatten(0, (4, 6))
    assert not of_channels[:, 3:].any()
    assert of_channels[:, :3].all(dim=-1).all()


def test_pixart_xl_2_has_its_published_size():
    """Sigma's published weights, float32, take 2.44 GB."""
    with torch.device("meta"):
        transformer = diffusers.PixArtTransformer2DModel(
            caption_channels=4096, sample_size=128, use_additional_conditions=False
        )
        check_size(PixArt(300, transformer), 610_856_096)


@pytest.mark.parametrize("options", [{}, UNPROJECTED | {"cross_attention_dim": 24}], ids=str)
def test_work_and_memory_are_what_is_predicted(options):
    torch.manual_seed(0)
    config = {"attention_head_dim": 16, "num_attention_heads": 4, "cross_attention_dim": 64, "num_layers": 3}
    config |= {"caption_channels": 24, "sample_size": 16}
    transformer = PixArt(QUERIES, diffusers.PixArtTransformer2DModel(**TINY | config | options))
    check_work_and_memory(transformer, NOISE, torch.tensor([[32, 32], [24, 32], [32, 32], [16, 16]]), 3)


@pytest.fixture
def pipeline(tmp_path):
    """A directory as a pipeline of diffusers has it: the model and the scheduler."""
    folder = tmp_path / "pipeline"
    tiny().save_pretrained(folder / "transformer")
    scheduler().save_pretrained(folder / "scheduler")
    return folder


@pytest.mark.parametrize("inside", ["", "transformer"])
def test_a_directory_of_diffusers_is_read(pipeline, inside):
    module = check_directory_is_read(diffusers.PixArtTransformer2DModel, pipeline, {"min_snr": 5.0}, inside)
    assert isinstance(module.generator.denoiser, PixArt)
    assert (module.generator.noise.predicts, module.generator.noise.min_snr) == ("epsilon", 5.0)


def test_the_scheduler_of_its_pipelines_is_written_as_it_was(pipeline, tmp_path):
    built(path=pipeline).generator.noise.write(tmp_path)
    written = diffusers.DPMSolverMultistepScheduler.from_pretrained(tmp_path).config
    assert dict(written) == dict(diffusers.DPMSolverMultistepScheduler.from_pretrained(pipeline / "scheduler").config)


def test_random_weights_have_the_noise_that_pixart_learned_with():
    kept = built(family="pixart", config=TINY).generator.noise.kept()
    assert np.allclose(kept, scheduler().alphas_cumprod.numpy(), rtol=1e-4)


MODEL, SCHEDULER = "transformer/config.json", "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        (MODEL, {"_class_name": "Transformer2DModel"}, "SD3Transformer2DModel or PixArtTransformer2DModel"),
        (MODEL, {"use_additional_conditions": True}, "use_additional_conditions is true; resolutions and aspects"),
        (MODEL, {"sample_size": 128}, "use_additional_conditions is null, which is true beside a sample_size of 128"),
        (MODEL, {"dropout": 0.1}, "dropout is 0.1, of which only 0.0 is computed"),
        (MODEL, {"attention_type": "gated"}, "attention_type is 'gated', of which only 'default' is computed"),
        (MODEL, {"activation_fn": "geglu"}, "activation_fn is 'geglu', of which only 'gelu-approximate' is computed"),
        (MODEL, {"norm_elementwise_affine": True}, "norm_elementwise_affine is True"),
        (MODEL, {"norm_type": "ada_norm_zero"}, "no PixArtTransformer2DModel can be made of it"),
        (MODEL, {"out_channels": 4}, "out_channels is 4; it must be in_channels, which is 3, or twice as many"),
        (MODEL, {"cross_attention_dim": None}, "cross_attention_dim is null"),
        (MODEL, {"cross_attention_dim": 8}, "cross_attention_dim is 8; beside caption_channels it must be"),
        (MODEL, {"num_layers": 10**9}, "num_layers is 1000000000; it must be"),
        (MODEL, {"sample_size": 10**9}, "sample_size is 1000000000; it must be"),
        (MODEL, {"num_layers": 3}, "of PixArtTransformer2DModel, transformer_blocks.2."),
        (SCHEDULER, {"prediction_type": "flow_prediction"}, "prediction_type is 'flow_prediction'"),
        (SCHEDULER, {"variance_type": "learned_range"}, "variance_type is 'learned_range'"),
        (SCHEDULER, {"use_flow_sigmas": True}, "use_flow_sigmas is true, of which only false is computed"),
        (SCHEDULER, {"beta_end": float("inf")}, "beta_end is inf; it must be finite"),
        (SCHEDULER, {"beta_start": float("-inf")}, "beta_start is -inf; it must be finite"),
    ],
)
def test_a_directory_that_is_not_computed_is_refused(pipeline, file, options, said):
    check_directory_is_refused(pipeline, file, options, said)


@pytest.mark.parametrize(("sizes", "said"), [([[3, 4]], "multiples of 2, as by"), ([[8]], "rasters")])
def test_sizes_that_it_does_not_make_are_refused(sizes, said):
    with pytest.raises(UserError, match=said):
        built(family="pixart", config=TINY).num_tokens(np.array(sizes))
