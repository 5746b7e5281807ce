"""Resampler and Q-Former on packed items: each item as alone and as in transformers, counted to the last operation."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Blip2QFormerConfig, Blip2QFormerModel
from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler

from motet.core.errors import UserError
from motet.cost.flops import step_flops, work_of
from motet.models.block import plain_names
from motet.models.build import EncoderConfig, build_modality
from motet.models.cross_projector import CrossProjector
from motet.models.exact import keep_float64
from unit.cost.forward_flops import forward_flops
from unit.models.test_flops import counted_step
from unit.models.test_saved import VISION, expected, kept
from unit.models.test_spec import check_layers

RESAMPLER = {"resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 8, "num_key_value_heads": 2}
QFORMER = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
OPTIONS: dict[str, dict[str, Any]] = {"resampler": RESAMPLER, "qformer": QFORMER}
COUNTS = np.array([7, 1, 12, 7, 3])


@cache
def projector(kind: str) -> CrossProjector:
    torch.manual_seed(0)
    made = CrossProjector(kind, 20, 32, 5, OPTIONS[kind]).double()
    keep_float64(made)
    return made


def of_transformers(kind: str, ours: CrossProjector):
    """The whole of transformers' model with the same weights, as a function of the rows of one item."""
    weights = dict(ours.layers.state_dict())
    if kind == "resampler":
        model = Idefics2PerceiverResampler(
            Idefics2PerceiverConfig(hidden_size=32, resampler_n_latents=5, **RESAMPLER, attn_implementation="sdpa")
        )
        names = {"latents.weight": "latents"}
    else:
        model = Blip2QFormerModel(Blip2QFormerConfig(encoder_hidden_size=20, **QFORMER, attn_implementation="sdpa"))
        queries = weights.pop("queries.weight")
        names = {"norm.weight": "layernorm.weight", "norm.bias": "layernorm.bias"}
    under = {"blocks.": "layers." if kind == "resampler" else "encoder.layer."}
    renamed = {}
    for name, tensor in weights.items():
        for ours_under, theirs in under.items():
            if name.startswith(ours_under):
                name = theirs + name.removeprefix(ours_under)
        renamed[names.get(name, name)] = tensor
    model.double().load_state_dict(renamed)
    keep_float64(model)
    if kind == "resampler":
        return lambda rows: model(ours.input(rows)[None], torch.ones(1, len(rows), dtype=torch.long))[0]
    return lambda rows: ours.output(
        model(query_embeds=queries[None], encoder_hidden_states=rows[None]).last_hidden_state[0]
    )


@pytest.mark.parametrize("kind", OPTIONS)
def test_packed_items_are_each_as_alone_and_as_in_transformers(kind):
    ours = projector(kind)
    rows = torch.randn(int(COUNTS.sum()), 20, dtype=torch.float64, requires_grad=True)
    together = ours(rows, COUNTS)
    alone = [ours(item, np.array([len(item)])) for item in rows.split(COUNTS.tolist())]
    assert ours.num_outputs(COUNTS).tolist() == [5] * 5 == [len(item) for item in alone]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-12, atol=1e-12)
    theirs = of_transformers(kind, ours)
    expected = torch.cat([theirs(item) for item in rows.split(COUNTS.tolist())])
    torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(together)
    found, wanted = (torch.autograd.grad((out * weight).sum(), rows, retain_graph=True) for out in (together, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    inputs = [rows, *ours.parameters()]
    packed, single = (torch.autograd.grad((out * weight).sum(), inputs) for out in (together, torch.cat(alone)))
    torch.testing.assert_close(packed, single, rtol=1e-10, atol=1e-12)


def encoder(kind, dtype=torch.float32, **options):
    config = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    part = EncoderConfig(
        family="siglip",
        config=config | {"image_size": 16, "patch_size": 4},
        projector={"kind": kind, "queries": 5, "config": OPTIONS[kind]},
        **options,
    )
    return build_modality("it", part, 32, dtype, 0)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("flags", [(True, True), (False, True), (True, False)])
def test_operations_are_those_that_torch_counts(kind, flags):
    module = encoder(kind, train_encoder=flags[0], train_projector=flags[1])
    sizes = torch.tensor([[2, 8], [4, 4], [8, 2]])  # The tower shares calls, padded, among items of other lengths.
    values = torch.randn(int(sizes.prod(1).sum()), 48)
    lengths, spec = module.lengths(sizes.numpy()), module.spec_module("it")
    forward, step = counted_step(lambda: module(values, sizes))
    assert forward_flops(spec, lengths) == forward
    if flags[1]:
        assert step_flops(spec, lengths) == step
    else:  # Nothing passes to frozen queries, which is not known of the first layer alone.
        assert step < step_flops(spec, lengths) < 1.03 * step
    check_layers(module, module.layers())
    assert len(spec.blocks) == len(module.blocks) == 3
    # A pipeline that is cut before the queries sends the rows that they read.
    assert not spec.layers[spec.blocks[-1].start - 1].item_rows


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_is_kept_for_backward(kind):
    """As in test_saved.py; keys and values are copied for each head of queries where no kernel groups them."""
    wide = {
        "resampler": {"resampler_n_heads": 4, "resampler_head_dim": 40, "num_key_value_heads": 4},
        "qformer": QFORMER | {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4},
    }[kind]
    part = EncoderConfig(
        family="siglip", config=VISION, projector={"kind": kind, "queries": 64, "config": wide}, train_encoder=False
    )
    module = build_modality("it", part, 160, torch.bfloat16, 0)
    sizes = torch.tensor([[16, 16], [16, 16]])
    values = torch.randn(512, 48)
    layers = [each.layer for each in module.projector.described(1)]
    saved = kept(module, lambda: module(values, sizes))
    assert expected(layers, module.lengths(sizes.numpy()), 0) == pytest.approx(saved, rel=0.1)
    made = next(layer for layer in layers if layer.kind == "latents")
    assert work_of(made, np.array([256, 9])).rows[0] == 128


@pytest.mark.parametrize("kind", OPTIONS)
def test_without_items_every_weight_has_a_gradient_of_zero(kind):
    module = encoder(kind)
    out = module(torch.empty(0, 48), torch.empty(0, 2, dtype=torch.int64))
    assert out.shape == (0, 32)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters() if p.requires_grad)
    assert any(name.startswith("projector.layers.") for name in plain_names(module).values())


@pytest.mark.parametrize("kind", OPTIONS)
def test_recomputation_changes_nothing(kind):
    module = encoder(kind, torch.float64)
    sizes = torch.tensor([[2, 3], [4, 4]])
    values = torch.randn(22, 48)
    plain = torch.autograd.grad(module(values, sizes).square().sum(), trained(module))
    for block in module.blocks:
        block.recompute = True
    again = torch.autograd.grad(module(values, sizes).square().sum(), trained(module))
    torch.testing.assert_close(plain, again, rtol=1e-12, atol=1e-13)


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("resampler", {"depth": 2}, "Idefics2PerceiverConfig has no option depth"),
        ("resampler", {"hidden_size": 8}, "hidden_size is not for a resampler"),
        ("resampler", {"resampler_n_heads": 3, "num_key_value_heads": 2}, "3 heads cannot share 2 heads"),
        ("resampler", {"resampler_depth": 0}, "resampler_depth is 0; it must be a whole number, at least 1"),
        ("qformer", {"encoder_hidden_size": 8}, "encoder_hidden_size is not for a qformer"),
        ("qformer", {"hidden_size": 10, "num_attention_heads": 4}, "4 heads do not divide hidden_size = 10"),
        ("qformer", {"use_qformer_text_input": True}, "use_qformer_text_input is not computed"),
    ],
)
def test_options_that_are_not_computed_are_refused(kind, options, said):
    with pytest.raises(UserError, match=rf"projector\.config.*{said}"):
        CrossProjector(kind, 20, 32, 5, options)
