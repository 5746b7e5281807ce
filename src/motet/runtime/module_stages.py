"""The stages of data-parallel training: a whole module each, which FSDP2 gathers and reduces by itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from motet.core.workload import BACKBONE
from motet.dispatch.batch import RankBatch
from motet.runtime.fsdp import sum_over_replicas
from motet.runtime.mesh import Mesh
from motet.runtime.stage import BackboneModule, EncoderModule, ExecutableStage, Model


class _ModuleStage:
    def __init__(self, module: EncoderModule | BackboneModule, mesh: Mesh) -> None:
        self._module, self._is_hybrid = module, mesh.is_hybrid

    def backward(self, output: Tensor, gradient: Tensor, *, is_last: bool) -> None:
        if self._is_hybrid:
            sum_over_replicas(self._module, is_last)
        output.backward(gradient)


class EncoderStage(_ModuleStage):
    """An encoder, on the items of its phase that the rank has."""

    def __init__(self, phase: str, module: EncoderModule, mesh: Mesh) -> None:
        super().__init__(module, mesh)
        self._phase, self._encoder = phase, module

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        return self._encoder(*batch.media[self._phase])


class BackboneStage(_ModuleStage):
    """The backbone, which gives the loss. totals: float64 [3]; the last two count loss and targets of the step."""

    def __init__(self, module: BackboneModule, mesh: Mesh, totals: Tensor) -> None:
        super().__init__(module, mesh)
        self._backbone, self._totals = module, totals

    def forward(self, batch: RankBatch, inputs: dict[str, Tensor]) -> Tensor:
        loss_sum, num_targets = self._backbone(batch.sequences, inputs)
        self._totals[1] += loss_sum.detach()
        self._totals[2] += num_targets
        return loss_sum


def module_stages(model: Model, modules: Mapping[int, str], mesh: Mesh, totals: Tensor) -> dict[int, ExecutableStage]:
    """By number. modules: names of this rank's stages. totals: of the step, for the backbone to add to."""
    return {
        number: BackboneStage(model.backbone, mesh, totals)
        if name == BACKBONE
        else EncoderStage(name, model.encoders[name], mesh)
        for number, name in modules.items()
    }
