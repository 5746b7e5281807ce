"""A tiny multimodal model, examples for it, and the reference that every distributed step is held against.

The reference is an independent path: one process, unsharded, one example at a time, no packing of several sequences, no
exchange, no graph cut, and autograd through all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.example import Media, TokenSequence
from motet.core.item_segments import ItemSegments
from motet.core.workload import BACKBONE
from motet.dispatch import LoadedExample, PackedSequences
from motet.dropout import drawing, item_keys
from motet.models.attention import ATTENTION
from motet.models.backbone import Backbone
from motet.models.exact import keep_float64
from motet.models.families.registry import BACKBONES, CROSS_BACKBONES
from motet.models.merge import merge_rows
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.models.projector import ProjectorConfig, build_projector
from motet.on_device import on_device

DIM = 16
VOCABULARY = 40
ROW_DIMS = {"image": 6, "audio": 5}
PHASES = tuple(ROW_DIMS)


class Layer(nn.Module):
    """Mixes rows inside an item, so that an item in the wrong place, or cut, would be seen in the result."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.rows = nn.Linear(dim, dim)
        self.item = nn.Linear(dim, dim, bias=False)
        self.never_used = nn.Parameter(torch.ones(3))

    def forward(self, hidden: Tensor, counts: Tensor) -> Tensor:
        normed = self.norm(hidden)
        owner = on_device(torch.repeat_interleave(torch.arange(len(counts)), counts), hidden.device)
        counts = on_device(counts, hidden.device)
        means = hidden.new_zeros(len(counts), hidden.shape[1]).index_add(0, owner, normed)
        return hidden + torch.tanh(self.rows(normed)) + self.item(means / counts[:, None].to(hidden.dtype))[owner]


class ToyEncoder(nn.Module):
    """Fulfils the encoder contract without transformers; every item becomes as many rows as it has.

    window: rows are mixed inside windows of so many rows, which are then the item's segments.
    """

    def __init__(self, row_dim: int, cost: str, window: int | None = None) -> None:
        super().__init__()
        self.output_dim = 8
        self.cost = cost
        if window:
            self.segments = lambda sizes: ItemSegments.cut(np.prod(sizes, axis=1), window)
        self.embed = nn.Linear(row_dim, 8)
        self.blocks = nn.ModuleList([Layer(8), Layer(8)])

    def forward(self, values: Tensor, sizes: Tensor) -> Tensor:
        hidden, counts = self.embed(values), sizes.prod(1)
        if hasattr(self, "segments"):
            counts = torch.from_numpy(self.segments(sizes.numpy()).length)
        for block in self.blocks:
            hidden = block(hidden, counts)
        return hidden

    def num_outputs(self, sizes):
        return np.prod(sizes, axis=1)


class Halves(nn.Module):
    """A callback between encoder and projector: the first half of each item's rows, in another width."""

    output_dim = 6

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def num_rows(self, sizes):
        return -(-np.prod(sizes, axis=1) // 2)

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        items = rows.split(sizes.prod(1).tolist())
        return self.linear(torch.cat([item[: -(-len(item) // 2)] for item in items]))


class Residual(nn.Module):
    """A callback after the projector."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        return rows + torch.tanh(self.linear(rows))


class Scaled(nn.Module):
    """A merge with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, DIM))

    def forward(self, embeds: Tensor, features: dict[str, Tensor], sequences: PackedSequences) -> Tensor:
        assert features and all(len(rows) for rows in features.values()), "called with nothing"
        return merge_rows(embeds, {name: rows * self.scale for name, rows in features.items()}, sequences)


def doubled(values: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * values, sizes


RESAMPLER = {"resampler_depth": 2, "resampler_n_heads": 2, "resampler_head_dim": 8, "num_key_value_heads": 1}
QFORMER = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _encoders(frozen: Sequence[str], readers: str) -> dict[str, ModalityModule]:
    """readers: "" for one encoder of each item; else "second" reads images too, and it and "image" are combined so.

    With "rows" there are callbacks as well.
    """
    resampler = ProjectorConfig(kind="resampler", queries=3, config=RESAMPLER)
    qformer = ProjectorConfig(kind="qformer", queries=3, config=QFORMER)
    joined, plain = ProjectorConfig(downsample=2), ProjectorConfig()
    projectors = {
        "": {"image": joined, "audio": plain},
        "rows": {"image": joined, "audio": qformer, "second": resampler},
        "sum": {"image": resampler, "audio": plain, "second": qformer},
    }[readers]
    callbacks = {"image": {"before": doubled, "between": Halves(), "after": Residual()}} if readers == "rows" else {}
    return {
        phase: ModalityModule(
            ToyEncoder(ROW_DIMS.get(phase, 4), *(("padded", None) if phase == "audio" else ("packed", 5))),
            build_projector(6 if phase in callbacks else 8, DIM, projector),
            train_encoder=phase not in frozen and f"{phase} encoder" not in frozen,
            train_projector=phase not in frozen,
            **callbacks.get(phase, {}),
        )
        for phase, projector in projectors.items()
    }


MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "mlp_only_layers": [1]},
}
CROSSING = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
"""Of a backbone whose layers attend to images: tokens that it has."""
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


def build_model(
    dtype: torch.dtype = torch.float64,
    frozen: Sequence[str] = (),
    readers: str = "",
    family: str = "qwen2",
    stacked: int = 0,
    keys: int = 0,
) -> MLLM:
    """The same parameters in every call and on every rank. frozen: of "image encoder", "image", "audio", "backbone",
    and of "below" the backbone's last block: what stands before it, and all but the last block of the image's tower.

    readers: as of `_encoders`; with "sum" rows of images enter the backbone again, too, and see each other in both
             directions.
    family:  of the backbone; of mixtures of experts with the loss of their routers.
    stacked: rows of an image that stand beside its own ones, and enter the backbone before further blocks.
    keys:    rows of an image that are keys of the last block, of "mllama".
    """
    torch.manual_seed(3)
    of_family = (BACKBONES | CROSS_BACKBONES)[family]
    config = of_family.config(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        attn_implementation=ATTENTION,
        **(MIXTURES[family] | BALANCED if family in MIXTURES else {}),
        **({"head_dim": 8, "sliding_window": 5} if family == "gemma2" else {}),
        **(CROSSING | {"cross_attention_layers": [1]} if keys else {}),
    )
    encoders = _encoders(frozen, readers)
    merge = Scaled() if readers == "rows" else None
    causal_lm = of_family.model(config).to(dtype)
    again = {"image": (1,)} if readers == "sum" else {}
    both_ways = ("image",) if readers == "sum" else ()
    entering = {"again": again, "stacked": {"image": stacked} if stacked else {}}
    entering |= {"keys": {"image": keys}} if keys else {}
    backbone = Backbone(causal_lm, train="backbone" not in frozen, merge=merge, bidirectional=both_ways, **entering)
    open_gates(backbone)
    model = MLLM(encoders, backbone).to(dtype)
    keep_float64(model.encoders)
    if "below" in frozen:
        backbone.text.table.requires_grad_(False)
        image = model.encoders["image"]
        image.encoder.requires_grad_(False)
        image.blocks[image.num_encoder_blocks - 1].requires_grad_(image.train_encoder)
        for block in backbone.blocks[:-1]:
            block.requires_grad_(False)
    return model


def open_gates(backbone: Backbone) -> None:
    """Give gates of layers that attend to images a value: zero hides what they let through."""
    for name, parameter in backbone.named_parameters():
        if name.endswith("_gate"):
            nn.init.normal_(parameter)


def draw_examples(
    num_examples: int, seed: int = 0, phases: Sequence[str] = PHASES, readers: str = ""
) -> list[LoadedExample]:
    """Examples of very different lengths: text only, one item, several of both, in any place."""
    rng = np.random.default_rng(seed)
    drawn = [
        draw_example(rng, tuple(rng.choice(phases, rng.integers(0, 4))) if phases else ()) for _ in range(num_examples)
    ]
    return [_read_twice(example, rng, readers) for example in drawn] if readers else drawn


def _read_twice(example: LoadedExample, rng: np.random.Generator, readers: str) -> LoadedExample:
    """The same with each image read by "second" as well, from rows of its own."""
    tokens, targets, media, places, items = [], [], [], [], []
    at = dict(zip(example.sequence.media_positions.tolist(), zip(example.sequence.media, example.media)))
    for place, (token, target) in enumerate(zip(example.sequence.tokens, example.sequence.targets)):
        phase, item = at.get(place, (None, None))
        if phase is not None:
            media.append(phase)
            places.append(len(tokens))
            items.append(item)
        tokens.append(token)
        targets.append(target)
        if phase == "image":
            if readers == "rows":
                tokens.append(token)
                targets.append(target)
            media.append("second")
            places.append(len(tokens) - 1)
            items.append(Media(rng.standard_normal((item.size.prod(), 4)).astype(np.float32), item.size))
    sequence = TokenSequence(np.array(tokens), np.array(targets), tuple(media), np.array(places, dtype=np.int64))
    return LoadedExample(sequence, tuple(items))


_RASTERS = ("image", "draw", "paint", "recall", "etch", "retell")
_HALVED = ("carve", "weave")
"""Rasters of patches of 2 x 2."""


def draw_example(
    rng: np.random.Generator,
    media: tuple[str, ...],
    row_dims: dict[str, int] | None = None,
    has_large: bool = False,
    has_long: bool = False,
) -> LoadedExample:
    """has_large: a third of the images have nine times as many rows, and of the clips twice as many frames.

    has_long: a sixth of the examples have eight times as much text."""
    row_dims = row_dims or ROW_DIMS
    num_tokens = len(media) + int(rng.integers(3, 12)) * (8 if has_long and rng.random() < 1 / 6 else 1)
    answer = int(rng.integers(1, 3))
    places = np.sort(rng.choice(num_tokens - answer, len(media), replace=False))
    targets = np.arange(num_tokens) >= num_tokens - answer
    tokens = rng.integers(0, VOCABULARY, num_tokens)
    items = []
    for phase in media:
        size = rng.integers(1, 5, 2) if phase in _RASTERS else rng.integers(1, 20, 1)
        size = 2 * rng.integers(1, 3, 2) if phase in _HALVED else size
        if has_large and phase == "image" and rng.random() < 1 / 3:
            size *= 3
        values = rng.standard_normal((size.prod(), row_dims[phase])).astype(np.float32)
        if has_large and phase == "audio" and size > 13:
            size, values = 2 * size, np.concatenate([values, values[::-1] / 2])
        items.append(Media(values, size))
    sequence = TokenSequence(tokens, targets, tuple(map(str, media)), places)
    return LoadedExample(with_turns(sequence, ("recall", "retell", "weave", "recast"), rng), tuple(items))


def with_turns(sequence: TokenSequence, names: Sequence[str], rng: np.random.Generator) -> TokenSequence:
    """Items of these names read a stretch of the sequence, of any length, in which there is text at least."""
    reads = np.isin(sequence.media, names)
    if not reads.any():
        return sequence
    text = np.setdiff1d(np.arange(len(sequence.tokens)), sequence.media_positions)
    inside = rng.choice(text, len(reads))
    turns = np.stack([rng.integers(0, inside + 1), rng.integers(inside + 1, len(sequence.tokens) + 1)], axis=1)
    return replace(sequence, turns=np.where(reads[:, None], turns, 0))


def reference_step(
    model: MLLM,
    examples: Sequence[LoadedExample],
    dtype: torch.dtype = torch.float64,
    keys: Int64Array | None = None,
) -> float:
    """Loss and, in `.grad`, gradients of the whole batch; in modules that ran, unused parameters get zero gradients.

    keys: of the examples, by which dropout and noise are drawn, int64 [num_examples]; None: there is none.
    """
    num_made = {
        name: sum(int(m.size.prod()) for e in examples for p, m in zip(e.sequence.media, e.media) if p == name)
        for name in model.generators
    }
    num_targets = sum(int(example.sequence.targets.sum()) for example in examples)
    total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32))
    ran = [model.backbone] if examples else []
    for index, example in enumerate(examples):
        key = None if keys is None else keys[index : index + 1]
        features: dict[str, list[Tensor]] = {phase: [] for phase in model.encoders}
        positions: dict[str, list[int]] = {phase: [] for phase in model.encoders}
        tokens, targets, item, starts = [], [], 0, []
        num_seen: dict[int, int] = {}
        turns: dict[str, list[tuple[int, int]]] = {name: [] for name in model.generators}
        made: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in model.generators}
        positions |= {name: [] for name in model.generators}
        media_positions = example.sequence.media_positions.tolist()
        for place, (token, target) in enumerate(zip(example.sequence.tokens, example.sequence.targets)):
            starts.append(len(tokens))
            if place not in media_positions:
                tokens.append(token)
                targets.append(target)
                continue
            for _ in range(media_positions.count(place)):
                phase, media = example.sequence.media[item], example.media[item]
                values = torch.from_numpy(np.array(media.values)).to(dtype)
                if phase in made:
                    made[phase].append((values, torch.from_numpy(np.array(media.size))[None]))
                    rows = torch.empty(model.generators[phase].num_queries)
                    positions[phase] += range(len(tokens), len(tokens) + len(rows))
                    if model.generators[phase].max_turn:
                        turns[phase].append(example.sequence.turns[item])
                    item += 1
                    continue
                with drawing(phase, _of_item(key, phase, len(features[phase]))):
                    rows = model.encoders[phase](values, torch.from_numpy(np.array(media.size))[None])
                if phase in model.backbone.keys:
                    num_seen[len(tokens)] = int(model.encoders[phase].grids(np.array(media.size)[None])[0, 0])
                features[phase].append(rows)
                positions[phase] += range(len(tokens), len(tokens) + len(rows))
                ran.append(model.encoders[phase])
                item += 1
            tokens += [token if phase in model.backbone.keys else 0] * len(rows)
            targets += [False] * len(rows)
        starts.append(len(tokens))
        for phase, of_items in turns.items():
            positions[phase] += [row for start, stop in of_items for row in range(starts[start], starts[stop])]
        sequence = PackedSequences(
            tokens=torch.tensor(tokens),
            targets=torch.tensor(targets),
            offsets=torch.tensor([0, len(tokens)], dtype=torch.int32),
            feature_positions={phase: torch.tensor(places) for phase, places in positions.items() if places},
            key_rows=torch.tensor([num_seen.get(place, 0) for place in range(len(tokens))]),
        )
        with drawing(BACKBONE, None if key is None else {BACKBONE: key}):
            taken = {phase: torch.cat(rows) for phase, rows in features.items() if rows}
            loss_sum, _, *given = model.backbone(sequence, taken)
        total = total + loss_sum / num_targets
        for name, items in made.items():
            module, conditions = model.generators[name], given[0][name]
            for number, (values, size) in enumerate(items):
                lengths = [starts[stop] - starts[start] for start, stop in turns[name]] or [module.num_queries] * len(
                    items
                )
                own, counts = conditions.split(lengths)[number], np.array(lengths[number : number + 1])
                draws = item_keys(key, np.zeros(number + 1, np.int64), np.array([number]))
                total = total + module(values, size, own, draws, counts) * module.weight / num_made[name]
                ran.append(module)
    if total.requires_grad:
        total.backward()
    for module in ran:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return total.item()


def _of_item(key: Int64Array | None, phase: str, number: int) -> dict[str, Int64Array] | None:
    """The draws of an item of an example. number: of the item among those of its phase."""
    of_example = np.zeros(number + 1, dtype=np.int64)
    return None if key is None else {phase: item_keys(key, of_example, np.array([number]))}
