"""A Program against the executor: rows are walked in order, refused whole, and leave nothing behind."""

from types import SimpleNamespace

import pytest
import torch

from motet.core.errors import ArgumentError, origin_of
from motet.dispatch.route import Route
from motet.runtime.clock import ActionClock
from motet.runtime.exchanges import Exchanges
from motet.runtime.executor import Executor, RankProgram
from motet.runtime.passes import StagePasses
from motet.runtime.tensors import Tensors
from motet.schedule import (
    Action,
    Kind,
    Presence,
    Program,
    Stage,
    add_communication,
    add_exchanges,
    add_fsdp,
    data_parallel,
    gpipe,
    split_parts,
    without_absent,
    zb_h1,
)

NAMES = ("image", "audio", "backbone")
CPU = torch.device("cpu")


def clock():
    return ActionClock(0, CPU)


class Module:
    """A stage that multiplies what it has of a microbatch, and what arrives, by a weight, and writes down its calls."""

    def __init__(self, name, trainable, calls):
        self.name, self.calls = name, calls
        self.weight = torch.tensor([2.0], dtype=torch.float64, requires_grad=trainable)

    def forward(self, batch, inputs):
        self.calls.append((f"F {self.name}", sorted(inputs), torch.is_grad_enabled()))
        own = batch.rows[self.name] * self.weight
        if self.name != "backbone":
            return own
        return own.sum() + sum(rows.sum() for rows in inputs.values()) * self.weight[0]

    def conditions(self):
        return {}

    def backward(self, roots, gradients, *, is_last):
        self.calls.append((f"B {self.name}", is_last))
        torch.autograd.backward([root.edge for root in roots], gradients)


def local(num_rows):
    return Route(None, [num_rows], [num_rows], None, 0, 0)


def batch(**rows):
    return SimpleNamespace(
        rows={name: torch.full((count,), 3.0, dtype=torch.float64) for name, count in rows.items()},
        routes={name: local(count) for name, count in rows.items()},
    )


def presence(one):
    return Presence(frozenset(one.rows), frozenset())


def program_of(batches, trainable=NAMES):
    program = data_parallel({name: name in trainable for name in NAMES}, 1, len(batches))
    numbers = [number for number, name in enumerate(NAMES) if name in trainable]
    return RankProgram.of(without_absent(program, list(map(presence, batches)), numbers), 0)


def execute(batches, trainable=NAMES):
    """What was called, the gradients of the weights, the Timeline, and what is left."""
    program, calls, tensors = program_of(batches, trainable), [], Tensors()
    stages = {number: Module(name, name in trainable, calls) for number, name in program.modules.items()}
    exchanges = Exchanges(program, batches, tensors, None)
    passes = StagePasses(program, stages, batches, exchanges, tensors, {"backbone": 0.5})
    others = {kind: lambda action: calls.append((str(action.kind),)) for kind in (Kind.NORM, Kind.STEP)}
    measured = clock()
    Executor(program, {**passes.handlers, **exchanges.handlers, **others}, measured).run(7)
    gradients = {
        stage.name: None if stage.weight.grad is None else stage.weight.grad.item() for stage in stages.values()
    }
    return SimpleNamespace(calls=calls, gradients=gradients, timeline=measured.take(), tensors=tensors, program=program)


def test_a_row_is_walked_in_its_order_and_every_action_is_a_span():
    done = execute([batch(image=1, audio=2, backbone=1), batch(image=2, audio=1, backbone=1)])
    assert list(done.timeline.action) == list(map(str, done.program.row))
    assert [call[0] for call in done.calls] == [
        f"{action.kind} {NAMES[action.stage]}" if action.kind in (Kind.F, Kind.B) else action.kind
        for action in done.program.row
    ]
    assert set(done.timeline.step.tolist()) == {7}
    assert done.timeline.microbatch.tolist() == [action.microbatch for action in done.program.row]
    assert list(done.timeline.module)[-3:] == ["image", "", ""]


def test_gradients_are_those_of_the_whole_graph_over_all_microbatches():
    done = execute([batch(image=1, audio=2, backbone=1), batch(image=2, audio=1, backbone=3)])
    # loss = (3 * num_backbone + 2 * 3 * (num_image + num_audio)) * weight, seeded with 0.5
    assert done.gradients == {"image": 0.5 * 2 * 9, "audio": 0.5 * 2 * 9, "backbone": 0.5 * (12 + 6 * 6)}


def test_an_absent_modality_is_left_out_of_its_microbatch():
    done = execute([batch(image=1, backbone=1), batch(image=1, audio=1, backbone=1), batch(backbone=1)])
    inputs = [call[1] for call in done.calls if call[0] == "F backbone"]
    assert inputs == [["image"], ["audio", "image"], []]
    assert [call for call in done.calls if call[0].startswith("B ")] == [
        ("B backbone", False), ("B image", False), ("B backbone", False), ("B audio", True), ("B image", True),
        ("B backbone", True),
    ]  # fmt: skip


def test_a_modality_that_no_rank_ever_has_leaves_no_gradient():
    done = execute([batch(audio=1, backbone=1)])
    assert done.gradients["image"] is None and done.gradients["audio"] is not None


def test_of_a_microbatch_without_examples_nothing_is_executed():
    assert [call[0] for call in execute([batch()]).calls] == ["NORM", "STEP"]


def test_where_nothing_trainable_no_graph_is_recorded():
    done = execute([batch(image=1, audio=1, backbone=1)], trainable=())
    assert done.calls == [
        ("F image", [], False), ("F audio", [], False), ("F backbone", ["audio", "image"], False), ("NORM",),
    ]  # fmt: skip


def test_a_frozen_backbone_has_a_graph_where_an_encoder_trainable_and_is_present():
    done = execute([batch(image=1, audio=1, backbone=1), batch(audio=1, backbone=1)], trainable=["image"])
    assert [(call[0], call[-1]) for call in done.calls if call[0].startswith("F")] == [
        ("F image", True), ("F audio", False), ("F backbone", True), ("F audio", False), ("F backbone", False),
    ]  # fmt: skip
    assert done.gradients == {"image": 0.5 * 2 * 3, "audio": None, "backbone": None}


@pytest.mark.parametrize("trainable", [NAMES, (), ("image",), ("backbone",), ("audio", "backbone")])
def test_nothing_is_held_after_the_last_action(trainable):
    assert execute([batch(image=1, audio=1, backbone=1), batch(audio=1, backbone=1)], trainable).tensors.is_empty


def test_an_action_is_told_before_it_is_taken():
    done = []
    program = RankProgram.of(data_parallel({"backbone": True}, 1, 2), 0)
    handlers = dict.fromkeys(Kind, lambda action: done.append(("took", action)))
    Executor(program, handlers, clock(), leave_out=[Kind.NORM]).run(0, lambda *told: done.append(told))
    assert done == [
        told
        for index, action in enumerate(program.row)
        if action.kind is not Kind.NORM
        for told in ((index, action), ("took", action))
    ]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            add_communication(gpipe(2, 1)),
            "0SEND_F0>1 cannot be executed: the runtime has F, B, NORM, STEP, but no SEND_F",
        ),
        (zb_h1(2, 1), "0I0 cannot be executed: the runtime has F, B, NORM, STEP, but no I"),
        (add_fsdp(data_parallel({"backbone": True}, 2, 1), {0: (True,)}), "0GATHER0 cannot be executed"),
        (split_parts(data_parallel({"backbone": True}, 1, 1), 0, 2, 1), r"0F0\.0 cannot be executed: it is a part"),
    ],
    ids=["send", "zero bubble", "gather", "part"],
)
def test_a_row_with_an_unknown_kind_is_refused_before_anything_runs(program, said):
    taken = []
    handlers = dict.fromkeys((Kind.F, Kind.B, Kind.NORM, Kind.STEP), taken.append)
    with pytest.raises(ArgumentError, match=said):
        Executor(RankProgram.of(program, 0), handlers, clock()).run(0)
    assert not taken


def test_a_rank_knows_its_own_stages_alone():
    program = add_exchanges(data_parallel(dict.fromkeys(NAMES, True), 3, 1))
    own = RankProgram.of(program, 1)
    assert own.modules == {3: "image", 4: "audio", 5: "backbone"}
    assert own.sources == {3: (), 4: (), 5: (3, 4)}
    assert own.row == program.actions[1]


def test_rows_leave_their_rank_by_an_exchange_alone():
    """Where the Program has none, a rank that sent would wait for others that do not."""
    one = batch(image=1, backbone=1)
    one.routes["image"] = Route(None, [0, 1], [0, 1], None, 1, 0)
    with pytest.raises(ValueError, match="moves rows between ranks and no process group"):
        execute([one])


def test_a_stage_may_feed_one_that_feeds_another():
    """Nothing in it is of encoders and a backbone."""
    rows = tuple(
        Action(stage, kind, 0) for kind, order in ((Kind.F, (0, 1, 2)), (Kind.B, (2, 1, 0))) for stage in order
    )
    chain = Program(tuple(Stage(0, name) for name in NAMES), ((0, 1), (1, 2)), (rows,), 1)
    own, calls, tensors = RankProgram.of(chain, 0), [], Tensors()
    one = batch(image=1, audio=1, backbone=1)
    stages = {number: Module(name, True, calls) for number, name in enumerate(NAMES)}
    stages[1].forward = lambda batch, inputs: inputs["image"] * stages[1].weight
    exchanges = Exchanges(own, [one], tensors, None)
    Executor(own, StagePasses(own, stages, [one], exchanges, tensors, {"backbone": 1.0}).handlers, clock()).run(0)
    assert [stage.weight.grad.item() for stage in stages.values()] == [3 * 2 * 2, 3 * 2 * 2, 3 + 3 * 2 * 2]
    assert tensors.is_empty


def test_a_pass_in_one_call_lets_what_stands_between_its_parts_run_inside():
    row = [Action(0, Kind.F, 0, part) for part in range(4)]
    row = row[:1] + [Action(1, Kind.F, 0)] + row[1:3] + [Action(1, Kind.F, 1)] + row[3:] + [Action(0, Kind.B, 0)]
    program, called = RankProgram(tuple(row), {0: "backbone", 1: "image"}, {0: (), 1: ()}), []
    timed = clock()

    def forward(action):
        called.append(f"{action} begins")
        if action.stage == 0:
            for part in (1, 3):
                executor.reach(action._replace(part=part))
                called.append(f"{action} goes on")
        called.append(f"{action} ends")

    executor = Executor(program, {Kind.F: forward, Kind.B: lambda action: None}, timed, in_parts=[Kind.F])
    executor.run(step=4)
    first, second = [["1F0 begins", "1F0 ends"], ["1F1 begins", "1F1 ends"]]
    assert called == ["0F0.0 begins", *first, "0F0.0 goes on", *second, "0F0.0 goes on", "0F0.0 ends"]
    spans = timed.take()
    assert list(spans.action) == [str(action) for action in row]
    assert (spans.start_s[1:] >= spans.end_s[:-1]).all() and set(spans.step) == {4}
    assert list(spans.module) == ["backbone", "image", "backbone", "backbone", "image", "backbone", "backbone"]


def test_an_error_inside_a_pass_is_of_the_action_that_has_it():
    row = (Action(0, Kind.F, 0, 0), Action(1, Kind.F, 0), Action(0, Kind.F, 0, 1))

    def forward(action):
        if action.stage:
            raise ValueError("no rows")
        executor.reach(row[2])

    program = RankProgram(row, {0: "backbone", 1: "image"}, {0: (), 1: ()})
    executor = Executor(program, {Kind.F: forward}, clock(), in_parts=[Kind.F])
    with pytest.raises(ValueError) as raised:
        executor.run(step=0)
    assert origin_of(raised.value).action == "1F0 of step 1"
