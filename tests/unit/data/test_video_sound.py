"""The sound of videos: an item beside them, from the same file, wherever that is."""

import base64
import json
import shutil
import tarfile
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.data.audio import AudioTransform
from motet.data.decode import Decoder
from motet.data.headers import read_header
from motet.data.media import BadMedia, MediaRef, codec_of
from motet.data.transforms import load_media
from motet.data.video_sound import read_video_sound
from motet.models.build import build_mllm
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe_file import load_recipe
from whole_jobs import whole_job, whole_models

av = pytest.importorskip("av")
job = whole_job("qwen2_5_omni_sound", num_examples=3)


def opened(job, *overrides, manifest="train.jsonl"):
    recipe = load_recipe(job / "recipe.toml", list(overrides))
    vocabulary = recipe.vocabulary()
    model = build_mllm(recipe.modules, vocabulary.vocabulary_size, deferred=True)
    return open_dataset(recipe, [str(job / manifest)], vocabulary, model, lambda said: None)


def sound_of(path, **known):
    return replace(MediaRef("video", str(path)).sound, **known)


def test_headers_say_how_many_samples_there_are(tmp_path, monkeypatch):
    for number, count in enumerate(whole_models.SOUND_SAMPLES):
        path = tmp_path / whole_models.write_video(tmp_path, str(number), number, 5, with_sound=True)
        raw = read_header(sound_of(path))
        assert raw == (count, 16_000)
        samples, rate = read_video_sound(sound_of(path, raw=raw), lambda rate: rate)
        assert np.array_equal(samples, whole_models.sound_of(path)[:16_000]) and rate == 16_000
    # What has been counted once is not counted again.
    monkeypatch.setattr("motet.data.video_sound._counted", lambda *args: pytest.fail("packets are counted again"))
    assert read_header(sound_of(tmp_path / "1.mkv", raw=(9_001, 16_000))) == (9_001, 16_000)
    assert codec_of(sound_of(tmp_path / "1.mkv")) == ".mkv"


def test_sound_that_coders_begin_and_end_with_silence_is_as_long_as_its_header_says(tmp_path):
    rng = np.random.default_rng(1)
    with av.open(tmp_path / "a.mp4", "w") as container:
        video = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        coded = container.add_stream("aac", rate=44_100, layout="stereo")
        picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        sound = av.AudioFrame.from_ndarray(rng.normal(0, 0.1, (2, 30_000)).astype(np.float32), "fltp", "stereo")
        sound.sample_rate, sound.pts, sound.time_base = 44_100, 0, Fraction(1, 44_100)
        container.mux([*video.encode(picture), *video.encode(None), *coded.encode(sound), *coded.encode(None)])
    raw = read_header(sound_of(tmp_path / "a.mp4"))
    samples, rate = read_video_sound(sound_of(tmp_path / "a.mp4"), lambda rate: 10**9)
    assert (len(samples), rate) == raw and abs(raw[0] - 30_000) < 3_000
    assert 0.03 < samples.std() < 0.1  # The mean of two channels.


def test_files_that_are_refused(tmp_path, monkeypatch):
    silent = tmp_path / whole_models.write_video(tmp_path, "silent", 1, 5)
    with pytest.raises(BadMedia, match=r"silent.mkv: has no sound, which model.video.sound reads"):
        read_header(sound_of(silent))
    with pytest.raises(BadMedia, match="lists frames, which have no sound"):
        read_header(MediaRef("video", "", "video 1, listed by the record", data=b"{}").sound)
    heard = tmp_path / whole_models.write_video(tmp_path, "heard", 2, 5, with_sound=True)
    with pytest.raises(BadMedia, match="has 47,990 samples of sound at 16,000 Hz, but its header at indexing promised"):
        read_header(sound_of(heard, raw=(48_000, 8_000)))
    with monkeypatch.context() as patch:
        patch.setattr("motet.data.video_sound._counted", lambda *args: 500)
        with pytest.raises(BadMedia, match=r"has 0.0312 s of sound, less than 0.05 s"):
            read_header(sound_of(heard))
    monkeypatch.setattr("motet.data.video_sound._counted", lambda *args: 60_000)
    with pytest.raises(BadMedia, match="is cut off or damaged: it holds 47,990 of 60,000 samples of its sound"):
        load_media(sound_of(heard), AudioTransform())


def test_a_video_is_two_items_wherever_its_bytes_are(job, tmp_path):
    copy = shutil.copytree(job, tmp_path / "job", ignore=shutil.ignore_patterns("*.motet-index"))
    records = [json.loads(line) for line in (job / "train.jsonl").read_text().splitlines()]
    held = json.loads(json.dumps(records[1]))
    held["video"] = [
        "data:video/mp4;base64," + base64.b64encode((job / name).read_bytes()).decode() for name in held["video"]
    ]
    (copy / "held.jsonl").write_text(json.dumps(held) + "\n")
    with tarfile.open(copy / "shard.tar", "w") as shard:
        for name in records[2]["video"]:
            shard.add(job / name, f"0.{name.split('.')[-1]}")
        for name in records[2]["audio"]:
            shard.add(job / name, "0.wav")
        said = {"conversations": records[2]["conversations"]}
        (copy / "0.json").write_text(json.dumps(said))
        shard.add(copy / "0.json", "0.json")
    plain, in_record, in_shard = (opened(copy, manifest=name) for name in ("train.jsonl", "held.jsonl", "shard.tar"))
    for example, (other, number) in {1: (in_record, 0), 2: (in_shard, 0)}.items():
        refs, others = plain.media_refs(example), other.media_refs(number)
        kinds = [(ref.modality, ref.is_sound_of_video) for ref in refs]
        assert kinds[:2] == [("video", False), ("audio", True)] and len(kinds) in (3, 4)
        assert [(ref.modality, ref.raw) for ref in refs] == [(ref.modality, ref.raw) for ref in others]
        same(plain.tokens(example), other.tokens(number))
        with Decoder(plain.transforms, num_workers=1) as workers:
            loaded = workers.load(others, [plain.readers_of(ref) for ref in others])
        for ref, media in zip(refs, loaded, strict=True):
            (phase,) = plain.readers_of(ref)
            assert np.array_equal(media.values, load_media(ref, plain.transforms[phase]).values)
    # The bytes of a record are stored once.
    index = next(copy.glob("held.jsonl.motet-index/*.rows"))
    num_bytes = sum((job / name).stat().st_size for name in records[1]["video"])
    assert num_bytes < index.stat().st_size < 1.5 * num_bytes


def same(first: TokenSequence, second: TokenSequence) -> None:
    assert np.array_equal(first.tokens, second.tokens) and first.media == second.media
    assert np.array_equal(first.grids, second.grids) and np.array_equal(first.pieces, second.pieces)


def test_lengths_count_both_and_an_example_is_cut_before_both_or_behind(job):
    record = json.loads((job / "train.jsonl").read_text().splitlines()[0])
    record = {"video": record["video"], "conversations": [
        *({"from": who, "value": text} for who, text in (("human", "Well?"), ("gpt", "Well."))),
        *({"from": who, "value": text} for who, text in (("human", "<video>\nWhat?"), ("gpt", "It is that."))),
    ]}  # fmt: skip
    (job / "rounds.jsonl").write_text(json.dumps(record) + "\n")
    lengths = opened(job, manifest="rounds.jsonl").batch_lengths(np.arange(1), 1)
    rows = {phase: int(items.num_tokens.sum()) for phase, items in lengths.items.items()}
    whole = int(lengths.sequence[0])
    sequence = opened(job, manifest="rounds.jsonl").tokens(0)
    assert sequence.media == ("image", "audio") and rows["audio"] == 65
    assert sequence.token_rows(np.array([rows["image"], rows["audio"]])).sum() == whole
    assert len(set(sequence.media_positions.tolist())) == sequence.num_pieces.sum() == 65 + sequence.num_pieces[0]
    for bound, num_items in ((whole, 1), (whole - 20, 0), (whole - 70, 0), (60, 0)):
        cut = opened(job, f"data.max_sequence_length={bound}", "data.too_long=truncate", manifest="rounds.jsonl")
        left = cut.batch_lengths(np.arange(1), 1)
        assert left.sequence[0] <= bound
        assert [left.items[phase].num_items for phase in ("image", "audio")] == [num_items] * 2
        assert cut.tokens(0).media == sequence.media[: 2 * num_items]


def test_a_silent_video_is_left_out_and_named(job, tmp_path):
    copy = shutil.copytree(job, tmp_path / "job", ignore=shutil.ignore_patterns("*.motet-index"))
    records = [json.loads(line) for line in (job / "train.jsonl").read_text().splitlines()]
    silent = whole_models.write_video(copy, "media/silent", 0, 5)
    (copy / "train.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in (*records, records[0] | {"video": [silent]}))
    )
    dataset = opened(copy)
    assert dataset.num_examples == 3 and dataset.left_out.num_bad == 1
    assert "has no sound" in dataset.left_out.first()


def test_what_model_video_sound_asks_of_a_model(job, tmp_path):
    with pytest.raises(UserError, match=r"model.video.fps is 0.5, with which transformers cuts frames"):
        load_recipe(job / "recipe.toml", ["model.video.fps=0.5"]).transform("image")
    assert load_recipe(job / "recipe.toml", ["model.video.fps=4"]).transform("image").sound_chunk == 50
    assert load_recipe(job / "recipe.toml", ["model.video.sound=false", "model.video.fps=1"]).vocabulary() is not None
    copy = shutil.copytree(job, tmp_path / "job", ignore=shutil.ignore_patterns("*.motet-index"))
    config = copy / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"seconds_per_chunk": 4}))
    with pytest.raises(UserError, match=r"seconds_per_chunk = 4; for model.video.sound they must be 25 and 2"):
        load_recipe(copy / "recipe.toml").transform("image")
    whole_models.write_job(tmp_path / "other", "smolvlm", num_examples=1)
    with pytest.raises(UserError, match=r"model.video.sound has no effect, as this model does not read the sound"):
        load_recipe(tmp_path / "other" / "recipe.toml", ["model.video.sound=true"]).transform("image")


def test_a_document_has_the_marks_of_both(job):
    video = json.loads((job / "train.jsonl").read_text().splitlines()[0])["video"]
    (job / "document.jsonl").write_text(json.dumps({"text": "See <video> and hear.", "video": video}) + "\n")
    sequence = opened(job, manifest="document.jsonl").tokens(0)
    first, last = sequence.media_positions.min(), sequence.media_positions.max()
    around = sequence.tokens[[first - 2, first - 1, last + 1, last + 2]].tolist()
    vocabulary = load_recipe(job / "recipe.toml").vocabulary()
    marks = ["<|vision_bos|>", "<|audio_bos|>", "<|audio_eos|>", "<|vision_eos|>"]
    assert [vocabulary.decode(np.array([token]), special=True) for token in around] == marks
    assert not sequence.targets[first - 2 : last + 3].any() and sequence.targets[last + 3]


def test_a_template_that_writes_no_marks_around_a_video(job, tmp_path):
    copy = shutil.copytree(job, tmp_path / "job", ignore=shutil.ignore_patterns("*.motet-index"))
    template = copy / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|vision_bos|><|VIDEO|>", "<|VIDEO|>"))
    with pytest.raises(
        UserError, match="its chat template does not write a video between two of these; take its files"
    ):
        opened(copy)
