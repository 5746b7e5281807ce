"""A video and its sound in one text: the tokens and the positions are transformers' own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniProcessor, Qwen2_5OmniThinkerConfig
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Thinker

from motet.core.alternating import alternating
from motet.core.example import TokenSequence
from motet.core.grid_positions import AS_TEXT, BEHIND_LARGEST, step_bits
from motet.dispatch.batch import pack

IMAGE, VIDEO, AUDIO = 20, 21, 22
BEGIN, END, BEGIN_SOUND, END_SOUND = 23, 24, 25, 26
CONFIG = Qwen2_5OmniThinkerConfig(
    image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO, vision_start_token_id=BEGIN,
    vision_end_token_id=END, audio_start_token_id=BEGIN_SOUND, audio_end_token_id=END_SOUND,
)  # fmt: skip
MODEL = SimpleNamespace(
    config=CONFIG,
    spatial_merge_size=2,
    get_chunked_index=lambda *args: Thinker.get_chunked_index(None, *args),
    get_llm_pos_ids_for_vision=lambda *args: Thinker.get_llm_pos_ids_for_vision(None, *args),
)


def drawn(rng, second_per_grid):
    """A sequence with videos and clips, as Motet's data has it, and what transformers makes of the same items."""
    tokens, media, places, grids = [int(rng.integers(9))], [], [], []
    expected, video_grids, frames_of_sound = list(tokens), [], []
    for kind in rng.choice(["video", "clip", "image", "text"], 6):
        start = len(tokens)
        rows, (frames, height, width) = int(rng.integers(1, 160)), rng.integers(1, 6, 3).tolist()
        if kind == "video":
            tokens += [BEGIN, BEGIN_SOUND, VIDEO, AUDIO, END_SOUND, END]
            media += ["image", "audio"]
            places += [start + 2, start + 3]
            (step,) = step_bits(np.float32([25 * second_per_grid])).tolist()
            grids += [[frames, height, width, step, BEHIND_LARGEST], [rows, 1, 1, 0, AS_TEXT]]
            expected += [BEGIN, *their_video(frames, height, width, rows, second_per_grid), END]
            video_grids.append([frames, 2 * height, 2 * width])
            frames_of_sound.append(4 * rows)
        elif kind == "clip":
            tokens += [BEGIN_SOUND, AUDIO, END_SOUND]
            media.append("audio")
            places.append(start + 1)
            grids.append([rows, 1, 1, 0, AS_TEXT])
            expected += [BEGIN_SOUND, *[AUDIO] * rows, END_SOUND]
            frames_of_sound.append(4 * rows)
        else:
            tokens += rng.integers(0, 9, 3).tolist()
            expected += tokens[start:]
    tokens.append(3)
    expected.append(3)
    sequence = TokenSequence(
        np.array(tokens),
        np.ones(len(tokens), bool),
        tuple(media),
        np.array(places, int),
        np.array(grids).reshape(-1, 5),
    )
    return sequence, expected, video_grids, frames_of_sound


def their_video(frames, height, width, rows, second_per_grid):
    """The tokens of a video as transformers' processor writes them, of which each is a letter here."""
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        get_chunked_index=lambda *args: Qwen2_5OmniProcessor.get_chunked_index(None, *args),
        video_token="v",
        audio_token="a",
        audio_bos_token="<",
        audio_eos_token=">",
    )
    video = {
        "video_grid_thw": torch.tensor([[frames, 2 * height, 2 * width]]),
        "video_second_per_grid": [second_per_grid],
    }
    written = Qwen2_5OmniProcessor.replace_video_with_audio_token(
        processor, video, 0, {"num_audio_tokens": [rows]}, 0, position_id_per_seconds=25, seconds_per_chunk=2.0
    )
    return [{"v": VIDEO, "a": AUDIO, "<": BEGIN_SOUND, ">": END_SOUND}[letter] for letter in written]


@pytest.mark.parametrize("second_per_grid", [0.25, 0.5, 1.0, 2.0])
def test_tokens_and_positions_are_those_of_transformers(second_per_grid):
    rng = np.random.default_rng(int(8 * second_per_grid))
    sequences, rows, num_videos = [], {"image": [], "audio": []}, 0
    expected_tokens, expected_positions = [], []
    for _ in range(12):
        sequence, tokens, grids, frames_of_sound = drawn(rng, second_per_grid)
        videos = [place for place, phase in enumerate(sequence.media) if phase == "image"]
        num_videos += len(videos)
        sequences.append(alternating(sequence, videos, 50) if videos else sequence)
        for phase, grid in zip(sequence.media, sequence.grids, strict=True):
            rows[phase].append(int(grid[:3].prod()))
        theirs = torch.arange(len(tokens)).expand(3, -1)
        if videos:
            found, _ = Thinker.get_rope_index(
                MODEL,
                torch.tensor([tokens]),
                video_grid_thw=torch.tensor(grids),
                use_audio_in_video=True,
                audio_seqlens=torch.tensor(frames_of_sound),
                second_per_grids=torch.full((len(grids),), second_per_grid),
            )
            theirs = found[:, 0]
        expected_tokens += tokens
        expected_positions.append(theirs)
    packed = pack(sequences, {phase: np.array(each) for phase, each in rows.items()})
    assert num_videos > 6
    assert packed.tokens.tolist() == expected_tokens
    assert packed.grid_positions.tolist() == torch.cat(expected_positions, dim=1).tolist()
    for phase, token in (("image", VIDEO), ("audio", AUDIO)):
        assert packed.feature_positions[phase].tolist() == (packed.tokens == token).nonzero()[:, 0].tolist()


def test_a_video_and_its_sound_stand_between_marks():
    grids = np.array([[1, 1, 1, 0, BEHIND_LARGEST], [1, 1, 1, 0, AS_TEXT]])
    tokens = np.array([7, 0, 0, 8, 8])
    bare = TokenSequence(tokens, np.zeros(5, bool), ("image", "audio"), np.array([1, 2]), grids)
    with pytest.raises(ValueError, match="not between two marks"):
        pack([alternating(bare, [0], 50)], {"image": np.array([1]), "audio": np.array([1])})
    with pytest.raises(ValueError, match="have grids, and no pieces yet"):
        alternating(alternating(bare, [0], 50), [0], 50)
