import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from motet.balance import assign, crossing
from motet.core.errors import UserError
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, home_ranks
from motet.dispatch import (
    BalanceConfig,
    Link,
    Orchestrator,
    Packed,
    Padded,
    SpeedConfig,
    StepTimes,
    compose_route,
)

COSTS = {BACKBONE: Packed(), "image": Packed(linear=3, quadratic=1), "audio": Padded()}


def draw_lengths(seed: int, num_examples: int, num_ranks: int) -> BatchLengths:
    rng = np.random.default_rng(seed)
    items = {}
    for phase in ("image", "audio"):
        example = np.repeat(np.arange(num_examples), rng.integers(0, 3, num_examples))
        length = rng.integers(1, 200, len(example))
        items[phase] = ItemLengths(example, length, length // 2)
    sequence = rng.integers(1, 50, num_examples)
    for column in items.values():
        np.add.at(sequence, column.example, column.num_tokens)
    return BatchLengths(sequence, sequence // 4, home_ranks(num_examples, num_ranks), items)


batches = st.builds(
    lambda seed, n, r: (draw_lengths(seed, n, r), r), st.integers(0, 999), st.integers(0, 20), st.integers(1, 6)
)


@given(batches)
def test_off_keeps_examples_at_home_and_items_with_them(batch):
    lengths, num_ranks = batch
    decision = Orchestrator(COSTS, num_ranks, ()).decide(lengths)
    assert (decision.backbone.ranks == lengths.home).all()
    for phase, items in lengths.items.items():
        assert (decision.assignments[phase].ranks == lengths.home[items.example]).all()
        assert (decision.assignments[phase].loads == decision.before[phase].loads).all()


@pytest.mark.parametrize("balanced", [(BACKBONE,), tuple(COSTS)])
def test_inputs_that_ranks_have_loaded_stay_on_their_node(balanced):
    lengths = draw_lengths(0, 512, 16)
    size_bytes = 8 * lengths.sequence

    def decide(*held):
        return Orchestrator(COSTS, 16, balanced, ranks_per_node=4).decide(lengths, *held).backbone

    near, anywhere = decide(size_bytes), decide()
    blind = Orchestrator(COSTS, 16, balanced, ranks_per_node=4, node_wise=False).decide(lengths, size_bytes)
    assert (blind.backbone.ranks == anywhere.ranks).all()
    assert crossing(near, lengths.home, size_bytes, 4) < 0.2 < 0.6 < crossing(anywhere, lengths.home, size_bytes, 4)
    assert near.loads.max() <= 1.001 * anywhere.loads.max()


def test_batches_of_padded_items_are_computed_on_the_node_that_most_outputs_go_to():
    lengths = draw_lengths(1, 512, 16)
    items = lengths.items["audio"]
    decision = Orchestrator(COSTS, 16, COSTS, ranks_per_node=4).decide(lengths)
    home, placed = decision.backbone.ranks[items.example], decision.assignments["audio"]
    anywhere = assign(items.length, 16, COSTS["audio"])
    assert crossing(placed, home, items.num_tokens, 4) < 0.95 * crossing(anywhere, home, items.num_tokens, 4)
    assert sorted(placed.loads) == sorted(anywhere.loads)
    blind = Orchestrator(COSTS, 16, COSTS, ranks_per_node=4, node_wise=False).decide(lengths)
    one_node = Orchestrator(COSTS, 16, COSTS).decide(lengths)
    assert all((blind.assignments[name].ranks == one_node.assignments[name].ranks).all() for name in COSTS)


@given(batches)
def test_items_of_an_unbalanced_encoder_follow_the_balanced_backbone(batch):
    lengths, num_ranks = batch
    decision = Orchestrator(COSTS, num_ranks, [BACKBONE]).decide(lengths)
    for phase, items in lengths.items.items():
        placed = decision.assignments[phase]
        assert (placed.ranks == decision.backbone.ranks[items.example]).all()
        # In the order of the sequences, so that nothing has to be sorted either.
        assert (np.diff(decision.backbone.slots[items.example[placed.items]]) >= 0).all()


@given(batches)
def test_balancing_lowers_the_highest_load_of_every_phase(batch):
    lengths, num_ranks = batch
    decision = Orchestrator(COSTS, num_ranks, COSTS).decide(lengths)
    for phase, placed in decision.assignments.items():
        assert placed.bound <= placed.loads.max(initial=0) <= decision.before[phase].loads.max(initial=0)
        assert sorted(placed.items) == list(range(placed.num_items))


@given(batches, st.integers(0, 999), st.sampled_from([(), (BACKBONE,), (BACKBONE, "image", "audio"), ("audio",)]))
def test_keep_moves_nothing(batch, seed, balanced):
    lengths, num_ranks = batch
    kept = np.random.default_rng(seed).random(lengths.num_examples) < 0.7
    before = Orchestrator(COSTS, num_ranks, balanced).decide(lengths)
    after = before.keep(kept, lengths)
    remaining = lengths.keep(kept)
    for phase, placed in before.assignments.items():
        stays = kept if phase == BACKBONE else kept[lengths.items[phase].example]
        names = np.flatnonzero(stays)
        for rank in range(num_ranks):
            # The same items, under their old numbers, in the same order.
            expected = [item for item in placed.on_rank(rank) if stays[item]]
            assert names[after.assignments[phase].on_rank(rank)].tolist() == expected
        column = remaining.sequence if phase == BACKBONE else remaining.items[phase].length
        loads = [weigh(phase, column[after.assignments[phase].on_rank(rank)]) for rank in range(num_ranks)]
        assert after.assignments[phase].loads.tolist() == loads


def weigh(phase: str, lengths) -> int:
    if phase == "audio":
        return len(lengths) * int(lengths.max(initial=0))
    return int((3 * lengths + lengths**2).sum() if phase == "image" else lengths.sum())


def times(bytes_per_s: float, frozen=()) -> StepTimes:
    """A rank computes a unit of cost in a second; the output of a token is one byte."""
    unit_s = dict.fromkeys(COSTS, 1.0)
    return StepTimes(lambda _: unit_s, Link(bytes_per_s, 0.0), token_bytes=1, frozen=frozenset(frozen))


@given(batches)
def test_a_slow_link_keeps_items_with_their_examples(batch):
    lengths, num_ranks = batch
    decision = Orchestrator(COSTS, num_ranks, COSTS, times=times(1e-9)).decide(lengths)
    assert decision.method == "joint" or all(
        (decision.assignments[phase].ranks == decision.backbone.ranks[items.example]).all()
        for phase, items in lengths.items.items()
    )
    assert decision.why.startswith(decision.method)
    for phase, items in lengths.items.items():
        for rank in range(num_ranks):
            route = compose_route(decision.assignments[phase], decision.backbone, items, rank)
            assert route.is_local
            assert route.send_index is None
            assert route.recv_index is None


@given(batches, st.sampled_from(["joint", "per_phase"]))
def test_a_method_that_is_asked_for_is_taken(batch, method):
    lengths, num_ranks = batch
    decision = Orchestrator(COSTS, num_ranks, COSTS, times=times(1e9), methods=[method]).decide(lengths)
    assert decision.method == method
    assert decision.predicted_s.keys() == {method, "unbalanced"}
    if method == "per_phase":
        plain = Orchestrator(COSTS, num_ranks, COSTS).decide(lengths)
        assert plain.method == method
        for phase, placed in plain.assignments.items():
            np.testing.assert_array_equal(placed.items, decision.assignments[phase].items)


def test_seconds_are_those_of_the_operations():
    lengths = draw_lengths(3, 12, 1)
    decision = Orchestrator(COSTS, 1, COSTS, times=times(1.0)).decide(lengths)
    image = lengths.items["image"].length
    audio = lengths.items["audio"].length
    # Padding is no operation that a model needs, but a rank does it.
    seconds = lengths.sequence.sum() + (3 * image + image**2).sum() + len(audio) * audio.max()
    assert decision.predicted_s["joint"] == seconds


class Squares:
    """The work of attention alone: the square of an item's length; a sequence also has the number of its targets."""

    def __call__(self, lengths: BatchLengths) -> dict[str, np.ndarray]:
        work = {phase: items.length**2 for phase, items in lengths.items.items()}
        return {BACKBONE: lengths.sequence**2 + lengths.num_targets, **work}

    def unit(self, phase: str) -> str:
        return f"squares of {phase}"


PLAIN = {BACKBONE: Packed(), "image": Packed(), "audio": Padded()}


def squares_on(lengths: BatchLengths, phase: str, items) -> int:
    if phase == BACKBONE:
        return int((lengths.sequence[items] ** 2 + lengths.num_targets[items]).sum())
    squares = lengths.items[phase].length[items] ** 2
    return len(items) * int(squares.max(initial=0)) if phase == "audio" else int(squares.sum())


@given(batches, st.sampled_from([None, times(1e9)]), st.integers(0, 999))
def test_loads_and_bounds_are_of_the_work_that_is_balanced(batch, times, seed):
    lengths, num_ranks = batch
    orchestrator = Orchestrator(PLAIN, num_ranks, PLAIN, work=Squares(), times=times)
    decision = orchestrator.decide(lengths)
    kept = np.random.default_rng(seed).random(lengths.num_examples) < 0.7
    for decided, of in ((decision, lengths), (decision.keep(kept, lengths), lengths.keep(kept))):
        for phase in PLAIN:
            for placed in (decided.assignments[phase], decided.before[phase]):
                expected = [squares_on(of, phase, placed.on_rank(rank)) for rank in range(num_ranks)]
                assert placed.loads.tolist() == expected
                assert placed.bound <= max(expected)
            assert decided.costs.unit(phase) == f"squares of {phase}"


def test_work_is_balanced_where_lengths_are_not():
    # Two sequences of 4 are as long as one of 8, and attend to half as many pairs.
    sequence = np.array([8, 4, 4, 4, 4])
    none = ItemLengths(*(np.zeros(0, np.int64) for _ in range(3)))
    lengths = BatchLengths(sequence, np.zeros(5, np.int64), home_ranks(5, 2), {"image": none, "audio": none})
    by_length, by_work = (
        Orchestrator(PLAIN, 2, PLAIN, **options).decide(lengths).backbone.ranks.tolist()
        for options in ({}, {"work": Squares()})
    )
    assert by_length.count(by_length[0]) == 2
    assert by_work.count(by_work[0]) == 1


def test_loads_name_their_unit():
    costs = Orchestrator(COSTS, 1, COSTS).costs
    assert [costs.unit(phase) for phase in COSTS] == ["tokens", "cost", "length"]


def test_methods_are_told_apart_where_not_all_phases_are_balanced():
    lengths = draw_lengths(0, 9, 3)
    for balanced, method in (((), "off"), (("image",), "some"), (COSTS, "per_phase")):
        decision = Orchestrator(COSTS, 3, balanced).decide(lengths)
        assert (decision.method, decision.why, decision.predicted_s) == (method, "", {})


def test_config_turns_switches_into_phases():
    encoders = ["image", "audio"]
    assert BalanceConfig(phases="off").balanced(encoders) == frozenset()
    assert BalanceConfig(phases="backbone").balanced(encoders) == {BACKBONE}
    assert BalanceConfig().balanced(encoders) == {BACKBONE, "image", "audio"}
    assert BalanceConfig(phases=["audio"]).balanced(encoders) == {"audio"}


def test_config_turns_coefficients_into_costs():
    config = BalanceConfig(cost="length", costs={"image": {"linear": 7, "quadratic": 2}})
    costs, work = config.length_costs(config.policies({"image": "packed", "audio": "padded"}))
    assert costs == {BACKBONE: Packed(), "image": Packed(), "audio": Padded()}
    assert work.coefficients == {"image": Packed(linear=7, quadratic=2)}


OWN = {"image": "packed", "audio": "padded"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("auto", ("packed", "packed", "padded")),
        # The backbone keeps its own, as in OrchMLLM's "all pad" and "all rmpad".
        ("padded", ("packed", "padded", "padded")),
        ("packed", ("packed", "packed", "packed")),
        ({"audio": "packed", "image": "auto"}, ("packed", "packed", "packed")),
        ({"backbone": "padded", "image": "padded"}, ("padded", "padded", "padded")),
    ],
)
def test_config_turns_words_into_policies(policy, expected):
    config = BalanceConfig(policy=policy)
    assert tuple(config.policies(OWN).items()) == tuple(zip((BACKBONE, "image", "audio"), expected, strict=True))
    config.balanced(OWN)


@pytest.mark.parametrize("padded", ["padded", "padded_attention"])
def test_quadratic_costs_of_what_is_padded(padded):
    coefficients = {phase: {"linear": 3, "quadratic": 2} for phase in OWN}
    config = BalanceConfig(cost="length", policy={"image": padded}, costs=coefficients)
    costs, work = config.length_costs(config.policies(OWN))
    lengths = draw_lengths(0, 20, 2)
    decision = Orchestrator(costs, 2, costs, work=work).decide(lengths)
    for phase, policy in (("image", padded), ("audio", "padded")):
        items, placed = lengths.items[phase].length, decision.assignments[phase]
        for rank in range(2):
            own = items[placed.ranks == rank]
            linear = own.sum() if policy == "padded_attention" else len(own) * own.max()
            assert placed.loads[rank] == 3 * linear + 2 * len(own) * own.max() ** 2


def by_length(costs, policy="auto") -> BalanceConfig:
    return BalanceConfig(cost="length", costs=costs, policy=policy)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: BalanceConfig(phases="backbone", method="joint").balanced(["image"]),
            'balance.phases must be "all", not "backbone"',
        ),
        (
            lambda: BalanceConfig(phases=["image"], speed={"device_tflops": 9}).balanced(["image"]),
            r'no effect with balance.phases = \["image"\]; remove it',
        ),
        (
            lambda: BalanceConfig(phases=["video"]).balanced(["image"]),
            "no phase 'video'; the model has backbone, image",
        ),
        (lambda: by_length({"video": {}}).length_costs({"image": "packed"}), "no phase 'video'"),
        (
            lambda: by_length({"image": {"linear": 2}}).length_costs({"image": "padded_attention"}),
            "takes both coefficients, at least 1 each; set balance.costs.image",
        ),
        (
            lambda: BalanceConfig(policy={"video": "packed"}).policies(OWN),
            "there is no phase 'video'; the model has backbone, image, audio",
        ),
        (
            lambda: BalanceConfig(phases="off", policy="padded").balanced(OWN),
            'balance.policy = "padded" is of encoders, and none is balanced; remove it',
        ),
        (
            lambda: BalanceConfig(phases=["image"], policy={"audio": "packed"}).balanced(OWN),
            "balance.policy: phase 'audio' is not balanced, so it has no policy; remove it",
        ),
    ],
)
def test_config_names_what_is_wrong(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()


@pytest.mark.parametrize("method", ["joint", "per_phase"])
def test_a_speed_by_which_nothing_is_compared_is_refused(method):
    speed = SpeedConfig(device_tflops=9)
    with pytest.raises(ValidationError, match=f'method = "{method}" without defer = "auto" leaves one; remove it'):
        BalanceConfig(method=method, defer="off", speed=speed)
    assert BalanceConfig(method=method, speed=speed).defer == "auto"


def test_config_assumes_a_speed_for_what_is_not_given():
    cuda, cpu = (SpeedConfig(link_latency_us=0.0).resolved(kind) for kind in ("cuda", "cpu"))
    assert cuda.link.latency_s == cpu.link.latency_s == 0
    assert cuda.flops_per_s > 1000 * cpu.flops_per_s
    assert cuda.link.bytes_per_s > cpu.link.bytes_per_s
    stated = SpeedConfig(device_tflops=3.0, link_gbytes_per_s=2.0).resolved("cuda")
    assert (stated.flops_per_s, stated.link) == (3e12, Link(2e9, 50e-6))
    # What is between nodes is not assumed to be faster than what is stated of inside; what is stated holds.
    assert stated.inter_node == Link(2e9, 50e-6)
    assert SpeedConfig().resolved("cuda").inter_node.bytes_per_s < SpeedConfig().resolved("cuda").link.bytes_per_s
    apart = SpeedConfig(inter_node_gbytes_per_s=50.0, inter_node_latency_us=7.0).resolved("cuda")
    assert (apart.link, apart.inter_node) == (Link(40e9, 50e-6), Link(50e9, 7e-6))
    assert BalanceConfig(method="joint").methods == ("joint",)
    assert set(BalanceConfig().methods) == {"joint", "mixed", "per_phase"}
