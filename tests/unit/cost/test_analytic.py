"""Roofline times: what must hold for any layer and device, the rule of backward, and published measurements."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import ArgumentError
from motet.core.exchange import Moved
from motet.core.shapes import Transformer, head, projector, unused
from motet.core.spec import Layer
from motet.cost.analytic import EFFICIENCY, Analytic, Efficiency, product_seconds, reference_seconds
from motet.cost.catalogue import DEVICES, cluster
from motet.cost.communication import gather_s
from motet.cost.cpu import CpuFigures
from motet.cost.model import Work, backward_seconds

GPUS = [name for name in DEVICES if name not in ("cpu", "v100", "t4")]
IDEAL = Efficiency(products=1, half_rows=0, half_width=0, attention=1, half_length=0, memory=1, links=1, launch_s=0)


def transformer(hidden, mlp, num_kv_heads=0, trainable=True, gated=True):
    shape = Transformer(hidden, mlp, hidden // 64, num_kv_heads, gated=gated, norm="rms", biases=(), causal=True)
    return shape.layer(trainable=trainable)


def product(width):
    """A square matrix, and nothing kept, so that nothing else takes time."""
    return Layer("projector", width**2, width**2, width, activation_width=0)


def work(rows, length=None):
    rows = np.atleast_1d(np.asarray(rows, dtype=np.float64))
    return Work(rows, rows * (length or 1024) / 2)


layers = st.one_of(
    st.builds(transformer, st.sampled_from([256, 1024, 4096, 12288]), st.sampled_from([1024, 11008, 49152])),
    st.builds(projector, st.integers(64, 8192), st.integers(64, 8192)),
    st.builds(
        lambda width, count: Layer("embedding", 0, width * count, width, 1), st.just(4096), st.integers(1, 10**6)
    ),
)
models = st.builds(lambda name: Analytic(cluster(name, num_nodes=2)), st.sampled_from(GPUS))


@given(models, layers, st.floats(1, 1e5), st.floats(1, 100), st.integers(2, 32768))
def test_more_work_never_takes_less(model, layer, rows, more, length):
    less = model.layer_seconds("any", layer, work(rows, length))
    larger = model.layer_seconds("any", layer, work(rows * more, length))
    longer = model.layer_seconds("any", layer, work(rows, 2 * length))
    for i in range(3):
        assert larger[i][0] >= less[i][0] > 0
        assert longer[i][0] >= less[i][0]


@given(models, layers, st.floats(1, 1e5), st.sampled_from([2, 4, 8]))
def test_tensor_parallelism_divides(model, layer, rows, tp):
    """A share is never faster than a perfect one, and never slower than the whole."""
    whole = model.layer_seconds("any", layer, work(rows))
    share = model.layer_seconds("any", layer, work(rows), tp)
    for i in range(3):
        assert whole[i][0] / tp * (1 - 1e-12) <= share[i][0] <= whole[i][0]


@given(models, layers, st.booleans(), st.booleans(), st.floats(1, 1e5))
def test_recomputation_never_takes_less(model, layer, input_gradient, trainable, rows):
    layer = dataclasses.replace(layer, trainable=trainable)
    seconds = model.layer_seconds("any", layer, work(rows))
    kept = backward_seconds(seconds, layer, input_gradient)
    again = backward_seconds(seconds, layer, input_gradient, recomputed=True)
    assert again[0] >= kept[0]
    # Nothing is recomputed for a layer that has no backward pass.
    assert (again[0] == kept[0] == 0) == (not trainable and not input_gradient)


@pytest.mark.parametrize(
    ("trainable", "input_gradient", "recomputed", "times"),
    [
        (True, True, False, 2), (False, True, False, 1), (False, False, False, 0),
        (True, True, True, 3), (False, True, True, 2), (False, False, True, 0),
    ],
)  # fmt: skip
def test_backward_over_forward_is_a_whole_number_for_products(trainable, input_gradient, recomputed, times):
    model = Analytic(cluster("h100"), efficiency=Efficiency(launch_s=0))
    layer = dataclasses.replace(product(4096), trainable=trainable)
    seconds = model.layer_seconds("any", layer, work([512, 65536]))
    backward_s = backward_seconds(seconds, layer, input_gradient, recomputed)
    assert backward_s == pytest.approx(times * seconds.forward_s)


def test_a_trained_layer_with_attention_passes_gradients_inside():
    layer = transformer(1024, 4096)
    seconds = Analytic(cluster("h100")).layer_seconds("any", layer, work(512))
    assert backward_seconds(seconds, layer, False) == seconds.input_s + seconds.weight_s


@given(
    st.sampled_from(["h100", "a800", "b200"]),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(0, 2**31),
    st.sampled_from([0, 1, 7, 100]),
)
def test_the_native_core_has_the_references_seconds_to_the_bit(name, tp, seed, count):
    model, rng = Analytic(cluster(name)), np.random.default_rng(seed)
    rows = rng.integers(0, 3, count) * rng.integers(0, 20_000, count).astype(np.float64)
    work = Work(rows, np.floor(rows * rows * rng.random(count)))
    whole = transformer(1024, 4096)
    partly = dataclasses.replace(whole, frozen_weights=whole.weights // 3, frozen_parameters=whole.parameters // 4)
    for layer in (whole, partly, head(32_000, 1024)):
        expected = reference_seconds(work, model._rates(layer, tp if layer.is_divided else 1))
        for found, column in zip(model.layer_seconds("backbone", layer, work, tp), expected, strict=True):
            np.testing.assert_array_equal(found, column)
        strided = Work(np.repeat(work.rows, 2)[::2], np.repeat(work.pairs, 2)[::2])  # which the reference computes
        for found, column in zip(model.layer_seconds("backbone", layer, strided, tp), expected, strict=True):
            np.testing.assert_array_equal(found, column)


def test_no_rows_take_no_time():
    seconds = Analytic(cluster("h100")).layer_seconds("any", transformer(1024, 4096), work([0, 512]))
    assert all(one[0] == 0 < one[1] for one in seconds)
    held = Analytic(cluster("h100")).layer_seconds("any", unused(10**6, 1024), work(512))
    assert all(one[0] == 0 for one in held)


def test_a_large_product_runs_at_its_share_of_the_peak():
    model = Analytic(cluster("h100"))
    layer, rows = product(16384), 1 << 20
    reached = 2 * layer.weights * rows / model.layer_seconds("any", layer, Work(np.array([1.0 * rows]), np.zeros(1)))[2]
    assert reached[0] == pytest.approx(989.4e12 * 0.8, rel=0.01)


def test_a_small_product_waits_for_memory():
    model = Analytic(cluster("h100"), efficiency=IDEAL)
    layer = product(8192)
    one_row = model.layer_seconds("any", layer, work(1)).forward_s[0]
    assert one_row == pytest.approx(2 * (8192**2 + 2 * 8192) / 3.35e12)


def test_ideal_times_by_hand():
    model = Analytic(cluster("h100"), efficiency=IDEAL)
    layer = transformer(4096, 16384, gated=False)
    rows, pairs = 8192.0, 8192 * 4096.0
    seconds = model.layer_seconds("any", layer, Work(np.array([rows]), np.array([pairs])), tp=2)
    product_s = 2 * layer.weights * rows / 2 / 989.4e12
    attention_s = 4 * 4096 * pairs / 2 / 989.4e12
    moved_s = 2 * rows * layer.activation_width / 2 / 3.35e12
    assert seconds.forward_s == pytest.approx(product_s + attention_s + 3 * moved_s)
    assert seconds.input_s == pytest.approx(product_s + 2.5 * attention_s + 3 * moved_s)
    assert seconds.weight_s == pytest.approx(product_s + 2 * moved_s)
    assert model.step_seconds(10**9) == pytest.approx(28e9 / 3.35e12)
    plain = Analytic(
        model.cluster, efficiency=IDEAL, moments=0
    )  # SGD: gradient and weight are read, the weight written.
    assert plain.on(model.cluster).step_seconds(10**9) == pytest.approx(12e9 / 3.35e12)


@pytest.mark.parametrize("name", GPUS)
def test_efficiency_grows_with_rows_and_widths(name):
    model = Analytic(cluster(name))

    def reached(rows, width):
        seconds = model.layer_seconds("any", product(width), Work(np.array([rows]), np.zeros(1)))
        return 2 * width**2 * rows / seconds.weight_s[0]

    by_rows = [reached(rows, 4096) for rows in (64.0, 512.0, 4096.0, 65536.0)]
    by_width = [reached(8192.0, width) for width in (256, 1024, 4096, 16384)]
    assert by_rows == sorted(by_rows) and by_width == sorted(by_width)
    assert by_rows[-1] < model.cluster.device.peak_flops["bf16"]


def test_tensor_parallel_communication_is_megatrons():
    """Two all-gathers and two reduce-scatters of rows x hidden, in bf16, a layer and pass."""
    model = Analytic(cluster("h100"), efficiency=IDEAL)
    one = float(gather_s(model.cluster, 2 * 2048 * 12288.0, range(8)))
    assert model.tensor_seconds(transformer(12288, 49152), work([2048, 0]), range(8)).tolist() == [4 * one, 0]
    # Of a single product the narrower side: what goes into an output layer, not its logits.
    assert model.tensor_seconds(head(50257, 12288), work(2048), range(8)).tolist() == [2 * one]


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_pieces_hide_messages_behind_products_but_for_the_first(pieces):
    """StepCCL (MMScale, section 6). Where messages take longer than products, what is longer stays."""
    layer, rows = Transformer(8192, 28672, 64, 8, gated=True).layer(), work(8192.0)
    fast = cluster("h100")
    slow = dataclasses.replace(fast, intra_node=dataclasses.replace(fast.intra_node, bytes_per_s=1e9))
    for where, is_hidden in ((fast, True), (slow, False)):
        whole_s, exposed_s = (
            float(Analytic(dataclasses.replace(where, tensor_pieces=number)).tensor_seconds(layer, rows, range(8))[0])
            for number in (1, pieces)
        )
        model = Analytic(where)
        product_s = float(product_seconds(rows.rows, model._rates(layer, 8))[0][0])
        latency_s = 4 * 7 * where.intra_node.latency_s
        if is_hidden:
            assert exposed_s == pytest.approx((whole_s - latency_s) / pieces + latency_s)
        else:
            longer_s = whole_s + (pieces - 1) * latency_s - (pieces - 1) / pieces * product_s
            assert exposed_s == pytest.approx(longer_s)
        assert exposed_s < whole_s


def test_an_output_layer_is_not_in_pieces():
    one, cut = (Analytic(dataclasses.replace(cluster("h100"), tensor_pieces=pieces)) for pieces in (1, 4))
    asked = head(50257, 12288), work(2048.0), range(8)
    assert cut.tensor_seconds(*asked).tolist() == one.tensor_seconds(*asked).tolist()


@pytest.mark.parametrize(
    ("shape", "tp", "gain"),
    [
        (Transformer(4096, 14336, 32, 8, gated=True), 4, 1.13),
        (Transformer(8192, 28672, 64, 8, gated=True), 4, 1.08),
        (Transformer(4096, 14336, 32, 8, gated=True), 8, 1.26),
        (Transformer(8192, 28672, 64, 8, gated=True), 8, 1.17),
    ],
)
def test_layers_are_faster_by_about_what_stepccl_is_said_to_gain(shape, tp, gain):
    """MMScale, Figure 22: 1.1 to 1.17 times at TP 4, 1.15 to 1.17 at TP 8. Llama 3 8B and 70B."""
    layer, rows = shape.layer(), work(8192.0)
    steps = []
    for pieces in (1, 4):
        model = Analytic(dataclasses.replace(cluster("a800"), tensor_pieces=pieces))
        passes = model.layer_seconds("any", layer, rows, tp)
        steps.append(float(sum(passes)[0] + 2 * model.tensor_seconds(layer, rows, range(tp))[0]))
    assert steps[0] / steps[1] == pytest.approx(gain, abs=0.006)


def test_tensor_parallel_bubbles_are_of_the_published_size():
    """Optimus section 2.2: 300 us each in the mean, for GPT-175B on Hopper; 8 ranks, 2 x 2,048 tokens."""
    model = Analytic(cluster("h100"))
    bubble_s = model.tensor_seconds(transformer(12288, 49152, gated=False), work(4096), range(8)) / 4
    assert bubble_s == pytest.approx(300e-6, rel=0.15)


def test_idle_experts_are_read_and_compute_nothing_more():
    """With many rows a mixture takes as long as its active weights do, with one row as long as all of them are read."""
    both = {"num_experts": 8, "experts_per_token": 2}
    mixture = Transformer(4096, 14336, 32, gated=True, biases=(), **both).layer()
    assert 1.9 < (mixture.weights - 4 * 4096**2) / (3 * 4096 * 14336) < 2.1 and mixture.idle_weights > 10**9
    active = dataclasses.replace(mixture, idle_weights=0)
    cost = Analytic(cluster("h100"))

    def forward_s(layer, rows):
        return float(cost.layer_seconds("x", layer, Work(np.array([rows]), np.array([0.0]))).forward_s[0])

    assert forward_s(mixture, 1e6) == pytest.approx(forward_s(active, 1e6), rel=0.01)
    bytes_per_s = cluster("h100").device.memory_bytes_per_s * cost.efficiency.memory
    read_s = 2 * (mixture.weights + mixture.idle_weights) / bytes_per_s
    assert forward_s(mixture, 1.0) > read_s > forward_s(active, 1.0)


def test_links_are_used_at_their_efficiency():
    model = Analytic(cluster("h100", num_nodes=2), efficiency=Efficiency(links=0.5))
    link = model.cluster.inter_node
    expected = [0, link.latency_s + 1e9 / (0.5 * link.bytes_per_s)]
    assert model.send_seconds(np.array([0, 1e9]), [0, 8]).tolist() == expected
    ranks = range(16)
    assert (
        model.gather_seconds(1e9, ranks) < model.all_reduce_seconds(1e9, ranks) <= 2 * model.gather_seconds(1e9, ranks)
    )
    inside, crossing = np.full((2, 16), 7e8), np.full((2, 16), 8e8)
    both = model.exchange_seconds(Moved(inside, crossing), ranks)
    assert both > model.exchange_seconds(Moved(inside[:, :8], 0 * crossing[:, :8]), range(8)) > 0


@pytest.mark.parametrize(
    ("trainable", "rows", "forward_ms", "backward_ms"),
    [
        (transformer(1024, 4096, gated=False), 2 * 577, 67.94, 205.09),
        (transformer(4096, 14336, 16), 2 * 2048, 400.87, 1184.65),
    ],
    ids=["clip", "mistral"],
)
def test_cornstarch_figure_3b(trainable, rows, forward_ms, backward_ms):
    """CLIP ViT-L/14 and Mistral-7B on an A40, batch 2, with recomputation; frozen CLIP has no backward.

    The frozen LLM's published 1.34 is less than recomputation and a gradient can take; Table 3 has 1.8 to 1.9 for it.
    """
    seconds = Analytic(cluster("a40")).layer_seconds("any", trainable, work(rows, rows / 2))
    ratio = backward_seconds(seconds, trainable, True, recomputed=True) / seconds.forward_s
    assert ratio == pytest.approx(backward_ms / forward_ms, rel=0.1)
    frozen = dataclasses.replace(trainable, trainable=False)
    assert backward_seconds(seconds, frozen, False, recomputed=True) == 0


@pytest.mark.parametrize(
    ("forward_ms", "backward_ms"),
    [
        (28.15, 51.30),
        (45.26, 84.89),
        (81.73, 157.12),
        (82.19, 157.51),
        (98.25, 189.11),
        (34.67, 63.77),
        (121.21, 235.23),
    ],
)  # fmt: skip
def test_cornstarch_table_3(forward_ms, backward_ms):
    """Stages of a frozen Llama of 8B behind a trained projector, on A40 with tensor parallelism of 2."""
    frozen = transformer(4096, 14336, 16, trainable=False)
    model = Analytic(cluster("a40"))
    seconds = model.layer_seconds("any", frozen, work(2500, 2500), tp=2)
    tensor_s = model.tensor_seconds(frozen, work(2500), range(2))
    backward_s = backward_seconds(seconds, frozen, True, recomputed=True) + 2 * tensor_s
    assert backward_s / (seconds.forward_s + tensor_s) == pytest.approx(backward_ms / forward_ms, rel=0.15)


def test_bad_precision():
    with pytest.raises(ArgumentError, match="device 'a40' has no peak in 'fp8'; it has one in bf16, fp16"):
        Analytic(cluster("a40"), "fp8")
    a40 = cluster("a40")
    with pytest.raises(ArgumentError, match="precision 'int8' is not known; known are fp64, fp32"):
        Analytic(dataclasses.replace(a40, device=dataclasses.replace(a40.device, peak_flops={"int8": 3e14})), "int8")


def test_efficiencies_are_of_devices_in_the_catalogue():
    assert set(EFFICIENCY) <= set(DEVICES)


def test_a_cpu_computes_in_what_was_measured(monkeypatch):
    figures = CpuFigures(2, {"fp32": 6e10, "fp64": 3e10}, 2**33, 1e10, 1e9, 1e-4)
    monkeypatch.setattr("motet.cost.catalogue.measured_cpu", lambda: figures)
    model = Analytic(cluster("cpu"), "fp64")
    half = Analytic(cluster("cpu"), "fp32")
    layer, given = transformer(1024, 4096), work(512, 512)
    assert model.layer_seconds("any", layer, given).forward_s > half.layer_seconds("any", layer, given).forward_s
    assert model.step_seconds(10) == 2 * half.step_seconds(10)
