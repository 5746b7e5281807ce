"""Writes point clouds as PLY files, questions about them, a tokenizer of words, and the recipe beside them.

python examples/points/make_clouds.py DIR && motet train DIR/recipe.toml
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SHAPES = ("ball", "box", "stick", "ring")
WORDS = ["<unk>", "<eos>", "<points>", *SHAPES, "Which", "shape", "is", "it", "?", "and", "before", "Say", ":"]
FILES = ("points.py", "point_encoder.py", "recipe.toml")


def draw(shape: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Points of a shape, float32 [count, 3], turned and moved at random."""
    points = rng.normal(size=(count, 3))
    if shape == "ball":
        points /= np.linalg.norm(points, axis=1, keepdims=True)
    elif shape == "box":
        points /= np.abs(points).max(axis=1, keepdims=True)
    elif shape == "stick":
        points *= (1, 0.05, 0.05)
    else:
        points[:, :2] /= np.linalg.norm(points[:, :2], axis=1, keepdims=True)
        points[:, 2] *= 0.05
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    return (points @ turn + rng.normal(size=3)).astype("<f4")


def write_ply(file: Path, points: np.ndarray) -> None:
    """A binary PLY file. points: float32 [n, 3]."""
    head = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}"]
    head += [f"property float {axis}" for axis in "xyz"]
    file.write_bytes("\n".join([*head, "end_header", ""]).encode() + points.tobytes())


def write_split(folder: Path, split: str, count: int, rng: np.random.Generator) -> None:
    """Examples with one cloud, with two, and with none."""
    records = []
    for number in range(count):
        shapes = [SHAPES[index] for index in rng.integers(len(SHAPES), size=(1, 1, 2, 0)[number % 4])]
        names = [f"clouds/{split}-{number}-{place}.ply" for place in range(len(shapes))]
        for shape, name in zip(shapes, names):
            write_ply(folder / name, draw(shape, int(rng.integers(40, 600)), rng))
        word = SHAPES[rng.integers(len(SHAPES))]
        question = " and ".join(["<points>"] * len(shapes)) + " Which shape is it ?" if shapes else f"Say : {word}"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": shapes[-1] if shapes else word}]
        records.append({"conversations": turns} | ({"points": names} if names else {}))
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_tokenizer(folder: Path) -> None:
    """A tokenizer with a token for each word."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "additional_special_tokens": ["<points>"]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_all(folder: Path, num_train: int = 400, num_heldout: int = 64) -> Path:
    """Everything that the recipe reads; returns the recipe's path."""
    (folder / "clouds").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    write_split(folder, "train", num_train, rng)
    write_split(folder, "heldout", num_heldout, rng)
    write_tokenizer(folder / "tokenizer")
    for name in FILES:
        shutil.copy(Path(__file__).with_name(name), folder)
    return folder / "recipe.toml"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(write_all(Path(sys.argv[1])))
