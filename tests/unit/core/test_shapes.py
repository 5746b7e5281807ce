"""Layers and modules from shapes: counts by hand, published sizes. Tests of `models` compare them with torch's."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from motet.core import shapes
from motet.core.errors import ArgumentError
from motet.core.shape_tables import BackboneShape
from motet.core.shapes import BIASES, Transformer
from motet.core.workload import BACKBONE


def test_a_plain_layer_keeps_what_korthikanti_counts():
    """34 bytes times hidden without the scores' 5 s a / h, of which the masks of two dropouts are 2 (section 4.1)."""
    layer = Transformer(1024, 4096, 16).layer()
    assert layer.weights == 12 * 1024**2
    assert layer.parameters == 12 * 1024**2 + 13 * 1024
    statistics = 2 * 2 + 2 * 16
    assert layer.activation_width == (34 - 2) * 1024 // 2 + statistics
    assert layer.output_width == 1024


def test_grouped_queries_and_a_gated_mlp():
    shape = Transformer(8, 20, 4, num_kv_heads=2, head_dim=3, gated=True, norm="rms", biases=("query", "key", "value"))
    layer = shape.layer(divisor=2, extra_rows=1, trainable=False)
    assert (layer.attention.width, layer.attention.kv_width) == (12, 6)
    assert layer.weights == 8 * (12 + 6 + 6) + 12 * 8 + 3 * 8 * 20
    assert layer.parameters == layer.weights + 12 + 6 + 6 + 2 * 8
    assert (layer.divisor, layer.extra_rows, layer.trainable) == (2, 1, False)
    assert replace(shape, qk_norm=True).layer().parameters == layer.parameters + 2 * 3
    assert replace(shape, biases=BIASES).layer().parameters == layer.parameters + 8 + 2 * 20 + 8


MIXTRAL = {
    "num_layers": 32, "hidden": 4096, "mlp": 14336, "num_heads": 32, "num_kv_heads": 8, "gated": True, "norm": "rms",
    "biases": (), "vocab_size": 32000, "num_experts": 8, "experts_per_token": 2,
}  # fmt: skip


def test_a_mixture_of_experts_has_active_and_idle_weights():
    """Mixtral-8x7B: 46.7 B parameters, of which 12.9 B compute a token (Jiang et al. 2024, section 1)."""
    module = BackboneShape.model_validate(MIXTRAL).module()
    assert module.num_parameters == pytest.approx(46.7e9, rel=0.002)
    idle = sum(layer.idle_weights for layer in module.layers)
    assert module.num_parameters - idle == pytest.approx(12.9e9, rel=0.003)
    assert idle == 32 * 6 * 3 * 4096 * 14336
    dense = BackboneShape.model_validate({**MIXTRAL, "num_experts": 0, "experts_per_token": 0}).module()
    assert not any(layer.idle_weights for layer in dense.layers)
    attention, of_dense = (next(each for each in one.layers if each.attention) for one in (module, dense))
    assert attention.weights == of_dense.weights + 3 * 4096 * 14336 + 4096 * 8
    assert attention.activation_width > of_dense.activation_width + 4 * 14336


def test_shapes_that_cannot_be():
    for experts, active in ((8, 0), (0, 2), (2, 3)):
        with pytest.raises(
            ArgumentError, match=f"{active} of {experts} experts cannot compute a row; give both numbers"
        ):
            Transformer(8, 16, 4, num_experts=experts, experts_per_token=active)
    with pytest.raises(ArgumentError, match="3 heads do not divide a row of 8; give head_dim"):
        Transformer(8, 16, 3)
    with pytest.raises(ArgumentError, match="4 heads cannot share 3 heads"):
        Transformer(8, 16, 4, num_kv_heads=3)
    with pytest.raises(ArgumentError, match="No product is named 'gate'; biases may be query"):
        Transformer(8, 16, 4, biases=("query", "gate"))


def test_layers_around_the_transformers():
    assert shapes.projector(4, 6, "linear").parameters == 4 * 6 + 6
    joined = shapes.projector(4, 6, "mlp", 3, divisor=2)
    assert (joined.weights, joined.parameters, joined.divisor) == (12 * 6 + 36, 12 * 6 + 36 + 12, 6)
    merged = shapes.merge(4, 6, 4, divisor=4)
    assert (merged.weights, merged.parameters) == (16 * 16 + 16 * 6, 16 * 16 + 16 * 6 + 16 + 6 + 8)
    tied = shapes.head(10, 4, tied=True)
    assert (tied.weights, tied.parameters, tied.targets_only) == (40, 0, True)
    assert (shapes.embedding(10, 4).weights, shapes.embedding(10, 4).parameters) == (0, 40)


def test_a_projector_follows_the_rows_that_the_encoder_gives():
    shape = Transformer(8, 16, 2)
    audio = shapes.connect(shapes.audio_encoder("audio", shape, 3, pooled=2), 6, downsample=2)
    assert audio.padded
    assert [stack.count for stack in audio.stacks] == [1, 1, 3, 1, 1]
    assert [stack.layer.divisor for stack in audio.stacks] == [1, 2, 2, 4, 8]
    image = shapes.connect(shapes.vit("image", shape, 2, num_positions=9, class_row=True), 6, "linear")
    assert [stack.layer.extra_rows for stack in image.stacks] == [0, 1, 1, 0]
    assert image.stacks[0].layer.parameters == 588 * 8 + 8 + 10 * 8 + 8


def test_edges_lead_through_the_backbone():
    shape = Transformer(8, 16, 2)
    image, picture = (shapes.vit(name, shape, 1) for name in ("image", "picture"))
    spec = shapes.multimodal("model", shapes.language_model(shape, 1, 10), [image], [picture])
    assert [module.name for module in spec.modules] == ["image", BACKBONE, "picture"]
    assert spec.edges == (("image", BACKBONE), (BACKBONE, "picture"))


def test_sizes_that_would_fill_a_machine_are_refused():
    sizes = {"num_layers": 2, "hidden": 8, "mlp": 8, "num_heads": 2, "vocab_size": 9}
    assert BackboneShape(**sizes).module().num_parameters > 0
    for name in ("num_layers", "hidden", "mlp", "num_heads", "vocab_size"):
        with pytest.raises(ValidationError, match=name):
            BackboneShape(**sizes | {name: 10**9})


def orchmllm(backbone, num_layers, image, image_layers, downsample) -> dict[str, float]:
    """Parameters of OrchMLLM's submodules (section 8, Table 1): Qwen2's shape, a ViT, Whisper's encoder."""
    audio = Transformer(1280, 5120, 20, biases=("query", "value", "output", "mlp"))
    encoders = [
        shapes.vit("image", image, image_layers, num_positions=1024, class_row=True),
        shapes.audio_encoder("audio", audio, 32),
    ]
    model = shapes.language_model(backbone, num_layers, 152_064)
    alone = shapes.multimodal("alone", model, encoders)
    connected = [
        shapes.connect(encoder, backbone.hidden, downsample=rate)
        for encoder, rate in zip(encoders, downsample, strict=True)
    ]
    counts = {module.name: module.num_parameters for module in alone.modules}
    return counts | {
        "submodules": alone.num_parameters,
        "connected": shapes.multimodal("connected", model, connected).num_parameters,
    }


def qwen2(hidden, mlp, num_heads, num_kv_heads) -> Transformer:
    biases = ("query", "key", "value")
    return Transformer(
        hidden, mlp, num_heads, num_kv_heads=num_kv_heads, gated=True, norm="rms", biases=biases, causal=True
    )


def test_mllm_10b():
    """Named by "the total parameter count of submodules": connectors, which Table 1 does not list, add 0.4 %."""
    counts = orchmllm(qwen2(3584, 18944, 28, 4), 28, Transformer(2048, 8192, 16), 36, (1, 2))
    assert counts["submodules"] == pytest.approx(10e9, rel=0.015)
    assert counts["connected"] == pytest.approx(10e9, rel=0.015)
    # Qwen2-7B as published: 7,615,616,512.
    assert counts[BACKBONE] == 7_615_616_512


def test_mllm_18b():
    """As above; with the connectors it is 1.6 % above its name."""
    counts = orchmllm(qwen2(5120, 13824, 40, 8), 48, Transformer(2400, 9600, 20), 40, (4, 2))
    assert counts["submodules"] == pytest.approx(18e9, rel=0.015)
    assert counts["connected"] == pytest.approx(18e9, rel=0.02)
    # Qwen2.5-14B as published: 14,770,033,664.
    assert counts[BACKBONE] == 14_770_033_664
