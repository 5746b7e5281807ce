"""What is profiled: the recipe's modules, one transformer layer deep, on batches of items of the lengths it allows.

Where attention of layers reaches different rows (windows, or none), there is one layer of each reach. A module's time
is that of its layers, so even a model of 84 B parameters can be measured on one device. Batches have items of a few
lengths, each in several numbers: that separates the cost of a row from the cost of a pair of rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from motet.ahead import MadeAhead, finding
from motet.core.arrays import Int64Array
from motet.core.errors import UserError
from motet.core.grid_positions import NUM_AXES
from motet.core.item_segments import ItemSegments
from motet.core.spec import Layer, Module
from motet.core.workload import BACKBONE
from motet.cost.profile import Batch
from motet.data.own_items import OwnTransform
from motet.models.backbone import Backbone
from motet.models.build import BackboneConfig, EncoderConfig, ModelConfig
from motet.models.config_file import parse_config, read_config
from motet.models.families.bounds import check_bounds
from motet.models.generator import GeneratorModule
from motet.models.layers import LayerModules
from motet.models.mllm import MLLM
from motet.models.module import ModalityModule
from motet.profiling.job_lengths import AskedLengths
from motet.train.recipe.drawn import DrawnRecipe
from motet.train.recipe.recipe import Recipe

MAX_BATCH_ROWS = 2**16
"""Rows of the largest batch."""
_SHORTEST = 8
"""Shorter items are not measured if there are longer ones."""
_LONGEST_OWN = 4096
"""Rows of the longest item of an own modality, of which nothing says how long it may be."""
_NUM_CANDIDATES = 40
"""Lengths of sequences that batches are made of."""
_NUM_LENGTHS, _LENGTH_RATIO = 6, 3
"""A grid has so many lengths at most, each at least this factor longer than the one before."""
_SPREAD = 0.6
"""Standard deviation of the logarithms of a batch's lengths, as in real data."""
_NUM_AROUND = (15, 7, 3)
"""Numbers of different lengths in a batch; the first one counts that leaves room for a few items of each length."""
_NUM_COUNTS, _ROW_RATIO = 4, 256
"""A grid has so many batches of a length; the largest has at most this factor more rows than the smallest."""


class TimedLayer(NamedTuple):
    """A layer and what computes it. Modules that are called several times are timed in all of their calls."""

    layer: Layer
    modules: tuple[nn.Module, ...]


def _timed(layers: Iterable[LayerModules]) -> list[TimedLayer]:
    return [TimedLayer(each.layer, each.modules if each.timed is None else each.timed) for each in layers]


@dataclass(frozen=True, eq=False)
class Subject:
    """A module to measure.

    spec:    layers and sizes of the truncated module. layers: what computes each of its layers.
    rest:    the layer, by its place, that gets what the module takes beside its layers.
    lengths: int64 [n], ascending: the lengths that its items can have and, where the job's are known, those about them.
    job_rows: of the job's large microbatches; 0 where they are not known.
    segments: those of a batch's items, or None if the module computes items whole.
    num_tokens: of a batch's items, rows in the sequence, as of `ItemLengths`; None of a module that gives none.
    media:   of a batch's sequences, how many images stand in each, whose rows some layers attend to; None of a module
             without such layers.
    sharded: the same module again, under FSDP as the recipe has it, on this rank alone: with all of FSDP's hooks and
             copies, and without messages.
    prepare: makes a call of either module on a batch, with random contents.
    through: makes a call of the blocks of `module` alone on a batch, as a stage that begins inside it does; None of a
             module that a pipeline cannot cut.
    head:    computes the layer that sees targets only, from hidden states [rows, dim] to the loss.
    """

    name: str
    module: nn.Module
    spec: Module
    layers: Sequence[TimedLayer]
    lengths: Int64Array
    sharded: nn.Module
    prepare: Callable[[Batch, nn.Module], Callable[[], Tensor]]
    head: Callable[[Tensor], Tensor] | None = None
    job_rows: int = 0
    segments: Callable[[Batch], ItemSegments | None] = lambda batch: None
    num_tokens: Callable[[Batch], Int64Array | None] = lambda batch: None
    media: Callable[[Batch], Int64Array | None] = lambda batch: None
    through: Callable[[Batch], Callable[[], Tensor]] | None = None
    rest: int = 0

    def is_inside(self, number: int) -> bool:
        """Whether a layer's modules are parts of those of the layer before, whose time is then without theirs."""
        if not number or not (modules := self.layers[number].modules):
            return False
        parts = {part for module in self.layers[number - 1].modules for part in module.modules()}
        return parts.issuperset(modules)


def one_layer_deep(config: ModelConfig) -> ModelConfig:
    """The same model with a single transformer layer of each reach of attention in a module, and everything trainable.

    Of the models of diffusers only PixArt's is made shallow: blocks of the others differ, and are timed each. A
    backbone with layers that attend to rows of images has one of them behind one that does not.
    Raises UserError for a config that HF refuses.
    """
    encoders = {
        name: part.model_copy(
            update={"train_encoder": True, "train_projector": True} | _truncated(f"encoders.{name}", part)
        )
        for name, part in config.encoders.items()
    }
    backbone = config.backbone.model_copy(update={"train": True} | _truncated(BACKBONE, config.backbone))
    generators = {
        name: part.model_copy(
            update={"train_generator": True, "train_projector": True}
            | ({"config": part.config | {"num_layers": 1}} if part.family in ("dit", "pixart", "shapes") else {})
        )
        for name, part in config.generators.items()
    }
    update = {"encoders": encoders, "backbone": backbone, "generators": generators, "freeze": ()}
    return config.model_copy(update=update)


def _truncated(where: str, part: EncoderConfig | BackboneConfig) -> dict[str, Any]:
    """The changes of a part to one layer of each reach. where: of the part, in the recipe's `[model]`."""
    if part.family is None:
        return {}
    family = part.classes
    options = dict(part.config) | {family.depth: 1}
    known = inspect.signature(family.config).parameters
    if "layer_types" in known:
        # An entry for each layer; None where no layer has a window.
        kinds = list(dict.fromkeys(_whole_config(where, part).layer_types or ()))
        options |= {family.depth: max(len(kinds), 1), "layer_types": kinds or None}
        if len(kinds) > 1:
            options.pop("max_window_layers", None)  # It counts layers of the whole model, and the list says it here.
    if "fullatt_block_indexes" in known:
        whole = _whole_config(where, part)
        depth = getattr(whole, family.depth)
        has_whole = list(dict.fromkeys(number in whole.fullatt_block_indexes for number in range(depth)))
        indexes = [number for number, is_whole in enumerate(has_whole) if is_whole]
        options |= {family.depth: max(len(has_whole), 1), "fullatt_block_indexes": indexes}
    if "cross_attention_layers" in known:
        options |= {family.depth: 2, "cross_attention_layers": [1]}
    if "num_global_layers" in known:
        options["num_global_layers"] = 0  # They are layers as the others, behind gates.
    truncated: dict[str, Any] = {"config": options}
    if (layer := getattr(part, "feature_layer", None)) is not None:
        truncated["feature_layer"] = -1 if isinstance(layer, int) else (-1,) * len(layer)  # The only layer.
    if getattr(part, "stacked", None):
        truncated["stacked"] = {}  # No layer is left before which further rows enter.
    return truncated


def _whole_config(where: str, part: EncoderConfig | BackboneConfig) -> Any:
    """HF's config of the whole part."""
    options = deepcopy(part.config)  # HF writes its defaults into the tables of its caller.
    check_bounds(f"model.{where}.config.", options)
    if part.path is not None:
        return read_config(where, part.classes, part.path, options)
    return parse_config(Path(f"model.{where}.config"), part.classes.config, options)


def subjects(
    recipe: Recipe,
    model: MLLM,
    sharded: MLLM,
    device: torch.device,
    asked: Mapping[str, AskedLengths] = MappingProxyType({}),
) -> list[Subject]:
    """The modules to measure: encoders, the backbone, generators. Raises UserError for an encoder that no item fits.

    model, sharded: the same model twice, on `device`; the second under FSDP once it is measured.
    asked:          what the job asks for, by module, as far as it is known.
    """
    encoders = [
        _encoder(recipe, name, module, sharded.encoders[name], device) for name, module in model.encoders.items()
    ]
    generators = [
        _generator(recipe, name, module, sharded.generators[name], model.backbone.dim, device)
        for name, module in model.generators.items()
    ]
    found = [*encoders, _backbone(recipe, model.backbone, sharded.backbone, device), *generators]
    return [_as_asked(subject, asked[subject.name]) if subject.name in asked else subject for subject in found]


def _as_asked(subject: Subject, asked: AskedLengths) -> Subject:
    return replace(subject, lengths=asked.among(subject.lengths), job_rows=min(asked.rows, MAX_BATCH_ROWS))


def grid_of(lengths: Int64Array, max_rows: int, *, padded: bool) -> tuple[list[Batch], list[Batch]]:
    """Batches to interpolate between (the grid), and batches that are held out: of other lengths, and of mixed lengths.

    A batch of the grid has equally many items of each of a few lengths about one, if one item of each fits.
    lengths:  int64 [n], ascending: the lengths that items can have.
    max_rows: the largest sum of lengths of a batch, unless a single item of the shortest length exceeds it.
    """
    # 1. The lengths of the grid.
    usable = lengths[lengths <= max(max_rows, lengths[0])]
    usable = usable[usable >= min(_SHORTEST, usable[-1])]
    chosen = [int(usable[-1])]
    while len(chosen) < _NUM_LENGTHS and (shorter := usable[usable * _LENGTH_RATIO <= chosen[0]]).size:
        chosen.insert(0, int(shorter[-1]))
    if chosen[0] > usable[0]:
        # A batch of the shortest items alone, in which rows attend to as few others as can be.
        chosen.insert(0, int(usable[0]))
    # 2. For each, batches of several numbers of items.
    grid: list[Batch] = []
    for length in chosen:
        pattern = _around(length, usable, max_rows // _NUM_COUNTS, padded=padded) if length > usable[0] else [length]
        rows = _rows(pattern, padded=padded)
        most = max(max_rows // rows, 1)
        least = max(max_rows // _ROW_RATIO // rows, 1)
        counts = sorted({round(count) for count in np.geomspace(least, most, _NUM_COUNTS)})
        grid += [tuple((count, each) for each in pattern) for count in counts]
    # 3. Held out: lengths between those of the grid, and mixtures.
    between = [int(usable[np.abs(np.log(usable / np.sqrt(low * high))).argmin()]) for low, high in pairwise(chosen)]
    held_out: list[Batch] = [((max(max_rows // (3 * length), 1), length),) for length in between or chosen]
    if between:
        # As many rows of each length; if items are padded, each counts as long as the longest.
        for mixed, rows in ((between, max_rows // 2), (chosen[:-1], max_rows // 8)):
            share = rows // len(mixed)
            if fitting := [length for length in mixed if length <= share]:
                longest = max(fitting)
                held_out.append(tuple((share // (longest if padded else length), length) for length in fitting))
    grid = list(dict.fromkeys(grid))
    return grid, [batch for batch in held_out if batch not in grid]


def _around(length: int, usable: Int64Array, most_rows: int, *, padded: bool) -> list[int]:
    """Lengths about a length: if items are padded, none is longer; if rows are too few, only the length itself.

    Items of one length share calls of kernels and need no mask of padding; items of real data do not share them.
    """
    for count in _NUM_AROUND:
        ratios = [math.exp(_SPREAD * NormalDist().inv_cdf((index + 0.5) / count)) for index in range(count)]
        aimed = [length * ratio for ratio in ratios if ratio <= 1 or not padded]
        lengths = sorted({int(usable[np.abs(usable - each).argmin()]) for each in aimed})
        if _rows(lengths, padded=padded) <= most_rows:
            return lengths
    return [length]


def _rows(lengths: list[int], *, padded: bool) -> int:
    """Rows of a batch with one item of each length."""
    return len(lengths) * max(lengths) if padded else sum(lengths)


def items(batch: Batch) -> Int64Array:
    """Lengths of a batch's items, int64 [num_items]."""
    return np.concatenate([np.full(count, length, dtype=np.int64) for count, length in batch])


def _encoder(recipe: Recipe, name: str, module: ModalityModule, sharded: nn.Module, device: torch.device) -> Subject:
    sizes = _sizes(recipe, name, module)
    row_dim = recipe.transform(name).row_dim

    def sizes_of(batch: Batch) -> Int64Array:
        return np.stack([sizes[length] for length in items(batch).tolist()])

    def drawn(batch: Batch) -> tuple[Tensor, Tensor]:
        chosen = sizes_of(batch)
        return torch.randn(int(module.num_values(chosen).sum()), row_dim, device=device), torch.from_numpy(chosen)

    def prepare(batch: Batch, called: nn.Module) -> Callable[[], Tensor]:
        values, on_host = drawn(batch)
        return _finding(module, (values, on_host, None), lambda: called(values, on_host))

    def through(batch: Batch) -> Callable[[], Tensor]:
        values, on_host = drawn(batch)
        with torch.no_grad():
            hidden = module.enter(values, on_host).requires_grad_()
        return _finding(module, (values, on_host, None), lambda: module.through(hidden, on_host, 0, 1))

    def segments(batch: Batch) -> ItemSegments | None:
        return module.segments(sizes_of(batch))

    def num_tokens(batch: Batch) -> Int64Array:
        return module.num_tokens(sizes_of(batch))

    lengths = np.array(sorted(sizes), dtype=np.int64)
    spec, layers = module.spec_module(name), _timed(module.layers())
    is_cut = not module.uncuttable and not module.projector.blocks
    return Subject(
        name,
        module,
        spec,
        layers,
        lengths,
        sharded,
        prepare,
        segments=segments,
        num_tokens=num_tokens,
        through=through if is_cut else None,
    )


def _generator(
    recipe: Recipe, name: str, module: GeneratorModule, sharded: nn.Module, width: int, device: torch.device
) -> Subject:
    """A generator on random hidden states. width: of the backbone's rows."""
    sizes = _sizes(recipe, name, module)
    row_dim = recipe.transform(name).row_dim
    dtype = next(module.parameters()).dtype

    def prepare(batch: Batch, called: nn.Module) -> Callable[[], Tensor]:
        chosen = np.stack([sizes[length] for length in items(batch).tolist()])
        values = torch.randn(int(module.lengths(chosen).sum()), row_dim, device=device)
        # As it is priced: of turns the longest.
        counts = np.full(len(chosen), module.num_conditions, dtype=np.int64)
        rows = torch.randn(int(counts.sum()), width, dtype=dtype, device=device)
        on_host, keys = torch.from_numpy(chosen), np.arange(len(chosen))
        return lambda: called(values, on_host, rows, keys, counts)

    lengths = np.array(sorted(sizes), dtype=np.int64)
    # A block is timed whole, as its first layer.
    blocks, layers = iter(module.blocks), []
    for layer, modules in _timed(module.layers()):
        if module.blocks and layer.in_block and not layer.reads_data:
            modules = () if layer.continues else (next(blocks),)
        layers.append(TimedLayer(layer, modules))
    # Noise, loss, and the order of rows in batches of one size take as long as an item has rows, as its last layer.
    rest = len(layers) - 1
    return Subject(name, module, module.spec_module(name), layers, lengths, sharded, prepare, rest=rest)


def _finding(
    module: ModalityModule | Backbone, given: tuple[Any, ...], call: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    """A call of a module that finds what it has made of a batch, as the thread that loads makes it for a step.

    given: of the batch, as `make_ahead` takes it.
    """
    made, weight = MadeAhead(), next(module.parameters())
    with finding("profiled", made):
        module.make_ahead(*given, range(len(module.blocks)), weight.device, weight.dtype)

    def found() -> Tensor:
        with finding("profiled", made):
            return call()

    return found


def _sizes(recipe: Recipe, name: str, module: ModalityModule | GeneratorModule) -> dict[int, Int64Array]:
    """The sizes of an item, by length. Items are what the transform makes of squares, or of clips, of many sizes."""
    by_length: dict[int, Int64Array] = {}
    for size in recipe.transform(name).sizes(_raw(recipe, name))[:, None]:
        try:
            fits = module.num_tokens(size)[0] > 0 or isinstance(module, GeneratorModule)
        except UserError:
            continue
        if fits:
            by_length.setdefault(int(module.lengths(size)[0]), size[0])
    if not by_length:
        kind = "generators" if isinstance(module, GeneratorModule) else "encoders"
        raise UserError(f"transforms.{name} makes no item that model.{kind}.{name} can take.")
    return by_length


def _raw(recipe: Recipe, name: str) -> Int64Array:
    """What headers of squares, or of clips, of many sizes say, int64 [n, 2]; of drawn items, their lengths."""
    transform = recipe.transform(name)
    if isinstance(recipe, DrawnRecipe):
        items = recipe.drawn().examples.items.get(name)
        if items is None:
            raise UserError(f"[workload] has no item of {name!r}, so nothing says which lengths to time.")
        longest, second = int(items.length.max(initial=1)), None
    elif transform.modality == "image":
        longest, second = transform.max_pixels_side, None
    elif isinstance(transform, OwnTransform):
        longest, second = _LONGEST_OWN, 0
    else:
        longest, second = int(transform.max_seconds * transform.sampling_rate), transform.sampling_rate
    first = np.unique(np.geomspace(1, longest, 4 * _NUM_CANDIDATES).astype(np.int64))
    return np.stack([first, first if second is None else np.full_like(first, second)], axis=1)


def _longest_sequence(recipe: Recipe, backbone: Backbone) -> int:
    if recipe.data.max_sequence_length is not None:
        return recipe.data.max_sequence_length
    if isinstance(recipe, DrawnRecipe):
        return int(recipe.drawn().examples.sequence.max())
    return backbone.causal_lm.config.max_position_embeddings


def _backbone(recipe: Recipe, backbone: Backbone, sharded: nn.Module, device: torch.device) -> Subject:
    config = backbone.causal_lm.config
    longest = _longest_sequence(recipe, backbone)
    shortest = min(_SHORTEST, longest)
    lengths = np.unique(np.geomspace(shortest, longest, _NUM_CANDIDATES).astype(np.int64))

    name, num_keys = next(iter(backbone.keys.items()), ("feature", 0))

    def media(batch: Batch) -> Int64Array | None:
        """An image in each sequence, but not more rows of images than rows: the last sequences have one then."""
        lengths = items(batch)
        most = max(int(lengths.sum()) // max(num_keys, 1), 1)
        return (np.arange(len(lengths), 0, -1) <= most).astype(np.int64) if num_keys else None

    def drawn(batch: Batch) -> tuple[Any, dict[str, Tensor]]:
        """Each sequence begins with a row of features, as from an encoder; all other tokens are targets."""
        each, has_item = items(batch), media(batch)
        offsets = np.concatenate([[0], np.cumsum(each)])
        starts = torch.from_numpy(offsets[:-1]).to(device)
        targets = torch.ones(int(offsets[-1]), dtype=torch.bool, device=device)
        targets[starts] = False
        places = starts if has_item is None else torch.from_numpy(offsets[:-1][has_item > 0]).to(device)
        sequences = SimpleNamespace(
            tokens=torch.randint(config.vocab_size, (int(offsets[-1]),), device=device),
            targets=targets,
            offsets=torch.from_numpy(offsets.astype(np.int32)),
            feature_positions={name: places},
            # Read where positions are those of a grid: as of text.
            grid_positions=torch.from_numpy(np.tile(np.concatenate([np.arange(n) for n in each]), (NUM_AXES, 1))),
            # Read where rows of items are keys: text sees all of them.
            key_rows=torch.full((int(offsets[-1]),), num_keys),
        )
        dtype = next(backbone.parameters()).dtype
        rows = torch.randn(len(places), backbone.row_width(name), dtype=dtype, device=device, requires_grad=True)
        return sequences, {name: rows}

    def prepare(batch: Batch, called: nn.Module) -> Callable[[], Tensor]:
        sequences, features = drawn(batch)
        return _finding(backbone, (sequences,), lambda: called(sequences, features)[0])

    def through(batch: Batch) -> Callable[[], Tensor]:
        sequences, features = drawn(batch)
        with torch.no_grad():
            hidden = backbone.enter(sequences, features).detach().requires_grad_()
        return _finding(backbone, (sequences,), lambda: backbone.through(hidden, sequences, 0, 1))

    def head(hidden: Tensor) -> Tensor:
        return backbone.loss(hidden, torch.zeros(len(hidden), dtype=torch.int64, device=device))

    spec, layers = backbone.spec_module(), _timed(backbone.layers())
    return Subject(BACKBONE, backbone, spec, layers, lengths, sharded, prepare, head, media=media, through=through)
