"""The parts of messages: rows, widths and gradients as the model and the lengths say."""

import numpy as np
import pytest

from motet.assign.plan import assign_step
from motet.assign.planned_step import decide_planned_step
from motet.assign.step import joined
from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.workload import BatchLengths, ItemLengths
from motet.cost.catalogue import cluster
from motet.dispatch.edge_messages import message_parts
from motet.schedule import planned

SHAPE, WIDE = Transformer(8, 16, num_heads=2), Transformer(24, 48, num_heads=2)
IMAGES = ItemLengths(np.array([1, 1, 3]), np.array([16, 8, 12]), np.array([4, 2, 3]))
LENGTHS = BatchLengths(np.array([5, 20, 7, 11]), np.ones(4, int), np.zeros(4, np.int32), {"image": IMAGES})


def parts_of(units, trainable=True, **options):
    """Per edge and microbatch: (module, rows, width, whether rows are picked, whether a gradient comes back)."""
    image = connect(vit("image", SHAPE, 4, trainable=trainable), 24, downsample=4, trainable=trainable)
    model = multimodal("toy", language_model(WIDE, 4, 100), [image])
    program = planned(Plan(model, cluster("h100", 1), units, batch_size=4, **options))
    assignment = assign_step(program.layout.plan, LENGTHS)
    return [
        [
            [(p.module, p.num_rows, p.width, p.rows is not None, p.has_gradient) for p in parts]
            for parts in (
                message_parts(program, assignment, edge, 0, number) for number in range(assignment.num_microbatches)
            )
        ]
        for edge in range(len(program.program.edges))
    ]


@pytest.mark.parametrize("trainable", [True, False])
def test_a_chain_sends_hidden_states_then_features_then_hidden_states(trainable):
    stages = ({"image": 2}, {"image": 2}, {"backbone": 1}, {"backbone": 3})
    hidden, features, backbone = parts_of((Unit("all", stages, pp=4),), trainable)
    assert hidden == [[], [("image", 24, 8, False, trainable)], [], [("image", 12, 8, False, trainable)]]
    assert features == [[], [("image", 6, 24, False, trainable)], [], [("image", 3, 24, False, trainable)]]
    # The backbone's own blocks are trained: its gradient comes back whatever is frozen before it.
    assert backbone == [[("backbone", rows, 24, False, True)] for rows in (5, 20, 7, 11)]


def test_a_module_that_is_not_taken_in_yet_passes_through():
    stages = ({"image": 4}, {"backbone": 4})
    (edge,) = parts_of((Unit("image", stages[:1]), Unit("llm", stages[1:], first_rank=1)), microbatch_size=2)
    assert edge == [[("image", 6, 24, False, True)], [("image", 3, 24, False, True)]]


def test_units_with_other_replicas_pick_rows():
    """Two replicas of the backbone share what one encoder has encoded."""
    (first, second) = parts_of((Unit("image", ({"image": 4},)), Unit("llm", ({"backbone": 4},), first_rank=1, dp=2)))
    assert first == [[], []]
    assert second == [[("image", 6, 24, False, True)], [("image", 3, 24, False, True)]]


def test_a_decided_step_is_its_assignment_again():
    """What training loads microbatch by microbatch is the StepAssignment that is simulated."""
    image = connect(vit("image", SHAPE, 4), 24, downsample=4)
    model = multimodal("toy", language_model(WIDE, 4, 100), [image])
    unit = Unit("all", ({"image": 4}, {"backbone": 4}), pp=2, dp=2)
    plan = Plan(model, cluster("h100", 1), (unit,), batch_size=4)
    parts = decide_planned_step(plan, LENGTHS).microbatches
    again = joined([part.lengths for part in parts], [part.decision.assignments for part in parts])
    whole = assign_step(plan, LENGTHS)
    for name in ("image", "backbone"):
        for replica in range(2):
            for microbatch in range(2):
                items = [
                    one.modules[name].length[one.modules[name].items_of(replica, microbatch)] for one in (again, whole)
                ]
                assert items[0].tolist() == items[1].tolist()
