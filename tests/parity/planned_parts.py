"""What the tiny model of `parity.planned` may have more: queries, callbacks, and a second encoder of images.

"queries":      the image's projector is a resampler, the others' are Q-Formers: a block more each.
"tiles":        a callback with weights makes tiles of each image before its encoder, and one doubles audio's rows.
"again":        the image's rows enter the backbone again before its third block, audio's before its second as well.
"gate":         what audio's projector makes is multiplied by a number that learns, a parameter without a dimension; a
                frozen one of whole numbers orders its columns anew.
"ahead":        rows of images see each other in both directions. "prefix": so do those before the first target.
"stacked":      the image's tower and mergers are a Qwen3-VL's, on videos; rows of its first two blocks go along with
                those of the last, and enter the backbone before its second and its third block.
"tiled":        images are of tiles with a class row each, of whose rows four become one.
"keys":         images are of one to four tiles, and become a row of NUM_KEYS rows each, to which the backbone's second
                layer and its last one attend.
"lines":        images are of tiles with a class row each, whose rows become one raster with newlines.
"merge":        a merge with weights, in which each row gets of all rows of its sequence, text and media.
"rows", "sum":  "second" reads each image too; its rows come behind the first encoder's, or are added to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

from motet.core.arrays import Int64Array
from motet.core.example import TokenSequence
from motet.dispatch import LoadedExample
from motet.dispatch.batch import PackedSequences
from motet.models.attention import ATTENTION
from motet.models.exact import keep_float64
from motet.models.families.dinov2 import Dinov2Encoder
from motet.models.merge import merge_rows
from motet.models.module import ModalityModule
from motet.models.projector import ProjectorConfig, build_projector
from parity.tiny import QFORMER, RESAMPLER, doubled
from parity.towers import EVEN_TILES, raster_callbacks

SECOND = "second"
_QUERIES = {
    "image": ProjectorConfig(kind="resampler", queries=3, config=RESAMPLER),
    "audio": ProjectorConfig(kind="qformer", queries=3, config=QFORMER),
    SECOND: ProjectorConfig(kind="qformer", queries=3, config=QFORMER),
}


class Tiles(nn.Module):
    """Each row of an image's patches becomes an image, changed by weights of its own."""

    def __init__(self, row_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(row_dim, row_dim)

    def items(self, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The sizes of the tiles, and how many each image becomes."""
        widths = np.repeat(sizes[:, 1], sizes[:, 0])
        return np.stack([np.ones_like(widths), widths], axis=1), sizes[:, 0]

    def forward(self, values: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return values + torch.tanh(self.linear(values)), torch.from_numpy(self.items(sizes.numpy())[0])


class Gate(nn.Module):
    """A number by which rows are multiplied, and an order of their columns."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(dim).flip(0)[None], requires_grad=False)
        self.factor = nn.Parameter(torch.tensor(0.8))

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return rows[:, self.order[0]] * self.factor


class WholeMerge(nn.Module):
    """A merge in which each row gets what is made of the mean of all rows of its sequence."""

    takes_text = True

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(dim, dim), nn.Dropout(dropout)

    def forward(self, embeds: Tensor, features: dict[str, Tensor], sequences: PackedSequences) -> Tensor:
        merged, lengths = merge_rows(embeds, features, sequences), sequences.offsets.diff().long().to(embeds.device)
        number = torch.arange(len(lengths), device=embeds.device).repeat_interleave(lengths)
        means = merged.new_zeros(len(lengths), merged.shape[1]).index_add(0, number, merged) / lengths[:, None]
        return merged + self.dropout(torch.tanh(self.linear(means))[number])


class WideTiles(Tiles):
    """Tiles of patches of 48 values, as a recipe names a callback: without arguments."""

    def __init__(self) -> None:
        super().__init__(48)


INNER = (0, 1)
"""Blocks of the tower of "stacked" whose rows go along."""


def again_with(parts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The blocks of the backbone before which rows enter again."""
    return {"image": (2,), "audio": (1, 2)} if "again" in parts else {}


def has_second(parts: Sequence[str]) -> bool:
    """Whether "second" reads images too."""
    return "rows" in parts or "sum" in parts


def num_blocks_with(parts: Sequence[str], num_blocks: dict[str, int]) -> dict[str, int]:
    """Blocks of each module with these parts. num_blocks: without any."""
    found = {}
    for name, count in num_blocks.items():
        found[name] = count + (name in _QUERIES and "queries" in parts)
        if name == "image" and has_second(parts):
            found[SECOND] = 2 + ("queries" in parts)
    return found


def second_tower(sizes: dict[str, object]) -> Dinov2Encoder:
    """The tower of "second", whose images have a class row."""
    config = {"hidden_size": sizes["hidden_size"], "num_attention_heads": 2, "mlp_ratio": 1, "num_hidden_layers": 2}
    return Dinov2Encoder(Dinov2Model(Dinov2Config(image_size=8, patch_size=2, attn_implementation=ATTENTION, **config)))


def with_parts(
    phase: str,
    tower: nn.Module,
    joined: ProjectorConfig | nn.Module,
    parts: Sequence[str],
    row_dim: int,
    dim: int,
    **frozen: bool,
) -> ModalityModule:
    """The encoder of a phase in float64. joined: its projector without queries."""
    if not isinstance(projector := joined, nn.Module):
        projector = build_projector(8, dim, _QUERIES[phase] if "queries" in parts else joined)
    projector = projector.to(torch.float64)
    keep_float64(projector)
    before = {"image": Tiles(row_dim).to(torch.float64), "audio": doubled}.get(phase) if "tiles" in parts else None
    before = EVEN_TILES if "tiled" in parts and phase == "image" else before
    after = Gate(dim).to(torch.float64) if "gate" in parts and phase == "audio" else None
    if "lines" in parts and phase == "image":
        before, after = raster_callbacks(most=2)
        after = after.to(torch.float64)
    return ModalityModule(tower.to(torch.float64), projector, before=before, after=after, **frozen)


def read_twice(example: LoadedExample, parts: Sequence[str]) -> LoadedExample:
    """The example with each image as an item of "second" too: behind it, or in its place."""
    old, tokens, targets, media, places, items = example.sequence, [], [], [], [], []
    begins, turns = [], []
    at = {place: number for number, place in enumerate(old.media_positions.tolist())}
    for place, (token, target) in enumerate(zip(old.tokens, old.targets)):
        begins.append(len(tokens))
        tokens.append(token)
        targets.append(target)
        if place not in at:
            continue
        readers = ("image", SECOND) if old.media[at[place]] == "image" else (old.media[at[place]],)
        for reader in readers:
            if reader == SECOND and "rows" in parts:
                tokens.append(token)
                targets.append(target)
            media.append(reader)
            places.append(len(tokens) - 1)
            items.append(example.media[at[place]])
            turns.append((0, 0) if old.turns is None else old.turns[at[place]])
    sequence = TokenSequence(np.array(tokens), np.array(targets), tuple(media), np.array(places, dtype=np.int64))
    if old.turns is not None:
        sequence = replace(sequence, turns=np.array([*begins, len(tokens)])[np.array(turns)])
    return LoadedExample(sequence, tuple(items))
