"""Where ranks stand: every message has a lane, and both ends of a lane take its messages in one order."""

from dataclasses import replace

import pytest

from motet.core.plan import Plan, Unit
from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
from motet.cost.catalogue import cluster
from motet.runtime.place import Place
from motet.schedule.program import Kind

SHAPE = Transformer(8, 16, num_heads=2)
MODEL = multimodal("toy", language_model(SHAPE, 4, 100), [connect(vit("image", SHAPE, num_layers=2), output_dim=8)])
CHAIN = (Unit("all", ({"image": 2}, {"backbone": 1}, {"backbone": 2}, {"backbone": 1}), pp=4, dp=2, zero=0),)
BESIDE = (
    Unit("image", ({"image": 1}, {"image": 1}), pp=2, dp=2, zero=0),
    Unit("llm", ({"backbone": 2}, {"backbone": 2}), first_rank=4, pp=2, dp=2, zero=0),
)


IN_TURNS = (replace(CHAIN[0], pp=2),)
SHARED = (
    Unit("image", ({"image": 1}, {"image": 1}), pp=2, cp=2, zero=0),
    Unit("llm", ({"backbone": 2}, {"backbone": 2}), first_rank=4, pp=2, cp=3, tp=2, zero=0),
)
"""Context- and tensor-parallel ranks: two, three, and two of them."""
NUM_LANES = {id(CHAIN): 12, id(BESIDE): 12, id(IN_TURNS): 4, id(SHARED): 4 + 12 + 2 * 3 * 2 + 2 * 3}
"""Of SHARED: within both units, from both encoder ranks to all six, and back from one of two that have the same."""


def places(units, schedule, overlaps):
    where = cluster("h100", 2)
    where = replace(where, device=replace(where.device, overlaps=overlaps))
    plan = Plan(MODEL, where, units, batch_size=12, schedule=schedule)
    return [Place.of(plan, rank) for rank in range(units[-1].ranks.stop)]


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize(
    ("units", "schedule"),
    [
        *((units, schedule) for units in (CHAIN, BESIDE, SHARED) for schedule in ("gpipe", "1f1b")),
        *((IN_TURNS, schedule) for schedule in ("interleaved_1f1b", "zb_v")),
        (CHAIN, "zb_h1"),
    ],
)
def test_both_ends_of_a_lane_have_one_order(units, schedule, overlaps):
    sent, received = {}, {}
    for place in places(units, schedule, overlaps):
        for action in place.row.row:
            name = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                for link in place.receivers(action):
                    lane = place.rank, link.receiver
                    message = name, action.stage, action.peer, action.microbatch, link.shares
                    sent.setdefault(lane, []).append(message)
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                for link in place.senders(action):
                    lane = link.sender, place.rank
                    message = name, action.peer, action.stage, action.microbatch, link.shares
                    received.setdefault(lane, []).append(message)
    assert sent == received and len(sent) == NUM_LANES[id(units)]
    assert set(sent) == set(place.pairs) and not any(sender == receiver for sender, receiver in sent)


def test_stages_of_one_rank_have_no_lane():
    first, last = places(IN_TURNS, "zb_v", True)[0::2]
    assert first.stage_spans == ({"image": (0, 2)}, {"backbone": (3, 4)}) and first.modules == ("image", "backbone")
    assert first.local_edges == {} and list(last.local_edges) == [1] and list(last.local_edges[1]) == [2]


def test_what_a_rank_holds():
    of_chain = places(CHAIN, "1f1b", True)
    assert [place.stage_spans for place in of_chain[::2]] == [
        ({"image": (0, 2)},), ({"backbone": (0, 1)},), ({"backbone": (1, 3)},), ({"backbone": (3, 4)},),
    ]  # fmt: skip
    assert [place.replicas["backbone"] for place in of_chain[2:]] == [0, 1] * 3
    assert len({place.action_words for place in of_chain}) == 1


def test_ranks_of_a_replica_hold_the_same_parameters_under_context_parallelism_alone():
    of_shared = places(SHARED, "1f1b", True)
    (stage,) = of_shared[0].stages.values()
    assert of_shared[0].held_by(stage.data_ranks, stage) == (0, 1)
    (stage,) = of_shared[5].stages.values()
    assert (of_shared[5].c, of_shared[5].t) == (0, 1)
    assert of_shared[5].held_by(stage.data_ranks, stage) == (5, 7, 9)
    assert [place.replicas for place in of_shared[:4]] == [{"image": 0}, {"image": 1}] * 2
    assert {place.replicas["backbone"] for place in of_shared[4:]} == {0}


def test_ranks_that_share_products_and_copies_of_an_encoder_draw_alike():
    halves = ({"backbone": 2}, {"backbone": 2})
    copies = Unit("all", halves, pp=2, dp=2, tp=2, replicated=("image",), zero=0)
    apart = (Unit("image", ({"image": 2},), dp=2, zero=0), Unit("all", halves, first_rank=2, pp=2, dp=2, tp=2, zero=0))
    assert [place.noise_rank for place in places((copies,), "1f1b", True)] == [0, 0, 2, 2] * 2
    assert [place.noise_rank for place in places(apart, "1f1b", True)] == [0, 1, 2, 2, 4, 4, 6, 6, 8, 8]
