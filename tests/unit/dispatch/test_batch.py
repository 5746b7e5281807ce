import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.balance import Link, StepCosts, StepTimes, choose
from motet.balance.phases import KeyExchange
from motet.balance.step_costs import LengthWork
from motet.core.example import Media, TokenSequence
from motet.core.workload import BACKBONE, BatchLengths, ItemLengths
from motet.dispatch import Orchestrator, Packed, assemble, pack


def sequence(tokens, media=(), places=(), targets=None):
    tokens = np.array(tokens, dtype=np.int64)
    targets = np.zeros(len(tokens), bool) if targets is None else np.array(targets, bool)
    return TokenSequence(tokens, targets, tuple(media), np.array(places, dtype=np.int64))


def test_placeholders_grow_to_the_rows_of_their_items():
    packed = pack(
        [
            sequence([1, 90, 2, 91, 3], ["image", "audio"], [1, 3], [1, 0, 0, 1, 1]),
            sequence([4]),
            sequence([92, 5, 93], ["image", "image"], [0, 2], [0, 1, 0]),
        ],
        {"image": np.array([3, 0, 2]), "audio": np.array([2]), "video": np.array([], dtype=np.int64)},
    )
    assert packed.tokens.tolist() == [1, 90, 90, 90, 2, 91, 91, 3, 4, 5, 93, 93]
    # Neither the first token of a sequence nor a placeholder is a target.
    assert packed.targets.nonzero().flatten().tolist() == [7]
    assert packed.offsets.tolist() == [0, 8, 9, 12]
    assert {name: places.tolist() for name, places in packed.feature_positions.items()} == {
        "image": [1, 2, 3, 10, 11],
        "audio": [5, 6],
        "video": [],
    }


@pytest.mark.parametrize(("again", "rows"), [((), 9), (("image",), 99)])
def test_what_a_merge_moves_is_what_a_choice_counts(again, rows):
    """Rows of a shared sequence leave the rank that merges it, and its image comes there; rows that enter again behind
    the merge leave it, too.
    """
    lengths = BatchLengths(
        np.array([101]),
        np.ones(1, int),
        np.zeros(1, np.int32),
        {"image": ItemLengths(*np.array([[0], [rows], [rows]]))},
    )
    keys = (KeyExchange(0, 0, 0),)
    times = StepTimes(
        lambda _: {BACKBONE: 1.0, "image": 1.0}, Link(1e9, 0.0), token_bytes=8, keys=keys, merges=True, again=again
    )
    costs = {BACKBONE: Packed(), "image": Packed()}
    decision = Orchestrator(costs, 2, costs, times=times, methods=["split"]).decide(lengths)
    assert decision.merges and decision.cuts is not None and decision.cuts.items.tolist() == [0]
    num_tokens = 102 - rows
    text = sequence(range(num_tokens), ["image"], [min(20, num_tokens - 2)], np.arange(num_tokens) == num_tokens - 1)
    image = Media(np.ones((rows, 1), np.float32), np.array([rows]))
    batches = [
        assemble(
            decision,
            lengths,
            rank,
            [text],
            {"image": [image] * len(decision.items_on("image", rank))},
            shared={0: text},
        )
        for rank in range(2)
    ]
    (merging,) = np.flatnonzero([batch.sequences.context.merging.sequences.num_rows >= 101 for batch in batches])
    assert [batch.routes["image"].num_rows_out for batch in batches] == [rows * (rank == merging) for rank in range(2)]
    left = [batch.sequences.context.merging.to_places.send_splits for batch in batches]
    choice = choose(StepCosts(costs, LengthWork(), times).phases(lengths), 2, times.link, methods=["split"])
    if again:
        left += [batch.sequences.context.routes["image"].send_splits for batch in batches]
    num_moved = sum(splits[1 - number % 2] for number, splits in enumerate(left))
    # Where an image's rows stand, lengths do not say; these are all but two of the sequence.
    assert choice.moved_bytes / (2 * 8) == pytest.approx(num_moved, abs=2 * len(again)) and num_moved > 0


def test_target_after_an_item_without_rows_has_nothing_before_it():
    packed = pack([sequence([90, 5], ["image"], [0], [0, 1])], {"image": np.array([0])})
    assert packed.tokens.tolist() == [5]
    assert not packed.targets.any()


def test_no_sequences_are_a_legal_batch():
    packed = pack([], {"image": np.array([], dtype=np.int64)})
    assert (packed.num_sequences, packed.num_tokens) == (0, 0)
    assert packed.tokens.dtype == torch.int64 and packed.targets.dtype == torch.bool
    assert packed.feature_positions["image"].dtype == torch.int64


def test_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="1 placeholders of phase 'image', 2 items"):
        pack([sequence([9, 1], ["image"], [0])], {"image": np.array([1, 1])})
    with pytest.raises(ValueError, match="unknown phases"):
        pack([sequence([9, 1], ["audio"], [0])], {"image": np.array([])})


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 4), max_size=3)), max_size=6), st.integers(0, 99))
def test_packing_equals_packing_one_by_one(shapes, seed):
    rng = np.random.default_rng(seed)
    sequences, rows = [], []
    for num_text, items in shapes:
        total = num_text + len(items)
        places = np.sort(rng.choice(total, len(items), replace=False)) if total else []
        sequences.append(sequence(rng.integers(0, 9, total), ["image"] * len(items), places, rng.random(total) < 0.5))
        rows.append(np.array(items, dtype=np.int64))
    together = pack(sequences, {"image": np.concatenate(rows) if rows else np.array([], dtype=np.int64)})
    alone = [pack([one], {"image": count}) for one, count in zip(sequences, rows, strict=True)]
    starts = together.offsets.tolist()
    assert torch.equal(together.tokens, torch.cat([one.tokens for one in alone] or [torch.empty(0).long()]))
    assert torch.equal(together.targets, torch.cat([one.targets for one in alone] or [torch.empty(0).bool()]))
    assert together.feature_positions["image"].tolist() == [
        place + start for one, start in zip(alone, starts) for place in one.feature_positions["image"].tolist()
    ]


def lengths_of_two() -> BatchLengths:
    items = ItemLengths(example=np.array([0]), length=np.array([4]), num_tokens=np.array([2]))
    return BatchLengths(np.array([4, 2]), np.array([1, 1]), np.zeros(2, np.int32), {"image": items})


FIRST = sequence([90, 1, 2], ["image"], [0], [0, 0, 1])
SECOND = sequence([3, 4], targets=[0, 1])
IMAGE = Media(np.zeros((4, 6), np.float32), np.array([2, 2]))


def test_assemble_makes_a_rank_batch():
    lengths = lengths_of_two()
    decision = Orchestrator({BACKBONE: Packed(), "image": Packed()}, 1, ()).decide(lengths)
    batch = assemble(decision, lengths, 0, [FIRST, SECOND], {"image": [IMAGE]})
    assert (batch.num_targets, batch.num_tokens, batch.has("image")) == (2, 6, True)
    values, sizes = batch.to("cpu", dtype=torch.float64).media["image"]
    assert values.shape == (4, 6) and values.dtype == torch.float64 and sizes.tolist() == [[2, 2]]


@pytest.mark.parametrize(
    ("sequences", "media", "sentence"),
    [
        ([FIRST, sequence([3, 4, 5], targets=[0, 0, 1])], [IMAGE], "example 1 of the batch has 3 tokens, .* say 2"),
        ([FIRST, sequence([3, 4])], [IMAGE], "example 1 of the batch has 0 targets, .* say 1"),
        ([FIRST], [IMAGE], "1 sequences were given where the decision puts 2"),
        ([FIRST, SECOND], [], "encodes 1 items of phase 'image', not 0"),
    ],
)
def test_assemble_refuses_what_its_lengths_do_not_say(sequences, media, sentence):
    lengths = lengths_of_two()
    decision = Orchestrator({BACKBONE: Packed(), "image": Packed()}, 1, ()).decide(lengths)
    with pytest.raises(ValueError, match=sentence):
        assemble(decision, lengths, 0, sequences, {"image": media})


def test_positions_labels_and_extents_are_those_of_each_sequence():
    packed = pack(
        [sequence([1, 90, 2], ["image"], [1], [1, 0, 1]), sequence([4, 5], targets=[1, 1])], {"image": np.array([2])}
    )
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.labels.tolist() == [-100, -100, -100, 2, -100, 5]
    assert packed.cu_seqlens.tolist() == [0, 4, 6] and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 4
    nothing = pack([], {})
    assert nothing.position_ids.tolist() == nothing.labels.tolist() == [] and nothing.max_seqlen == 0


def test_losses_are_scaled_so_that_their_average_over_ranks_is_the_mean_over_targets():
    lengths = BatchLengths(np.array([5, 3, 4]), np.array([4, 0, 2]), np.array([0, 1, 2], np.int32), {})
    decision = Orchestrator({BACKBONE: Packed()}, 3, ()).decide(lengths)
    texts = [
        sequence(np.arange(5), targets=[0, 1, 1, 1, 1]),
        sequence([1, 2, 3]),
        sequence([1, 2, 3, 4], targets=[0, 0, 1, 1]),
    ]
    batches = [assemble(decision, lengths, rank, [text], {}) for rank, text in enumerate(texts)]
    sums = [torch.tensor(8.0), torch.tensor(0.0), torch.tensor(5.0)]
    scaled = [batch.scale_sum(loss).item() for batch, loss in zip(batches, sums)]
    assert sum(scaled) / 3 == pytest.approx(13 / 6)
    # The mean over no target is nan, and must not reach a gradient.
    means = [loss / batch.num_targets_of_rank for batch, loss in zip(batches, sums)]
    assert means[1].isnan()
    assert [batch.scale_mean(mean).item() for batch, mean in zip(batches, means)] == pytest.approx(scaled)
    logits, mask = torch.zeros(3, 4, requires_grad=True), torch.zeros(3)
    for mean in (
        torch.nn.functional.cross_entropy(logits, torch.full((3,), -100)),
        (logits.logsumexp(1) * mask).sum() / mask.sum(),
        logits.sum() / batches[1].num_targets_of_rank,
    ):
        logits.grad = None
        batches[1].scale_mean(mean).backward()
        assert not logits.grad.any()
