"""Bytes of a rank: sharding never adds, recomputation never adds to what is kept, published sums, and torch's own."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.catalogue import cluster
from motet.cost.memory import (
    FSDP_BF16,
    FSDP_FP32,
    FSDP_FP64,
    MEGATRON_BF16,
    MixedPrecision,
    StageLayer,
    activation_bytes,
    logits_bytes,
    mixed_precision,
    stage_layers,
    stage_memory,
    state_bytes,
    unit_spans,
)

SHAPE = Transformer(256, 1024, 4, num_kv_heads=2, gated=True, norm="rms", biases=(), causal=True)
BACKBONE = language_model(SHAPE, 8, 1000)
IMAGE = connect(vit("image", Transformer(128, 512, 4), 6), 256)
MODEL = multimodal("tiny", BACKBONE, [IMAGE])
"""6 + 3 layers of the encoder with stem, norm and projector; 8 + 3 of the backbone."""
ROWS = 96.0

precisions = st.sampled_from([FSDP_BF16, FSDP_FP32, FSDP_FP64, MEGATRON_BF16])
counts = st.integers(0, 10**10)


def rows(module, layer):
    return ROWS / 4 if layer.targets_only else ROWS


def plan_of(*units, model=MODEL, **options):
    return Plan(model, cluster("h100"), units, batch_size=8, **options)


def whole(recompute=None, **options):
    """One stage of everything."""
    stage = {"image": len(IMAGE.blocks), "backbone": len(BACKBONE.blocks)}
    return Unit("all", (stage,), recompute=(recompute,) if recompute else (), **options)


def memory_of(unit, precision=FSDP_FP32, in_flight=1, model=MODEL, stage=0):
    spans = unit_spans(model, unit, stage)
    layers = stage_layers(model, spans, unit.recompute[stage] if unit.recompute else {})
    return stage_memory(unit, layers, rows, in_flight, precision)


def test_state_by_hand():
    # Megatron with its distributed optimizer: 2 + 4 bytes whole, 12 over 8 ranks (ZeRO, Figure 1, with fp32 gradients).
    assert state_bytes(10**9, 10**9, precision=MEGATRON_BF16, zero=1, shard_ranks=8) == (2e9, 4e9, 1.5e9)
    # FSDP2, resharding: 4 + 4 + 8 bytes over 8 ranks. Not resharding: its bf16 copies stay, too.
    assert state_bytes(10**9, 10**9, precision=FSDP_BF16, zero=3, shard_ranks=8) == (0.5e9, 0.5e9, 1e9)
    assert state_bytes(10**9, 10**9, precision=FSDP_BF16, zero=2, shard_ranks=8) == (2.5e9, 0.5e9, 1e9)
    # 16 bytes a parameter without sharding; what is frozen has neither gradient nor moments.
    assert sum(state_bytes(10**9, 10**9, precision=FSDP_FP32)) == 16e9
    assert state_bytes(10**9, 0, precision=FSDP_FP32) == (4e9, 0, 0)
    # In a pipeline, what is frozen is kept as it was read, over 8 ranks, and as passes compute with it.
    assert state_bytes(10**9, 0, precision=MEGATRON_BF16, zero=1, shard_ranks=8) == (2.5e9, 0, 0)


@pytest.mark.parametrize(("zero", "gbytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9 - 2 * 7.5 / 64)])
def test_zero_figure_1(zero, gbytes):
    """7.5 B parameters over 64 ranks; parameters and gradients in 2 bytes, 12 bytes of optimizer state.

    At stage 3 a rank of the figure has a share of the parameters in 2 bytes too; here it is gathered from the master
    copies, and freed.
    """
    precision = MixedPrecision(compute=2, stored=2, gradient=2, optimizer=12, master=4)
    found = state_bytes(75 * 10**8, 75 * 10**8, precision=precision, zero=zero, shard_ranks=64)
    assert sum(found) / 1e9 == pytest.approx(gbytes, abs=0.05)


def test_experts_are_divided_whole():
    """Of 8 experts, 16 ranks hold one or none, and 3 ranks three at most; all else is divided equally."""
    layer = Transformer(64, 128, 4, biases=(), num_experts=8, experts_per_token=2).layer()
    of_experts = 8 * 2 * 64 * 128
    others = layer.parameters - of_experts
    for num_ranks, share in ((1, 8), (2, 4), (3, 3), (8, 1), (16, 1)):
        unit = Unit("all", ({"backbone": 1},), dp=num_ranks, zero=3)
        held = stage_memory(unit, [StageLayer("backbone", layer, True, False)], lambda *_: 1.0, 1, FSDP_FP32)
        assert held.optimizer == math.ceil(8 * others / num_ranks) + 8 * of_experts * share // 8


@pytest.mark.parametrize(("ep", "zero", "own", "shards"), [(2, 0, 4, 1), (4, 1, 2, 1), (2, 1, 4, 2), (8, 0, 1, 1)])
def test_ranks_that_share_experts_hold_their_own(ep, zero, own, shards):
    """Of 8 experts each rank of `ep` has 8 / ep, which ranks that have the same ones share out under ZeRO."""
    layer = Transformer(64, 128, 4, biases=(), num_experts=8, experts_per_token=2).layer()
    of_expert, dp = 2 * 64 * 128, max(4, ep)
    unit = Unit("all", ({"backbone": 1},), dp=dp, ep=ep, zero=zero)
    held = stage_memory(unit, [StageLayer("backbone", layer, True, False)], lambda *_: 1.0, 1, FSDP_FP32)
    others = layer.parameters - 8 * of_expert
    assert held.gradients == 4 * (others + own * of_expert)
    assert held.optimizer == math.ceil(8 * others / (dp if zero else 1)) + 8 * own * of_expert // shards


def test_a_pipeline_gathers_and_reduces_a_stage_as_a_whole():
    unit = whole(zero=3, dp=4)
    layers = list(stage_layers(MODEL, unit_spans(MODEL, unit, 0), {}))
    by_layer, by_stage = (
        stage_memory(unit, layers, lambda *_: 0.0, 1, FSDP_FP32, by_stage=by_stage) for by_stage in (False, True)
    )
    num_parameters = sum(each.layer.parameters for each in layers)
    assert by_stage.transient == num_parameters * (4 + 4 + 4)  # Gathered; gradients, and as they are reduced.
    assert by_layer.transient < by_stage.transient and by_layer.held_bytes == by_stage.held_bytes


def test_korthikanti_section_4():
    """34 s b h bytes a layer, of which two are masks of dropout; the scores are not kept with fused attention."""
    layer = Transformer(12288, 4 * 12288, 96, causal=True).layer()
    for tp in (1, 8):
        # With rows in parts. What the first products multiply is kept, and not gathered again in backward.
        expected = ((34 - 2 - 4) / tp + 4) * 2048 * 12288
        found = activation_bytes(layer, 2048, element_bytes=2, tp=tp, in_parts=True)
        assert found == pytest.approx(expected, rel=1e-3)
        # With whole rows between the branches (section 4.2.1: 10 + 24 / t, without the masks).
        expected = (10 - 2 + 24 / tp) * 2048 * 12288
        assert activation_bytes(layer, 2048, element_bytes=2, tp=tp) == pytest.approx(expected, rel=1e-3)


@given(precisions, counts, st.floats(0, 1), st.integers(0, 3), st.integers(1, 4096), st.integers(1, 8))
def test_more_ranks_never_hold_more(precision, num_parameters, trainable, zero, shard_ranks, more):
    num_trainable = int(trainable * num_parameters)
    fewer = state_bytes(num_parameters, num_trainable, precision=precision, zero=zero, shard_ranks=shard_ranks)
    further = state_bytes(num_parameters, num_trainable, precision=precision, zero=zero, shard_ranks=shard_ranks * more)
    assert all(after <= before for after, before in zip(further, fewer))


@given(precisions, counts, st.integers(0, 2), st.integers(1, 4096))
def test_a_higher_stage_never_holds_more(precision, num_parameters, zero, shard_ranks):
    lower = state_bytes(num_parameters, num_parameters, precision=precision, zero=zero, shard_ranks=shard_ranks)
    higher = state_bytes(num_parameters, num_parameters, precision=precision, zero=zero + 1, shard_ranks=shard_ranks)
    assert all(after <= before for after, before in zip(higher[1:], lower[1:]))
    assert sum(higher) <= sum(lower)  # Between ZeRO 0 and 1 passes get a copy of what is shared out.


@pytest.mark.parametrize(("zero", "shard_ranks"), [(4, 1), (-1, 1), (1, 0)])
def test_wrong_stages(zero, shard_ranks):
    with pytest.raises(ArgumentError, match="it must be 0, 1, 2 or 3, over at least 1"):
        state_bytes(1, 1, precision=FSDP_FP32, zero=zero, shard_ranks=shard_ranks)


@given(st.floats(0, 1e6), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4]), st.booleans())
def test_recomputation_keeps_less_and_tensor_parallelism_divides(num_rows, tp, element_bytes, recomputed):
    layer = SHAPE.layer()
    kept = activation_bytes(layer, num_rows, element_bytes=element_bytes, tp=tp, recomputed=recomputed)
    assert kept <= activation_bytes(layer, num_rows, element_bytes=element_bytes, tp=tp)
    alone = activation_bytes(layer, num_rows, element_bytes=element_bytes, recomputed=recomputed)
    assert kept <= alone if not recomputed else kept == alone
    parts = activation_bytes(layer, num_rows, element_bytes=element_bytes, tp=tp, recomputed=recomputed, in_parts=True)
    assert alone / tp <= parts <= kept


def test_activations_by_hand():
    layer = SHAPE.layer()
    assert activation_bytes(layer, 10, element_bytes=2) == 20 * layer.activation_width
    assert activation_bytes(layer, 10, element_bytes=2, recomputed=True) == 20 * 256
    # bf16 logits, and float32 logits and log-softmax; in float32 they are what the layer gives.
    assert logits_bytes(10, 1000, element_bytes=2) == 10 * 1000 * (2 + 4 + 4)
    assert logits_bytes(10, 1000, element_bytes=4, tp=2) == 10 * 1000 * (4 + 4) / 2


@given(st.dictionaries(st.sampled_from(["image", "backbone"]), st.integers(0, 12)), st.integers(1, 16))
def test_a_stage_recomputes_what_its_plan_says(recompute, in_flight):
    kept, again = memory_of(whole(), in_flight=in_flight), memory_of(whole(recompute), in_flight=in_flight)
    assert again.activations <= kept.activations
    assert (again.parameters, again.gradients, again.optimizer) == (kept.parameters, kept.gradients, kept.optimizer)
    # What is dropped comes back for one layer alone.
    assert again.transient + again.activations <= kept.transient + kept.activations
    if sum(recompute.values()) > 2:
        assert again.activations < kept.activations


def test_microbatches_in_flight_and_tensor_and_context_parallelism():
    one, three = memory_of(whole()), memory_of(whole(), in_flight=3)
    assert three.peak_bytes - one.peak_bytes == 2 * one.activations
    halved = memory_of(whole(tp=2))
    whole_size = 4 * sum(layer.parameters for layer in IMAGE.layers if layer.kind == "patches")  # In float32.
    assert halved.parameters == pytest.approx((one.parameters + whole_size) / 2, rel=0.01)
    for name in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(one, name) / 2 <= getattr(halved, name) < getattr(one, name)
    assert halved.transient == one.transient  # Gradients of whole rows.
    by_context = memory_of(whole(cp=2))
    assert by_context.activations == pytest.approx(one.activations / 2, rel=1e-3)
    # Context-parallel ranks hold the same parameters, so that ZeRO shares their state out over them, too.
    replicas = memory_of(whole(dp=2))
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(by_context, name) == getattr(replicas, name)


def test_what_is_frozen_keeps_activations_only_where_a_gradient_passes():
    frozen = [replace(stack, layer=replace(stack.layer, trainable=False)) for stack in IMAGE.stacks]
    model = multimodal("frozen", BACKBONE, [replace(IMAGE, stacks=tuple(frozen))])
    everything, encoder_frozen = memory_of(whole()), memory_of(whole(), model=model)
    kept = sum(activation_bytes(layer, ROWS, element_bytes=4) for layer in IMAGE.layers)
    assert everything.activations - encoder_frozen.activations == kept
    assert everything.parameters == encoder_frozen.parameters
    assert everything.gradients - encoder_frozen.gradients == 4 * IMAGE.num_parameters
    # The same encoder behind a trained one has to pass gradients on.
    chained = replace(model, modules=(replace(IMAGE, name="before"), *model.modules), edges=(("before", "image"),))
    unit = Unit("image", ({"image": len(IMAGE.blocks)},))
    assert memory_of(unit, model=model).activations == 0
    passed = sum(activation_bytes(layer.layer, ROWS, element_bytes=4) * layer.count for layer in frozen)
    assert memory_of(unit, model=chained).activations == passed
    # What its matrices multiply is for gradients of weights alone.
    assert 0.6 < passed / kept < 0.7


def test_transients_by_hand():
    """ZeRO-3 of the backbone, in bf16, with its middle recomputed."""
    unit = Unit("llm", ({"backbone": 1}, {"backbone": 6}, {"backbone": 1}), pp=3, dp=4, zero=3)
    unit = replace(unit, recompute=({}, {"backbone": 6}, {}))
    layer = SHAPE.layer()
    found = memory_of(unit, FSDP_BF16, stage=1)
    unreduced = (2 + 4) * layer.parameters
    working = 2 * ROWS * (layer.activation_width - 256) + 2 * 2 * ROWS * 256
    assert found.activations == 6 * 2 * ROWS * 256
    assert found.transient == 2 * 2 * layer.parameters + unreduced + working
    assert found.parameters == 6 * layer.parameters
    last = memory_of(unit, FSDP_BF16, stage=2)
    gathered = 2 * (1000 * 256 + layer.parameters)
    logits = logits_bytes(ROWS / 4, 1000, element_bytes=2)
    assert last.transient == gathered + unreduced + max(logits, 2 * 2 * ROWS * 256)


def test_stages_add_up_to_the_whole():
    unit = Unit("llm", ({"backbone": 2}, {"backbone": 3}, {"backbone": 3}), pp=3, zero=0)
    parts = [memory_of(unit, stage=stage) for stage in range(3)]
    together = memory_of(Unit("llm", ({"backbone": 8},), zero=0))
    for name in ("parameters", "gradients", "optimizer", "activations"):
        assert sum(getattr(part, name) for part in parts) == getattr(together, name)
    assert together.parameters == 4 * BACKBONE.num_parameters


def test_replicated_modules_are_whole_on_every_stage():
    unit = Unit("llm", ({"backbone": 3}, {"backbone": 5}), pp=2, replicated=("image",), zero=0)
    without = replace(unit, replicated=())
    for stage in range(2):
        extra = memory_of(unit, stage=stage).parameters - memory_of(without, stage=stage).parameters
        assert extra == 4 * IMAGE.num_parameters


@pytest.mark.parametrize(
    ("precision", "pipeline", "moments", "optimizer"),
    [("bf16", False, 2, 8), ("bf16", True, 2, 12), ("bf16", True, 0, 4), ("bf16", False, 1, 4), ("fp64", True, 0, 0)],
)
def test_bytes_of_the_optimizer_by_its_moments(precision, pipeline, moments, optimizer):
    """In a pipeline in 16 bits a master copy of 4 bytes is among them."""
    assert mixed_precision(precision, pipeline=pipeline, moments=moments).optimizer == optimizer


def test_state_is_what_torch_holds_after_a_step():
    import torch

    from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig, build_mllm
    from motet.models.spec import model_spec

    heads = {"num_attention_heads": 2, "num_hidden_layers": 2}
    backbone = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2, **heads}
    config = ModelConfig(
        backbone=BackboneConfig(family="qwen2", config=backbone),
        encoders={
            "image": EncoderConfig(
                family="clip",
                config={"hidden_size": 24, "intermediate_size": 40, "image_size": 16, "patch_size": 4, **heads},
                train_encoder=False,
            )
        },
    )
    mllm = build_mllm(config, 50)
    trainable = [parameter for parameter in mllm.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable)
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()

    def held(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    spec = model_spec(mllm)
    unit = Unit("all", ({module.name: module.num_layers for module in spec.modules},), zero=0)
    found = memory_of(unit, model=spec)
    assert found.parameters == held(mllm.parameters())
    assert found.gradients == held(parameter.grad for parameter in trainable)
    moments = [moment for state in optimizer.state.values() for name, moment in state.items() if name != "step"]
    assert found.optimizer == held(moments)
