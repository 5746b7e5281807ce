"""Videos: counts from headers, and the frames, pixels and times of transformers' own processor of Qwen2-VL."""

import shutil
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from transformers.video_utils import default_sample_indices_fn

from benchmark import benchmark
from motet.core.errors import UserError
from motet.core.frame_sampling import FrameSampling, UniformSampling
from motet.data.anyres_videos import AnyResVideos
from motet.data.area_videos import AreaVideos
from motet.data.decode import Decoder
from motet.data.headers import read_header
from motet.data.media import BadMedia, MediaRef
from motet.data.omni_videos import OmniVideos
from motet.data.timed_videos import TimedVideos
from motet.data.transforms import load_media
from motet.data.videos import VideoHeader, frames_at
from motet.models.whole.video_processor import TiledVideos, TimedAreas, VideoAreas

av = pytest.importorskip("av")
with benchmark("whole_models") as whole_models, benchmark("their_videos") as their_videos:
    pass

NUM_FRAMES = 11
SMALL = {"patch_size": 4, "size": {"shortest_edge": 6 * 64, "longest_edge": 12 * 64}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three containers: one that counts its frames, one that does not, and one of whole pictures."""
    folder = tmp_path_factory.mktemp("videos")
    for number in range(3):
        whole_models.write_video(folder, str(number), number, NUM_FRAMES)
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def files(folder):
    return sorted(folder.glob("[0-9].*"))


def ref_of(path, **known):
    return MediaRef("video", str(path), **known)


def test_headers_say_how_many_frames_there_are_and_nothing_is_decoded(files, monkeypatch):
    monkeypatch.setattr("motet.data.videos.frames_at", lambda *args: pytest.fail("frames are decoded"))
    for path, (suffix, _, _, rate) in zip(files, whole_models.VIDEOS, strict=True):
        assert path.suffix == suffix
        header = VideoHeader.of(read_header(ref_of(path)))
        with av.open(path) as container:
            width, height = container.streams.video[0].width, container.streams.video[0].height
        assert header == VideoHeader(NUM_FRAMES, width, height, rate)
    # What has been counted once is not counted again.
    monkeypatch.setattr("motet.data.videos._num_packets", lambda *args: pytest.fail("packets are counted again"))
    assert len(list(frames_at(ref_of(files[1], raw=header_of(files[1])), np.arange(3)))) == 3


def header_of(path):
    with av.open(path) as container:
        stream = container.streams.video[0]
        return VideoHeader(NUM_FRAMES, stream.width, stream.height, stream.average_rate).raw


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample_frames": True, "fps": 6.0},
        {"do_sample_frames": True, "num_frames": 7, "do_normalize": False},
        {"image_mean": 0.3, "image_std": 1},
        {"do_sample_frames": True, "fps": 2.0, "cap_pixels_per_frame": True, "max_video_tokens": 16},
    ],
)
def test_rows_and_times_are_those_of_transformers(folder, files, options, tmp_path):
    import json

    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast", **SMALL})
    )
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(SMALL | options))
    transform = AreaVideos(**VideoAreas(4, 2, 2, tokens_per_second=2.0).options(tmp_path))
    for path in files:
        ref = ref_of(path, raw=read_header(ref_of(path)))
        values, grid, metadata = their_videos.their_video(tmp_path, path)
        media = load_media(ref, transform)
        assert [media.size.tolist()] == grid.tolist() == transform.sizes(np.array([ref.raw])).tolist()
        np.testing.assert_array_equal(media.values, values.numpy())
        step = transform.time_steps(np.array([ref.raw])).astype(np.int32).view(np.float32)
        assert step == np.float32(2.0) * np.float32(2 / metadata.sampled_fps)


@pytest.mark.parametrize(
    "options",
    [
        {"fps": 6.0, "size": {"shortest_edge": 20 * 64, "longest_edge": 36 * 64}},
        {"fps": 50.0, "max_frames": 5, "size": {"shortest_edge": 99 * 64, "longest_edge": 999 * 64}},
        {"do_sample_frames": False, "cap_pixels_per_frame": True, "max_video_tokens": 5},
        {"num_frames": 3, "fps": None, "cap_pixels_per_frame": True},
    ],
)
def test_rows_and_texts_of_qwen3_are_those_of_transformers(files, options, tmp_path):
    import json

    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast", **SMALL})
    )
    kind = {"video_processor_type": "Qwen3VLVideoProcessor"}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(SMALL | options | kind))
    transform = TimedVideos(**TimedAreas(4, 2, 2).options(tmp_path))
    for path in files:
        ref = ref_of(path, raw=read_header(ref_of(path)))
        values, grid, metadata = their_videos.their_video(tmp_path, path)
        media = load_media(ref, transform)
        assert [media.size.tolist()] == grid.tolist() == transform.sizes(np.array([ref.raw])).tolist()
        np.testing.assert_array_equal(media.values, values.numpy())
        (key,) = transform.text_keys(np.array([ref.raw])).tolist()
        numbers = [*metadata.frames_indices, *metadata.frames_indices[-1:]]
        middles = [sum(pair) / metadata.fps / 2 for pair in zip(numbers[::2], numbers[1::2])]
        assert transform.times(tuple(key)) == pytest.approx(middles)


def test_the_frames_that_are_taken_are_those_of_transformers(folder):
    metadata = their_videos.VideoMetadata
    rng = np.random.default_rng(0)
    for _ in range(300):
        frames, rate = int(rng.integers(2, 9000)), float(rng.choice([8.0, 23.976, 24000 / 1001, 25.0, 60.0]))
        options = {"min_frames": int(rng.integers(2, 9)), "max_frames": int(rng.integers(9, 800))}
        options["fps"] = float(rng.choice([0.5, 1.0, 2.0, 3.7]))
        theirs = their_videos.kind()(do_sample_frames=True, **options)
        expected = theirs.sample_frames(metadata(total_num_frames=frames, fps=rate)).numpy()
        found = FrameSampling(**options).numbers(frames, rate, 2)
        np.testing.assert_array_equal(found, expected[: len(found)])
        # At a rounding error transformers lists one frame more, that there is not.
        assert expected[len(found) :].tolist() in ([], [frames])


@pytest.mark.parametrize("asked", [{"fps": 2.0}, {"fps": 0.01}, {"num_frames": 7}, {}])
def test_frames_at_equal_distances_are_those_of_transformers(asked):
    rng = np.random.default_rng(1)
    for _ in range(50):
        frames, rate = int(rng.integers(7, 900)), float(rng.choice([8.0, 24000 / 1001, 60.0]))
        expected = default_sample_indices_fn(their_videos.VideoMetadata(total_num_frames=frames, fps=rate), **asked)
        np.testing.assert_array_equal(UniformSampling(**asked).numbers(frames, rate, 1), expected)


def test_videos_of_onevision_are_tiles_of_their_frames(files, tmp_path):
    import json

    images = {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 12, "width": 12}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images | {"image_grid_pinpoints": [[12, 24]]}))
    tiles = TiledVideos(4, 12, ((12, 24),), squares=True)
    made = AnyResVideos(**tiles.options(tmp_path))
    raw = np.array([read_header(ref_of(path)) for path in files])
    assert made.sizes(raw)[:, 0].tolist() == [NUM_FRAMES] * len(files)  # Nothing is said of sampling.
    few = replace(made, sampling=UniformSampling(num_frames=NUM_FRAMES + 1))
    assert not few.accepts(raw).any()
    assert few.refusal(tuple(raw[0])) == f"has {NUM_FRAMES} frames, and the model's processor takes {NUM_FRAMES + 1}"
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 12}}))
    with pytest.raises(UserError, match="makes images of None x None pixels, and the vision tower takes 12 x 12"):
        tiles.options(tmp_path)


def test_frames_of_omni_stand_as_if_they_were_asked_for():
    options = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 25.0}
    raw = np.array([VideoHeader(NUM_FRAMES, 64, 48, Fraction(10)).raw, (64, 48)])
    for sampling, step in (
        (FrameSampling(num_frames=4), 25.0),
        (FrameSampling(), 25.0),
        (FrameSampling(fps=5.0), 10.0),
    ):
        steps = OmniVideos(**options, sampling=sampling).time_steps(raw).astype(np.int32).view(np.float32)
        assert steps.tolist() == [step, 1.0]
    with pytest.raises(UserError, match=r"model.video.fps is 1.2, for which positions of frames are not known"):
        OmniVideos(**options, sampling=FrameSampling(fps=1.2))


def test_an_image_has_one_frame_and_the_rows_that_it_has_without_videos(tmp_path):
    from PIL import Image

    from motet.data.area_images import AreaImages

    Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3)).save(tmp_path / "a.png")
    ref = MediaRef("image", str(tmp_path / "a.png"), raw=(30, 40))
    sides = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    media, alone = load_media(ref, AreaVideos(**sides)), load_media(ref, AreaImages(**sides))
    assert media.size.tolist() == [1, *alone.size.tolist()]
    np.testing.assert_array_equal(media.values, alone.values)


def test_what_cannot_be_used_is_named(folder, files, tmp_path):
    transform = AreaVideos(patch_size=4, merge_size=2, temporal_patch_size=2, min_video_area=384, max_video_area=768)
    headers = [ref_of(path, raw=read_header(ref_of(path))) for path in files]
    cut = []
    for ref, share in zip(headers, (0.5, 0.5, 0.6)):
        path = tmp_path / ref.path.rpartition("/")[2]
        whole = (folder / path.name).read_bytes()
        path.write_bytes(whole[: int(len(whole) * share)])
        cut.append(ref_of(path, raw=ref.raw))
    with Decoder({"video": transform}) as decoder:
        loaded = decoder.load(cut)
    assert all(isinstance(each, BadMedia) for each in loaded)
    assert "its header is damaged" in loaded[0].reason
    assert [each.path for each in loaded] == [ref.path for ref in cut]
    for each in loaded[1:]:
        assert "cut off or damaged: it holds" in each.reason or "is damaged: frame" in each.reason
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\n" + str(files[0]) + "\n#EXT-X-ENDLIST\n")
    with pytest.raises(BadMedia, match="is no video in a container that Motet reads"):
        read_header(ref_of(tmp_path / "list.mp4"))
    other = shutil.copy(files[1], tmp_path / "other.mp4")
    with pytest.raises(BadMedia, match="but its header at indexing promised 11 frames of"):
        load_media(ref_of(other, raw=headers[0].raw), transform)
    with av.open(tmp_path / "turned.mp4", "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        stream.set_display_rotation(90)
        for _ in range(4):
            container.mux(stream.encode(av.VideoFrame(16, 16, "yuv420p")))
        container.mux(stream.encode(None))
    with pytest.raises(BadMedia, match=r"is to be turned by -?90 degrees by its header"):
        load_media(ref_of(tmp_path / "turned.mp4"), transform)


def test_videos_of_which_no_grid_can_be_made_are_refused():
    transform = AreaVideos(patch_size=4, merge_size=2, temporal_patch_size=2, sampling=FrameSampling(fps=2.0))
    raw = np.array([VideoHeader(*header).raw for header in ((1, 64, 64, 8), (2, 64, 64, 8), (9, 201, 1, 8))])
    assert transform.accepts(raw).tolist() == [False, True, False]
    assert transform.refusal(tuple(raw[0].tolist())) == "has 1 frame, of which the model's processor cannot take 2"
    assert transform.refusal(tuple(raw[2].tolist())).startswith("has frames of 201 x 1 pixels, which is longer")
    transform.sizes(raw)  # Lengths are asked of all, before those that are refused are left out.


def test_without_pyav_a_sentence_says_what_to_install(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"pip install 'motet\[video\]'"):
        read_header(ref_of(files[0]))
