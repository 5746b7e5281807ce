"""How communication, stragglers and wrong input show in a Timeline."""

from dataclasses import replace

import numpy as np
import pytest

from motet.core.errors import ArgumentError
from motet.schedule import add_communication, add_recompute, gpipe, interleaved_1f1b, one_f_one_b, split_parts
from motet.schedule.program import Action, Kind, Program, Stage
from motet.simulate import Part, simulate, stage_times
from motet.simulate.engine.meetings import MetPasses
from motet.simulate.engine.simulate import Prepared, makespans, simulate_together

BACKENDS = pytest.mark.parametrize("backend", ["native", "reference"])


def spans(timeline):
    return {(span.action, span.stream): (span.start_s, span.end_s) for span in timeline}


def replicas(num_replicas, *rows):
    """One stage a rank, all of one group; the same actions on each."""
    stages = tuple(Stage(rank, "backbone", 0) for rank in range(num_replicas))
    actions = tuple(tuple(Action(rank, *fields) for fields in rows) for rank in range(num_replicas))
    return Program(stages, (), actions, 1)


@BACKENDS
def test_a_collective_starts_when_the_last_rank_reaches_it(backend):
    program = replicas(3, (Kind.F, 0), (Kind.B, 0), (Kind.REDUCE,), (Kind.STEP,))
    times = replace(stage_times([1, 2, 4], [1, 1, 1]), reduce_s=np.array([0.5]), step_s=np.array([0.25]))
    found = spans(simulate(program, times, backend=backend))
    for rank in range(3):
        assert found[f"{rank}REDUCE", "collective"] == (5.0, 5.5)
        assert found[f"{rank}STEP", "compute"] == (5.5, 5.75)


@BACKENDS
def test_passes_that_two_islands_run_together_start_when_both_can(backend):
    """Their second microbatch meets: it starts behind the longer first one, and takes as long as on the slower.

    Of its forward pass, the first island runs a second before by itself, and the second one a second behind.
    """
    program, number = Prepared(gpipe(1, 3)), np.array([[[-1, 7, -1]]] * 2)
    before, behind = np.zeros((2, *number.shape))
    before[0, 0, 1], behind[1, 0, 1] = 1 / 5, 1 / 3
    meeting = MetPasses(number, {Kind.F: (before, behind)})
    times = [stage_times([[1.0, 5.0, 2.0]], [[2.0] * 3]), stage_times([[4.0, 3.0, 1.0]], [[3.0] * 3])]
    found = [spans(one) for one in simulate_together(program, times, meeting, backend=backend)]
    passes = ("0F0", "0F1", "0F2", "0B0", "0B1", "0B2")
    assert [[one[name, "compute"] for name in passes] for one in found] == [
        # Together from 4 to 8; by itself the first runs from 1 to 2, and the second from 8 to 9.
        [(0, 1), (1, 8), (8, 10), (10, 12), (12, 16), (16, 18)],
        [(0, 4), (4, 9), (9, 10), (10, 13), (13, 16), (16, 19)],
    ]
    apart = [one.makespan_s for one in simulate_together(program, times, None, backend=backend)]
    assert apart == [14.0, 17.0]
    together = stage_times([[1.0, 5.0, 2.0], [4.0, 3.0, 1.0]], [[2.0] * 3, [3.0] * 3])
    assert makespans(program, together, 2, meeting=meeting).tolist() == [18.0, 19.0]


@BACKENDS
def test_passes_that_wait_for_each_other_crosswise_are_named(backend):
    """Two replicas of one Program run together what they have in orders of their own."""
    rows = [(Action(0, Kind.F, 0), Action(0, Kind.F, 1)), (Action(1, Kind.F, 1), Action(1, Kind.F, 0))]
    program = Program((Stage(0, "llm", 0), Stage(1, "llm", 0)), (), tuple(rows), 2)
    with pytest.raises(ArgumentError, match=r"cannot run: 0F0 waits for 1F0 waits for 1F1 waits for 0F1"):
        simulate_together(
            Prepared(program), [stage_times([1] * 2, [0] * 2)], MetPasses(np.zeros((1, 2, 2), int), {}), backend=backend
        )


@BACKENDS
def test_parameters_are_gathered_one_slice_ahead(backend):
    rows = [(Kind.GATHER, 0, part) for part in range(4)] + [(Kind.F, 0, part) for part in range(4)]
    times = replace(stage_times([8, 8], [0, 0]), gather_s=np.array([4.0]))
    found = spans(simulate(replicas(2, *rows), times, backend=backend))
    gathers = [found[f"0GATHER0.{part}", "collective"] for part in range(4)]
    assert gathers == [(0.0, 1.0), (1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]
    assert [found[f"0F0.{part}", "compute"][0] for part in range(4)] == [1.0, 3.0, 5.0, 7.0]


@BACKENDS
def test_communication_that_blocks_holds_compute(backend):
    rows = []
    for part in range(2):
        rows += [(Kind.GATHER, 0, part), (Kind.F, 0, part)]
    times = replace(stage_times([2, 2], [0, 0]), gather_s=np.array([2.0]))
    overlapped, blocked = (
        simulate(replicas(2, *rows), times, overlap=overlap, backend=backend) for overlap in (True, False)
    )
    assert overlapped.makespan_s == 3.0
    assert blocked.makespan_s == 4.0
    assert spans(blocked)["0GATHER0.1", "collective"] == (2.0, 3.0)


@BACKENDS
@pytest.mark.parametrize("overlap", [True, False])
def test_a_program_gets_the_communication_that_it_lacks(overlap, backend):
    times = stage_times([1] * 4, [2] * 4, send_s=0.5)
    sent = add_communication(one_f_one_b(4, 8))
    found = {simulate(each, times, overlap=overlap, backend=backend).makespan_s for each in (one_f_one_b(4, 8), sent)}
    assert len(found) == 1


@BACKENDS
def test_tensor_parallel_communication_of_a_whole_pass_is_a_span_after_its_compute(backend):
    times = replace(stage_times([1], [2]), forward_tensor_s=np.array([[0.25]]), backward_tensor_s=np.array([[0.5]]))
    found = spans(simulate(gpipe(1, 1), times, backend=backend))
    assert found == {
        ("0F0", "compute"): (0.0, 1.0),
        ("0F0", "tensor"): (1.0, 1.25),
        ("0B0", "compute"): (1.25, 3.25),
        ("0B0", "tensor"): (3.25, 3.75),
    }


@BACKENDS
@pytest.mark.parametrize(("overlap", "filled"), [(True, (1.0, 2.0)), (False, (2.0, 3.0))])
def test_other_work_runs_beside_tensor_parallel_parts(overlap, filled, backend):
    parts = (Part(1.0), Part(1.0, "tensor"))
    row = (Action(0, Kind.F, 0, 0), Action(0, Kind.F, 0, 1), Action(1, Kind.F, 0))
    program = Program((Stage(0), Stage(0, "image")), (), (row,), 1)
    times = replace(stage_times([1, 1], [0, 0]), forward_tensor_s=np.array([[1.0], [0.0]]), forward_parts={0: parts})
    found = spans(simulate(program, times, overlap=overlap, backend=backend))
    assert found["0F0.1", "tensor"] == (1.0, 2.0)
    assert found["1F0", "compute"] == filled


@BACKENDS
def test_communication_that_is_in_no_part_is_at_the_end_of_those_that_compute(backend):
    parts = (Part(0.25, "tensor"), Part(0.5), Part(0.25, "tensor"), Part(0.5))
    program = split_parts(gpipe(1, 1, has_backward=[False]), 0, 4, 1)
    times = replace(stage_times([2], [0]), forward_tensor_s=np.array([[4.0]]), forward_parts={0: parts})
    assert spans(simulate(program, times, backend=backend)) == {
        ("0F0.0", "tensor"): (0.0, 1.0),
        ("0F0.1", "compute"): (1.0, 2.0),
        ("0F0.1", "tensor"): (2.0, 3.0),
        ("0F0.2", "tensor"): (3.0, 4.0),
        ("0F0.3", "compute"): (4.0, 5.0),
        ("0F0.3", "tensor"): (5.0, 6.0),
    }


@BACKENDS
def test_a_rank_does_not_communicate_ahead_for_its_next_pass(backend):
    parts = (Part(1.0, "tensor"), Part(1.0))
    program = gpipe(1, 2, has_backward=[False])
    encoder = Action(1, Kind.F, 0)
    (row,) = split_parts(program, 0, 2, 1).actions
    program = replace(program, stages=(*program.stages, Stage(0, "image")), actions=((*row[:3], encoder, *row[3:]),))
    times = replace(stage_times([1, 0.5], [0, 0]), forward_tensor_s=np.array([[1.0], [0.0]]), forward_parts={0: parts})
    found = spans(simulate(program, times, backend=backend))
    assert found["0F0.1", "compute"] == (1.0, 2.0)
    assert found["0F1.0", "tensor"] == (2.0, 3.0)  # not beside 0F0.1, of the pass before
    assert found["1F0", "compute"] == (2.0, 2.5)  # beside it, as an encoder's work in the bubble is
    assert found["0F1.1", "compute"] == (3.0, 4.0)


@BACKENDS
def test_recomputation_is_part_of_backward_unless_it_is_an_action(backend):
    times = replace(stage_times([1, 1], [2, 2]), recompute_s=np.array([[1.0]]))
    assert simulate(gpipe(2, 1), times, backend=backend).makespan_s == 8.0
    # An R of stage 0 needs no gradient, so it runs while stage 1 goes backward.
    found = simulate(add_recompute(gpipe(2, 1), [0]), times, backend=backend)
    assert spans(found)["0R0", "compute"] == (1.0, 2.0)
    assert found.makespan_s == 7.0


@BACKENDS
def test_parts_take_the_shares_that_the_times_say(backend):
    rows = [(kind, 0, part) for kind in (Kind.GATHER, Kind.F, Kind.B) for part in range(2)] + [(Kind.REDUCE, 0, 1)]
    times = replace(
        stage_times([4, 4], [8, 8]),
        gather_s=np.array([8.0]),
        reduce_s=np.array([1.0]),
        forward_tensor_s=np.array([[2.0]]),
        forward_parts=dict.fromkeys(range(2), (Part(0.25), Part(0.75))),
    )
    timeline = simulate(replicas(2, *rows), times, backend=backend)
    took_s = {name: end_s - start_s for name, (start_s, end_s) in spans(timeline).items()}
    assert [took_s[f"0GATHER0.{part}", "collective"] for part in range(2)] == [2.0, 6.0]
    assert [took_s[f"0F0.{part}", "compute"] for part in range(2)] == [1.0, 3.0]
    assert [took_s[f"0F0.{part}", "tensor"] for part in range(2)] == [0.5, 1.5]
    assert [took_s[f"0B0.{part}", "compute"] for part in range(2)] == [4.0, 4.0]
    assert took_s["0REDUCE0.1", "collective"] == 1.0  # the only slice that learns


def test_jitter_slows_compute_alone_and_follows_from_the_seed():
    times = stage_times([1] * 4, [2] * 4, send_s=0.5)
    plain, first, again, other = (
        simulate(one_f_one_b(4, 50), times, jitter=jitter, seed=seed)
        for jitter, seed in ((0.0, 0), (0.2, 1), (0.2, 1), (0.2, 2))
    )
    assert first.end_s.tolist() == again.end_s.tolist()
    assert first.end_s.tolist() != other.end_s.tolist()
    assert first.makespan_s > plain.makespan_s
    sends = np.array([stream == "send" for stream in first.stream])
    took_s = first.end_s - first.start_s
    assert np.allclose(took_s[sends], 0.5)
    factors = (took_s / (plain.end_s - plain.start_s))[[stream == "compute" for stream in first.stream]]
    assert np.log(factors).std() == pytest.approx(0.2, rel=0.15)
    assert factors.mean() == pytest.approx(1.0, rel=0.05)


def deadlocked():
    rows = ((Action(0, Kind.B, 0), Action(0, Kind.F, 0)), (Action(1, Kind.F, 0), Action(1, Kind.B, 0)))
    return Program((Stage(0), Stage(1)), ((0, 1),), rows, 1)


def crossed():
    """Two groups whose collectives two ranks enter in different orders."""
    stages = tuple(Stage(rank, "m", group) for rank in range(2) for group in range(2))
    rows = ((Action(0, Kind.GATHER), Action(1, Kind.GATHER)), (Action(3, Kind.GATHER), Action(2, Kind.GATHER)))
    return Program(stages, (), rows, 1)


@BACKENDS
@pytest.mark.parametrize(
    ("program", "circle"),
    [
        (deadlocked(), "The program cannot run: 0B0 waits for 0F0 waits for 0B0."),
        (
            crossed(),
            "The program cannot run: 0GATHER waits for 2GATHER waits for 3GATHER waits for 1GATHER waits for 0GATHER.",
        ),
    ],
)
def test_a_deadlock_names_the_circle(program, circle, backend):
    times = stage_times([1] * program.num_stages, [1] * program.num_stages)
    with pytest.raises(ArgumentError) as error:
        simulate(program, times, backend=backend)
    assert str(error.value) == circle


@BACKENDS
def test_a_sender_whose_collectives_hold_up_compute_goes_on_with_its_row(backend):
    """As on gloo: the second stage is still at work when the first has sent it all that it gets."""
    for program in (gpipe(2, 3), interleaved_1f1b(2, 2, 4)):
        times = stage_times([1, 4] * (program.num_stages // 2), [1, 4] * (program.num_stages // 2), send_s=0.5)
        of_each = [simulate(program, times, overlap=overlap, backend=backend) for overlap in (True, False)]
        assert of_each[0].makespan_s == of_each[1].makespan_s
    found = spans(simulate(gpipe(2, 3), times=stage_times([1, 4], [1, 4], send_s=0.5), overlap=False, backend=backend))
    assert [found[f"0F{number}", "compute"] for number in range(3)] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


def chain(*rows, edges=((0, 1),), groups=(-1, -1)):
    return Program((Stage(0, "a", groups[0]), Stage(1, "a", groups[1])), edges, rows, 2)


F0, F1 = Action(0, Kind.F, 0), Action(1, Kind.F, 0)
SEND, RECV = Action(0, Kind.SEND_F, 0, peer=1), Action(1, Kind.RECV_F, 0, peer=0)


@BACKENDS
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (chain((F1,), (F0,)), "1F0 is in the list of rank 0; its stage is on rank 1."),
        (chain((Action(2, Kind.F, 0),), ()), "F on rank 0 has stage 2; there are 2, numbered from 0."),
        (chain((Action(0, Kind.F, 2),), ()), "F on rank 0 has microbatch 2; there are 2, numbered from 0."),
        (chain((Action(0, Kind.SEND_F, 0),), ()), "SEND_F on rank 0 has peer -1; there are 2, numbered from 0."),
        (
            chain((SEND._replace(part=0),), ()),
            "0SEND_F0.0>1 is a part; only passes, gathers and reductions have parts.",
        ),
        (chain((F0._replace(peer=1),), ()), "0F0>1 has a peer; only sends, receives and exchanges have one."),
        (chain((F0, F0), ()), "0F0 must be there once, whole or in parts numbered from 0."),
        (chain((F0._replace(part=1),), ()), "0F0 must be there once, whole or in parts numbered from 0."),
        (chain((SEND, SEND), (RECV,)), "0SEND_F0>1 is in the program twice."),
        (chain((SEND,), ()), "0SEND_F0>1 has no RECV_F of stage 1 as its other end."),
        (chain((SEND,), (RECV,), edges=()), "0SEND_F0>1 moves data where the program has no edge."),
        (
            chain((Action(0, Kind.REDUCE),), (), groups=(0, 0)),
            "0REDUCE is entered 1 times in a group of 2 stages; each stage must enter it once.",
        ),
        (
            chain((Action(0, Kind.STEP), Action(0, Kind.STEP)), ()),
            "0STEP is not the only STEP of rank 0.",
        ),
    ],
)
def test_a_program_that_is_not_whole_is_refused(program, said, backend):
    with pytest.raises(ArgumentError) as error:
        simulate(program, stage_times([1, 1], [1, 1]), backend=backend)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"forward_s": np.ones((3, 1))},
            "forward_s has shape [3, 1]; the program needs [num_stages, num_microbatches] = [2, 4], or what broadcasts "
            "to it.",
        ),
        (
            {"send_s": np.ones((2, 1))},
            "send_s has shape [2, 1]; the program needs [num_edges, num_microbatches] = [1, 4], or what broadcasts "
            "to it.",
        ),
        (
            {"step_s": np.ones(3)},
            "step_s has shape [3]; the program needs [num_ranks] = [2], or what broadcasts to it.",
        ),
    ],
)
def test_a_table_of_another_shape_is_named(change, said):
    with pytest.raises(ArgumentError) as error:
        simulate(gpipe(2, 4), replace(stage_times([1, 1], [1, 1]), **change))
    assert str(error.value) == said


def test_parts_that_the_times_count_differently_are_named():
    row = (Action(0, Kind.F, 0, 0), Action(0, Kind.F, 0, 1))
    times = replace(stage_times([1], [1]), forward_parts={0: (Part(1.0),)})
    with pytest.raises(ArgumentError) as error:
        simulate(Program((Stage(0),), (), (row,), 1), times)
    assert str(error.value) == "0F0.0 is one of 2 parts; the times have 1 of that pass."


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {0: (Part(0.5), Part(0.25))},
            "forward_parts of stage 0: the shares of compute are [0.5, 0.25]; they must be at least 0 and sum to 1.",
        ),
        ({1: (Part(1.0),)}, "forward_parts has stage 1; there are 1, numbered from 0."),
    ],
)
def test_parts_that_are_no_shares_are_named(parts, said):
    with pytest.raises(ArgumentError) as error:
        simulate(gpipe(1, 1), replace(stage_times([1], [1]), forward_parts=parts))
    assert str(error.value) == said


@pytest.mark.parametrize(
    "options", [{"jitter": -0.1}, {"jitter": 1000.0}, {"jitter": float("nan")}, {"backend": "gpu"}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ArgumentError):
        simulate(gpipe(1, 1), stage_times([1], [1]), **options)


def test_an_empty_program_has_an_empty_timeline():
    assert len(simulate(Program((Stage(0),), (), ((),), 1), stage_times([1], [1]))) == 0


def test_the_sum_over_copies_has_a_price_of_its_own():
    """Hybrid sharding: each microbatch's gradients within a copy, and once, at the end, over the copies."""
    passes = [Action(0, kind, microbatch) for microbatch in range(2) for kind in (Kind.F, Kind.B, Kind.REDUCE)]
    program = Program((Stage(0, group=0),), (), ((*passes, Action(0, Kind.REDUCE)),), 2)
    times = replace(stage_times([1], [1]), reduce_s=np.array([0.5]), replicas_s=np.array([8.0]))
    for backend in ("native", "reference"):
        timeline = simulate(program, times, backend=backend)
        reduces = [span.duration_s for span in timeline if span.kind == "REDUCE"]
        assert reduces == [0.5, 0.5, 8.0]
    alone = Program((Stage(0, group=0),), (), ((*passes[:2], Action(0, Kind.REDUCE)),), 1)
    assert [span.duration_s for span in simulate(alone, times) if span.kind == "REDUCE"] == [0.5]


@BACKENDS
@pytest.mark.parametrize("overlap", [True, False])
def test_sums_of_encoders_are_beside_compute_and_share_the_link_with_the_backbone(overlap, backend):
    of_backbone, of_encoder = (Part(1.0, "tensor"), Part(1.0)), (Part(0.5), Part(1.0, "tensor"), Part(0.5))
    (backbone,) = split_parts(gpipe(1, 1, has_backward=[False]), 0, 2, 1).actions
    first, its_sum, last = (Action(1, Kind.F, 0, part) for part in range(3))
    program = Program((Stage(0), Stage(0, "image")), (), ((first, its_sum, *backbone, last),), 1)
    times = replace(
        stage_times([2, 2], [0, 0]),
        forward_tensor_s=np.array([[1.0], [1.5]]),
        forward_parts={0: of_backbone, 1: of_encoder},
    )
    found = spans(simulate(program, times, overlap=overlap, backend=backend))
    assert found["1F0.1", "tensor"] == (1.0, 2.5)
    assert found["0F0.0", "tensor"] == (2.5, 3.5), "the link is busy until then"
    assert found["0F0.1", "compute"] == (3.5, 5.5)
    assert found["1F0.2", "compute"] == (5.5, 6.5)
    beside = Program(program.stages, (), ((*backbone[:1], first, its_sum, *backbone[1:], last),), 1)
    found = spans(simulate(beside, times, overlap=overlap, backend=backend))
    assert found["0F0.1", "compute"] == ((1.0, 3.0) if overlap else (3.5, 5.5))
    assert found["1F0.2", "compute"] == ((3.0, 4.0) if overlap else (5.5, 6.5))


@BACKENDS
def test_a_rank_communicates_for_its_pass_while_an_encoder_computes(backend):
    of_backbone, of_encoder = (Part(1.0, "tensor"), Part(1.0)), (Part(0.5), Part(1.0, "tensor"), Part(0.5))
    row = split_parts(gpipe(1, 2, has_backward=[False]), 0, 2, 1).actions[0]
    encoder = tuple(Action(1, Kind.F, 0, part) for part in range(3))
    program = Program((Stage(0), Stage(0, "image")), (), ((*row[:2], *encoder, *row[2:]),), 2)
    times = replace(
        stage_times([1, 2], [0, 0]),
        forward_tensor_s=np.array([[1.0], [0.25]]),
        forward_parts={0: of_backbone, 1: of_encoder},
    )
    found = spans(simulate(program, times, backend=backend))
    assert found["1F0.1", "tensor"] == (3.0, 3.25)
    assert found["0F1.0", "tensor"] == (3.25, 4.25), "in the order of the row, beside the encoder's last part"
    assert found["1F0.2", "compute"] == (3.25, 4.25)
    assert found["0F1.1", "compute"] == (4.25, 5.25)
