"""Conditions of different lengths: each item is what diffusers makes of it by itself, without padding."""

from copy import deepcopy
from itertools import pairwise

import diffusers
import numpy as np
import pytest
import torch

import denoiser_shapes
from motet.core.errors import UserError
from motet.models.diffusion import Diffusion
from motet.models.dit import DiT, DiTConfig
from motet.models.divided import cuts_of, why_undivided
from motet.models.generator import GeneratorModule, OutputProjector
from motet.models.generator_build import build_generator
from motet.models.generator_config import GeneratorConfig
from motet.models.noise_schedule import NoiseConfig
from motet.models.pixart import PixArt
from motet.models.projector import Projector, ProjectorConfig
from motet.models.sd3 import SD3
from motet.models.unet import UNet

SIZES = torch.tensor([[4, 4], [2, 6], [4, 4], [4, 4], [2, 2]])
COUNTS = np.array([5, 2, 9, 5, 1])
TIMES = torch.tensor([0, 999, 500, 20, 7])
CHANNELS = {"in_channels": 3, "out_channels": 3}


def unet():
    model = diffusers.UNet2DConditionModel(**denoiser_shapes.UNET, **CHANNELS)
    return UNet, model, model


def sd3():
    model = diffusers.SD3Transformer2DModel(**denoiser_shapes.SD3, **CHANNELS)
    return SD3, model, lambda images, times, given: model(images, given[..., :6], given[..., 6:].mean(1), times)


def pixart():
    model = diffusers.PixArtTransformer2DModel(**denoiser_shapes.PIXART, **CHANNELS)
    return PixArt, model, lambda images, times, given: model(images, given, timestep=times)


@pytest.mark.parametrize("of_diffusers", [unet, sd3, pixart])
def test_items_equal_a_plain_loop_over_diffusers(of_diffusers):
    """Predictions, and gradients of weights and of every row of a condition."""
    torch.manual_seed(0)
    kind, model, called = of_diffusers()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.double()
    rows = SIZES.prod(1).tolist()
    noised, weights = torch.randn(2, sum(rows), 3, dtype=torch.float64)
    denoiser = kind(int(COUNTS.max()), deepcopy(model))
    conditions = torch.randn(int(COUNTS.sum()), denoiser.condition_dim, dtype=torch.float64, requires_grad=True)
    (denoiser(noised, TIMES, SIZES, conditions, COUNTS) * weights).sum().backward()
    together = [conditions.grad, *(p.grad for p in denoiser.parameters())]
    conditions.grad = None

    starts, ends = np.cumsum([0, *rows]).tolist(), np.cumsum([0, *COUNTS]).tolist()
    total = 0.0
    for item, ((start, stop), (first, last)) in enumerate(zip(pairwise(starts), pairwise(ends))):
        images, factor = (each[start:stop].unflatten(0, SIZES[item].tolist()) for each in (noised, weights))
        made = called(images.permute(2, 0, 1)[None], TIMES[item : item + 1], conditions[None, first:last]).sample
        total = total + (made[0].permute(1, 2, 0) * factor).sum()
    total.backward()
    for found, parameter in zip(together, [conditions, *model.parameters()], strict=True):
        assert torch.allclose(found, parameter.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("counts", [COUNTS, None], ids=["turns", "queries"])
@pytest.mark.parametrize("of_diffusers", [sd3, pixart])
def test_parts_do_what_the_whole_does_and_send_what_a_spec_says(of_diffusers, counts):
    torch.manual_seed(0)
    kind, model, _ = of_diffusers()
    denoiser = kind(9, model.double())
    given = np.full(len(SIZES), 9) if counts is None else counts
    noised = torch.randn(int(SIZES.prod(1).sum()), 3, dtype=torch.float64)
    conditions = torch.randn(int(given.sum()), denoiser.condition_dim, dtype=torch.float64)
    whole = denoiser(noised, TIMES, SIZES, conditions, counts)
    hidden = denoiser.enter(noised, TIMES, SIZES, conditions, counts)
    entrance = OutputProjector(Projector(6, denoiser.condition_dim, ProjectorConfig()), 9, drop=0.0)
    spec = GeneratorModule(Diffusion(denoiser, NoiseConfig()), entrance, 9).spec_module("draw")
    assert hidden.shape == (spec.num_carried(1, SIZES.prod(1).numpy(), given), spec.sent(1).output_width)
    for first in range(2):
        hidden = denoiser.through(hidden, SIZES, counts, first, first + 1)
    assert torch.equal(denoiser.leave(hidden, SIZES, counts), whole)


@pytest.mark.parametrize("of_diffusers", [sd3, pixart])
def test_tensor_parallel_ranks_cut_the_matrices_that_a_spec_says(of_diffusers):
    kind, model, _ = of_diffusers()
    denoiser = kind(9, model)
    entrance = OutputProjector(Projector(6, denoiser.condition_dim, ProjectorConfig()), 9, drop=0.0)
    module = GeneratorModule(Diffusion(denoiser, NoiseConfig()), entrance, 9)
    holder = torch.nn.Module()
    holder.generators = torch.nn.ModuleDict({"draw": module})
    parameters = dict(holder.named_parameters())
    cut = sum(parameters[name].numel() for name in cuts_of(holder, "draw") if parameters[name].ndim == 2)
    assert cut == sum(layer.divided_parameters for layer in module.spec_module("draw").layers)
    assert why_undivided(holder, "draw") == ""


def test_rows_of_a_diffusion_transformer_equal_those_of_each_item_alone():
    torch.manual_seed(0)
    denoiser = DiT(12, DiTConfig(row_dim=3, hidden=8, num_layers=2, num_heads=2)).double()
    for parameter in denoiser.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    rows = SIZES.prod(1).tolist()
    noised, conditions = torch.randn(sum(rows), 3).double(), torch.randn(int(COUNTS.sum()), 8).double()
    together = denoiser(noised, TIMES, SIZES, conditions, COUNTS).split(rows)
    of_items = zip(noised.split(rows), TIMES.split(1), SIZES.split(1), conditions.split(COUNTS.tolist()))
    for count, found, given in zip(COUNTS, together, of_items, strict=True):
        alone = DiT(int(count), denoiser.config).double()
        weights = denoiser.state_dict()
        alone.load_state_dict(weights | {"places.weight": weights["places.weight"][:count]})
        assert torch.allclose(found, alone(*given), rtol=0, atol=1e-12)


def test_a_dropped_turn_is_one_learned_row_in_place_of_each():
    entrance = OutputProjector(Projector(6, 4, ProjectorConfig()), 1, drop=0.5)
    torch.nn.init.normal_(entrance.nothing)
    counts, rows = np.array([2, 3]), torch.randn(5, 6)
    found = entrance(rows, torch.tensor([False, True]), counts)
    assert torch.equal(found[:2], entrance(rows, None, counts)[:2])
    assert torch.equal(found[2:], entrance.nothing.expand(3, 4))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, '`condition` = "queries" needs `num_queries`'),
        ({"condition": "turn", "num_queries": 3}, '`condition` = "turn" needs `max_turn`'),
        ({"condition": "turn", "max_turn": 9, "num_queries": 3}, '`condition` = "turn" excludes `num_queries`'),
        ({"num_queries": 3, "max_turn": 9}, '`condition` = "queries" excludes `max_turn`'),
    ],
)
def test_a_condition_needs_its_own_size_alone(options, reason):
    with pytest.raises(ValueError, match=reason):
        GeneratorConfig(family="dit", config={"row_dim": 3, "hidden": 8, "num_layers": 1, "num_heads": 2}, **options)


class OfQueriesAlone(torch.nn.Module):
    """A generator that knows no lengths of conditions."""

    condition_dim = 4

    def forward(self, values, sizes, conditions, keys):
        return conditions.sum()


def test_a_generator_of_ones_own_must_take_the_lengths_of_turns():
    config = GeneratorConfig(module=f"{__name__}:OfQueriesAlone", condition="turn", max_turn=9)
    with pytest.raises(UserError, match="its forward does not take `counts`"):
        build_generator("draw", config, 8, torch.float32, 0)
