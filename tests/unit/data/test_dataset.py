import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.example import Media
from motet.data.audio import AudioTransform
from motet.data.dataset import Dataset
from motet.data.decode import Decoder
from motet.data.images import ImageTransform
from motet.data.left_out import describe_left_out
from motet.data.modality import Modality
from unit.data.samples import a_record, write_clip, write_image, write_manifest

MODALITIES = {
    "vision": Modality(ImageTransform(6, 2), lambda sizes: sizes.prod(axis=1) // 4, lambda sizes: sizes.prod(axis=1)),
    "audio": Modality(
        AudioTransform(num_mels=8, max_seconds=0.5), lambda sizes: -(-sizes[:, 0] // 4), lambda sizes: sizes[:, 0]
    ),
}


@pytest.fixture
def manifests(tmp_path):
    """Twelve examples in two manifests; one file is missing and one clip too long."""
    for number in range(4):
        write_image(tmp_path / f"{number}.png", 12 * (number + 1), 12 * (4 - number))
        write_clip(tmp_path / f"{number}.wav", 1000 * (number + 1))
    write_clip(tmp_path / "long.wav", 8001)
    first = [a_record(f"<image> and <audio> {'x' * n}", image=f"{n}.png", audio=f"{n}.wav", id=n) for n in range(4)]
    second = [
        a_record("text", id=4),
        a_record("<image>", image="missing.png", id=5),
        a_record("<audio>", audio="long.wav", id=6),
        a_record("<audio><image><audio>", image="3.png", audio=["2.wav", "0.wav"], id=7),
        a_record("long " + "text " * 100, id=8),
        a_record("<image>", "an <image> answer", images=["1.png", "2.png"], id=9),
    ]
    return [write_manifest(tmp_path / "a.jsonl", first), write_manifest(tmp_path / "b.jsonl", second)]


def test_lengths_are_those_of_what_is_loaded(manifests, tokenizer):
    dataset = Dataset.open(manifests, tokenizer, MODALITIES)
    assert dataset.num_examples == 8
    ids = np.array([5, 0, 7, 3, 4, 6, 2, 1, 5])
    lengths = dataset.batch_lengths(ids, num_ranks=3)
    assert lengths.home.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with Decoder(dataset.transforms) as decoder:
        for place, example in enumerate(ids.tolist()):
            tokens, refs = dataset.tokens(example), dataset.media_refs(example)
            media = decoder.load(refs, [dataset.readers_of(ref) for ref in refs])
            assert tokens.media == tuple(phase for ref in refs for phase in dataset.readers_of(ref))
            expected = {"vision": [], "audio": []}
            for phase, item in zip(tokens.media, media):
                assert isinstance(item, Media)
                size = item.size[None]
                modality = MODALITIES[phase]
                expected[phase].append((int(modality.lengths(size)[0]), int(modality.num_tokens(size)[0])))
            for phase, items in lengths.items.items():
                mine = items.example == place
                assert list(zip(items.length[mine].tolist(), items.num_tokens[mine].tolist())) == expected[phase]
            rows = sum(count for items in expected.values() for _, count in items)
            assert lengths.sequence[place] == len(tokens.tokens) - len(refs) + rows
            assert lengths.num_targets[place] == tokens.targets.sum()


def test_what_is_left_out(manifests, tokenizer, tmp_path):
    whole = Dataset.open(manifests, tokenizer, MODALITIES)
    dataset = Dataset.open(manifests, tokenizer, MODALITIES, max_sequence_length=100)
    assert [dataset.record(example)["id"] for example in range(dataset.num_examples)] == [0, 1, 2, 3, 4, 7, 9]
    left_out = dataset.left_out
    assert (left_out.num_bad, left_out.num_refused, left_out.num_too_long, len(left_out)) == (1, 1, 1, 3)
    lines, num_tokens = [f"{tmp_path}/b.jsonl, line {line}" for line in (2, 3, 5)], len(whole.tokens(6).tokens)
    assert [str(example) for example in left_out.named] == [
        f"{lines[0]}: {tmp_path}/missing.png: no such file",
        f"{lines[1]}: {tmp_path}/long.wav: lasts 0.500062 s, more than max_seconds = 0.5",
        f"{lines[2]}: takes {num_tokens} tokens, more than max_sequence_length = 100",
    ]
    assert describe_left_out(left_out, dataset.num_in_manifests) == (
        "3 of 10 examples left out: 1 with files that cannot be used, 1 with media that the transform refuses, "
        "1 longer than max_sequence_length"
    )
    assert dataset.batch_lengths(np.arange(7), 1).sequence.max() <= 100


def test_empty_batches_and_absent_modalities(manifests, tokenizer):
    dataset = Dataset.open(manifests, tokenizer, MODALITIES)
    nothing = dataset.batch_lengths(np.zeros(0, dtype=np.int64), 2)
    assert nothing.num_examples == 0
    assert nothing.items["audio"].num_items == 0
    text_only = dataset.batch_lengths(np.array([4]), 2)
    assert text_only.items["vision"].length.dtype == np.int64
    assert text_only.sequence.tolist() == [len(dataset.tokens(4).tokens)]


def test_fingerprints(manifests, tokenizer):
    def fingerprint(paths, **options) -> str:
        return Dataset.open(paths, tokenizer, MODALITIES, **options).fingerprint

    assert fingerprint(manifests) == fingerprint(manifests)
    assert fingerprint(manifests) != fingerprint(manifests[::-1])
    assert fingerprint(manifests) != fingerprint(manifests, max_sequence_length=100)


def test_prompts(manifests, tokenizer):
    dataset = Dataset.open(manifests, tokenizer, MODALITIES)
    tokens, refs, answer = dataset.prompt(dataset.num_examples - 1)
    assert answer == "an <image> answer"
    assert tokens.media == ("vision",)
    assert [ref.raw for ref in refs] == [(24, 36)]


def test_wrong_use(manifests, tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl holds audio media, but the model has no encoder"):
        Dataset.open(manifests, tokenizer, {"vision": MODALITIES["vision"]})
    with pytest.raises(UserError, match=r"vision and other read every image, so .*model\.combine\.image"):
        Dataset.open(manifests, tokenizer, MODALITIES | {"other": MODALITIES["vision"]})
    only_bad = write_manifest(tmp_path / "bad.jsonl", [a_record("<image>", image="nowhere.png")])
    with pytest.raises(UserError, match="no example of the manifests can be used: 1 of 1 example left out"):
        Dataset.open([only_bad], tokenizer, MODALITIES)
    dataset = Dataset.open(manifests, tokenizer, MODALITIES)
    with pytest.raises(IndexError):
        dataset.tokens(8)


def two_readers(rows_of_second):
    first = MODALITIES["vision"]
    patches = Modality(ImageTransform(6, 2, mean=(0.2,)), rows_of_second, first.lengths)
    return {"vision": first, "second": patches, "audio": MODALITIES["audio"]}


@pytest.mark.parametrize("mode", ["rows", "sum"])
def test_an_item_that_two_encoders_read(manifests, tokenizer, mode):
    modalities = two_readers(MODALITIES["vision"].num_tokens)
    plain = Dataset.open(manifests, tokenizer, MODALITIES)
    dataset = Dataset.open(manifests, tokenizer, modalities, combine={"image": mode})
    ids = np.arange(dataset.num_examples)
    before, after = plain.batch_lengths(ids, 2), dataset.batch_lengths(ids, 2)
    assert list(after.items) == ["vision", "second", "audio"]
    rows = np.bincount(before.items["vision"].example, before.items["vision"].num_tokens, len(ids))
    assert (after.sequence - before.sequence).tolist() == ([0] * len(ids) if mode == "sum" else rows.tolist())
    tokens = dataset.tokens(5)
    assert tokens.media == ("audio", "vision", "second", "audio")
    assert np.diff(tokens.media_positions).tolist() == [1, 0 if mode == "sum" else 1, 1]
    assert len(tokens.tokens) == len(plain.tokens(5).tokens) + (mode == "rows")
    assert not tokens.targets[tokens.media_positions].any()
    refs = dataset.media_refs(5)
    with Decoder(dataset.transforms) as decoder:
        first, second = decoder.load(refs, [dataset.readers_of(ref) for ref in refs])[1:3]
    assert first.size.tolist() == second.size.tolist() and not np.array_equal(first.values, second.values)


def test_an_item_is_decoded_once_for_all_that_read_it(manifests, tokenizer, monkeypatch):
    decoded = []
    decode = ImageTransform.decode
    monkeypatch.setattr(ImageTransform, "decode", lambda self, ref: decoded.append(ref.name) or decode(self, ref))
    ref = Dataset.open(manifests, tokenizer, MODALITIES).media_refs(0)[0]
    drafted = ImageTransform(12, draft_jpeg=True)
    transforms = {"a": ImageTransform(6), "b": ImageTransform(12, mean=(0.1,)), "c": drafted}
    with Decoder(transforms) as decoder:
        items = decoder.load([ref], [("a", "b")])
        assert len(decoded) == 1
        assert all(np.array_equal(item.values, transforms[name].load(ref).values) for name, item in zip("ab", items))
        decoded.clear()
        decoder.load([ref], [("a", "c")])
        assert len(decoded) == 2, "what is drafted is another picture"


def test_rows_to_be_added_must_be_equally_many(manifests, tokenizer):
    modalities = two_readers(lambda sizes: sizes.prod(axis=1))
    said = r'image = "sum" adds the rows of vision and second, but of an item of .*a\.jsonl, line 1 vision makes'
    with pytest.raises(UserError, match=said):
        Dataset.open(manifests, tokenizer, modalities, combine={"image": "sum"})
    with pytest.raises(UserError, match=r"model\.combine\.audio has no effect, as fewer than two encoders read audio"):
        Dataset.open(manifests, tokenizer, MODALITIES, combine={"audio": "rows"})


def test_examples_are_counted_by_manifest(manifests, tokenizer):
    assert Dataset.open(manifests, tokenizer, MODALITIES).num_by_manifest.tolist() == [4, 4]
    assert Dataset.open(manifests[:1], tokenizer, MODALITIES).num_by_manifest.tolist() == [4]
