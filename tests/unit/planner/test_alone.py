"""What one example alone takes: what the memory model says of a step that has nothing else."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from motet.assign.context_rows import moved_rows
from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.spec import Layer, Module
from motet.core.workload import BatchLengths, ItemLengths
from motet.cost.analytic import Analytic
from motet.planner.alone import bytes_alone
from motet.schedule import planned
from motet.simulate.predict.predict import assign_batch, predict_assigned

BLOCK = Transformer(64, 128, 4, 2, norm="rms", biases=(), causal=True)
MODEL = multimodal("tiny", language_model(BLOCK, 4, 100), [connect(vit("image", BLOCK, 2), 64, "linear")])
MERGED = replace(
    MODEL,
    modules=tuple(
        Module.of(module.name, [module.layers[0], Layer("merge", 64**2, 64**2, 64, 64), *module.layers[1:]])
        if module.name == "backbone"
        else module
        for module in MODEL.modules
    ),
    merges=True,
)
"""With a merge of the user's own, of one matrix."""
DEVICE, LINK = Device("test", {"bf16": 1e12, "fp32": 1e12}, 10**9, 1e12), Link(1e11, 1e-6)
WHOLE = {"image": 2, "backbone": 4}


def plan_of(unit, schedule, balance="off", model=MODEL):
    cluster = Cluster(DEVICE, 1, unit.num_ranks, LINK, LINK)
    return Plan(model, cluster, (unit,), unit.dp, schedule=schedule, precision="fp32", balance=balance)


def lengths_of(sequence, images):
    """Examples of these lengths, with images of these lengths each."""
    example = np.repeat(np.arange(len(images)), [len(own) for own in images])
    length = np.array([one for own in images for one in own], dtype=np.int64)
    items = {"image": ItemLengths(example, length, length // 4)}
    sequence = np.array(sequence, dtype=np.int64)
    return BatchLengths(sequence, sequence // 2, np.zeros(len(sequence), dtype=np.int32), items)


LENGTHS = lengths_of([200, 900, 4000], [[400], [], [800, 2000]])


@pytest.mark.parametrize(
    ("unit", "schedule"),
    [
        (Unit("all", (WHOLE,), zero=0), "data_parallel"),
        (Unit("all", (WHOLE,), zero=0, recompute=({"backbone": 3},)), "data_parallel"),
        (Unit("all", (WHOLE,), zero=0, cp=2), "1f1b"),
        (Unit("all", (WHOLE,), zero=0, cp=3), "1f1b"),
        (Unit("all", (WHOLE,), zero=0, cp=4, recompute=({"backbone": 2},)), "1f1b"),
        (Unit("all", ({"image": 2, "backbone": 1}, {"backbone": 3}), pp=2, tp=2), "1f1b"),
        (Unit("all", ({"image": 2}, {"backbone": 1}, {"backbone": 1}, {"backbone": 2}), pp=2), "interleaved_1f1b"),
    ],
)
def test_it_is_what_the_memory_model_says_of_a_step_with_the_example(unit, schedule):
    plan = plan_of(unit, schedule)
    cost = Analytic(plan.cluster, plan.precision)
    ways = {"auto"} if unit.cp == 1 else {"auto", "group_cast", "all_gather"} | ({"ulysses"} if unit.cp != 3 else set())
    for number, exchange in product(range(LENGTHS.num_examples), ways):
        one = LENGTHS.take(np.array([number]))
        assigned = assign_batch(plan, one, cost)
        predicted = predict_assigned(plan, planned(plan), assigned, cost, exchange=exchange)
        # Ranks that share a sequence have blocks of it, to within one.
        is_close = pytest.approx(int(predicted.peak_bytes.max()), rel=1e-4 if unit.cp == 1 else 0.04)
        assert bytes_alone(plan, one, exchange=exchange)[0] == is_close
        assert bytes_alone(plan, LENGTHS, exchange=exchange)[number] == bytes_alone(plan, one, exchange=exchange)[0]


def test_an_all_gather_holds_keys_that_no_row_sees():
    """Sequences that are packed together see none of each other, and a window sees little; an all-gather brings all."""
    plan = plan_of(Unit("all", (WHOLE,), zero=0, cp=4), "1f1b")
    plan = replace(plan, batch_size=16, microbatch_size=16)
    cost, batch = Analytic(plan.cluster, plan.precision), lengths_of([1000] * 16, [[]] * 16)
    assigned = assign_batch(plan, batch, cost)
    cast, gathered, by_itself = (
        predict_assigned(plan, planned(plan), assigned, cost, exchange=way)
        for way in ("group_cast", "all_gather", "auto")
    )
    kept_more = (gathered.memory_bytes["activations"] - cast.memory_bytes["activations"]).max()
    of_keys, of_all = moved_rows(batch.sequence, 4)
    assert of_keys < of_all
    # Keys and values of 2 heads of 16 in float32, in each of 4 layers.
    assert kept_more == (of_all - of_keys) * 4 * 2 * 2 * 16 * 4
    assert gathered.step_s > cast.step_s and by_itself.peak_bytes.max() == cast.peak_bytes.max()


def test_items_that_are_placed_by_themselves_count_by_the_longest():
    together, apart = (
        bytes_alone(plan_of(Unit("all", (WHOLE,), dp=2), "data_parallel", balance), LENGTHS)
        for balance in ("joint", "auto")
    )
    assert together[1] == apart[1] and (together[[0, 2]] > apart[[0, 2]]).all()


def test_ranks_that_share_a_sequence_need_less_and_of_an_image_that_they_can_share():
    def needed(lengths, cp, model=MODEL):
        return bytes_alone(plan_of(Unit("all", (WHOLE,), zero=0, cp=cp), "1f1b", model=model), lengths)[0]

    text, image = lengths_of([100_000], [[]]), lengths_of([10], [[100_000]])
    # A quarter of the activations, and in each layer the keys and values of the other rows.
    assert 0.25 < needed(text, 4) / needed(text, 1) < 0.35
    assert 0.25 < needed(image, 4) / needed(image, 1) < 0.35
    whole = replace(MODEL, modules=tuple(replace(module, shareable=False) for module in MODEL.modules))
    assert needed(image, 4, whole) > 0.9 * needed(image, 1, whole)
    # Three tiles, of which a rank has one; it copies nothing.
    tiled = replace(
        MODEL, modules=tuple(replace(module, tile_rows=1000) for module in MODEL.modules[:1]) + MODEL.modules[1:]
    )
    three = lengths_of([10], [[12_000]])
    assert needed(three, 4, tiled) == pytest.approx(needed(lengths_of([10], [[4000]]), 1), rel=0.02)
    many = lengths_of([10], [[25_000] * 4])
    assert needed(many, 4) == pytest.approx(needed(many, 1) / 4, rel=0.1)


def test_a_plan_may_share_more_than_its_unit_says():
    plan = plan_of(Unit("all", (WHOLE,), dp=4, zero=0), "data_parallel", "auto")
    text = lengths_of([100_000], [[]])
    assert bytes_alone(plan, text, shared_by={"backbone": 4}) < 0.35 * bytes_alone(plan, text)
    shared = replace(plan.units[0], dp=1, cp=4)
    assert bytes_alone(plan, text, shared_by={"backbone": 4}) == pytest.approx(
        bytes_alone(plan_of(shared, "1f1b"), text), rel=0.05
    )


@pytest.mark.parametrize("cp", [1, 2])
def test_replicas_of_an_encoder_that_share_its_items_need_less(cp):
    """An image alone is cut over all of their ranks."""
    units = Unit("image", ({"image": 2},), dp=2, cp=cp), Unit("llm", ({"backbone": 4},), first_rank=2 * cp)
    cluster = Cluster(DEVICE, 1, 2 * cp + 1, LINK, LINK)
    plan = Plan(MODEL, cluster, units, 1, precision="fp32", balance="split")
    cost, long = Analytic(cluster, plan.precision), lengths_of([200, 900, 200], [[100_000], [], [80_000, 8000]])
    for number in range(3):
        one = long.take(np.array([number]))
        predicted = predict_assigned(plan, planned(plan), assign_batch(plan, one, cost), cost)
        print(number, bytes_alone(plan, one)[0], int(predicted.peak_bytes.max()))
    whole = bytes_alone(replace(plan, balance="per_phase"), long)
    assert bytes_alone(plan, long)[0] < (0.8 if cp == 1 else 0.7) * whole[0]


@pytest.mark.parametrize("cp", [2, 16])
def test_a_merge_of_the_users_own_has_a_sequence_whole_on_one_of_its_ranks(cp):
    """It keeps the whole sequence, and works on embeddings of all of it with their gradients."""
    unit = Unit("all", (WHOLE,), zero=0, cp=cp, recompute=(WHOLE,))
    merged, dealt = (plan_of(unit, "1f1b", model=replace(MERGED, merges=merges)) for merges in (True, False))
    one, cost = lengths_of([4000], [[]]), Analytic(merged.cluster, merged.precision)
    found = [predict_assigned(plan, planned(plan), assign_batch(plan, one, cost), cost) for plan in (merged, dealt)]
    more = found[0].memory_bytes["activations"].max() - found[1].memory_bytes["activations"].max()
    assert more == pytest.approx((1 - 1 / cp) * 4000 * (64 + 1) * 4, rel=1e-3)
    assert found[0].memory_bytes["transient"].max() >= 2 * 4000 * 64 * 4
    assert bytes_alone(merged, one)[0] == pytest.approx(int(found[0].peak_bytes.max()), rel=0.04)
