"""The stages of data-parallel training: each is a whole module, whose parameters FSDP2 gathers and reduces."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.runtime.fsdp import sum_over_shard_groups
from motet.runtime.mesh import Mesh
from motet.runtime.stage import BackboneModule, EncoderModule, ExecutableStage, Model


class _ModuleStage:
    def __init__(self, module: EncoderModule | BackboneModule, mesh: Mesh) -> None:
        self._module, self._is_hybrid = module, mesh.is_hybrid

    def backward(self, output: Tensor, gradient: Tensor, *, is_last: bool) -> None:
        if self._is_hybrid:
            sum_over_shard_groups(self._module, is_last)
        output.backward(gradient)


class EncoderStage(_ModuleStage):
    """An encoder with its projector; it computes on this rank's items of the phase."""

    def __init__(self, phase: str, module: EncoderModule, mesh: Mesh) -> None:
        super().__init__(module, mesh)
        self._phase, self._encoder = phase, module

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        return self._encoder(*batch.media[self._phase])


class BackboneStage(_ModuleStage):
    """The backbone. It adds the loss and the number of targets to totals[1] and totals[2] (totals: float64 [3])."""

    def __init__(self, module: BackboneModule, mesh: Mesh, totals: Tensor) -> None:
        super().__init__(module, mesh)
        self._backbone, self._totals = module, totals

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        loss_sum, num_targets = self._backbone(batch.sequences, inputs)
        self._totals[1] += loss_sum.detach()
        self._totals[2] += num_targets
        return loss_sum


def module_stages(model: Model, modules: Mapping[int, str], mesh: Mesh, totals: Tensor) -> dict[int, ExecutableStage]:
    """Stage number -> stage. modules: stage number -> module, for this rank. totals: as in `BackboneStage`."""
    return {
        number: BackboneStage(model.backbone, mesh, totals)
        if name == BACKBONE
        else EncoderStage(name, model.encoders[name], mesh)
        for number, name in modules.items()
    }
