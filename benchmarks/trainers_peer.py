"""A rank of trainers.py's other side: transformers' Trainer on transformers' LLaVA, with accelerate's DDP over gloo.

It runs in the environment of --peers-python, where Motet is not. A step is from the end of the one before it, when the
parent asks for it, to its own end: with its batch, the optimizer and the zeroing of gradients.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import trainers_work
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from trainers_work import BETAS, CLIP_NORM, EPS, IMAGE_TOKEN, LEARNING_RATE, TILE_TOKENS, VOCABULARY, Work
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

IGNORED = -100
MAX_STEPS = 10_000


def build_llava() -> LlavaForConditionalGeneration:
    """With random weights. The norm behind the vision tower, which LLaVA does not use, is frozen: DDP may then count on
    a gradient for every parameter."""
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(**trainers_work.VISION),
        text_config=Qwen2Config(vocab_size=VOCABULARY, use_cache=False, **trainers_work.TEXT),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.post_layernorm.requires_grad_(False)
    return model


class Examples(Dataset):
    """All batches, over and over, as the Trainer's dataset; made before the first step."""

    def __init__(self, work: Work) -> None:
        self._examples = [
            self._example(work, batch, place)
            for batch, examples in enumerate(work.batches)
            for place in range(len(examples))
        ]

    def _example(self, work: Work, batch: int, place: int) -> dict[str, Tensor]:
        example = work.batches[batch][place]
        images = torch.full((TILE_TOKENS * example.num_images,), IMAGE_TOKEN)
        tokens = torch.cat([images, torch.from_numpy(work.text(batch, place))])
        labels = tokens.clone()
        labels[: len(tokens) - example.num_targets] = IGNORED
        return {"input_ids": tokens, "labels": labels, "pixel_values": torch.from_numpy(work.pixels(batch, place))}

    def __len__(self) -> int:
        return MAX_STEPS * len(self._examples)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return self._examples[number % len(self._examples)]


def padded(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A row an example, as long as the longest."""
    pad = torch.nn.utils.rnn.pad_sequence
    texts = [each["input_ids"] for each in examples]
    return {
        "input_ids": pad(texts, batch_first=True),
        "labels": pad([each["labels"] for each in examples], batch_first=True, padding_value=IGNORED),
        "attention_mask": pad([torch.ones_like(text) for text in texts], batch_first=True),
        **images(examples),
    }


def packed(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One row, in which positions tell where examples begin."""
    return {
        "input_ids": torch.cat([each["input_ids"] for each in examples])[None],
        "labels": torch.cat([each["labels"] for each in examples])[None],
        "position_ids": torch.cat([torch.arange(len(each["input_ids"])) for each in examples])[None],
        **images(examples),
    }


def images(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    values = torch.cat([each["pixel_values"] for each in examples])
    return {"pixel_values": values} if len(values) else {}


class Told(TrainerCallback):
    """Waits before each step until it is asked for, and answers with what it took."""

    def __init__(self, out) -> None:
        self.out, self.loss = out, 0.0

    def on_train_begin(self, args, state, control, **others) -> None:
        self._wait(control)

    def on_step_end(self, args, state, control, **others) -> None:
        print(json.dumps(trainers_work.taken_since(*self.begun) | {"loss": self.loss}), file=self.out, flush=True)
        self._wait(control)

    def _wait(self, control) -> None:
        if not sys.stdin.readline():
            # Without what comes after training, which nobody waits for.
            os._exit(0)
        dist.barrier()
        self.begun = time.perf_counter(), time.process_time()


class Asked(Trainer):
    """The Trainer, with its examples in their order, and the loss of its last step at hand."""

    def __init__(self, told: Told, **options) -> None:
        super().__init__(callbacks=[told], **options)
        self.told = told

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)

    def training_step(self, *given, **named) -> Tensor:
        loss = super().training_step(*given, **named)
        self.told.loss = float(loss)
        return loss


def work(rank: int, given: Path, meeting: Path) -> None:
    out, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    given_work = Work.read(given)
    num_ranks = given_work.num_ranks
    # What torchrun sets. The ranks meet in a file; an address is asked for, and not used.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, init_method=f"file://{meeting / 'rendezvous'}")
    model = build_llava()
    model.load_state_dict(load_file(given_work.weights))
    has_images_always = all(example.num_images for batch in given_work.batches for example in batch)
    options = TrainingArguments(
        output_dir=str(meeting),
        max_steps=MAX_STEPS,
        per_device_train_batch_size=len(given_work.batches[0]) // num_ranks,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=CLIP_NORM,
        optim="adamw_torch_fused",
        average_tokens_across_devices=True,
        # The faster way, where every rank has images in every step; where not, DDP would wait for ever.
        ddp_find_unused_parameters=not has_images_always,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    print(json.dumps({"side": "Trainer"}), file=out, flush=True)
    collate = {"padded": padded, "packed": packed}[given_work.collator]
    told = Told(out)
    Asked(told, model=model, args=options, train_dataset=Examples(given_work), data_collator=collate).train()


if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
