import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.core.errors import UserError
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths, home_ranks
from motet.dispatch import BalanceConfig, Orchestrator, Packed, Padded

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


def test_config_turns_switches_into_phases():
    encoders = ["image", "audio"]
    assert BalanceConfig(phases="off").balanced(encoders) == frozenset()
    assert BalanceConfig(phases="backbone").balanced(encoders) == {BACKBONE}
    assert BalanceConfig().balanced(encoders) == {BACKBONE, "image", "audio"}
    assert BalanceConfig(phases=["audio"]).balanced(encoders) == {"audio"}


def test_config_turns_coefficients_into_costs():
    config = BalanceConfig(costs={"image": {"linear": 7, "quadratic": 2}})
    costs = config.phase_costs({"image": "packed", "audio": "padded"})
    assert costs == {BACKBONE: Packed(), "image": Packed(linear=7, quadratic=2), "audio": Padded()}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: BalanceConfig(phases=["video"]).balanced(["image"]),
            "no phase 'video'; the model has backbone, image",
        ),
        (lambda: BalanceConfig(costs={"video": {}}).phase_costs({"image": "packed"}), "no phase 'video'"),
        (lambda: BalanceConfig(costs={"audio": {}}).phase_costs({"audio": "padded"}), "remove the coefficients"),
    ],
)
def test_config_names_what_is_wrong(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()
