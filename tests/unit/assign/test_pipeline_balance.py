"""`Plan.balance` in pipelines: what is even, what stays together, and that the edges carry all of it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.assign.plan import assign_step
from motet.assign.rows import edge_rows
from motet.core.errors import UserError
from motet.core.plan import Unit
from motet.core.workload import BACKBONE
from motet.cost.operations import Operations
from motet.schedule import Action, Kind, planned, validate
from motet.schedule.from_plan import BubbleProgram
from motet.schedule.passes.part_runs import PartRun
from motet.simulate.predict.predict import assign_batch, predict_assigned
from unit.assign.test_rows import check
from unit.simulate.even_jobs import Free
from unit.simulate.jobs import BACKBONE as HALVES
from unit.simulate.jobs import CHAIN, Linear, lengths, plan


def beside(image=2, audio=1, llm=2, **options):
    units = (
        Unit("image", ({"image": 4},), dp=image),
        Unit("audio", ({"audio": 3},), first_rank=image, dp=audio),
        Unit("llm", HALVES, first_rank=image + audio, dp=llm, pp=2),
    )
    return plan(*units, **{"batch_size": 16 * llm, **options})


def loads(made, batch, name, axis):
    """Work by replica and microbatch, its sum or largest over the microbatches. axis: "step" or "microbatch"."""
    step, work = assign_step(made, batch), Operations(made.model)(batch)[name]
    items = step.modules[name]
    table = np.zeros((items.num_replicas, step.num_microbatches))
    np.add.at(table, (items.replica, items.microbatch), work)
    return table.sum(axis=1).max() if axis == "step" else table.max(axis=0).sum()


def test_items_are_even_in_each_microbatch_and_microbatches_over_replicas():
    made, batch = beside(3, 2, 2, microbatch_size=4), lengths(32)
    even = replace(made, balance="per_phase")
    assert loads(even, batch, "image", "microbatch") < 0.9 * loads(made, batch, "image", "microbatch")
    assert loads(even, batch, BACKBONE, "step") <= loads(made, batch, BACKBONE, "step")
    work = Operations(made.model)(batch)[BACKBONE].sum()
    assert loads(even, batch, BACKBONE, "step") <= 1.05 * work / 2
    assert loads(replace(even, balance="auto"), batch, "image", "step") == loads(even, batch, "image", "step")


def test_whole_microbatches_stay_together():
    made, batch = beside(microbatch_size=4, balance="per_phase"), lengths(32)
    step = assign_step(made, batch)
    sequences = step.modules[BACKBONE]
    for first in range(0, 32, 4):
        assert len(set(zip(sequences.replica[first : first + 4], sequences.microbatch[first : first + 4]))) == 1
    assert np.unique(sequences.batch_index(step.num_microbatches), return_counts=True)[1].tolist() == [4] * 8


def test_jointly_items_follow_their_examples():
    made, batch = beside(2, 2, 2, balance="joint"), lengths(32)
    step = assign_step(made, batch)
    for name in ("image", "audio"):
        items = step.modules[name]
        np.testing.assert_array_equal(items.replica, step.modules[BACKBONE].replica[items.example])
    assert planned(made).layout.num_islands == 2
    assert planned(replace(made, balance="per_phase")).layout.num_islands == 1


@given(st.tuples(*[st.integers(1, 4)] * 3), st.sampled_from(["joint", "per_phase", "auto"]), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_the_edges_carry_all_that_is_balanced(sizes, balance, microbatch_size):
    made = beside(*sizes, microbatch_size=microbatch_size, batch_size=2 * sizes[2] * microbatch_size, balance=balance)
    found, step = planned(made), assign_step(made, lengths(made.batch_size))
    validate(found.program)
    carried = dict.fromkeys(("image", "audio"), 0)
    for edge in range(len(found.program.edges)):
        for island in range(found.layout.num_islands):
            for microbatch in range(step.num_microbatches):
                for (name, _), rows in edge_rows(found, step, edge, island, microbatch).items():
                    if rows is not None:
                        carried[name] += len(rows.source)
    for name, count in carried.items():
        assert count == step.modules[name].num_tokens.sum()
        check(step, name, BACKBONE)


def test_a_balanced_step_is_predicted_to_be_shorter():
    """Encoders of four replicas bound the step; the images of a microbatch are even over all."""
    made, batch = beside(4, 1, 2, microbatch_size=2), lengths(32)
    images = replace(batch.items["image"], length=40 * batch.items["image"].length)
    batch = replace(batch, items={**batch.items, "image": images})
    cost, steps_s = Free(made.cluster), []
    for balance in ("off", "per_phase"):
        one = replace(made, balance=balance)
        steps_s.append(predict_assigned(one, planned(one), assign_batch(one, batch, cost), cost).step_s)
    assert steps_s[1] < 0.9 * steps_s[0]


def test_a_chain_deals_out_whole_microbatches():
    made, batch = plan(Unit("all", CHAIN, dp=4, pp=3), batch_size=32), lengths(32)
    even = replace(made, balance="per_phase")
    assert planned(even).program == planned(made).program
    assert loads(even, batch, BACKBONE, "step") < loads(made, batch, BACKBONE, "step")


def test_a_policy_that_operations_cannot_count_is_refused():
    with pytest.raises(UserError, match="takes a linear and a quadratic part of lengths"):
        assign_step(beside(balance="joint", policy={"image": "padded_attention"}), lengths(32))


def test_sequences_that_are_too_long_for_a_replica_are_cut_and_others_fill_up():
    chain = plan(*(Unit("llm", ({"image": 4, "audio": 3, **HALVES[0]}, HALVES[1]), dp=4, pp=2),), batch_size=16)
    made, batch = replace(chain, balance="split", microbatch_size=2), lengths(16)
    batch.sequence[3] = 20 * batch.sequence.max()
    step, work = assign_step(made, batch), Operations(made.model)(batch)[BACKBONE]
    items = step.modules[BACKBONE]
    assert items.cuts.degrees == {3: 4}
    inside = items.microbatch == items.microbatch[3]
    of_replicas = np.bincount(items.cuts.rank, items.cuts.share_of(work), 4)
    of_replicas += np.bincount(items.replica, work * (inside & (np.arange(16) != 3)), 4)
    assert of_replicas.max() <= 1.05 * work[inside].sum() / 4
    for name in ("image", "audio"):
        assert np.array_equal(step.modules[name].replica, items.replica[step.modules[name].example])


def test_no_more_sequences_are_cut_than_an_even_step_needs():
    """Their microbatches come first, as replicas wait for each other there."""
    whole = {"image": 4, "audio": 3, BACKBONE: sum(stage[BACKBONE] for stage in HALVES)}
    made = plan(Unit("all", (whole,), dp=4), batch_size=64)
    split, batch = replace(made, balance="split"), lengths(64)
    joint = replace(made, balance="joint")
    assert assign_step(split, batch).modules[BACKBONE].cuts is None
    assert loads(split, batch, BACKBONE, "step") == loads(joint, batch, BACKBONE, "step")
    batch.sequence[[3, 40]] = 30 * batch.sequence.max()
    step, work = assign_step(split, batch), Operations(made.model)(batch)
    items = step.modules[BACKBONE]
    assert items.cuts.items.tolist() == [3, 40] and sorted(items.microbatch[[3, 40]]) == [0, 1]
    whole, of_replicas = np.setdiff1d(np.arange(64), [3, 40]), np.zeros(4)
    of_replicas += np.bincount(items.cuts.rank, items.cuts.share_of(work[BACKBONE]), 4)
    of_replicas += np.bincount(items.replica[whole], work[BACKBONE][whole], 4)
    assert of_replicas.max() < 1.05 * of_replicas.mean()


def test_items_of_cut_sequences_that_dominate_are_cut_too():
    """And nothing else moves: what is left out of a step takes its items with it."""
    chain = plan(Unit("llm", ({"image": 4, "audio": 3, **HALVES[0]}, HALVES[1]), dp=4, pp=2), batch_size=16)
    made, batch = replace(chain, balance="split", microbatch_size=2), lengths(16)
    example = int(batch.items["image"].example[0])
    batch.sequence[example] = 20 * batch.sequence.max()
    for column in (batch.items["image"].length, batch.items["image"].num_tokens):
        column[0] = 12 * column.sum()
    steps, steps_s = {}, {}
    for can_share in (True, False):
        modules = tuple(replace(module, shareable=can_share) for module in made.model.modules)
        one = replace(made, model=replace(made.model, modules=modules))
        cost = Linear(made.cluster)
        steps[can_share] = assign_step(one, batch).modules
        steps_s[can_share] = predict_assigned(one, planned(one), assign_step(one, batch), cost).step_s
    assert steps[True]["image"].cuts.degrees == {0: 4} and steps[False]["image"].cuts is None
    for name in ("image", "audio"):
        here, whole = steps[True][name], steps[False][name]
        assert (here.replica == whole.replica)[here.example != example].all()
    assert steps_s[True] < 0.9 * steps_s[False]


@pytest.mark.parametrize("order", ["given", "both"])
def test_sequences_are_cut_in_groups_under_caps(order):
    """What is beside a cut sequence fills up other replicas, whatever its group; other microbatches keep theirs."""
    caps = {"image": 500, "backbone": 360}
    grouped = plan(Unit("all", CHAIN, dp=2, pp=3), batch_size=48, microbatch_size=4, microbatch_caps=caps, order=order)
    made, batch = replace(grouped, balance="split"), lengths(48)
    batch.sequence[5] = 20 * batch.sequence.max()
    step = assign_batch(made, batch, Free(made.cluster))
    items, work = step.modules[BACKBONE], Operations(made.model)(batch)[BACKBONE]
    assert items.cuts.degrees == {5: 2}
    inside = items.microbatch == items.microbatch[5]
    of_replicas = np.bincount(items.cuts.rank, items.cuts.share_of(work), 2)
    of_replicas += np.bincount(items.replica, work * (inside & (np.arange(48) != 5)), 2)
    assert of_replicas.max() <= 1.05 * work[inside].sum() / 2
    totals = np.bincount(items.batch_index(6)[~inside], items.length[~inside], 12)
    assert totals.max() <= caps[BACKBONE]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"llm": 1, "image": 1}, "has one replica, and no encoder.s unit has several"),
        ({"order": "intra", "balance": "joint"}, "both deal out the microbatches"),
    ],
)
def test_what_replicas_cannot_share_is_refused(options, why):
    with pytest.raises(UserError, match=why):
        planned(beside(**{"image": 2, "audio": 2, "balance": "split", **options}))


def test_replicas_that_other_units_feed_in_common_meet():
    """Fills in which each replica would wait for the other are none, also where each by itself can run."""
    units = (
        Unit("llm", HALVES, dp=2, pp=2),
        Unit("image", ({"image": 2}, {"image": 2}), dp=2, pp=2),
        Unit("audio", ({"audio": 3},), first_rank=4),
    )
    made = plan(*units, batch_size=6, balance="split", filling="by_step")
    own = planned(made)
    assert [stage.meets for stage in own.program.stages if stage.module == BACKBONE] == [True] * 4
    validate(own.program, host_waits=True)

    def passes(stage, *before):
        """Forward passes, each before an action of the backbone's row, and all backward passes behind it."""
        at = [*zip(before, "FFF"), *zip([6] * 3, "BBB")]
        return [PartRun(place, (Action(stage, Kind[kind], n % 3),)) for n, (place, kind) in enumerate(at)]

    # Its second microbatch waits for the first one's last stage in one replica, and the other way round in the other.
    runs = [passes(5, 0, 0, 0), passes(6, 0, 1, 1), passes(7, 0, 0, 2), passes(8, 0, 0, 0), []]
    for balance, can_run in (("joint", True), ("split", False)):
        one = replace(made, balance=balance)
        filled = BubbleProgram(planned(one).layout).refilled(planned(one), runs)
        assert (filled is not None) == can_run
        if filled is not None:
            validate(filled.program, host_waits=True)
