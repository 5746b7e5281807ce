"""What replicas of a backbone that share sequences are priced for, against the rows that training gives their ranks."""

from dataclasses import replace

import numpy as np
import pytest

from motet.assign.pipeline import Batching
from motet.assign.pipeline_balance import assign_cut, item_work
from motet.assign.plan import assign_step
from motet.assign.planned_step import decide_planned_step, microbatches_of
from motet.assign.rows import num_given_rows
from motet.assign.taken_rows import merge_moves
from motet.core.attention_table import AttentionTable
from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.cost.catalogue import cluster
from motet.dispatch.context import ContextPlace
from motet.dispatch.stage_batch import assemble_stages
from motet.runtime.place import Place
from motet.runtime.sections import spans_of
from motet.schedule import planned
from motet.simulate.predict import merge_prices
from motet.simulate.predict.exchange_seconds import evenly_moved_s
from motet.simulate.predict.predict import predict_assigned
from motet.simulate.predict.stage_pricing import Pricing
from unit.simulate.even_jobs import EVEN, LAYER_B, LAYER_F, ROWS, Free, even
from unit.simulate.jobs import EXCHANGE_S, Linear, plan

WIDTH, KV_BYTES = 16, 2 * 16 * 2
"""Of rows, and of a row's keys and values in 16 bits."""
LENGTHS = np.array([900, 100, 60, 40, 50, 60, 70, 20, 300, 10, 290, 20])


def plan_of(dp: int = 4, cp: int = 1, num_images: int = 0, **options) -> Plan:
    image = connect(vit("image", Transformer(8, 16, 2), num_layers=1), output_dim=WIDTH)
    model = multimodal(
        "tiny", language_model(Transformer(WIDTH, 32, 2, causal=True), 2, 100), [image] if num_images else []
    )
    first = {"image": 1, "backbone": 1} if num_images else {"backbone": 1}
    unit = Unit("llm", (first, {"backbone": 1}), dp=dp, pp=2, cp=cp)
    return Plan(model, cluster("h100", num_nodes=2), (unit,), len(LENGTHS), balance="split", **options)


def lengths_of() -> BatchLengths:
    return BatchLengths(LENGTHS, np.full(len(LENGTHS), 3), np.zeros(len(LENGTHS), np.int32), {})


def num_runs_of(share) -> int:
    """Rows that a rank has side by side, of the sequences that others have rows of too."""
    rows = share.rows.after(share.num_whole)
    own = rows.rows[share.rank]
    return int(((np.diff(own, prepend=-2) > 1) | np.isin(own, rows.starts)).sum())


@pytest.mark.parametrize("cp", [1, 2])
def test_shared_sequences_are_priced_as_they_are_executed(cp):
    plan, lengths = plan_of(cp=cp), lengths_of()
    program, step = planned(plan), assign_step(plan, lengths)
    pricing = Pricing(plan, program, step, Linear(plan.cluster))
    layer, cut, copies = plan.model.module(BACKBONE).layers[1], 0, 0
    found = pricing.rows(BACKBONE, layer, program.stages[0], range(4))
    work = pricing.layer_pricing.work.of_busiest(BACKBONE, layer)
    priced_s = pricing.islands(program.stages[0]).forward
    for number, part in enumerate(decide_planned_step(plan, lengths).microbatches):
        batches = []
        for rank in range(4 * cp):
            place = Place.of(plan, rank)
            context = ContextPlace.of(plan, place.c)
            batches.append(assemble_stages(part.decision, part.lengths, place.replicas, None, {}, {}, context))
        cut += part.decision.cuts is not None
        shares = [batch.sequences.context for batch in batches]
        rows = np.array([len(share.own) for share in shares])
        assert rows.sum() == part.lengths.sequence.sum() and (rows > 0).all()
        assert found[:, number] == pytest.approx(rows.reshape(4, cp).mean(axis=1), abs=2)
        runs = np.array([num_runs_of(share) for share in shares]).reshape(4, cp).mean(axis=1)
        assert work.runs.number.reshape(4, -1)[:, number] == pytest.approx(runs)
        assert len(set(priced_s[:, number])) == 1  # Replicas wait for each other in each layer.
        moved = np.zeros((len(shares), len(shares)), dtype=np.int64)
        for rank, share in enumerate(shares):
            shared = share.rows.after(share.num_whole)
            wanted = shared.wanted(AttentionTable.packed(shared.lengths))
            moved[rank] = shared.moves(rank, wanted).num_received
        np.fill_diagonal(moved, 0)
        copies = max(copies, moved.sum(axis=0).max(), moved.sum(axis=1).max())
    assert cut == 3
    assert pricing.layer_pricing.largest_copies(BACKBONE, layer) == pytest.approx(copies * KV_BYTES)


class Asked(Linear):
    """Notes the work that is priced."""

    def layer_seconds(self, module, layer, work, tp=1):
        self.asked.append(work)
        return super().layer_seconds(module, layer, work, tp)


@pytest.mark.parametrize(("exchange", "has_runs"), [("group_cast", True), ("all_gather", True), ("ulysses", False)])
def test_ranks_with_all_rows_of_some_heads_have_no_runs(exchange, has_runs):
    plan = replace(plan_of(cp=2), balance="joint")
    cost = Asked(plan.cluster)
    pricing = Pricing(plan, planned(plan), assign_step(plan, lengths_of()), cost, exchange=exchange)
    pricing.layer_pricing.price(BACKBONE, plan.model.module(BACKBONE).layers[1])
    (work,) = (each for each in cost.asked if not isinstance(each, tuple))
    assert (work.runs.number > 0).all() == has_runs and work.runs.number.any() == has_runs
    assert work.runs.pairs.any() == has_runs


def test_a_step_with_a_long_sequence_is_shorter_if_replicas_share_it():
    split, whole = plan_of(), replace(plan_of(), balance="joint")
    step_s = [
        predict_assigned(plan, planned(plan), assign_step(plan, lengths_of()), Linear(plan.cluster)).step_s
        for plan in (split, whole)
    ]
    assert step_s[0] < 0.6 * step_s[1]


@pytest.mark.parametrize("fed_in_common", [False, True])
def test_replicas_start_passes_of_what_they_share_together(fed_in_common):
    """One stage and three microbatches, the second with a cut: in the first one replica is busier, and in the last the
    other. Both run the cut when both are there, in islands of their own as in one, where another unit feeds both.
    """
    rows = np.array([20, 80, 60, 20, 50, 10])  # By microbatch, of the two replicas; 60 are cut.
    units = (Unit("llm", ({"image": 4, "backbone": 12},), dp=2),)
    if fed_in_common:
        units = Unit("llm", ({"backbone": 12},), dp=2), Unit("image", ({"image": 4},), first_rank=2)
    made = plan(*units, spec=EVEN, batch_size=6, schedule="gpipe", balance="split")
    batch = replace(even(6), sequence=rows, num_targets=rows)
    none = np.zeros(0, dtype=np.int64)
    batch = replace(batch, items={"image": ItemLengths(none, none, none)})
    dealt = Batching(np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 0, 1, 0, 1]))
    step = assign_cut(made, batch, dealt, item_work(made, batch), np.array([2]))
    cuts = step.modules[BACKBONE].cuts
    assert cuts.degrees == {2: 2}
    of_replicas = np.bincount(cuts.rank, cuts.share_of(rows))
    of_replicas[step.modules[BACKBONE].replica[3]] += rows[3]
    shared = of_replicas.max()  # Each layer is as long as on the slower replica.
    found = predict_assigned(made, planned(made), step, Free(made.cluster))
    row_f, row_b = 12 * LAYER_F / ROWS, 12 * LAYER_B / ROWS
    # Forward, the cut starts behind the second replica's 80 rows, and behind it that has 10. Backward, it starts behind
    # the same 80 rows, and behind it the first replica has 50.
    assert found.step_s == pytest.approx((80 + shared + 10) * row_f + (80 + shared + 50) * row_b)


class WithoutExchanges(Linear):
    """Exchanges take no time."""

    def exchange_seconds(self, moved_bytes, ranks):
        return 0.0 * moved_bytes.busiest


@pytest.mark.parametrize("cp", [1, 2])
def test_rows_of_encoders_go_to_their_places_where_sequences_are_shared(cp):
    """In microbatches with a cut, among the ranks of all replicas; in others, among those of a replica."""
    plan, each = plan_of(cp=cp, num_images=len(LENGTHS)), np.arange(len(LENGTHS))
    images = ItemLengths(each, 16 + each, 4 + each)
    lengths = replace(lengths_of(), sequence=np.where(LENGTHS > 500, LENGTHS, 50), items={"image": images})
    step, (with_s, without_s) = assign_step(plan, lengths), ([], [])
    for cost, found in ((Linear, with_s), (WithoutExchanges, without_s)):
        pricing = Pricing(plan, planned(plan), step, cost(plan.cluster))
        for stage in pricing.planned.stages:
            prices = pricing.islands(stage)
            found.append(np.stack([prices.forward_tensor, prices.backward_tensor]))
    taken = np.stack(with_s) - np.stack(without_s)
    sequences, images = step.modules[BACKBONE], step.modules["image"]
    cut = set(sequences.microbatch[sequences.cuts.items].tolist())
    assert 0 < len(cut) < step.num_microbatches
    for microbatch in range(step.num_microbatches):
        for replica in range(4):
            inside = images.microbatch == microbatch
            if microbatch not in cut:
                inside &= images.replica == replica
            num_ranks = 4 * cp if microbatch in cut else cp
            moved_bytes = images.num_tokens[inside].sum() * WIDTH * 2 * (num_ranks - 1) / num_ranks**2
            assert taken[0, :, replica, microbatch] == pytest.approx([moved_bytes * EXCHANGE_S] * 2)
    assert (taken[1] == 0).all()


@pytest.mark.parametrize(("dp", "cp"), [(4, 1), (4, 2), (1, 4)])
def test_a_merge_of_the_users_own_takes_what_moves_for_it(dp, cp):
    """At the first stage, there and back: the busiest rank's rows of images, and of what is merged; frozen images have
    no gradient. Where cuts are, the exchange is among all replicas.
    """
    each = np.arange(len(LENGTHS))
    lengths = replace(lengths_of(), items={"image": ItemLengths(each, 16 + each, 4 + each)})
    plan = plan_of(dp, cp, num_images=len(LENGTHS), microbatch_size=1 if dp > 1 else 4)
    plan = plan if dp > 1 else replace(plan, balance="off")
    learns, taken = plan.model.moved("image")[1], []
    step = assign_step(plan, lengths)
    for merging in (replace(plan, model=replace(plan.model, merges=True)), plan):
        pricing = Pricing(merging, planned(merging), step, Linear(plan.cluster))
        prices = [pricing.islands(stage) for stage in pricing.planned.stages[:2]]
        taken.append(np.stack([np.stack([each.forward_tensor, each.backward_tensor]) for each in prices]))
        if merging is plan:
            images = evenly_moved_s(pricing, num_given_rows(step, "image", None), WIDTH * 2)
    expected = np.zeros((2, dp, step.num_microbatches))
    for number, part in enumerate(microbatches_of(plan, step)):
        for each in merge_moves(plan, part.decision, part.lengths):
            assert len(each.replicas) == (dp if part.decision.cuts is not None else 1)
            busiest = {name: max(moved_away(rows, 0), moved_away(rows, 1)) for name, rows in each.rows.items()}
            assert sum(int(rows.sum()) for rows in each.rows.values()) > 0
            expected[0, each.replicas, number] = sum(busiest.values())
            expected[1, each.replicas, number] = busiest[BACKBONE] + learns * busiest["image"]
    expected = expected * WIDTH * 2 * EXCHANGE_S - np.stack([images, learns * images])
    assert taken[0][0] - taken[1][0] == pytest.approx(expected, abs=1e-12)
    assert (taken[0][1] == taken[1][1]).all() and expected.max() > 0


@pytest.mark.parametrize(("dp", "cp"), [(4, 1), (4, 2), (1, 4)])
def test_the_busiest_rank_merges_whole_sequences(dp, cp):
    plan = plan_of(dp, cp, microbatch_size=1 if dp > 1 else 4)
    plan = replace(plan, model=replace(plan.model, merges=True), balance="split" if dp > 1 else "off")
    step = assign_step(plan, lengths_of())
    pricing = Pricing(plan, planned(plan), step, Linear(plan.cluster))
    embedding = plan.model.module(BACKBONE).layers[0]
    found, most = pricing.layer_pricing.price(BACKBONE, embedding).work.rows.reshape(dp, -1), 0
    for number, part in enumerate(microbatches_of(plan, step)):
        for each in merge_moves(plan, part.decision, part.lengths):
            merged = each.rows[BACKBONE].sum(axis=1).reshape(-1, cp).max(axis=1)
            assert found[each.replicas, number].tolist() == merged.tolist()
            most = max(most, int(merged.max()))
    assert pricing.layer_pricing.largest_rows(BACKBONE, embedding) == most * cp >= 900 * cp


@pytest.mark.parametrize("recomputed", [0, 2, 3])
@pytest.mark.parametrize("merges", [False, True])
def test_rows_that_enter_again_move_once_in_each_section(recomputed, merges):
    """As the sections of a stage run: each moves rows once, however many of its blocks take them in, and once more
    where it is recomputed.
    """
    plan, each = plan_of(dp=1, cp=4, num_images=len(LENGTHS), microbatch_size=4), np.arange(len(LENGTHS))
    blocks = ({"image": 1, "backbone": 4},)
    backbone = language_model(Transformer(WIDTH, 32, 2, causal=True), 4, 100)
    model = multimodal("tiny", backbone, plan.model.modules[:1], again={"image": (1, 2, 3)})
    unit = Unit("llm", blocks, cp=4, recompute=({"backbone": recomputed},) if recomputed else ())
    plan = replace(plan, model=model, units=(unit,), balance="off")
    assert plan.model.moved("image")[1]
    (stage,) = planned(plan).stages
    spans = [span for span in spans_of(stage, model) if span.module == BACKBONE]
    later = [span for span in spans if any(span.first <= block < span.stop for block in (1, 2, 3))]
    times = np.array([(not merges) + len(later), (not merges) + len(later) + sum(s.is_recomputed for s in later)])
    lengths = replace(lengths_of(), items={"image": ItemLengths(each, 16 + each, 4 + each)})
    step, taken = assign_step(plan, lengths), []
    plan = replace(plan, model=replace(model, merges=merges))
    for cost in (Linear, WithoutExchanges):
        pricing = Pricing(plan, planned(plan), step, cost(plan.cluster))
        prices = pricing.islands(pricing.planned.stages[0])
        taken.append(np.stack([prices.forward_tensor, prices.backward_tensor]))
        if cost is Linear:
            once = evenly_moved_s(pricing, num_given_rows(step, "image", None), WIDTH * 2)
            merge_s = sum(merge_prices.merge_seconds(pricing).values()) if merges else 0.0
    assert taken[0] - taken[1] == pytest.approx(times[:, None, None] * once + merge_s)


def moved_away(rows, axis):
    """The most rows that a rank gives, or gets, its own left out."""
    return (rows.sum(axis) - np.diag(rows)).max()


def test_many_merges_are_priced_as_if_rows_lay_evenly(monkeypatch):
    plan = replace(plan_of(1, 4, microbatch_size=4), balance="off")
    plan = replace(plan, model=replace(plan.model, merges=True))
    monkeypatch.setattr(merge_prices, "MAX_DEALT", 1)
    pricing = Pricing(plan, planned(plan), assign_step(plan, lengths_of()), Linear(plan.cluster))
    found, rows = merge_prices.merge_seconds(pricing)[BACKBONE], LENGTHS.reshape(-1, 4).sum(axis=1)
    assert found == pytest.approx((rows * WIDTH * 2 * 3 / 16 * EXCHANGE_S)[None])
