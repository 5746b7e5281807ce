"""A Plan and lengths into a step: closed forms, and what must and must not change a prediction."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motet.assign.balancing import by_operations
from motet.balance import ASSUMED_SPEEDS
from motet.core.errors import UserError
from motet.core.plan import Unit
from motet.core.sampler import read_sampler
from motet.core.spec import ModelSpec, Module, Stack
from motet.core.workload import BatchLengths, ItemLengths
from motet.cost.analytic import Analytic
from motet.cost.flops import step_flops
from motet.schedule import planned, validate
from motet.simulate.predict.predict import assign_batch, predict, predict_assigned
from motet.simulate.predict.program_times import stage_times_of
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.traffic import Traffic
from motet.simulate.show.report import out_of_memory
from unit.simulate.even_jobs import EVEN, LAYER, LAYER_B, LAYER_F, ROWS, Free, even, even_plan, step
from unit.simulate.jobs import (
    EXCHANGE_S,
    FORWARD_S,
    GATHER_S,
    INPUT_S,
    MODELS,
    PLANS,
    SEND_S,
    STEP_S,
    TENSOR_S,
    WEIGHT_S,
    Linear,
    alike,
    cluster,
    colocated,
    lengths,
    of,
    plan,
    workload,
)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_chain_of_even_stages_takes_the_closed_form(schedule):
    found = step(even_plan({"image": 4}, *({"backbone": 4},) * 3, schedule=schedule), even(1))
    assert found.step_s == pytest.approx((10 + 4 - 1) * 4 * (LAYER_F + LAYER_B))
    assert found.bubbles.total_share == pytest.approx(3 / 13)


class Hooked(Linear):
    """Layers take FSDP's hooks beside their own seconds."""

    def layer_seconds(self, module, layer, work, tp=1):
        plain = super().layer_seconds(module, layer, work, tp)
        return plain._replace(forward_s=plain.forward_s + 1.0)

    def unwrapped(self, *, waits=False):
        return Linear(self.cluster)


@pytest.mark.parametrize(
    ("changed", "is_wrapped"),
    [
        ({"zero": 0}, False),
        ({"zero": 2, "shard_size": 1}, False),
        ({"zero": 3, "dp": 1}, False),
        ({"zero": 2}, True),
        ({"zero": 0, "tp": 2}, True),
    ],
)
def test_fsdps_hooks_take_time_where_fsdp_wraps_modules(changed, is_wrapped):
    made = colocated(unit={"dp": 2, **changed})
    hooked, plain = (predict(made, workload(lengths()), cost(made.cluster)).step_s for cost in (Hooked, Linear))
    assert (hooked > plain + 1) == is_wrapped and (hooked == plain) != is_wrapped


def test_interleaved_chunks_shorten_the_warm_up():
    made = even_plan({"image": 4}, *({"backbone": 4},) * 3, schedule="interleaved_1f1b", pp=2)
    assert step(made, even(1)).step_s == pytest.approx((10 + 1 / 2) * 8 * (LAYER_F + LAYER_B))


def test_microbatches_of_unlike_lengths_take_their_own_time():
    """GPipe on one rank: the sum over examples."""
    made = plan(Unit("all", ({"image": 4, "audio": 3, "backbone": 8},)), batch_size=16)
    batch = lengths()
    placed = assign_batch(made, batch, Free(made.cluster))
    found = predict_assigned(made, planned(made), placed, Free(made.cluster))
    images, clips, texts = batch.items["image"], batch.items["audio"], float(batch.sequence.sum())
    work = images.length.sum() * (30 + 4 * 192) + (-(-images.length // 4)).sum() * 70 + texts * 8 * 384
    work += batch.num_targets.sum() * 3200
    for example in np.unique(clips.example):
        own = clips.length[clips.example == example]
        longest = max(-(-own // 2))
        work += len(own) * (longest * (20 + 3 * 96) + (max(-(-own // 8)) + 1) * 50)
    learning = work * (FORWARD_S + INPUT_S + WEIGHT_S)
    # What the first layers give their inputs, nobody needs.
    first = images.length.sum() * 30
    first += sum(
        len(own) * max(-(-own // 2)) * 20
        for own in (clips.length[clips.example == example] for example in np.unique(clips.example))
    )
    assert found.step_s == pytest.approx(learning - first * INPUT_S)
    assert found.num_tokens == texts and found.num_examples == 16


def test_tensor_and_context_parallel_ranks_share_the_time():
    whole, made = ({"image": 4, "backbone": 12},), even(1)
    alone = step(plan(Unit("all", whole), spec=EVEN), made).step_s
    for sizes in ({"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}):
        found = step(plan(Unit("all", whole, **sizes), spec=EVEN), made)
        # An example has one image, which is whole on one of the ranks that share its sequence: 4 of 16 layers.
        shared = alone * (4 + 12 / sizes.get("cp", 1)) / 16 / sizes.get("tp", 1)
        assert found.step_s == pytest.approx(shared)
    cost = Linear(cluster())
    paid = predict(plan(Unit("all", whole, tp=2, zero=0), spec=EVEN), workload(made), cost)
    sent_s = 16 * 16 * ROWS * 10 * TENSOR_S
    together_s = 16 * ROWS * 10 * 2 * GATHER_S  # Behind the layers of the encoder; before them nothing learns.
    assert paid.step_s == pytest.approx(alone / 2 + 2 * sent_s + together_s + 16 * 1000 / 2 * STEP_S)
    assert paid.bubbles.mean_s["tp"] == pytest.approx(2 * sent_s + together_s)


def test_recomputation_costs_a_forward_pass_and_memory_is_won():
    stages = {"image": 4}, *({"backbone": 4},) * 3
    kept, again = (step(even_plan(*stages, recompute=each), even(1)) for each in ((), stages))
    # What a stage recomputes, it does while it waits for a gradient: the last stage's comes on top.
    assert again.step_s == pytest.approx(13 * 4 * (LAYER_F + LAYER_B) + 10 * 4 * LAYER_F)
    assert again.model_flops == kept.model_flops
    assert again.hfu > again.mfu and kept.hfu == pytest.approx(kept.mfu)
    assert again.hardware_flops > 1.3 * kept.hardware_flops
    assert again.memory_bytes["activations"].max() < kept.memory_bytes["activations"].max() / 2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("frozen", "image", "backbone"),
    [((), "learns", "learns"), (("image",), "nothing", "learns"), (("backbone",), "learns", "passes")],
)
def test_backward_follows_what_is_frozen(frozen, image, backbone, recompute):
    """Cornstarch section 4.2: with checkpointing backward is a forward pass longer, where there is any."""
    modules = tuple(
        Module(module.name, (Stack(replace(LAYER, trainable=module.name not in frozen), module.num_layers),))
        for module in EVEN.modules
    )
    spec, whole = replace(EVEN, modules=modules), {"image": 4, "backbone": 12}
    seconds = {
        "learns": INPUT_S + WEIGHT_S + recompute * FORWARD_S,
        "passes": INPUT_S + recompute * FORWARD_S,
        "nothing": 0.0,
    }
    made = even_plan(whole, spec=spec, recompute=(whole,) if recompute else ())
    expected = 4 * (FORWARD_S + seconds[image]) + 12 * (FORWARD_S + seconds[backbone])
    assert step(made, even(1)).step_s == pytest.approx(10 * ROWS * 1000 * expected)


def test_messages_and_the_optimizer_take_their_time():
    """Two stages, one microbatch: forward, send, forward, backward, back again, backward, optimizer."""
    spec = replace(EVEN, modules=(EVEN.modules[0], Module("backbone", (Stack(LAYER, 4),))))
    made = even_plan({"image": 4}, {"backbone": 4}, spec=spec, batch_size=1)
    found = step(made, even(1), Linear)
    message_s = ROWS * 10 * 2 * SEND_S
    assert found.step_s == pytest.approx(8 * (LAYER_F + LAYER_B) + 2 * message_s + 4 * 1000 * STEP_S)


def test_a_frozen_encoder_gets_nothing_back():
    """Two encoders in a chain: the second one's output needs no gradient, that of the first goes back through it."""
    made = of(MODELS["audio frozen"], plan(Unit("all", ({"image": 4}, {"audio": 3}, {"backbone": 8}), pp=3)))
    pricing = Pricing(made, planned(made), assign_batch(made, alike(16), Linear(made.cluster)), Linear(made.cluster))
    times = stage_times_of(pricing, Traffic(pricing))
    image_s, audio_s = 16 / 4 * 32 * 2 * SEND_S, (16 / 8 + 1) * 32 * 2 * SEND_S
    np.testing.assert_allclose(times.send_s[1], image_s + audio_s)
    np.testing.assert_allclose(times.return_s[1], image_s)


def test_parts_gather_what_they_hold_and_reduce_what_learns():
    """An encoder whose last block is as large as the others together; of the backbone the second half learns."""
    wide = replace(LAYER, weights=3000, parameters=3000)
    frozen = replace(LAYER, trainable=False)
    modules = (
        Module("image", (Stack(frozen, 3), Stack(replace(wide, trainable=False), 1))),
        Module("backbone", (Stack(frozen, 6), Stack(LAYER, 6))),
    )
    spec = ModelSpec("uneven", modules, (("image", "backbone"),))
    unit = Unit("all", ({"image": 4, "backbone": 12},), dp=2, zero=3)
    found = step(plan(unit, spec=spec, batch_size=2, schedule="data_parallel"), even(1), Linear)
    took = {}
    for span in found.timeline:
        if span.rank == 0:
            took.setdefault((span.module, span.kind), []).append(span.duration_s)
    layer_s = 1000 * 2 * GATHER_S
    assert took["image", "GATHER"] == pytest.approx([layer_s] * 3 + [3 * layer_s])
    assert took["backbone", "GATHER"] == pytest.approx([layer_s] * 12)
    assert took["backbone", "GATHER_B"] == pytest.approx([layer_s] * 6)
    assert took["backbone", "REDUCE"] == pytest.approx([2 * layer_s] * 6)
    assert ("image", "B") not in took


def test_gradients_of_replicas_are_reduced_and_parameters_gathered():
    unit = Unit("all", ({"image": 4, "backbone": 12},), dp=4)
    made = plan(unit, spec=EVEN, batch_size=8)
    found = step(made, even(1), Linear)
    computed = 2 * 16 * (LAYER_F + LAYER_B)
    collectives = 16 * 1000 * (2 + 4) * GATHER_S
    assert found.step_s == pytest.approx(computed + collectives + 16 * 1000 / 4 * STEP_S)


@pytest.mark.parametrize("name", PLANS)
def test_every_way_of_placing_modules_is_predicted(name):
    made, batch = PLANS[name], lengths()
    cost = Linear(made.cluster)
    found = predict_assigned(made, planned(made), assign_batch(made, batch, cost), cost)
    assert np.isfinite(found.step_s) and found.hardware_flops >= found.model_flops
    ranks = {rank for unit in made.units for rank in range(unit.first_rank, unit.first_rank + unit.num_ranks)}
    assert found.ranks.tolist() == sorted(ranks)


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_as_long_as_the_busiest_rank_at_least_and_as_all_in_turn_at_most(name):
    made, batch = PLANS[name], lengths()
    pricing = Pricing(made, planned(made), assign_batch(made, batch, Free(made.cluster)), Free(made.cluster))
    busy_s = np.zeros((pricing.num_islands, pricing.planned.program.num_ranks))
    for island, own_s in enumerate(busy_s):
        for stage in pricing.planned.stages:
            passes = pricing.stage(stage, island)[:4]
            own_s[stage.rank] += sum(table[list(stage.microbatches)].sum() for table in passes)
    found = predict_assigned(made, pricing.planned, pricing.assignment, Free(made.cluster))
    assert busy_s.max() - 1e-9 <= found.step_s <= busy_s.sum(axis=1).max() + 1e-9
    if pricing.num_islands == 1:
        assert found.bubbles.busy_s == pytest.approx(busy_s[0])


def test_modalities_in_parallel_take_the_longer_ones_time():
    """One microbatch: the encoders beside each other, then the backbone, and back."""
    units = (
        Unit("image", ({"image": 4},)),
        Unit("audio", ({"audio": 2},), first_rank=1),
        Unit("llm", ({"backbone": 12},), first_rank=2),
    )
    modules = EVEN.modules[0], Module("audio", (Stack(LAYER, 2),)), EVEN.modules[1]
    spec = ModelSpec("three", modules, (("image", "backbone"), ("audio", "backbone")))
    batch = even(1)
    batch = replace(batch, items={"image": batch.items["image"], "audio": batch.items["image"]})
    made = plan(*units, spec=spec, batch_size=1)
    assert step(made, batch).step_s == pytest.approx((4 + 12) * (LAYER_F + LAYER_B))
    chain = plan(Unit("all", ({"image": 4, "audio": 2, "backbone": 12},)), spec=spec, batch_size=1)
    assert step(chain, batch).step_s == pytest.approx((4 + 2 + 12) * (LAYER_F + LAYER_B))


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_fewer_encoder_replicas_take_more_examples_each(dp):
    """Four replicas of the backbone; the encoder is far longer, so that the step is as long as its turns."""
    units = Unit("image", ({"image": 4},), dp=dp), Unit("llm", ({"backbone": 12},), first_rank=dp, dp=4)
    made = plan(*units, spec=EVEN, batch_size=16, microbatch_size=2)
    batch = even(1, rows=1)
    image = ItemLengths(np.array([0]), np.array([1000]), np.array([1]))
    found = step(made, replace(batch, items={"image": image}))
    one = 1000 * 4 * 1000 * (FORWARD_S + INPUT_S + WEIGHT_S)
    # Two microbatches of eight examples over dp replicas.
    assert found.step_s == pytest.approx(2 * 8 / dp * one, rel=0.02)


def test_encoders_in_bubbles_are_computed_for_the_replica_that_they_run_beside():
    """Whatever is long in the second replica's part is priced on its ranks."""
    made = PLANS["in bubbles"]
    batch = alike(16)
    batch.items["image"].length[1::2] *= 5
    cost = Linear(made.cluster)
    pricing = Pricing(made, planned(made), assign_batch(made, batch, cost), cost)
    images = [stage for stage in pricing.planned.stages if stage.modules == ("image",)]
    short, long = (pricing.stage(images[0], island).forward for island in (0, 1))
    assert pricing.num_islands == 2 and (long > 4 * short).all()


@pytest.mark.parametrize("balance", ["joint", "per_phase", "auto"])
def test_balancing_shortens_a_data_parallel_step(balance):
    batch = lengths(64, seed=3)
    options = {"batch_size": 64, "schedule": "data_parallel", "microbatch_size": 8}
    unit = Unit("all", ({"image": 4, "audio": 3, "backbone": 8},), dp=4, zero=3)
    off, balanced = (plan(unit, balance=way, **options) for way in ("off", balance))

    def placed_step(made, cost):
        placed = assign_batch(made, batch, cost)
        return predict_assigned(made, planned(made), placed, cost), placed

    plain, _ = placed_step(off, Free(off.cluster))
    found, placed = placed_step(balanced, Free(off.cluster))
    assert found.step_s < 0.97 * plain.step_s
    assert found.model_flops == plain.model_flops
    if balance == "joint":
        assert not any(placed.exchanged_rows(name).any() for name in ("image", "audio"))
    if balance == "per_phase":
        moved = sum(placed.exchanged_rows(name).sum() for name in ("image", "audio"))
        paid, _ = placed_step(balanced, Exchanges(off.cluster))
        # An image's exchange runs beside the computation of clips.
        most_s = 2 * moved * 32 * 2 * EXCHANGE_S  # and it is all of it here, but for rounding
        assert found.step_s < paid.step_s <= found.step_s + most_s * (1 + 1e-9)


def test_phases_are_weighed_by_what_they_do_with_recomputation():
    nothing, none = np.zeros(2, dtype=np.int64), ItemLengths(*[np.zeros(0, dtype=np.int64)] * 3)
    images = ItemLengths(np.arange(2), np.array([10, 30]), nothing)
    two = BatchLengths(nothing, nothing, nothing.astype(np.int32), {"image": images, "audio": none})
    done = []
    for recompute in ((), ({"image": 4},)):
        made = colocated(unit={"recompute": recompute})
        phases = {phase.name: phase for phase in by_operations(made).phases(two)}
        image = phases["image"]
        done.append(int(image.lengths.sum()) * image.seconds_per_cost * ASSUMED_SPEEDS["cuda"].flops_per_s)
    kept, again = done
    module = made.model.module("image")
    assert kept == pytest.approx(step_flops(module, images.length))
    assert again == pytest.approx(step_flops(module, images.length, recomputed=True)) != kept


class Exchanges(Free):
    """Exchanges take time; gathers and reductions do not."""

    exchange_seconds = Linear.exchange_seconds


def test_the_rank_that_lacks_memory_is_named_by_its_place_in_the_cluster():
    units = Unit("image", ({"image": 4},), first_rank=3), Unit("llm", ({"backbone": 12},), first_rank=6, tp=2)
    made = plan(*units, spec=EVEN)
    small = replace(made.cluster, device=replace(made.cluster.device, memory_bytes=100_000))
    made = replace(made, cluster=small)
    found = step(made, even(1))
    assert found.ranks.tolist() == [3, 6, 7] and found.num_ranks == 3
    assert out_of_memory(made, found).startswith("Out of memory on 2 of 3 ranks: rank 6, of unit 'llm', needs")


def test_units_that_share_the_rank_that_lacks_memory_are_all_named():
    made = PLANS["encoders together in bubbles"]
    made = replace(made, cluster=replace(made.cluster, device=replace(made.cluster.device, memory_bytes=1000)))
    assert ", of units 'llm', 'encoders', needs" in out_of_memory(made, step(made, lengths()))


def test_what_does_not_fit_is_said():
    made = plan(Unit("all", ({"image": 4, "audio": 3, "backbone": 7},)))
    with pytest.raises(UserError, match=r"module 'backbone' has 8 layers; the plan's stages hold 7"):
        step(made, lengths())


def _examples():
    path = Path(__file__).parents[4] / "examples" / "plans.py"
    spec = importlib.util.spec_from_file_location("plans", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLES = _examples()


@pytest.mark.parametrize("name", EXAMPLES.PLANS)
def test_the_examples_are_proper_plans_and_are_predicted(name, tmp_path):
    made = EXAMPLES.PLANS[name]()
    if name == "orchmllm":
        unit = replace(made.units[0], dp=8, shard_size=4)
        made = replace(made, units=(unit,), batch_size=8 * 30)
    if name == "optimus":
        made = replace(EXAMPLES.optimus(512), batch_size=256)
    validate(planned(made).program)
    (tmp_path / "mixture.toml").write_text(EXAMPLES.WORKLOADS["mixture"])
    cost = Analytic(made.cluster, made.precision)
    found = predict(made, read_sampler(tmp_path / "mixture.toml").workload(), cost)
    assert 0.02 < found.mfu <= found.hfu < 1
    assert (found.peak_bytes > 0).all()
