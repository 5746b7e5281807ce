"""What is profiled: the recipe's modules, one layer of each kind deep, and batches of items of the lengths it can meet.

A module's time is that of its layers, so a model of 84 B parameters is measured on one device at the depth of one. The
batches separate what a row costs from what a pair of rows costs: items of a few lengths, each in several numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.spec import Module
from motet.core.workload import BACKBONE
from motet.cost.profile import Batch
from motet.models.backbone import Backbone
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig
from motet.models.families.registry import BACKBONES, ENCODERS, Family
from motet.models.layers import LayerModules
from motet.models.module import MLLM, ModalityModule
from motet.train.recipe.recipe import Recipe

_SHORTEST = 8
_NUM_CANDIDATES = 40
_NUM_LENGTHS = 6
_LENGTH_RATIO = 3
_SPREAD = 0.6
"""Of the logarithms of a batch's lengths, as in real data."""
_NUM_AROUND = (15, 7, 3)
"""Different lengths of a batch: as many as leave room for a few items of each."""
_NUM_COUNTS = 4
_ROW_RATIO = 256


@dataclass(frozen=True, eq=False)
class Subject:
    """A module to measure.

    spec:    of the module as it stands, truncated. layers: what computes each of its layers.
    lengths: int64 [n], ascending: those that its items can have.
    sharded: the same module again, under FSDP as the recipe has it, on this rank alone: with all of FSDP's hooks and
             copies, and no messages.
    prepare: a batch, with contents drawn at random, to a call of either module.
    head:    what computes the layer that sees targets alone, from hidden states [rows, dim] to the loss.
    """

    name: str
    module: nn.Module
    spec: Module
    layers: Sequence[LayerModules]
    lengths: Int64Array
    sharded: nn.Module
    prepare: Callable[[Batch, nn.Module], Callable[[], Tensor]]
    head: Callable[[Tensor], Tensor] | None = None


def one_layer_deep(config: ModelConfig) -> ModelConfig:
    """The same model with a single transformer layer in each module, all of it trained."""
    encoders = {
        name: part.model_copy(update={"train_encoder": True, "train_projector": True} | _truncated(part, ENCODERS))
        for name, part in config.encoders.items()
    }
    backbone = config.backbone.model_copy(update={"train": True} | _truncated(config.backbone, BACKBONES))
    return config.model_copy(update={"encoders": encoders, "backbone": backbone})


def _truncated(part: EncoderConfig | BackboneConfig, families: dict[str, Family]) -> dict[str, Any]:
    if part.family is None:
        return {}
    family = families[part.family]
    options = dict(part.config) | {family.depth: 1}
    if "layer_types" in inspect.signature(family.config).parameters:
        # A list of the layers that there were; without it the family's rule is applied to the one that there is.
        options["layer_types"] = None
    truncated: dict[str, Any] = {"config": options}
    if getattr(part, "feature_layer", None) is not None:
        truncated["feature_layer"] = -1  # Of the one layer that there is.
    return truncated


def subjects(recipe: Recipe, model: MLLM, sharded: MLLM, device: torch.device) -> list[Subject]:
    """Of a model that stands on `device` twice, encoders first. Raises UserError for an encoder that no item fits."""
    found = [_encoder(recipe, name, module, sharded.encoders[name], device) for name, module in model.encoders.items()]
    return [*found, _backbone(recipe, model.backbone, sharded.backbone, device)]


def grid_of(lengths: Int64Array, max_rows: int, *, padded: bool) -> tuple[list[Batch], list[Batch]]:
    """Batches to interpolate between, and batches that are held out: of other lengths, and of all of them mixed.

    A batch of the grid has equally many items of each of a few lengths about one, where one item of each fits.
    lengths: int64 [n], ascending, that items can have. max_rows: sum of lengths that no batch exceeds, unless a single
    item of the shortest length does.
    """
    usable = lengths[lengths <= max(max_rows, lengths[0])]
    usable = usable[usable >= min(_SHORTEST, usable[-1])]
    chosen = [int(usable[-1])]
    while len(chosen) < _NUM_LENGTHS and (shorter := usable[usable * _LENGTH_RATIO <= chosen[0]]).size:
        chosen.insert(0, int(shorter[-1]))
    if chosen[0] > usable[0]:
        # Nothing but the shortest items: rows cannot attend to fewer others.
        chosen.insert(0, int(usable[0]))
    grid: list[Batch] = []
    for length in chosen:
        pattern = _around(length, usable, max_rows // _NUM_COUNTS, padded=padded) if length > usable[0] else [length]
        rows = _rows(pattern, padded=padded)
        most = max(max_rows // rows, 1)
        least = max(max_rows // _ROW_RATIO // rows, 1)
        counts = sorted({round(count) for count in np.geomspace(least, most, _NUM_COUNTS)})
        grid += [tuple((count, each) for each in pattern) for count in counts]
    between = [int(usable[np.abs(np.log(usable / np.sqrt(low * high))).argmin()]) for low, high in pairwise(chosen)]
    held_out: list[Batch] = [((max(max_rows // (3 * length), 1), length),) for length in between or chosen]
    if between:
        # As many rows of each length, as they stand when all are padded to the longest.
        for mixed, rows in ((between, max_rows // 2), (chosen[:-1], max_rows // 8)):
            share = rows // len(mixed)
            held_out.append(tuple((max(share // (max(mixed) if padded else length), 1), length) for length in mixed))
    grid = list(dict.fromkeys(grid))
    return grid, [batch for batch in held_out if batch not in grid]


def _around(length: int, usable: Int64Array, most_rows: int, *, padded: bool) -> list[int]:
    """Lengths about a length, which is the longest where all are padded to it; that one alone where rows are too few.

    Items that are of one length share calls of kernels, and need no mask of padding, as those of real data do not.
    """
    for count in _NUM_AROUND:
        ratios = [math.exp(_SPREAD * NormalDist().inv_cdf((place + 0.5) / count)) for place in range(count)]
        wanted = [length * ratio for ratio in ratios if ratio <= 1 or not padded]
        found = sorted({int(usable[np.abs(usable - each).argmin()]) for each in wanted})
        if _rows(found, padded=padded) <= most_rows:
            return found
    return [length]


def _rows(lengths: list[int], *, padded: bool) -> int:
    return len(lengths) * max(lengths) if padded else sum(lengths)


def items(batch: Batch) -> Int64Array:
    """Lengths of a batch's items, int64 [num_items]."""
    return np.concatenate([np.full(count, length, dtype=np.int64) for count, length in batch])


def _encoder(recipe: Recipe, name: str, module: ModalityModule, sharded: nn.Module, device: torch.device) -> Subject:
    sizes = _sizes(recipe, name, module)
    row_dim = recipe.transform(name).row_dim

    def prepare(batch: Batch, called: nn.Module) -> Callable[[], Tensor]:
        chosen = np.stack([sizes[length] for length in items(batch).tolist()])
        values = torch.randn(int(chosen.prod(axis=1).sum()), row_dim, device=device)
        on_host = torch.from_numpy(chosen)
        return lambda: called(values, on_host)

    lengths = np.array(sorted(sizes), dtype=np.int64)
    return Subject(name, module, module.spec_module(name), module.layers(), lengths, sharded, prepare)


def _sizes(recipe: Recipe, name: str, module: ModalityModule) -> dict[int, Int64Array]:
    """Length of an item -> sizes of one: what the transform makes of squares, or clips, from tiny to the largest."""
    transform = recipe.transform(name)
    longest = getattr(transform, "max_pixels_side", 0) or int(transform.max_seconds * transform.sampling_rate)
    raw = np.unique(np.geomspace(1, longest, 4 * _NUM_CANDIDATES).astype(np.int64))
    pairs = np.stack([raw, raw if transform.modality == "image" else np.full_like(raw, transform.sampling_rate)], 1)
    found: dict[int, Int64Array] = {}
    for size in transform.sizes(pairs)[:, None]:
        try:
            fits = module.num_tokens(size)[0] > 0
        except UserError:
            continue
        if fits:
            found.setdefault(int(module.lengths(size)[0]), size[0])
    if not found:
        raise UserError(f"transforms.{name} makes no item that model.encoders.{name} can take.")
    return found


def _backbone(recipe: Recipe, backbone: Backbone, sharded: nn.Module, device: torch.device) -> Subject:
    config = backbone.causal_lm.config
    longest = recipe.data.max_sequence_length or config.max_position_embeddings
    shortest = min(_SHORTEST, longest)
    lengths = np.unique(np.geomspace(shortest, longest, _NUM_CANDIDATES).astype(np.int64))

    def prepare(batch: Batch, called: nn.Module) -> Callable[[], Tensor]:
        """A feature row begins each sequence, as behind an encoder; loss is taken on every other token."""
        each = items(batch)
        offsets = np.concatenate([[0], np.cumsum(each)])
        starts = torch.from_numpy(offsets[:-1]).to(device)
        targets = torch.ones(int(offsets[-1]), dtype=torch.bool, device=device)
        targets[starts] = False
        sequences = SimpleNamespace(
            tokens=torch.randint(config.vocab_size, (int(offsets[-1]),), device=device),
            targets=targets,
            offsets=torch.from_numpy(offsets.astype(np.int32)),
            feature_positions={"feature": starts},
        )
        dtype = next(backbone.parameters()).dtype
        rows = torch.randn(len(each), backbone.dim, dtype=dtype, device=device, requires_grad=True)
        return lambda: called(sequences, {"feature": rows})[0]

    def head(hidden: Tensor) -> Tensor:
        return backbone.loss(hidden, torch.zeros(len(hidden), dtype=torch.int64, device=device))

    return Subject(BACKBONE, backbone, backbone.spec_module(), backbone.layers(), lengths, sharded, prepare, head)
