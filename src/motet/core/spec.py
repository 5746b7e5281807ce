"""What is to be computed: the modules of a multimodal model, the layers of each, what is frozen, and what feeds what.

A `ModelSpec` says nothing of where or how anything is computed. It is read off a model (`models/spec.py`) or written
down from shapes (`core/shapes.py`); costs, schedules and plans are made from it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import or_
from typing import Annotated

from pydantic import Field

from motet.core.errors import ArgumentError
from motet.core.limits import Count, NumLayers, Parameters


@dataclass(frozen=True)
class Attention:
    """Attention of one layer, over the rows of one item.

    width:    num_heads * head_dim, of queries. kv_width: num_kv_heads * head_dim (grouped queries: less than width).
    causal:   a row attends to itself and earlier rows of its item; else to all rows of its item.
    window:   0, or: a causal row attends to no more than `window` rows; without causality, rows attend within blocks
              (frames, windows) of `window` rows.
    density:  the share of those pairs that a mask leaves.
    """

    width: Count
    kv_width: Count
    causal: bool = False
    window: Count = 0
    density: Annotated[float, Field(ge=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.density <= 1:
            raise ArgumentError(f"density is {self.density}; a mask leaves a share of 0 to 1 of the pairs.")


@dataclass(frozen=True)
class Layer:
    """One layer. An item of length l has ceil(l / divisor) + extra_rows rows in it.

    kind:         what it is, e.g. "attention", "patches", "convolution", "merge", "projector", "embedding", "head";
                  layers of a module that are of a kind are timed as one.
    weights:      entries of the matrices that each row is multiplied with.
    parameters:   all that it holds, `weights` and what is no matrix product (norms, biases, look-up tables).
    output_width: elements of a row that it gives to the next layer, and so of what is sent where a pipeline is cut.
    activation_width:  elements of a row that its forward pass keeps for backward, its input included.
    divisor:      rows of the item that became one row here: convolutions with a stride, merged patches.
    trainable:    its parameters are updated.
    targets_only: it sees only the rows on which loss is taken (the output layer).
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


@dataclass(frozen=True)
class Stack:
    """`count` layers, one after the other, that are alike."""

    layer: Layer
    count: NumLayers = 1


@dataclass(frozen=True)
class Module:
    """An encoder with its projector, the backbone, or a generator with its projector.

    padded: the items of a microbatch are computed as if each were as long as the longest.
    """

    name: str
    stacks: tuple[Stack, ...]
    padded: bool = False

    @classmethod
    def of(cls, name: str, layers: Iterable[Layer], padded: bool = False) -> Module:
        """The module with these layers, in execution order; neighbours that are alike become one stack."""
        return cls(name, tuple(Stack(layer, len(list(alike))) for layer, alike in groupby(layers)), padded)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """In execution order."""
        return tuple(stack.layer for stack in self.stacks for _ in range(stack.count))

    @property
    def num_layers(self) -> int:
        return sum(stack.count for stack in self.stacks)

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """Places in `layers` of what a pipeline is cut into, and what its layers are counted in: each transformer layer
        is a block, the first one with all before it, and each with what follows it. Without any, the module is one.
        """
        starts = [place for place, layer in enumerate(self.layers) if layer.attention is not None]
        edges = [0, *starts[1:], self.num_layers]
        return tuple(range(first, stop) for first, stop in pairwise(edges))

    def block_layers(self, first: int, stop: int) -> range:
        """Places in `layers` of the blocks first ... stop - 1."""
        return range(self.blocks[first].start, self.blocks[stop - 1].stop) if stop > first else range(0)

    @property
    def num_parameters(self) -> int:
        return sum(stack.layer.parameters * stack.count for stack in self.stacks)

    @property
    def trainable(self) -> bool:
        return any(stack.layer.trainable for stack in self.stacks)

    def input_gradients(self, reached: bool = False) -> tuple[bool, ...]:
        """Per layer: whether backward must give a gradient for the layer's input, as an earlier layer is trainable.

        reached: something before the module is trainable.
        """
        return tuple(accumulate((layer.trainable for layer in self.layers), or_, initial=reached))[:-1]


@dataclass(frozen=True)
class ModelSpec:
    """modules: in an order in which they can run. edges: (from, to), the outputs of a module that another takes in."""

    name: str
    modules: tuple[Module, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        place = {module.name: number for number, module in enumerate(self.modules)}
        if len(place) < len(self.modules):
            raise ArgumentError(f"{self.name}: two modules have one name; each must have its own.")
        for source, sink in self.edges:
            for name in (source, sink):
                if name not in place:
                    raise ArgumentError(f"{self.name}: an edge names {name!r}; the modules are {', '.join(place)}.")
            if place[source] >= place[sink]:
                raise ArgumentError(f"{self.name}: {source!r} feeds {sink!r}, so it must come before it.")

    @cached_property
    def _by_name(self) -> Mapping[str, Module]:
        return {module.name: module for module in self.modules}

    def module(self, name: str) -> Module:
        """Raises ArgumentError for a name that is no module."""
        if name not in self._by_name:
            raise ArgumentError(f"{self.name} has no module {name!r}; it has {', '.join(self._by_name)}.")
        return self._by_name[name]

    @property
    def num_parameters(self) -> int:
        return sum(module.num_parameters for module in self.modules)

    @property
    def num_blocks(self) -> dict[str, int]:
        """Per module, of how many blocks it is made."""
        return {module.name: len(module.blocks) for module in self.modules}

    def sources(self, name: str) -> tuple[str, ...]:
        """The modules whose outputs the named one takes in."""
        return tuple(source for source, sink in self.edges if sink == name)

    def sinks(self, name: str) -> tuple[str, ...]:
        """The modules that take in the outputs of the named one."""
        return tuple(sink for source, sink in self.edges if source == name)

    @cached_property
    def input_gradients(self) -> Mapping[str, tuple[bool, ...]]:
        """Per module and layer: whether backward must give a gradient for the layer's input.

        It must where anything before the layer learns: an earlier layer of the module, or any layer of a module that
        feeds it (Cornstarch section 4.2). A layer that neither learns nor has to do this has no backward pass.
        """
        found: dict[str, tuple[bool, ...]] = {}
        learns: dict[str, bool] = {}
        for module in self.modules:
            reached = any(learns[source] for source in self.sources(module.name))
            found[module.name] = module.input_gradients(reached)
            learns[module.name] = reached or module.trainable
        return found
