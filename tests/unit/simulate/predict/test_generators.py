"""What moves between backbone and generators is predicted as the rows at the queries of their items."""

from dataclasses import replace

import numpy as np
import pytest

from motet.assign.plan import assign_step
from motet.balance import island_makespans
from motet.core.cluster import Cluster, Device, Link
from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, condition, denoising_transformer, language_model, multimodal
from motet.core.workload import BatchLengths, ItemLengths
from motet.cost.analytic import Analytic
from motet.dispatch.edge_messages import message_parts
from motet.schedule import planned, program_of_batch
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.predict.step_seconds import PricedSteps
from motet.simulate.predict.traffic import Traffic
from unit.models.test_generator import QUERIES, module_of

SHAPE = Transformer(8, 16, 2)
MODEL = multimodal(
    "toy",
    language_model(Transformer(32, 64, 2, causal=True), 2, vocab_size=1000),
    [],
    [
        condition(denoising_transformer(name, SHAPE, 2, row_dim=4, num_conditions=number), 32, num_rows=number)
        for name, number in (("draw", 3), ("say", 2))
    ],
)
BLOCKS = {"backbone": 2, "draw": 2, "say": 2}
LINK = Link(1e9, 0.0)
BYTES_PER_S = 0.8e9
# Example 0 has two large pictures, examples 2 and 3 a small one each, of 3 queries; example 2 has a clip of 2 as well.
LENGTHS = BatchLengths(
    np.full(4, 40),
    np.full(4, 9),
    np.zeros(4, np.int32),
    {
        "draw": ItemLengths(np.array([0, 0, 2, 3]), np.array([50, 60, 6, 7]), np.full(4, 3)),
        "say": ItemLengths(np.array([2]), np.array([9]), np.array([2])),
    },
)


def traffic_of(*units, **options):
    cluster = Cluster(Device("toy", {"bf16": 1e12}, 10**9, 1e9), 1, 8, LINK, LINK)
    plan = Plan(MODEL, cluster, units, 4, **options)
    program, assignment = planned(plan), assign_step(plan, LENGTHS)
    return plan, assignment, Traffic(Pricing(plan, program, assignment, Analytic(cluster, "bf16")))


def sent_bytes(traffic, **options):
    """By edge, bytes of all microbatches."""
    sent = BYTES_PER_S * traffic.send_s([0], **options)[0].sum(axis=1)
    return dict(zip(traffic.planned.program.edges, np.rint(sent).astype(int).tolist(), strict=True))


def test_units_are_sent_the_rows_at_queries():
    units = (
        Unit("llm", ({"backbone": 2},), dp=2),
        Unit("draw", ({"draw": 2},), first_rank=2),
        Unit("say", ({"say": 2},), first_rank=3),
    )
    *_, traffic = traffic_of(*units, microbatch_size=2)
    row = 32 * 2
    assert sent_bytes(traffic) == {(0, 2): 6 * row, (1, 2): 6 * row, (0, 3): 0, (1, 3): 2 * row}
    assert sent_bytes(traffic, gradient=True) == sent_bytes(traffic)


def test_a_later_stage_of_the_unit_gets_what_its_generators_take():
    *_, traffic = traffic_of(Unit("all", ({"backbone": 2}, {"draw": 2}, {"say": 2}), pp=3))
    assert sent_bytes(traffic) == {(0, 1): 14 * 64, (1, 2): 2 * 64}


def test_ranks_that_share_sequences_give_a_part_of_the_rows_each():
    """They give rows to each other before, in forward and in backward: of 12 rows for draw and 2 for say each rank has
    half, of which half belongs to items that the other one gives.
    """
    behind = Unit("draw", ({"draw": 2},), first_rank=2), Unit("say", ({"say": 2},), first_rank=3)
    *_, shared = traffic_of(Unit("llm", ({"backbone": 2},), cp=2), *behind)
    assert sent_bytes(shared) == sent_bytes(shared, gradient=True) == {(0, 1): 6 * 64, (0, 2): 64}
    stage, layer = shared.planned.stages[0], MODEL.module("backbone").layers[1]
    attention_s = 2 * shared.pricing.layer_pricing.price("backbone", layer).context.seconds.sum()
    moved_s = (12 + 2) / 4 * 64 / BYTES_PER_S
    prices = shared.pricing.stage(stage, 0)
    for seconds in (prices.forward_tensor, prices.backward_tensor):
        assert seconds.sum() == pytest.approx(attention_s + moved_s, rel=1e-9)


@pytest.mark.parametrize(
    "units",
    [
        (
            Unit("llm", ({"backbone": 1}, {"backbone": 1, "say": 2}), pp=2, cp=2),
            Unit("draw", ({"draw": 2},), first_rank=4),
        ),
        (Unit("all", ({"backbone": 2, "draw": 1}, {"draw": 1, "say": 1}, {"say": 1}), pp=3),),
    ],
    ids=["shared", "cut"],
)
def test_orders_are_compared_by_what_a_step_is_simulated_to_take(units):
    plan, assignment, traffic = traffic_of(*units)
    steps = PricedSteps(plan, traffic.cost)
    expected_s = predict_assigned(plan, steps.planned, assignment, traffic.cost).step_s
    durations = steps.of_operations(assignment)
    groups = np.arange(len(durations)).reshape(steps.layout.num_islands, -1)
    found = island_makespans(steps.graph, durations, groups)
    assert found.max() == pytest.approx(1e9 * expected_s, abs=len(steps.graph.row))


def test_what_goes_between_stages_of_a_generator_is_as_executed():
    """Each of its items' rows, those of their conditions, and one more that steers the blocks."""
    draw = module_of(hidden=12, row_dim=8, num_layers=2).spec_module("draw")
    model = multimodal("cut", MODEL.module("backbone"), [], [draw])
    lengths = replace(LENGTHS, items={"draw": replace(LENGTHS.items["draw"], num_tokens=np.full(4, QUERIES))})
    units = Unit("llm", ({"backbone": 2},)), Unit("draw", ({"draw": 1}, {"draw": 1}), first_rank=1, pp=2)
    cluster = Cluster(Device("toy", {"fp64": 1e12}, 10**9, 1e9), 1, 8, LINK, LINK)
    plan = Plan(model, cluster, units, 4, precision="fp64")
    program, assignment = planned(plan), assign_step(plan, lengths)
    sent = sent_bytes(Traffic(Pricing(plan, program, assignment, Analytic(cluster, "fp64"))))
    rows = 50 + 60 + 6 + 7 + 4 * (QUERIES + 1)
    assert sent == {(0, 1): 4 * QUERIES * 32 * 8, (1, 2): rows * 12 * 8}
    edge = program.program.edges.index((1, 2))
    parts = [message_parts(program, assignment, edge, 0, microbatch) for microbatch in range(4)]
    assert sum(part.num_elements for each in parts for part in each) == rows * 12


@pytest.mark.parametrize("balance", ["per_phase", "off"])
def test_a_data_parallel_step_has_the_exchanges_of_what_moves(balance):
    plan, assignment, traffic = traffic_of(
        Unit("all", (BLOCKS,), dp=2), schedule="data_parallel", balance=balance, microbatch_size=2
    )
    moved = assignment.exchanged_rows("draw")[0]
    assert (moved > 0) == (balance == "per_phase")
    program = program_of_batch(traffic.planned, assignment.present)
    actions = [str(action).partition(".")[0] for action in program.actions[0]]
    passes = ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]
    assert list(dict.fromkeys(name for name in actions if name in passes)) == passes
    assert ("0EXCHANGE_F0>1" in actions, "0EXCHANGE_B0>1" in actions) == (bool(moved), bool(moved))
    assert predict_assigned(plan, traffic.planned, assignment, traffic.cost).step_s > 0
    # The rows at queries are as wide as the backbone's.
    seconds = traffic.exchange_s()[traffic.planned.program.edges.index((0, 1)), 0]
    assert seconds == pytest.approx(64 * moved / BYTES_PER_S, rel=0.01)
