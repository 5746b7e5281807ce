"""Profiles, what is fitted to them, and the cost model that interpolates between their points."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.cluster import Cluster, Device, Link
from motet.core.errors import ArgumentError, UserError
from motet.core.exchange import Moved
from motet.core.spec import Attention, Layer, ModelSpec, Module, Stack
from motet.cost.catalogue import cluster as of_catalogue
from motet.cost.fit import PassOperations, Surface, fit_curve, relative_error
from motet.cost.model import Beyond, Runs, Work
from motet.cost.phases import phase_times
from motet.cost.profile import (
    LayerTimes,
    MessageTimes,
    ModuleTimes,
    OptimizerTimes,
    Points,
    Profile,
    RunPoints,
    RunTimes,
    read_profile,
    unshared,
)
from motet.cost.profiled import Profiled
from motet.cost.source import cost_model
from motet.simulate.predict.beyond_profile import extrapolated, guesses

# Seconds of a layer: a constant, a row, a pair; of backward twice that for the input, and of the weights no pair.
CONSTANT, ROW, PAIR = 1e-5, 1e-6, 1e-9
LINK = Link(1e9, 1e-6)
DEVICE = Device("cpu", {"fp32": 1e10}, 2**30, 1e9)
GRID = tuple(((count, length),) for length in (16, 64, 256) for count in (1, 4, 16))
HELD_OUT = (((3, 40),), ((2, 128), (5, 20)), ((1, 200),))


def seconds(rows, pairs):
    return CONSTANT + ROW * rows + PAIR * pairs


def points(batches, attends):
    rows = [sum(count * length for count, length in batch) for batch in batches]
    pairs = [sum(count * length**2 for count, length in batch) if attends else 0 for batch in batches]
    forward = [seconds(r, p) for r, p in zip(rows, pairs)]
    return Points(
        rows=rows,
        pairs=pairs,
        forward_s=forward,
        input_s=[2 * second for second in forward],
        weight_s=[ROW * r for r in rows],
    )


def layer_times(kind, weights, attends, tp=1):
    return LayerTimes(kind=kind, weights=weights, tp=tp, grid=points(GRID, attends), held_out=points(HELD_OUT, attends))


def message(kind, num_ranks=4, num_nodes=1, latency_s=1e-4, bytes_per_s=1e9):
    sizes = [1e3, 1e5, 1e7]
    return MessageTimes(
        kind=kind,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        size_bytes=sizes,
        seconds=[latency_s + size / bytes_per_s for size in sizes],
    )


@pytest.fixture
def profile():
    layers = (
        layer_times("embedding", 0, attends=False),
        layer_times("attention", 100, attends=True),
        layer_times("attention", 100, attends=True, tp=4),
        layer_times("head", 50, attends=False),
    )
    return Profile(
        recipe="demo",
        device="cpu",
        precision="float32",
        torch="2.13.0",
        measured_at="2026-01-01T00:00:00Z",
        num_ranks=4,
        modules=(ModuleTimes(name="backbone", grid=GRID, held_out=HELD_OUT, layers=layers),),
        messages=tuple(message(kind) for kind in ("gather", "reduce_scatter", "all_reduce", "exchange", "send")),
        optimizer=OptimizerTimes(num_parameters=[1e3, 1e6], seconds=[1e-6 + 1e-6, 1e-6 + 1e-3]),
    )


@pytest.fixture
def model():
    layers = (
        Stack(Layer("embedding", 0, 10, 8, 1)),
        Stack(Layer("attention", 100, 100, 8, 8, Attention(8, 8)), 3),
        Stack(Layer("head", 50, 50, 8, 8, targets_only=True)),
    )
    return ModelSpec("demo", (Module("backbone", layers),), ())


def sent(size_bytes, num_ranks):
    """By the first of so many ranks of a node to the second, in one microbatch."""
    inside, none = np.zeros((2, 1, 2, num_ranks))
    inside[0, 0, 0] = inside[0, 1, 1] = size_bytes
    return Moved(inside, none)


def cluster(ranks_per_node=8, num_nodes=2):
    return Cluster(DEVICE, num_nodes, ranks_per_node, LINK, LINK)


def attention(profile, rows, pairs, **changed):
    layer = Layer("attention", changed.pop("weights", 100), 100, 8, 8, Attention(8, 8))
    work = Work(np.array(rows, dtype=float), np.array(pairs, dtype=float))
    return Profiled(profile, cluster()).layer_seconds(changed.pop("module", "backbone"), layer, work, **changed)


@given(st.floats(0, 5), st.floats(1e-3, 1e3), st.floats(0, 1))
def test_a_fit_finds_the_coefficients_that_made_the_seconds(constant_ns, linear_ns, quadratic_ns):
    lengths = np.array([1, 3, 10, 30, 100, 300, 1000.0])
    measured = (constant_ns + linear_ns * lengths + quadratic_ns * lengths**2) / 1e9
    found = fit_curve(measured, lengths, lengths**2)
    assert np.allclose(found.seconds(lengths, lengths**2), measured, rtol=1e-6)
    assert found.linear_ns == pytest.approx(linear_ns, rel=1e-3, abs=1e-6)


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=8))
def test_no_coefficient_is_negative_whatever_was_measured(measured):
    lengths = np.arange(1.0, len(measured) + 1)
    found = fit_curve(measured, lengths, lengths**2)
    assert min(found.constant_ns, found.linear_ns, found.quadratic_ns) >= 0


def test_a_fit_weighs_errors_relative_to_what_was_measured():
    # The best constant for 1 and 100 ns in relative terms is near 1; in absolute terms it would be 50.
    found = fit_curve([1e-9, 1e-7], [0.0, 0.0])
    assert found.constant_ns == pytest.approx(1.01, rel=0.01)


def test_relative_error_leaves_out_what_took_no_time():
    error = relative_error([1.1, 2.0, 5.0], [1.0, 2.0, 0.0])
    assert (error.mean, error.worst) == (pytest.approx(0.05), pytest.approx(0.1))
    assert relative_error([1.0], [0.0]).worst == 0


def test_fit_refuses_columns_of_unequal_length():
    with pytest.raises(ArgumentError, match="2 seconds"):
        fit_curve([1.0, 2.0], [1.0])


def test_interpolation_goes_through_the_points_and_is_linear_between_and_beyond(profile):
    grid = profile.modules[0].layers[1].grid
    found = attention(profile, grid.rows, grid.pairs)
    assert np.allclose(found.forward_s, grid.forward_s)
    assert np.allclose(found.input_s, grid.input_s)
    assert np.allclose(found.weight_s, grid.weight_s)
    # Seconds that are linear in rows and pairs are met everywhere: between lines, far beyond, and below.
    for rows, pairs in ((500, 500 * 100), (10**6, 10**6 * 64), (4096, 4096 * 4096), (5, 25)):
        assert attention(profile, [rows], [pairs]).forward_s[0] == pytest.approx(seconds(rows, pairs), rel=1e-9)


MORE, LESS = 3e-9, -2e-10
"""What a pair takes more in short runs, and in long ones."""


def with_runs(profile):
    """A profile that has measured runs of 16 and of 64 rows of items of 64 and 256."""
    size, seen = [16, 64, 16, 64], [32, 32, 128, 128]
    more = np.array([MORE, LESS, MORE, LESS])
    pairs, none = np.full(4, 1e4), np.zeros(4)
    points = RunPoints(
        length=[64, 64, 256, 256], rows=size, pairs=pairs, keys=seen,
        forward_s=1e-3 + more * pairs, input_s=none + 1e-3, whole_forward_s=none + 1e-3, whole_input_s=none + 1e-3,
    )  # fmt: skip
    first, layer, *rest = profile.modules[0].layers
    layers = (first, layer.model_copy(update={"runs": RunTimes(grid=points)}), *rest)
    return profile.model_copy(update={"modules": (profile.modules[0].model_copy(update={"layers": layers}),)})


def of_runs(profile, number, rows, pairs, tp=1):
    """Forward seconds of a layer on items that are shared, over those of whole ones."""
    layer = Layer("attention", 100, 100, 8, 8, Attention(8, 8))
    rows, pairs = np.array([float(rows)]), np.array([float(pairs)])
    works = Work(rows, pairs, Runs(np.array([float(number)]), rows, pairs)), Work(rows, pairs)
    shared, whole = (Profiled(profile, cluster()).layer_seconds("backbone", layer, work, tp) for work in works)
    assert (shared.input_s, shared.weight_s) == (whole.input_s, whole.weight_s)
    return shared.forward_s[0] - whole.forward_s[0]


def test_runs_of_shared_items_take_what_was_measured_more_or_less(profile):
    measured = with_runs(profile)
    pairs = 64 * 32
    assert of_runs(measured, 4, 64, pairs) == pytest.approx(MORE * pairs)
    assert of_runs(measured, 1, 64, pairs) == pytest.approx(LESS * pairs)
    assert of_runs(measured, 2, 64, pairs) == pytest.approx((MORE + LESS) / 2 * pairs)  # Of 32 rows, between both.
    assert of_runs(measured, 64, 64, pairs) == pytest.approx(MORE * pairs)  # Of one row: as the shortest.
    assert of_runs(measured, 4, 64, pairs, tp=4) == pytest.approx(MORE * pairs / 4)
    assert of_runs(measured, 0, 64, pairs) == pytest.approx(LESS * pairs)  # How many is not known: the least.
    assert of_runs(measured, 0, 0, 0) == 0
    assert of_runs(profile, 4, 64, pairs) == 0  # Of a profile without runs, their share.


def test_a_profile_with_runs_is_written_and_read(profile, tmp_path):
    with_runs(profile).write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == with_runs(profile)


def test_work_without_rows_takes_no_time(profile):
    assert attention(profile, [0.0, 16.0], [0.0, 256.0]).forward_s[0] == 0


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1e3), st.floats(0, 10)), min_size=1, max_size=12))
def test_no_surface_is_ever_negative_or_falls_beyond_its_grid(measured):
    rows, keys, values = zip(*measured)
    surface = Surface(rows, [r * k for r, k in zip(rows, keys)], values)
    ask = np.array([0.0, 0.5, 1e4, 2e4])
    found = surface(ask, ask * 7)
    assert found[0] == 0 and (found >= 0).all() and np.isfinite(found).all()
    assert found[3] >= found[2] or len({round(k, 6) for k in keys}) > 1


def test_one_line_without_attention_is_piecewise_linear():
    surface = Surface([10, 20, 40], [0, 0, 0], [1.0, 2.0, 8.0])
    assert surface(np.array([15.0, 30.0, 80.0]), np.zeros(3)).tolist() == [1.5, 5.0, 20.0]


def noisy(rows, keys, values) -> Surface:
    return Surface(rows, [r * k for r, k in zip(rows, keys)], values, PassOperations(row=200, pair=32))


def test_beyond_the_points_seconds_grow_no_faster_than_operations():
    """Lines whose keys are close differ by noise; without bounds, a row of 4,096 keys would take 400 times as long."""
    found, free = (
        make(np.array([64.0]), np.array([64.0 * 4096]))[0]
        for make in (noisy([64, 64], [8, 9], [1.0, 1.1]), Surface([64, 64], [64 * 8, 64 * 9], [1.0, 1.1]))
    )
    assert free > 400
    most = 1.1 * (200 + 2 * 32 * 4096) / (200 + 2 * 32 * 9)
    assert found == pytest.approx(min(free, most)) and found < free


def test_rows_beyond_the_points_take_no_longer_than_the_mean_row():
    ask = np.array([80.0]), np.zeros(1)
    assert Surface([10, 20, 40], [0, 0, 0], [1.0, 2.0, 8.0])(*ask).tolist() == [20.0]
    assert noisy([10, 20, 40], [0, 0, 0], [1.0, 2.0, 8.0])(*ask).tolist() == [16.0]
    assert noisy([10, 20, 40], [0, 0, 0], [1.0, 1.5, 2.0])(*ask).tolist() == [3.0]


@given(st.integers(1, 10**5), st.integers(0, 10**5))
def test_bounds_shorten_what_is_beyond_the_points_and_nothing_else(rows, keys):
    grid = [16, 64, 256, 16, 64, 256], [4, 4, 4, 32, 32, 32], [1.0, 2.0, 9.0, 1.5, 4.0, 21.0]
    bounded, free = noisy(*grid), Surface(grid[0], [r * k for r, k in zip(*grid[:2])], grid[2])
    ask = np.array([float(rows)]), np.array([float(rows) * keys])
    assert bounded(*ask)[0] <= free(*ask)[0] * (1 + 1e-9)
    if rows <= 256 and keys <= 32:
        assert bounded(*ask)[0] == free(*ask)[0]


def test_how_far_work_is_beyond_what_was_measured(profile):
    cost, layer = Profiled(profile, cluster()), Layer("attention", 100, 100, 8, 8, Attention(8, 8))

    def beyond(rows, keys):
        return cost.beyond("backbone", layer, Work(np.array([1.0, rows]), np.array([1.0, rows * keys])))

    # 16 items of 256 are the most rows, and 256 the most keys.
    assert beyond(4096.0, 256.0) == (1.0, 1.0, 1.0)
    assert beyond(8192.0, 64.0) == (2.0, 0.25, pytest.approx((200 + 32 * 64) / (200 + 32 * 256)))
    assert beyond(1.0, 1024.0) == (1 / 4096, 4.0, pytest.approx((200 + 32 * 1024) / (200 + 32 * 256)))
    assert cost.beyond("backbone", layer, Work(np.zeros(2), np.zeros(2))) == Beyond()


def test_what_is_beyond_is_said_and_a_guess_is_refused():
    said = {"image": Beyond(3.0, 1.0, 1.0), "audio": Beyond(0.5, 1.5, 1.2), "backbone": Beyond(1.05, 1.0, 1.0)}
    first, second = extrapolated(said)
    assert first.startswith("Beyond the profile: a microbatch of image has 3 times the rows of the profile;")
    assert "a microbatch of audio has 1.5 times the keys a row of the profile" in second
    assert guesses(said) == ""
    assert "'image' takes would be a guess: a microbatch has 20 times the rows of" in guesses({"image": Beyond(20.0)})
    assert "9 times the keys a row" in guesses({"audio": Beyond(1.0, 9.0, 2.5)})


def test_what_was_not_measured_is_named(profile):
    with pytest.raises(UserError, match="'attention' of 100 weights in module 'image'"):
        attention(profile, [1], [1], module="image")
    with pytest.raises(UserError, match="of 101 weights"):
        attention(profile, [1], [1], weights=101)
    with pytest.raises(UserError, match="torchrun with 2 ranks"):
        attention(profile, [1], [1], tp=2)
    with pytest.raises(UserError, match="exchange between ranks of several nodes"):
        Profiled(profile, cluster(ranks_per_node=2)).exchange_seconds(sent(1.0, 4), range(4))


@pytest.mark.parametrize(
    ("left_out", "degrees"), [(unshared("backbone", "7 heads", 2), [2]), (unshared("backbone", "qkv"), [2, 8])]
)
def test_what_cannot_be_measured_is_not_asked_for(left_out, degrees, profile):
    """Under torchrun `motet profile` would leave it out again."""
    tried = profile.model_copy(update={"left_out": (unshared("image", "other"), left_out)})
    why = left_out.rpartition(": ")[2]
    for tp in (2, 8):
        cannot = rf"at tensor parallelism {tp}, which `motet profile` cannot take \({why}\): keep it at 1, or leave out"
        with pytest.raises(UserError, match=cannot if tp in degrees else f"torchrun with {tp} ranks"):
            attention(tried, [1], [1], tp=tp)


def test_what_ranks_do_not_share_takes_as_long_as_on_one(profile):
    cost, head, one_row = Profiled(profile, cluster()), Layer("head", 50, 50, 8, 8), Work(np.ones(1), np.ones(1))
    assert cost.layer_seconds("backbone", head, one_row, tp=4) == cost.layer_seconds("backbone", head, one_row)


def test_messages_are_those_measured_and_carried_over_to_other_ranks(profile):
    cost = Profiled(profile, cluster())
    assert cost.send_seconds(np.array([1e6]), (0, 1))[0] == pytest.approx(1e-4 + 1e-3)
    assert cost.gather_seconds(1e6, range(4)) == pytest.approx(1e-4 + 1e-3)
    # A ring of 8 has 7 steps instead of 3, and each rank receives 7/8 instead of 3/4 of the bytes.
    assert cost.all_reduce_seconds(1e6, range(8)) == pytest.approx(1e-4 * 7 / 3 + 1e-3 * (7 / 8) / (3 / 4))
    assert cost.exchange_seconds(sent(1e6, 2), range(2))[0] == pytest.approx(1e-4 / 3 + 1e-3)
    assert cost.reduce_scatter_seconds(1e6, range(4)) == cost.gather_seconds(1e6, range(4))
    assert cost.gather_seconds(1e6, [3]) == 0
    assert cost.step_seconds(0) == 0
    assert cost.step_seconds(10**7) == pytest.approx(1e-2, rel=1e-3)


def test_without_fsdp_a_layer_takes_no_hooks(profile):
    """Of forward, and of backward for the weights; never below 0."""
    (module,) = profile.modules
    hooked = [layer.model_copy(update={"hooks_s": (CONSTANT, 1.0)}) for layer in module.layers]
    with_hooks = profile.model_copy(update={"modules": (module.model_copy(update={"layers": tuple(hooked)}),)})
    cost, layer = Profiled(with_hooks, cluster()), Layer("attention", 100, 100, 8, 8, Attention(8, 8))
    work = Work(np.array([64.0]), np.array([64.0 * 16]))
    found, less = (each.layer_seconds("backbone", layer, work) for each in (cost, cost.unwrapped()))
    assert found.forward_s == attention(profile, [64.0], [64.0 * 16]).forward_s
    assert less.forward_s == pytest.approx(found.forward_s - CONSTANT)
    assert less.input_s == found.input_s and less.weight_s == 0
    assert cost.unwrapped().on(cluster()).layer_seconds("backbone", layer, work) == less
    assert Profiled(profile, cluster()).unwrapped().layer_seconds("backbone", layer, work) == found


def test_where_weights_wait_what_learns_takes_what_that_adds(profile):
    (module,) = profile.modules
    waiting = [layer.model_copy(update={"waits_s": (1.0, 2.0, -CONSTANT)}) for layer in module.layers]
    waits = profile.model_copy(update={"modules": (module.model_copy(update={"layers": tuple(waiting)}),)})
    cost, layer = Profiled(waits, cluster()), Layer("attention", 100, 100, 8, 8, Attention(8, 8))
    work = Work(np.array([64.0]), np.array([64.0 * 16]))
    plain, more = (cost.unwrapped(waits=split).layer_seconds("backbone", layer, work) for split in (False, True))
    assert plain == Profiled(profile, cluster()).layer_seconds("backbone", layer, work)
    added = [float(one[0] - other[0]) for one, other in zip(more, plain, strict=True)]
    assert added == pytest.approx([1.0, 2.0, -CONSTANT])
    assert cost.unwrapped(waits=True).layer_seconds("backbone", replace(layer, trainable=False), work) == plain


def test_a_message_takes_of_the_ranks_what_was_measured(profile):
    """Whichever node they are of; nothing, if it was not measured, as on GPUs."""
    computing = profile.model_copy(update={"messages": (*profile.messages, message("call"))})
    sizes = np.array([[1e6, 0.0]])
    assert not Profiled(profile, cluster()).call_seconds(sizes, (0, 1)).any()
    for ranks in ((0, 1), (0, 8)):
        found = Profiled(computing, cluster()).call_seconds(sizes, ranks)
        assert found.tolist() == [[pytest.approx(1e-4 + 1e-3), 0.0]]


def test_a_rank_with_some_of_the_tensors_takes_their_share_of_what_a_tensor_costs(profile):
    cost = Profiled(profile, cluster())
    whole_s = cost.step_seconds(10**6)
    assert cost.step_seconds(10**6 // 2, 0.5) == pytest.approx(whole_s / 2)
    assert cost.step_seconds(10**6 // 2) == pytest.approx(whole_s / 2 + 0.5e-6)


def test_messages_between_as_many_ranks_take_what_was_measured_however_uneven(profile):
    uneven = MessageTimes(kind="send", num_ranks=2, num_nodes=1, size_bytes=[1e3, 1e4, 1e6], seconds=[1e-4, 5e-4, 6e-4])
    cost = Profiled(profile.model_copy(update={"messages": (uneven,)}), cluster())
    assert np.allclose(cost.send_seconds(np.array([1e3, 1e4, 1e6]), (0, 1)), uneven.seconds)
    assert cost.send_seconds(np.array([5.5e3]), (0, 1))[0] == pytest.approx(3e-4)


@given(st.integers(2, 16), st.floats(1, 1e8))
def test_messages_take_longer_the_larger_and_among_more_ranks(num_ranks, size_bytes):
    found = Profile(
        recipe="demo",
        device="cpu",
        precision="float32",
        torch="",
        measured_at="",
        num_ranks=4,
        modules=(),
        messages=[message("all_reduce")],
    )
    cost = Profiled(found, cluster(ranks_per_node=32))
    seconds = cost.all_reduce_seconds(size_bytes, range(num_ranks))
    assert 0 < seconds <= cost.all_reduce_seconds(2 * size_bytes, range(num_ranks))
    assert seconds <= cost.all_reduce_seconds(size_bytes, range(num_ranks + 1))


def test_tensor_parallel_layers_sum_their_rows_twice_a_pass(profile):
    cost, work = Profiled(profile, cluster()), Work(np.array([1000.0]), np.array([0.0]))
    layer = Layer("attention", 100, 100, 8, 8, Attention(8, 8))
    assert cost.tensor_seconds(layer, work, range(4))[0] == pytest.approx(2 * (1e-4 + 1000 * 8 * 4 / 1e9))
    assert cost.tensor_seconds(layer, work, [0])[0] == 0
    assert cost.tensor_seconds(Layer("head", 50, 50, 8, 8), work, range(4))[0] == 0


def test_a_phase_costs_what_its_layers_do_as_the_model_trains(profile, model):
    times = phase_times(profile, model, "backbone")
    # The embedding has nothing before it that learns; three layers give both gradients; the head counts by targets.
    assert times.linear_ps == pytest.approx(1e12 * ROW * (2 + 3 * 4), rel=1e-3)
    assert times.quadratic_ps == pytest.approx(1e12 * PAIR * 3 * 3, rel=1e-3)
    assert times.target_ps == pytest.approx(1e12 * ROW * 4, rel=1e-3)
    assert times.held_out.worst < 1e-3
    for num_recomputed in (1, 3):
        recomputed = phase_times(profile, model, "backbone", num_recomputed)
        assert recomputed.linear_ps - times.linear_ps == pytest.approx(1e12 * ROW * num_recomputed, rel=1e-3)


def test_frozen_layers_have_no_backward(profile, model):
    frozen = [
        Stack(Layer(s.layer.kind, s.layer.weights, 1, 8, 8, s.layer.attention, trainable=False))
        for s in model.modules[0].stacks[:2]
    ]
    times = phase_times(profile, ModelSpec("demo", (Module("backbone", tuple(frozen)),), ()), "backbone")
    assert times.linear_ps == pytest.approx(1e12 * ROW * 2, rel=1e-3)


def test_padded_phases_count_each_item_as_long_as_the_longest(profile, model):
    padded = ModelSpec("demo", (Module("backbone", model.modules[0].stacks, padded=True),), ())
    uniform = phase_times(profile, padded, "backbone")
    assert uniform.linear_ps == phase_times(profile, model, "backbone").linear_ps


def test_a_profile_of_another_model_is_refused(profile, model):
    other = ModelSpec("other", (Module("backbone", (Stack(Layer("attention", 7, 7, 8, 8)),)),), ())
    with pytest.raises(UserError, match="of another model: module 'backbone' has a layer 'attention' of 7 weights"):
        phase_times(profile, other, "backbone")
    image = ModelSpec("other", (Module("image", model.modules[0].stacks),), ())
    with pytest.raises(UserError, match="no module 'image', only 'backbone'"):
        phase_times(profile, image, "image")


def windowed(profile, model):
    """The profile and the model with a window in two of three layers, where a layer takes half as long."""
    layers = list(profile.modules[0].layers)
    short = layers[1].grid.model_copy(update={"forward_s": [one / 2 for one in layers[1].grid.forward_s]})
    layers[1:2] = [
        layers[1].model_copy(update={"reach": (True, 8, False), "grid": short}),
        layers[1].model_copy(update={"reach": (True, 0, False)}),
    ]
    module = profile.modules[0].model_copy(update={"layers": tuple(layers)})
    of_windows = Layer("attention", 100, 100, 8, 8, Attention(8, 8, causal=True, window=8))
    of_all = replace(of_windows, attention=Attention(8, 8, causal=True))
    first, _, last = model.modules[0].stacks
    stacks = (first, Stack(of_windows, 2), Stack(of_all), last)
    return profile.model_copy(update={"modules": (module,)}), ModelSpec("demo", (Module("backbone", stacks),), ())


def test_layers_of_different_windows_have_seconds_of_their_own(profile, model):
    measured, alternating = windowed(profile, model)
    times = phase_times(measured, alternating, "backbone")
    # As in the model of equal layers, less half of the forward pass of two.
    assert times.linear_ps == pytest.approx(1e12 * ROW * (2 + 3 * 4 - 1), rel=1e-3)
    assert times.quadratic_ps == pytest.approx(1e12 * PAIR * (3 * 3 - 1), rel=1e-3)
    work = Work(np.array([64.0]), np.array([4096.0]))
    two = [stack.layer for stack in alternating.modules[0].stacks[1:3]]
    cost = Profiled(measured, cluster())
    short, whole = (cost.layer_seconds("backbone", layer, work).forward_s[0] for layer in two)
    assert short == pytest.approx(whole / 2)


def test_a_profile_that_says_no_windows_is_for_models_of_one(profile, model):
    _, alternating = windowed(profile, model)
    with pytest.raises(UserError, match="one layer for all 'attention' of 100 weights in module 'backbone', whose"):
        phase_times(profile, alternating, "backbone")
    first, of_windows, *_ = alternating.modules[0].stacks
    alike = ModelSpec("demo", (Module("backbone", (first, of_windows)),), ())
    assert phase_times(profile, alike, "backbone").linear_ps == pytest.approx(1e12 * ROW * (2 + 2 * 4), rel=1e-3)


def test_a_window_that_was_not_measured_is_named(profile, model):
    measured, _ = windowed(profile, model)
    other = Layer("attention", 100, 100, 8, 8, Attention(8, 8, causal=True, window=9))
    with pytest.raises(UserError, match="has a layer 'attention' of 100 weights and a window of 9 rows, of which"):
        phase_times(measured, ModelSpec("other", (Module("backbone", (Stack(other),)),), ()), "backbone")
    with pytest.raises(UserError, match="no times of layer 'attention' of 100 weights and a window of 9 rows in"):
        Profiled(measured, cluster()).layer_seconds("backbone", other, Work(np.ones(1), np.ones(1)))


def test_a_profile_is_read_as_it_was_written(profile, tmp_path):
    profile.write(tmp_path / "deep" / "profile.json")
    assert read_profile(tmp_path / "deep" / "profile.json") == profile


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stored: stored.update(format=2), "format"),
        (lambda stored: stored.pop("device"), "device"),
        (lambda stored: stored.update(extra=1), "extra"),
        (lambda stored: stored["modules"][0]["layers"][0]["grid"]["rows"].pop(), "equally many"),
        (lambda stored: stored["modules"][0]["grid"].pop(), "a point for each batch"),
        (lambda stored: stored["messages"][0].update(seconds=[-1, 0, 0]), "seconds"),
        (lambda stored: stored["messages"][0]["seconds"].pop(), "size_bytes and seconds must be equally many"),
        (lambda stored: stored["messages"][0].update(size_bytes=[0, 0, 0]), "and a size above 0"),
        (lambda stored: stored["optimizer"]["seconds"].pop(), "num_parameters and seconds must be equally many"),
    ],
)
def test_a_wrong_file_is_one_sentence(profile, tmp_path, change, said):
    stored = json.loads(profile.model_dump_json())
    change(stored)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(UserError, match=said) as raised:
        read_profile(path)
    assert str(raised.value).startswith(f"{path} is no profile of format 1") and "\n" not in str(raised.value)


def test_what_hides_messages_is_not_for_a_profile(profile, tmp_path):
    profile.write(tmp_path / "p.json")
    assert isinstance(cost_model(cluster(), "fp32", tmp_path / "p.json"), Profiled)
    with pytest.raises(
        UserError, match="tensor_pieces = 4 hides those of tensor parallelism behind products, which no"
    ):
        cost_model(replace(cluster(), tensor_pieces=4), "fp32", tmp_path / "p.json")


def test_what_another_device_took_is_not_planned_with(profile, tmp_path):
    profile.model_copy(update={"device": "cpu, 2 threads a rank", "precision": "bfloat16"}).write(tmp_path / "cpu.json")
    profile.model_copy(update={"device": "NVIDIA H200", "precision": "bfloat16"}).write(tmp_path / "gpu.json")
    assert isinstance(cost_model(of_catalogue("h200"), "bf16", tmp_path / "gpu.json", any_device=False), Profiled)
    assert isinstance(cost_model(of_catalogue("h100"), "bf16", tmp_path / "cpu.json"), Profiled)
    for name, measured in (
        ("cpu", "cpu, 2 threads a rank, and .* of h100: .* --cluster cpu"),
        ("gpu", "NVIDIA H200, "),
    ):
        with pytest.raises(UserError, match=measured):
            cost_model(of_catalogue("h100"), "bf16", tmp_path / f"{name}.json", any_device=False)


def test_a_precision_without_a_peak_is_one_sentence(profile, tmp_path):
    profile.model_copy(update={"precision": "bfloat16"}).write(tmp_path / "p.json")
    device = replace(cluster().device, name="small", peak_flops={"fp32": 1e12})
    with pytest.raises(UserError, match=r"computes in bf16, and small has no peak in it \(it has fp32\)"):
        cost_model(replace(cluster(), device=device), "bf16", tmp_path / "p.json")


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"format": ' + "1" * 5000 + "}", '{"format": NaN}', "\x00"])
def test_a_damaged_file_is_one_sentence(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"profile\.json: (is|nests|has) ") as raised:
        read_profile(path)
    assert "\n" not in str(raised.value)


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(UserError, match="motet profile RECIPE"):
        read_profile(tmp_path / "profile.json")


def test_a_file_that_cannot_be_written_is_named(profile, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        profile.write(tmp_path / "file" / "profile.json")


def test_a_surface_needs_rows():
    with pytest.raises(ArgumentError, match="a point that has rows"):
        Surface([0.0], [0.0], [1.0])
    assert Surface([0.0, 2.0], [0.0, 0.0], [1.0, 3.0])(np.array([4.0]), np.zeros(1)).tolist() == [6.0]


def test_noise_between_points_of_about_as_many_rows_is_no_slope():
    surface = Surface([100, 200, 1000, 1010, 1020], [0] * 5, [1.0, 2.0, 9.0, 10.0, 11.0])
    found = surface(np.array([1010.0, 2020.0]), np.zeros(2))
    assert found[0] == pytest.approx(10.0)
    assert found[1] == pytest.approx(10.0 + 1010 * 8 / 810)
