"""The tensors that live between the actions of a step. An entry is removed by the last action that reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from motet.runtime.deferred import WeightProduct
    from motet.runtime.sections import SectionRun

PassKey: TypeAlias = tuple[int, int]
"""(stage, microbatch) of a forward pass."""


class Root(NamedTuple):
    """Where a backward pass begins: an output that requires a gradient, without its elements.

    Who takes the output in has them. Who made it would hold them until its backward pass, which does not read them.

    edge: into the output's graph. like: a tensor of its shape and type, without memory.
    """

    edge: GradientEdge
    like: Tensor
    device: torch.device

    @classmethod
    def of(cls, output: Tensor) -> Root:
        """Of an output with its graph. Raises RuntimeError for one that requires no gradient."""
        return cls(get_gradient_edge(output), torch.empty_like(output, device="meta"), output.device)

    def filled(self, value: float) -> Tensor:
        """A gradient of the output, each element of which is `value`."""
        return torch.full_like(self.like, value, device=self.device)


@dataclass
class Tensors:
    """Tensors by the forward pass that made the output.

    outputs:   what is to move: outputs of encoders' passes, and what the backbone gives a generator, by the generator's
               pass; without a graph.
    roots:     of outputs of forward passes that a backward pass follows.
    conditions: of what the backbone gives a generator, likewise, by the generator's pass.
    arrived:   outputs, and what generators are given, at the stage that takes them in; they require a gradient if
               the pass that made them has a backward pass.
    gradients: gradients of outputs, back at the stage that made the output.
    """

    outputs: dict[PassKey, Tensor] = field(default_factory=dict)
    roots: dict[PassKey, Root] = field(default_factory=dict)
    conditions: dict[PassKey, Root] = field(default_factory=dict)
    arrived: dict[PassKey, Tensor] = field(default_factory=dict)
    gradients: dict[PassKey, Tensor] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no tensor is left, as after a whole step."""
        return not (self.outputs or self.roots or self.conditions or self.arrived or self.gradients)


@dataclass
class StageTensors:
    """Tensors by (stage, microbatch) and module, where stages are parts of modules.

    inputs:           what arrived for a forward pass; a gradient is computed for what requires one.
    outputs:          what is there behind a stage, to be sent, without its graph.
    runs:             sections of a stage that wait for their backward pass.
    output_gradients: what arrived for a backward pass.
    input_gradients:  what is to be sent back.
    products:         gradients of weights that I has left for W.
    """

    inputs: dict[PassKey, dict[str, Tensor]] = field(default_factory=dict)
    outputs: dict[PassKey, dict[str, Tensor]] = field(default_factory=dict)
    runs: dict[PassKey, list[SectionRun]] = field(default_factory=dict)
    output_gradients: dict[PassKey, dict[str, Tensor]] = field(default_factory=dict)
    input_gradients: dict[PassKey, dict[str, Tensor]] = field(default_factory=dict)
    products: dict[PassKey, list[WeightProduct]] = field(default_factory=dict)
