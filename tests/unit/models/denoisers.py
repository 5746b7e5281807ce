"""What tests of the models of diffusers share: items of several sizes, a script's loss, work, memory and refusals."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from motet.core.errors import UserError
from motet.core.shapes import Transformer, language_model, multimodal
from motet.cost.flops import layer_flops, step_flops, work_of
from motet.cost.memory import FSDP_FP32, LayerBytes, stage_layers
from motet.models.block import plain_names
from motet.models.diffusion import Diffusion
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.generator_build import build_generator
from motet.models.generator_config import GeneratorConfig
from motet.models.projector import Projector, ProjectorConfig
from unit.models.test_generator import kept_bytes

QUERIES, DIM = 4, 32
SIZES = torch.tensor([[4, 4], [2, 6], [4, 4], [2, 2]])
TIMES = torch.tensor([0, 999, 500, 20])


def drawn(condition_dim, seed=0):
    """Values, noise, timesteps and conditions of items of SIZES."""
    torch.manual_seed(seed)
    values, noise = torch.randn(2, int(SIZES.prod(1).sum()), 3, dtype=torch.float64)
    return values, noise, TIMES, torch.randn(len(SIZES) * QUERIES, condition_dim, dtype=torch.float64)


def as_image(rows, size):
    return rows.unflatten(0, size.tolist()).permute(2, 0, 1)[None]


def loss_of_a_script(loss_of_item, condition_dim):
    """loss_of_item(latents, noise, timestep, conditions), a mean, of each item alone, summed over their rows."""
    values, noise, times, conditions = drawn(condition_dim)
    starts, expected = np.cumsum([0, *SIZES.prod(1).tolist()]).tolist(), 0.0
    for item, (start, stop) in enumerate(pairwise(starts)):
        latents, added = (as_image(each[start:stop], SIZES[item]) for each in (values, noise))
        given = conditions.unflatten(0, (-1, QUERIES))[item]
        expected += loss_of_item(latents, added, times[item : item + 1], given).item() * (stop - start)
    return expected


def loss_of(denoiser, noise_of):
    """That of Motet, of the same items."""
    values, noise, times, conditions = drawn(denoiser.condition_dim)
    return Diffusion(denoiser, noise_of).loss(values, noise, times, SIZES, conditions).item()


def check_items_are_computed_as_if_alone(denoiser, noise_of):
    model, (values, noise, times, conditions) = Diffusion(denoiser, noise_of), drawn(denoiser.condition_dim)
    together = model.loss(values, noise, times, SIZES, conditions).item()
    alone, start = 0.0, 0
    for item, size in enumerate(SIZES):
        rows = slice(start, start := start + int(size.prod()))
        own = conditions[item * QUERIES : (item + 1) * QUERIES]
        alone += model.loss(values[rows], noise[rows], times[item : item + 1], size[None], own).item()
    assert together == pytest.approx(alone, rel=1e-12)


def check_size(denoiser, parameters):
    """A denoiser on meta has so many parameters, and its layers as many."""
    assert sum(p.numel() for p in denoiser.parameters()) == parameters
    assert sum(each.layer.parameters for each in denoiser.layers()) == parameters


def check_work_and_memory(denoiser, noise_of, sizes, num_blocks=1):
    """A generator of it keeps and computes what is predicted."""
    entrance = OutputProjector(Projector(DIM, denoiser.condition_dim, ProjectorConfig()), QUERIES, drop=0.1)
    module = GeneratorModule(Diffusion(denoiser, noise_of), entrance, QUERIES)
    spec = multimodal("tiny", language_model(Transformer(DIM, 64, 2), 1, 10), [], [module.spec_module("draw")])
    made, lengths = spec.module("draw"), module.lengths(sizes.numpy())
    assert made.num_parameters == sum(p.numel() for p in module.parameters())
    assert len(made.blocks) == num_blocks
    kept = sum(
        LayerBytes.of(placed, float(work_of(placed.layer, lengths).rows[0]), 1, FSDP_FP32).saved
        for placed in stage_layers(spec, {"draw": (0, num_blocks)}, {})
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


def built(**options):
    return build_generator("draw", GeneratorConfig(num_queries=QUERIES, **options), DIM, torch.float32, 0)


def check_directory_is_read(kind, folder, noise, inside=""):
    """The model of this class of a pipeline, whole and on meta. Gives the generator's module."""
    module = built(path=folder / inside, noise={"schedule": "path"} | noise)
    stored = kind.from_pretrained(folder / module.generator.denoiser.part).state_dict()
    read = module.generator.denoiser.model.state_dict()
    read = {plain: read[name] for name, plain in plain_names(module.generator.denoiser.model).items()}
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], value) for name, value in stored.items())
    with torch.device("meta"):
        assert built(path=folder).spec_module("draw") == module.spec_module("draw")
    return module


def changed(file, **options):
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


def check_directory_is_refused(folder, file, options, said):
    changed(folder / file, **options)
    with pytest.raises(UserError) as refused:
        built(path=folder)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
