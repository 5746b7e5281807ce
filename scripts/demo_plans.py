"""`make demo-plans`: the demonstration's model on 4 ranks under Plans of every kind that trains, 20 steps each.

The losses are the same under all of them, in float64. The picture has the step of median length of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from motet.core.plan import Plan, Unit
from motet.core.plan_file import write_plan
from motet.core.timeline import Span, Timeline
from motet.cost.catalogue import cluster
from motet.planning.planned_recipe import read_job_recipe
from motet.planning.trainable import obstacle
from motet.simulate.show.picture import write_png
from motet.train.recipe.reading import read_recipe
from motet.train.recipe.recipe_file import load_recipe
from motet.train.recipe.toml_text import dump_toml

NUM_RANKS, NUM_STEPS, BATCH_SIZE, MICROBATCH_SIZE = 4, 20, 32, 4
DEMO, FOLDER = Path("recipes/demo.toml"), Path("runs/demo-plans").absolute()
RECIPE, PICTURE, DATA = FOLDER / "recipe.toml", FOLDER / "plans.png", FOLDER / "data"
SET = (
    f'data.train=["{DATA}/train.jsonl"]',
    f'data.tokenizer="{DATA}/tokenizer"',
    f"run.steps={NUM_STEPS}",
    f"run.batch_size={BATCH_SIZE}",
    "run.dtype=float64",
    "data.heldout=[]",
    "model.encoders.image.config.depth=2",  # as many blocks as there are ranks to hold them
)
TOLERANCE = 1e-9
_NUM_COLUMNS, _WIDTH = 2, 2400
"""Of the picture; its width is in pixels."""

_ENCODERS = (Unit("image", ({"image": 2},)), Unit("audio", ({"audio": 2},), first_rank=1))
_CHAIN = (Unit("all", ({"image": 2, "audio": 1}, {"audio": 1, "backbone": 1}, {"backbone": 1}, {"backbone": 1}), pp=4),)
_CHUNKS = ({"image": 1}, {"image": 1, "audio": 1}, {"audio": 1, "backbone": 1}, {"backbone": 2})


@dataclass(frozen=True)
class Way:
    """Units and the schedule of a Plan, and how many examples a microbatch of a replica has."""

    units: tuple[Unit, ...]
    schedule: str = "1f1b"
    microbatch_size: int = MICROBATCH_SIZE


WAYS = {
    "data parallel": Way(
        (Unit("all", ({"image": 2, "audio": 2, "backbone": 3},), dp=4, zero=3),), "data_parallel", 2 * MICROBATCH_SIZE
    ),
    "modality parallel": Way((*_ENCODERS, Unit("backbone", ({"backbone": 2}, {"backbone": 1}), first_rank=2, pp=2))),
    "disaggregated": Way((*_ENCODERS, Unit("backbone", ({"backbone": 3},), first_rank=2, dp=2, zero=0))),
    "chain, GPipe": Way(_CHAIN, "gpipe"),
    "chain, 1F1B": Way(_CHAIN),
    "chain, interleaved": Way((Unit("all", _CHUNKS, dp=2, pp=2, zero=0),), "interleaved_1f1b", MICROBATCH_SIZE // 2),
    "chain, ZB-H1": Way(_CHAIN, "zb_h1"),
    "chain, ZB-V": Way((Unit("all", _CHUNKS, dp=2, pp=2, zero=0),), "zb_v", MICROBATCH_SIZE // 2),
    "encoders in bubbles": Way(
        (
            Unit("backbone", ({"backbone": 2}, {"backbone": 1}), dp=2, pp=2, zero=0),
            *(Unit(name, ({name: 2},), dp=4, zero=0) for name in ("image", "audio")),
        )
    ),
}


def trainable_plans() -> Iterator[tuple[str, Plan]]:
    """The Plans that training can run; says which it cannot."""
    recipe, model = load_recipe(RECIPE), read_job_recipe(RECIPE).model
    for name, way in WAYS.items():
        plan = Plan(
            model,
            cluster("cpu", 1, NUM_RANKS),
            way.units,
            BATCH_SIZE,
            way.microbatch_size,
            way.schedule,
            precision="fp64",
        )
        if what := obstacle(plan, recipe):
            print(f"{name}: training cannot run {what} yet.")
        else:
            yield name, plan


def write_inputs() -> None:
    """Write the recipe, without what Plans decide, and the examples, unless they are there already."""
    tables = read_recipe(DEMO, SET).tables
    RECIPE.write_text(dump_toml({name: tables[name] for name in tables if name not in ("fsdp", "balance")}))
    if not DATA.exists():
        num_examples = str(NUM_STEPS * BATCH_SIZE)
        subprocess.run([sys.executable, "-m", "motet", "demo-data", str(DATA), "--num-train", num_examples], check=True)


def train(name: str, plan: Plan) -> Path:
    """Train under a Plan; returns the folder of the run."""
    run_dir = FOLDER / "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    file = run_dir.with_suffix(".json")
    write_plan(plan, file)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command = [*torchrun, "-m", "motet", "train", str(RECIPE), "--set", f"run.dir={run_dir}", "--plan", str(file)]
    with run_dir.with_suffix(".log").open("w") as log:
        ran = subprocess.run([*command, "--trace", "--resume", "never"], stdout=log, stderr=log, check=False)
    if ran.returncode:
        sys.exit(f"{name}: training ended with {ran.returncode}; see {run_dir.with_suffix('.log')}.")
    return run_dir


def median_step(run_dir: Path) -> Timeline:
    """The step of median length, without the first, in which libraries warm up."""
    spans = [Span(**span) for span in json.loads((run_dir / "timeline.json").read_text())]
    steps = [Timeline.of(span for span in spans if span.step == step) for step in range(1, NUM_STEPS)]
    return sorted(steps, key=lambda step: step.makespan_s)[len(steps) // 2]


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """The pictures in columns, of the size of a page and in few colours: they are to be looked at, not measured."""
    height = max(picture.height for picture in pictures)
    width, num_rows = pictures[0].width, -(-len(pictures) // _NUM_COLUMNS)
    whole = Image.new("RGB", (_NUM_COLUMNS * width, num_rows * height), "white")
    for number, picture in enumerate(pictures):
        row, column = divmod(number, _NUM_COLUMNS)
        whole.paste(picture, (column * width, row * height))
    small = whole.resize((_WIDTH, whole.height * _WIDTH // whole.width), Image.Resampling.LANCZOS)
    return small.quantize(200)


def main() -> None:
    """Train all ways, print their losses, and draw their steps one below the other."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_inputs()
    losses, pictures = {}, []
    for name, plan in trainable_plans():
        run_dir = train(name, plan)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        losses[name] = np.array([json.loads(line)["loss"] for line in lines])
        timeline = median_step(run_dir)
        png = run_dir.with_suffix(".png")
        write_png(timeline, png, title=name)
        pictures.append(Image.open(png))
        first, last = losses[name][0], losses[name][-1]
        print(f"{name:20} loss {first:.10f} -> {last:.10f}, a step of {timeline.makespan_s * 1e3:.0f} ms", flush=True)
    expected = next(iter(losses.values()))
    off = max(float(np.abs(each / expected - 1).max()) for each in losses.values())
    print(f"All losses of all {len(losses)} ways are the same to {off:.1e}.")
    side_by_side(pictures).save(PICTURE, optimize=True)
    print(f"The steps: {PICTURE}")
    if off > TOLERANCE:
        sys.exit(f"The losses differ by more than {TOLERANCE}.")


if __name__ == "__main__":
    main()
