"""Parts of a model: together they hold every parameter, each under its name in the whole model."""

from copy import deepcopy

import pytest
import torch

from motet.core.errors import UserError
from motet.core.plan import Plan, Unit
from motet.cost.catalogue import cluster
from motet.models.mllm import MLLM
from motet.models.part import keep_spans, names_of_spans
from motet.models.projector import ProjectorConfig
from motet.models.spec import model_spec
from motet.schedule import planned
from motet.train.planned_job import holders_of
from parity.planned import build_hf_model
from parity.planned_parts import Tiles
from parity.tiny import QFORMER, RESAMPLER
from unit.models.test_shaped import VISION, model_of

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


@pytest.mark.parametrize("frozen", ["image", "image block"])
def test_a_stage_of_frozen_blocks_is_in_the_mode_of_the_whole_part(frozen):
    """Where other blocks are trained, one process drops out in the frozen ones too."""
    model = build_hf_model([frozen])
    keep_spans(model, {"image": (1, 2)})
    assert model.train().encoders["image"].encoder.training == (frozen == "image block")


def cut_in_two(mllm, name, cut):
    """Two parts of a model, with the blocks of one module before `cut` and from there on; and how many it has."""
    num_blocks = model_spec(mllm).num_blocks[name]
    parts = [deepcopy(mllm) for _ in range(2)]
    for part, span in zip(parts, ((0, cut), (cut, num_blocks))):
        keep_spans(part, {name: span})
    return parts, num_blocks


def check_in_parts(module, sizes, values, backbone, cut):
    """Cut in two, an encoder computes what it computes whole, and lengths say the shape of what goes between."""
    whole = MLLM({"it": module.eval()}, backbone)
    parts, num_blocks = cut_in_two(whole, "it", cut)
    first, second = (part.encoders["it"] for part in parts)
    assert {*dict(first.named_parameters()), *dict(second.named_parameters())} == {*dict(module.named_parameters())}
    hidden = first.through(first.enter(values, sizes), sizes, 0, cut)
    spec, segments = model_spec(whole).module("it"), module.segments(sizes.numpy())
    layer = spec.sent(cut)
    rows = layer.rows(module.lengths(sizes.numpy()) if segments is None else segments.length)
    num_rows = rows.max() * len(rows) if spec.padded and not spec.keys_of(cut) else rows.sum()
    assert hidden.shape == (num_rows, layer.output_width), "what a message's length rests on"
    assert torch.equal(second.leave(second.through(hidden, sizes, cut, num_blocks), sizes), module(values, sizes))


@pytest.mark.parametrize(
    "family",
    ["siglip", "clip", "dinov2", "qwen2_vl", "whisper", "qwen2_audio", "internvl", "eva_clip"]
    + ["siglip2", "pixtral", "dinov3", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_audio"],
)
def test_an_encoder_in_two_parts_is_the_encoder(tiny, family):
    sizes = tiny.sizes(family)
    values = tiny.values(family, sizes).double()
    check_in_parts(tiny.encoder(family), sizes, values, tiny.backbone(), 1)


@pytest.mark.parametrize("cut", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["siglip", "clip", "dinov2", "qwen2_vl", "whisper", "qwen2_audio"])
@pytest.mark.parametrize("kind", ["resampler", "qformer"])
def test_a_projector_with_queries_is_a_block_of_its_own(tiny, family, kind, cut):
    """Clips lose their padding before it, and images their class row."""
    config = {"resampler": RESAMPLER, "qformer": QFORMER}[kind]
    module = tiny.encoder(family, projector=ProjectorConfig(kind=kind, queries=3, config=config))
    sizes = tiny.sizes(family)
    if family == "qwen2_audio" and cut == 2:
        assert "leaves out some, which layers do not say" in module.unsendable(cut)
    else:
        assert not module.unsendable(cut) and not module.uncuttable
        check_in_parts(module, sizes, tiny.values(family, sizes).double(), tiny.backbone(), cut)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_callback_before_an_encoder_is_of_its_first_part(tiny, cut):
    queries = ProjectorConfig(kind="qformer", queries=3, config=QFORMER)
    module = tiny.encoder("siglip", projector=queries, before=f"{Tiles.__module__}:WideTiles")
    sizes = tiny.sizes("siglip")
    check_in_parts(module, sizes, tiny.values("siglip", sizes).double(), tiny.backbone(), cut)


@pytest.mark.parametrize("shape", [{}, {"class_row": True}, {"num_positions": 40, "class_row": True}])
def test_a_vision_transformer_of_shapes_in_two_parts_is_itself(tiny, shape):
    module = model_of(image=VISION | {"projector": {"downsample": 2}} | shape)[1].encoders["image"]
    sizes = torch.tensor([[7], [40], [13], [4]])
    values = torch.randn(int(sizes.sum()), 12, dtype=torch.float64)
    check_in_parts(module, sizes, values, tiny.backbone(), 2)


@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "mixtral", "qwen3_moe"]
    + ["granite", "gpt2", "opt"],
)
def test_a_backbone_in_two_parts_is_the_backbone(tiny, family):
    backbone, packed = tiny.backbone(family).eval(), tiny.Packed.of([7, 1, 12, 5])
    parts, num_blocks = cut_in_two(MLLM({}, backbone), "backbone", 1)
    first, second = (part.backbone for part in parts)
    assert {*dict(first.named_parameters()), *dict(second.named_parameters())} == {*dict(backbone.named_parameters())}
    hidden = first.through(first.enter(packed, {}), packed, 0, 1)
    loss, num_targets = second.leave(second.through(hidden, packed, 1, num_blocks), packed)
    expected, expected_targets = backbone(packed, {})
    assert torch.equal(loss, expected) and num_targets == expected_targets
