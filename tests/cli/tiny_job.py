"""A training job of seconds: a few dozen examples of every kind as real files, a recipe of a few thousand weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

LETTERS = "abcdefgh"

RECIPE = """\
[run]
dir = "run"
steps = 8
batch_size = 6
seed = 3

[data]
train = ["train.jsonl"]
heldout = ["heldout.jsonl"]
tokenizer = "tokenizer"
num_workers = 0
max_bad_fraction = 0.2

[model.backbone]
family = "qwen2"
[model.backbone.config]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2

[model.encoders.image]
family = "qwen2_vl"
projector = { kind = "linear" }
[model.encoders.image.config]
depth = 1
embed_dim = 16
num_heads = 2
hidden_size = 32
patch_size = 4
temporal_patch_size = 1
in_channels = 1

[model.encoders.audio]
family = "whisper"
projector = { kind = "linear", downsample = 4 }
[model.encoders.audio.config]
d_model = 16
encoder_layers = 1
encoder_attention_heads = 2
encoder_ffn_dim = 16
num_mel_bins = 20
max_source_positions = 100
dropout = 0.1

[transforms.image]
patch_size = 4
merge_size = 2
channels = 1

[transforms.audio]
num_mels = 20

[optimizer]
lr = 3e-3
warmup_steps = 4

[evaluate]
batch_size = 8
max_new_tokens = 6
"""


def write_tiny_job(folder: Path, num_train: int = 40, num_heldout: int = 8) -> Path:
    """Write media, manifests, a tokenizer and a recipe; returns the recipe's path."""
    rng = random.Random(0)
    (folder / "media").mkdir(parents=True)
    for split, count in (("train", num_train), ("heldout", num_heldout)):
        records = [
            _record(folder, f"{split}-{i}", ("text", "image", "audio", "both")[i % 4], rng) for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_tokenizer(folder / "tokenizer")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    return recipe


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters, with the tokens that media stand for."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<unk>", "<eos>", "<image>", "<audio>", *"abcdefghijklmnopqrstuvwxyzASITNUER :\n"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=["<image>", "<audio>"],
    )
    fast.save_pretrained(folder)


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    steps = metrics(run_dir)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    return [step["loss"] for step in steps]


def _record(folder: Path, name: str, task: str, rng: random.Random) -> dict:
    letter = rng.randrange(len(LETTERS))
    record: dict = {"id": name, "task": task}
    question = f"say {LETTERS[letter]}" if task == "text" else ""
    if task in ("image", "both"):
        shade = Image.new("L", (8 * rng.randint(1, 3), 8 * rng.randint(1, 3)), 30 * letter)
        shade.save(folder / f"media/{name}.png")
        record["image"] = f"media/{name}.png"
        question += "<image>"
    if task in ("audio", "both"):
        times = np.arange(int(16_000 * rng.uniform(0.1, 0.6))) / 16_000
        soundfile.write(folder / f"media/{name}.wav", 0.5 * np.sin(2 * np.pi * 200 * (letter + 1) * times), 16_000)
        record["audio"] = f"media/{name}.wav"
        question += "<audio>"
    record["conversations"] = [{"from": "human", "value": question}, {"from": "gpt", "value": LETTERS[letter]}]
    return record
