"""The halves of a block, attention and MLP, in turn do what the block does, and draw the same."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from motet.core.shapes import Transformer
from motet.dropout import drawing
from motet.models.block import Block
from motet.models.build import EncoderConfig, build_modality
from motet.models.module import ModalityModule
from motet.models.projector import Projector, ProjectorConfig
from parity.towers import mllama_tower
from unit.models.test_shaped import AUDIO, SIZES, VARIANTS, VISION, model_of

DROPOUTS = {
    "siglip": {"attention_dropout": 0.2},
    "clip": {"attention_dropout": 0.2},
    "eva_clip": {"attention_dropout": 0.2, "post_layernorm": True},
    "dinov2": {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.2},
    "qwen2_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "siglip2": {"attention_dropout": 0.2},
    "pixtral": {"attention_dropout": 0.2},
    "dinov3": {"attention_dropout": 0.2},
    "whisper": {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2},
    "qwen2_audio": {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2},
}


@contextmanager
def only(block, half):
    block.half = half
    yield
    block.half = -1


def in_halves(module, values, sizes):
    """The module's output, each half of a block in a call of its own."""
    hidden = module.enter(values, sizes)
    for number, block in enumerate(module.blocks):
        for half in (0, 1):
            with only(block, half):
                hidden = module.through(hidden, sizes, number, number + 1)
    return module.leave(hidden, sizes)


def both_ways(module, values, sizes, draws=None):
    """(output, gradients) in whole blocks and in halves."""
    found = []
    for run in (module, lambda *given: in_halves(module, *given)):
        module.zero_grad()
        with drawing("it", draws):
            output = run(values, sizes)
        (output * torch.linspace(1, 2, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
        found.append((output.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}))
    return found


def assert_same(found):
    (whole, of_whole), (halved, of_halves) = found
    assert torch.equal(whole, halved) and of_whole.keys() == of_halves.keys()
    for name, gradient in of_whole.items():
        torch.testing.assert_close(of_halves[name], gradient, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("family", DROPOUTS)
def test_halves_in_turn_do_what_a_block_does(tiny, family):
    sizes = tiny.sizes(family)
    assert_same(both_ways(tiny.encoder(family), tiny.values(family, sizes).double(), sizes))


def test_halves_of_a_tower_with_gates_and_a_norm_between_its_layers():
    tower, sizes = mllama_tower().double(), torch.tensor([[1, 2], [2, 2]])
    module = ModalityModule(tower, Projector(tower.output_dim, 4, ProjectorConfig())).double()
    assert not module.unhalvable
    spec = module.spec_module("it")
    layers = [spec.layers[spec.halved_layer(number)] for number in range(len(module.blocks))]
    # Rows of inner layers that go along are no width of the matrices.
    assert [(each.output_width, each.attention_weights) for each in layers] == [(16, 4 * 8 * 8)] * 3
    assert_same(both_ways(module, torch.randn(24, 12, dtype=torch.float64), sizes))


@pytest.mark.parametrize("kind", ["image", "audio"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_halves_of_layers_of_any_shape(kind, variant):
    _, model = model_of(item=(VISION if kind == "image" else AUDIO) | VARIANTS[variant])
    values = torch.randn(int(SIZES.sum()), 12 if kind == "image" else 8, dtype=torch.float64)
    assert_same(both_ways(model.encoders["item"], values, SIZES))


@pytest.mark.parametrize("family", [family for family, options in DROPOUTS.items() if options])
def test_halves_draw_what_a_block_draws(tiny, family):
    config = EncoderConfig(family=family, config=tiny.encoders[family] | DROPOUTS[family])
    module = build_modality(family, config, tiny.dim, torch.float64, 0).train()
    sizes = tiny.sizes(family)
    values = tiny.values(family, sizes).double()
    found = both_ways(module, values, sizes, {"it": np.arange(len(sizes))})
    assert_same(found)
    assert not torch.equal(found[0][0], both_ways(module, values, sizes, {"it": 7 + np.arange(len(sizes))})[0][0])
    for block in module.blocks:
        block.recompute = True
    assert_same([found[0], both_ways(module, values, sizes, {"it": np.arange(len(sizes))})[0]])


def test_the_layers_of_families_are_described_with_halves(tiny):
    for family in DROPOUTS:
        module = tiny.encoder(family)
        spec = module.spec_module("it")
        assert not module.unhalvable
        assert all(spec.halved_layer(block) >= 0 for block in range(len(spec.blocks)))


def test_attention_has_the_weights_of_its_matrices(tiny):
    for family in ("siglip", "qwen2_vl", "whisper"):
        module = tiny.encoder(family)
        spec = module.spec_module("it")
        layer, block = spec.layers[spec.halved_layer(0)], module.blocks[0].inner
        attention = block.attn if family == "qwen2_vl" else block.self_attn
        matrices = [child.weight.numel() for child in attention.modules() if isinstance(child, nn.Linear)]
        assert layer.attention_weights == sum(matrices)
    shape = Transformer(8, 24, num_heads=4, num_kv_heads=2, head_dim=3, gated=True)
    assert shape.layer().weights - shape.layer().attention_weights == 3 * 8 * 24


class Plain(nn.Module):
    """An encoder of one block, without halves."""

    def __init__(self):
        super().__init__()
        self.blocks, self.output_dim = nn.ModuleList([nn.Linear(4, 4)]), 4

    def num_outputs(self, sizes):
        return sizes[:, 0]


def test_an_encoder_without_halves_says_so():
    assert ModalityModule(Plain(), Projector(4, 4, ProjectorConfig())).unhalvable == "Plain has no halves"
    assert Block(nn.Linear(4, 4)).halves == ()
