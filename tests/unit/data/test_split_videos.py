"""Videos of SmolVLM: frames, pixels and texts are those of transformers' own processors, from headers alone."""

import json
from fractions import Fraction

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.video_utils import VideoMetadata

from benchmark import benchmark
from motet.core.errors import UserError
from motet.core.example import in_pieces
from motet.core.frame_sampling import SkippingSampling
from motet.core.words import number_words
from motet.data.conversation import parse_conversation
from motet.data.headers import read_header
from motet.data.media import MediaRef
from motet.data.split_videos import SplitVideos
from motet.data.text import ChatTokenizer
from motet.data.transforms import load_media
from motet.data.videos import VideoHeader, video_seconds
from motet.models.whole.idefics3 import SMOLVLM
from motet.models.whole.video_processor import FrameTiles
from motet.train.recipe.recipe_file import load_recipe

pytest.importorskip("av")
with (
    benchmark("whole_models") as whole_models,
    benchmark("their_videos") as their_videos,
    benchmark("against_transformers") as against,
):
    KIND = {"video_processor_type": "SmolVLMVideoProcessor"}

TILE = {"max_image_size": {"longest_edge": 26}}
RATES = (Fraction(24000, 1001), Fraction(30), Fraction(25, 2), Fraction(60000, 1001), Fraction(7, 3))


@pytest.mark.parametrize(("fps", "most"), [(1, 64), (2.0, 5), (0.3, 3), (1, 1), (9.5, 40), (0.001, 8)])
def test_frames_are_those_of_transformers(fps, most):
    theirs, ours = their_videos.kind("SmolVLMVideoProcessor")(), SkippingSampling(fps=fps, max_frames=most)
    rng = np.random.default_rng(3)
    # The last is as long as half a second more than whole seconds, of a rate that is no number of floating point.
    headers = [VideoHeader(int(n), 8, 8, rate) for n in rng.integers(1, 4000, 40) for rate in RATES]
    headers += [VideoHeader(12_000, 8, 8, RATES[0])]
    raw = np.array([header.raw for header in headers])
    seconds = video_seconds(raw)
    assert seconds.tolist() == [float(header.num_frames / header.rate) for header in headers]
    rates = np.array([float(header.rate) for header in headers])
    counts = ours.counts(np.array([header.num_frames for header in headers]), rates, 1, seconds)
    for header, rate, lasts, count in zip(headers, rates.tolist(), seconds.tolist(), counts.tolist(), strict=True):
        metadata = VideoMetadata(total_num_frames=header.num_frames, fps=rate, duration=lasts)
        expected = theirs.sample_frames(metadata, num_frames=most, fps=fps)
        np.testing.assert_array_equal(ours.numbers(header.num_frames, rate, 1, lasts), expected)
        assert count == len(expected)


def test_numbers_in_words():
    # As the package num2words has them, which transformers asks.
    words = {
        0: "zero",
        17: "seventeen",
        40: "forty",
        64: "sixty-four",
        100: "one hundred",
        768: "seven hundred and sixty-eight",
        1001: "one thousand and one",
        12_300: "twelve thousand, three hundred",
        2_000_045: "two million and forty-five",
        2_100_000_900: "two billion, one hundred million, nine hundred",
    }
    assert {number: number_words(number) for number in words} == words


@pytest.mark.parametrize(
    "options",
    [
        {"size": {"longest_edge": 31}},
        {"size": {"longest_edge": 47}, "fps": 6, "num_frames": 4, "do_normalize": False},
        # Files of images are taken where there is none for videos, and say more than one size.
        {
            "size": {"longest_edge": 40},
            "video_sampling": {"fps": 9, "max_frames": 3, "video_size": {"longest_edge": 9}},
        },
        {"video_sampling": {"fps": 1, "max_frames": 3, "video_size": {"longest_edge": 90}}, "resample": 3},
    ],
)
def test_pixels_are_those_of_transformers(tmp_path, options):
    images = {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 33}} | TILE
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(KIND | TILE | options))
    transform = SplitVideos(**FrameTiles(4, 26).options(tmp_path))
    for number in range(3):
        path = tmp_path / whole_models.write_video(tmp_path, str(number), number, 11)
        ref = MediaRef("video", str(path), raw=read_header(MediaRef("video", str(path))))
        made, media = their_videos.their_video(tmp_path, path), load_media(ref, transform)
        assert media.size.tolist() == [made.values.shape[1], 0] == transform.sizes(np.array([ref.raw]))[0].tolist()
        whole = made.values[0].numpy()[:, :, :24, :24]  # What is less than a patch is left out.
        rows = whole.reshape(-1, 3, 6, 4, 6, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 48)
        np.testing.assert_array_equal(media.values, rows)
        seconds, times = transform.times(tuple(transform.text_keys(np.array([ref.raw]))[0].tolist()))
        assert seconds == made.metadata.duration and times == list(made.metadata.timestamps)


def test_video_processors_that_are_refused(tmp_path):
    images = {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 33}} | TILE
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    for options, said in (
        ({"fps": 2}, "has fps = 2 and num_frames = None; it must have both of them"),
        ({"do_sample_frames": True}, "has fps = None and num_frames = None; it must have both"),
        ({"fps": 0, "num_frames": 4}, "they must be more than 0"),
        ({"size": {"height": 26, "width": 26}}, "it must name longest_edge alone"),
        ({"max_image_size": {"longest_edge": 30}}, "makes images of 30 x 30 pixels, and the vision tower takes 26"),
    ):
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(KIND | TILE | options))
        with pytest.raises(UserError, match=said):
            FrameTiles(4, 26).options(tmp_path)


def written(folder, raw):
    """A directory with a tokenizer that joins letters, and its processor."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = raw, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    begin, frame = SMOLVLM.frames.begin, SMOLVLM.frames.frame
    corpus = ["User: " + begin.format(frame_count="five", video_duration="0:00:09") + frame + "\n\n\nWhat is it?\n\n"]
    backend.train_from_iterator(corpus * 9, trainer)
    special = {"bos_token": "<s>", "eos_token": "<end_of_utterance>", "pad_token": "<pad>"}
    own = {"image_token": "<image>", "fake_image_token": "<around>", "global_image_token": "<whole>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=own, **special)
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 33}, max_image_size={"longest_edge": 26})
    processor = whole_models.without_video(transformers.SmolVLMProcessor)(
        images, tokenizer, image_seq_len=1, chat_template=whole_models.IDEFICS3_TEMPLATE
    )
    processor.save_pretrained(folder)
    return processor, ChatTokenizer.from_directory(folder, frames=SMOLVLM.frames)


@pytest.mark.parametrize("joins", [" one", "\n", "?"])
@pytest.mark.parametrize(("frames", "rate"), [(1, RATES[0]), (90, RATES[1]), (7000, RATES[2]), (2_700_000, RATES[1])])
def test_texts_are_those_of_transformers(tmp_path, frames, rate, joins):
    processor, ours = written(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    transform = SplitVideos(patch_size=4, tile=24, sampling=SkippingSampling(fps=1, max_frames=23))
    raw = np.array([VideoHeader(frames, 64, 48, rate).raw])
    seconds, times = transform.times(tuple(transform.text_keys(raw)[0].tolist()))
    sampled = transform.sampling.numbers(frames, float(rate), 1, seconds).tolist()
    metadata = VideoMetadata(total_num_frames=frames, fps=float(rate), duration=seconds, frames_indices=sampled)
    given = {"pixel_values": np.zeros((1, len(times), 3, 2, 2)), "video_metadata": [metadata]}
    processor.video_processor = against._VideosAsMade(given)
    record = {
        "conversations": [
            {"from": "human", "value": f"Look:{joins}<video>{joins}What is it?"},
            {"from": "gpt", "value": "A cat."},
        ],
        "video": "a.mp4",
    }
    messages = against.messages_of(record, "<image>")
    messages[0]["content"][1]["video"] = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    expected = transformers.SmolVLMProcessor.apply_chat_template(processor, messages, tokenize=True)[0]
    sequence = ours.encode(parse_conversation(record, "line 1"))
    whole = in_pieces(sequence, [ours.frames_text(seconds, times)])
    assert whole.tokens.tolist() == expected
    assert whole.pieces.tolist() == [len(times)]
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert whole.media_positions.tolist() == np.flatnonzero(np.array(expected) == image).tolist()
    # The prompt ends with "Assistant:", so the space is the model's to write.
    assert ours.decode(whole.tokens[whole.targets], special=True) == " A cat.<end_of_utterance>"
    prompt, answer = ours.encode_prompt(parse_conversation(record, "line 1"))
    assert answer == " A cat."
    assert ours.decode(prompt.tokens, special=True).endswith("What is it?<end_of_utterance>\nAssistant:")
    # Without a video it is the directory's own template that writes the text.
    turns = [{"from": "human", "value": "a"}, *record["conversations"][1:]]
    plain = ours.encode(parse_conversation({"conversations": turns}, "line 2"))
    assert ours.decode(plain.tokens, special=True).startswith("<s>User: a<end_of_utterance>")
    assert "<|im_start|>" in ours.decode(whole.tokens, special=True)


def test_a_tokenizer_that_joins_the_number_of_frames_with_other_words_is_refused(tmp_path):
    _, ours = written(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    with pytest.raises(UserError, match="so a video has no place of its own in a text"):
        ours.frames_text(9.0, [0.0, 1.0, 2.0, 3.0, 4.0])


def test_frames_that_a_recipe_asks_for(tmp_path):
    whole_models.write_job(tmp_path, "smolvlm", num_examples=1)
    stored = load_recipe(tmp_path / "recipe.toml", []).transform("image").sampling
    assert (stored.fps, stored.max_frames) == (20, 3)
    asked = load_recipe(tmp_path / "recipe.toml", ["model.video.fps=2"]).transform("image").sampling
    assert asked == SkippingSampling(fps=2.0, max_frames=3)
    for option, said in (
        (["model.video.num_frames=4"], "model.video.num_frames is not known to this model's processor"),
        (["model.video.fps=2", "model.video.min_frames=1"], "model.video.min_frames is not known"),
    ):
        with pytest.raises(UserError, match=said):
            load_recipe(tmp_path / "recipe.toml", option).transform("image")
    file = tmp_path / "model/video_preprocessor_config.json"
    file.write_text(json.dumps(KIND | TILE | {"size": {"longest_edge": 31}}))
    with pytest.raises(UserError, match=r"model.video.fps needs max_frames beside it"):
        load_recipe(tmp_path / "recipe.toml", ["model.video.fps=2"]).transform("image")
