"""`make demo-generate`: a model learns to draw digits that are asked for in words or in speech, and is judged.

It writes the examples, trains `recipes/demo_generate.toml` on two ranks, has scikit-learn read what the model makes of
100 held-out prompts, prints the figures, and writes a picture. Exit code 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from motet.demo import Judge, write_drawing_data
from motet.demo.judge import MAX_NEAR, MIN_READ, MIN_SPREAD, Verdict

NUM_RANKS, NUM_TRAIN, NUM_HELDOUT = 2, 16_000, 100
RECIPE = Path(__file__).parents[1] / "recipes" / "demo_generate.toml"
_CHANCE = 0.1
_ZOOM, _MARGIN = 6, 6
"""Of the picture: pixels of its own for each of a digit's, and between two digits."""


def train(data: Path, run_dir: Path, resume: str, settings: Sequence[str]) -> None:
    """Train in a process a rank; the output is shown. Ends with its exit code if it fails."""
    manifests = {"train": [str(data / "train.jsonl")], "heldout": [str(data / "heldout.jsonl")]}
    sets = [f"data.{key}={json.dumps(value)}" for key, value in manifests.items()]
    sets += [f"data.tokenizer={data / 'tokenizer'}", f"run.dir={run_dir}", *settings]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    options = [option for each in sets for option in ("--set", each)]
    command = [*torchrun, "-m", "motet", "train", str(RECIPE), "--resume", resume, *options]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def ink(file: Path) -> np.ndarray:
    """The picture of a digit as ink of 0 to 1, [64]."""
    with Image.open(file) as image:
        return 1 - np.asarray(image, dtype=np.float64).reshape(-1) / 255


def made_of_prompts(data: Path, run_dir: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """What the run made last: ink [n, 64], the digits asked for [n], and "text" or "speech" of each."""
    asked: list[dict[str, Any]] = [json.loads(line) for line in (data / "heldout.jsonl").read_text().splitlines()]
    made = json.loads((run_dir / "made.json").read_text())
    records = [asked[item["place"]] for item in made]
    pixels = np.stack([ink(run_dir / item["file"]) for item in made])
    return pixels, np.array([record["digit"] for record in records]), [record["task"] for record in records]


def report(verdict: Verdict, read: np.ndarray, digits: np.ndarray, kinds: Sequence[str]) -> None:
    """Print the figures, each with what it should be."""
    right = read == digits
    by_kind = {kind: right[[each == kind for each in kinds]] for kind in sorted(set(kinds))}
    said = ", ".join(f"{kind} {int(of_kind.sum())} of {len(of_kind)}" for kind, of_kind in by_kind.items())
    print(f"Read as the digit asked for: {verdict.read:.0%} of {len(digits)} held-out prompts ({said});")
    print(f"  goal {MIN_READ:.0%}, chance {_CHANCE:.0%}, real held-out digits {verdict.real_read:.1%}.")
    print(f"Two pictures of a digit differ {verdict.spread:.0%} as much as two real ones; goal {MIN_SPREAD:.0%}.")
    print(f"Nearer to a training digit than 99% of real held-out ones: {verdict.near:.0%}; goal below {MAX_NEAR:.0%}.")
    print(f"  Median distance to the nearest: {verdict.distance:.2f}, of real ones {verdict.real_distance:.2f}.")


def draw(pixels: np.ndarray, read: np.ndarray, digits: np.ndarray, real: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    """A row a digit: what was made, what is read as another digit in red; at the right, as many real ones as fit."""
    rows = [(pixels[digits == digit], read[digits == digit] == digit) for digit in range(10)]
    num_made, side = max(len(of_digit) for of_digit, _ in rows), 8 * _ZOOM + _MARGIN
    num_real = num_made // 2
    page = Image.new("RGB", ((num_made + num_real + 1) * side + _MARGIN, len(rows) * side + _MARGIN), "white")
    for row, (of_digit, right) in enumerate(rows):
        shown = [*zip(of_digit, right), *((each, True) for each in real[0][real[1] == row][:num_real])]
        columns = [*range(len(of_digit)), *range(num_made + 1, num_made + 1 + num_real)]
        for column, (of_one, is_right) in zip(columns, shown, strict=True):
            tile = Image.fromarray(np.rint(255 * (1 - of_one)).clip(0, 255).astype(np.uint8).reshape(8, 8))
            large = tile.resize((8 * _ZOOM, 8 * _ZOOM), Image.Resampling.NEAREST)
            corner = column * side + _MARGIN, row * side + _MARGIN
            frame = Image.new("RGB", (8 * _ZOOM + 4, 8 * _ZOOM + 4), "#dddddd" if is_right else "red")
            page.paste(frame, (corner[0] - 2, corner[1] - 2))
            page.paste(large, corner)
    return page


def main() -> None:
    """Write the examples, train, judge, and draw."""
    parser = argparse.ArgumentParser(description="Learn to draw digits that are asked for, and judge the drawings.")
    parser.add_argument("--data", type=Path, default=Path("demo-generate-data"), help="folder of the examples")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo-generate"), help="folder of the run")
    parser.add_argument("--num-train", type=int, default=NUM_TRAIN, help="training examples")
    parser.add_argument("--num-heldout", type=int, default=NUM_HELDOUT, help="held-out prompts that are judged")
    parser.add_argument("--resume", default="never", choices=("never", "auto"), help="as of motet train")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the recipe")
    options = parser.parse_args()
    data, run_dir = options.data.absolute(), options.run_dir.absolute()
    write_drawing_data(data, num_train=options.num_train, num_heldout=options.num_heldout)
    train(data, run_dir, options.resume, [f"evaluate.num_made={options.num_heldout}", *options.set])
    judge = Judge()
    pixels, digits, kinds = made_of_prompts(data, run_dir)
    verdict, read = judge.verdict(pixels, digits), judge.read(pixels)
    report(verdict, read, digits, kinds)
    picture = run_dir / "made.png"
    draw(pixels, read, digits, judge.real["heldout"]).save(picture, optimize=True)
    print(f"The pictures, with real digits at the right: {picture}")
    if verdict.misses:
        sys.exit(f"Missed: {'; '.join(verdict.misses)}.")


if __name__ == "__main__":
    main()
