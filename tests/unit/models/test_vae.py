"""VAEs of diffusers before a generator's loss: latents, losses and pictures are those of diffusers."""

import json
from itertools import pairwise

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
from motet.models.dit import DiT, DiTConfig
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.generator_build import build_generator
from motet.models.generator_config import GeneratorConfig
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.projector import Projector, ProjectorConfig
from motet.models.scheduler_noise import SchedulerNoise
from motet.models.unet import UNet
from motet.models.vae import VAE
from motet.noise import normal_of_rows, uniform_of_items
from unit.models.denoisers import DIM, QUERIES, as_image, changed
from unit.models.test_generator import kept_bytes
from unit.models.test_unet import TINY, scheduler

BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
OPTIONS = {"block_out_channels": (4, 8, 8), "norm_num_groups": 2, "latent_channels": 3, **BLOCKS}
SIDE = 4
SIZES = torch.tensor([[4, 4], [2, 6], [4, 4], [2, 2]])
KEYS = np.array([5, 9, -3, 2**40])


def tiny_vae(**options):
    """The same in each call."""
    torch.manual_seed(4)
    return diffusers.AutoencoderKL(**OPTIONS | {"scaling_factor": 0.6, "shift_factor": 0.2} | options).double()


def pixels_of(rows, size):
    """An image [1, 3, height, width] of the rows of an item, each of the pixels of a square (channel, y, x)."""
    height, width = size.tolist()
    squares = rows.unflatten(1, (3, SIDE, SIDE)).unflatten(0, (height, width))
    return squares.permute(2, 0, 3, 1, 4).reshape(1, 3, height * SIDE, width * SIDE)


def drawn():
    torch.manual_seed(1)
    rows = int(SIZES.prod(1).sum())
    values = torch.randn(rows, 3 * SIDE**2, dtype=torch.float64)
    return values, torch.randn(len(SIZES) * QUERIES, 6, dtype=torch.float64)


def spans():
    ends = np.cumsum([0, *SIZES.prod(1).tolist()]).tolist()
    return [slice(first, stop) for first, stop in pairwise(ends)]


@pytest.mark.parametrize("posterior", ["sample", "mode"])
def test_the_loss_is_that_of_a_script_of_diffusers(posterior):
    """Pixels to latents, scaled; noise added by the scheduler; the model; squared errors."""
    torch.manual_seed(3)
    unet, noised_by, vae = diffusers.UNet2DConditionModel(**TINY).double(), scheduler(), tiny_vae()
    values, conditions = drawn()
    counts = SIZES.prod(1).numpy()
    times = (uniform_of_items(KEYS, "time") * 1000).long()
    noise, of_posterior = (normal_of_rows(KEYS, counts, 3, name, values.device) for name in ("noise", "posterior"))
    expected = 0.0
    for item, (size, rows) in enumerate(zip(SIZES, spans())):
        distribution = vae.encode(pixels_of(values[rows], size)).latent_dist
        latents = distribution.mode()
        if posterior == "sample":
            latents = distribution.mean + distribution.std * as_image(of_posterior[rows], size)
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        added, time = as_image(noise[rows], size), times[item : item + 1]
        given = conditions.unflatten(0, (-1, QUERIES))[item][None]
        predicted = unet(noised_by.add_noise(latents, added, time), time, given).sample
        expected += torch.nn.functional.mse_loss(predicted, added).item() * int(size.prod())
    model = Diffusion(UNet(QUERIES, unet), SchedulerNoise.of(noised_by), VAE(vae, posterior))
    found = model(values, SIZES, conditions, KEYS)
    assert found.item() == pytest.approx(expected, rel=1e-8)
    found.backward()
    assert all(weight.grad is None for weight in vae.parameters())


class Constant(torch.nn.Module):
    condition_dim, row_dim = 6, 3

    def forward(self, noised, times, sizes, conditions):
        return torch.zeros_like(noised)


def test_what_is_made_is_decoded_as_diffusers_does():
    vae, sampling = tiny_vae(), SamplingConfig(steps=2)
    _, conditions = drawn()
    latents = Diffusion(Constant(), NoiseConfig()).sample(SIZES, conditions, KEYS, sampling)
    found = Diffusion(Constant(), NoiseConfig(), VAE(vae)).sample(SIZES, conditions, KEYS, sampling)
    for size, rows in zip(SIZES, spans()):
        with torch.no_grad():
            expected = vae.decode(as_image(latents[rows], size) / 0.6 + 0.2).sample
        assert torch.allclose(pixels_of(found[rows], size), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("posterior", ["sample", "mode"])
def test_what_workers_encode_item_by_item_gives_the_latents_of_the_step(posterior):
    values, _ = drawn()
    here, there = (VAE(tiny_vae(), posterior, encode_in) for encode_in in ("step", "workers"))
    given = [here.moments(values[rows], size[None]) for size, rows in zip(SIZES, spans())]
    assert all(each.shape[1] == there.moments_dim for each in given)
    found = there.encode(torch.cat(given), SIZES, KEYS)
    assert torch.allclose(found, here.encode(values, SIZES, KEYS), rtol=1e-12, atol=1e-12)
    assert not torch.equal(found, there.encode(torch.cat(given), SIZES, KEYS + 1)) or posterior == "mode"


def test_what_workers_encode_is_no_work_of_the_step():
    made, plain = (module_of(vae).spec_module("draw") for vae in (VAE(tiny_vae(), encode_in="workers"), None))
    lengths = SIZES.prod(1).numpy()
    assert step_flops(made, lengths, reached=True) == step_flops(plain, lengths, reached=True)
    assert made.num_parameters - plain.num_parameters == sum(p.numel() for p in tiny_vae().parameters())


def test_stable_diffusion_has_the_published_size():
    four = {name: (kinds[0],) * 4 for name, kinds in BLOCKS.items()}
    with torch.device("meta"):
        vae = VAE(diffusers.AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, **four))
    assert sum(each.layer.parameters for each in vae.layers()) == 83_653_863
    assert (vae.factor, vae.channels, vae.row_dim) == (8, 4, 192)


def module_of(vae):
    torch.manual_seed(0)
    denoiser = DiT(QUERIES, DiTConfig(row_dim=3, hidden=32, num_layers=2, num_heads=2))
    entrance = OutputProjector(Projector(DIM, denoiser.condition_dim, ProjectorConfig()), QUERIES, drop=0.1)
    return GeneratorModule(Diffusion(denoiser, NoiseConfig(), vae), entrance, QUERIES)


@pytest.mark.parametrize("options", [{}, {"mid_block_add_attention": False, "layers_per_block": 2}], ids=str)
def test_work_and_memory_are_what_is_predicted(options):
    module, plain = module_of(VAE(tiny_vae(**options).float())), module_of(None)
    spec = multimodal("tiny", language_model(Transformer(DIM, 64, 2), 1, 10), [], [module.spec_module("draw")])
    made, lengths = spec.module("draw"), module.lengths(SIZES.numpy())
    assert made.num_parameters == sum(p.numel() for p in module.parameters())
    assert len(made.blocks) == 2
    of_encoder = sum(
        float(layer_flops(layer, work_of(layer, lengths)).forward[0]) for layer in made.layers if layer.reads_data
    )
    values, rows = torch.randn(int(lengths.sum()), 3 * SIDE**2), torch.randn(len(SIZES) * QUERIES, DIM)
    # torch counts no operations of the kernel that CPUs have for attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        module.generator.vae.encode(values, SIZES, KEYS)
    assert of_encoder == counted.get_total_flops()
    of_plain = step_flops(plain.spec_module("draw"), lengths, reached=True)
    assert step_flops(made, lengths, reached=True) == of_plain + of_encoder
    layers = list(stage_layers(spec, {"draw": (0, 2)}, {}))
    assert not any(placed.has_backward for placed in layers if placed.layer.reads_data)
    large = torch.tensor([[16, 16], [12, 16]])
    kept = sum(
        LayerBytes.of(placed, float(work_of(placed.layer, large.prod(1).numpy()).rows[0]), 1, FSDP_FP32).saved
        for placed in layers
        if placed.has_backward
    )
    assert kept == pytest.approx(kept_bytes(module, large, 3 * SIDE**2), rel=0.02)
    assert module(values, SIZES, rows.requires_grad_(), KEYS).requires_grad


@pytest.fixture
def pipeline(tmp_path):
    """A directory as a pipeline of diffusers has it."""
    folder = tmp_path / "pipeline"
    torch.manual_seed(5)
    diffusers.UNet2DConditionModel(**TINY).save_pretrained(folder / "unet")
    scheduler("DDIMScheduler").save_pretrained(folder / "scheduler")
    tiny_vae().float().save_pretrained(folder / "vae")
    return folder


def built(**options):
    return build_generator("draw", GeneratorConfig(num_queries=QUERIES, **options), DIM, torch.float32, 0)


def test_the_vae_of_a_pipeline_is_read_and_stays_frozen(pipeline):
    module = built(path=pipeline)
    stored = diffusers.AutoencoderKL.from_pretrained(pipeline / "vae").state_dict()
    read = module.generator.vae.vae.state_dict()
    assert all(torch.equal(read[name], value) for name, value in stored.items())
    assert not any(weight.requires_grad for weight in module.generator.vae.parameters())
    assert not module.train().generator.vae.vae.training
    assert built(path=pipeline / "unet").generator.vae is None
    own = {"row_dim": 3, "hidden": 8, "num_layers": 1, "num_heads": 2}
    mean = built(family="dit", config=own, vae={"path": pipeline, "posterior": "mode"}).generator.vae
    assert (mean.draws, module.generator.vae.draws) == (False, True)
    with torch.device("meta"):
        assert built(path=pipeline).spec_module("draw") == module.spec_module("draw")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"_class_name": "AutoencoderTiny"}, "is of class 'AutoencoderTiny'; it must be AutoencoderKL"),
        ({"latents_mean": [0.1, 0.2, 0.3]}, "latents_mean is [0.1, 0.2, 0.3], of which only None is computed"),
        ({"act_fn": "gelu"}, "act_fn is 'gelu', of which only 'silu'"),
        ({"down_block_types": ["DownEncoderBlock2D", "AttnDownEncoderBlock2D", "DownEncoderBlock2D"]}, "AttnDown"),
        ({"latent_channels": 4}, "makes latents of 4 values, but the model denoises rows of 3"),
        ({"out_channels": 1}, "out_channels is 1; it must be in_channels, which is 3"),
        ({"scaling_factor": 0.0}, "it cannot be 0"),
        ({"in_channels": 10**9}, "in_channels is 1000000000; it must be"),
    ],
    ids=str,
)
def test_a_vae_that_is_not_computed_is_refused(pipeline, options, said):
    changed(pipeline / "vae/config.json", **options)
    with pytest.raises(UserError) as refused:
        built(path=pipeline)
    assert said in str(refused.value)
    assert "vae" in str(refused.value).lower()
    assert "\n" not in str(refused.value)


def test_what_is_missing_is_said(pipeline, tmp_path):
    (pipeline / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        built(path=pipeline)
    with pytest.raises(UserError, match="is no pipeline with a folder vae"):
        built(path=pipeline / "unet", noise={"schedule": "cosine"}, vae={"posterior": "mode"})
    with pytest.raises(UserError, match=r"draw.vae.path: there is neither"):
        built(path=pipeline, vae={"path": tmp_path / "stabilityai"})
    with pytest.raises(ValueError, match=r"`vae.path` must say where the VAE is"):
        GeneratorConfig(num_queries=1, family="unet", config=TINY, vae={})
    with pytest.raises(ValueError, match="excludes `config`, `noise` and `vae`"):
        GeneratorConfig(num_queries=1, module="a:B", vae={"path": pipeline})


def test_sizes_are_latents_and_clips_are_refused(pipeline):
    module = built(path=pipeline)
    assert (module.divisor, module.generator.row_dim) == (2, 48)
    with pytest.raises(UserError, match="a VAE makes rasters"):
        module.num_tokens(np.array([[8]]))
    assert json.loads((pipeline / "vae" / "config.json").read_text())["scaling_factor"] == 0.6


@pytest.mark.parametrize(("posterior", "encode_in"), [("sample", "step"), ("mode", "step"), ("sample", "workers")])
def test_parts_do_what_the_whole_does_with_latents_that_go_along(posterior, encode_in):
    """Five latents of 3 values go along in a row of 16: loss, and what is sampled. Those of workers are drawn again."""
    vae, (values, _) = VAE(tiny_vae(), posterior, encode_in), drawn()
    values = values if encode_in == "step" else values[:, : vae.moments_dim].abs()
    denoiser = DiT(QUERIES, DiTConfig(row_dim=3, hidden=16, num_layers=2, num_heads=2))
    entrance = OutputProjector(Projector(DIM, 16, ProjectorConfig()), QUERIES, drop=0.1)
    module = GeneratorModule(
        Diffusion(denoiser, NoiseConfig(), vae), entrance, QUERIES, sampling=SamplingConfig(steps=2, guidance=2.0)
    ).double()
    for parameter in (*denoiser.parameters(), *entrance.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    counts, rows = np.full(len(SIZES), QUERIES), torch.randn(len(SIZES) * QUERIES, DIM, dtype=torch.float64)
    spec, lengths = module.spec_module("draw"), SIZES.prod(1).numpy()
    assert module.uncuttable == ""
    hidden = module.enter(values, SIZES, rows, KEYS, counts)
    assert len(hidden) == spec.num_carried(1, lengths, counts)
    assert spec.carried_divisor == (5 if encode_in == "step" else 0)
    hidden = module.through(hidden, SIZES, counts, 0, 2)
    assert module.leave(hidden, values, SIZES, KEYS, counts) == module(values, SIZES, rows, KEYS, counts)
    with torch.no_grad():
        running, sent = module.sample_in_stages(SIZES, rows, KEYS), None
        for _ in range(module.num_passes):
            hidden = module.through(running.send(sent), SIZES, counts, 0, 2)
            sent = module.predicted(hidden, SIZES, counts)
        with pytest.raises(StopIteration) as ended:
            running.send(sent)
        assert torch.equal(ended.value.value, module.sample(SIZES, rows, KEYS))
