"""What stages compute, against a slow count of every layer, example and microbatch."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from motet.core.plan import Fill, Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.catalogue import cluster
from motet.cost.flops import batch_flops
from motet.schedule import coarse_fills, fillable, planned
from motet.schedule.plan_units import units_in_bubbles
from motet.simulate.engine.stage_times import Part
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing
from unit.simulate.jobs import (
    BACKBONE,
    EXCHANGE_S,
    FORWARD_S,
    GATHER_S,
    INPUT_S,
    MODELS,
    PLANS,
    TENSOR_S,
    WEIGHT_S,
    Linear,
    colocated,
    items_of,
    kept_a_row,
    layers_of,
    lengths,
    mean_rows_of,
    model,
    moved_and_copied,
    num_islands,
    of,
    plan,
    rows_of,
    taken_bytes_of,
    tokens_of,
)


def priced(made, batch=None):
    batch = lengths(made.batch_size) if batch is None else batch
    cost = Linear(made.cluster)
    return Pricing(made, planned(made), assign_batch(made, batch, cost), cost), batch


@pytest.fixture(params=PLANS)
def any_plan(request):
    return PLANS[request.param]


@pytest.mark.parametrize("learns", MODELS)
def test_every_stage_costs_what_its_layers_and_examples_do(any_plan, learns):
    made = of(MODELS[learns], any_plan)
    pricing, batch = priced(made)
    islands = num_islands(made, pricing.planned.stages)
    assert pricing.num_islands == islands
    for stage in pricing.planned.stages:
        tp = stage.unit.tp
        for island in range(islands):
            found = pricing.stage(stage, island)
            for i in range(pricing.assignment.num_microbatches):
                expected = dict.fromkeys(found._fields, 0.0)
                each = zip(layers_of(made, stage), kept_a_row(made, stage), strict=True)
                for (name, layer, before, again), (*_, kept, _) in each:
                    rows = rows_of(made, batch, name, layer, stage, island, i, islands)
                    work, sent = rows * layer.weights / tp, rows * layer.output_width * (tp > 1) * TENSOR_S
                    inside = before or (layer.trainable and layer.attention is not None)
                    expected["forward"] += work * FORWARD_S
                    expected["input"] += inside * work * INPUT_S
                    half = "weight" if layer.kind in ("attention", "projector") else "input"  # matrices wait for W
                    expected[half] += layer.trainable * work * WEIGHT_S
                    expected["recompute"] += again * work * FORWARD_S
                    # Context-parallel ranks of the backbone exchange rows, and gradients of them in backward.
                    cp = stage.unit.cp
                    moved, copied = moved_and_copied(made, batch, name, layer, stage, island, i, islands)
                    keys = moved * cp / (cp - 1) * GATHER_S if moved else 0.0
                    expected["forward_tensor"] += sent + keys
                    if before or layer.trainable:
                        expected["backward_tensor"] += (sent + keys) * (1 + again)
                        expected["held"] += rows * kept + (not again) * copied
                if stage.layers.get("backbone", (1,))[0] == 0:  # Rows of encoders go to the ranks of their places.
                    for name in made.model.sources("backbone"):
                        (layer, is_back), cp = made.model.moved(name), stage.unit.cp
                        entering = tokens_of(made, batch, name, stage, island, i, islands) * layer.output_width * 2
                        for half in ("forward_tensor", *["backward_tensor"] * is_back):
                            expected[half] += entering * (cp - 1) / cp**2 * EXCHANGE_S
                expected["held"] += taken_bytes_of(made, batch, stage, island, i, islands)
                num = made.unit_of("backbone").tp // tp if stage.unit in units_in_bubbles(made) else 1
                if num > 1 and stage.index == len(stage.unit.stages) - 1:
                    for name in stage.unit.modules:
                        layer = made.model.moved(name)[0]
                        rows = rows_of(made, batch, name, layer, stage, island, i, islands)
                        expected["forward_tensor"] += rows * num * layer.output_width * 2 * GATHER_S
                for half, num_bytes in parts_together(made, batch, stage, island, i, islands):
                    expected[half] += num_bytes * GATHER_S
                got = {name: float(table[i]) for name, table in found._asdict().items()}
                assert got == pytest.approx(expected, rel=1e-9), (stage.modules, stage.replica, island, i)


def parts_together(made, batch, stage, island, microbatch, islands):
    """(forward or backward, bytes) of rows of encoders that tensor-parallel ranks gather around a stage's layers."""
    for name in stage.layers.keys() - {"backbone"} if stage.unit.tp > 1 and not stage.has_sums else ():
        layers = [(layer, before) for of, layer, before, _ in layers_of(made, stage) if of == name and layer.attention]
        if layers:
            ends = ("forward_tensor", layers[-1][0]), *[("backward_tensor", layers[0][0])] * layers[0][1]
            for half, layer in ends:
                rows = rows_of(made, batch, name, layer, stage, island, microbatch, islands)
                yield half, rows * layer.output_width * 2


class Entered(Linear):
    """A pass that begins inside a module takes 7 s more."""

    def entry_seconds(self, module):
        return 7.0 if module == "backbone" else 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "data_parallel"])
@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_passes_that_begin_inside_a_module_pay_for_it(schedule, recomputed):
    """The first stage enters in its first layer; blocks that are recomputed are a pass of their own."""
    is_pipeline = schedule == "1f1b"
    stages = ({"backbone": 2}, {"backbone": 2}) if is_pipeline else ({"backbone": 4},)
    unit = Unit("llm", stages, pp=len(stages), recompute=tuple({"backbone": recomputed} for _ in stages))
    text = multimodal("text", language_model(Transformer(8, 16, num_heads=2), 4, 100), [])
    made = Plan(text, cluster("h100", 1, 2), (unit,), 4, 2, schedule)
    batch = lengths(4)
    batch = replace(batch, items={})
    tables = []
    for kind in (Linear, Entered):
        cost = kind(made.cluster)
        pricing = Pricing(made, planned(made), assign_batch(made, batch, cost), cost)
        tables.append([pricing.stage(stage, 0) for stage in pricing.planned.stages])
    cut = is_pipeline and recomputed == 1
    for number, (without, entered) in enumerate(zip(*tables, strict=True)):
        forward, again = (entered.forward - without.forward).tolist(), (entered.recompute - without.recompute).tolist()
        assert forward == pytest.approx([7.0 * ((number > 0) + cut)] * 2)
        assert again == pytest.approx([7.0 * (is_pipeline and recomputed > 0)] * 2)
        assert np.array_equal(entered.input, without.input) and np.array_equal(entered.weight, without.weight)


def test_hardware_does_the_work_of_all_stages(any_plan):
    """Padding, recomputation and repeated encoders in, summed a stage, an island and a microbatch at a time."""
    for learns in ("all learns", "encoders frozen", "encoder alone learns"):
        made = of(MODELS[learns], any_plan)
        pricing, batch = priced(made)
        islands, total = num_islands(made, pricing.planned.stages), 0.0
        for stage in pricing.planned.stages:
            for island in range(islands):
                for i in stage.microbatches:
                    total += sum(
                        _flops(made, batch, stage, island, i, islands, one) for one in layers_of(made, stage)
                    ) * (len(stage.ranks) // stage.unit.tp)
        assert pricing.hardware_flops() == pytest.approx(total, rel=1e-12)


def _flops(made, batch, stage, island, microbatch, islands, placed):
    name, layer, before, again = placed
    rows = mean_rows_of(made, batch, name, layer, stage, island, microbatch, islands)
    inside = before or (layer.trainable and layer.attention is not None)
    pairs = 0.0
    if layer.attention is not None:
        pairs = _pairs(made, batch, name, layer, stage, island, microbatch, islands)
    attention = 4 * pairs * (layer.attention.width if layer.attention else 0)
    return 2 * layer.weights * rows * (1 + inside + layer.trainable + again) + attention * (1 + 2 * inside + again)


def _pairs(made, batch, name, layer, stage, island, microbatch, islands):
    found, _ = items_of(made, batch, name, stage, island, microbatch, islands)
    rows = [math.ceil(length / layer.divisor) for length in found]
    if made.model.module(name).padded and rows:
        rows = [max(rows)] * len(rows)
    pairs = sum(r * (r + 1) // 2 if layer.attention.causal else r * r for r in rows)
    return pairs / (len(stage.ranks) // stage.unit.tp)


def test_without_padding_recomputation_or_repetition_hardware_does_what_the_model_needs():
    spec = model(audio=False)
    spec = replace(spec, modules=tuple(replace(module, padded=False) for module in spec.modules))
    for name in ("modality parallel", "dp 2 and 1 to 4", "in bubbles", "data parallel"):
        pricing, batch = priced(of(spec, PLANS[name]))
        assert pricing.hardware_flops() == sum(batch_flops(spec, batch).values()), name


def test_replicated_encoders_are_computed_once_a_stage():
    alone, batch = priced(plan(Unit("llm", ({"image": 4, "audio": 3}, *BACKBONE), pp=3)))
    repeated, _ = priced(plan(Unit("llm", BACKBONE, pp=2, replicated=("image", "audio"))))
    images, _ = priced(plan(Unit("llm", ({"audio": 3}, *BACKBONE), pp=3, replicated=("image",))))
    both, once = alone.hardware_flops(), batch_flops(alone.plan.model, batch)
    assert repeated.hardware_flops() - both > once["image"] + once["audio"]
    assert images.hardware_flops() - both == 2 * once["image"]


def test_slices_of_fills_do_not_change_what_is_computed():
    """Two pipelines of one encoder, the one in whole passes, the other with forward passes in two parts of 2 blocks."""
    made = plan(
        Unit("llm", ({"audio": 3, "backbone": 4}, {"backbone": 4}), pp=2), Unit("image", ({"image": 4},), dp=2),
        batch_size=2,
    )  # fmt: skip
    fills = (Fill(0, "2F0", "0F0"), Fill(1, "3F1.0", "1F0"), Fill(1, "3F1.1", "1F0"), Fill(0, "2B0"), Fill(1, "3B1"))
    whole, _ = priced(made)
    sliced, _ = priced(replace(made, fills=fills))
    assert [stage.num_parts for stage in sliced.planned.stages] == [1, 1, 1, 2]
    assert sliced.hardware_flops() == whole.hardware_flops()
    stage = sliced.planned.stages[3]
    shares = [part.share for part in sliced.parts(stage)]
    assert sum(shares) == pytest.approx(1) and shares[0] != shares[1], "what stands around the blocks is not alike"


@pytest.mark.parametrize("num_parts", [4, 5, 6, 8])
@pytest.mark.parametrize("recompute", [0, 3])
def test_halves_of_blocks_divide_what_blocks_take_by_operations(num_parts, recompute):
    shape = Transformer(32, 128, 4)
    image = connect(vit("image", shape, num_layers=4), output_dim=64)
    spec = multimodal("vlm", language_model(Transformer(64, 256, 4), 2, 100), [image])
    units = (
        Unit("llm", ({"backbone": 1}, {"backbone": 1}), pp=2),
        Unit("image", ({"image": 4},), dp=2, recompute=({"image": recompute},)),
    )
    made = Plan(spec, cluster("h100", 1, 2), units, batch_size=2)
    unfilled, encoders = fillable(made)
    pricing, batch = priced(replace(made, fills=coarse_fills(unfilled.program, encoders, num_parts)))
    in_blocks, _ = priced(replace(made, fills=coarse_fills(unfilled.program, encoders, 4)))
    stage = pricing.planned.stages[2]
    for backward in (False, True):
        shares = [part.share for part in pricing.parts(stage, backward=backward)]
        assert len(shares) == num_parts and sum(shares) == pytest.approx(1) and min(shares) > 0
        if num_parts == 8:
            blocks = [part.share for part in in_blocks.parts(in_blocks.planned.stages[2], backward=backward)]
            assert np.add.reduceat(shares, range(0, 8, 2)) == pytest.approx(blocks)
    if num_parts == 8:
        shares = [part.share for part in pricing.parts(stage)]
        rows, pairs = batch.items["image"].length.sum(), (batch.items["image"].length ** 2).sum()
        attention, mlp = 2 * 4 * 32**2 * rows + 4 * 32 * pairs, 2 * 8 * 32**2 * rows
        assert shares[2] / shares[3] == pytest.approx(attention / mlp)
    held, held_in_blocks = (each.stage(each.planned.stages[2], 0).held for each in (pricing, in_blocks))
    assert (held > held_in_blocks).any() == (recompute > 0 and num_parts > 4), "inputs of recomputed MLPs are kept"


@pytest.mark.parametrize("num_recomputed", [0, 3])
def test_of_the_communication_of_halves_of_layers_work_can_run_beside_their_sums(num_recomputed):
    """Not beside gathers, what is recomputed, the output layer, or layers of another module."""
    made = plan(
        Unit(
            "llm",
            ({"audio": 3, "backbone": 3}, {"backbone": 3}, {"backbone": 2}),
            pp=3,
            tp=2,
            recompute=({}, {"backbone": num_recomputed}, {}),
        ),
        Unit("image", ({"image": 4},), dp=3, tp=2),
        batch_size=3,
        fills=(
            *(Fill(0, "3F0", "0F0.0"), Fill(1, "4F1", "1F0.1"), Fill(2, "5F2", "2F0.2")),
            *(Fill(0, "3B0"), Fill(1, "4B1"), Fill(2, "5B2")),
        ),
    )
    pricing, _ = priced(made)
    whole, middle, last = pricing.planned.stages[:3]
    assert pricing.parts(middle) == (Part(0.5 / 6, "tensor"), Part(1 / 6)) * 6
    of_backward = 0.5 / (2 if num_recomputed else 1)
    assert sum(part.share for part in pricing.parts(middle, backward=True)[::2]) == pytest.approx(of_backward)
    for stage in (whole, last):
        parts, layers = pricing.parts(stage), pricing.layers(stage)
        by_layer = [
            one.layer.output_width * TENSOR_S * pricing.layer_pricing.price(one.module, one.layer).work.rows.sum()
            for one in layers
        ]
        beside = sum(
            s / 2 for one, s in zip(layers, by_layer) if one.module == "backbone" and one.layer.attention is not None
        )
        assert sum(part.share for part in parts[::2]) == pytest.approx(beside / sum(by_layer))
    assert len(pricing.parts(whole, backward=True)) == 4 * 6


@pytest.mark.parametrize("num_recomputed", [0, 2])
def test_sums_apart_take_what_the_layers_communicate_and_halves_what_they_compute(num_recomputed):
    shape = Transformer(32, 128, 4)
    image = connect(vit("image", shape, num_layers=3), output_dim=64)
    spec = multimodal("vlm", language_model(Transformer(64, 256, 4), 2, 100), [image])
    units = (
        Unit("llm", ({"backbone": 1}, {"backbone": 1}), pp=2, tp=2),
        Unit("image", ({"image": 3},), dp=2, tp=2, recompute=({"image": num_recomputed},)),
    )
    made = Plan(spec, cluster("h100", 1, 4), units, batch_size=2)
    unfilled, encoders = fillable(made)
    pricing, halved = (
        priced(replace(made, fills=coarse_fills(unfilled.program, encoders, num_parts)))[0] for num_parts in (13, 6)
    )
    stage, in_halves = pricing.planned.stages[2], halved.planned.stages[2]
    assert stage.has_sums and not in_halves.has_sums
    for backward in (False, True):
        parts, others = pricing.parts(stage, backward=backward), halved.parts(in_halves, backward=backward)
        assert [part.stream for part in parts] == ["compute", "tensor"] * 6 + ["compute"]
        shares = [part.share for part in parts[::2]]
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        shares[5:] = [sum(shares[5:])]  # What stands at the end of the pass is behind the last sum.
        of_halves = [part.share for part in others]
        of_blocks = (np.add.reduceat(each, range(0, 6, 2)) for each in (shares, of_halves))
        assert next(of_blocks) == pytest.approx(next(of_blocks))
        if not (backward and num_recomputed):
            assert shares == pytest.approx(of_halves)
        else:
            assert shares[4] > of_halves[4], "a block is computed again before its backward pass begins"
    layers = Counter(pricing.layers(stage))
    of_layer = {placed: pricing.layer_pricing.of_passes(placed, 2) for placed in layers}
    for name, backward in (("forward_tensor", False), ("backward_tensor", True)):
        total_s = sum(
            count * of_layer[placed][name].sum() for placed, count in layers.items() if name in of_layer[placed]
        )
        sums_s = sum(
            count * of_layer[placed]["forward_tensor"].sum()
            for placed, count in layers.items()
            if placed.layer.attention is not None and name in of_layer[placed]
        )
        found = [part.share for part in pricing.parts(stage, backward=backward)[1::2]]
        assert sum(found) == pytest.approx(sums_s / total_s) and len(set(found)) == 1


def test_parts_of_data_parallel_passes_take_what_their_blocks_take():
    pricing, batch = priced(colocated())
    image = pricing.planned.stages[0]
    rows = float(batch.items["image"].length.sum())
    projected = float(np.ceil(batch.items["image"].length / 4).sum())
    blocks = np.full(4, rows * 192)
    blocks[0] += rows * 30
    blocks[-1] += projected * 70
    assert [part.share for part in pricing.parts(image)] == pytest.approx(list(blocks / blocks.sum()))


def test_a_frozen_beginning_takes_no_time_of_backward():
    pricing, _ = priced(of(MODELS["encoders frozen"], colocated()))
    image = pricing.planned.stages[0]
    assert [part.share for part in pricing.parts(image, backward=True)] == [1, 0, 0, 0]
