"""Items of encoders on ranks of their own that replicas of their unit share: what is cut, sent, priced and gained."""

from dataclasses import replace

import numpy as np
import pytest

from motet.assign.plan import assign_step
from motet.assign.planned_step import by_replica, decide_planned_step
from motet.assign.rows import edge_rows, sent_shares
from motet.core.plan import Unit
from motet.core.workload import BACKBONE, ItemLengths
from motet.cost.operations import Operations
from motet.dispatch.edge_messages import assignment_of
from motet.dispatch.shared_items import shared_items
from motet.schedule import planned, validate
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.stage_pricing import Pricing
from motet.simulate.show.plan_words import plan_in_words
from motet.train.report.metrics import cut_items
from motet.train.step_predictor import with_whole_sequences
from unit.simulate.even_jobs import EVEN, Free, even
from unit.simulate.jobs import Linear, plan
from unit.train.test_step_predictor import predicted, step_of

WHOLE = {"backbone": 12}
SHARED = replace(EVEN, modules=tuple(replace(module, shareable=True) for module in EVEN.modules))


def plan_of(image=3, llm=1, cp=1, stages=({"image": 4},), **options):
    units = (
        Unit("image", stages, dp=image, cp=cp, pp=len(stages)),
        Unit("llm", (WHOLE,), dp=llm, first_rank=image * cp * len(stages)),
    )
    return plan(*units, spec=SHARED, **{"batch_size": 6, "balance": "split", "schedule": "gpipe", **options})


def lengths_of(*rows, sequence=60):
    """Examples of as long sequences, with one image each of so many rows."""
    batch, each = even(len(rows)), np.array(rows)
    return replace(
        batch,
        sequence=np.full(len(rows), sequence),
        num_targets=np.full(len(rows), sequence),
        items={"image": ItemLengths(np.arange(len(rows)), each, each)},
    )


LONG = lengths_of(600, 40, 50, 60, 30, 20, 30, 400, 380, 10, 20, 30)


def loads(made, batch):
    """Operations of images by replica and microbatch."""
    step, work = assign_step(made, batch), Operations(made.model)(batch)["image"]
    items = step.modules["image"]
    table = np.zeros((items.num_replicas, step.num_microbatches))
    cuts, whole = items.cuts, items.cuts.whole_among(np.arange(len(items.example)))
    np.add.at(table, (items.replica[whole], items.microbatch[whole]), work[whole])
    np.add.at(table, (cuts.rank, items.microbatch[cuts.item]), cuts.share_of(work))
    return table


def test_items_that_dominate_are_cut_each_at_its_degree_and_others_fill_up():
    made = plan_of(batch_size=12, microbatch_size=6)
    items = assign_step(made, LONG).modules["image"]
    assert items.cuts.degrees == {0: 3, 7: 2, 8: 3} and items.num_replicas == 3
    assert (loads(made, LONG).max(axis=0) < 1.06 * loads(made, LONG).mean(axis=0)).all()
    assert assign_step(made, even(12)).modules["image"].cuts is None
    assert assign_step(made, LONG).modules[BACKBONE].cuts is None  # A backbone of one replica cuts no sequences.


def test_the_edges_carry_fragments_to_the_replica_of_their_sequence():
    made = plan_of(llm=2, batch_size=12, microbatch_size=3)
    found, step = planned(made), assign_step(made, LONG)
    validate(found.program, host_waits=True)
    assert found.layout.num_islands == 1
    # Where any rank of an encoder's unit may meet the others in a pass, none takes passes in another order.
    assert {stage.module for stage in found.program.stages if stage.meets} == {"image", BACKBONE}
    taken, items, sent = {}, step.modules["image"], np.zeros((2, 3, step.num_microbatches))
    for edge in range(len(found.program.edges)):
        source, sink = found.ends(edge)
        for microbatch in range(step.num_microbatches):
            (rows,) = edge_rows(found, step, edge, 0, microbatch).values()
            assert not taken.keys() & {(sink.replica, microbatch, row) for row in rows.sink.tolist()}
            taken |= {(sink.replica, microbatch, row): None for row in rows.sink.tolist()}
            sent[sink.replica, source.replica, microbatch] = len(rows.source)
    assert len(taken) == items.num_tokens.sum()
    for sink in range(2):
        shares = sent_shares(step, "image", BACKBONE, sink)
        np.testing.assert_allclose(shares * sent.sum(axis=0), sent[sink])


@pytest.mark.parametrize("cp", [1, 2])
def test_fragments_are_priced_as_they_are_executed(cp):
    made = plan_of(cp=cp, batch_size=12, microbatch_size=6)
    program, step = planned(made), assign_step(made, LONG)
    pricing, layer = Pricing(made, program, step, Linear(made.cluster)), made.model.module("image").layers[0]
    decided = decide_planned_step(made, LONG).microbatches
    for number, part in enumerate(decided):
        assert part.decision.is_over_all("image")
        of_ranks = [
            len(shared_items(part.decision, "image", part.lengths.items["image"], r).own) for r in range(3 * cp)
        ]
        priced = [pricing.rows("image", layer, program.stages[d], [0])[0, number] for d in range(3)]
        assert priced == pytest.approx([max(of_ranks[d * cp : (d + 1) * cp]) for d in range(3)], abs=1)
        assert sum(of_ranks) == part.lengths.items["image"].length.sum()
        assert max(of_ranks) < 1.35 * np.mean(of_ranks)
        exchange = pricing.islands(program.stages[0]).forward_tensor[0, number]
        assert exchange > 0
    again = by_replica(made, assignment_of(step_of(made, LONG).batches)).modules["image"]
    items = step.modules["image"]
    assert (again.replica == items.replica[np.argsort(items.microbatch, kind="stable")]).all()
    assert again.cuts.degrees == {
        int(np.flatnonzero(np.argsort(items.microbatch, kind="stable") == item)[0]): degree
        for item, degree in items.cuts.degrees.items()
    }


def test_ranks_of_a_replica_share_a_fragment_and_an_item_of_their_own():
    """Two replicas of two ranks: the long image is cut over all four, and in the second microbatch, where each replica
    has one image, its own ranks share it and no others meet them.
    """
    made = plan_of(2, cp=2, batch_size=4, microbatch_size=2)
    first, second = decide_planned_step(made, lengths_of(400, 8, 96, 100)).microbatches
    assert first.decision.cuts_of("image").degrees == {0: 4} and first.decision.is_over_all("image")
    assert second.decision.cuts_of("image").degrees == {0: 2, 1: 2} and not second.decision.is_over_all("image")
    left = first.decision.keep(np.array([False, True]), first.lengths)
    assert left.cuts_of("image") is None and not left.is_over_all("image")


def test_replicas_run_what_they_share_together():
    """One image of 600 rows beside one of 20, of two replicas that have had 45 and 50 rows before: both start behind
    the 50, and the backbone, which takes no time beside them, behind all.
    """
    made = plan_of(2, batch_size=4, microbatch_size=2)
    batch, cost = lengths_of(45, 50, 600, 20, sequence=1), Free(made.cluster)
    items = assign_step(made, batch).modules["image"]
    assert items.cuts.degrees == {2: 2}
    step_s = predict_assigned(made, planned(made), assign_step(made, batch), cost).step_s
    whole = replace(made, balance="per_phase")
    whole_s = predict_assigned(whole, planned(whole), assign_step(whole, batch), cost).step_s
    # 50 and then an even share of 620, against 50 and then 600.
    assert step_s == pytest.approx(whole_s * (50 + 310) / 650, rel=0.05)


def test_the_gain_is_that_over_whole_items():
    made = plan_of(batch_size=12, microbatch_size=6)
    whole = with_whole_sequences(made)
    assert whole.balance == "per_phase" and with_whole_sequences(replace(made, order="both")).balance == "off"
    step = step_of(made, LONG)
    whole_s, cut_s = (
        predict_assigned(one, planned(one), assign_step(one, LONG), Linear(made.cluster)).step_s
        for one in (whole, made)
    )
    found = predicted(made, step)
    assert found.gained_s == whole_s - cut_s > 0
    said = cut_items(step.batches, found.gained_s)
    assert [item["ranks"] for item in said] == [3, 2, 3]
    assert all(item["gain_s"] == pytest.approx(found.gained_s, rel=1e-3) for item in said)


def test_a_plan_says_whose_items_are_cut():
    said = "\n".join(plan_in_words(plan_of(llm=2)))
    assert "So are items of image, over replicas of their units." in said
    assert "Sequences" not in "\n".join(plan_in_words(plan_of()))
