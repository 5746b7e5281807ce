"""Drawn examples: a pure function of seed and number, as long as their lengths say."""

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.sampler import Sampler
from motet.data.decode import Decoder
from motet.data.drawn import DrawnDataset, DrawnTransform
from motet.data.modality import Modality

TASKS = [
    {
        "name": "images",
        "text": {"median": 9, "spread": 0.8, "min": 1, "max": 60},
        "answer": 0.5,
        "items": {"image": {"count": {"choices": [0, 1, 3]}, "length": {"median": 8, "spread": 1, "max": 40}}},
    },
    {
        "name": "both",
        "text": {"value": 4},
        "items": {"audio": {"length": {"choices": [3, 8]}}, "image": {"length": {"value": 5}}},
    },
    {"name": "text", "text": {"median": 5, "spread": 0.5}},
]


def dataset_of(tasks=TASKS, seed=0, most=None, phases=("image", "audio", "never"), made=(), max_turn=0):
    modalities = {
        name: Modality(
            DrawnTransform(name, 6, is_pixels=name == "image", seed=seed),
            lambda sizes: sizes[:, 0],
            lambda sizes: sizes,
            is_made=name in made,
            max_turn=max_turn if name in made else 0,
        )
        for name in phases
    }
    workload = Sampler.model_validate({"task": tasks}).workload(seed, 600)
    return DrawnDataset(workload, modalities, vocabulary_size=50, seed=seed, max_sequence_length=most)


def contents(dataset, example):
    sequence = dataset.tokens(example)
    with Decoder(dataset.transforms) as decoder:
        media = decoder.load(dataset.media_refs(example))
    return sequence, media


def test_contents_are_as_long_as_their_lengths_say():
    dataset = dataset_of()
    lengths = dataset.batch_lengths(np.arange(dataset.num_examples), 4)
    assert set(lengths.items) == {"image", "audio", "never"} and not lengths.items["never"].num_items
    assert lengths.home.tolist() == sorted(lengths.home.tolist()) and set(lengths.home) == {0, 1, 2, 3}
    seen = set()
    for example in range(0, dataset.num_examples, 7):
        sequence, media = contents(dataset, example)
        of_example = lengths.take(np.array([example]))
        rows = sum(len(item.values) for item in media)
        assert len(sequence.tokens) - len(sequence.media) + rows == of_example.sequence[0]
        assert sequence.targets.sum() == of_example.num_targets[0]
        assert not sequence.targets[sequence.media_positions].any()
        assert not (sequence.targets[0] and not sequence.media), "nothing predicts the first token"
        assert sequence.tokens.min() >= 0 and sequence.tokens.max() < 50
        for phase in ("image", "audio"):
            made = [len(item.values) for item, name in zip(media, sequence.media, strict=True) if name == phase]
            assert made == of_example.items[phase].length.tolist()
        for item in media:
            assert item.values.shape == (item.size[0], 6) and np.abs(item.values).max() <= 1
        seen.add(sequence.media)
    assert {(), ("image",), ("image", "image", "image"), ("image", "audio")} == seen


def test_items_to_make_stand_behind_the_text():
    """Whatever the order of phases. No target is a query, nor the first token."""
    made = {"count": {"choices": [0, 2]}, "length": {"value": 7}, "num_tokens": 3}
    image = {"length": {"value": 5}}
    tasks = [
        {"name": "drawn", "text": {"value": 4}, "items": {"draw": made}},
        {"name": "redrawn", "text": {"value": 4}, "answer": 0.5, "items": {"draw": made, "image": image}},
    ]
    dataset = dataset_of(tasks, phases=("draw", "image"), made=("draw",))
    lengths = dataset.batch_lengths(np.arange(dataset.num_examples), 1)
    seen = {}
    for example in range(dataset.num_examples):
        sequence, media = contents(dataset, example)
        seen[sequence.media] = sequence.media_positions.tolist(), np.flatnonzero(sequence.targets).tolist()
        assert lengths.num_targets[example] == sequence.targets.sum()
        num_made = sequence.media.count("draw")
        assert lengths.sequence[example] == 4 + 3 * num_made + 5 * sequence.media.count("image")
        assert [len(item.values) for item in media] == [{"draw": 7, "image": 5}[name] for name in sequence.media]
        assert all(item.pixels is None for item, name in zip(media, sequence.media) if name == "draw")
    assert seen == {
        (): ([], [1, 2, 3]),
        ("draw", "draw"): ([4, 5], [1, 2, 3]),
        ("image",): ([0], [3, 4]),
        ("image", "draw", "draw"): ([0, 5, 6], [3, 4]),
    }


def test_items_that_are_made_of_a_turn_take_no_row_and_read_the_text_before_the_answer():
    made = {"count": {"value": 2}, "length": {"value": 7}, "turn": True}
    tasks = [
        {"name": "drawn", "text": {"choices": [4, 9]}, "answer": 0.3, "items": {"draw": made}},
        {
            "name": "redrawn",
            "text": {"value": 4},
            "answer": 0,
            "items": {"draw": made, "image": TASKS[1]["items"]["image"]},
        },
    ]
    dataset = dataset_of(tasks, phases=("draw", "image"), made=("draw",), max_turn=9)
    lengths = dataset.batch_lengths(np.arange(dataset.num_examples), 1)
    assert not dataset.takes_rows("draw") and dataset.takes_rows("image")
    for example in range(dataset.num_examples):
        sequence, of_example = dataset.tokens(example), lengths.take(np.array([example]))
        rows = np.array([5 if name == "image" else 0 for name in sequence.media])
        assert sequence.token_rows(rows).sum() == of_example.sequence[0]
        is_made = np.array(sequence.media) == "draw"
        assert (sequence.reads_turn == is_made).all()
        text = np.setdiff1d(np.arange(len(sequence.tokens)), sequence.media_positions)
        for turn in sequence.turns[is_made].tolist():
            assert np.arange(*turn).tolist() == text[~sequence.targets[text]].tolist()
        assert sequence.turn_rows(rows)[is_made].tolist() == of_example.items["draw"].num_tokens.tolist()
    assert set(lengths.items["draw"].num_tokens) == {3, 4, 6}


def test_an_example_is_a_function_of_the_seed_and_its_number():
    first, second, other = dataset_of(), dataset_of(), dataset_of(seed=1)
    assert first.fingerprint == second.fingerprint != other.fingerprint
    for example in (5, 300, 599):
        (sequence, media), (again, media_again) = contents(first, example), contents(second, example)
        assert sequence.tokens.tolist() == again.tokens.tolist()
        assert [item.values.tolist() for item in media] == [item.values.tolist() for item in media_again]
    assert contents(first, 300)[1][0].values.tolist() != contents(first, 301)[1][0].values.tolist()
    assert contents(first, 300)[1][0].values.tolist() != contents(other, 300)[1][0].values.tolist()


def test_pixels_are_sent_as_bytes_and_become_the_same_values():
    item = next(item for item in contents(dataset_of(), 300)[1] if item.pixels is not None)
    np.testing.assert_array_equal(item.pixels.rows(item.pixels.bytes_of(item.values)), item.values)


def test_longer_examples_are_left_out():
    whole, dataset = dataset_of(), dataset_of(most=20)
    assert 0 < dataset.num_examples == whole.num_examples - len(dataset.left_out)
    assert dataset.batch_lengths(np.arange(dataset.num_examples), 1).sequence.max() <= 20
    assert "more than max_sequence_length = 20" in dataset.left_out.first()
    assert dataset.fingerprint != whole.fingerprint
    with pytest.raises(UserError, match=r"data.max_sequence_length = 1 leaves no example: the shortest .* has \d+ tok"):
        dataset_of(TASKS[1:2], most=1)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"text": {"value": 0}}, "draws examples without a token"),
        ({"text": {"value": 3}, "items": {"image": {"length": {"value": 0}}}}, "items of 'image' of length 0"),
    ],
)
def test_what_nothing_can_be_made_of_is_refused(task, said):
    with pytest.raises(UserError, match=said):
        dataset_of([{"name": "odd", **task}])
