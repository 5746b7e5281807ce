"""Parts of a model: together they hold every parameter, each under its name in the whole model."""

from copy import deepcopy

import pytest
import torch

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.cost.catalogue import cluster
from motet.models.mllm import MLLM
from motet.models.part import keep_spans, names_of_spans
from motet.models.spec import model_spec
from motet.schedule import planned
from motet.train.planned_job import holders_of
from parity.planned import build_hf_model

PARTS = [{"image": (0, 2)}, {"image": (2, 3), "audio": (0, 2), "backbone": (0, 1)}, {"backbone": (1, 3)}]


@pytest.mark.parametrize("tied", [False, True])
def test_parts_hold_every_parameter_by_its_name(tied):
    whole = dict(build_hf_model(tied=tied).named_parameters())
    held = []
    for spans in PARTS:
        part = build_hf_model(tied=tied)
        names = names_of_spans(part, spans)
        keep_spans(part, spans)
        parameters = dict(part.named_parameters())
        assert parameters.keys() == names and set(part.state_dict()) >= names
        assert all(torch.equal(parameter, whole[name]) for name, parameter in parameters.items())
        held += names
    embedding = "backbone.causal_lm.model.embed_tokens.weight"
    assert sorted(held) == sorted([*whole, *([embedding] * tied)])


def test_a_weight_that_no_block_holds_is_refused():
    model = build_hf_model()
    model.backbone.unused = torch.nn.Linear(2, 2)
    unit = Unit("all", (model_spec(model).num_blocks,), zero=0)
    program = planned(Plan(model_spec(model), cluster("h100", 1), (unit,), batch_size=1))
    with pytest.raises(UserError, match=r"The weight backbone\.unused\.weight belongs to no block"):
        holders_of(model, program)


def test_modules_without_blocks_here_are_gone():
    part = build_hf_model()
    keep_spans(part, {"audio": (1, 2)})
    assert list(part.encoders) == ["audio"] and part.backbone is None
    names = [name for name, _ in part.named_parameters()]
    assert any("layers.1." in name for name in names) and not any(
        "model.layers.0." in name or "conv" in name for name in names
    )
    assert any("projector" in name for name in names)


def cut_in_two(mllm, name, cut):
    """Two parts of a model, with the blocks of one module before `cut` and from there on; and how many it has."""
    num_blocks = model_spec(mllm).num_blocks[name]
    parts = [deepcopy(mllm) for _ in range(2)]
    for part, span in zip(parts, ((0, cut), (cut, num_blocks))):
        keep_spans(part, {name: span})
    return parts, num_blocks


@pytest.mark.parametrize("family", ["siglip", "clip", "dinov2", "qwen2_vl", "whisper", "qwen2_audio"])
def test_an_encoder_in_two_parts_is_the_encoder(tiny, family):
    module, sizes = tiny.encoder(family).eval(), tiny.sizes(family)
    values = tiny.values(family, sizes).double()
    parts, num_blocks = cut_in_two(MLLM({"it": module}, tiny.backbone()), "it", 1)
    first, second = (part.encoders["it"] for part in parts)
    assert {*dict(first.named_parameters()), *dict(second.named_parameters())} == {*dict(module.named_parameters())}
    hidden = first.through(first.enter(values, sizes), sizes, 0, 1)
    layer = model_spec(MLLM({"it": module}, tiny.backbone())).module("it")
    rows = layer.layers[layer.blocks[0][-1]].rows(module.lengths(sizes.numpy()))
    assert len(hidden) == (rows.max() * len(rows) if layer.padded else rows.sum()), "what a message's length rests on"
    assert torch.equal(second.leave(second.through(hidden, sizes, 1, num_blocks), sizes), module(values, sizes))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3", "phi3", "olmo2"])
def test_a_backbone_in_two_parts_is_the_backbone(tiny, family):
    backbone, packed = tiny.backbone(family).eval(), tiny.Packed.of([7, 1, 12, 5])
    parts, num_blocks = cut_in_two(MLLM({}, backbone), "backbone", 1)
    first, second = (part.backbone for part in parts)
    assert {*dict(first.named_parameters()), *dict(second.named_parameters())} == {*dict(backbone.named_parameters())}
    hidden = first.through(first.enter(packed, {}), packed, 0, 1)
    loss, num_targets = second.leave(second.through(hidden, packed, 1, num_blocks), packed)
    expected, expected_targets = backbone(packed, {})
    assert torch.equal(loss, expected) and num_targets == expected_targets
