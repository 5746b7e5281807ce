"""What stages send: which outputs, of which examples, over which ranks."""

from dataclasses import replace

import numpy as np
import pytest

from motet.core.cluster import Link
from motet.core.plan import Unit
from motet.cost.analytic import Analytic, Efficiency
from motet.cost.memory import parameters_of_rank
from motet.dispatch.edge_messages import message_parts
from motet.dispatch.loaded import LoadedTables, tables_of
from motet.schedule import Kind, planned
from motet.simulate.predict.predict import assign_batch
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.traffic import Traffic
from parity.planned import PlannedCase
from unit.simulate.jobs import (
    BACKBONE,
    CHAIN,
    EXCHANGE_S,
    GATHER_S,
    MODELS,
    PLANS,
    REDUCE_S,
    SEND_S,
    STEP_S,
    WHOLE,
    Linear,
    colocated,
    lengths,
    of,
    plan,
)

BYTES = 2


def traffic(made, batch=None):
    cost = Linear(made.cluster)
    batch = lengths(made.batch_size) if batch is None else batch
    return Traffic(Pricing(made, planned(made), assign_batch(made, batch, cost), cost)), batch


def sent(made, *, gradient=False):
    """Elements by edge, [num_microbatches], for a plan of one example a microbatch."""
    found, batch = traffic(made)
    table = found.send_s([0], gradient=gradient)[0] / SEND_S / BYTES
    return dict(zip(found.planned.program.edges, table)), batch


def rows(batch, name, divisor=1):
    """Of each example."""
    items = batch.items[name]
    return np.bincount(items.example, -(-items.length // divisor), batch.num_examples)


def clip_rows(batch):
    """Of the projector: padded to the longest clip of the example, and a row more each."""
    items = batch.items["audio"]
    padded = np.zeros(batch.num_examples)
    for example in np.unique(items.example):
        own = -(-items.length[items.example == example] // 8) + 1
        padded[example] = len(own) * own.max()
    return padded


def chain(*stages, learns="all learns", **sizes):
    return of(MODELS[learns], plan(Unit("all", stages, pp=len(stages), **sizes)))


def test_a_cut_inside_an_encoder_sends_rows_of_its_width():
    found, batch = sent(chain({"image": 1}, {"image": 3, "audio": 3, "backbone": 8}))
    np.testing.assert_allclose(found[0, 1], rows(batch, "image") * 16)


def test_a_cut_between_encoder_and_backbone_sends_what_the_projector_gives():
    found, batch = sent(chain({"image": 4, "audio": 3}, {"backbone": 3}, {"backbone": 5}))
    np.testing.assert_allclose(found[0, 1], rows(batch, "image", 4) * 32 + clip_rows(batch) * 32)
    np.testing.assert_allclose(found[1, 2], batch.sequence * 32)


def test_the_first_encoders_output_goes_through_the_seconds_stages():
    found, batch = sent(chain({"image": 4}, {"audio": 1}, {"audio": 2}, {"backbone": 8}))
    images = rows(batch, "image", 4) * 32
    clips = batch.items["audio"]
    inside = np.zeros(16)
    for example in np.unique(clips.example):
        own = -(-clips.length[clips.example == example] // 2)
        inside[example] = len(own) * own.max() * 8
    np.testing.assert_allclose(found[0, 1], images)
    np.testing.assert_allclose(found[1, 2], images + inside)
    np.testing.assert_allclose(found[2, 3], images + clip_rows(batch) * 32)


def test_gradients_go_back_of_what_learns():
    stages = {"image": 4}, {"audio": 3}, {"backbone": 8}
    found, batch = sent(chain(*stages, learns="audio frozen"), gradient=True)
    np.testing.assert_allclose(found[1, 2], rows(batch, "image", 4) * 32)
    both, _ = sent(chain(*stages), gradient=True)
    forward, _ = sent(chain(*stages))
    np.testing.assert_allclose(both[1, 2], forward[1, 2])


def test_context_parallel_ranks_send_their_share_and_each_tensor_parallel_rank_all_rows():
    stages = {"image": 4, "audio": 3}, {"backbone": 8}
    whole, _ = sent(chain(*stages))
    shared, _ = sent(chain(*stages, tp=2, cp=2))
    # Items are whole: the rank that has most sends at least half of the rows, and of one item all.
    assert (shared[0, 1] >= whole[0, 1] / 2).all() and (shared[0, 1] <= whole[0, 1]).all()
    assert shared[0, 1].sum() < 0.8 * whole[0, 1].sum()


def test_chunks_on_one_rank_send_nothing():
    unit = Unit("all", ({"image": 4, "audio": 3}, {"backbone": 8}), pp=1)
    assert not traffic(plan(unit, schedule="interleaved_1f1b"))[0].send_s([0]).any()


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", [name for name, made in PLANS.items() if made.schedule != "data_parallel"])
def test_edges_that_are_priced_as_one_take_as_long_as_each_by_itself(name, gradient):
    found, _ = traffic(PLANS[name])
    islands = range(found.pricing.num_islands)
    for edge, seconds in enumerate(np.moveaxis(found.send_s(islands, gradient=gradient), 1, 0)):
        assert np.array_equal(seconds, np.zeros_like(seconds) + found.edge_s(edge, islands, gradient=gradient))


def test_ranks_compute_for_messages_that_leave_them():
    """Both ends, before their passes and behind; what they compute is no part of the message any more."""
    made = plan(Unit("all", ({"image": 4, "audio": 3}, {"backbone": 2}, {"backbone": 2}, {"backbone": 4}), pp=2),
                schedule="zb_v")  # fmt: skip
    assert [stage.rank for stage in planned(made).program.stages] == [0, 1, 1, 0]
    cost, batch = Linear(made.cluster, call_s=SEND_S / 4), lengths(made.batch_size)
    alone, found = (Traffic(Pricing(made, planned(made), assign_batch(made, batch, cost), one))
                    for one in (Linear(made.cluster), cost))  # fmt: skip
    assert not alone.has_calls and found.has_calls
    for gradient in (False, True):
        whole, calls = (each([0], gradient=gradient)[0] for each in (alone.send_s, found.calls_s))
        np.testing.assert_allclose(found.send_s([0], gradient=gradient)[0], whole / 2)
        np.testing.assert_allclose(calls, np.stack([whole[0], whole[0], whole[2], whole[2]]) / 4)
        assert whole[0].any() and not whole[1].any()


@pytest.mark.parametrize("name", ["dp 2 and 1 to 4", "dp 2 to 4", "dp 4 to 2"])
def test_brokers_divide_a_microbatchs_output(name):
    """Each source's output goes out once, by the rows of its sinks' examples."""
    made = PLANS[name]
    found, batch = traffic(made)
    stages, edges = found.planned.stages, found.planned.program.edges
    for island in range(found.pricing.num_islands):
        table = found.send_s([island])[0] / SEND_S / BYTES
        for number, stage in enumerate(stages):
            name = stage.modules[0]
            leaving = (edge for edge, ends in enumerate(edges) if ends[0] == number)
            out = [edge for edge in leaving if stages[edges[edge][1]].unit.name == "llm"]
            if name == "backbone" or not out:
                continue
            in_island = batch.num_examples // found.assignment.num_microbatches // found.pricing.num_islands
            for i in range(found.assignment.num_microbatches):
                first = (i * found.pricing.num_islands + island) * in_island
                own = range(first + stage.examples[0], first + stage.examples[1])
                items = batch.items[name]
                lengths_ = [int(n) for e, n in zip(items.example, items.length) if e in own]
                each = [-(-n // 4) for n in lengths_] if name == "image" else [-(-n // 8) + 1 for n in lengths_]
                expected = 32 * (sum(each) if name == "image" else len(each) * max(each, default=0))
                assert table[out, i].sum() == pytest.approx(expected)
                taken = [range(*(first + n for n in stages[edges[edge][1]].examples)) for edge in out]
                rows_ = [sum(n for e, n in zip(items.example, items.num_tokens) if e in own and e in t) for t in taken]
                np.testing.assert_allclose(table[out, i], expected * np.array(rows_) / max(sum(rows_), 1))


def test_what_ends_early_in_a_unit_in_bubbles_goes_on_with_the_rest():
    made = PLANS["encoders together in bubbles"]
    found, batch = traffic(made)
    table = found.send_s([0])[0] / SEND_S / BYTES
    first = next(n for n, stage in enumerate(found.planned.stages) if "image" in stage.modules)
    edges = found.planned.program.edges
    images, both = table[edges.index((first, first + 1))], table[edges.index((first + 1, 0))]
    np.testing.assert_allclose(images, rows(batch, "image", 4)[::2] * 32)
    np.testing.assert_allclose(both, images + clip_rows(batch)[::2] * 32)


# The ranks of the collectives, worked out by hand: chain of dp 4, pp 3, so stage p is on ranks 4 p ... 4 p + 3.
@pytest.mark.parametrize(
    ("zero", "shard_size", "gather", "reduce"),
    [
        (0, 0, None, (0, 1, 2, 3)),
        (1, 0, (0, 1, 2, 3), None),
        (1, 2, (0, 1), (0, 2)),
        (2, 0, (0, 1, 2, 3), None),
        (2, 2, (0, 1), (0, 2)),
        (3, 2, (0, 1), (0, 2)),
        (3, 1, None, (0, 1, 2, 3)),
    ],
)
def test_collectives_are_over_the_ranks_that_share(zero, shard_size, gather, reduce):
    made = plan(Unit("all", CHAIN, dp=4, pp=3, zero=zero, shard_size=shard_size))
    found, _ = traffic(made)
    first, size = found.planned.stages[0], made.model.module("image").num_parameters
    seconds = found.collectives.seconds(first)
    gathered_s, reduced_s = size * BYTES * GATHER_S * (gather is not None), 0.0
    copies_s = size * 4 / (len(gather) if gather else 1) * REDUCE_S * (reduce is not None)
    if gather is not None:
        reduced_s += size * 4 * GATHER_S
    if gather is None or zero < 2:
        reduced_s += copies_s
    # Where gradients are reduced in each microbatch, the sum over copies is a collective of the step.
    assert seconds.gather_s == pytest.approx(gathered_s) and seconds.reduce_s == pytest.approx(reduced_s)
    assert seconds.replicas_s == pytest.approx(copies_s)
    asked = {kind: ranks for kind, _, ranks in found.cost.asked}
    assert asked.get("gather") == gather and asked.get("all_reduce") == reduce
    found.collectives.seconds(found.planned.stages[1])
    assert all(ranks[0] == 4 for _, _, ranks in found.cost.asked[len(asked) + (gather is not None) :])


def test_tensor_parallel_ranks_reduce_their_share_with_their_like():
    made = plan(Unit("all", (WHOLE,), dp=2, cp=2, tp=2, zero=0))
    found, _ = traffic(made)
    found.collectives.seconds(found.planned.stages[0])
    held = sum(parameters_of_rank(layer, 2) for module in made.model.modules for layer in module.layers)
    assert held > made.model.num_parameters / 2  # Some of them are whole on each.
    assert found.cost.asked == [("all_reduce", held * 4, (0, 2, 4, 6))]


def test_what_is_frozen_is_not_reduced_and_gathered_only_where_it_is_sharded():
    made = of(MODELS["encoders frozen"], plan(Unit("all", ({"image": 4, "audio": 3}, {"backbone": 8}), dp=2, pp=2)))
    encoders, projector = made.model.modules[:2], made.model.module("image").layers[-1]
    for zero in (1, 3):
        found, _ = traffic(replace(made, units=(replace(made.units[0], zero=zero),)))
        seconds = found.collectives.seconds(found.planned.stages[0])
        whole = sum(module.num_parameters for module in encoders)
        gathered = whole if zero == 3 else projector.parameters
        assert seconds.gather_s == pytest.approx(gathered * BYTES * GATHER_S)
        assert seconds.reduce_s == pytest.approx(projector.parameters * 4 * GATHER_S)
    frozen = of(MODELS["backbone alone learns"], PLANS["modality parallel"])
    found, _ = traffic(frozen)
    reduced = {a.stage for row in found.planned.program.actions for a in row if a.kind is Kind.REDUCE}
    assert all("backbone" in found.planned.stages[number].modules for number in reduced)
    assert not found.collectives.step_s[:3].any()


def test_hybrid_sharding_in_data_parallelism_sums_over_copies_once():
    made = colocated(unit={"shard_size": 2})
    found, _ = traffic(made)
    size = made.model.module("image").num_parameters
    seconds = found.collectives.seconds(found.planned.stages[0])
    assert seconds.gather_s == pytest.approx(size * BYTES * GATHER_S)
    assert seconds.reduce_s == pytest.approx(size * 4 * GATHER_S)
    assert seconds.replicas_s == pytest.approx(size * 4 / 2 * REDUCE_S)


def test_a_rank_updates_its_share_of_what_learns_in_all_its_stages():
    made = PLANS["interleaved"]
    found, _ = traffic(made)
    model = made.model
    first = model.module("image").num_parameters + sum(
        model.module("backbone").layers[n].parameters for n in model.module("backbone").block_layers(2, 5)
    )
    second = model.num_parameters - first
    np.testing.assert_allclose(found.collectives.step_s, np.array([first, second]) / 2 * STEP_S)


@pytest.mark.parametrize("tp", [1, 2])
def test_exchanges_are_of_the_busiest_rank(tp):
    made = colocated(balance="per_phase", unit={"tp": tp})
    found, _ = traffic(made)
    table = found.exchange_s()
    for (source, _), seconds in zip(found.planned.program.edges, table):
        name = found.planned.stages[source].modules[0]
        items, home = found.assignment.modules[name], found.assignment.modules["backbone"].replica
        for i in range(2):
            moved = np.zeros((2, 4))
            for example, tokens, replica, microbatch in zip(
                items.example, items.num_tokens, items.replica, items.microbatch
            ):
                if microbatch == i and replica != home[example]:
                    moved[0, replica] += tokens
                    moved[1, home[example]] += tokens
            assert seconds[i] == pytest.approx(moved.max() * 32 * BYTES / tp * EXCHANGE_S)
    assert {ranks for _, _, ranks in found.cost.asked} == {tuple(range(0, 4 * tp, tp))}
    assert table.any()


def test_what_crosses_nodes_takes_the_link_between_them():
    """Two nodes of two ranks: each rank's bytes inside its node, and those to the other, both ways."""
    inside, between = Link(4e6, 1e-3), Link(1e6, 5e-3)
    made = colocated(balance="per_phase")
    nodes = replace(made.cluster, num_nodes=2, ranks_per_node=2, intra_node=inside, inter_node=between)
    made, batch = replace(made, cluster=nodes), lengths()
    cost = Analytic(nodes, efficiency=Efficiency(links=1))
    found = Traffic(Pricing(made, planned(made), assign_batch(made, batch, cost), cost))
    table, home = found.exchange_s(), found.assignment.modules["backbone"].replica
    crossed = 0
    for (source, _), seconds in zip(found.planned.program.edges, table):
        items = found.assignment.modules[found.planned.stages[source].modules[0]]
        for i in range(2):
            ranks_s = []
            for rank in range(4):
                for ends in ((items.replica, home[items.example]), (home[items.example], items.replica)):
                    here = (items.microbatch == i) & (ends[0] == rank) & (ends[1] != rank)
                    crosses = ends[1] // 2 != rank // 2
                    num_bytes = [items.num_tokens[here & side].sum() * 32 * BYTES for side in (~crosses, crosses)]
                    ranks_s.append(
                        sum(
                            link.latency_s + size / link.bytes_per_s
                            for link, size in zip((inside, between), num_bytes) if size
                        )
                    )  # fmt: skip
                    crossed += num_bytes[1]
            assert seconds[i] == pytest.approx(max(ranks_s))
    assert crossed


def test_replicated_encoders_are_summed_over_pipeline_ranks_as_well():
    made = plan(Unit("llm", BACKBONE, pp=2, dp=2, replicated=("image", "audio"), zero=0))
    found, _ = traffic(made)
    image = next(stage for stage in found.planned.stages if stage.modules == ("image",))
    found.collectives.seconds(image)
    assert found.cost.asked[-1][2] == (0, 1, 2, 3)
    send_s = found.send_s([0])[0].any(axis=1)
    assert send_s.tolist() == [edge == (0, 1) for edge in found.planned.program.edges]


def test_each_block_is_gathered_and_reduced_by_a_message_of_its_own():
    found, _ = traffic(colocated())
    stage = next(stage for stage in found.planned.stages if stage.modules == ("image",))
    found.collectives.seconds(stage)
    asked = [size_bytes / BYTES for kind, size_bytes, _ in found.cost.asked if kind == "gather"]
    blocks = [layer.parameters for layer in found.plan.model.module("image").layers if layer.attention is not None]
    rest = found.plan.model.module("image").num_parameters - sum(blocks)
    assert asked[: len(blocks) + 1] == [*blocks, rest]


def test_the_norm_is_summed_over_all_ranks_of_data_parallelism():
    found, _ = traffic(colocated())
    np.testing.assert_allclose(found.collectives.step_s, found.plan.model.num_parameters / 4 * STEP_S)
    np.testing.assert_allclose(found.collectives.norm_s(), 24 * REDUCE_S)
    assert found.cost.asked[-1] == ("all_reduce", 24, (0, 1, 2, 3))
    assert not traffic(PLANS["chain"])[0].collectives.norm_s().any()


@pytest.mark.parametrize(
    ("parts", "stages"),
    [
        (("queries", "again"), ({"image": 3}, {"image": 1, "audio": 3, "backbone": 2}, {"backbone": 1})),
        (("sum", "tiles"), ({"image": 2}, {"image": 1, "second": 2, "audio": 2, "backbone": 3})),
        (("rows", "queries"), ({"image": 4, "second": 2}, {"second": 1, "audio": 3, "backbone": 3})),
    ],
)
def test_messages_are_priced_by_the_elements_that_training_sends(parts, stages):
    """Images alone: clips are priced with their padding, which their projector does not send."""
    case = PlannedCase((Unit("all", stages, pp=len(stages)),), parts=parts, contents=("image",))
    made, model = case.plan(), case.model()
    phases = tuple(model.encoders)
    batch = LoadedTables.read([tables_of(case.examples(0), phases, model.encoders)], phases).lengths
    found, _ = traffic(made, batch)
    seconds = found.send_s([0])[0]
    for edge in range(len(found.planned.program.edges)):
        for microbatch in range(found.assignment.num_microbatches):
            sent = message_parts(found.planned, found.assignment, edge, 0, microbatch)
            elements = seconds[edge, microbatch] / SEND_S / found.precision.compute
            assert elements == pytest.approx(sum(part.num_elements for part in sent))
