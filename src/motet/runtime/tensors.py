"""The tensors that live between the actions of a step. An entry is removed by the last action that reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

PassKey: TypeAlias = tuple[int, int]
"""(stage, microbatch) of a forward pass."""


@dataclass
class Tensors:
    """Tensors by the forward pass that made the output.

    outputs:   outputs of forward passes, with their graph if a backward pass follows.
    arrived:   the same outputs at the stage that takes them in: detached, and requiring a gradient if the pass that
               made them has a backward pass.
    gradients: gradients of outputs, back at the stage that made the output.
    """

    outputs: dict[PassKey, Tensor] = field(default_factory=dict)
    arrived: dict[PassKey, Tensor] = field(default_factory=dict)
    gradients: dict[PassKey, Tensor] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no tensor is left, as after a whole step."""
        return not (self.outputs or self.arrived or self.gradients)
