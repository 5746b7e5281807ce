"""The multimodal model: encoders with their projectors, and the backbone that reads their rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from motet.models.backbone import Backbone
from motet.models.contract import Sequences
from motet.models.module import ModalityModule


class MLLM(nn.Module):
    """Encoders by name, and the backbone that reads their rows. The model knows nothing of ranks."""

    def __init__(self, encoders: dict[str, ModalityModule], backbone: Backbone) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.backbone = backbone

    def forward(self, sequences: Sequences, media: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, int]:
        """The whole model in one process; every distributed step must equal it.

        media: per encoder (values, sizes), items in their order in `sequences`. An encoder that is left out has no
        items. Returns (loss summed over targets, number of targets).
        """
        nothing = (torch.empty(0, 0), torch.empty(0, 1, dtype=torch.int64))
        features = {name: module(*media.get(name, nothing)) for name, module in self.encoders.items()}
        return self.backbone(sequences, features)
