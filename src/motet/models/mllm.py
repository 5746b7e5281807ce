"""The multimodal model: encoders with their projectors, the backbone that reads their rows, and generators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from motet.core.arrays import Int64Array
from motet.core.workload import BACKBONE
from motet.models.backbone import Backbone
from motet.models.contract import Sequences
from motet.models.generator import GeneratorModule
from motet.models.module import ModalityModule
from motet.models.noise_schedule import SamplingConfig


class MLLM(nn.Module):
    """Encoders by name, the backbone that reads their rows, generators by name. The model knows nothing of ranks."""

    def __init__(
        self,
        encoders: dict[str, ModalityModule],
        backbone: Backbone,
        generators: dict[str, GeneratorModule] | None = None,
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.backbone = backbone
        backbone.encoders = tuple(encoders)
        self.generators = nn.ModuleDict(generators or {})

    @property
    def measured(self) -> dict[str, ModalityModule | GeneratorModule]:
        """All modules but the backbone: those that say of items how long they are (`lengths`, `num_tokens`)."""
        return {**self.encoders, **self.generators}

    def forward(self, sequences: Sequences, media: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, int]:
        """The whole model in one process; every distributed step must equal it.

        media: per encoder (values, sizes), items in their order in `sequences`. An encoder that is left out has no
        items. Returns (loss summed over targets, number of targets), of tokens alone.
        """
        loss_sum, num_targets, *_ = self.backbone(sequences, self._features(media))
        return loss_sum, num_targets

    def losses(
        self, sequences: Sequences, media: dict[str, tuple[Tensor, Tensor]], keys: dict[str, Int64Array]
    ) -> dict[str, tuple[Tensor, int]]:
        """As `forward`, of a model with generators: the backbone and each generator -> (sum of the loss, its count).

        The count of a generator is the rows of its items. keys: generator -> int64 [num_items], as `RankBatch.draws`.
        """
        loss_sum, num_targets, conditions = self.backbone(sequences, self._features(media))
        losses = {BACKBONE: (loss_sum, num_targets)}
        for name, module in self.generators.items():
            values, sizes = media.get(name, _NOTHING)
            loss = module(values, sizes, conditions[name], keys.get(name), _turn_rows(sequences, name))
            losses[name] = loss, int(sizes.prod(dim=1).sum())
        return losses

    @torch.no_grad()
    def make(
        self,
        sequences: Sequences,
        media: dict[str, tuple[Tensor, Tensor]],
        sizes: dict[str, Tensor],
        keys: dict[str, Int64Array],
        sampling: SamplingConfig | None = None,
    ) -> dict[str, Tensor]:
        """What generators make at their places in the sequences: generator -> [sum(rows), row_dim].

        sequences, media: as of `forward`. sizes: generator -> int64 [num_items, size_dim], of at least one item each.
        keys: as of `losses`. sampling: None: as each generator was built with. For a model in eval mode.
        """
        _, _, conditions = self.backbone(sequences, self._features(media))
        return {
            name: self.generators[name].sample(
                of_items, conditions[name], keys[name], sampling, counts=_turn_rows(sequences, name)
            )
            for name, of_items in sizes.items()
        }

    def _features(self, media: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {name: module(*media.get(name, _NOTHING)) for name, module in self.encoders.items()}


def _turn_rows(sequences: Sequences, name: str) -> Int64Array | None:
    rows: Int64Array | None = getattr(sequences, "turn_rows", {}).get(name)
    return rows


_NOTHING = (torch.empty(0, 0), torch.empty(0, 1, dtype=torch.int64))
"""The values and sizes of no item."""
