"""Whole files that cases are made from: a training job of a few examples, written once a process and then copied."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from functools import cache, wraps
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from bad.files.damage import Change
from bad.run import Case, Verdict

RECIPE = """\
[run]
dir = "run"
steps = 4
batch_size = 2
seed = 3

[data]
train = ["train.jsonl"]
tokenizer = "tokenizer"
num_workers = 0
max_bad_fraction = 0

[model.backbone]
family = "qwen2"
[model.backbone.config]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2

[model.encoders.image]
family = "qwen2_vl"
projector = { kind = "linear" }
[model.encoders.image.config]
depth = 1
embed_dim = 8
num_heads = 2
hidden_size = 16
patch_size = 4
temporal_patch_size = 1
in_channels = 3

[model.encoders.audio]
family = "whisper"
projector = { kind = "linear", downsample = 4 }
[model.encoders.audio.config]
d_model = 8
encoder_layers = 1
encoder_attention_heads = 2
encoder_ffn_dim = 8
num_mel_bins = 20
max_source_positions = 100

[transforms.image]
patch_size = 4
merge_size = 2
channels = 3
max_pixels_side = 48

[transforms.audio]
num_mels = 20

[optimizer]
lr = 1e-3
"""
LETTERS = "abcdefgh"
_MAKING = threading.RLock()


def once(make: Callable[[], Path]) -> Callable[[], Path]:
    """Makes files at the first call, also where cases are prepared in several threads."""
    cached = cache(make)

    @wraps(make)
    def made() -> Path:
        with _MAKING:
            return cached()

    return made


def tone(num_samples: int = 3_200, rate: int = 16_000) -> np.ndarray:
    """A tone of 200 Hz, float64 [num_samples]."""
    return 0.5 * np.sin(2 * np.pi * 200 * np.arange(num_samples) / rate)


def picture(side: int = 24) -> Image.Image:
    """A picture with an edge in it and noise, so that it does not vanish in compression."""
    values = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    values[: side // 2] //= 4
    return Image.fromarray(values)


def record(number: int, **media: str) -> dict[str, object]:
    """A record of a manifest that asks for a letter. media: file names by "image" and "audio"."""
    letter = LETTERS[number % len(LETTERS)]
    question = f"say {letter}" + "".join(f"<{kind}>" for kind in media)
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": letter}]
    return {"id": str(number), **media, "conversations": turns}


def records() -> list[dict[str, object]]:
    """Those of the whole job: two texts, two images, two clips."""
    return [
        *(record(number) for number in range(2)),
        *(record(number, image=f"media/{number}.png") for number in range(2, 4)),
        *(record(number, audio=f"media/{number}.wav") for number in range(4, 6)),
    ]


def as_lines(found: Iterable[object]) -> str:
    """A JSONL file."""
    return "".join(json.dumps(entry) + "\n" for entry in found)


@once
def scratch() -> Path:
    """A folder for what is made once a process; it goes with the process."""
    path = Path(tempfile.mkdtemp(prefix="motet-bad-files-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@once
def whole_job() -> Path:
    """The folder of a job that trains: recipe.toml, train.jsonl, tokenizer/, media/."""
    from cli.tiny_job import write_tokenizer

    folder = scratch() / "job"
    (folder / "media").mkdir(parents=True)
    for number in range(2, 4):
        picture(8 * number).save(folder / f"media/{number}.png")
    for number in range(4, 6):
        soundfile.write(folder / f"media/{number}.wav", tone(800 * number), 16_000)
    (folder / "train.jsonl").write_text(as_lines(records()))
    (folder / "recipe.toml").write_text(RECIPE)
    write_tokenizer(folder / "tokenizer")
    return folder


def job_with(change: Change) -> Change:
    """A copy of the whole job in a case's folder, changed."""

    def prepare(folder: Path) -> None:
        shutil.copytree(whole_job(), folder, dirs_exist_ok=True, symlinks=True)
        change(folder)

    return prepare


def train(name: str, verdict: Verdict, change: Change, *sets: str, says: str = "", more: tuple[str, ...] = ()) -> Case:
    """A case of `motet train` on the whole job, changed. sets: overrides of its recipe; more: other arguments."""
    overrides = tuple(part for override in sets for part in ("--set", override))
    arguments = ("train", "{folder}/recipe.toml", *overrides, *more)
    return Case(f"train/{name}", arguments, verdict, job_with(change), says)
