"""Videos whose frames are listed: what transformers makes of the same frames, which it loads alike."""

import json

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from benchmark import benchmark
from motet.core.errors import UserError
from motet.data.area_videos import AreaVideos
from motet.data.conversation import media_names, parse_conversation
from motet.data.dataset import Dataset
from motet.data.headers import read_header
from motet.data.index_build import open_index
from motet.data.media import BadMedia
from motet.data.modality import Modality
from motet.data.parts import typed_parts
from motet.data.timed_videos import TimedVideos
from motet.data.transforms import load_media
from motet.data.videos import VideoHeader, frames_at
from motet.models.whole.video_processor import TimedAreas, VideoAreas
from unit.data.samples import a_record, write_manifest

av = pytest.importorskip("av")
with benchmark("whole_models") as whole_models, benchmark("their_videos") as their_videos:
    pass

NUM_FRAMES = 7
SMALL = {"patch_size": 4, "size": {"shortest_edge": 6 * 64, "longest_edge": 12 * 64}}
TRANSFORM = AreaVideos(patch_size=4, merge_size=2, temporal_patch_size=2, min_video_area=384, max_video_area=768)
MODALITIES = {
    "vision": Modality(TRANSFORM, lambda sizes: sizes.prod(axis=1) // 4, lambda sizes: sizes.prod(axis=1)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A video, and each of its frames as a file."""
    folder = tmp_path_factory.mktemp("frames")
    whole_models.write_video(folder, "a", 2, NUM_FRAMES)
    with av.open(video_in(folder)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            Image.fromarray(frame.to_ndarray(format="rgb24")).save(folder / f"{number}.png")
    return folder


def video_in(folder):
    (path,) = folder.glob("a.*")
    return path


def frames(num=NUM_FRAMES):
    return [f"{number}.png" for number in range(num)]


def opened(folder, tokenizer, *records, name="train.jsonl"):
    return Dataset.open([write_manifest(folder / name, list(records))], tokenizer, MODALITIES)


def item(dataset, example=0):
    (ref,) = dataset.media_refs(example)
    return ref


def rate_of(folder):
    with av.open(video_in(folder)) as container:
        return float(container.streams.video[0].average_rate)


@pytest.mark.parametrize(
    ("kind", "areas", "options"),
    [
        ("Qwen2VLVideoProcessor", VideoAreas(4, 2, 2, tokens_per_second=2.0), {}),
        ("Qwen2VLVideoProcessor", VideoAreas(4, 2, 2), {"do_sample_frames": True, "fps": 6.0}),
        ("Qwen3VLVideoProcessor", TimedAreas(4, 2, 2), {"fps": 6.0}),
    ],
)
def test_rows_and_times_are_those_of_transformers_of_the_same_frames(folder, tokenizer, tmp_path, kind, areas, options):
    images = {"image_processor_type": "Qwen2VLImageProcessorFast", **SMALL}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps(SMALL | options | {"video_processor_type": kind})
    )
    made = (TimedVideos if isinstance(areas, TimedAreas) else AreaVideos)(**areas.options(tmp_path))
    record = a_record("<video>What?", video=[frames()], fps=rate_of(folder))
    ref = item(opened(folder, tokenizer, record))
    values, grid, _ = their_videos.their_video(tmp_path, video_in(folder))
    media, raw = load_media(ref, made), np.array([ref.raw])
    assert [media.size.tolist()] == grid.tolist() == made.sizes(raw).tolist()
    np.testing.assert_array_equal(media.values, values.numpy())
    of_file = np.array(
        [
            read_header(
                item(opened(folder, tokenizer, a_record("<video>What?", video=video_in(folder).name), name="b.jsonl"))
            )
        ]
    )
    assert raw.tolist() == of_file.tolist(), "times follow from these numbers"


def test_every_spelling_is_the_same_video(folder, tokenizer):
    text = {"type": "text", "text": "What?"}
    answer = {"role": "assistant", "content": "A"}
    of_parts = [
        {"messages": [{"role": "user", "content": [{"type": "video", "video": frames()} | rate, text]}, answer]}
        for rate in ({"fps": 2}, {"sample_fps": "2.0"})
    ]
    named = [
        {"messages": [{"role": "user", "content": "<video>What?"}, answer], "fps": 2} | videos
        for videos in ({"video": frames()}, {"videos": [frames()]})
    ]
    dataset = opened(folder, tokenizer, *of_parts, *named)
    assert dataset.num_examples == 4
    for example in range(4):
        assert VideoHeader.of(item(dataset, example).raw) == VideoHeader(NUM_FRAMES, *size_of(folder), 2)
        assert dataset.tokens(example).tokens.tolist() == dataset.tokens(0).tokens.tolist()
    assert media_names({"video": frames()}, "here")["video"][0].fps == 24  # As transformers has it.
    two = media_names({"videos": [frames(2), "a.mp4", ["b.webp"]]}, "here")["video"]
    assert [getattr(name, "frames", name) for name in two] == [("0.png", "1.png"), "a.mp4", ("b.webp",)]


def test_a_rate_of_the_record_is_not_ignored_where_a_part_lists_the_frames():
    part = {"type": "video", "video": frames()}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A"}]
    with pytest.raises(UserError, match="a part that lists frames has an 'fps' of its own"):
        parse_conversation({"messages": turns, "fps": 2}, "here")
    image = {"messages": [{"role": "user", "content": "<image>"}, turns[1]], "image": "a.png", "fps": 2, "end": 3}
    assert parse_conversation(image, "here").placeholders == ("image",), "metadata, as there is no video"


def test_two_rates_of_one_video_are_refused():
    part = {"type": "video", "video": frames(), "fps": 2, "sample_fps": 1}
    with pytest.raises(UserError, match="here: part 1: has both 'fps' and 'sample_fps'; give one of them"):
        typed_parts([part], "here")


def size_of(folder):
    with Image.open(folder / "0.png") as image:
        return image.size


def test_frames_are_loaded_as_transformers_loads_images(folder, tokenizer, tmp_path):
    """Turned as their EXIF says, and without what is transparent."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 16, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels.transpose(1, 0, 2)[..., :3].copy()).save(tmp_path / "b.jpg", exif=exif)
    ref = item(opened(tmp_path, tokenizer, a_record("<video>What?", video=["a.png", "b.jpg"])))
    found = [np.asarray(frame) for frame in frames_at(ref, np.arange(2))]
    for frame, name in zip(found, ("a.png", "b.jpg"), strict=True):
        np.testing.assert_array_equal(frame, np.asarray(load_image(str(tmp_path / name))))


def test_grey_frames_of_sixteen_bits_keep_their_upper_eight(tokenizer, tmp_path):
    grey = np.arange(24 * 16, dtype=np.uint16).reshape(24, 16) * 170
    Image.fromarray(grey).save(tmp_path / "a.png")
    ref = item(opened(tmp_path, tokenizer, a_record("<video>What?", video=["a.png"])))
    (frame,) = frames_at(ref, np.arange(1))
    np.testing.assert_array_equal(np.asarray(frame), np.repeat((grey >> 8)[..., None], 3, axis=2))


def test_an_index_that_has_moved_with_its_files_finds_the_frames(folder, tokenizer, tmp_path, monkeypatch):
    first = tmp_path / "first"
    first.mkdir()
    for name in frames(2):
        (first / name).write_bytes((folder / name).read_bytes())
    record = a_record("<video>What?", video=frames(2))
    opened(first, tokenizer, record)
    first.rename(tmp_path / "second")
    monkeypatch.setattr("motet.data.index_entries.read_header", lambda ref: pytest.fail("the index is built again"))
    ref = item(opened(tmp_path / "second", tokenizer, record))
    assert len(list(frames_at(ref, np.arange(2)))) == 2


def test_an_animation_is_no_list_of_one_frame(tmp_path, tokenizer):
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:])
    pictures[0].save(tmp_path / "b.gif")
    manifest = write_manifest(
        tmp_path / "a.jsonl", [a_record("<video>?", videos=[f"{name}.gif"]) for name in ("a", "b")]
    )
    (bad,) = open_index(manifest, tokenizer).bad_examples()
    assert bad.example == 0 and "is an animation, and a list of images is the frames of one video" in bad.reason


def test_frames_that_cannot_be_used_are_named(folder, tokenizer, tmp_path):
    for name in frames(3):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    records = [a_record("<video>What?", video=list(names)) for names in (frames(3), ["gone.png", "0.png"])]
    dataset = opened(tmp_path, tokenizer, *records)
    assert dataset.num_examples == 1 and "its frame 1, " in dataset.left_out.first()
    ref = item(dataset)
    Image.new("RGB", (8, 8)).save(tmp_path / "2.png")
    with pytest.raises(BadMedia, match=r"video 1, listed by the record: has frames of several sizes: the first has"):
        load_media(ref, TRANSFORM)
    (tmp_path / "1.png").unlink()
    with pytest.raises(BadMedia, match=r"its frame 2, .*1\.png, cannot be used: no such file"):
        load_media(ref, TRANSFORM)
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    with pytest.raises(BadMedia, match=r"has 3 frames of 8 x 8 pixels, 24 a second, but promised 3 frames of"):
        load_media(ref, TRANSFORM)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"video": [[]]}, "'video' is an empty list, but must name the frames of a video"),
        ({"video": [["a.png", 3]]}, "'video': frame 2 is the number 3, but must be a file name"),
        ({"video": ["a.png"], "fps": "fast"}, "'fps' is the text 'fast', but must be the frames a second, from 0.01"),
        ({"video": [["data:image/png;base64,aaaa"]]}, "'video' lists frames as bytes; save them as files"),
        ({"video": [["https://x.org/a.png"]]}, "video 1 lists frames, and 'https://x.org/a.png' is a URL"),
        ({"video": "a.mp4", "fps": 2}, "has a field 'fps', but lists no frames of a video"),
        ({"video": "a.mp4", "start": 1.5}, "has a field 'start', but a video is read from its begin to its end"),
    ],
)
def test_lists_that_are_not_understood_are_refused_by_their_line(tmp_path, tokenizer, record, said):
    with pytest.raises(UserError) as caught:
        opened(tmp_path, tokenizer, a_record("<video>What?", **record))
    assert "line 1" in str(caught.value) and said in str(caught.value)
