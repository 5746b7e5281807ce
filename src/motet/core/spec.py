"""The specification of a multimodal model: its modules, their layers, what is trainable, and which module feeds which.

A `ModelSpec` does not say where or how a model is computed. It is made from a model (`models/spec.py`) or from shapes
(`core/shapes.py`). Costs, schedules and plans need nothing else of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import or_
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from motet.core.arrays import Int64Array
from motet.core.cuts import CutRows
from motet.core.errors import ArgumentError
from motet.core.limited import Count, NumLayers, Parameters
from motet.core.workload import BACKBONE


@dataclass(frozen=True)
class Attention:
    """The attention of one layer, over the rows of one item, or of one segment of an item.

    width:    num_heads * head_dim of queries.
    kv_width: num_kv_heads * head_dim; less than `width` for grouped queries.
    causal:   a row attends to itself and earlier rows of its item; else to all rows of its item.
    window:   if not 0, a causal row attends to at most `window` rows, and other rows attend within blocks (frames,
              windows) of `window` rows.
    density:  the share of these pairs that a mask leaves.
    queries:  if not 0, so many queries of each item attend to its rows (cross attention), which do not attend.
    keys:     if not 0, each row attends to so many rows that its item has beside them, such as its condition; in a
              layer `of_media`, to so many of each image or clip of its sequence.
    whole:    rows attend over the whole item, also where it has segments (`core/item_segments.py`).
    num_heads, num_kv_heads: which tensor parallelism must divide; 0 where it does not divide the layer, or where they
              are not known.
    """

    width: Count
    kv_width: Count
    causal: bool = False
    window: Count = 0
    density: Annotated[float, Field(ge=0, le=1)] = 1.0
    queries: Count = 0
    whole: bool = False
    num_heads: Count = 0
    num_kv_heads: Count = 0
    keys: Count = 0

    def __post_init__(self) -> None:
        if not 0 <= self.density <= 1:
            raise ArgumentError(f"density is {self.density}; a mask leaves a share of 0 to 1 of the pairs.")

    @property
    def reach(self) -> tuple[bool, int, bool]:
        """Which rows of its item a row attends to: (causal, window, whole)."""
        return self.causal, self.window, self.whole


NOTHING_LEARNS = (
    "Nothing learns: every weight of the model is frozen; let a part learn (`train`, `train_encoder`, "
    "`train_projector`, or `learns` of a phase), or take patterns out of model.freeze."
)
_CONVOLUTIONS = frozenset({"patches", "convolution", "strided_convolution"})
"""Kinds of layers that are, or hold, convolutions."""


@dataclass(frozen=True)
class Layer:
    """One layer. An item of length l has multiple * ceil(l / divisor) + extra_rows rows in it.

    kind:             e.g. "attention", "patches", "convolution", "merge", "projector", "embedding", "head". A profile
                      times the layers of a module by kind, weights and reach of attention.
    weights:          the number of entries of the matrices that multiply each row.
    parameters:       the number of all parameters: `weights`, norms, biases and look-up tables.
    output_width:     elements of an output row; a pipeline sends as many where it is cut.
    activation_width: elements of a row that forward keeps for backward, the input included.
    carried_width:    of output_width, elements that layers before it have made, and that go along with its own.
    divisor:          the length of an item that makes one row here: above 1 after strided convolutions or merged
                      patches.
    multiple:         above 1 before strided convolutions whose outputs the length counts: pixels of latents.
    trainable:        its parameters are updated.
    targets_only:     it sees only the rows on which loss is taken (the output layer).
    item_rows:        if not 0, each item has so many rows in it, whatever its length (queries of a resampler).
    continues:        it belongs to the block of the layer before it: a block of a resampler has several layers.
    idle_weights:     entries of the matrices of experts that a row is not sent to (mixture of experts): they multiply
                      other rows, and are read all the same.
    num_experts, expert_weights: the experts, and the entries of the matrices of each; 0 where there are none. Ranks
                      that share a layer have whole experts each.
    frozen_weights:   of `weights`, and
    frozen_parameters: of `parameters`, and
    frozen_expert_weights: of `expert_weights`, those that are not updated although the layer is trainable, as beside
                      adapters.
    inner_weights:    of `weights`, those whose input is made by parameters of the layer itself, so that it needs a
                      gradient if these learn, whatever stands before the layer; None: all in a block, else none.
    reads_data:       its input is data, of which no gradient is needed, whatever learns before it.
    of_media:         its keys, or item_rows, are of each image or clip of a sequence. A sequence without any does not
                      pass it.
    divided_width:    elements of activation_width of which each tensor-parallel rank has a part: those of heads and of
                      inner columns. The others are of rows that all of these ranks have.
    weight_width:     elements of activation_width kept for gradients of weights alone, such as what matrices multiply:
                      none of them if the layer is not trainable.
    divided_weight_width: of these, elements of divided_width.
    along:            if not 0, an item of length l has ceil(l / along) rows more: of a layer that `Module.sent` gives.
    of_outputs:       of a projector: its rows, or the queries that read rows in it, are as many as the item has in the
                      sequence, where that is known (`cost.flops.work_of`): no length says how a raster is cut into
                      squares, nor segments how many items the encoder was given.
    Raises ArgumentError if a width is more than the one of which it is a part, or more is frozen than there is.
    """

    kind: str
    weights: Parameters
    parameters: Parameters
    output_width: Annotated[Count, Field(ge=1)]
    activation_width: Count
    attention: Attention | None = None
    divisor: Annotated[Count, Field(ge=1)] = 1
    extra_rows: Count = 0
    trainable: bool = True
    targets_only: bool = False
    item_rows: Count = 0
    continues: bool = False
    idle_weights: Parameters = 0
    divided_width: Count = 0
    num_experts: Count = 0
    expert_weights: Parameters = 0
    frozen_weights: Parameters = 0
    frozen_parameters: Parameters = 0
    frozen_expert_weights: Parameters = 0
    multiple: Annotated[Count, Field(ge=1)] = 1
    reads_data: bool = False
    of_media: bool = False
    along: Count = 0
    of_outputs: bool = False
    inner_weights: Parameters | None = None
    weight_width: Count = 0
    divided_weight_width: Count = 0
    carried_width: Count = 0

    def __post_init__(self) -> None:
        for frozen in ("weights", "parameters", "expert_weights"):
            if getattr(self, f"frozen_{frozen}") > getattr(self, frozen):
                raise ArgumentError(
                    f"a layer of kind {self.kind!r} has frozen_{frozen} {getattr(self, f'frozen_{frozen}')}; it must "
                    f"be at most {frozen}, which is {getattr(self, frozen)}."
                )
        for part, whole in (
            ("divided_width", "activation_width"),
            ("weight_width", "activation_width"),
            ("divided_weight_width", "weight_width"),
            ("divided_weight_width", "divided_width"),
            ("carried_width", "output_width"),
        ):
            if getattr(self, part) > getattr(self, whole):
                raise ArgumentError(
                    f"a layer of kind {self.kind!r} has {part} {getattr(self, part)}; it must be at most {whole}, "
                    f"which is {getattr(self, whole)}."
                )

    def __hash__(self) -> int:
        """Of what tells nearly all layers apart: a search asks hundreds of thousands of times."""
        return hash((self.kind, self.weights, self.parameters, self.divisor, self.trainable))

    @property
    def makes_keys(self) -> bool:
        """Whether it makes keys of the images of a sequence. Ranks that share it make those that their rows see. Text
        before the first image sees all, so that its rank makes as many as one that has the sequence whole.
        """
        return self.of_media and self.item_rows > 0

    @property
    def updated_weights(self) -> int:
        """The entries of the matrices that get a gradient if the layer is trainable."""
        return self.weights - self.frozen_weights

    @property
    def kept_width(self) -> int:
        """Elements of a row that forward keeps for backward, by what of the layer learns."""
        return self.activation_width - (0 if self.trainable else self.weight_width)

    @property
    def kept_divided_width(self) -> int:
        """Of these, elements of which each tensor-parallel rank has a part."""
        return self.divided_width - (0 if self.trainable else self.divided_weight_width)

    def input_weights(self, needs_input: bool) -> int:
        """The entries of the matrices whose input gets a gradient. needs_input: the layer's own does."""
        if needs_input:
            return self.weights
        if self.trainable and self.inner_weights is not None:
            return self.inner_weights
        return self.weights if self.has_inner(needs_input) else 0

    def has_inner(self, needs_input: bool) -> bool:
        """Whether gradients pass through its attention. needs_input: the layer's own input gets one."""
        return needs_input or (self.trainable and self.in_block)

    def input_share(self, needs_input: bool) -> float:
        """The share of the products for gradients of inputs that backward computes. needs_input: as above."""
        return self.input_weights(needs_input) / self.weights if self.weights else float(self.has_inner(needs_input))

    @property
    def updated_parameters(self) -> int:
        """The number of parameters that are updated."""
        return self.parameters - self.frozen_parameters if self.trainable else 0

    @property
    def in_block(self) -> bool:
        """Whether it is part of a transformer block, which is sharded and recomputed as a whole."""
        return self.attention is not None or self.continues

    @property
    def divided_parameters(self) -> int:
        """The parameters of which each tensor-parallel rank has a part: of transformer layers and of MLPs the matrices,
        and all of embedding and output layer. Queries, and what steers blocks by item, are whole on each; products of
        conditions in blocks (`context`) are not."""
        if self.targets_only or self.kind == "embedding":
            return self.parameters
        if self.item_rows and not (self.continues and self.kind == "context"):
            return 0
        return self.weights + self.idle_weights if self.in_block or self.divided_width else 0

    @property
    def is_divided(self) -> bool:
        """Whether tensor-parallel ranks share the products of each row; of patch embeddings, convolutions and single
        matrices behind encoders each computes all."""
        return not self.weights or self.divided_parameters > 0

    @property
    def defers_weights(self) -> bool:
        """Whether the gradients of its weights come in W where backward is split into I and W, and not in I.

        Those of matrices do (`runtime/deferred.py`). Those of tables, norms and convolutions do not, nor those of the
        output layer: it would keep the gradients of logits, which are larger than all that a stage keeps for backward.
        """
        return self.weights > 0 and not self.targets_only and self.kind not in _CONVOLUTIONS

    @property
    def updated_expert_weights(self) -> int:
        """The entries of the matrices of each expert that are updated."""
        return self.expert_weights - self.frozen_expert_weights if self.trainable else 0

    @property
    def learning_experts(self) -> int:
        """The entries of the matrices of all experts that are updated."""
        return self.num_experts * self.updated_expert_weights

    def with_experts_of(self, ep: int) -> Layer:
        """The layer as one of `ep` ranks holds it that share its experts (`Unit.ep`); its rows are as many as before.

        If the rank has fewer experts than compute a row, it counts as reading that many.
        """
        left = self.num_experts // ep if ep > 1 else self.num_experts
        if left == self.num_experts:
            return self
        gone = (self.num_experts - left) * self.expert_weights
        return replace(
            self,
            parameters=self.parameters - gone,
            frozen_parameters=self.frozen_parameters - (self.num_experts - left) * self.frozen_expert_weights,
            idle_weights=max(self.idle_weights - gone, 0),
            num_experts=left,
        )

    @property
    def experts_per_row(self) -> int:
        """How many experts compute a row; 0 where there are none."""
        return self.num_experts - self.idle_weights // self.expert_weights if self.num_experts else 0

    @property
    def attention_weights(self) -> int:
        """The entries of a transformer layer's matrices of queries, keys, values and output; 0 of any other layer."""
        if self.attention is None or self.attention.queries or self.continues:
            return 0
        own_width = self.output_width - self.carried_width
        return 2 * own_width * (self.attention.width + self.attention.kv_width)

    @property
    def has_halves(self) -> bool:
        """Whether it is attention, then an MLP: parts that bubbles can be filled with."""
        return 0 < self.attention_weights < self.weights

    def rows(self, lengths: Int64Array, num_media: Int64Array | None = None) -> Int64Array:
        """The rows of each item, or of each segment, in the layer, int64 [n].

        lengths: int64 [n]. num_media: int64 [n], as of `ItemLengths`; None: one in each sequence.
        """
        if self.of_media and num_media is not None:
            return num_media * self.item_rows if self.item_rows else np.where(num_media > 0, lengths, 0)
        if self.item_rows:
            return np.full(len(lengths), self.item_rows, dtype=np.int64)
        rows = lengths if self.divisor == 1 else -(-lengths // self.divisor)
        rows = rows if self.multiple == 1 else self.multiple * rows
        rows = rows - (-lengths // self.along) if self.along else rows
        return rows + self.extra_rows if self.extra_rows else rows


@dataclass(frozen=True)
class Stack:
    """`count` equal layers, one after the other."""

    layer: Layer
    count: NumLayers = 1


@dataclass(frozen=True)
class Module:
    """An encoder with its projector, the backbone, or a generator with its projector.

    padded: each item of a microbatch is computed as long as the longest, unless ranks share one.
    shareable: ranks can share an item: where its rows meet, in attention or elsewhere, they get those of each other.
    tile_rows: rows behind it of each tile of an item, if that is made of equal tiles, which do not see each other: then
               ranks share an item between its tiles alone, and exchange nothing; 0: between any rows.
    token_parts: rows that stand side by side in each row that an item becomes, so that ranks can share one of these.
    carried_rows: of a generator, rows of each item that go from stage to stage beside those of the layer behind which
               it is cut: of its condition where the layer has none of these, and of what steers blocks.
    carried_divisor: of a generator, a row goes along for so many of an item's length: latents, of which the last stage
               takes the loss; 0: none do.

    Example:
        >>> patches, block = Layer("patches", 4, 4, 2, 2), Layer("attention", 9, 12, 2, 8, Attention(2, 2))
        >>> image = Module.of("image", [patches, block, block, block])
        >>> image.num_parameters, [stack.count for stack in image.stacks], image.blocks
        (40, [1, 3], (range(0, 2), range(2, 3), range(3, 4)))
    """

    name: str
    stacks: tuple[Stack, ...]
    padded: bool = False
    shareable: bool = False
    tile_rows: Count = 0
    token_parts: Count = 1
    carried_rows: Count = 0
    carried_divisor: Count = 0

    @classmethod
    def of(
        cls,
        name: str,
        layers: Iterable[Layer],
        padded: bool = False,
        shareable: bool = False,
        tile_rows: int = 0,
        token_parts: int = 1,
    ) -> Module:
        """The module with these layers, in execution order. Equal neighbours become one stack."""
        stacks = tuple(Stack(layer, len(list(equal))) for layer, equal in groupby(layers))
        return cls(name, stacks, padded, shareable, tile_rows, token_parts)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in execution order."""
        return tuple(stack.layer for stack in self.stacks for _ in range(stack.count))

    @property
    def num_layers(self) -> int:
        """The number of layers of all kinds."""
        return sum(stack.count for stack in self.stacks)

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """The parts that a pipeline can cut the module into, as ranges of indexes into `layers`.

        Each transformer layer begins a block, which ends before the next one. The first block also has all layers
        before it. A module without transformer layers is one block.
        """
        starts = [index for index, layer in enumerate(self.layers) if layer.in_block and not layer.continues]
        edges = [0, *starts[1:], self.num_layers]
        return tuple(range(first, stop) for first, stop in pairwise(edges))

    def block_layers(self, first: int, stop: int) -> range:
        """The indexes into `layers` of the blocks first ... stop - 1."""
        return range(self.blocks[first].start, self.blocks[stop - 1].stop) if stop > first else range(0)

    def halved_layer(self, block: int) -> int:
        """The index of the layer whose attention ends the first half of a block; -1 if the block has no halves.

        The first half also has all layers of the block before it, and the second one all layers behind it.
        """
        inner = [index for index in self.blocks[block] if self.layers[index].in_block]
        return inner[0] if len(inner) == 1 and self.layers[inner[0]].has_halves else -1

    def pieces(self, first: int, stop: int) -> list[tuple[int, int]]:
        """(block, half) of the smallest parts of a pass through the blocks first ... stop - 1.

        Half 0 is attention, 1 an MLP; a block that has no halves is one piece, of half -1.
        """
        halves = {block: (-1,) if self.halved_layer(block) < 0 else (0, 1) for block in range(first, stop)}
        return [(block, half) for block, both in halves.items() for half in both]

    @property
    def tied_weights(self) -> int:
        """The entries of the output layer's matrix that are the embedding's; 0 if it has its own, or there is none."""
        head = self.layers[-1]
        return head.weights if head.targets_only and not head.parameters else 0

    @cached_property
    def key_blocks(self) -> frozenset[int]:
        """The blocks whose rows attend to keys beside their item."""
        layers = self.layers
        return frozenset(
            number
            for number, block in enumerate(self.blocks)
            if any((attention := layers[index].attention) is not None and attention.keys for index in block)
        )

    def keys_of(self, block: int) -> Layer | None:
        """The layer of a block in which queries read an encoder's rows (a resampler); None if the block has none."""
        if block == len(self.blocks):
            return None
        layers = (self.layers[index] for index in self.blocks[block])
        return next((layer for layer in layers if layer.attention is not None and layer.attention.queries), None)

    @cached_property
    def cut_rows(self) -> CutRows:
        """Between which rows ranks can share its items."""
        keys = next(filter(None, map(self.keys_of, range(len(self.blocks)))), None)
        return CutRows(0 if keys is None else keys.divisor, self.token_parts)

    def sent_index(self, stop: int) -> int:
        """The index of the layer whose output goes on where a pipeline cuts behind the block stop - 1: the last one of
        the block that neither sees targets alone, nor makes keys, nor steers a block (`modulation`). Of the whole
        backbone it is the last norm.
        """
        block = self.blocks[stop - 1]
        rows = (index for index in reversed(block) if self.layers[index].kind not in ("keys", "modulation"))
        return next((index for index in rows if not self.layers[index].targets_only), block[-1])

    def sent(self, stop: int) -> Layer:
        """The layer of `sent_index`, with what goes along. A block of queries is given the rows of the items alone,
        without class rows.
        """
        last, keys = self.layers[self.sent_index(stop)], self.keys_of(stop)
        if self.carried_rows or self.carried_divisor:
            return replace(last, extra_rows=last.extra_rows + self.carried_rows, along=self.carried_divisor)
        return last if keys is None else replace(last, divisor=keys.divisor, extra_rows=0)

    def num_carried(self, stop: int, lengths: Int64Array, conditions: Int64Array) -> int:
        """The rows of items of a generator that go on behind its block stop - 1.

        lengths, conditions: of each item, and the rows of its condition, of which the layer counts the most,
        int64 [num_items].
        """
        rows = self.sent(stop).rows(lengths) + conditions - self.layers[0].item_rows
        return int(rows.sum())

    @property
    def num_parameters(self) -> int:
        """The number of parameters of all layers."""
        return sum(stack.layer.parameters * stack.count for stack in self.stacks)

    @property
    def num_updated_parameters(self) -> int:
        """The number of parameters that are updated, of all layers."""
        return sum(stack.layer.updated_parameters * stack.count for stack in self.stacks)

    @property
    def trainable(self) -> bool:
        """Whether any layer is trainable."""
        return any(stack.layer.trainable for stack in self.stacks)

    def input_gradients(self, reached: bool = False) -> tuple[bool, ...]:
        """Per layer, whether backward needs the gradient of the layer's input: an earlier layer is trainable.

        reached: a layer before the module is trainable.
        """
        learns = accumulate((layer.trainable for layer in self.layers), or_, initial=reached)
        return tuple(needed and not layer.reads_data for layer, needed in zip(self.layers, learns))


@dataclass(frozen=True)
class ModelSpec:
    """A model as layers with their sizes, without weights.

    modules:   in an order in which they can run.
    edges:     (source, sink): the sink's first block takes in the source's outputs.
    reentries: (source, sink, block) of edges whose sink takes in the same outputs again before a later block; where
               these blocks attend to keys, there alone.
    merges:    whether a merge of the user's own takes sequences whole, also those of which several ranks run rows.
    Raises ArgumentError for equal names, for edges of unknown modules or against the order, and for reentries of no
    edge or no later block.

    Example:
        >>> from motet.core.shapes import Transformer, connect, language_model, multimodal, vit
        >>> image = connect(vit("image", Transformer(32, 128, 4), num_layers=2, trainable=False), output_dim=64)
        >>> backbone = language_model(Transformer(64, 256, 4, causal=True), num_layers=2, vocab_size=1000)
        >>> model = multimodal("tiny", backbone, [image])
        >>> model.sources("backbone"), model.module("image").num_layers, model.input_gradients["image"]
        (('image',), 5, (False, False, False, False, False))
    """

    name: str
    modules: tuple[Module, ...]
    edges: tuple[tuple[str, str], ...]
    reentries: tuple[tuple[str, str, int], ...] = ()
    merges: bool = False

    def __post_init__(self) -> None:
        index = {module.name: number for number, module in enumerate(self.modules)}
        if len(index) < len(self.modules):
            raise ArgumentError(f"{self.name}: two modules have one name; each must have its own.")
        for source, sink in self.edges:
            for name in (source, sink):
                if name not in index:
                    raise ArgumentError(f"{self.name}: an edge names {name!r}; the modules are {', '.join(index)}.")
            if index[source] >= index[sink]:
                raise ArgumentError(f"{self.name}: {source!r} feeds {sink!r}, so it must come before it.")
        for source, sink, block in self.reentries:
            if (source, sink) not in self.edges or not 0 < block < len(self.module(sink).blocks):
                raise ArgumentError(
                    f"{self.name}: {source!r} enters {sink!r} again before its block {block}; it must feed it, and the "
                    "block must be one behind its first."
                )

    @cached_property
    def _by_name(self) -> Mapping[str, Module]:
        return {module.name: module for module in self.modules}

    def module(self, name: str) -> Module:
        """The module of that name. Raises ArgumentError if there is none."""
        if name not in self._by_name:
            raise ArgumentError(f"{self.name} has no module {name!r}; it has {', '.join(self._by_name)}.")
        return self._by_name[name]

    @property
    def num_parameters(self) -> int:
        """The number of parameters of all modules."""
        return sum(module.num_parameters for module in self.modules)

    @property
    def num_blocks(self) -> dict[str, int]:
        """The number of blocks of each module."""
        return {module.name: len(module.blocks) for module in self.modules}

    def sources(self, name: str) -> tuple[str, ...]:
        """The modules whose outputs the named one takes in."""
        return tuple(source for source, sink in self.edges if sink == name)

    def sinks(self, name: str) -> tuple[str, ...]:
        """The modules that take in the outputs of the named one."""
        return tuple(sink for source, sink in self.edges if source == name)

    def learners(self, name: str) -> tuple[str, ...]:
        """The modules for which a backward pass through the named one is made: of it and all before it, what learns."""
        return (*self.learners_before(name), *((name,) if self.module(name).trainable else ()))

    def learners_before(self, name: str) -> tuple[str, ...]:
        """What learns of the modules that feed the named one, directly or not."""
        return tuple(dict.fromkeys(each for source in self.sources(name) for each in self.learners(source)))

    @property
    def generators(self) -> tuple[str, ...]:
        """The modules that the backbone feeds."""
        return self.sinks(BACKBONE)

    def sent(self, name: str, stop: int) -> tuple[Layer, bool]:
        """The layer whose output goes on behind so many blocks of a module, and whether a gradient of it comes back.

        Behind no block of a generator stands what the backbone gives it: hidden states behind the last norm.
        """
        if (known := self._sent.get((name, stop))) is None:
            whose, last = (name, stop) if stop else (BACKBONE, len(self.module(BACKBONE).blocks))
            module = self.module(whose)
            index = module.sent_index(last)
            has_gradient = module.layers[index].trainable or self.input_gradients[whose][index]
            known = self._sent[name, stop] = module.sent(last), has_gradient
        return known

    @cached_property
    def _sent(self) -> dict[tuple[str, int], tuple[Layer, bool]]:
        """What `sent` has found: steps ask for the same again and again."""
        return {}

    @cached_property
    def derived(self) -> dict[str, Any]:
        """What follows from the model alone and is asked for again and again, by the name of what it is."""
        return {}

    def moved(self, name: str) -> tuple[Layer, bool]:
        """As `sent`, of the rows that move between a module and the backbone: those that an encoder gives it, or that a
        generator is given.
        """
        return self.sent(name, 0 if name in self.generators else len(self.module(name).blocks))

    def takes_whole(self, name: str, layer: Layer) -> bool:
        """Whether a layer has whole sequences, each on one of the ranks that share it: the embedding and the merge,
        where this is the user's own.
        """
        return self.merges and name == BACKBONE and layer.kind in ("embedding", "merge")

    def entries(self, source: str, sink: str) -> tuple[int, ...]:
        """The blocks of a sink before which it takes in a source's outputs, ascending: the first, and reentries; of
        outputs that are keys of these, reentries alone.
        """
        again = sorted(block for *edge, block in self.reentries if edge == [source, sink])
        reads_keys = self.module(sink).key_blocks.issuperset(again)
        return tuple(again) if again and reads_keys else (0, *again)

    @cached_property
    def input_gradients(self) -> Mapping[str, tuple[bool, ...]]:
        """Per module and layer, whether backward needs the gradient of the layer's input.

        It does if a layer before it is trainable: an earlier layer of the module, or any layer of a module that feeds
        it, directly or not (Cornstarch section 4.2). A frozen layer that needs none has no backward pass.
        """
        gradients: dict[str, tuple[bool, ...]] = {}
        has_trainable: dict[str, bool] = {}
        for module in self.modules:
            reached = any(has_trainable[source] for source in self.sources(module.name))
            gradients[module.name] = module.input_gradients(reached)
            has_trainable[module.name] = reached or module.trainable
        return gradients
