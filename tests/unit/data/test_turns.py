"""What a generator is given of a turn: which tokens these are, and how many rows they become, from the index alone."""

from dataclasses import replace

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.example import ItemText, Media, TokenSequence, in_pieces
from motet.core.workload import ItemLengths
from motet.data.chat_template import DEFAULT_TEMPLATE
from motet.data.conversation import parse_conversation
from motet.data.dataset import Dataset
from motet.data.images import ImageTransform
from motet.data.modality import Modality
from motet.data.text import ChatTokenizer
from motet.dispatch import LoadedExample, pack
from motet.dispatch.loaded import LoadedTables, tables_of
from unit.data.samples import train_backend, write_image, write_manifest

READ = Modality(ImageTransform(6, 2), lambda sizes: sizes.prod(axis=1) // 4, lambda sizes: sizes.prod(axis=1))
MADE = Modality(
    ImageTransform(6, 1),
    lambda sizes: np.zeros(len(sizes), np.int64),
    lambda sizes: sizes.prod(axis=1),
    is_made=True,
    max_turn=60,
)


def record(*turns, **fields):
    names = "human", "gpt"
    return {"conversations": [{"from": names[i % 2], "value": text} for i, text in enumerate(turns)], **fields}


SECOND = "Make <image> and <image> one.", "So: <image> or <image>", "Again.", "<image>"
RECORDS = [
    record("Draw a cat.", "Here: <image>", image="0.png"),
    record(*SECOND, images=["0.png", "1.png", "0.png", "1.png", "0.png"]),
    record("What is it? <image>", "A dog.", image="1.png"),
    record("long " * 100, "<image>", image="0.png"),
    {"conversations": [{"from": "gpt", "value": "<image>"}, {"from": "human", "value": "a"}], "image": "0.png"},
    {
        "system": "You draw.",
        **record("<image>", "<image> done", images=["1.png", "0.png"]),
    },
]
SAID = {0: ["Draw a cat."], 1: ["Make <image> and <image> one."] * 2 + ["Again."], 2: ["<image>"]}


@pytest.fixture
def dataset(tmp_path, tokenizer):
    for number, sides in enumerate(((24, 12), (36, 36))):
        write_image(tmp_path / f"{number}.png", *sides)
    manifest = write_manifest(tmp_path / "a.jsonl", RECORDS)
    return Dataset.open([manifest], tokenizer, {"image": READ, "draw": MADE})


def test_a_turn_is_what_stands_before_the_answer_without_the_marks_of_roles(dataset, tokenizer):
    ids = [example for example in range(dataset.num_examples) if "draw" in dataset.tokens(example).media]
    for example, expected in zip(ids, SAID.values(), strict=True):
        tokens = dataset.tokens(example)
        reads = np.array(tokens.media) == "draw"
        assert not tokens.turns[~reads].any()
        image = tokens.tokens[tokens.media_positions[0]]
        found = []
        for start, stop in tokens.turns[reads]:
            of_turn = np.split(tokens.tokens[start:stop], np.flatnonzero(tokens.tokens[start:stop] == image))
            texts = [tokenizer.decode(each[each != image]) for each in of_turn]
            found.append("<image>".join(texts))
        assert found == expected


def test_lengths_are_those_of_what_is_packed_and_exchanged(dataset):
    """By the index, by what a rank has loaded, and by the packed rows themselves."""
    ids = np.arange(dataset.num_examples)
    lengths = dataset.batch_lengths(ids, 1)
    sizes, loaded, phases = dataset.item_sizes(ids), [], ("image", "draw")
    left = {name: list(each) for name, each in sizes.items()}
    for example in ids.tolist():
        text = dataset.tokens(example)
        items = [left[name].pop(0) for name in text.media]
        loaded.append(LoadedExample(text, tuple(Media(np.zeros((size.prod(), 1), np.float32), size) for size in items)))

    class Measure:
        def __init__(self, modality):
            self.lengths, self.num_tokens = modality.lengths, modality.num_tokens
            self.max_turn = modality.max_turn

    measures = {"image": Measure(READ), "draw": Measure(MADE)}
    exchanged = LoadedTables.read([tables_of(loaded, phases, measures)], phases).lengths
    packed = pack([each.sequence for each in loaded], {name: lengths.items[name].num_tokens for name in phases})
    for found in (exchanged, lengths):
        assert found.sequence.tolist() == np.diff(packed.offsets.numpy()).tolist()
        assert found.items["draw"].num_tokens.tolist() == packed.turn_rows["draw"].tolist()
        assert found.num_targets.tolist() == [each.sequence.targets[1:].sum() for each in loaded]
    # The second example's turn holds an image of 2 rows and one of 9.
    rows = packed.turn_rows["draw"]
    assert rows[1] == rows[2]
    text = dataset.tokens(1)
    start, stop = text.turns[2]
    assert rows[1] == stop - start - 2 + 2 + 9
    assert rows[-1] == 9
    places = np.split(packed.feature_positions["draw"].numpy(), np.cumsum(rows)[:-1])
    assert places[1].tolist() == places[2].tolist()
    inside = packed.feature_positions["image"].numpy()
    assert np.isin(places[-1], inside).all()


def test_turns_that_are_too_long_or_missing_are_left_out(dataset):
    reasons = [each.reason for each in dataset.left_out.named]
    assert len(dataset.left_out) == 2
    assert reasons[0].startswith("the turn before what draw is to make has ")
    assert reasons[0].endswith(" rows, more than model.generators.draw.max_turn = 60")
    assert reasons[1] == "no turn that the tokenizer's chat template tells apart is before what draw is to make"


def test_a_prompt_keeps_the_turns_of_earlier_answers(dataset):
    prompt, _, _ = dataset.prompt(1)
    whole = dataset.tokens(1)
    assert prompt.media == whole.media[:4]
    assert prompt.turns.tolist() == whole.turns[:4].tolist()


def test_turns_move_with_the_pieces_of_an_item():
    places, turns = np.array([1, 4]), np.array([[0, 0], [1, 3]])
    sequence = TokenSequence(np.array([1, 0, 2, 3, 0]), np.zeros(5, bool), ("image", "draw"), places, turns=turns)
    tiles = ItemText(np.array([7, 0, 8, 0]), np.array([1, 3]))
    moved = in_pieces(sequence, [tiles, None])
    assert moved.turns.tolist() == [[0, 0], [1, 6]]
    # Three rows a tile, two marks, and the token behind.
    assert moved.turn_rows(np.array([6, 0])).tolist() == [0, 9]


def test_a_turn_of_another_number_of_rows_is_refused(dataset):
    text = dataset.tokens(0)
    with pytest.raises(ValueError, match="items of phase 'draw' read turns of"):
        pack([text], {"image": np.zeros(0, np.int64), "draw": np.array([3])})
    lost = replace(text, turns=None)
    assert pack([lost], {"image": np.zeros(0, np.int64), "draw": np.array([3])}).turn_rows == {}


@pytest.mark.parametrize(
    ("turns", "most", "said"),
    [
        (None, 9, "a turn of 0 rows in TokenSequence.turns; this module takes one of 1 to 9 rows"),
        ([0, 3], 2, "a turn of 3 rows in TokenSequence.turns; this module takes one of 1 to 2 rows"),
        ([0, 3], 0, "a turn of 3 rows in TokenSequence.turns; this module reads none"),
    ],
)
def test_turns_of_a_loop_of_ones_own_must_fit_the_generator(turns, most, said):
    class Measure:
        lengths = num_tokens = staticmethod(lambda sizes: np.zeros(len(sizes), np.int64))
        max_turn = most

    given = None if turns is None else np.array([turns])
    text = TokenSequence(np.arange(4), np.zeros(4, bool), ("draw",), np.array([3]), turns=given)
    item = Media(np.zeros((4, 1), np.float32), np.array([2, 2]))
    with pytest.raises(UserError, match=f"example 0 has an item of 'draw' with {said}"):
        tables_of([LoadedExample(text, (item,))], ("draw",), {"draw": Measure()})


def test_a_template_that_writes_roles_in_words_has_the_same_turns():
    tokenizer = ChatTokenizer(train_backend(), DEFAULT_TEMPLATE, {"eos_token": "<eos>"})
    tokens = tokenizer.encode(parse_conversation(record("USER", "ASSISTANT <image>", image="0.png"), "here"))
    [(start, stop)] = tokens.turns
    assert tokenizer.decode(tokens.tokens[start:stop]).strip() == "USER"
    assert "USER" in tokenizer.decode(tokens.tokens[:start])
    assert ItemLengths(np.zeros(1, int), np.ones(1, int), np.array([stop - start])).num_tokens[0] > 0
