"""A loss with the gradients of all weights, and how far it is from another."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Step(NamedTuple):
    """The mean loss over all targets, their number, and gradients by transformers' names."""

    loss: float
    num_targets: int
    gradients: dict[str, torch.Tensor]

    def distance(self, other: Step) -> tuple[float, float]:
        """The relative difference of losses; and the largest one of gradients, each as a whole.

        A gradient that is nothing beside all others (the bias of keys, which softmax takes out) is measured by them.
        Raises ValueError if one has other targets, or gradients of other weights.
        """
        if self.num_targets != other.num_targets:
            raise ValueError(f"{self.num_targets} targets, and {other.num_targets}")
        if self.gradients.keys() != other.gradients.keys():
            raise ValueError(f"gradients of {sorted(self.gradients.keys() ^ other.gradients.keys())} on one side alone")
        least = 1e-6 * max(float(gradient.norm()) for gradient in other.gradients.values())
        worst = max(
            float((mine - other.gradients[name]).norm()) / max(float(other.gradients[name].norm()), least)
            for name, mine in self.gradients.items()
        )
        return abs(self.loss - other.loss) / other.loss, worst
