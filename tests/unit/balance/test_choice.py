"""`choose`: the fastest method by its own prediction, the same everywhere, with figures that can be checked by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.analyze.mixture import MFLOP_PER_LENGTH, PHASES, Caps
from motet.balance import (
    METHODS,
    Link,
    Network,
    Packed,
    Padded,
    Phase,
    assign,
    assign_apart,
    choose,
    crossing,
    follow,
    score,
)
from motet.balance.phases import KeyExchange, joint_costs
from motet.core.errors import ArgumentError

FAST = Link(bytes_per_s=1e15, latency_s=0.0)
SLOW = Link(bytes_per_s=1.0, latency_s=1.0)


def backbone(lengths, seconds_per_cost=1.0) -> Phase:
    lengths = np.array(lengths, dtype=np.int64)
    return Phase("backbone", lengths, Packed(), np.arange(len(lengths)), seconds_per_cost)


def encoder(name, owner, lengths, cost=None, seconds_per_cost=1.0, token_bytes=1, num_exchanges=2) -> Phase:
    owner, lengths = np.array(owner, dtype=np.int64), np.array(lengths, dtype=np.int64)
    return Phase(name, lengths, cost or Packed(), owner, seconds_per_cost, lengths * token_bytes, num_exchanges)


def draw_phases(seed: int, num_examples: int, longest: int = 300) -> list[Phase]:
    rng = np.random.default_rng(seed)
    drawn = [backbone(rng.integers(0, longest, num_examples), 3e-6)]
    for name, cost in (("image", Packed(3, 1)), ("audio", Padded())):
        owner = np.repeat(np.arange(num_examples), rng.integers(0, 3, num_examples))
        drawn.append(encoder(name, owner, rng.integers(1, longest, len(owner)), cost, 1e-6, token_bytes=64))
    return drawn


def mixed_phases(rows: np.ndarray) -> list[Phase]:
    """Examples of the mixture, lengths [num_examples, 3], with one item a phase where there is any; audio pads."""
    drawn = []
    for name, column, mflop in zip(PHASES, rows.T, MFLOP_PER_LENGTH):
        owner = np.arange(len(rows)) if name == "backbone" else np.flatnonzero(column)
        cost = Padded() if name == "audio" else Packed()
        output_bytes = None if name == "backbone" else column[owner] // 4 * 7168
        drawn.append(Phase(name, column[owner], cost, owner, 3e6 * mflop / 400e12, output_bytes))
    return drawn


microbatches = st.tuples(st.integers(0, 999), st.integers(0, 25), st.integers(1, 6))


@given(microbatches, st.sampled_from([FAST, SLOW, Link(1e7, 1e-5)]))
def test_the_fastest_method_is_chosen_and_reported(drawn, link):
    seed, num_examples, num_ranks = drawn
    phases = draw_phases(seed, num_examples)
    choice = choose(phases, num_ranks, link)
    assert choice.predicted_s[choice.method] == min(choice.predicted_s.values())
    assert choice.predicted_s.keys() <= set(METHODS)
    for phase, placed in zip(phases, choice.assignments, strict=True):
        assert sorted(placed.items) == list(range(len(phase.lengths)))
        assert placed.num_ranks == num_ranks
    # What is predicted follows from what was placed.
    seconds = sum(p.seconds_per_cost * int(a.loads.max()) for p, a in zip(phases, choice.assignments))
    assert choice.predicted_s[choice.method] - choice.exchange_s[choice.method] == pytest.approx(seconds, abs=1e-8)
    again = choose(phases, num_ranks, link)
    assert (again.method, again.why, again.predicted_s) == (choice.method, choice.why, choice.predicted_s)
    for a, b in zip(again.assignments, choice.assignments):
        np.testing.assert_array_equal(a.items, b.items)


@given(microbatches)
def test_what_is_not_balanced_is_told_and_bounds_are_those_of_each_phase(drawn):
    seed, num_examples, num_ranks = drawn
    phases = draw_phases(seed, num_examples)
    home = np.arange(num_examples, dtype=np.int32) % num_ranks
    choice = choose(phases, num_ranks, SLOW, home=home)
    for phase, before, placed in zip(phases, choice.before, choice.assignments, strict=True):
        expected = score(home[phase.owner], phase.lengths, num_ranks, phase.cost)
        for name in ("ranks", "items", "offsets", "loads"):
            np.testing.assert_array_equal(getattr(before, name), getattr(expected, name))
        assert before.bound == placed.bound == expected.bound
    assert choose(phases, num_ranks, SLOW).before == ()


@given(microbatches)
def test_joint_moves_nothing_and_needs_no_sorting(drawn):
    seed, num_examples, num_ranks = drawn
    phases = draw_phases(seed, num_examples)
    choice = choose(phases, num_ranks, SLOW, methods=["joint"])
    assert (choice.moved_bytes, choice.exchange_s) == (0, {"joint": 0.0})
    whole = choice.assignments[0]
    for phase, placed in zip(phases[1:], choice.assignments[1:]):
        assert (placed.ranks == whole.ranks[phase.owner]).all()
        assert (np.diff(whole.slots[phase.owner[placed.items]]) >= 0).all()


@given(microbatches)
def test_an_exchange_that_costs_nothing_is_always_worth_it_and_one_that_costs_all_never(drawn):
    seed, num_examples, num_ranks = drawn
    phases = draw_phases(seed, num_examples)
    fast = choose(phases, num_ranks, FAST)
    assert fast.predicted_s[fast.method] <= fast.predicted_s["per_phase"]
    slow = choose(phases, num_ranks, SLOW)
    assert slow.moved_bytes == 0


def test_the_exchange_is_that_of_the_busiest_rank_there_and_back():
    # Two images of one example: apart, one of them must come over.
    phases = [backbone([5, 5]), encoder("image", [0, 0], [10, 10], token_bytes=3)]
    link = Link(bytes_per_s=10.0, latency_s=0.5)
    choice = choose(phases, 2, link, home=[0, 1])
    assert choice.predicted_s == {"joint": 25.0, "per_phase": 22.0, "unbalanced": 25.0}
    assert choice.exchange_s["per_phase"] == 2 * (0.5 + 30 / 10)
    assert choice.method == "per_phase"
    assert choice.moved_bytes == 60
    assert choice.why == "per_phase: 22 s predicted, 7 s of it exchange (joint 25 s; unbalanced 25 s)."
    # Nothing trains, so nothing comes back.
    frozen = [phases[0], encoder("image", [0, 0], [10, 10], token_bytes=3, num_exchanges=1)]
    assert choose(frozen, 2, link).exchange_s["per_phase"] == 3.5
    # A link too slow for it.
    assert choose(phases, 2, Link(1.0, 0.0)).method == "joint"


def former_exchange_ns(phase, placed, backbone, link):
    """The price before nodes were distinguished: the latency and the bytes of the rank that moves most."""
    destination = backbone.ranks[phase.owner]
    moves = placed.ranks != destination
    if phase.output_bytes is None or not moves.any():
        return 0
    size_bytes = phase.output_bytes[moves]
    busiest = max(
        int(np.bincount(ranks[moves], size_bytes, placed.num_ranks).max()) for ranks in (placed.ranks, destination)
    )
    return round(phase.num_exchanges * (link.latency_s + busiest / link.bytes_per_s) * 10**9)


@given(microbatches, st.sampled_from([FAST, SLOW, Link(1e7, 1e-5), Link(40e9, 50e-6)]), st.sampled_from([SLOW, FAST]))
def test_on_one_node_all_is_as_it_was_before_nodes_were_told_apart(drawn, link, between):
    seed, num_examples, num_ranks = drawn
    phases = draw_phases(seed, num_examples)
    choice = choose(phases, num_ranks, link)
    for method in METHODS:
        asked = ("joint", method) if method == "mixed" else (method,)
        one = choose(phases, num_ranks, link, methods=asked)
        backbone_placed = one.assignments[0]
        exchange_ns = sum(
            former_exchange_ns(phase, placed, backbone_placed, link)
            for phase, placed in zip(phases[1:], one.assignments[1:], strict=True)
        )
        compute_ns = sum(phase.compute_ns(placed) for phase, placed in zip(phases, one.assignments, strict=True))
        if one.method in choice.predicted_s:
            assert choice.exchange_s[one.method] == exchange_ns / 10**9
            assert choice.predicted_s[one.method] == (compute_ns + exchange_ns) / 10**9
    for per_node in (None, num_ranks, num_ranks + 3):
        networked = choose(phases, num_ranks, Network(link, between, per_node))
        assert (networked.method, networked.predicted_s, networked.why) == (
            choice.method,
            choice.predicted_s,
            choice.why,
        )
        for placed, expected in zip(networked.assignments, choice.assignments, strict=True):
            np.testing.assert_array_equal(placed.items, expected.items)


def test_bytes_that_cross_nodes_cost_more():
    # As above: one of two images comes over, 30 bytes there and back.
    phases = [backbone([5, 5]), encoder("image", [0, 0], [10, 10], token_bytes=3)]
    inside, between = Link(10.0, 0.5), Link(5.0, 0.75)
    beside = choose(phases, 2, Network(inside, between, 2), methods=["per_phase"])
    apart = choose(phases, 2, Network(inside, between, 1), methods=["per_phase"])
    assert beside.exchange_s["per_phase"] == 2 * (0.5 + 30 / 10)
    assert apart.exchange_s["per_phase"] == 2 * (0.75 + 30 / 5)
    assert choose(phases, 2, Network(inside, between, 2)).method == "per_phase"
    assert choose(phases, 2, Network(inside, between, 1)).method == "joint"


def test_an_all_gather_brings_every_rank_everything():
    # As above, on three ranks: one image comes over, whose 30 bytes are one of two shares that two hops pass on.
    phases = [backbone([5, 5, 5]), encoder("image", [0, 0], [10, 10], token_bytes=3)]
    link = Network(Link(10.0, 0.5), Link(5.0, 0.75), 3, communicator="all_gather")
    choice = choose(phases, 3, link, methods=["per_phase"])
    # Outputs are on two ranks, 30 bytes each; their gradients are all on the rank of the example, 60 bytes.
    assert choice.exchange_s["per_phase"] == 2 * (0.5 + 30 / 10) + 2 * (0.5 + 60 / 10)
    assert choice.moved_bytes == 2 * 3 * (30 + 60)
    apart = choose(phases, 3, replace(link, ranks_per_node=1), methods=["per_phase"])
    assert apart.exchange_s["per_phase"] == 2 * (0.75 + 30 / 5) + 2 * (0.75 + 60 / 5)


def test_without_regard_to_nodes_placements_are_those_of_one_node():
    phases = draw_phases(0, 64)
    home, sizes = np.arange(64) // 8, np.full(64, 100)
    network = Network(FAST, SLOW, 2)
    for method in ("per_phase", "joint"):
        blind = choose(phases, 8, replace(network, node_wise=False), methods=[method], home=home, input_bytes=sizes)
        plain = choose(phases, 8, FAST, methods=[method])
        seeing = choose(phases, 8, network, methods=[method], home=home, input_bytes=sizes)
        for one, other in zip(blind.assignments, plain.assignments, strict=True):
            np.testing.assert_array_equal(one.ranks, other.ranks)
        assert crossing(seeing.assignments[0], home, sizes, 2) < crossing(blind.assignments[0], home, sizes, 2)
    per_phase = choose(phases, 8, replace(network, node_wise=False), methods=["per_phase"])
    # Links are those of the nodes all the same.
    assert (
        per_phase.exchange_s["per_phase"] > 1 > choose(phases, 8, FAST, methods=["per_phase"]).exchange_s["per_phase"]
    )


@given(microbatches, st.integers(1, 4))
def test_no_way_is_cheaper_on_several_nodes(drawn, per_node):
    seed, num_examples, num_ranks = drawn
    phases, link = draw_phases(seed, num_examples), Link(1e7, 1e-5)
    alike, slower = Network(link, link, per_node), Network(link, Link(5e6, 2e-5), per_node)
    for method in ("joint", "per_phase"):
        beside, apart = (choose(phases, num_ranks, one, methods=[method]) for one in (alike, slower))
        assert beside.moved_bytes == apart.moved_bytes
        assert beside.exchange_s[method] <= apart.exchange_s[method]
    # Links that are alike are one kind of link, however many nodes there are.
    one_link, *others = (choose(phases, num_ranks, one, methods=["joint"]) for one in (link, alike))
    assert one_link.predicted_s == others[0].predicted_s


def test_a_padded_encoder_alone_is_taken_apart():
    # Long and short clips: alone, they are sorted by length; whole examples put both on each rank.
    clips = [100, 1] * 8
    images = encoder("image", range(16), range(50, 66))
    phases = [backbone([50] * 16), images, encoder("audio", range(16), clips, Padded())]
    choice = choose(phases, 4, Link(bytes_per_s=20.0, latency_s=0.1))
    assert choice.method == "mixed"
    assert choice.predicted_s["mixed"] < min(choice.predicted_s["joint"], choice.predicted_s["per_phase"])
    whole, image, audio = choice.assignments
    assert (image.ranks == whole.ranks).all()
    assert (audio.ranks != whole.ranks).any()


@pytest.mark.parametrize(
    ("scale", "is_left_out"), [(0.2, False), (2.0, True)], ids=["it may be the fastest", "padding makes it slower"]
)
def test_joint_is_searched_only_where_it_may_be_the_fastest(monkeypatch, scale, is_left_out):
    """Of clips that take long, "joint" is as it begins; else it is as if it were asked for alone. Both ways the method
    is that of a full search."""
    phases = draw_phases(3, num_examples=2048)
    audio = replace(phases[2], seconds_per_cost=scale * phases[2].seconds_per_cost)
    phases = [*phases[:2], audio]
    begun = choose(phases, 64, SLOW if scale < 1 else FAST)
    monkeypatch.setattr("motet.balance.choice._MIN_STARTED", 10**6)
    searched = choose(phases, 64, SLOW if scale < 1 else FAST)
    assert begun.method == searched.method == ("per_phase" if is_left_out else "joint")
    assert (
        "mixed" not in begun.predicted_s and begun.predicted_s["joint"] > searched.predicted_s["joint"]
    ) == is_left_out
    for placed, expected in zip(begun.assignments, searched.assignments, strict=True):
        assert np.array_equal(placed.ranks, expected.ranks)


def test_joint_costs_count_each_item_as_it_would_cost_alone():
    clips = encoder("audio", [0, 0, 2], [1, 2, 3], Padded(linear=1, quadratic=2))
    costs, unit_s = joint_costs([backbone([10, 10, 10]), clips])
    assert costs[:, 1] * unit_s == pytest.approx(np.array([3 + 10, 0, 21]) * clips.seconds_per_cost)


def test_ties_go_to_what_moves_less():
    phases = [backbone([1, 1]), encoder("image", [0, 1], [1, 1], token_bytes=0)]
    for methods in itertools.permutations(METHODS):
        assert choose(phases, 2, FAST, methods=methods).moved_bytes == 0
    assert choose(phases, 2, FAST).method == "joint"


@pytest.mark.parametrize("longest", [0, 1, 2**40])
@settings(max_examples=20)
@given(st.integers(0, 5))
def test_a_giant_is_no_reason_to_leave_the_rest_unbalanced(longest, seed):
    phases = draw_phases(seed, 60)
    phases[0].lengths[7] = longest
    choice = choose(phases, 4, FAST, home=np.arange(60) // 15)
    assert choice.predicted_s[choice.method] <= choice.predicted_s["unbalanced"]
    assert choice.assignments[1].imbalance < 1.2


def test_ranks_that_do_not_wait_in_phases_take_what_the_busiest_of_them_does_in_all():
    """Rank 0 has the longer sequence and rank 1 the larger image; they wait where rows are exchanged."""
    phases = [backbone([10, 6]), encoder("image", [1], [3])]
    apart = [replace(phase, waits=False) for phase in phases]
    assert choose(phases, 2, FAST, methods=["joint"]).predicted_s["joint"] == pytest.approx(10 + 3)
    assert choose(apart, 2, FAST, methods=["joint"]).predicted_s["joint"] == pytest.approx(max(10, 6 + 3))
    both_of_one = [apart[0], replace(encoder("image", [0, 0], [3, 3]), waits=False)]
    moved = choose(both_of_one, 2, Link(bytes_per_s=1e3, latency_s=0.0), methods=["per_phase"])
    assert moved.predicted_s["per_phase"] == pytest.approx(10 + 3 + moved.exchange_s["per_phase"])
    assert moved.exchange_s["per_phase"] > 0


def cuttable(lengths, *keys) -> Phase:
    return replace(backbone(lengths), rows=np.array(lengths), keys=keys)


def test_a_giant_is_cut_where_the_exchange_takes_less_than_waiting():
    phases = [cuttable([1000] + [10] * 60, KeyExchange(0, 1, 3)), encoder("audio", range(1, 61), [5] * 60, Padded())]
    methods = (*METHODS, "split")
    cheap = choose(phases, 4, FAST, methods=methods)
    assert cheap.method == "split" and cheap.fragments.num_cut == 1
    # 1600 tokens and 300 frames on 4 ranks.
    assert 400 + 75 <= cheap.predicted_s["split"] < 1.06 * (400 + 75)
    assert cheap.assignments[0].loads.sum() == 1600 and cheap.assignments[0].loads.max() < 1.03 * 400
    assert "1 sequence cut (1,000 rows over " in cheap.why
    slow = choose(phases, 4, SLOW, methods=methods)
    assert slow.method == "joint" and slow.fragments is None
    assert slow.predicted_s["split"] > slow.predicted_s["joint"] >= 1000
    alone = choose(phases, 4, SLOW, methods=["split"])
    assert alone.fragments.num_cut == 1


def test_a_cut_sequence_takes_the_exchange_of_its_keys():
    """8 rows of 1 byte on two ranks: the first has 2 + 2 rows at both ends, and sees all 4 of the other's; the other
    sees the first's 2 rows in front. With a window of 2, a rank sees one row before each of its two runs.
    """
    link = Link(bytes_per_s=1.0, latency_s=0.25)
    for window, seconds in ((0, 4 + 0.25), (2, 2 + 0.25)):
        choice = choose([cuttable([8], KeyExchange(window, 1, 3))], 2, link, methods=["split"])
        assert choice.assignments[0].loads.tolist() == [4, 4]
        assert choice.exchange_s["split"] == pytest.approx(3 * seconds)
        assert choice.predicted_s["split"] == pytest.approx(4 + 3 * seconds)


def cuttable_image(owner, lengths, *keys, token_bytes=1) -> Phase:
    return replace(encoder("image", owner, lengths, token_bytes=token_bytes), rows=np.array(lengths), keys=keys)


def test_a_giant_image_is_cut_beside_whole_sequences():
    phases = [
        cuttable([10] * 40, KeyExchange(0, 1, 3)),
        cuttable_image(range(31), [1000] + [10] * 30, KeyExchange(0, 1, 3)),
    ]
    cheap = choose(phases, 4, FAST, methods=(*METHODS, "split"))
    assert cheap.method == "split" and cheap.fragments is None
    cut = cheap.cut_items["image"]
    assert cut.num_cut == 1 and set(cut.assignment.ranks[cut.item == 0].tolist()) == {0, 1, 2, 3}
    assert cheap.assignments[1].loads.sum() == 1300 and cheap.assignments[1].loads.max() < 1.03 * 1300 / 4
    assert "1 image item cut (1,000 rows over 4 ranks)" in cheap.why
    slow = choose(phases, 4, SLOW, methods=(*METHODS, "split"))
    assert slow.method == "joint" and not slow.cut_items
    # An encoder whose items stay whole has no rows, and its giant is cut by nothing.
    whole = choose([phases[0], replace(phases[1], rows=None)], 4, FAST, methods=(*METHODS, "split"))
    assert not whole.cut_items and "split" not in whole.predicted_s


def test_a_giant_clip_of_a_padded_encoder_is_cut_beside_clips_that_are_padded_no_more():
    """Where ranks share any, all clips of the microbatch run packed."""
    clips = replace(cuttable_image(range(31), [1000] + [10] * 30, KeyExchange(0, 1, 3)), cost=Padded())
    choice = choose([cuttable([10] * 40), clips], 4, FAST, methods=(*METHODS, "split"))
    assert choice.method == "split" and choice.cut_items["image"].num_cut == 1
    assert choice.assignments[1].loads.sum() == 1300 and choice.assignments[1].loads.max() < 1.03 * 1300 / 4
    even = replace(cuttable_image(range(32), [10] * 32), cost=Padded())
    assert not choose([cuttable([10] * 40), even], 4, FAST, methods=["split"]).cut_items


def test_a_giant_image_of_tiles_is_cut_between_them_without_an_exchange_of_keys():
    """Five tiles of 200 rows among 300 rows of small images: no rank can have fewer than two of the tiles."""
    image = replace(cuttable_image(range(31), [1000] + [10] * 30, token_bytes=0), tile_rows=200)
    choice = choose([cuttable([10] * 40), image], 4, FAST, methods=["split"])
    cut = choice.cut_items["image"]
    assert cut.units[0] == 5 and (cut.end - cut.begin)[cut.item == 0].max() == 2
    assert choice.assignments[1].loads.max() == 400
    assert choice.exchange_s["split"] == choice.moved_bytes == 0


def test_a_cut_image_takes_the_exchange_of_all_of_its_keys_and_of_its_outputs():
    """8 rows on two ranks, of which each sees the other's 4. Half of 8 bytes are for the other rank, there and back."""
    phases = [cuttable([2, 2], KeyExchange(0, 0, 0)), cuttable_image([0], [8], KeyExchange(0, 1, 3))]
    choice = choose(phases, 2, Link(bytes_per_s=1.0, latency_s=0.25), methods=["split"])
    assert choice.assignments[1].loads.tolist() in ([8, 0], [0, 8])  # The exchange takes longer than the gain.
    fast = Link(bytes_per_s=8.0, latency_s=0.0)
    choice = choose(phases, 2, fast, methods=["split"])
    assert choice.assignments[1].loads.tolist() == [4, 4]
    assert choice.exchange_s["split"] == pytest.approx((3 * 4 + 2 * 4) / 8)
    assert choice.moved_bytes == 3 * 8 + 2 * 4


def test_outputs_go_to_all_ranks_that_share_the_sequence_of_their_item():
    """Half of an image's 100 bytes are for the other rank, and their gradients return."""
    phases = [cuttable([1000], KeyExchange(0, 0, 0)), encoder("image", [0], [100])]
    choice = choose(phases, 2, Link(bytes_per_s=1e15, latency_s=0.0), methods=["split"])
    assert choice.moved_bytes == 2 * 50


def test_a_sequence_that_is_merged_whole_goes_to_the_other_rank_from_where_it_is_merged():
    """The image's 100 bytes stay, and the 500 rows of the other rank move, 3 bytes each, there and back."""
    merged = replace(cuttable([1000], KeyExchange(0, 0, 0)), merged=((np.array([3000]), 2),))
    link = Link(bytes_per_s=100.0, latency_s=0.25)
    choice = choose([merged, encoder("image", [0], [100])], 2, link, methods=["split"])
    assert choice.moved_bytes == 2 * 3 * 500
    assert choice.exchange_s["split"] == pytest.approx(2 * (15 + 0.25))


def test_nothing_is_cut_where_whole_sequences_are_balanced():
    phases = [cuttable([5] * 8, KeyExchange(0, 1, 3))]
    assert choose(phases, 4, FAST, methods=["split"]).fragments is None
    choice = choose(phases, 4, FAST, methods=(*METHODS, "split"))
    assert "split" not in choice.predicted_s
    assert choose([cuttable([5], KeyExchange(0, 1, 3))], 1, FAST, methods=["split"]).fragments is None


def test_on_mixed_lengths_the_chosen_way_is_near_the_bound(mixture):
    """Predicted seconds over the sum of each phase's bound, on a link of 40 GB/s a rank."""
    rng = np.random.default_rng(0)
    phases = mixed_phases(mixture.draw(32 * 32, rng, Caps()))
    choice = choose(phases, 32, Link(40e9, 50e-6), home=np.arange(32 * 32) // 32)
    ideal_s = sum(phase.seconds_per_cost * placed.bound for phase, placed in zip(phases, choice.assignments))
    assert choice.predicted_s[choice.method] < 1.02 * ideal_s
    assert choice.predicted_s["unbalanced"] > 1.2 * ideal_s


def test_of_packed_items_only_the_excess_leaves_the_rank_of_its_example(mixture):
    phases = mixed_phases(mixture.draw(32 * 60, np.random.default_rng(0), Caps()))
    whole, image, audio = choose(phases, 32, FAST, methods=["per_phase"]).assignments
    home = whole.ranks[phases[1].owner]
    assert crossing(image, home, phases[1].output_bytes) < 0.3
    anywhere = assign(phases[1].lengths, 32)
    assert crossing(anywhere, home, phases[1].output_bytes) > 0.9
    assert image.loads.max() <= 1.001 * anywhere.loads.max()
    # Padded items lose nothing.
    assert audio.loads.max() == audio.bound


@given(microbatches)
def test_what_is_balanced_already_stays(drawn):
    seed, num_examples, num_ranks = drawn
    lengths = np.full(num_examples * num_ranks, seed)
    whole = assign(lengths, num_ranks)
    apart = assign_apart(lengths, Packed(), np.arange(len(lengths)), whole)
    np.testing.assert_array_equal(apart.ranks, whole.ranks)


def test_follow_places_items_with_their_examples():
    phases = draw_phases(1, 20)
    whole = choose(phases, 3, FAST, methods=["per_phase"]).assignments[0]
    placed = follow(phases[2], whole)
    assert (placed.ranks == whole.ranks[phases[2].owner]).all()
    clips = [phases[2].lengths[placed.on_rank(rank)] for rank in range(3)]
    assert placed.loads.tolist() == [len(some) * some.max(initial=0) for some in clips]


GOOD = backbone([3, 4])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], 2, FAST), {}, "phases is empty"),
        (([GOOD], 0, FAST), {}, "num_ranks is 0"),
        (([GOOD], 2, FAST), {"methods": []}, r"methods is \[\]"),
        (
            ([GOOD], 2, FAST),
            {"methods": ["off"]},
            "methods is .'off'.; it must hold some of joint, mixed, per_phase, split",
        ),
        (([GOOD], 2, FAST), {"methods": ["mixed"]}, "mixed begins with joint"),
        (([GOOD], 2, FAST), {"methods": ["split"]}, "takes rows of the backbone and a packed cost; .* and no rows"),
        (([replace(GOOD, rows=np.array([1]))], 2, FAST), {}, "rows of 'backbone' has 1 entries; it must have 2"),
        (([GOOD], 2, FAST), {"home": [0]}, "home has shape"),
        (([GOOD], 2, FAST), {"home": [0, 2]}, r"home\[1\] is 2"),
        (([encoder("image", [1, 0], [1, 1])], 2, FAST), {}, "owner of 'image' must be 0, 1, 2"),
        (([GOOD, encoder("image", [2], [1])], 2, FAST), {}, r"owner of 'image'\[0\] is 2"),
        (([GOOD, encoder("image", [0], [-1])], 2, FAST), {}, r"lengths of 'image'\[0\] is -1"),
        (([GOOD, encoder("image", [0, 1], [1])], 2, FAST), {}, "owner of 'image' has shape"),
        (([GOOD, encoder("image", [0], [1], seconds_per_cost=np.nan)], 2, FAST), {}, "seconds_per_cost of 'image'"),
        (
            ([GOOD, Phase("image", np.array([1]), Packed(), np.array([0]), 1.0, np.array([1, 2]))], 2, FAST),
            {},
            "output_bytes of 'image' has 2 entries; it must have 1",
        ),
    ],
)
def test_wrong_arguments(arguments, options, message):
    with pytest.raises(ArgumentError, match=message):
        choose(*arguments, **options)


@pytest.mark.parametrize(("link", "message"), [((0.0, 1.0), "bytes_per_s is 0.0"), ((1.0, -1.0), "latency_s is -1.0")])
def test_wrong_links(link, message):
    with pytest.raises(ArgumentError, match=message):
        Link(*link)
