import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from motet.core.errors import ArgumentError
from motet.schedule import Sharding, add_exchanges, add_fsdp, data_parallel, one_f_one_b, split_parts
from motet.schedule.program import Action, AlikeRows, Kind
from motet.simulate import StageTimes, bubbles, simulate
from motet.simulate.bubbles import bubble_shares
from motet.simulate.engine.alike import AlikeTimeline
from motet.simulate.engine.simulate import Prepared, makespans
from motet.simulate.engine.stage_times import Part, stage_times

NUM_RANKS, NUM_MODULES = 5, 3


def program(num_microbatches):
    made = add_exchanges(data_parallel({"image": True, "audio": False, "backbone": True}, NUM_RANKS, num_microbatches))
    made = split_parts(split_parts(made, 0, 3, 3), 2, 4, 4)
    return add_fsdp(made, {0: [True] * 3, 1: [False], 2: [True] * 4}, Sharding(shard_size=5))


def times(num_microbatches, *, tensor):
    rng, stages = np.random.default_rng(num_microbatches), NUM_RANKS * NUM_MODULES
    shape = stages, num_microbatches
    parts = (Part(0.1), Part(0.2), Part(0.3), Part(0.4))
    return StageTimes(
        *rng.random((3, *shape)),
        recompute_s=rng.random(shape),
        forward_tensor_s=tensor * rng.random(shape),
        backward_tensor_s=tensor * rng.random(shape),
        exchange_s=rng.random((2 * NUM_RANKS, num_microbatches)),
        gather_s=rng.random(stages),
        reduce_s=rng.random(stages),
        replicas_s=rng.random(stages),
        norm_s=rng.random(1),
        step_s=rng.random(NUM_RANKS),
        forward_parts={rank * NUM_MODULES + 2: parts for rank in range(NUM_RANKS)},
    )


def columns(timeline):
    return [
        list(getattr(timeline, name)) for name in ("rank", "start_s", "end_s", "action", "kind", "module", "stream")
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
@pytest.mark.parametrize("tensor", [0, 1])
def test_ranks_that_are_alike_take_what_the_whole_program_takes(overlap, jitter, tensor):
    for num_microbatches in (1, 3):
        made, given = program(num_microbatches), times(num_microbatches, tensor=tensor)
        how = {"overlap": overlap, "jitter": jitter, "seed": 3}
        alike, whole = simulate(made, given, **how), simulate(Prepared(made, whole=True), given, **how)
        assert isinstance(alike, AlikeTimeline) and not isinstance(whole, AlikeTimeline)
        assert (alike.makespan_s, len(alike)) == (whole.makespan_s, len(whole))
        assert columns(alike) == columns(whole)
        assert columns(simulate(made, given, **how, backend="reference")) == columns(whole)


@pytest.mark.parametrize("part_spans", [1, 40, 1 << 20])
def test_bubbles_of_ranks_that_are_alike_are_those_of_the_whole_program(monkeypatch, part_spans):
    monkeypatch.setattr(sys.modules["motet.simulate.bubbles"], "_PART_SPANS", part_spans)
    made, given = program(3), times(3, tensor=1)
    alike, whole = simulate(made, given), simulate(Prepared(made, whole=True), given)
    assert isinstance(alike, AlikeTimeline)
    found, expected = bubbles(alike), bubbles(whole)
    assert (found.step_s, found.busy_s.tolist()) == (expected.step_s, expected.busy_s.tolist())
    assert found.idle_s.tolist() == expected.idle_s.tolist()


def test_ranks_that_are_alike_are_simulated_without_a_table_of_all_that_they_do():
    num_ranks, num_microbatches = 2_000, 2
    made = data_parallel({"image": True, "backbone": True}, num_ranks, num_microbatches)
    made = split_parts(split_parts(made, 0, 40, 40), 1, 40, 40)
    prepared, rng = Prepared(made), np.random.default_rng(0)
    given = StageTimes(*rng.random((3, 2 * num_ranks, num_microbatches)))
    tracemalloc.start()
    try:
        timeline = simulate(prepared, given)
        assert len(bubble_shares(timeline)) == num_ranks
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(timeline) * np.dtype(np.float64).itemsize


def test_a_timeline_of_ranks_that_are_alike_is_named_and_has_no_other_columns():
    timeline = simulate(program(1), times(1, tensor=0)).named([f"rank {rank}0" for rank in range(NUM_RANKS)])
    assert timeline.rank_name(2) == "rank 20" and timeline.num_ranks == NUM_RANKS
    with pytest.raises(AttributeError, match="'colour'"):
        timeline.colour  # noqa: B018


def test_ranks_whose_parts_or_groups_differ_are_simulated_one_by_one():
    made, given = program(1), times(1, tensor=0)
    others = {**given.forward_parts, 5: (Part(0.25),) * 4}
    assert not isinstance(simulate(made, replace(given, forward_parts=others)), AlikeTimeline)
    apart = replace(made, stages=tuple(replace(stage, group=stage.group + 3 * stage.rank) for stage in made.stages))
    assert Prepared(apart).num_copies == 1


def test_a_circle_on_ranks_that_are_alike_is_named():
    made = data_parallel({"backbone": True}, 2, 1)
    backwards = replace(made, actions=AlikeRows((Action(0, Kind.B, 0), Action(0, Kind.F, 0)), 2, 1))
    with pytest.raises(ArgumentError, match="0B0 waits for 0F0 waits for 0B0"):
        simulate(backwards, StageTimes(*np.ones((3, 2, 1))))


def test_makespans_are_those_of_each_island_by_itself():
    forward, backward = np.random.default_rng(0).random((2, 3, 4, 5))
    islands = [stage_times(forward[n], 2 * backward[n], send_s=0.1) for n in range(3)]
    together = stage_times(forward.reshape(12, 5), 2 * backward.reshape(12, 5), send_s=0.1)
    made = Prepared(one_f_one_b(4, 5))
    found = makespans(made, together, 3)
    assert found.tolist() == [simulate(one_f_one_b(4, 5), one).makespan_s for one in islands]


@pytest.mark.parametrize("tensor", [0, 1])
def test_some_ranks_have_their_own_spans_and_names(tensor):
    made, given = program(2), times(2, tensor=tensor)
    names = [f"rank {rank}0" for rank in range(NUM_RANKS)]
    alike, whole = simulate(made, given).named(names), simulate(Prepared(made, whole=True), given)
    some = alike.some(np.array([1, 4]))
    assert (some.num_ranks, [some.rank_name(rank) for rank in range(2)]) == (2, ["rank 10", "rank 40"])
    for number, rank in enumerate((1, 4)):
        own, theirs = (timeline.rank == at for timeline, at in ((some, number), (whole, rank)))
        np.testing.assert_array_equal(some.start_s[own], whole.start_s[theirs])
        np.testing.assert_array_equal(some.end_s[own], whole.end_s[theirs])
        actions, others = (
            [timeline.action[at] for at in np.flatnonzero(of)] for timeline, of in ((some, own), (whole, theirs))
        )
        assert actions == others
    np.testing.assert_allclose(alike.busy_s, bubbles(whole).busy_s)
    np.testing.assert_allclose(bubble_shares(alike), bubble_shares(whole))


def test_ranks_that_take_the_same_time_for_everything_have_one_leader():
    made, given = program(1), times(1, tensor=0)
    assert simulate(made, given).leader.tolist() == list(range(NUM_RANKS))
    first = {
        name: np.tile(getattr(given, name)[:NUM_MODULES], (NUM_RANKS, 1))
        for name in ("forward_s", "input_s", "weight_s", "recompute_s")
    }
    constant = {name: np.zeros(1) for name in ("gather_s", "reduce_s", "replicas_s", "step_s")}
    like = replace(given, **first, **constant, exchange_s=np.zeros((1, 1)))
    assert simulate(made, like).leader.tolist() == [0] * NUM_RANKS
    other = like.forward_s.copy()
    other[3 * NUM_MODULES] *= 1.5
    assert simulate(made, replace(like, forward_s=other)).leader.tolist() == [0, 0, 0, 3, 0]
