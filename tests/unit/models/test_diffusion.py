"""Noise, loss and samples of a diffusion model, and the transformer that predicts."""

import numpy as np
import pytest
import torch
from torch import nn

from motet.models.diffusion import Diffusion
from motet.models.dit import DiT, DiTConfig
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.projector import Projector, ProjectorConfig
from motet.noise import normal_of_rows, uniform_of_items

CPU = torch.device("cpu")


class Known(nn.Module):
    """A denoiser that knows the latents, and so predicts without error."""

    condition_dim, row_dim, blocks = 2, 3, ()

    def __init__(self, latents, config):
        super().__init__()
        self.latents, self.config = latents, config

    def forward(self, noised, times, sizes, conditions):
        kept = torch.from_numpy(self.config.kept()[times.numpy()]).repeat_interleave(sizes.prod(1))[:, None]
        noise = (noised - kept.sqrt() * self.latents) / (1 - kept).sqrt()
        return noise if self.config.predicts == "epsilon" else kept.sqrt() * noise - (1 - kept).sqrt() * self.latents


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
@pytest.mark.parametrize("predicts", ["epsilon", "v"])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "cosine"])
def test_what_knows_the_latents_has_no_loss_and_samples_them(schedule, predicts, sampler):
    sizes, keys = torch.tensor([[2, 2], [1, 3]]), np.array([5, -9])
    latents = torch.randn(7, 3, dtype=torch.float64)
    config = NoiseConfig(schedule=schedule, predicts=predicts, timesteps=50)
    model = Diffusion(Known(latents, config), config)
    conditions = torch.zeros(2, 2, dtype=torch.float64)
    assert model(latents, sizes, conditions, keys).item() < 1e-20
    sampled = model.sample(sizes, conditions, keys, SamplingConfig(sampler=sampler, steps=7))
    assert torch.allclose(sampled, latents, atol=1e-8)


class Ideal(nn.Module):
    """The best predictor of normal latents of a given mean and spread."""

    condition_dim, row_dim, blocks = 2, 3, ()
    mean, spread = 0.7, 0.4

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, noised, times, sizes, conditions):
        kept = self.config.kept()[int(times[0])]
        noise = (1 - kept) ** 0.5 * (noised - kept**0.5 * self.mean) / (kept * self.spread**2 + 1 - kept)
        return noise if self.config.predicts == "epsilon" else (noise - (1 - kept) ** 0.5 * noised) / kept**0.5


@pytest.mark.parametrize("predicts", ["epsilon", "v"])
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_samples_have_the_spread_of_what_is_learned(sampler, predicts):
    config = NoiseConfig(schedule="cosine", timesteps=400, predicts=predicts)
    sizes, keys = torch.tensor([[5000]]), np.array([3])
    sampling = SamplingConfig(sampler=sampler, steps=400)
    sampled = Diffusion(Ideal(config), config).sample(sizes, torch.zeros(1, 2).double(), keys, sampling)
    assert float(sampled.mean()) == pytest.approx(Ideal.mean, abs=0.02)
    assert float(sampled.std()) == pytest.approx(Ideal.spread, rel=0.04)


def test_guidance_goes_beyond_what_is_predicted_without_a_condition():
    torch.manual_seed(0)
    projector, num = Projector(6, 8, ProjectorConfig()), 2
    model = Diffusion(DiT(num, DiTConfig(row_dim=3, hidden=8, num_layers=1, num_heads=2)), NoiseConfig())
    module = GeneratorModule(model, OutputProjector(projector, num, drop=0.5), num).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    sizes, rows, keys = torch.tensor([[2, 2], [3, 1]]), torch.randn(4, 6).double(), np.array([1, 2])
    # One step is linear in what is predicted.
    with_it, without, beyond = (
        module.sample(sizes, rows, keys, SamplingConfig(steps=1, guidance=guidance)) for guidance in (1, 0, 3)
    )
    assert not torch.allclose(with_it, without, atol=1e-3)
    assert torch.allclose(beyond, without + 3 * (with_it - without), rtol=1e-10)
    assert torch.equal(without, module.sample(sizes, 2 * rows, keys, SamplingConfig(steps=1, guidance=0)))
    alone = module.sample(sizes[1:], rows[2:], keys[1:], SamplingConfig(sampler="ddpm", steps=4))
    assert torch.allclose(module.sample(sizes, rows, keys, SamplingConfig(sampler="ddpm", steps=4))[4:], alone)


def test_the_loss_of_an_item_is_its_own():
    """It depends on its key, and neither on the other items nor on their order."""
    torch.manual_seed(0)
    config = DiTConfig(row_dim=3, hidden=8, num_layers=2, num_heads=2)
    model = Diffusion(DiT(2, config), NoiseConfig(min_snr=5.0)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    sizes, keys = torch.tensor([[2, 2], [1, 3], [4, 1]]), np.array([1, 2, 3])
    values, conditions = torch.randn(11, 3).double(), torch.randn(6, 8).double()
    rows, given = values.split([4, 3, 4]), conditions.split(2)
    alone = [model(rows[i], sizes[i : i + 1], given[i], keys[i : i + 1]) for i in range(3)]
    assert model(values, sizes, conditions, keys).item() == pytest.approx(sum(alone).item(), abs=1e-12)
    turned = [2, 0, 1]
    again = model(
        torch.cat([rows[i] for i in turned]), sizes[turned], torch.cat([given[i] for i in turned]), keys[turned]
    )
    assert again.item() == pytest.approx(sum(alone).item(), abs=1e-12)
    other = model(rows[0], sizes[:1], given[0], np.array([4]))
    assert abs(other.item() - alone[0].item()) > 1e-6


@pytest.mark.parametrize("predicts", ["epsilon", "v"])
def test_min_snr_weighs_predicted_latents_alike(predicts):
    """In terms of latents an error counts min(SNR, gamma), whatever is predicted."""
    config = NoiseConfig(predicts=predicts, min_snr=5.0)
    kept, weights = config.kept(), config.weights()
    snr = kept / (1 - kept)
    # The error of predicted latents, squared, over that of what is predicted.
    error_of_latents = (1 - kept) / kept if predicts == "epsilon" else 1 - kept
    assert np.allclose(weights / error_of_latents, np.minimum(snr, 5.0))
    assert (np.diff(kept) < 0).all()


def test_scaled_linear_is_stable_diffusions():
    """sqrt((1 - a) / a) of its last timestep is 14.6146, the largest sigma that samplers of Stable Diffusion name."""
    last = NoiseConfig().kept()[-1]
    assert ((1 - last) / last) ** 0.5 == pytest.approx(14.6146, abs=1e-3)


def test_numbers_of_an_item_do_not_depend_on_the_others():
    keys, counts = np.arange(200) * 7 - 100, np.full(200, 30)
    noise = normal_of_rows(keys, counts, 6, "noise", CPU)
    assert torch.equal(noise[60:90], normal_of_rows(keys[2:3], counts[2:3], 6, "noise", CPU))
    assert not torch.equal(noise, normal_of_rows(keys, counts, 6, "other", CPU))
    assert abs(float(noise.mean())) < 0.02
    assert float(noise.square().mean()) == pytest.approx(1, abs=0.03)
    assert float(noise.pow(4).mean()) == pytest.approx(3, abs=0.2)
    uniform = uniform_of_items(keys, "time")
    assert 0 <= float(uniform.min()) < float(uniform.max()) < 1
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.1)


def test_layers_have_all_parameters():
    model = DiT(4, DiTConfig(row_dim=6, hidden=16, num_layers=2, num_heads=2))
    assert sum(each.layer.parameters for each in model.layers()) == sum(p.numel() for p in model.parameters())
    for each in model.layers():
        assert each.layer.parameters == sum(p.numel() for module in each.modules for p in module.parameters())
