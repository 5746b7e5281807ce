"""Encoders, backbones and projectors by parts beside transformers' own classes, from the same files, in float64.

transformers' side: its class, one item or document at a time, without padding or packing. Motet's side: all of them in
one pack, and again one at a time. Both read one directory with weights as trained ones have them, that transformers
wrote. What transformers rounds to float32 in any dtype (norms, angles of positions, resized tables, routers, softmax)
is kept wide on both sides, and once more left as it is.

The loss of an encoder is the mean squared distance of its rows from drawn ones; that of a backbone is its own, on
documents with rows of an encoder, whose gradients are compared, too. The loss of a projector is that of an encoder; its
class in transformers has neither the matrix around its layers nor, in BLIP-2, the queries, so both sides multiply by
the same one, and compare its gradient and that of what is read.

Families that are in no transformers (InternLM2, EVA-CLIP) stand beside the plain computations of their tests, from
directories as published.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from loss_and_gradients import Step
from rows import ROOT
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from transformers import Blip2QFormerConfig, Blip2QFormerModel
from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler

from motet.models.block import plain_names
from motet.models.build import BackboneConfig, EncoderConfig, build_backbone, build_modality
from motet.models.config_file import quiet_transformers
from motet.models.cross_projector import CrossProjector
from motet.models.exact import keep_float64
from motet.models.families.registry import BACKBONES, ENCODERS

sys.path.insert(0, str(ROOT / "tests"))

from unit.models import test_eva_clip, test_internlm2
from unit.models.conftest import DIM, VOCAB, Packed, Tiny
from unit.models.test_cross_projector import OPTIONS as PROJECTORS
from unit.models.wide import InFloat64

PLAIN = ("internlm2", "eva_clip")
"""Families that are in no transformers."""
_EVA_KIND = "EVA02-CLIP-E+"
PARTS = [*ENCODERS, *BACKBONES, *PROJECTORS]
_ROWS, _READ_DIM, _QUERIES = [7, 1, 12, 7, 3], 20, 5
"""Of the items that a projector reads: rows of each, and their width; rows that it makes of each."""
_THEIR_NAMES = {
    "resampler": {"layers.blocks.": "layers.", "layers.norm.": "norm.", "layers.latents.weight": "latents"},
    "qformer": {"layers.blocks.": "encoder.layer.", "layers.norm.": "layernorm."},
}
"""Beginnings of names of a projector's weights -> of transformers'. Others, which its class has not, are the same."""
_WHOLE_CLIPS = ("whisper", "qwen2_audio")
"""Their classes take clips of one length alone, whose padding would change rows: both sides are given such clips."""
_LENGTHS, _PLACES = [9, 1, 14, 6], [1, 2, 12, 20, 26]
"""Of documents, and of the rows of an encoder in their pack."""


class Distances(NamedTuple):
    """Of loss and gradients: from transformers'; of a pack from items one at a time; from transformers' roundings."""

    num_targets: int
    exact: tuple[float, float]
    parted: tuple[float, float]
    rounded: tuple[float, float]


def distances(folder: Path, family: str) -> Distances:
    """Motet's distances of a part of `PARTS`. folder: where its weights are written."""
    write_part(folder, family)
    theirs, ours = (
        {"internlm2": (plain_internlm2, our_internlm2), "eva_clip": (plain_eva_clip, our_eva_clip)}[family]
        if family in PLAIN
        else (encoder_of_transformers, encoder_of_motet)
        if family in ENCODERS
        else (projector_of_transformers, projector_of_motet)
        if family in PROJECTORS
        else (backbone_of_transformers, backbone_of_motet)
    )
    # Nothing of plain computations is rounded.
    with nullcontext() if family in PLAIN else InFloat64():
        reference, packed, alone = theirs(folder, family), ours(folder, family), ours(folder, family, packed=False)
    rounded = ours(folder, family).distance(theirs(folder, family))
    return Distances(packed.num_targets, packed.distance(reference), packed.distance(alone), rounded)


def write_part(folder: Path, family: str) -> None:
    """Write a tiny model of transformers' class, whose norms are away from 1 and whose biases are away from 0."""
    if family in PLAIN:
        folder = folder / "model"
        _ = test_internlm2.written(folder) if family == "internlm2" else test_eva_clip.written(folder, _EVA_KIND)
        return
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    if family in PROJECTORS:
        model = _projector_class(family)(_projector_config(family)).double()
    else:
        of_family = (ENCODERS | BACKBONES)[family]
        # transformers' default padding token belongs to another vocabulary.
        of_text = {"vocab_size": VOCAB, "pad_token_id": None}
        options = Tiny.encoders[family] if family in ENCODERS else Tiny().options_of(family) | of_text
        model = of_family.model(of_family.config(**options)).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    with quiet_transformers():
        model.save_pretrained(folder)


def _their_model(folder: Path, family: str) -> Any:
    kind = _projector_class(family) if family in PROJECTORS else (ENCODERS | BACKBONES)[family].model
    with quiet_transformers():
        model = kind.from_pretrained(folder, dtype=torch.float64).train()
    with torch.device("meta"):
        # What the class freezes (positions of clips) its reader of files lets learn, as it does all weights.
        learns = {name: each.requires_grad for name, each in kind(model.config).named_parameters()}
    for name, weight in model.named_parameters():
        weight.requires_grad_(learns[name])
    # Other ways to compute experts do not know float64.
    model.config._experts_implementation = "eager"
    return model


def _plain_weights(folder: Path, prefix: str = "") -> dict[str, torch.nn.Parameter]:
    """The weights of a directory in float64, by their names without a prefix; others are left out."""
    stored = load_file(folder / "model" / "model.safetensors")
    named = {name.removeprefix(prefix): each for name, each in stored.items() if name.startswith(prefix)}
    return {name: torch.nn.Parameter(each.double()) for name, each in named.items()}


def plain_internlm2(folder: Path, family: str) -> Step:
    """Of one document after the other."""
    weights, packed = _plain_weights(folder), Packed.of(_LENGTHS)
    total = torch.zeros((), dtype=torch.float64)
    for number in range(len(_LENGTHS)):
        document = packed.document(number)
        total = total + test_internlm2.plain_loss(weights, document.tokens, document.targets)
    return _mean(total, packed, dict(weights))


def our_internlm2(folder: Path, family: str, *, packed: bool = True) -> Step:
    """Of all documents in one pack, or one at a time."""
    backbone = build_backbone(BackboneConfig(family="internlm2", path=folder / "model"), VOCAB, torch.float64, 0)
    documents = Packed.of(_LENGTHS)
    total = torch.zeros((), dtype=torch.float64)
    for each in [documents] if packed else [documents.document(number) for number in range(len(_LENGTHS))]:
        total = total + backbone(each, {})[0]
    names = plain_names(backbone.causal_lm)
    step = _mean(total, documents, {names[name]: each for name, each in backbone.causal_lm.named_parameters()})
    return step._replace(gradients=test_internlm2.by_their_names(step.gradients, _plain_weights(folder)))


def _eva_images() -> tuple[Tensor, Tensor]:
    """Images, and the rows that the encoder is to make of them."""
    generator, side = torch.Generator().manual_seed(7), test_eva_clip.GRID * test_eva_clip.SIDE
    pixels = torch.randn(3, 3, side, side, generator=generator, dtype=torch.float64)
    shape = len(pixels) * test_eva_clip.GRID**2, test_eva_clip.WIDTH
    return pixels, torch.randn(shape, generator=generator, dtype=torch.float64)


def plain_eva_clip(folder: Path, family: str) -> Step:
    """Of one image after the other."""
    weights, (pixels, targets) = _plain_weights(folder, "vision_model."), _eva_images()
    rows = [test_eva_clip.plain_rows(weights, _EVA_KIND, image) for image in pixels]
    return _step_of(torch.cat(rows), targets, weights)


def our_eva_clip(folder: Path, family: str, *, packed: bool = True) -> Step:
    """Of all images in one pack, or one at a time."""
    encoder, (pixels, targets) = test_eva_clip.encoder_of(folder / "model"), _eva_images()
    images = [pixels] if packed else pixels.split(1)
    rows = [encoder(test_eva_clip.patches_of(each), torch.full((len(each), 2), test_eva_clip.GRID)) for each in images]
    names = plain_names(encoder.model)
    return _step_of(torch.cat(rows), targets, {names[name]: each for name, each in encoder.model.named_parameters()})


def encoder_of_transformers(folder: Path, family: str) -> Step:
    """Of one item after the other."""
    model, (values, sizes, targets) = _their_model(folder, family), _items(folder, family)
    rows = [
        _their_rows(model, family, item, size.tolist())
        for item, size in zip(values.split(sizes.prod(1).tolist()), sizes, strict=True)
    ]
    return _step_of(torch.cat(rows), targets, dict(model.named_parameters()))


def encoder_of_motet(folder: Path, family: str, *, packed: bool = True) -> Step:
    """Of all items in one pack, or one at a time."""
    encoder, (values, sizes, targets) = _our_encoder(folder, family), _items(folder, family)
    items = zip(values.split(sizes.prod(1).tolist()), sizes.split(1), strict=True)
    rows = [encoder(values, sizes)] if packed else [encoder(item, size) for item, size in items]
    names = plain_names(encoder.model)
    return _step_of(torch.cat(rows), targets, {names[name]: each for name, each in encoder.model.named_parameters()})


def _our_encoder(folder: Path, family: str) -> Any:
    return build_modality("image", EncoderConfig(family=family, path=folder), DIM, torch.float64, 0).encoder


def _items(folder: Path, family: str) -> tuple[Tensor, Tensor, Tensor]:
    """Values of packed items, their sizes, and the rows that the encoder is to make of them."""
    sizes = torch.tensor([[40], [40], [40]]) if family in _WHOLE_CLIPS else Tiny().sizes(family)
    values, encoder = Tiny().values(family, sizes).double(), _our_encoder(folder, family)
    shape = int(encoder.num_outputs(sizes.numpy()).sum()), encoder.output_dim
    return values, sizes, torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def _step_of(rows: Tensor, targets: Tensor, weights: dict[str, torch.nn.Parameter]) -> Step:
    loss = (rows - targets).square().sum(1).mean()
    loss.backward()
    return Step(loss.item(), len(targets), {name: each.grad for name, each in weights.items() if each.grad is not None})


def _their_rows(model: Any, family: str, values: Tensor, size: list[int]) -> Tensor:
    """What transformers makes of one item, without class rows and registers."""
    if family in _WHOLE_CLIPS:
        return model(values.T[None]).last_hidden_state[0]
    if family == "qwen2_5_omni_audio":
        frames = size[0]
        return model(values.T, torch.tensor([frames]), torch.tensor([(frames + 1) // 2])).last_hidden_state
    if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        return model(values, torch.tensor([[1, *size]])).pooler_output
    if family == "siglip2":
        channels_last = values.view(len(values), 3, -1).transpose(1, 2).flatten(1)[None]
        return model(channels_last, torch.ones(1, len(values)), torch.tensor([size])).last_hidden_state[0]
    height, width = size
    side = round((values.shape[1] // 3) ** 0.5)
    pixels = values.view(height, width, 3, side, side).permute(2, 0, 3, 1, 4).reshape(1, 3, side * height, side * width)
    options = {"interpolate_pos_encoding": True} if family in ("siglip", "clip") else {}
    return model(pixels, **options).last_hidden_state[0][-len(values) :]


def _projector_class(kind: str) -> Any:
    return Idefics2PerceiverResampler if kind == "resampler" else Blip2QFormerModel


def _projector_config(kind: str) -> Any:
    if kind == "resampler":
        return Idefics2PerceiverConfig(hidden_size=DIM, resampler_n_latents=_QUERIES, **PROJECTORS[kind])
    return Blip2QFormerConfig(encoder_hidden_size=_READ_DIM, **PROJECTORS[kind])


def projector_of_transformers(folder: Path, kind: str) -> Step:
    """Of the rows of one item after the other."""
    model, read, beside = _their_model(folder, kind), _read_rows(), _beside(kind)
    items = [rows[None] for rows in read.split(_ROWS)]
    if kind == "resampler":
        weights = {"input.weight": beside["input.weight"], "input.bias": beside["input.bias"]}
        made = [
            model(linear(rows, *weights.values()), torch.ones(rows.shape[:2], dtype=torch.long))[0] for rows in items
        ]
    else:
        weights = beside
        queries, matrix, bias = beside["layers.queries.weight"], beside["output.weight"], beside["output.bias"]
        hidden = [model(query_embeds=queries[None], encoder_hidden_states=rows).last_hidden_state[0] for rows in items]
        made = [linear(rows, matrix, bias) for rows in hidden]
    return _step_of(torch.cat(made), _made_rows(), {"read": read, **weights, **dict(model.named_parameters())})


def projector_of_motet(folder: Path, kind: str, *, packed: bool = True) -> Step:
    """Of all items in one pack, or one at a time."""
    projector, read = CrossProjector(kind, _READ_DIM, DIM, _QUERIES, PROJECTORS[kind]).double(), _read_rows()
    names = {name: _their_name(kind, name) for name, _ in projector.named_parameters()}
    stored = {**_beside(kind), **_their_model(folder, kind).state_dict()}
    projector.load_state_dict({name: stored[theirs] for name, theirs in names.items()})
    keep_float64(projector)
    if packed:
        made = projector(read, np.array(_ROWS))
    else:
        made = torch.cat([projector(rows, np.array([len(rows)])) for rows in read.split(_ROWS)])
    return _step_of(made, _made_rows(), {"read": read, **{names[n]: each for n, each in projector.named_parameters()}})


def _their_name(kind: str, name: str) -> str:
    start = next((each for each in _THEIR_NAMES[kind] if name.startswith(each)), "")
    return _THEIR_NAMES[kind].get(start, "") + name.removeprefix(start)


def _beside(kind: str) -> dict[str, torch.nn.Parameter]:
    """Weights that transformers' class of a projector lacks, by Motet's names."""
    shapes: dict[str, tuple[int, ...]] = {"input.weight": (DIM, _READ_DIM), "input.bias": (DIM,)}
    if kind == "qformer":
        width = PROJECTORS[kind]["hidden_size"]
        shapes = {"layers.queries.weight": (_QUERIES, width), "output.weight": (DIM, width), "output.bias": (DIM,)}
    generator = torch.Generator().manual_seed(9)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in shapes.items()
    }


def _read_rows() -> torch.nn.Parameter:
    """The rows that a projector reads, of all items."""
    generator = torch.Generator().manual_seed(3)
    return torch.nn.Parameter(torch.randn(sum(_ROWS), _READ_DIM, generator=generator, dtype=torch.float64))


def _made_rows() -> Tensor:
    """The rows that it is to make."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(len(_ROWS) * _QUERIES, DIM, generator=generator, dtype=torch.float64)


def backbone_of_transformers(folder: Path, family: str) -> Step:
    """Of one document after the other, on embeddings with an encoder's rows in their places."""
    model, (packed, features) = _their_model(folder, family), _documents()
    total, start = torch.zeros((), dtype=torch.float64), 0
    for number in range(len(_LENGTHS)):
        document = packed.document(number)
        places = document.feature_positions["image"]
        embeds = model.get_input_embeddings()(document.tokens)
        embeds = embeds.index_copy(0, places, features[start : start + len(places)])
        start += len(places)
        logits = model(inputs_embeds=embeds[None], use_cache=False).logits[0, :-1]
        is_target = document.targets[1:]
        total = total + cross_entropy(logits[is_target], document.tokens[1:][is_target], reduction="sum")
    return _mean(total, packed, {"features": features, **dict(model.named_parameters())})


def backbone_of_motet(folder: Path, family: str, *, packed: bool = True) -> Step:
    """Of all documents in one pack, or one at a time."""
    backbone = build_backbone(BackboneConfig(family=family, path=folder), VOCAB, torch.float64, 0)
    documents, features = _documents()
    total, start = torch.zeros((), dtype=torch.float64), 0
    for each in [documents] if packed else [documents.document(number) for number in range(len(_LENGTHS))]:
        count = len(each.feature_positions["image"])
        total, start = total + backbone(each, {"image": features[start : start + count]})[0], start + count
    names = plain_names(backbone.causal_lm)
    weights = {names[name]: each for name, each in backbone.causal_lm.named_parameters()}
    return _mean(total, documents, {"features": features, **weights})


def _documents() -> tuple[Packed, Tensor]:
    """Packed documents, and the rows of an encoder in them."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(len(_PLACES), DIM, generator=generator, dtype=torch.float64, requires_grad=True)
    return Packed.of(_LENGTHS, image=_PLACES), features


def _mean(total: Tensor, packed: Packed, weights: dict[str, Tensor]) -> Step:
    """The step of a sum over targets; the first token of a document is none."""
    is_target = packed.targets.clone()
    is_target[packed.offsets[:-1].long()] = False
    count = int(is_target.sum())
    (total / count).backward()
    return Step(
        total.item() / count, count, {name: each.grad for name, each in weights.items() if each.grad is not None}
    )
