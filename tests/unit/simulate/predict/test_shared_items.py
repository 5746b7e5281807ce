"""What context-parallel ranks of an encoder are priced for, against the rows that training gives them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from motet.assign.item_shares import item_shares
from motet.assign.plan import assign_step
from motet.assign.planned_step import decide_planned_step
from motet.assign.whole_step import DecidedMicrobatch
from motet.core.attention_table import AttentionTable
from motet.core.item_segments import ItemSegments
from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, qformer, resampler, vit
from motet.core.spec import Layer, Module
from motet.core.workload import BatchLengths, ItemLengths
from motet.cost.catalogue import cluster
from motet.dispatch.shared_items import SharedItems, shared_items
from motet.schedule import planned
from motet.simulate.predict.stage_pricing import Pricing
from unit.simulate.jobs import Linear

IMAGES, BATCH = (80, 3, 5, 4, 14, 17, 90, 2, 2, 4), 6
"""Patches of the images of all examples."""
WIDTH, KV_BYTES = 16, 2 * 16 * 2
"""Of rows, and of a row's keys and values in 16 bits."""
QUERIES = 8
RESAMPLER = resampler(WIDTH, WIDTH, QUERIES, num_layers=2, num_heads=2, head_dim=8, num_kv_heads=2)
QFORMER = qformer(WIDTH, WIDTH, QUERIES, hidden=WIDTH, mlp=32, num_layers=2, num_heads=2)


def plan_of(
    cp: int,
    *,
    downsample: int = 1,
    own_ranks: bool = True,
    tile_rows: int = 0,
    token_parts: int = 1,
    behind: Sequence[Layer] = (),
) -> Plan:
    """behind: layers of a projector in place of one that joins rows."""
    image = vit("image", Transformer(WIDTH, 32, 2), 3, class_row=True)
    if behind:
        image = Module.of("image", [*image.layers, *behind], shareable=True)
    else:
        image = connect(image, WIDTH, downsample=downsample)
    if tile_rows:
        image = replace(image, shareable=True, tile_rows=tile_rows)
    image = replace(image, token_parts=token_parts)
    model = multimodal("tiny", language_model(Transformer(WIDTH, 32, 2, causal=True), 2, 100), [image])
    blocks = {"image": len(image.blocks)}
    units = (Unit("image", (blocks,), cp=cp), Unit("llm", ({"backbone": 2},), first_rank=cp))
    if not own_ranks:
        units = (Unit("all", ({**blocks, "backbone": 2},), cp=cp),)
    return Plan(model, cluster("h100", num_nodes=1), units, BATCH, 2)


def lengths_of(segment: int = 0, tile: int = 1, queries: int = 0) -> BatchLengths:
    """tile: patches of each tile, of which images have as many as others patches; four patches make a row.
    queries: the rows that each image becomes, in place of one for each patch.
    """
    images = tile * np.array(IMAGES)
    segments = ItemSegments.cut(images, max(segment, tile)) if segment or tile > 1 else None
    rows = np.full(len(images), queries) if queries else images if tile == 1 else images // 4
    items = ItemLengths(np.array([0, 0, 0, 1, 1, 2, 3, 4, 4, 5]), images, rows, segments)
    sequence = np.full(BATCH, 10) + np.bincount(items.example, rows if queries else images, BATCH).astype(np.int64)
    return BatchLengths(sequence, np.full(BATCH, 3), np.zeros(BATCH, np.int32), {"image": items})


def shared_on(
    plan: Plan, lengths: BatchLengths, cp: int
) -> Iterator[tuple[DecidedMicrobatch, list[SharedItems | None]]]:
    """Each microbatch of a step, and what each rank has of its images; all have None where they share none."""
    for part in decide_planned_step(plan, lengths).microbatches:
        items = part.lengths.items["image"]
        yield part, [shared_items(part.decision, "image", items, rank) for rank in range(cp)]


@pytest.mark.parametrize(("cp", "own_ranks"), [(2, True), (3, True), (4, False)])
def test_shared_images_are_priced_as_they_are_executed(cp, own_ranks):
    plan, lengths = plan_of(cp, own_ranks=own_ranks), lengths_of()
    program, step = planned(plan), assign_step(plan, lengths)
    pricing = Pricing(plan, program, step, Linear(plan.cluster))
    layer, copies, cut = plan.model.module("image").layers[1], 0, 0
    found = pricing.rows("image", layer, program.stages[0], [0])[0]
    for number, (part, of_ranks) in enumerate(shared_on(plan, lengths, cp)):
        if of_ranks[0] is None:
            items = part.lengths.items["image"]
            whole = [part.decision.items_on("image", rank) for rank in range(cp)]
            assert found[number] == max(items.length[own].sum() + len(own) for own in whole)
            continue
        cut += 1
        with_class_rows = [each.with_class_rows(1) for each in of_ranks]
        assert found[number] == pytest.approx(max(len(each.own) for each in with_class_rows))
        for each in with_class_rows:
            rows = each.rows.after(each.num_whole)
            table = AttentionTable.packed(rows.lengths.tolist(), False)
            copies = max(copies, rows.most_moved(rows.wanted(table)))
    assert cut > 1
    assert pricing.layer_pricing.largest_copies("image", layer) == pytest.approx(copies * KV_BYTES)


def moved_keys(shared: SharedItems, among: bool) -> int:
    """The most keys that a rank gives or gets of the items that it shares. among: queries see each other, too."""
    rows, queries = (of.after(shared.num_whole) for of in (shared.rows, shared.outputs))
    of_ranks = [rows.num_rows_of(rank) + among * queries.num_rows_of(rank) for rank in range(rows.num_ranks)]
    own, num_ranks = of_ranks[shared.rank], np.count_nonzero(of_ranks, axis=0)
    got = (np.sum(of_ranks, axis=0) - own)[own > 0].sum()
    return int(max(got, (own * (num_ranks - 1)).sum()))


@pytest.mark.parametrize("projector", [RESAMPLER, QFORMER], ids=["resampler", "qformer"])
@pytest.mark.parametrize(("cp", "own_ranks"), [(2, True), (3, False)])
def test_images_that_queries_read_are_priced_as_they_are_executed(cp, own_ranks, projector):
    """Of rows and of queries; images of fewer rows than queries stay whole."""
    plan, lengths = plan_of(cp, own_ranks=own_ranks, behind=projector), lengths_of(queries=QUERIES)
    program, step = planned(plan), assign_step(plan, lengths)
    pricing, module = Pricing(plan, program, step, Linear(plan.cluster)), plan.model.module("image")
    keys = next(layer for layer in module.layers if layer.attention and layer.attention.queries)
    made = next(layer for layer in module.layers if layer.kind == "queries")
    rows, queries = (pricing.rows("image", layer, program.stages[0], [0])[0] for layer in (keys, made))
    among, copies, cut = keys.extra_rows > 0, 0, 0
    for number, (_, of_ranks) in enumerate(shared_on(plan, lengths, cp)):
        if of_ranks[0] is None:
            continue
        cut += 1
        for each in of_ranks:
            assert each.rows.lengths[each.num_whole :].min(initial=QUERIES) >= QUERIES
            copies = max(copies, moved_keys(each, among))
        assert queries[number] == max(each.num_rows_out for each in of_ranks)
        assert rows[number] == pytest.approx(max(len(each.own) + among * each.num_rows_out for each in of_ranks), abs=1)
    assert cut > 1
    assert pricing.layer_pricing.largest_copies("image", keys) == pytest.approx(copies * KV_BYTES, abs=KV_BYTES)


@pytest.mark.parametrize(("cp", "own_ranks"), [(2, True), (3, False), (4, False)])
def test_images_that_become_one_wide_row_are_priced_as_they_are_executed(cp, own_ranks):
    """Ranks share its layers; the row of a shared one is whole on the last of them."""
    plan, lengths = plan_of(cp, own_ranks=own_ranks, token_parts=80), lengths_of(queries=1)
    program, step = planned(plan), assign_step(plan, lengths)
    pricing, copies, cut = Pricing(plan, program, step, Linear(plan.cluster)), 0, 0
    layer = plan.model.module("image").layers[1]
    found = pricing.rows("image", layer, program.stages[0], [0])[0]
    taken = pricing.layer_pricing.work.taken_in("image")
    for number, (part, of_ranks) in enumerate(shared_on(plan, lengths, cp)):
        if of_ranks[0] is None:
            continue
        cut += 1
        with_class_rows = [each.with_class_rows(1) for each in of_ranks]
        assert found[number] == pytest.approx(max(len(each.own) for each in with_class_rows), abs=1)
        copies = max(copies, *(moved_keys(each, among=False) for each in with_class_rows))
        made, num_images = [each.num_rows_out for each in of_ranks], part.lengths.items["image"].num_items
        assert sum(made) == num_images
        assert taken[number] == (num_images if own_ranks else max(made))
    assert cut > 1
    assert pricing.layer_pricing.largest_copies("image", layer) == pytest.approx(copies * KV_BYTES, abs=2 * KV_BYTES)


def test_the_largest_image_takes_its_share_of_time():
    lengths = lengths_of()

    def rows(plan: Plan) -> np.ndarray:
        program = planned(plan)
        pricing = Pricing(plan, program, assign_step(plan, lengths), Linear(plan.cluster))
        return pricing.rows("image", plan.model.module("image").layers[1], program.stages[0], [0])[0]

    whole, shared, joined = (rows(plan) for plan in (plan_of(1), plan_of(2), plan_of(2, downsample=4)))
    assert (shared <= 0.6 * whole).all() and (joined <= 0.6 * whole).all()


def test_layers_that_see_segments_alone_move_what_two_of_them_have():
    plan, lengths = plan_of(2), lengths_of(segment=4)
    pricing = Pricing(plan, planned(plan), assign_step(plan, lengths), Linear(plan.cluster))
    assert pricing.layer_pricing.largest_copies("image", plan.model.module("image").layers[1]) == 8 * KV_BYTES


@pytest.mark.parametrize(("cp", "own_ranks"), [(2, True), (3, False)])
def test_shared_tiles_are_priced_as_they_are_executed(cp, own_ranks):
    """Each tile of 8 patches has a class row, and becomes two rows; nothing is exchanged."""
    plan, lengths = plan_of(cp, downsample=4, own_ranks=own_ranks, tile_rows=2), lengths_of(tile=8)
    program, step = planned(plan), assign_step(plan, lengths)
    pricing = Pricing(plan, program, step, Linear(plan.cluster))
    layer, cut = plan.model.module("image").layers[1], 0
    found = pricing.rows("image", layer, program.stages[0], [0])[0]
    for number, (_, of_ranks) in enumerate(shared_on(plan, lengths, cp)):
        if of_ranks[0] is None:
            continue
        cut += 1
        assert not any(len(each.own) % 8 or 4 * each.num_rows_out != len(each.own) for each in of_ranks)
        assert found[number] == pytest.approx(max(len(each.own) for each in of_ranks) * 9 / 8)
    assert cut > 1
    assert pricing.layer_pricing.largest_copies("image", layer) == 0


def test_tiles_stay_together():
    lengths, rows = np.array([48, 8]), np.array([12, 2])
    shares = item_shares(lengths, rows, 4, can_cut=True, tile_rows=4)
    assert (shares.cuts.units == 3).all() and shares.cuts.degrees == {0: 3}
    assert np.bincount(shares.cuts.run_owner(0, 12)).tolist().count(4) == 3


def test_items_stay_whole_where_none_is_more_than_its_share():
    lengths = np.array([6, 5, 5, 4])
    assert item_shares(lengths, lengths, 2, can_cut=True).cuts is None
    long = np.array([40, 5, 5, 4])
    assert item_shares(long, long, 2, can_cut=False).cuts is None
    shares = item_shares(long, long, 2, can_cut=True)
    loads = np.bincount(shares.ranks[1:], long[1:], 2)
    np.add.at(loads, shares.cuts.rank, shares.cuts.share_of(long))
    assert shares.cuts.degrees == {0: 2}
    assert loads.max() <= 1.1 * long.sum() / 2
    # Three rows that no unit divides stay on one rank.
    assert item_shares(long, np.ones(4, np.int64), 2, can_cut=True).cuts is None
    assert item_shares(np.zeros(0, np.int64), np.zeros(0, np.int64), 2, can_cut=True).cuts is None
