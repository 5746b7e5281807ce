"""The graph of a step takes as long as its simulation, and so does the slowest island under any order."""

from dataclasses import replace

import numpy as np
import pytest

from motet.assign.ordering import given_batching
from motet.assign.pipeline import Batching, assign_batching, batching_as_given
from motet.assign.pipeline_balance import assign_cut, dealt_with_cuts, item_work
from motet.balance import island_makespans, order_islands
from motet.core.plan import Unit
from motet.core.spec import Module
from motet.schedule.plan_units import replicas_in_step
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.step_seconds import PricedSteps
from parity.random_fills import with_random_fills
from unit.simulate.jobs import BACKBONE as HALVES
from unit.simulate.jobs import PLANS, SEND_S, Linear, lengths, plan

PIPELINES = [name for name in PLANS if name != "data parallel"]


def permuted(batching, rng):
    """The same microbatches, in another order in all islands alike."""
    order = rng.permutation(int(batching.microbatch.max()) + 1)
    return Batching(order[batching.microbatch], batching.index)


def _sharing(made, unit, zero):
    """The unit under a ZeRO stage, over those of its replicas that may have it."""
    together = replicas_in_step(made, unit)
    return replace(unit, zero=zero, shard_size=together if zero > 1 and together < unit.dp else unit.shard_size)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_step_takes_as_long_as_it_is_simulated(name, zero, overlaps):
    if zero == 3 and name == "replicated":
        zero = 1  # Its replicas take passes in different orders.
    made = replace(PLANS[name], batch_size=48)
    device = replace(made.cluster.device, overlaps=overlaps)
    units = tuple(_sharing(made, unit, zero) for unit in made.units)
    made = replace(made, units=units, cluster=replace(made.cluster, device=device))
    cost = Linear(made.cluster, call_s=SEND_S / 4 if overlaps else 0.0)
    steps, rng = PricedSteps(made, cost), np.random.default_rng(0)
    for seed in range(2):
        assignment = assign_batching(made, lengths(48, seed), permuted(batching_as_given(made), rng))
        expected_s = predict_assigned(made, steps.planned, assignment, steps.cost).step_s
        durations = steps.of_operations(assignment)
        found = island_makespans(
            steps.graph, durations, np.arange(len(durations)).reshape(steps.layout.num_islands, -1)
        )
        assert found.max() == pytest.approx(1e9 * expected_s, abs=len(steps.graph.row))


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("fed_in_common", [False, True])
def test_steps_with_shared_sequences_take_as_long_in_any_order(fed_in_common, overlaps):
    """Replicas in islands of their own, and two in each of two islands, which one replica of the encoders feeds."""
    units = (Unit("all", ({"image": 4, "audio": 3, **HALVES[0]}, HALVES[1]), dp=4, pp=2),)
    if fed_in_common:
        units = Unit("llm", HALVES, dp=4, pp=2), Unit("encoders", ({"image": 4, "audio": 3},), first_rank=8, dp=2)
    made = plan(*units, batch_size=32, balance="split")
    device = replace(made.cluster.device, overlaps=overlaps)
    made = replace(made, cluster=replace(made.cluster, device=device))
    steps, batch = PricedSteps(made, Linear(made.cluster)), lengths(32)
    batch.sequence[:3] *= 10
    work = item_work(made, batch)
    dealt, cut = dealt_with_cuts(made, batch, given_batching(made, batch), work)
    assert len(cut) == 3
    contents = assign_cut(made, batch, dealt, work, cut)
    durations = steps.of_operations(contents)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(contents.num_microbatches)
        placed = Batching(np.argsort(order)[dealt.microbatch], dealt.index)
        expected_s = predict_assigned(
            made, steps.planned, assign_cut(made, batch, placed, work, cut), steps.cost
        ).step_s
        groups = contents.num_microbatches * np.arange(steps.layout.num_islands)[:, None] + order
        found = steps.together(contents, durations, groups)
        assert found.max() == pytest.approx(1e9 * expected_s, abs=len(steps.graph.row))
        assert found.max() > island_makespans(steps.graph, durations, groups).max()


@pytest.mark.parametrize("fed_in_common", [False, True])
def test_steps_with_shared_experts_take_as_long_in_any_order(fed_in_common):
    units = (Unit("all", ({"image": 4, "audio": 3, **HALVES[0]}, HALVES[1]), dp=4, pp=2, ep=2),)
    if fed_in_common:
        units = Unit("llm", HALVES, dp=4, pp=2, ep=4), Unit("encoders", ({"image": 4, "audio": 3},), first_rank=8, dp=2)
    made = plan(*units, batch_size=32)
    *others, backbone = made.model.modules
    experts = {"num_experts": 4, "expert_weights": 50, "idle_weights": 100, "parameters": 1000}
    layers = [replace(each, **experts) if each.attention else each for each in backbone.layers]
    made = replace(made, model=replace(made.model, modules=(*others, Module.of("backbone", layers))))
    steps, batch, given = PricedSteps(made, Linear(made.cluster)), lengths(32), batching_as_given(made)
    batch.sequence[::5] *= 4
    contents = assign_batching(made, batch, given)
    durations = steps.of_operations(contents)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(contents.num_microbatches)
        placed = Batching(np.argsort(order)[given.microbatch], given.index)
        expected_s = predict_assigned(made, steps.planned, assign_batching(made, batch, placed), steps.cost).step_s
        groups = contents.num_microbatches * np.arange(steps.layout.num_islands)[:, None] + order
        found = steps.together(contents, durations, groups)
        assert found.max() == pytest.approx(1e9 * expected_s, abs=len(steps.graph.row))
        assert found.max() > island_makespans(steps.graph, durations, groups).max()


@pytest.mark.parametrize("name", PIPELINES)
def test_orders_are_permutations_of_each_island_and_equal_in_both_backends(name):
    made = replace(PLANS[name], batch_size=48)
    steps = PricedSteps(made, Linear(made.cluster))
    durations = steps.of_operations(assign_batching(made, lengths(48), batching_as_given(made)))
    groups = np.arange(len(durations)).reshape(steps.layout.num_islands, -1)
    given = island_makespans(steps.graph, durations, groups)
    ordered, makespans = order_islands(steps.graph, durations, groups, given)
    reference = order_islands(steps.graph, durations, groups, given, backend="reference")
    np.testing.assert_array_equal(ordered, reference[0])
    np.testing.assert_array_equal(makespans, reference[1])
    np.testing.assert_array_equal(np.sort(ordered), groups)
    np.testing.assert_array_equal(makespans, island_makespans(steps.graph, durations, ordered, backend="reference"))
    assert (makespans <= given).all()


def test_alike_stages_and_edges_share_rows():
    made = replace(PLANS["interleaved"], batch_size=16)
    stages = ({"image": 4, "audio": 3}, *({"backbone": 1} for _ in range(6)), {"backbone": 2})
    unit = replace(made.units[0], stages=stages, pp=2, dp=1)
    steps = PricedSteps(replace(made, units=(unit,)), Linear(made.cluster))
    passes = {"first": 2, "second, with the embedding": 2, "between": 2, "last, with the head": 2}
    sends = {"from the encoders": 2, "between": 2}
    assert steps.graph.num_rows == sum(passes.values()) + sum(sends.values()) + 2  # optimizer on ranks 0 and 1


def test_steps_in_parts_take_their_own_shares():
    made = with_random_fills(replace(PLANS["in bubbles"], batch_size=32), seed=1)
    assert any("." in fill.action for fill in made.fills)
    steps = PricedSteps(made, Linear(made.cluster))
    for seed in range(3):
        assignment = assign_batching(made, lengths(32, seed), batching_as_given(made))
        expected_s = predict_assigned(made, steps.planned, assignment, steps.cost).step_s
        durations = steps.of_operations(assignment)
        groups = np.arange(len(durations)).reshape(steps.layout.num_islands, -1)
        found = island_makespans(steps.graph, durations, groups).max()
        assert found == pytest.approx(1e9 * expected_s, abs=len(steps.graph.row))
