"""Transformers of SD3 as generators: their loss and samples are those of diffusers, their work what is said."""

from copy import deepcopy

import diffusers
import numpy as np
import pytest
import torch

from motet.core.errors import UserError
from motet.models.diffusion import Diffusion
from motet.models.generator_config import GeneratorConfig
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.scheduler_noise import SchedulerNoise
from motet.models.sd3 import SD3
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
    "out_channels": 3,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "joint_attention_dim": 6,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 5,
    "pos_embed_max_size": 8,
    "sample_size": 8,
}
STABLE_DIFFUSION_3 = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 192,
}


def tiny(**options):
    """The same in each call."""
    torch.manual_seed(3)
    return diffusers.SD3Transformer2DModel(**TINY | options)


def scheduler(**options):
    return diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0} | options)


def given_of(conditions):
    """What the transformer takes of an item's condition."""
    return {"encoder_hidden_states": conditions[None, :, :6], "pooled_projections": conditions[:, 6:].mean(0)[None]}


@pytest.mark.parametrize("options", [{}, {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}], ids=str)
def test_the_loss_is_that_of_a_script_of_diffusers(options):
    """Levels of the scheduler's timesteps; noise added along the line; the model; squared errors of the velocity."""
    model, noised_by = tiny(**options).double(), scheduler()

    def loss_of_item(latents, added, number, conditions):
        time = noised_by.timesteps[999 - number]
        sigma = noised_by.sigmas[noised_by.timesteps == time].double()
        predicted = model((1 - sigma) * latents + sigma * added, timestep=time, **given_of(conditions)).sample
        return torch.nn.functional.mse_loss(predicted, added - latents)

    found = loss_of(SD3(QUERIES, deepcopy(model)), SchedulerNoise.of(noised_by))
    assert found == pytest.approx(loss_of_a_script(loss_of_item, 11), rel=1e-8)


def test_items_of_several_sizes_are_computed_as_if_alone():
    check_items_are_computed_as_if_alone(SD3(QUERIES, tiny().double()), NoiseConfig(schedule="flow"))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_samples_are_those_of_the_scheduler(shift):
    theirs, model, sizes, keys = scheduler(shift=shift), tiny().double(), torch.tensor([[4, 6]]), np.array([4])
    conditions = drawn(11)[-1][:QUERIES]
    latents = as_image(normal_of_rows(keys, np.array([24]), 3, "noise", torch.device("cpu")), sizes[0])
    theirs.set_timesteps(5)
    for time in theirs.timesteps:
        with torch.no_grad():
            predicted = model(latents, timestep=time[None], **given_of(conditions)).sample
        latents = theirs.step(predicted, time, latents).prev_sample
    for noise in (SchedulerNoise.of(scheduler(shift=shift)), NoiseConfig(schedule="flow", shift=shift)):
        found = Diffusion(SD3(QUERIES, tiny().double()), noise).sample(sizes, conditions, keys, SamplingConfig(steps=5))
        assert torch.allclose(as_image(found, sizes[0]), latents, rtol=1e-5, atol=1e-5)


def test_timesteps_are_drawn_by_item():
    keys = np.arange(4000)
    even, centred = (NoiseConfig(schedule="flow", times=kind) for kind in ("uniform", "logit_normal"))
    assert torch.equal(even.drawn_times(keys)[:3], even.drawn_times(keys[:3]))
    times = centred.drawn_times(keys).double() / 1000
    logits = torch.logit(times.clamp(1e-3, 1 - 1e-3))
    assert (float(logits.mean()), float(logits.std())) == pytest.approx((0, 1), abs=0.05)
    assert float(even.drawn_times(keys).double().std()) == pytest.approx(1000 / 12**0.5, rel=0.03)
    assert np.allclose(NoiseConfig(schedule="flow", shift=3.0).levels(), SchedulerNoise.of(scheduler()).levels())


def test_stable_diffusion_3_has_the_size_of_its_class():
    with torch.device("meta"):
        check_size(SD3(77, diffusers.SD3Transformer2DModel(**STABLE_DIFFUSION_3)), 2_028_328_000)


@pytest.mark.parametrize("options", [{}, {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}], ids=str)
def test_work_and_memory_are_what_is_predicted(options):
    torch.manual_seed(0)
    config = {"attention_head_dim": 16, "caption_projection_dim": 64, "num_attention_heads": 4, "num_layers": 3}
    config |= {"joint_attention_dim": 24, "pooled_projection_dim": 8, "pos_embed_max_size": 16}
    transformer = SD3(QUERIES, diffusers.SD3Transformer2DModel(**TINY | config | options))
    sizes = torch.tensor([[32, 32], [24, 32], [32, 32], [16, 16]])
    check_work_and_memory(transformer, NoiseConfig(schedule="flow"), sizes, 3)


@pytest.fixture
def pipeline(tmp_path):
    """A directory as a pipeline of diffusers has it: the model and the scheduler."""
    folder = tmp_path / "pipeline"
    tiny().save_pretrained(folder / "transformer")
    scheduler().save_pretrained(folder / "scheduler")
    return folder


@pytest.mark.parametrize("inside", ["", "transformer"])
def test_a_directory_of_diffusers_is_read(pipeline, inside):
    module = check_directory_is_read(diffusers.SD3Transformer2DModel, pipeline, {"times": "logit_normal"}, inside)
    assert (module.generator.noise.shift, module.generator.noise.times) == (3.0, "logit_normal")


def test_a_directory_that_is_missing_is_said_with_all_that_would_do(tmp_path):
    with pytest.raises(UserError) as raised:
        built(path=tmp_path)
    for file in ("config.json", "unet/config.json", "transformer/config.json"):
        assert str(tmp_path / file) in str(raised.value)


def test_random_weights_have_a_flow():
    assert built(family="sd3", config=TINY).generator.noise.shift == 3.0


MODEL, SCHEDULER = "transformer/config.json", "scheduler/scheduler_config.json"


@pytest.mark.parametrize(
    ("file", "options", "said"),
    [
        (MODEL, {"_class_name": "FluxTransformer2DModel"}, "it must be SD3Transformer2DModel"),
        (MODEL, {"caption_projection_dim": 8}, "caption_projection_dim is 8; it must be num_attention_heads"),
        (MODEL, {"qk_norm": "layer_norm"}, "qk_norm is 'layer_norm'"),
        (MODEL, {"pos_embed_max_size": None}, "pos_embed_max_size"),
        (MODEL, {"num_layers": 3}, "cannot be loaded"),
        (SCHEDULER, {"use_dynamic_shifting": True}, "use_dynamic_shifting is True, of which only False"),
        (SCHEDULER, {"shift_terminal": 0.1}, "shift_terminal is 0.1"),
        (SCHEDULER, {"num_train_timesteps": 40}, "sampling.steps is 50, but there are 40 timesteps"),
    ],
)
def test_a_directory_that_is_not_computed_is_refused(pipeline, file, options, said):
    check_directory_is_refused(pipeline, file, options, said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling": {"sampler": "ddim"}}, 'sampler is "ddim", but this noise is sampled by "euler"'),
        ({"noise": {"schedule": "flow", "min_snr": 5.0}}, '`min_snr` has no effect on `schedule` = "flow"'),
        ({"noise": {"schedule": "cosine", "beta_end": 0.3}}, '`beta_end` has no effect on `schedule` = "cosine"'),
        ({"noise": {"schedule": "cosine", "shift": 2.0}}, "`shift` has no effect"),
        ({"noise": {"schedule": "cosine"}, "sampling": {"sampler": "euler"}}, 'sampled by "ddim" or "ddpm"'),
    ],
)
def test_options_without_effect_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        GeneratorConfig(num_queries=1, family="sd3", config=TINY, **options)


@pytest.mark.parametrize(
    ("sizes", "said"), [([[3, 4]], "multiples of 2"), ([[18, 4]], "at most 16"), ([[8]], "rasters")]
)
def test_sizes_that_it_does_not_make_are_refused(sizes, said):
    with pytest.raises(UserError, match=said):
        built(family="sd3", config=TINY).num_tokens(np.array(sizes))
