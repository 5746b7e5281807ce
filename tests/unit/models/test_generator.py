"""What is predicted of a generator's memory is what its forward pass keeps; one without a loss is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from motet.core.errors import UserError
from motet.core.shapes import Transformer, language_model, multimodal
from motet.cost.flops import work_of
from motet.cost.memory import FSDP_FP32, LayerBytes, stage_layers
from motet.models.diffusion import Diffusion
from motet.models.dit import DiT, DiTConfig
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.generator_build import build_generator
from motet.models.generator_config import GeneratorConfig
from motet.models.noise_schedule import NoiseConfig, SamplingConfig
from motet.models.projector import Projector, ProjectorConfig

QUERIES, DIM = 4, 32


def module_of(hidden, row_dim, num_layers):
    config = DiTConfig(row_dim=row_dim, hidden=hidden, num_layers=num_layers, num_heads=4)
    entrance = OutputProjector(Projector(DIM, hidden, ProjectorConfig()), QUERIES, drop=0.1)
    return GeneratorModule(Diffusion(DiT(QUERIES, config), NoiseConfig()), entrance, QUERIES)


def kept_bytes(module, sizes, row_dim):
    """Bytes of all that the graph keeps, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def keep(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    rows = torch.randn(len(sizes) * QUERIES, DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(torch.randn(int(sizes.prod(1).sum()), row_dim), sizes, rows, np.arange(len(sizes)))
        assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("hidden", "row_dim", "num_layers"), [(64, 48, 3), (64, 768, 1), (128, 16, 2)])
def test_a_forward_pass_keeps_what_is_predicted(hidden, row_dim, num_layers):
    module, sizes = module_of(hidden, row_dim, num_layers), torch.tensor([[16, 16], [24, 24], [8, 8]])
    spec = multimodal("tiny", language_model(Transformer(DIM, 64, 2), 1, 10), [], [module.spec_module("draw")])
    predicted = sum(
        LayerBytes.of(placed, float(work_of(placed.layer, module.lengths(sizes.numpy())).rows[0]), 1, FSDP_FP32).saved
        for placed in stage_layers(spec, {"draw": (0, num_layers)}, {})
    )
    assert predicted == pytest.approx(kept_bytes(module, sizes, row_dim), rel=0.02)


@pytest.mark.parametrize("max_turn", [0, 9])
def test_its_parts_do_what_it_does(max_turn):
    torch.manual_seed(3)
    sizes, keys, counts = torch.tensor([[3, 2], [1, 4]]), np.arange(2), np.array([5, 2]) if max_turn else np.full(2, 4)
    config = DiTConfig(row_dim=6, hidden=8, num_layers=3, num_heads=2)
    entrance = OutputProjector(Projector(DIM, 8, ProjectorConfig()), 1 if max_turn else QUERIES, drop=0.5)
    denoiser = DiT(max_turn or QUERIES, config)
    module = GeneratorModule(Diffusion(denoiser, NoiseConfig()), entrance, QUERIES, max_turn=max_turn).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    values, rows = torch.randn(10, 6, dtype=torch.float64), torch.randn(counts.sum(), DIM, dtype=torch.float64)
    whole = module(values, sizes, rows, keys, counts)
    hidden = module.enter(values, sizes, rows, keys, counts)
    assert hidden.shape == (10 + counts.sum() + 2, 8)
    for first, stop in ((0, 1), (1, 3)):
        hidden = module.through(hidden, sizes, counts, first, stop)
    assert module.leave(hidden, values, sizes, keys, counts) == whole
    assert module.uncuttable == ""


def test_what_cannot_be_cut_says_why():
    entrance = OutputProjector(Projector(DIM, 6, ProjectorConfig()), QUERIES, drop=0.1)
    own = GeneratorModule(WithoutGradient(), entrance, QUERIES)
    assert own.uncuttable == "WithoutGradient is computed in one stage"
    latents = module_of(64, 48, 2)
    latents.generator.vae = SimpleNamespace(encodes=True, channels=65)
    assert latents.uncuttable == "latents of its VAE are 65 wide, and its rows 64"
    latents.generator.vae.channels = 4
    assert latents.uncuttable == ""


@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize("max_turn", [0, 9])
def test_samples_in_stages_are_those_of_the_whole(guidance, max_turn):
    torch.manual_seed(3)
    sizes, keys, counts = torch.tensor([[3, 2], [1, 4]]), np.arange(2), np.array([5, 2]) if max_turn else np.full(2, 4)
    entrance = OutputProjector(Projector(DIM, 8, ProjectorConfig()), 1 if max_turn else QUERIES, drop=0.5)
    denoiser = DiT(max_turn or QUERIES, DiTConfig(row_dim=6, hidden=8, num_layers=2, num_heads=2))
    sampling = SamplingConfig(sampler="ddpm", steps=3, guidance=guidance)
    module = GeneratorModule(
        Diffusion(denoiser, NoiseConfig()), entrance, QUERIES, sampling=sampling, max_turn=max_turn
    ).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows = torch.randn(counts.sum(), DIM, dtype=torch.float64)
    with torch.no_grad():
        whole = module.sample(sizes, rows, keys, counts=counts)
        running, sent = module.sample_in_stages(sizes, rows, keys, counts), None
        for _ in range(module.num_passes):
            hidden = module.through(running.send(sent), sizes, counts, 0, 2)
            sent = module.predicted(hidden, sizes, counts)
        with pytest.raises(StopIteration) as ended:
            running.send(sent)
    assert torch.equal(ended.value.value, whole)


def test_sizes_are_no_tensor_where_fsdp_moves_tensors_to_the_device():
    module, moved = module_of(64, 48, 1), []
    module.register_forward_pre_hook(lambda module, args: moved.extend(map(torch.is_tensor, args)))
    module(torch.randn(64, 48), torch.tensor([[8, 8]]), torch.randn(QUERIES, DIM), np.arange(1), np.array([QUERIES]))
    assert moved == [True, False, True, False, False]


class WithoutLoss(torch.nn.Module):
    condition_dim = 6


class WithoutGradient(WithoutLoss):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, values, sizes, conditions, keys):
        return (self.weight * conditions.sum()).detach()


class WithoutTarget(WithoutGradient):
    def forward(self, conditions):
        return (self.weight * conditions).sum()


def test_a_generator_without_a_loss_is_refused():
    entrance = OutputProjector(Projector(DIM, 6, ProjectorConfig()), QUERIES, drop=0.0)
    module = GeneratorModule(WithoutGradient(), entrance, QUERIES)
    given = torch.zeros(4, 3), torch.tensor([[2, 2]]), torch.zeros(QUERIES, DIM), np.zeros(1, np.int64)
    with pytest.raises(UserError, match="depends on neither its weights nor its conditions"):
        module(*given)
    with torch.no_grad():
        assert float(module(*given)) == float(module(*given))
    config = GeneratorConfig(num_queries=QUERIES, module=f"{__name__}:WithoutLoss")
    with pytest.raises(UserError, match="has no forward, and so no loss"):
        build_generator("draw", config, DIM, torch.float32, 0)
    config = GeneratorConfig(num_queries=QUERIES, module=f"{__name__}:WithoutTarget")
    with pytest.raises(UserError, match=r"forward does not take \(values, sizes, conditions, keys\): too many"):
        build_generator("draw", config, DIM, torch.float32, 0)
