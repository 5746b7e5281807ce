"""What lives between the actions of a step, by stage and microbatch; whatever is taken in last is let go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

PassKey: TypeAlias = tuple[int, int]
"""Stage and microbatch."""


@dataclass
class Tensors:
    """outputs: of forward passes, each with its graph where a backward pass comes.
    arrived: outputs as the stages that they feed take them in, by the stage that made them: leaves of their own, which
             require a gradient where the stage that made them has a backward pass.
    gradients: of outputs, back at the stages that made them.
    """

    outputs: dict[PassKey, Tensor] = field(default_factory=dict)
    arrived: dict[PassKey, Tensor] = field(default_factory=dict)
    gradients: dict[PassKey, Tensor] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.outputs or self.arrived or self.gradients)
