"""Items of several segments cost what their segments cost one by one: in operations, in time, and in the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import Packed, PhaseCosts, assign
from motet.balance.step_costs import LengthWork
from motet.core.errors import ArgumentError, UserError
from motet.core.item_segments import ItemSegments
from motet.core.spec import Module
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.flops import batch_flops, pairs_of, work_of
from motet.cost.operations import Operations
from motet.cost.phases import PhaseTimes, Picoseconds
from motet.planner.data_parallel.loads import load_alone
from unit.cost.test_operations import model
from unit.planner.jobs import job

ITEMS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), min_size=1, max_size=8)


def images(items, *, split=False) -> BatchLengths:
    """One example with these items, or with a segment an item."""
    listed = [[segment] for each in items for segment in each] if split else items
    segments = ItemSegments.of(listed)
    nothing = np.zeros(len(listed), dtype=np.int64)
    column = ItemLengths(nothing, segments.summed(segments.length), nothing, None if split else segments)
    none = ItemLengths(*(np.zeros(0, np.int64) for _ in range(3)))
    return BatchLengths(np.array([9]), np.array([3]), np.zeros(1, np.int32), {"image": column, "audio": none})


def with_whole_layer(spec):
    """The last attention of the image encoder sees whole items."""
    (image,) = (module for module in spec.modules if module.name == "image")
    layers = list(image.layers)
    index = max(i for i, layer in enumerate(layers) if layer.attention)
    layers[index] = replace(layers[index], attention=replace(layers[index].attention, whole=True))
    others = [Module.of("image", layers) if module is image else module for module in spec.modules]
    return replace(spec, modules=tuple(others))


@given(ITEMS)
def test_operations_of_an_item_are_those_of_its_segments(items):
    spec = model()
    of_items = Operations(spec)(images(items))["image"]
    of_segments = Operations(spec)(images(items, split=True))["image"]
    assert of_items.tolist() == ItemSegments.of(items).summed(of_segments).tolist()
    assert batch_flops(spec, images(items)) == batch_flops(spec, images(items, split=True))


@given(ITEMS)
def test_layers_that_attend_over_whole_items_do_so(items):
    spec = with_whole_layer(model())
    work, lengths = Operations(spec)(images(items))["image"], images(items)
    assert work.sum() == batch_flops(spec, lengths)["image"]
    expected = Operations(model())(lengths)["image"].astype(object)
    layer = next(layer for layer in spec.module("image").layers if layer.attention and layer.attention.whole)
    for item, segments in enumerate(items):
        rows = [int(layer.rows(np.array([segment]))[0]) for segment in segments]
        pairs = [int(pairs_of(layer.attention, np.array([r]))[0]) for r in (sum(rows), *rows)]
        # Two products forward and four backward of each pair.
        expected[item] += 3 * 4 * layer.attention.width * (pairs[0] - sum(pairs[1:]))
    assert work.tolist() == expected.tolist()


@given(ITEMS, st.integers(1, 3))
def test_work_of_microbatches_is_that_of_their_segments(items, count):
    segments = ItemSegments.of(items)
    microbatch = np.arange(len(items)) % count
    for layer in model().module("image").layers:
        found = work_of(layer, segments.summed(segments.length), microbatch, count, segments=segments, num_targets=None)
        apart = work_of(layer, segments.length, np.repeat(microbatch, segments.counts), count)
        np.testing.assert_array_equal(found.rows, apart.rows)
        np.testing.assert_array_equal(found.pairs, apart.pairs)


@given(ITEMS)
def test_a_rank_keeps_for_an_item_what_its_segments_keep(items):
    """Each has rows of its own, such as a class row."""
    on_rank = job(model())

    def kept_bytes(lengths):
        own = {name: np.arange(lengths.of(name).num_items) for name in ("image", "audio", BACKBONE)}
        return load_alone(on_rank, lengths, own).modules["image"].kept_bytes

    assert kept_bytes(images(items)) == kept_bytes(images(items, split=True))


@given(ITEMS, st.integers(0, 9), st.integers(0, 9))
def test_polynomials_of_lengths_are_those_of_segments(items, linear, quadratic):
    expected = [sum(linear * s + quadratic * s**2 for s in each) for each in items]
    lengths = images(items)
    by_length = LengthWork(coefficients={"image": Packed(linear, quadratic)})
    assert by_length(lengths)["image"].tolist() == expected
    times = PhaseTimes(7, linear, quadratic, 0, None)
    assert Picoseconds({"image": times})(lengths)["image"].tolist() == expected


@given(ITEMS, st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.sampled_from(["native", "reference"]))
def test_loads_are_sums_over_segments_natively_and_by_reference(items, num_ranks, linear, quadratic, backend):
    work = LengthWork(coefficients={"image": Packed(linear, quadratic)})(images(items))["image"]
    for lengths, cost in ((work, Packed()), (items, Packed(linear, quadratic))):
        placed = assign(lengths, num_ranks, cost, backend=backend)
        loads = [0] * num_ranks
        for item, rank in enumerate(placed.ranks):
            loads[rank] += sum(linear * s + quadratic * s**2 for s in items[item])
        assert placed.loads.tolist() == loads
        assert max(loads) >= placed.bound


def test_operations_too_large_for_a_machine_word_stay_exact():
    spec, lengths = model(400), images([[2**28, 2**28], [5]])
    operations = Operations(spec)
    of_items = operations(lengths)["image"]
    exact = batch_flops(spec, lengths)["image"]
    assert abs(int(of_items.sum()) * operations.unit_flops - exact) <= len(of_items) * operations.unit_flops


def test_what_pads_whole_items_takes_no_segments():
    clips = images([[5, 5]])
    clips = replace(clips, items={"audio": clips.items["image"], "image": clips.items["audio"]})
    with pytest.raises(UserError, match="its items can have no segments"):
        Operations(model())(clips)
    layer = model().module("audio").layers[0]
    with pytest.raises(UserError, match="its items can have no segments"):
        work_of(layer, np.array([10]), padded=True, segments=ItemSegments.of([[5, 5]]))


def test_a_cost_that_would_square_the_sum_is_refused():
    costs = {BACKBONE: Packed(), "image": Packed(1, 1), "audio": Packed()}
    with pytest.raises(ArgumentError, match="'image' squares whole items"):
        PhaseCosts(costs, LengthWork()).check_segments(images([[5, 5]]))
    PhaseCosts(costs, LengthWork()).check_segments(images([[5, 5]], split=True))
