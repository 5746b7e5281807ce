"""Whole models from directories, through transformers' Trainer and through Motet: losses, and real tokens a second.

    python benchmarks/trainers_whole.py [--only FAMILY ...] [--steps 24] [--batch 8] [--json FILE]

Both sides read the same directory (tiny Qwen2.5-VL and LLaVA-OneVision, float32) and the same files, in one order, on
one process, with AdamW, without decay, clipping and schedule. Motet has a recipe of six keys and those. The Trainer
gets what its processor and chat template make of each example, labels where the template marks the assistant's tokens,
padded to the longest example of a batch. It trains twice: it makes its inputs as it goes, as a collator does, and has
made all of them before, which no real run can. Tokens that are padding do not count. The first steps warm up: the
figure is of the rest.

Losses of each step must agree to 1e-4, or the exit code is 1. Models are so small that overheads count, not products.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from against_transformers import inputs_of
from PIL import Image
from rows import Row, finish, options, show
from torch.nn.functional import pad
from torch.utils.data import SequentialSampler
from whole_models import open_processor, write_job

from motet.data.order import GlobalOrder

WHOLE = ("qwen2_5_vl", "llava_onevision")
LEARNING_RATE, WARM_STEPS, LOSS_LIMIT = 1e-3, 8, 1e-4
PADDED = {"input_ids": 0, "attention_mask": 0, "labels": -100, "mm_token_type_ids": 0}
"""What the Trainer pads to the longest example of a batch, and with what."""


class Timed(transformers.Trainer):
    """A Trainer that takes examples in their order, and keeps the loss of each step and when it began."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[float] = []
        self.began_s: list[float] = []
        self.num_tokens: list[int] = []

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """The mean loss over all labels of the step."""
        self.num_tokens.append(int(inputs["attention_mask"].sum()))
        loss = super().compute_loss(model, inputs, *args, **options)
        self.losses.append(loss.item())
        return loss

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """The batches of a step, which begins here."""
        self.began_s.append(time.perf_counter())
        return super().get_batch_samples(*args, **options)


class Examples(torch.utils.data.Dataset):
    """Examples of a job in an order, each as the processor makes it. ahead: they are all made at once, before."""

    def __init__(self, folder: Path, order: list[int], ahead: bool) -> None:
        self.folder, self.order, self.processor = folder, order, open_processor(folder / "model")
        self.records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        self.made = [self._made(record) for record in self.records] if ahead else None

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        number = self.order[place]
        return self._made(self.records[number]) if self.made is None else dict(self.made[number])

    def _made(self, record: dict[str, Any]) -> dict[str, torch.Tensor]:
        images = [Image.open(self.folder / name) for name in record.get("image", [])]
        inputs = inputs_of(self.processor, record, images, self.folder)
        is_target = torch.as_tensor(inputs.pop("assistant_masks")).bool()
        return {**inputs, "labels": inputs["input_ids"].masked_fill(~is_target, -100)}


def collated(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Examples as a batch: tokens padded on the right, images one after the other."""
    longest = max(each["input_ids"].shape[1] for each in examples)
    batch = {}
    for name in {name for each in examples for name in each}:
        parts = [each[name] for each in examples if name in each]
        if name in PADDED:
            parts = [pad(part, (0, longest - part.shape[1]), value=PADDED[name]) for part in parts]
        elif parts[0].dim() == 5:  # Tiles of images: those of others are longer.
            most = max(part.shape[1] for part in parts)
            parts = [pad(part, (0, 0) * 3 + (0, most - part.shape[1])) for part in parts]
        batch[name] = torch.cat(parts)
    return batch


def by_trainer(folder: Path, order: list[int], batch: int, ahead: bool) -> Timed:
    """Train a job by transformers' Trainer."""
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(folder / "model", dtype=torch.float32)
    model.config.use_cache = False
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        adam_beta2=0.95,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Timed(model, arguments, train_dataset=Examples(folder, order, ahead), data_collator=collated)
    trainer.train()
    trainer.began_s.append(time.perf_counter())
    return trainer


def by_motet(folder: Path, steps: int, batch: int, seed: int) -> list[dict[str, Any]]:
    """Train a job by `motet train`; the lines of its metrics.jsonl."""
    keys = {
        "run.dir": "motet",
        "run.steps": steps,
        "run.batch_size": batch,
        "run.report_to": [],
        "optimizer.lr": LEARNING_RATE,
        "optimizer.schedule": "constant",
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": "inf",
    }
    given = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "motet", "train", str(folder / "recipe.toml"), "--resume", "never", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in (folder / "motet" / "metrics.jsonl").read_text().splitlines()]


def rows_of(family: str, folder: Path, steps: int, batch: int, seed: int) -> list[Row]:
    """What both sides made of a family."""
    write_job(folder, family, num_examples=3 * batch)
    lines = by_motet(folder, steps, batch, seed)
    order = GlobalOrder(3 * batch, seed=seed).take(0, steps * batch).tolist()
    tokens = [line["num_tokens"] for line in lines]
    rates, worst, same_tokens = {"Motet": _rate([line["step_s"] for line in lines], tokens)}, 0.0, True
    for name, ahead in (("the Trainer", False), ("the Trainer, inputs made before", True)):
        trainer = by_trainer(folder, order, batch, ahead)
        took_s = [after - before for before, after in zip(trainer.began_s[:-1], trainer.began_s[1:])]
        rates[name] = _rate(took_s[:steps], trainer.num_tokens)
        pairs = zip([line["loss"] for line in lines], trainer.losses, strict=True)
        worst = max(worst, *(abs(mine / other - 1) for mine, other in pairs))
        same_tokens &= trainer.num_tokens == tokens
    rows = [Row(f"{family}: largest relative difference of a step's loss, {steps} steps", worst, LOSS_LIMIT)]
    rows.append(Row(f"{family}: steps whose real tokens differ from Motet's", 0.0 if same_tokens else 1.0, 0.0))
    rows += [Row(f"{family}: real tokens a second by {name}", rate) for name, rate in rates.items()]
    return rows


def _rate(seconds: list[float], tokens: list[int]) -> float:
    return sum(tokens[WARM_STEPS:]) / sum(seconds[WARM_STEPS:])


def main() -> None:
    """Measure, print and store."""
    parser = options(__doc__, reads_lengths=False)
    parser.add_argument("--only", nargs="+", choices=WHOLE, default=WHOLE)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in given.only:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(family, Path(folder) / family, given.steps, given.batch, given.seed)
        for row in rows[-5:]:
            show(row)
    finish(rows, given.json, seed=given.seed)


if __name__ == "__main__":
    main()
