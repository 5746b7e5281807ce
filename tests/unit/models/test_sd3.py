"""Transformers of SD3 as generators: their loss and samples are those of diffusers, their work what is said."""

import diffusers
import numpy as np
import pytest
import torch
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
from motet.models.sd3 import SD3
from motet.noise import normal_of_rows
from unit.models.test_generator import kept_bytes
from unit.models.test_unet import DIM, QUERIES, SIZES, as_image, changed

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


def drawn(seed=0):
    """Values, noise, timesteps and conditions of items of SIZES."""
    torch.manual_seed(seed)
    rows = int(SIZES.prod(1).sum())
    values, noise = torch.randn(2, rows, 3, dtype=torch.float64)
    return values, noise, torch.tensor([0, 999, 500, 20]), torch.randn(len(SIZES) * QUERIES, 11, dtype=torch.float64)


def given_of(conditions):
    """What the transformer takes of an item's condition."""
    return {"encoder_hidden_states": conditions[None, :, :6], "pooled_projections": conditions[:, 6:].mean(0)[None]}


@pytest.mark.parametrize("options", [{}, {"qk_norm": "rms_norm", "dual_attention_layers": (0,)}], ids=str)
def test_the_loss_is_that_of_a_script_of_diffusers(options):
    """Levels of the scheduler's timesteps; noise added along the line; the model; squared errors of the velocity."""
    model, noised_by = tiny(**options).double(), scheduler()
    values, noise, times, conditions = drawn()
    expected = 0.0
    starts = np.cumsum([0, *SIZES.prod(1).tolist()])
    for item, size in enumerate(SIZES):
        rows = slice(*starts[item : item + 2].tolist())
        latents, added = as_image(values[rows], size), as_image(noise[rows], size)
        time = noised_by.timesteps[999 - times[item]][None]
        sigma = noised_by.sigmas[noised_by.timesteps == time].double()
        given = given_of(conditions.unflatten(0, (-1, QUERIES))[item])
        predicted = model((1 - sigma) * latents + sigma * added, timestep=time, **given).sample
        expected += torch.nn.functional.mse_loss(predicted, added - latents).item() * int(size.prod())
    found = Diffusion(SD3(QUERIES, model), SchedulerNoise.of(noised_by)).loss(values, noise, times, SIZES, conditions)
    assert found.item() == pytest.approx(expected, rel=1e-8)


def test_items_of_several_sizes_are_computed_as_if_alone():
    values, noise, times, conditions = drawn()
    model = Diffusion(SD3(QUERIES, tiny().double()), NoiseConfig(schedule="flow"))
    together = model.loss(values, noise, times, SIZES, conditions).item()
    alone, start = 0.0, 0
    for item, size in enumerate(SIZES):
        rows = slice(start, start := start + int(size.prod()))
        own = conditions[item * QUERIES : (item + 1) * QUERIES]
        alone += model.loss(values[rows], noise[rows], times[item : item + 1], size[None], own).item()
    assert together == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_samples_are_those_of_the_scheduler(shift):
    theirs, model, sizes, keys = scheduler(shift=shift), tiny().double(), torch.tensor([[4, 6]]), np.array([4])
    conditions = drawn()[-1][:QUERIES]
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
        model = SD3(77, diffusers.SD3Transformer2DModel(**STABLE_DIFFUSION_3))
    assert sum(p.numel() for p in model.parameters()) == 2_028_328_000
    assert sum(each.layer.parameters for each in model.layers()) == 2_028_328_000


def module_of(**options):
    torch.manual_seed(0)
    config = {"attention_head_dim": 16, "caption_projection_dim": 64, "num_attention_heads": 4, "num_layers": 3}
    config |= {"joint_attention_dim": 24, "pooled_projection_dim": 8, "pos_embed_max_size": 16}
    net = SD3(QUERIES, diffusers.SD3Transformer2DModel(**TINY | config | options))
    entrance = OutputProjector(Projector(DIM, net.condition_dim, ProjectorConfig()), QUERIES, drop=0.1)
    return GeneratorModule(Diffusion(net, NoiseConfig(schedule="flow")), entrance, QUERIES)


@pytest.mark.parametrize("options", [{}, {"qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}], ids=str)
def test_work_and_memory_are_what_is_predicted(options):
    module, sizes = module_of(**options), torch.tensor([[32, 32], [24, 32], [32, 32], [16, 16]])
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
    tiny().save_pretrained(folder / "transformer")
    scheduler().save_pretrained(folder / "scheduler")
    return folder


def built(**options):
    return build_generator("draw", GeneratorConfig(num_queries=QUERIES, **options), DIM, torch.float32, 0)


@pytest.mark.parametrize("inside", ["", "transformer"])
def test_a_directory_of_diffusers_is_read(pipeline, inside):
    module = built(path=pipeline / inside, noise={"schedule": "path", "times": "logit_normal"})
    stored = diffusers.SD3Transformer2DModel.from_pretrained(pipeline / "transformer").state_dict()
    read = module.generator.denoiser.transformer.state_dict()
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], value) for name, value in stored.items())
    assert (module.generator.noise.shift, module.generator.noise.times) == (3.0, "logit_normal")
    with torch.device("meta"):
        assert built(path=pipeline).spec_module("draw") == module.spec_module("draw")


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
    changed(pipeline / file, **options)
    with pytest.raises(UserError) as refused:
        built(path=pipeline)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampling": {"sampler": "ddim"}}, 'sampler is "ddim", but this noise is sampled by "euler"'),
        ({"noise": {"schedule": "flow", "min_snr": 5.0}}, '`min_snr` has no effect on `schedule` = "flow"'),
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
