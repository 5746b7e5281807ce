"""Examples that are cut to `max_sequence_length`: where, how long they are then, and which are left out."""

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.data.audio import AudioTransform
from motet.data.dataset import Dataset
from motet.data.decode import Decoder
from motet.data.images import ImageTransform
from motet.data.left_out import describe_left_out
from motet.data.modality import Modality
from motet.data.text import ChatTokenizer
from motet.data.truncation import num_kept_tokens
from unit.data.families import QWEN2_VL, TOKENS, write_tokenizer
from unit.data.samples import write_clip, write_image, write_manifest

ROWS = 6  # of an image of 24 x 12 pixels
MODALITIES = {
    "vision": Modality(ImageTransform(2, 2), lambda sizes: sizes.prod(axis=1) // 12, lambda sizes: sizes.prod(axis=1)),
    "audio": Modality(AudioTransform(num_mels=8), lambda sizes: -(-sizes[:, 0] // 4), lambda sizes: sizes[:, 0]),
}


def talk(*turns, **fields):
    roles = ("human", "gpt")
    return {"conversations": [{"from": roles[i % 2], "value": text} for i, text in enumerate(turns)], **fields}


RECORDS = [
    talk("Hello", "A cat."),
    talk("<image> a", "cat " * 20, "<image> b", "dog " * 30, image=["0.png", "1.png"]),
    talk("word " * 60, "never reached"),
    talk("<image> a", "cat", "<audio> b", "dog", image="0.png", audio="0.wav"),
    talk("<image><image>", "cat " * 40, image=["0.png", "1.png"]),
]


@pytest.fixture
def manifest(tmp_path):
    write_image(tmp_path / "0.png", 24, 12)
    write_image(tmp_path / "1.png", 24, 24)
    write_clip(tmp_path / "0.wav", 16_000)
    return write_manifest(tmp_path / "train.jsonl", RECORDS)


def opened(manifest, tokenizer, bound, too_long="truncate"):
    return Dataset.open([manifest], tokenizer, MODALITIES, max_sequence_length=bound, too_long=too_long)


@pytest.mark.parametrize("bound", [12, 30, 40, 55, 70, 10_000])
def test_what_is_left_is_the_longest_start_that_ends_in_what_is_learned(manifest, tokenizer, bound):
    whole, dataset = Dataset.open([manifest], tokenizer, MODALITIES), opened(manifest, tokenizer, bound)
    lines = [int(dataset.where(i).rpartition(" ")[2]) - 1 for i in range(dataset.num_examples)]
    lengths = dataset.batch_lengths(np.arange(dataset.num_examples), 1)
    full = whole.batch_lengths(np.arange(len(RECORDS)), 1)
    num_truncated = 0
    for example, line in enumerate(lines):
        tokens, before, refs = dataset.tokens(example), whole.tokens(line), dataset.media_refs(example)
        num_kept = len(tokens.tokens)
        assert np.array_equal(tokens.tokens, before.tokens[:num_kept])
        assert np.array_equal(tokens.targets, before.targets[:num_kept])
        assert refs == whole.media_refs(line)[: len(tokens.media)]
        # The rows of the items that are kept, and what one more target would have taken.
        rows = np.ones(len(before.tokens), dtype=np.int64)
        items = [full.items[phase] for phase in before.media]
        rows[before.media_positions] = np.concatenate(
            [
                [items[k].num_tokens[items[k].example == line][before.media[:k].count(before.media[k])]]
                for k in range(len(items))
            ]
            or [[]]
        )
        ends = np.cumsum(rows)
        assert lengths.sequence[example] == ends[num_kept - 1]
        assert lengths.num_targets[example] == tokens.targets.sum()
        if ends[-1] <= bound:
            assert num_kept == len(before.tokens)
            continue
        num_truncated += 1
        assert tokens.targets[-1] and ends[num_kept - 1] <= bound
        following = np.flatnonzero(before.targets[num_kept:])
        assert not len(following) or ends[num_kept + following[0]] > bound
    assert dataset.left_out.num_truncated == num_truncated
    assert dataset.left_out.num_too_long == len(RECORDS) - len(lines)
    for phase, items in lengths.items.items():
        assert len(dataset.item_sizes(np.arange(len(lines)))[phase]) == items.num_items


def test_what_cannot_be_cut_is_left_out_by_name(manifest, tokenizer, tmp_path):
    dataset = opened(manifest, tokenizer, 30)
    num_tokens = len(Dataset.open([manifest], tokenizer, MODALITIES).tokens(2).tokens)
    assert dataset.left_out.named[0].where == f"{tmp_path}/train.jsonl, line 3"
    assert dataset.left_out.named[0].reason == (
        f"takes {num_tokens} tokens, more than max_sequence_length = 30, and nothing that is learned is within it"
    )
    assert describe_left_out(dataset.left_out, 5).endswith(
        "longer than max_sequence_length; 3 truncated to max_sequence_length"
    )


def test_items_that_are_kept_are_loaded_as_before(manifest, tokenizer):
    dataset = opened(manifest, tokenizer, 40)
    with Decoder(dataset.transforms) as decoder:
        for example in range(dataset.num_examples):
            refs = dataset.media_refs(example)
            media = decoder.load(refs, [dataset.readers_of(ref) for ref in refs])
            assert len(media) == len(dataset.tokens(example).media)


def test_an_error_names_the_first_and_counts_all(manifest, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"line 2: takes \d+ tokens, more than max_sequence_length = 30 .*4 of 5 exam"):
        opened(manifest, tokenizer, 30, "error")
    assert opened(manifest, tokenizer, 10_000, "error").num_examples == 5


def test_cuts_are_part_of_the_fingerprint(manifest, tokenizer):
    prints = {opened(manifest, tokenizer, bound).fingerprint for bound in (30, 40, 10_000)}
    assert len(prints | {opened(manifest, tokenizer, 30, "drop").fingerprint}) == 4
    assert opened(manifest, tokenizer, 30).fingerprint in prints


def test_an_item_is_not_parted_from_its_marks(tmp_path):
    """Qwen2-VL's marks in an answer are learned, and stand on both sides of the rows."""
    named = {"processor_class": "Qwen2VLProcessor"}
    directory = write_tokenizer(tmp_path / "qwen", QWEN2_VL, TOKENS[QWEN2_VL], named)
    tokenizer = ChatTokenizer.from_directory(directory)
    of_image = tokenizer.item_tokens("image")
    names = [tokenizer.decode(np.array([token])) for token in of_image]
    assert len(of_image) == 3, names
    start, pad, end = (tokenizer.backend.added[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end"))
    # word word start pad end word word, all learned but the pad.
    tokens = np.array([300, 301, start, pad, end, 302, 303])
    targets = np.array([True, True, True, False, True, True, True])
    text = TokenSequence(tokens, targets, ("image",), np.array([3]))
    kept = [num_kept_tokens(text, np.array([ROWS]), of_image, bound) for bound in range(1, 13)]
    assert kept == [0, 2, 2, 2, 2, 2, 2, 2, 2, 5, 6, 7]


def test_an_end_token_before_an_image_is_kept(manifest, tokenizer):
    """`<eos><user><image>`: special tokens that are no marks of the image do not bind to it."""
    whole = Dataset.open([manifest], tokenizer, MODALITIES).tokens(3)
    end = int(np.flatnonzero(whole.targets[:-1] & ~whole.targets[1:])[0])
    dataset = opened(manifest, tokenizer, end + ROWS + 1)
    left = dataset.tokens([dataset.where(i).endswith("line 4") for i in range(dataset.num_examples)].index(True))
    assert left.tokens[-1] == tokenizer.end_token
