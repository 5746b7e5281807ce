"""What generators make of held-out prompts, so that one can look at it; on all ranks.

An example's sequence runs through the backbone as in training. What it has at the queries of an item, or in the turn
before, is the item's condition; it moves to the rank of the item, which samples. So an item depends on what stands
before it in the sequence, on the size of the one that the answer holds, and on (run.seed, example): the same on any
number of ranks.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from motet.core.arrays import Float32Array, Float64Array, Int64Array
from motet.core.modalities import AUDIO
from motet.data.conversation import TEXT
from motet.data.dataset import Dataset
from motet.data.media import MediaRef
from motet.data.transforms import Transform
from motet.dispatch import RankBatch
from motet.dispatch.exchange import exchange_rows
from motet.dropout import heldout_keys
from motet.models.mllm import MLLM
from motet.runtime.step import forward_features
from motet.train.report.step_lines import to_json
from motet.train.world import World

LIST = "made.json"
_FOLDER = "made"


@dataclass(frozen=True)
class MadeItem:
    """What a generator made of the prompt of a held-out example.

    place:     of the example in the held-out dataset. number: of the item, among those of the generator there.
    prompt:    the text before the item. media: the files before it, in order. expected: the file that the answer holds.
    values:    [num_rows, row_dim], of at least float32. size: int64 [size_dim].
    target:    as values, of the file that the answer holds.

    Example:
        >>> row, size = np.zeros((1, 4), np.float32), np.array([1, 1])
        >>> item = MadeItem(12, "draw", 0, "Draw a seven.", [], "7.png", row, size, row)
        >>> item.values.shape == (item.size.prod(), 4)
        True
    """

    place: int
    generator: str
    number: int
    prompt: str
    media: list[str]
    expected: str
    values: Float32Array | Float64Array
    size: Int64Array
    target: Float32Array | Float64Array


def makers(model: MLLM) -> list[str]:
    """The generators that can sample."""
    return [name for name, module in model.generators.items() if hasattr(module.generator, "sample")]


def examples_to_make(dataset: Dataset, generators: Sequence[str], count: int, most: int) -> list[int]:
    """The first examples, at most `most` among the first `count`, with an item that one of the generators makes."""
    found: list[int] = []
    for example in range(count if generators else 0):
        if len(found) == most:
            break
        if any(_made_refs(dataset, example, name) for name in generators):
            found.append(example)
    return found


@torch.no_grad()
def make_items(
    model: MLLM,
    batch: RankBatch,
    examples: Int64Array,
    dataset: Dataset,
    seed: int,
    group: dist.ProcessGroup,
    world: World,
) -> list[MadeItem]:
    """What generators make in a batch, on all ranks alike, in the order of examples. A collective.

    world: the ranks that run different examples; group: the same ones.
    batch: on the model's device. examples: the number in the dataset of each of its examples, int64 [num_examples].
    """
    batch = batch.with_draws(heldout_keys(seed, examples))
    assert batch.draws is not None
    _, _, conditions = model.backbone(batch.sequences, forward_features(model, batch, group))
    made = []
    for name in makers(model):
        if not batch.has(name):
            continue
        rows = exchange_rows(conditions[name], batch.routes[name].transpose, group)
        _, sizes = batch.media[name]
        keys, counts, module = batch.draws[name], batch.item_rows[name], model.generators[name]
        num_axes = max(world.gather(sizes.shape[1]))
        if is_spare := not len(sizes):
            # Parts of a sharded generator are gathered in each of its passes, in which all ranks take part.
            sizes = torch.full((1, num_axes), module.divisor, dtype=torch.int64)
            keys = np.zeros(1, dtype=np.int64)
            rows, counts = rows.new_zeros(module.num_queries or 1, rows.shape[1]), np.ones(1, dtype=np.int64)
        values = module.sample(sizes, rows, keys, counts=counts)
        if not is_spare:
            made += named_items(dataset, batch, examples, name, world.rank, values)
    return of_all_ranks(made, world)


def named_items(
    dataset: Dataset, batch: RankBatch, examples: Int64Array, generator: str, replica: int, values: Tensor
) -> list[MadeItem]:
    """What a replica of a generator made of a batch, item by item. values: of all its items, [num_rows, row_dim].

    examples: as of `make_items`.
    """
    targets, sizes = batch.media[generator][0], batch.media[generator][1].numpy()
    ends = np.cumsum(sizes.prod(axis=1))[:-1]
    of_items = np.split(values.cpu().numpy(), ends)
    held = np.split(targets.to(torch.promote_types(targets.dtype, torch.float32)).cpu().numpy(), ends)
    owner, items = batch.lengths.items[generator].example, batch.decision.items_on(generator, replica)
    numbers = items - np.searchsorted(owner, owner[items])
    return [
        _made_item(dataset, int(examples[owner[item]]), generator, int(number), of_item, size, target)
        for item, number, of_item, size, target in zip(items, numbers, of_items, sizes, held, strict=True)
    ]


def of_all_ranks(made: Sequence[MadeItem], world: World) -> list[MadeItem]:
    """The items that all ranks made, in the order of examples. A collective."""
    everywhere = [item for of_rank in world.gather(made) for item in of_rank]
    return sorted(everywhere, key=lambda item: (item.place, item.generator, item.number))


def write_items(run_dir: Path, step: int, items: Sequence[MadeItem], transforms: Mapping[str, Transform]) -> None:
    """Write a file of each item, and `made.json`, which names them.

    An image or a spectrogram where the transform can show one, else the values as a numpy file. Those of earlier steps
    stay. Beside what was made of a clip stands the spectrogram of the one that the answer holds. Of no items nothing is
    written. transforms: by generator. Raises OSError.
    """
    if not items:
        (run_dir / LIST).unlink(missing_ok=True)  # Of an earlier run here.
        return
    folder = Path(_FOLDER) / f"step-{step:08d}"
    (run_dir / folder).mkdir(parents=True, exist_ok=True)
    lines = []
    for item in items:
        transform, name = transforms[item.generator], f"{item.generator}-{item.place:06d}-{item.number}"
        written = {"file": item.values} | ({"expected_shown": item.target} if transform.modality == AUDIO else {})
        kept = {key: value for key, value in vars(item).items() if key not in ("values", "size", "target")}
        for key, values in written.items():
            content, suffix = _content(transform, values, item.size)
            file = folder / f"{name}{'' if key == 'file' else '-expected'}{suffix}"
            (run_dir / file).write_bytes(content)
            kept[key] = str(file)
        lines.append({"step": step, **kept})
    (run_dir / LIST).write_text(to_json(lines, ensure_ascii=False, indent=1), encoding="utf-8")


def _content(transform: Any, values: Float32Array | Float64Array, size: Int64Array) -> tuple[bytes, str]:
    stream = io.BytesIO()
    if hasattr(transform, "picture"):
        transform.picture(values, size).save(stream, format="PNG")
        return stream.getvalue(), ".png"
    np.save(stream, values)
    return stream.getvalue(), ".npy"


def _made_refs(dataset: Dataset, example: int, generator: str) -> list[tuple[int, MediaRef]]:
    """The items of an example that a generator makes, each with its number among all items of the example."""
    refs = dataset.media_refs(example)
    return [(number, ref) for number, ref in enumerate(refs) if generator in dataset.readers_of(ref)]


def _made_item(
    dataset: Dataset,
    example: int,
    generator: str,
    number: int,
    values: Float32Array | Float64Array,
    size: Int64Array,
    target: Float32Array | Float64Array,
) -> MadeItem:
    place, ref = _made_refs(dataset, example, generator)[number]
    before = [each.name for each in dataset.media_refs(example)[:place]]
    prompt = _text_before(dataset, example, place)
    return MadeItem(example, generator, number, prompt, before, ref.name, values, size, target)


def _text_before(dataset: Dataset, example: int, place: int) -> str:
    """The turns before an item, a line each. place: of the item among all of the example."""
    lines = []
    for turn in dataset.conversation(example).turns:
        line = ""
        for kind, text in turn.pieces:
            if kind != TEXT and place == 0:
                return "\n".join(filter(None, [*lines, line]))
            place -= kind != TEXT
            line += text
        lines.append(line)
    return "\n".join(lines)
