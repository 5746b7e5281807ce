"""Loss and every gradient of whole models beside those of transformers, from the same files, in float64.

    python benchmarks/against_transformers.py [FAMILY ...]

transformers' side: its own class, processor and chat template; one example at a time, without padding or packing; the
loss on what its template marks as the assistant's. Motet's side: the recipe of six keys, all examples packed into one
sequence, and again one at a time. Norms of both keep float64: transformers' round to float32, which is 1e-7 by itself.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from torch.nn.functional import cross_entropy
from whole_models import FAMILIES, open_processor, write_job

from motet.data.transforms import load_media
from motet.dispatch.batch import pack, stacked_media
from motet.models.build import build_mllm
from motet.models.exact import keep_float64
from motet.models.materialise import materialise
from motet.models.mllm import MLLM
from motet.models.whole.export import names_of
from motet.train.checkpoint.restoring import load_weights
from motet.train.job import open_dataset
from motet.train.recipe.recipe import load_recipe
from motet.train.recipe.whole import WholeRecipe


class Step(NamedTuple):
    """The mean loss over all targets, their number, and gradients by transformers' names."""

    loss: float
    num_targets: int
    gradients: dict[str, torch.Tensor]

    def distance(self, other: Step) -> tuple[float, float]:
        """The relative difference of losses; and the largest one of gradients, each as a whole.

        A gradient that is nothing beside all others (the bias of keys, which softmax takes out) is measured by them.
        Raises ValueError if one has other targets, or gradients of other weights.
        """
        if self.num_targets != other.num_targets:
            raise ValueError(f"{self.num_targets} targets, and {other.num_targets}")
        if self.gradients.keys() != other.gradients.keys():
            raise ValueError(f"gradients of {sorted(self.gradients.keys() ^ other.gradients.keys())} on one side alone")
        least = 1e-6 * max(float(gradient.norm()) for gradient in other.gradients.values())
        worst = max(
            float((mine - other.gradients[name]).norm()) / max(float(other.gradients[name].norm()), least)
            for name, mine in self.gradients.items()
        )
        return abs(self.loss - other.loss) / other.loss, worst


def theirs(folder: Path, adapter: Path | None = None) -> Step:
    """transformers' step on a job of `whole_models.write_job`. adapter: a directory that peft puts on top, to learn."""
    processor = open_processor(folder / "model")
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(folder / "model", dtype=torch.float64).train()
    keep_float64(model)
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    total, num_targets = torch.zeros((), dtype=torch.float64), 0
    for line in (folder / "train.jsonl").read_text().splitlines():
        record = json.loads(line)
        # Not by the parts' paths: the reader of these shows what is under transparent pixels, the processor white.
        images = [Image.open(folder / name) for name in record.get("image", [])]
        inputs = inputs_of(processor, record, images)
        is_target = torch.as_tensor(inputs.pop("assistant_masks")).bool()[0]
        inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
        logits = model(**inputs).logits[0]
        labels = inputs["input_ids"][0, 1:][is_target[1:]]
        total = total + cross_entropy(logits[:-1][is_target[1:]], labels, reduction="sum")
        num_targets += len(labels)
    (total / num_targets).backward()
    gradients = {_plain(name): each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Step(total.item() / num_targets, num_targets, gradients)


def _plain(name: str) -> str:
    """The name of a weight without what peft adds to it."""
    return name.removeprefix("base_model.model.").replace("modules_to_save.", "").replace(".default", "")


def inputs_of(processor: Any, record: dict[str, Any], images: list[Image.Image]) -> dict[str, Any]:
    """What a processor makes of a record, with `assistant_masks`."""
    if processor.chat_template is None:  # PaliGemma: a question and an answer.
        question, answer = (turn["value"] for turn in record["conversations"])
        text = question.replace("<image>\n", "<image>")
        inputs = processor(images=images, text=text, suffix=answer, return_tensors="pt")
        return {**inputs, "assistant_masks": inputs["labels"] != -100}
    inputs = processor.apply_chat_template(
        messages_of(record),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"images": images} if images else {},
    )
    return dict(inputs)


def messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A record's turns as typed parts. A line break behind a placeholder parts it from the text."""
    messages = []
    for turn in record["conversations"]:
        *images, text = turn["value"].split("<image>\n")
        role = {"human": "user", "gpt": "assistant"}[turn["from"]]
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        messages.append({"role": role, "content": parts})
    return messages


def ours(folder: Path, *, packed: bool = True, overrides: Sequence[str] = (), checkpoint: Path | None = None) -> Step:
    """Motet's step on the same job. packed: all examples in one pack; else one at a time. overrides: of the recipe.

    checkpoint: whose weights it has; by default those of the directory.
    """
    recipe = load_recipe(folder / "recipe.toml", ["run.dtype=float64", *overrides])
    assert isinstance(recipe, WholeRecipe)
    vocabulary = recipe.vocabulary()
    model = build_mllm(recipe.modules, vocabulary.vocabulary_size, torch.float64, deferred=True)
    materialise(model, recipe.modules, 0, torch.device("cpu"))
    if checkpoint is not None:
        load_weights(checkpoint, model, None)
    dataset = open_dataset(recipe, recipe.data.train, vocabulary, model, lambda sentence: None)
    numbers = range(dataset.num_examples)
    batches = [numbers] if packed else [[number] for number in numbers]
    total, num_targets = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        loss, count = _loss_of(model, dataset, batch)
        total, num_targets = total + loss, num_targets + count
    (total / num_targets).backward()
    names = names_of(recipe.directory, model)
    gradients = {names[name]: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Step(total.item() / num_targets, num_targets, gradients)


def _loss_of(model: MLLM, dataset: Any, numbers: Sequence[int]) -> tuple[torch.Tensor, int]:
    sequences = [dataset.tokens(number) for number in numbers]
    items: dict[str, list[Any]] = {name: [] for name in model.encoders}
    for ref in (ref for number in numbers for ref in dataset.media_refs(number)):
        for phase in dataset.readers_of(ref):
            items[phase].append(load_media(ref, dataset.transforms[phase]))
    sizes = {phase: np.stack([item.size for item in each]) for phase, each in items.items() if each}
    rows = {phase: model.encoders[phase].num_tokens(each) for phase, each in sizes.items()}
    media = {phase: stacked_media(each) for phase, each in items.items() if each}
    media = {phase: (values.double(), sizes) for phase, (values, sizes) in media.items()}
    return model(pack(sequences, rows), media)


def main() -> None:
    """Print a row a family."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; by default all")
    chosen = parser.parse_args().families or list(FAMILIES)
    transformers.logging.set_verbosity_error()
    print("| `model_type` | targets | loss | gradients | packed against one at a time |")
    print("|---|---|---|---|---|")
    for family in chosen:
        with tempfile.TemporaryDirectory() as folder:
            write_job(Path(folder), family)
            reference, packed, alone = theirs(Path(folder)), ours(Path(folder)), ours(Path(folder), packed=False)
        (loss, gradients), parted = packed.distance(reference), max(packed.distance(alone))
        print(f"| `{family}` | {packed.num_targets} | {loss:.0e} | {gradients:.0e} | {parted:.0e} |")


if __name__ == "__main__":
    main()
